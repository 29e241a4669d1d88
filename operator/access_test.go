// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
)

// securedEtcd is the etcd of cluster east, which knows its users by their certificates.
type securedEtcd struct {
	*testutil.Etcd
	ca  *testutil.CA
	dir string
}

func startSecuredEtcd(t *testing.T) *securedEtcd {
	t.Helper()
	ca := testutil.NewCA(t, "mesh-ca")
	return &securedEtcd{Etcd: testutil.StartEtcd(t, testutil.WithTLS(ca)), ca: ca, dir: t.TempDir()}
}

// certify writes the certificate of a user.
func (e *securedEtcd) certify(t *testing.T, user string) (cert, key string) {
	t.Helper()
	cert, key = filepath.Join(e.dir, user+".crt"), filepath.Join(e.dir, user+".key")
	certPEM, keyPEM := e.ca.Issue(t, testutil.Certificate{CommonName: user})
	testutil.MustWriteFile(t, cert, certPEM)
	testutil.MustWriteFile(t, key, keyPEM)
	return cert, key
}

// config is that of a client who is a user.
func (e *securedEtcd) config(t *testing.T, user string) kvstore.Config {
	t.Helper()
	cfg := etcdConfig(e.Endpoint())
	cfg.CertFile, cfg.KeyFile = e.certify(t, user)
	cfg.CAFile = filepath.Join(e.dir, "ca.crt")
	testutil.MustWriteFile(t, cfg.CAFile, e.ca.PEM)
	return cfg
}

