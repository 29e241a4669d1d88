// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
)

const patience = time.Minute

// verifyEvery is how often the writers here compare their keys with etcd.
const verifyEvery = 2 * time.Second

// allocating is an allocator that runs, with a writer that keeps what it found, as in an agent.
type allocating struct {
	*Allocator
	client *kvstore.Client
	writer *kvstore.Writer
	host   netip.Addr
	stop   func()
	sets   map[string]identity.Labels
	kept   map[string]identity.ID
}

func startAllocator(t testing.TB, etcd *testutil.Etcd, host string, change ...func(*Allocator)) *allocating {
	t.Helper()
	return startAllocatorIn(t, t.TempDir(), etcd, host, change...)
}

// startAllocatorIn starts an allocator of a node whose state is in dir.
func startAllocatorIn(t testing.TB, dir string, etcd *testutil.Etcd, host string, change ...func(*Allocator)) *allocating {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	client, err := kvstore.Dial(kvstore.Config{
		Endpoints: []string{etcd.Endpoint()}, QPS: 100_000, BootstrapQPS: 100_000, LockTTL: 5 * time.Second,
	}, log)
	if err != nil {
		t.Fatal(err)
	}
	writer := kvstore.NewWriter(client, kvstore.WriterConfig{VerifyInterval: verifyEvery, Log: log})
	addr := netip.MustParseAddr(host)
	a, err := NewAllocator(AllocatorConfig{
		Client: client, ClusterName: "east", ClusterID: 1, Layout: mustLayout(t), StateDir: dir, HostIP: addr, Observe: writer.Observe, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range change {
		c(a)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 2)
	go func() { done <- a.Run(ctx) }()
	go func() { done <- writer.Run(ctx) }()
	x := &allocating{
		Allocator: a, client: client, writer: writer, host: addr,
		sets: make(map[string]identity.Labels), kept: make(map[string]identity.ID),
	}
	stopped := false
	x.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		_ = client.Close()
	}
	t.Cleanup(x.stop)
	return x
}

func labelsOf(app string) identity.Labels {
	return identity.MakeLabels(
		identity.Label{Source: identity.SourceK8s, Key: "app", Value: app},
		identity.Label{Source: identity.SourceK8s, Key: identity.LabelCluster, Value: "east"},
	)
}

// want adds sets of labels to those in use.
func (x *allocating) want(apps ...string) {
	for _, app := range apps {
		labels := labelsOf(app)
		x.sets[labels.String()] = labels
	}
	x.Want(x.sets, true)
}

func (x *allocating) id(app string) identity.ID {
	id, _ := x.Identity(labelsOf(app).String())
	return id
}

// settle waits until every set has an identity, and has the writer keep them.
func (x *allocating) settle(t testing.TB) {
	t.Helper()
	deadline := time.After(patience)
	for {
		changed := x.Changed()
		s := x.Status()
		if s.Waiting == 0 {
			break
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("%s: sets wait for their identity: %+v", x.host, s)
		}
	}
	x.keep()
}

// keep publishes what is found, as a registry does.
func (x *allocating) keep() {
	for text, labels := range x.sets {
		id, _ := x.Identity(text)
		if id != identity.Invalid && x.kept[text] != id {
			x.writer.Create(identity.MasterKey(id), []byte(text))
			x.writer.Set(identity.SlaveKey(labels, x.host), strconv.AppendUint(nil, uint64(id), 10))
			if old := x.kept[text]; old != identity.Invalid {
				x.writer.Release(identity.MasterKey(old))
			}
			x.kept[text] = id
		}
	}
}

func faults() bool { return os.Getenv("WEFT_TEST_FAULTS") == "1" }

// mechanism: J1, J3, J4, J5, J6
func TestAllocates(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	a := startAllocator(t, etcd, "172.18.1.1")
	a.want("web", "db")
	a.settle(t)
	web, db := a.id("web"), a.id("db")
	if web == db || !mustLayout(t).Contains(1, web) || !mustLayout(t).Contains(1, db) {
		t.Fatalf("web is %s, db is %s", web, db)
	}
	for key, want := range map[string]string{
		identity.MasterKey(web):                    "k8s:app=web;k8s:io.cilium.k8s.policy.cluster=east;",
		identity.SlaveKey(labelsOf("web"), a.host): strconv.Itoa(int(web)),
	} {
		if got, _ := etcd.Get(t, key); got != want {
			t.Errorf("%s is %q, want %q", key, got, want)
		}
	}
	if kv, _, err := a.client.Get(t.Context(), identity.MasterKey(web)); err != nil || kv.Lease != 0 {
		t.Errorf("the master has the lease %s, %v", kv.Lease, err)
	}
	if kv, _, err := a.client.Get(t.Context(), identity.SlaveKey(labelsOf("web"), a.host)); err != nil || kv.Lease == 0 {
		t.Errorf("the slave has no lease, %v", err)
	}

	// Another node, which has seen the labels; and one that comes after the key that binds them has gone.
	b := startAllocator(t, etcd, "172.18.1.2")
	b.want("web")
	b.settle(t)
	if got := b.id("web"); got != web {
		t.Errorf("the second node has %s, want %s", got, web)
	}
	// What is in use is not asked for again.
	for _, x := range []*allocating{a, b} {
		if err := x.writer.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	before := revision(t, b.client)
	b.want("web")
	b.settle(t)
	if got := revision(t, b.client); got != before {
		t.Errorf("an identity in use cost %d writes", got-before)
	}
	// Released, it is forgotten here, and stays for the other.
	b.Want(nil, true)
	if got := b.id("web"); got != identity.Invalid {
		t.Errorf("a released identity is still %s", got)
	}
	if a.id("web") != web {
		t.Error("the first node lost its identity")
	}
}

func revision(t testing.TB, c *kvstore.Client) int64 {
	t.Helper()
	_, revision, err := c.List(t.Context(), identity.StatePrefix)
	if err != nil {
		t.Fatal(err)
	}
	return revision
}

// Many agents that want the same labels at once end with one identity.
//
// mechanism: J5
func TestAgentsAgree(t *testing.T) {
	agents := 40
	if faults() {
		agents = 1000
	}
	etcd := testutil.StartEtcd(t)
	var all []*allocating
	for i := range agents {
		x := startAllocator(t, etcd, fmt.Sprintf("10.0.%d.%d", i/250, i%250+1), func(a *Allocator) { a.cfg.Parallel = 2 })
		<-x.Ready() // it is their allocations that are to meet
		all = append(all, x)
	}
	for _, x := range all {
		x.want("web", "db")
	}
	for _, x := range all {
		x.settle(t)
		if x.id("web") != all[0].id("web") || x.id("db") != all[0].id("db") {
			t.Fatalf("%s has %s and %s, the first %s and %s", x.host, x.id("web"), x.id("db"), all[0].id("web"), all[0].id("db"))
		}
	}
	masters, _, err := all[0].client.List(t.Context(), identity.StatePrefix+"/id/")
	if err != nil || len(masters) != 2 {
		t.Errorf("etcd has %d identities, %v, want 2", len(masters), err)
	}
}

// Keys in use that are deleted are put back: a master at once, a slave when the writer compares. One that etcd binds to other labels is given up, and left alone.
//
// mechanism: J7, E4, E5
func TestKeysInUse(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	a := startAllocator(t, etcd, "172.18.1.1")
	a.want("web")
	a.settle(t)
	web := a.id("web")
	master, slave := identity.MasterKey(web), identity.SlaveKey(labelsOf("web"), a.host)
	if err := a.writer.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	has := func(key, want string) {
		t.Helper()
		testutil.Eventually(t, patience, func() error {
			if got, _ := etcd.Get(t, key); got != want {
				return fmt.Errorf("%s is %q, want %q", key, got, want)
			}
			return nil
		})
	}
	etcd.Delete(t, master)
	etcd.Delete(t, slave)
	has(master, labelsOf("web").String())
	has(slave, strconv.Itoa(int(web)))
	if a.id("web") != web {
		t.Error("the identity changed")
	}

	other := labelsOf("other").String()
	etcd.Put(t, master, other)
	testutil.Eventually(t, patience, func() error {
		if id := a.id("web"); id == web || id == identity.Invalid {
			return fmt.Errorf("web is %s", id)
		}
		return nil
	})
	a.settle(t)
	has(slave, strconv.Itoa(int(a.id("web"))))
	has(master, other)
}

// Slaves of others whose master is gone say which identity labels have.
//
// mechanism: J5
func TestMasterIsPutBack(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	etcd.Put(t, identity.SlaveKey(labelsOf("web"), netip.MustParseAddr("172.18.1.9")), "65800")
	a := startAllocator(t, etcd, "172.18.1.1")
	a.want("web")
	a.settle(t)
	if got := a.id("web"); got != 65800 {
		t.Errorf("web is %s, want 65800", got)
	}
	if got, _ := etcd.Get(t, identity.MasterKey(65800)); got != labelsOf("web").String() {
		t.Errorf("the master is %q", got)
	}
}

// Where etcd has come to have two identities for the same labels, all use the lowest: workloads pass from one to the other and are
// never without.
//
// mechanism: J5
func TestTwoIdentitiesBecomeOne(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	text := labelsOf("web").String()
	slave := func(node string) string { return identity.SlaveKey(labelsOf("web"), netip.MustParseAddr(node)) }
	etcd.Put(t, identity.MasterKey(65800), text)
	etcd.Put(t, slave("172.18.1.9"), "65800")
	a := startAllocator(t, etcd, "172.18.1.1")
	a.want("web")
	a.settle(t)
	etcd.Put(t, identity.MasterKey(65900), text) // which is no reason to go there
	etcd.Put(t, identity.MasterKey(65700), text)
	etcd.Put(t, slave("172.18.1.8"), "65700")
	for end := time.After(patience); ; {
		changed := a.Changed()
		id, err := a.Identity(text)
		if id == 65700 && err == nil {
			break
		}
		if id != 65800 || err != nil {
			t.Fatalf("web is %s, %v", id, err)
		}
		select {
		case <-changed:
		case <-end:
			t.Fatalf("web stays %s: %+v", id, a.Status())
		}
	}
	a.keep()
	if err := a.writer.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, _ := etcd.Get(t, slave("172.18.1.1")); got != "65700" {
		t.Errorf("the slave says %s", got)
	}
	if got, _ := etcd.Get(t, identity.MasterKey(65800)); got != text {
		t.Errorf("the master of another node's identity is %q", got)
	}
}

// mechanism: J2
func TestExhaustion(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	a := startAllocator(t, etcd, "172.18.1.1", func(a *Allocator) { a.pool = identity.NewPool(65536, 65537) })
	a.want("a", "b")
	a.settle(t)
	a.want("c")
	testutil.Eventually(t, patience, func() error {
		if _, err := a.Identity(labelsOf("c").String()); !errors.Is(err, ErrExhausted) {
			return fmt.Errorf("c: %v", err)
		}
		return nil
	})
	if s := a.Status(); s.Free != 0 || s.Waiting != 1 || len(s.Errors) != 1 {
		t.Errorf("status %+v", s)
	}
	// Room comes when the operator deletes what nobody uses.
	delete(a.sets, labelsOf("a").String())
	gone := a.id("a")
	a.Want(a.sets, true)
	a.writer.Release(identity.MasterKey(gone))
	a.writer.Delete(identity.SlaveKey(labelsOf("a"), a.host))
	if err := a.writer.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	etcd.Delete(t, identity.MasterKey(gone))
	a.settle(t)
	if got := a.id("c"); got != gone {
		t.Errorf("c is %s, want %s", got, gone)
	}
}

// mechanism: J2, J3
func TestAllocatesNothingWhileEtcdIsDown(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	a := startAllocator(t, etcd, "172.18.1.1")
	a.want("web")
	a.settle(t)
	web := a.id("web")
	etcd.Stop(t)
	a.want("db")
	if a.id("web") != web || a.id("db") != identity.Invalid || a.Status().Waiting != 1 {
		t.Errorf("web is %s, db is %s", a.id("web"), a.id("db"))
	}
	etcd.Restart(t)
	a.settle(t)
	if a.id("web") != web || a.id("db") == web {
		t.Errorf("web is %s, db is %s", a.id("web"), a.id("db"))
	}
}

// New sets of labels per second, and what each costs.
func BenchmarkAllocate(b *testing.B) {
	etcd := testutil.StartEtcd(b)
	a := startAllocator(b, etcd, "172.18.1.1")
	names := make([]string, b.N)
	for i := range names {
		names[i] = "app-" + strconv.Itoa(i)
	}
	<-a.Ready()
	b.ResetTimer()
	a.want(names...)
	a.settle(b)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "identities/s")
}
