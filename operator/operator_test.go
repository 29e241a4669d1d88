// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
)

// mechanism: K5
func TestName(t *testing.T) {
	one, two := NewName("host"), NewName("host")
	if one == two || !regexp.MustCompile(`^host-[a-z0-9]{10}$`).MatchString(one) {
		t.Errorf("names %s and %s", one, two)
	}
}

// Of three replicas one leads, and the heartbeat is written; when it ends the next one leads without waiting for its lease.
//
// mechanism: K3 K5 N2
func TestElection(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	var all []*replica
	for i := range 3 {
		all = append(all, startReplica(t, fmt.Sprintf("replica-%d", i), etcd.Endpoint(), func(c *Config) {
			c.Election.LeaseDuration = time.Hour // nobody waits for it
			c.Duties = []Duty{NewHeartbeat(c.LeaseTTL)}
		}))
	}
	beats := make(map[string]bool)
	for len(all) > 0 {
		leader := awaitLeader(t, all...)
		for _, r := range all {
			testutil.Eventually(t, testTimeout, func() error {
				if s := r.Status(); s.Leader.Name != leader.cfg.Name || s.Leads != (r == leader) {
					return fmt.Errorf("%s believes that %q leads, not %s", r.cfg.Name, s.Leader.Name, leader.cfg.Name)
				}
				return nil
			})
			<-r.Ready()
		}
		testutil.Eventually(t, testTimeout, func() error {
			if s := leader.Status().Duties[0]; s.Runs == 0 || s.Errors > 0 || !s.Running {
				return fmt.Errorf("no heartbeat: %+v", s)
			}
			return nil
		})
		kv, ok := etcd.Get(t, identity.HeartbeatKey)
		if _, err := time.Parse(time.RFC3339, kv); !ok || err != nil {
			t.Errorf("heartbeat %q", kv)
		}
		beats[kv] = true
		if err := leader.stop(); err != nil {
			t.Error(err)
		}
		var others []*replica
		for _, r := range all {
			if r != leader {
				others = append(others, r)
			}
		}
		all = others
	}
}

// writes is a duty that writes what it is told to.
type writes struct {
	Record
	terms chan *Term
}

func (w *writes) String() string { return "writes" }

func (w *writes) Run(ctx context.Context, t *Term) error {
	w.terms <- t
	<-ctx.Done()
	return nil
}

// A leader that another one has succeeded, whatever it knows of that, writes nothing: not with a transaction, not with a
// writer, and it deletes nothing.
//
// mechanism: N2
// lesson: O2 O3
func TestFence(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	first, second := &writes{terms: make(chan *Term, 1)}, &writes{terms: make(chan *Term, 1)}
	lead := func(name string, w *writes) (*replica, *Term) {
		r := startReplica(t, name, etcd.Endpoint(), func(c *Config) {
			c.Election = Election{By: ElectNone}
			c.Duties = []Duty{w}
		})
		select {
		case term := <-w.terms:
			return r, term
		case <-time.After(testTimeout):
			t.Fatalf("%s does not lead", name)
			return nil, nil
		}
	}
	former, old := lead("former", first)
	put := kvstore.Op{Kind: kvstore.OpPut, Key: "k", Value: []byte("former")}
	if err := old.Txn(t.Context(), put); err != nil {
		t.Fatal(err)
	}
	client, err := kvstore.Dial(etcdConfig(etcd.Endpoint()), silent)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	stale := *old
	stale.client = client // that of the term ends with it

	_, term := lead("present", second)
	kv, _, err := client.Get(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	if err := stale.Txn(t.Context(), put); !errors.Is(err, kvstore.ErrFenced) {
		t.Errorf("a transaction: %v", err)
	}
	if n, err := stale.Delete(t.Context(), kv); n != 0 || !errors.Is(err, kvstore.ErrFenced) {
		t.Errorf("a deletion: %d, %v", n, err)
	}
	w := stale.Writer("test")
	w.Set("w", []byte("former"))
	if err := w.Run(t.Context()); !errors.Is(err, kvstore.ErrFenced) {
		t.Errorf("a writer: %v", err)
	}
	if _, ok := etcd.Get(t, "w"); ok {
		t.Error("a writer has written")
	}
	testutil.Eventually(t, testTimeout, func() error {
		select {
		case <-former.done:
			return nil
		default:
			return errors.New("the former leader goes on")
		}
	})
	if !errors.Is(former.err, errSucceeded) || !strings.Contains(former.err.Error(), "present") {
		t.Errorf("the former leader ends with %v", former.err)
	}
	if err := term.Txn(t.Context(), kvstore.Op{Kind: kvstore.OpPut, Key: "k", Value: []byte("present")}); err != nil {
		t.Error(err)
	}
	if n, err := term.Delete(t.Context(), kv); n != 0 || err != nil {
		t.Errorf("a key that was written since: %d, %v", n, err)
	}
}