// as returns etcd's own client as a user.
func (e *securedEtcd) as(t *testing.T, user string) *clientv3.Client {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(e.certify(t, user))
	if err != nil {
		t.Fatal(err)
	}
	c, err := clientv3.New(clientv3.Config{
		Endpoints: []string{e.Endpoint()}, DialTimeout: testTimeout, Logger: zap.NewNop(),
		TLS: &tls.Config{Certificates: []tls.Certificate{pair}, InsecureSkipVerify: true, MinVersion: tls.VersionTLS13},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// initialise does what etcd-init does.
func (e *securedEtcd) initialise(t *testing.T, cfg AccessConfig) []kvstore.AccessChange {
	t.Helper()
	c, err := kvstore.Dial(e.config(t, "admin-east"), silent)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	want, err := NewAccess(cfg)
	if err != nil {
		t.Fatal(err)
	}
	plan, err := c.PlanAccess(t.Context(), want)
	if err == nil {
		_, err = c.ApplyAccess(t.Context(), plan)
	}
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

// keysOfEast are one of each kind that a cluster's etcd has, and those beside that a prefix too short would let in.
var keysOfEast = []string{
	"a", "cilium", "cilium/.heartbeat", "cilium/.heartbeats", "cilium/.initlock/1/2",
	"cilium/cache/ip/v1/west/10.2.0.1", "cilium/cache/nodes/v1/west/n1",
	"cilium/cluster-config/east", "cilium/cluster-config/east2", "cilium/cluster-config/west",
	"cilium/kvstoremesh-lock/1",
	"cilium/state", "cilium/state/identities/v1/id/65793", "cilium/state/ip/v1/default/10.1.0.1", "cilium/state/nodes/v1/east/n1",
	"cilium/state0", "cilium/synced/east/cilium/state/nodes/v1", "cilium/synced/east2/x", "cilium/synced/west/cilium/cache/nodes/v1",
	"cilium0", "weft/operator/term", "weft/other", "z",
}

// mayRead and mayWrite are the rights of each user of cluster east, told once more: prefixes, or a key with "$" at its end.
var (
	mayRead = map[string][]string{
		"local-east":    {"cilium/.heartbeat", "cilium/cache/", "cilium/cluster-config/", "cilium/synced/"},
		"remote-west":   {"cilium/.heartbeat", "cilium/state/", "cilium/cluster-config/east$", "cilium/synced/east/"},
		"agent-east":    {"cilium/"},
		"operator-east": {"cilium/", "weft/operator/"},
	}
	mayWrite = map[string][]string{
		"agent-east":    {"cilium/state/", "cilium/cluster-config/east$", "cilium/synced/east/"},
		"operator-east": {"cilium/", "weft/operator/"},
	}
)

func covered(key string, by []string) bool {
	return slices.ContainsFunc(by, func(p string) bool {
		if exact, ok := strings.CutSuffix(p, "$"); ok {
			return key == exact
		}
		return strings.HasPrefix(key, p)
	})
}

// deniedWithin runs a call, and reports whether etcd let it through, refused it for want of a right, or failed otherwise.
func deniedWithin(t *testing.T, call func(context.Context) error) (denied bool, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	err = call(ctx)
	if err == nil {
		return false, nil
	}
	if errors.Is(err, rpctypes.ErrPermissionDenied) || errors.Is(err, rpctypes.ErrUserNotFound) || status.Code(err) == codes.PermissionDenied || strings.Contains(err.Error(), "permission denied") || strings.Contains(err.Error(), "user name not found") {
		return true, nil
	}
	return false, err
}

// watchOnce opens a watch and returns why it was refused.
func watchOnce(ctx context.Context, c *clientv3.Client, key string, options ...clientv3.OpOption) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	resp, ok := <-c.Watch(ctx, key, append(options, clientv3.WithCreatedNotify())...)
	if !ok {
		return fmt.Errorf("watch %s: it ended", key)
	}
	return resp.Err()
}

// keyReads are the ways in which a key's value can be found out.
func keyReads(c *clientv3.Client, key string) map[string]func(context.Context) error {
	get := clientv3.OpGet(key)
	return map[string]func(context.Context) error{
		"get":   func(ctx context.Context) error { _, err := c.Get(ctx, key); return err },
		"range": func(ctx context.Context) error { _, err := c.Get(ctx, key, clientv3.WithRange(key+"\x00")); return err },
		"count": func(ctx context.Context) error { _, err := c.Get(ctx, key, clientv3.WithCountOnly()); return err },
		"old": func(ctx context.Context) error {
			_, err := c.Get(ctx, key, clientv3.WithRev(1))
			return compactedIsFine(err)
		},
		"serial":   func(ctx context.Context) error { _, err := c.Get(ctx, key, clientv3.WithSerializable()); return err },
		"txn":      func(ctx context.Context) error { _, err := c.Txn(ctx).Then(get).Commit(); return err },
		"txn else": func(ctx context.Context) error { _, err := c.Txn(ctx).Else(get).Commit(); return err },
		"nested txn": func(ctx context.Context) error {
			_, err := c.Txn(ctx).Then(clientv3.OpTxn(nil, []clientv3.Op{clientv3.OpTxn(nil, nil, []clientv3.Op{get})}, nil)).Commit()
			return err
		},
		"compare": func(ctx context.Context) error {
			_, err := c.Txn(ctx).If(clientv3.Compare(clientv3.Value(key), "=", "x")).Commit()
			return err
		},
		"nested compare": func(ctx context.Context) error {
			as := []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(key), ">", 0)}
			_, err := c.Txn(ctx).Then(clientv3.OpTxn(as, nil, nil)).Commit()
			return err
		},
		"watch": func(ctx context.Context) error { return watchOnce(ctx, c, key) },
		"watch a range": func(ctx context.Context) error {
			return watchOnce(ctx, c, key, clientv3.WithRange(key+"\x00"), clientv3.WithPrevKV())
		},
	}
}

func compactedIsFine(err error) error {
	if errors.Is(err, rpctypes.ErrCompacted) || errors.Is(err, rpctypes.ErrFutureRev) {
		return nil
	}
	return err
}

// keyWrites are the ways in which a key can be changed.
func keyWrites(c *clientv3.Client, key string, lease clientv3.LeaseID) map[string]func(context.Context) error {
	put := clientv3.OpPut(key, "v")
	return map[string]func(context.Context) error{
		"put":       func(ctx context.Context) error { _, err := c.Put(ctx, key, "v"); return err },
		"put lease": func(ctx context.Context) error { _, err := c.Put(ctx, key, "v", clientv3.WithLease(lease)); return err },
		"txn put":   func(ctx context.Context) error { _, err := c.Txn(ctx).Then(put).Commit(); return err },
		"nested put": func(ctx context.Context) error {
			_, err := c.Txn(ctx).Then(clientv3.OpTxn(nil, []clientv3.Op{put}, nil)).Commit()
			return err
		},
		"delete": func(ctx context.Context) error {
			if _, err := c.Delete(ctx, key, clientv3.WithRange(key+"\x00")); err != nil {
				return err
			}
			_, err := c.Put(ctx, key, "v")
			return err
		},
	}
}

// Every user of a cluster may read and write what its role grants, in whatever way, and nothing else.
//
// mechanism: Q1
// lesson: E10
func TestAccessIsNoMore(t *testing.T) {
	etcd := startSecuredEtcd(t)
	for _, key := range keysOfEast {
		etcd.Put(t, key, "v")
	}
	etcd.initialise(t, AccessConfig{Cluster: "east", Remotes: []string{"west", "north"}})
	for user := range mayRead {
		t.Run(user, func(t *testing.T) {
			t.Parallel()
			c := etcd.as(t, user)
			lease, err := c.Grant(t.Context(), 600)
			if err != nil {
				t.Fatal(err)
			}
			check := func(what, key string, may bool, call func(context.Context) error) {
				t.Helper()
				denied, err := deniedWithin(t, call)
				if err != nil || denied == may {
					t.Errorf("%s of %s: denied %t, want %t (%v)", what, key, denied, !may, err)
				}
			}
			for _, key := range keysOfEast {
				for what, call := range keyReads(c, key) {
					check(what, key, covered(key, mayRead[user]), call)
				}
				for what, call := range keyWrites(c, key, lease.ID) {
					check(what, key, covered(key, mayWrite[user]), call)
				}
			}
		})
	}
}

// rangesBeyond begin with what a remote cluster may read, or are about to, and go on beyond.
func rangesBeyond(c *clientv3.Client) map[string]func(context.Context) error {
	calls := make(map[string]func(context.Context) error)
	for name, r := range map[string]struct {
		key     string
		options []clientv3.OpOption
	}{
		"all keys":                      {"", []clientv3.OpOption{clientv3.WithPrefix()}},
		"all keys from the first":       {"\x00", []clientv3.OpOption{clientv3.WithFromKey()}},
		"from the granted on":           {"cilium/state/", []clientv3.OpOption{clientv3.WithFromKey()}},
		"the tree":                      {"cilium/", []clientv3.OpOption{clientv3.WithPrefix()}},
		"the granted and its neighbour": {"cilium/state", []clientv3.OpOption{clientv3.WithPrefix()}},
		"one key too many":              {"cilium/state/", []clientv3.OpOption{clientv3.WithRange("cilium/state0\x00")}},
		"across two grants":             {"cilium/state/", []clientv3.OpOption{clientv3.WithRange("cilium/synced/east0")}},
		"the other clusters' configs":   {"cilium/cluster-config/", []clientv3.OpOption{clientv3.WithPrefix()}},
		"a config's namesakes":          {"cilium/cluster-config/east", []clientv3.OpOption{clientv3.WithPrefix()}},
		"the canaries of all":           {"cilium/synced/", []clientv3.OpOption{clientv3.WithPrefix()}},
	} {
		get := clientv3.OpGet(r.key, r.options...)
		calls["get "+name] = func(ctx context.Context) error { _, err := c.Do(ctx, get); return err }
		calls["count "+name] = func(ctx context.Context) error {
			_, err := c.Get(ctx, r.key, append(r.options, clientv3.WithCountOnly(), clientv3.WithLimit(1))...)
			return err
		}
		calls["get in a transaction "+name] = func(ctx context.Context) error { _, err := c.Txn(ctx).Then(get).Commit(); return err }
		calls["watch "+name] = func(ctx context.Context) error { return watchOnce(ctx, c, r.key, r.options...) }
		calls["delete "+name] = func(ctx context.Context) error { _, err := c.Delete(ctx, r.key, r.options...); return err }
		calls["compare "+name] = func(ctx context.Context) error {
			all := clientv3.Compare(clientv3.CreateRevision(cmp.Or(r.key, "a")), ">", 0).WithRange("cilium/synced/west0")
			_, err := c.Txn(ctx).If(all).Commit()
			return err
		}
	}
	return calls
}

// leaseCalls are what can be done to the lease of somebody's key, and with leases.
func leaseCalls(c *clientv3.Client, foreign clientv3.LeaseID) map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"revoke": func(ctx context.Context) error { _, err := c.Revoke(ctx, foreign); return err },
		"read with keys": func(ctx context.Context) error {
			_, err := c.TimeToLive(ctx, foreign, clientv3.WithAttachedKeys())
			return err
		},
		"put a granted key under it": func(ctx context.Context) error {
			_, err := c.Put(ctx, "cilium/state/x", "v", clientv3.WithLease(foreign))
			return err
		},
		"list":  func(ctx context.Context) error { _, err := c.Leases(ctx); return err },
		"renew": func(ctx context.Context) error { _, err := c.KeepAliveOnce(ctx, foreign); return err },
		"read":  func(ctx context.Context) error { _, err := c.TimeToLive(ctx, foreign); return err },
		"grant": func(ctx context.Context) error { _, err := c.Grant(ctx, 600); return err },
	}
}

