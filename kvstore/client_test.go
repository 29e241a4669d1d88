// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

func TestClientGetsAndLists(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Put(t, "p/a", "1")
	e.Put(t, "p/b", "2")
	e.Put(t, "q", "3")
	c := mustDial(t, e)
	got, ok, err := c.Get(t.Context(), "p/b")
	if err != nil || !ok || got.Key != "p/b" || string(got.Value) != "2" || got.Revision != 3 {
		t.Errorf("got %+v, %v, %v", got, ok, err)
	}
	if _, ok, err := c.Get(t.Context(), "p/c"); ok || err != nil {
		t.Errorf("an absent key: %v, %v", ok, err)
	}
	kvs, revision, err := c.List(t.Context(), "p/")
	if err != nil || len(kvs) != 2 || kvs[0].Key != "p/a" || revision != 4 {
		t.Errorf("listed %+v at %d, %v", kvs, revision, err)
	}
	s := c.Status()
	if !s.Connected || s.Endpoint != e.Addr() || !strings.HasPrefix(s.ServerVersion, "3.7.") || s.EtcdClusterID == 0 ||
		s.Revision != 4 || s.LastError != nil || s.LastContact.IsZero() {
		t.Errorf("status %+v", s)
	}
}

// An unreachable server is not known to Dial, and is to the status and to the
// errors.
// lesson: E5
func TestClientWithoutServer(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Stop(t)
	c := mustDial(t, e)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, _, err := c.Get(ctx, "p/a")
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "connection refused") || !strings.Contains(err.Error(), e.Addr()) {
		t.Errorf("error %v", err)
	}
	if s := c.Status(); s.Connected || s.LastError == nil || s.LastErrorAt.IsZero() || !s.LastContact.IsZero() || s.FailedDials == 0 {
		t.Errorf("status %+v", s)
	}
	e.Restart(t)
	e.Put(t, "p/a", "1")
	if _, ok, err := c.Get(t.Context(), "p/a"); !ok || err != nil {
		t.Errorf("after the outage: %v, %v", ok, err)
	}
}

func TestDialRefusesABadConfig(t *testing.T) {
	if _, err := Dial(Config{}, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "no endpoints") {
		t.Errorf("error %v", err)
	}
}

func TestClosedClient(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e)
	w := NewWatcher("p/", newRecorder().deliver)
	run := start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
	awaitLive(t, w)
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := run.wait(t); !errors.Is(err, ErrClosed) {
		t.Errorf("Run returned %v", err)
	}
}

var loopback = []netip.Addr{netip.MustParseAddr("127.0.0.1")}

func TestClientUsesHostAliases(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Put(t, "p/a", "1")
	c := mustDial(t, e, func(c *Config) {
		c.Endpoints = []string{"http://West.Mesh.cilium.io:" + port(t, e)}
		c.HostAliases = []HostAlias{{
			Hostname: "west.mesh.Cilium.io",
			IPs:      []netip.Addr{netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("127.0.0.1")},
		}}
	})
	if _, ok, err := c.Get(t.Context(), "p/a"); !ok || err != nil {
		t.Errorf("%v, %v", ok, err)
	}
}

// Each connection must show the pinned cluster id before a part of a list,
// which has none, is taken from it.
// lesson: X3
func TestHistoryVerifiesEachConnection(t *testing.T) {
	h := &history{observer: newClientStatus()}
	a, b := connection{"l", "a"}, connection{"l", "b"}
	steps := []struct {
		conn connection
		id   uint64
		want error
	}{
		{a, 0, errUnverified},
		{a, 7, nil},
		{a, 0, nil},
		{b, 0, errUnverified},
		{b, 7, nil},
		{b, 0, nil},
		{a, 8, ErrHistoryChanged},
		{a, 0, ErrHistoryChanged},
		{b, 7, ErrHistoryChanged},
	}
	for i, s := range steps {
		if err := h.judge(s.conn, s.id); !errors.Is(err, s.want) {
			t.Errorf("step %d: %v, want %v", i, err, s.want)
		}
	}
	h.repin()
	if err := h.judge(b, 0); !errors.Is(err, errUnverified) {
		t.Errorf("after repin: %v", err)
	}
	if err := h.judge(b, 8); err != nil {
		t.Errorf("after repin: %v", err)
	}
}

// impatient has a client dial again after the least of pauses, for tests that
// break its connections more often than any server would.
func impatient(c *Client) {
	c.dialer.mu.Lock()
	defer c.dialer.mu.Unlock()
	for _, ep := range c.cfg.Endpoints {
		_, address, _ := strings.Cut(ep, "://")
		c.dialer.attempts[address] = &backoff{failures: math.MinInt32}
	}
}

// mechanism: C1
func TestClientWithPassword(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Put(t, "p/a", "1")
	e.Put(t, "q/a", "1")
	enableAuth(t, e)
	login := func(user, password string) func(*Config) {
		return func(c *Config) { c.Username, c.Password = user, Secret(password) }
	}
	c := mustDial(t, e, login("reader", "secret"))
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
	r.is(t, map[string]string{"a": "1"})
	awaitLive(t, w)
	if _, _, err := c.Get(t.Context(), "q/a"); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("a key outside the role: %v", err)
	}

	// The tokens of a server are gone when it restarts.
	e.Restart(t)
	root := mustDial(t, e, login("root", "root"))
	if _, err := root.etcd.Put(t.Context(), "p/b", "2"); err != nil {
		t.Fatal(err)
	}
	r.is(t, map[string]string{"a": "1", "b": "2"})

	_, _, err := mustDial(t, e, login("reader", "wrong")).Get(t.Context(), "p/a")
	if err == nil || !strings.Contains(err.Error(), "authentication failed") {
		t.Errorf("with a wrong password: %v", err)
	}
}

// A name and a password where the server asks for none do no harm.
func TestClientWithNeedlessPassword(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Put(t, "p/a", "1")
	c := mustDial(t, e, func(c *Config) { c.Username, c.Password = "u", "p" })
	if _, ok, err := c.Get(t.Context(), "p/a"); !ok || err != nil {
		t.Errorf("%v, %v", ok, err)
	}
}

// enableAuth makes the users root, and reader, who may read p/.
func enableAuth(t *testing.T, e *testutil.Etcd) {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{e.Endpoint()}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := t.Context()
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(c.UserAdd(ctx, "root", "root"))
	must(c.UserGrantRole(ctx, "root", "root"))
	must(c.RoleAdd(ctx, "reader"))
	must(c.RoleGrantPermission(ctx, "reader", "p/", clientv3.GetPrefixRangeEnd("p/"), clientv3.PermissionType(clientv3.PermRead)))
	must(c.UserAdd(ctx, "reader", "secret"))
	must(c.UserGrantRole(ctx, "reader", "reader"))
	must(c.AuthEnable(ctx))
}

func ExampleEvent() {
	deliver := func(events []Event) {
		for _, e := range events {
			fmt.Println(e.Kind, string(e.Key))
		}
	}
	deliver([]Event{{Kind: Created, Key: []byte("10.1.1.10")}, {Kind: Synced}})
	// Output:
	// created 10.1.1.10
	// synced
}
