// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"context"
	"crypto/tls"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// Password is that of every user of an etcd with WithAuth.
const Password = "secret"

// WithAuth has the server know the users of a Cilium cluster: root, admin-<cluster> (all rights), local-<cluster> (reads
// the cache) and remote (reads what other clusters may). They log in with Password or, where the server speaks TLS, by
// the common name of their certificate.
func WithAuth(cluster string) EtcdOption {
	return func(_ testing.TB, e *Etcd) { e.auth = cluster }
}

// EnableAuth does what WithAuth does to a server that runs.
func (e *Etcd) EnableAuth(t testing.TB, cluster string) {
	t.Helper()
	e.auth = cluster
	e.enableAuth(t)
}

// RemoteMayRead are the prefixes that the role remote may read, beside the key cilium/cluster-config/<cluster>.
func RemoteMayRead(cluster string) []string {
	return []string{"cilium/.heartbeat", "cilium/state/", "cilium/synced/" + cluster + "/"}
}

func (e *Etcd) enableAuth(t testing.TB) {
	t.Helper()
	e.do(t, "enable authentication", func(ctx context.Context) error {
		c := e.client
		local := []string{"cilium/.heartbeat", "cilium/cache/", "cilium/cluster-config/", "cilium/synced/"}
		steps := []func() error{
			func() error { return addUser(ctx, c, "root", "root") },
			func() error { return addUser(ctx, c, "admin-"+e.auth, "root") },
			func() error { return addReader(ctx, c, "local", local...) },
			func() error { return addUser(ctx, c, "local-"+e.auth, "local") },
			func() error { return addReader(ctx, c, "remote", RemoteMayRead(e.auth)...) },
			func() error { return addUser(ctx, c, "remote", "remote") },
			func() error {
				_, err := c.RoleGrantPermission(ctx, "remote", "cilium/cluster-config/"+e.auth, "", readOnly)
				return err
			},
			func() error { _, err := c.AuthEnable(ctx); return err },
		}
		for _, step := range steps {
			if err := step(); err != nil {
				return err
			}
		}
		return nil
	})
	e.client.Close()
	e.client = e.dialAsRoot(t)
}

const readOnly = clientv3.PermissionType(clientv3.PermRead)

func addUser(ctx context.Context, c *clientv3.Client, name, role string) error {
	if role == "root" {
		_, _ = c.RoleAdd(ctx, role) // a second time it is there already
	}
	if _, err := c.UserAdd(ctx, name, Password); err != nil {
		return err
	}
	_, err := c.UserGrantRole(ctx, name, role)
	return err
}

func addReader(ctx context.Context, c *clientv3.Client, role string, prefixes ...string) error {
	if _, err := c.RoleAdd(ctx, role); err != nil {
		return err
	}
	for _, p := range prefixes {
		if _, err := c.RoleGrantPermission(ctx, role, p, clientv3.GetPrefixRangeEnd(p), readOnly); err != nil {
			return err
		}
	}
	return nil
}

// dialAsRoot returns a client over the network, as the one inside the process has no name to log in with.
func (e *Etcd) dialAsRoot(t testing.TB) *clientv3.Client {
	t.Helper()
	cfg := clientv3.Config{
		Endpoints: []string{e.Endpoint()}, Username: "root", Password: Password,
		DialTimeout: etcdStartTimeout, Logger: zap.NewNop(),
	}
	if e.tls != nil {
		cert, err := tls.LoadX509KeyPair(e.tls.cert(), e.tls.key())
		if err != nil {
			t.Fatal(err)
		}
		cfg.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}
	}
	c, err := clientv3.New(cfg)
	if err != nil {
		t.Fatalf("log in at etcd %s as root: %v", e.addr, err)
	}
	return c
}

// Raise has the server refuse writes for want of space until Disarm.
func (e *Etcd) Raise(t testing.TB) { e.alarm(t, true) }

// Disarm ends what Raise began.
func (e *Etcd) Disarm(t testing.TB) { e.alarm(t, false) }

func (e *Etcd) alarm(t testing.TB, on bool) {
	t.Helper()
	action := pb.AlarmRequest_DEACTIVATE
	if on {
		action = pb.AlarmRequest_ACTIVATE
	}
	e.do(t, "alarm", func(ctx context.Context) error {
		_, err := e.server.Server.Alarm(ctx, &pb.AlarmRequest{
			Action: action, MemberID: uint64(e.server.Server.MemberID()), Alarm: pb.AlarmType_NOSPACE,
		})
		return err
	})
}