// adminCalls are what only an administrator should do.
func adminCalls(c *clientv3.Client, endpoint string) map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"member list": func(ctx context.Context) error { _, err := c.MemberList(ctx); return err },
		"member add": func(ctx context.Context) error {
			_, err := c.MemberAddAsLearner(ctx, []string{"http://127.0.0.1:1"})
			return err
		},
		"member remove": func(ctx context.Context) error { _, err := c.MemberRemove(ctx, 1); return err },
		"alarm list":    func(ctx context.Context) error { _, err := c.AlarmList(ctx); return err },
		"alarm disarm": func(ctx context.Context) error {
			_, err := c.AlarmDisarm(ctx, &clientv3.AlarmMember{MemberID: 1, Alarm: pb.AlarmType_NOSPACE})
			return err
		},
		"status":     func(ctx context.Context) error { _, err := c.Status(ctx, endpoint); return err },
		"hash":       func(ctx context.Context) error { _, err := c.HashKV(ctx, endpoint, 0); return err },
		"defragment": func(ctx context.Context) error { _, err := c.Defragment(ctx, endpoint); return err },
		"snapshot": func(ctx context.Context) error {
			r, err := c.Snapshot(ctx)
			if err != nil {
				return err
			}
			defer r.Close()
			_, err = r.Read(make([]byte, 1))
			return err
		},
		"compact":       func(ctx context.Context) error { _, err := c.Compact(ctx, 1); return err },
		"move leader":   func(ctx context.Context) error { _, err := c.MoveLeader(ctx, 1); return err },
		"disable auth":  func(ctx context.Context) error { _, err := c.AuthDisable(ctx); return err },
		"auth status":   func(ctx context.Context) error { _, err := c.AuthStatus(ctx); return err },
		"user list":     func(ctx context.Context) error { _, err := c.UserList(ctx); return err },
		"user add":      func(ctx context.Context) error { _, err := c.UserAdd(ctx, "x", "x"); return err },
		"give oneself":  func(ctx context.Context) error { _, err := c.UserGrantRole(ctx, "remote-west", "root"); return err },
		"password":      func(ctx context.Context) error { _, err := c.UserChangePassword(ctx, "root", "x"); return err },
		"read the root": func(ctx context.Context) error { _, err := c.UserGet(ctx, "root"); return err },
		"role list":     func(ctx context.Context) error { _, err := c.RoleList(ctx); return err },
		"read a role":   func(ctx context.Context) error { _, err := c.RoleGet(ctx, "agent"); return err },
		"widen a role": func(ctx context.Context) error {
			_, err := c.RoleGrantPermission(ctx, "remote", "a", "z", clientv3.PermissionType(clientv3.PermReadWrite))
			return err
		},
	}
}

