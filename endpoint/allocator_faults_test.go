// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
)

// crowdLockTTL is the lease of the locks in a crowd: as short as etcd allows, since the test waits for its end.
const crowdLockTTL = 3 * time.Second

// crowd is many agents of one cluster, each with a client of its own behind a line of its own.
type crowd struct {
	etcd   *testutil.Etcd
	agents []*crowdAgent
	rng    *rand.Rand
	named  int // sets of labels that were made up
}

// crowdAgent is the half of an agent that tells others of its workloads.
type crowdAgent struct {
	line      *testutil.Proxy
	client    *kvstore.Client
	writer    *kvstore.Writer
	allocator *Allocator
	registry  *Registry
	host      netip.Addr
	stop      func(testing.TB)

	mu      sync.Mutex
	names   map[string]bool // of its workloads, each of which has labels of its own
	changed chan struct{}
}

var _ Source = (*crowdAgent)(nil)

func newCrowd(t *testing.T, agents int, verify time.Duration) *crowd {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	c := &crowd{etcd: testutil.StartEtcd(t), rng: rand.New(rand.NewPCG(seed, 0))}
	for i := range agents {
		c.agents = append(c.agents, c.startAgent(t, netip.AddrFrom4([4]byte{172, 18, 0, byte(i + 1)}), verify))
	}
	return c
}