// letThrough is what etcd itself lets everybody do whose certificate it trusts, whatever the role, and even if it knows nobody
// of that name: docs/etcd.md names it.
var letThrough = []string{"alarm list", "auth status", "grant", "member list", "read", "status"}

// A remote cluster gets no key beyond what it may read, in no range; it cannot touch what belongs to others, their leases
// included; and it administers nothing. So it is for clusters that etcd does not know.
//
// mechanism: Q1
// lesson: E10
func TestAccessOfRemotes(t *testing.T) {
	etcd := startSecuredEtcd(t)
	for _, key := range keysOfEast {
		etcd.Put(t, key, "v")
	}
	lease, err := etcd.Client().Grant(t.Context(), 3600)
	if err == nil {
		_, err = etcd.Client().Put(t.Context(), "cilium/cache/leased", "v", clientv3.WithLease(lease.ID))
	}
	if err != nil {
		t.Fatal(err)
	}
	etcd.initialise(t, AccessConfig{Cluster: "east", Remotes: []string{"west"}})
	for _, user := range []string{"remote-west", "remote-north", "west", "remote"} {
		c := etcd.as(t, user)
		var through []string
		for _, calls := range []map[string]func(context.Context) error{rangesBeyond(c), leaseCalls(c, lease.ID), adminCalls(c, etcd.Endpoint())} {
			for what, call := range calls {
				denied, err := deniedWithin(t, call)
				switch {
				case err != nil:
					t.Errorf("%s: %s: %v", user, what, err)
				case !denied:
					through = append(through, what)
				}
			}
		}
		slices.Sort(through)
		if !slices.Equal(through, letThrough) {
			t.Errorf("etcd lets %s do: %v\nwant it to: %v", user, through, letThrough)
		}
	}
}

// Done twice, nothing is done; a cluster that is no longer named is shut out at once, and the administrator goes on.
func TestAccessFollows(t *testing.T) {
	etcd := startSecuredEtcd(t)
	cfg := AccessConfig{Cluster: "east", Remotes: []string{"west", "north", "east", "west"}}
	etcd.initialise(t, cfg)
	if again := etcd.initialise(t, cfg); len(again) != 0 {
		t.Errorf("done again: %v", again)
	}
	west := etcd.as(t, "remote-west")
	if _, err := west.Get(t.Context(), "cilium/cluster-config/east"); err != nil {
		t.Fatal(err)
	}
	cfg.Remotes, cfg.SharedUser = []string{"north"}, true
	var done []string
	for _, x := range etcd.initialise(t, cfg) {
		done = append(done, x.String())
	}
	if got, want := strings.Join(done, "; "), "add user remote; give role remote to user remote; delete user remote-west"; got != want {
		t.Errorf("done: %s\nwant  %s", got, want)
	}
	denied, err := deniedWithin(t, func(ctx context.Context) error { _, err := west.Get(ctx, "cilium/cluster-config/east"); return err })
	if err != nil || !denied {
		t.Errorf("a cluster that is no longer named: denied %t, %v", denied, err)
	}
	if _, err := etcd.as(t, "remote").Get(t.Context(), "cilium/state/", clientv3.WithPrefix()); err != nil {
		t.Error(err)
	}
	if _, err := NewAccess(AccessConfig{Cluster: "east", Remotes: []string{"no good"}}); err == nil {
		t.Error("a name that no cluster can have is taken")
	}
	if _, err := NewAccess(AccessConfig{Cluster: "Bad"}); err == nil {
		t.Error("a name that no cluster can have is taken")
	}
}