func (c *crowd) startAgent(t *testing.T, host netip.Addr, verify time.Duration) *crowdAgent {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	x := &crowdAgent{
		line: testutil.StartProxy(t, c.etcd.Addr()), host: host, names: make(map[string]bool), changed: make(chan struct{}),
	}
	var err error
	x.client, err = kvstore.Dial(kvstore.Config{
		Endpoints: []string{x.line.Endpoint()}, QPS: 100_000, BootstrapQPS: 100_000, LockTTL: crowdLockTTL,
	}, log)
	if err != nil {
		t.Fatal(err)
	}
	x.writer = kvstore.NewWriter(x.client, kvstore.WriterConfig{VerifyInterval: verify, Log: log})
	x.allocator, err = NewAllocator(AllocatorConfig{
		Client: x.client, ClusterName: "east", ClusterID: 1, Layout: mustLayout(t), StateDir: t.TempDir(), HostIP: host,
		Observe: x.writer.Observe, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	x.registry, err = New(Config{
		Sources: []Source{x}, ClusterName: "east", ClusterID: 1, NodeName: host.String(), HostIP: host, IPs: ipcache.New(),
		Identities: identity.NewTable(), Allocator: x.allocator, Publisher: x.writer, Leftovers: x.client, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running errgroup.Group
	for _, run := range []func(context.Context) error{x.writer.Run, x.allocator.Run, x.registry.Run} {
		running.Go(func() error { return run(ctx) })
	}
	var once sync.Once
	x.stop = func(t testing.TB) {
		once.Do(func() {
			cancel()
			if err := errors.Join(running.Wait(), x.client.Close()); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() { x.stop(t) })
	return x
}

func (x *crowdAgent) String() string                { return x.host.String() }
func (x *crowdAgent) Run(ctx context.Context) error { return nil }
func (x *crowdAgent) Problems() []SourceError       { return nil }

func (x *crowdAgent) Ready() <-chan struct{} {
	ready := make(chan struct{})
	close(ready)
	return ready
}

func (x *crowdAgent) Changed() <-chan struct{} {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.changed
}

// Workloads returns one for each name, under an address that is this agent's alone.
func (x *crowdAgent) Workloads() []Workload {
	x.mu.Lock()
	defer x.mu.Unlock()
	var all []Workload
	for _, name := range slices.Sorted(maps.Keys(x.names)) {
		n, _ := strconv.Atoi(strings.TrimPrefix(name, "app-"))
		ip := netip.AddrFrom4([4]byte{10, x.host.As4()[3], byte(n >> 8), byte(n)})
		all = append(all, Workload{
			Source: "test", Namespace: "shop", Name: name, IPs: []netip.Addr{ip}, Labels: map[string]string{"app": name},
		})
	}
	return all
}

// change has workloads come and go.
func (x *crowdAgent) change(come, go_ []string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, name := range come {
		x.names[name] = true
	}
	for _, name := range go_ {
		delete(x.names, name)
	}
	close(x.changed)
	x.changed = make(chan struct{})
}

// identities are those of its workloads, by name; Init for those that wait.
func (x *crowdAgent) identities() map[string]identity.ID {
	ids := make(map[string]identity.ID)
	for _, e := range x.registry.Status().Endpoints {
		ids[e.Name] = e.Identity
	}
	return ids
}

// has reports an error unless its workloads of these names have their identities, or all, if none is named.
func (x *crowdAgent) has(names ...string) error {
	if len(names) == 0 {
		x.mu.Lock()
		names = slices.Sorted(maps.Keys(x.names))
		x.mu.Unlock()
		if got := len(x.registry.Status().Endpoints); got != len(names) {
			return fmt.Errorf("%s has %d endpoints, want %d", x, got, len(names))
		}
	}
	ids := x.identities()
	for _, name := range names {
		if id := ids[name]; id == identity.Invalid || id == identity.Init {
			return fmt.Errorf("%s: %s waits: %+v", x, name, x.allocator.Status())
		}
	}
	return nil
}

// fresh makes up names of workloads.
func (c *crowd) fresh(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = "app-" + strconv.Itoa(c.named)
		c.named++
	}
	return names
}

const locks = identity.StatePrefix + "/locks/"

// isOf reports whether a key has to do with the labels of one of these workloads.
func isOf(key string, names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return strings.Contains(key, "k8s:app="+name+";") })
}

// suspend has an agent go to sleep while it holds locks, for longer than their lease. Another agent has to bind the same
// labels meanwhile; then the first one wakes up, and what it was about to write arrives.
func (c *crowd) suspend(t *testing.T, sleeper, other *crowdAgent) {
	t.Helper()
	c.until(t, func() error { return sleeper.has() }) // or the locks would wait behind others
	var names, held []string
	testutil.Eventually(t, patience, func() error {
		sleeper.line.Forward()
		sleeper.line.Delay(100*time.Millisecond, 0, 0) // while what it writes is on its way, it holds the lock
		names = c.fresh(40)
		ctx, cancel := context.WithTimeout(t.Context(), patience/2)
		defer cancel()
		news := c.etcd.Client().Watch(ctx, locks, clientv3.WithPrefix(), clientv3.WithFilterDelete(), clientv3.WithCreatedNotify())
		<-news // it watches
		sleeper.change(names, nil)
		for resp := range news {
			if slices.ContainsFunc(resp.Events, func(e *clientv3.Event) bool { return isOf(string(e.Kv.Key), names) }) {
				break
			}
		}
		sleeper.line.Pause()
		held = slices.DeleteFunc(c.keys(t, locks), func(key string) bool { return !isOf(key, names) })
		if len(held) == 0 {
			return errors.New("it went to sleep with no lock held")
		}
		return nil
	})
	other.change(names, nil)
	c.until(t, func() error {
		there := c.keys(t, locks)
		for _, key := range held {
			if slices.Contains(there, key) {
				return fmt.Errorf("the lock %s has outlived its holder's lease", key)
			}
		}
		return other.has(names...)
	})
	t.Logf("%s slept with %d locks held, past their lease", sleeper, len(held))
	sleeper.line.Delay(0, 0, 0)
	sleeper.line.Forward()
	c.until(t, func() error { return sleeper.has(names...) })
	mine, theirs := sleeper.identities(), other.identities()
	for _, name := range names {
		if mine[name] != theirs[name] {
			t.Errorf("%s: it woke up to %s, while the others have %s", name, mine[name], theirs[name])
		}
	}
}

// turnover has workloads of every agent go, and new ones come, some of them with labels that others have.
func (c *crowd) turnover(n int) {
	shared := c.fresh(n)
	for _, x := range c.agents {
		x.mu.Lock()
		names := slices.Sorted(maps.Keys(x.names))
		x.mu.Unlock()
		c.rng.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		x.change(shared[:c.rng.IntN(n)+1], names[:min(n, len(names)/10)])
	}
}

// deleteKeys deletes masters and slaves, at times both of the same labels.
func (c *crowd) deleteKeys(t *testing.T, n int) {
	t.Helper()
	for _, prefix := range []string{identity.StatePrefix + "/id/", identity.StatePrefix + "/value/"} {
		keys := c.keys(t, prefix)
		for range min(n, len(keys)) {
			c.etcd.Delete(t, keys[c.rng.IntN(len(keys))])
		}
	}
}

// revoke ends every lease that there is, those of locks included.
func (c *crowd) revoke(t *testing.T) {
	t.Helper()
	resp, err := c.etcd.Client().Leases(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, lease := range resp.Leases {
		_, _ = c.etcd.Client().Revoke(t.Context(), lease.ID) // or it ends by itself just now
	}
}

func (c *crowd) keys(t *testing.T, prefix string) []string {
	t.Helper()
	resp, err := c.etcd.Client().Get(t.Context(), prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, kv := range resp.Kvs {
		keys = append(keys, string(kv.Key))
	}
	return keys
}

// until waits for what may take several leases.
func (c *crowd) until(t *testing.T, done func() error) {
	t.Helper()
	testutil.Eventually(t, 4*patience, done)
}

// Many agents and many sets of labels, while etcd restarts, holders of locks sleep past their lease, leases are lost, masters
// and slaves are deleted, and workloads come and go. In the end identities and labels are one to one, every workload has its
// identity, every use has its key and no other key is there; when the agents have gone, so have their locks, and (which the
// package's TestMain sees to) their goroutines.
//
// mechanism: J3, J4, J5, J7
// lesson: E9
func TestAllocatesUnderFaults(t *testing.T) {
	agents, sets, rounds, verify := 4, 60, 1, verifyEvery
	if faults() {
		agents, sets, rounds, verify = 20, 2000, 2, 5*verifyEvery
	}
	c := newCrowd(t, agents, verify)
	names := c.fresh(sets)
	for i, x := range c.agents { // each set has four agents that use it
		first := i * sets / agents
		x.change(slices.Concat(names, names)[first:first+4*sets/agents], nil)
	}
	begun := time.Now()
	for round := range rounds {
		t.Logf("round %d begins after %v", round, time.Since(begun))
		c.etcd.Stop(t)
		c.etcd.Restart(t)
		c.suspend(t, c.agents[0], c.agents[1])
		c.deleteKeys(t, sets/10)
		c.turnover(sets / 20)
		c.revoke(t)
		c.etcd.Stop(t)
		c.turnover(sets / 20)
		c.etcd.Restart(t)
		c.deleteKeys(t, sets/10)
		c.agents[0], c.agents[len(c.agents)-1] = c.agents[len(c.agents)-1], c.agents[0]
	}
	t.Logf("no more faults after %v", time.Since(begun))
	for _, x := range c.agents {
		c.until(t, func() error { return x.has() })
	}
	t.Logf("all have their identities after %v", time.Since(begun))
	testutil.Eventually(t, patience, func() error { return c.consistent(t) })
	t.Logf("etcd is as it should be after %v", time.Since(begun))
	for _, x := range c.agents {
		x.stop(t)
	}
	c.until(t, func() error {
		if left := c.keys(t, locks); len(left) > 0 {
			return fmt.Errorf("locks are left: %v", left)
		}
		return nil
	})
}

// consistent compares all keys of etcd that have to do with identities with what the agents use.
func (c *crowd) consistent(t *testing.T) error {
	t.Helper()
	masters, err := c.masters(t)
	if err != nil {
		return err
	}
	slaves, announced, inUse := make(map[string]string), make(map[string]bool), make(map[string]string)
	for _, x := range c.agents {
		if s := x.writer.Status(); s.Pending > 0 || len(s.Errors) > 0 {
			return fmt.Errorf("%s: %d keys are not written, %v", x, s.Pending, s.Errors)
		}
		for _, e := range x.registry.Status().Endpoints {
			text, number := e.Labels.String(), strconv.Itoa(int(e.Identity))
			if masters[number] != text {
				return fmt.Errorf("%s uses %s for %s, of which etcd has %q", x, number, text, masters[number])
			}
			if other, ok := inUse[text]; ok && other != number {
				return fmt.Errorf("%s uses %s for %s, and another node %s", x, number, text, other)
			}
			inUse[text] = number
			slaves[identity.SlaveKey(e.Labels, x.host)] = number
			for _, ip := range e.IPs {
				announced[ipcache.StatePrefix+"/"+ipcache.DefaultSpace+"/"+ip.String()] = true
			}
		}
	}
	got := make(map[string]string)
	resp, err := c.etcd.Client().Get(t.Context(), identity.StatePrefix+"/value/", clientv3.WithPrefix())
	if err != nil {
		return err
	}
	for _, kv := range resp.Kvs {
		if kv.Lease == 0 {
			return fmt.Errorf("%s has no lease", kv.Key)
		}
		if _, used := slaves[string(kv.Key)]; !used && c.passing(t, clientv3.LeaseID(kv.Lease)) {
			continue
		}
		got[string(kv.Key)] = string(kv.Value)
	}
	if diff := cmp.Diff(slaves, got); diff != "" {
		return fmt.Errorf("keys of uses (-want +got)\n%s", diff)
	}
	there := c.keys(t, ipcache.StatePrefix+"/"+ipcache.DefaultSpace+"/")
	if diff := cmp.Diff(slices.Sorted(maps.Keys(announced)), there); diff != "" {
		return fmt.Errorf("addresses (-want +got)\n%s", diff)
	}
	return nil
}

// masters reads what identities stand for. Those that nobody uses any more are the operator's to collect.
func (c *crowd) masters(t *testing.T) (map[string]string, error) {
	t.Helper()
	resp, err := c.etcd.Client().Get(t.Context(), identity.StatePrefix+"/id/", clientv3.WithPrefix())
	if err != nil {
		return nil, err
	}
	masters := make(map[string]string)
	for _, kv := range resp.Kvs {
		masters[strings.TrimPrefix(string(kv.Key), identity.StatePrefix+"/id/")] = string(kv.Value)
		if kv.Lease != 0 {
			return nil, fmt.Errorf("%s has the lease %x", kv.Key, kv.Lease)
		}
	}
	return masters, nil
}

// passing reports whether a lease is one that ends by itself soon: that of a use which ended while it was being written.
func (c *crowd) passing(t *testing.T, lease clientv3.LeaseID) bool {
	t.Helper()
	resp, err := c.etcd.Client().TimeToLive(t.Context(), lease)
	return err == nil && resp.GrantedTTL == int64(handoverTTL/time.Second)
}
