// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// recorder is a map in memory that writes down what is done to it and fails where it is told to.
type recorder struct {
	mu      sync.Mutex
	entries map[bpf.IPCacheKey]bpf.IPCacheValue
	max     int // entries; 0: no limit
	refuse  func(bpf.IPCacheKey) error
	log     []string
	dumps   int
	sorted  []bpf.IPCacheKey // in the order of the kernel's walk; nil once entries have come or gone
}

var _ prefixMap = (*recorder)(nil)

func newRecorder() *recorder { return &recorder{entries: map[bpf.IPCacheKey]bpf.IPCacheValue{}} }

func (m *recorder) Update(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, key := range keys {
		if m.refuse != nil {
			if err := m.refuse(key); err != nil {
				return i, err
			}
		}
		if _, has := m.entries[key]; !has && m.max > 0 && len(m.entries) >= m.max {
			return i, unix.ENOSPC
		}
		m.put(key, values[i])
		m.log = append(m.log, fmt.Sprintf("set %v %d", key, values[i].Identity))
	}
	return len(keys), nil
}

func (m *recorder) Delete(keys []bpf.IPCacheKey) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, key := range keys {
		if m.refuse != nil {
			if err := m.refuse(key); err != nil {
				return i, err
			}
		}
		if _, has := m.entries[key]; !has {
			return i, ebpf.ErrKeyNotExist
		}
		m.drop(key)
		m.log = append(m.log, fmt.Sprintf("delete %v", key))
	}
	return len(keys), nil
}

func (m *recorder) Dump(yield func([]bpf.IPCacheKey, []bpf.IPCacheValue)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dumps++
	for key, value := range m.entries {
		yield([]bpf.IPCacheKey{key}, []bpf.IPCacheValue{value})
	}
	return nil
}

// put and drop change an entry without a word. mu is held, where there is anybody else.
func (m *recorder) put(key bpf.IPCacheKey, value bpf.IPCacheValue) {
	if _, has := m.entries[key]; !has {
		m.sorted = nil
	}
	m.entries[key] = value
}

func (m *recorder) drop(key bpf.IPCacheKey) {
	delete(m.entries, key)
	m.sorted = nil
}

// Walk meets the entries in the order of the kernel.
func (m *recorder) Walk() mapWalk {
	var last *bpf.IPCacheKey
	return func(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) (n int, end bool, err error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.sorted == nil {
			m.sorted = slices.SortedFunc(maps.Keys(m.entries), compareKeys)
		}
		sorted := m.sorted
		if last != nil {
			at, found := slices.BinarySearchFunc(sorted, *last, compareKeys)
			if found { // else from the beginning, as the kernel does
				sorted = sorted[at+1:]
			}
		}
		for n = 0; n < min(len(keys), len(sorted)); n++ {
			keys[n], values[n] = sorted[n], m.entries[sorted[n]]
			last = &sorted[n]
		}
		return n, n == len(sorted), nil
	}
}

func (m *recorder) Check([]bpf.IPCacheKey, []bpf.IPCacheValue, bool) (bool, error) { return false, nil }

// content is what the map holds, by prefix.
func (m *recorder) content() map[string]uint32 {
	all := map[string]uint32{}
	for key, value := range m.entries {
		all[key.String()] = value.Identity
	}
	return all
}

// took returns the log and begins a new one.
func (m *recorder) took() []string {
	log := m.log
	m.log = nil
	return log
}

func testLayout(t testing.TB) identity.Layout {
	t.Helper()
	layout, err := identity.NewLayout(255)
	if err != nil {
		t.Fatal(err)
	}
	return layout
}

// upsert claims a prefix for an identity, and so for the identity's cluster.
func upsert(prefix string, id identity.ID) ipcache.Op {
	return ipcache.Op{Claim: ipcache.Claim{
		Prefix: netip.MustParsePrefix(prefix),
		Owner:  ipcache.Owner{Source: ipcache.ClusterMesh, Object: "ip"},
		Entry:  ipcache.Entry{Identity: id},
	}}
}

func remove(prefix string) ipcache.Op {
	op := upsert(prefix, 0)
	op.Delete = true
	return op
}

// reconcilerBench is a reconciler that is driven by hand.
type reconcilerBench struct {
	*reconciler
	t      *testing.T
	clock  time.Time
	heard  map[identity.ClusterID]bool
	kernel *recorder
}

func newReconcilerBench(t *testing.T, kernel *recorder) *reconcilerBench {
	b := &reconcilerBench{t: t, clock: time.Now(), heard: map[identity.ClusterID]bool{}, kernel: kernel}
	cfg := &Config{
		IPs: ipcache.New(), Layout: testLayout(t), MaxEntries: uint32(kernel.max), Log: slog.New(slog.DiscardHandler),
		Listed: func(id identity.ClusterID) bool { return b.heard[id] },
	}
	b.reconciler = newReconciler(cfg, kernel)
	return b
}

func (b *reconcilerBench) apply(ops ...ipcache.Op) { b.table.Apply(ops) }

// step makes one pass, a time later.
func (b *reconcilerBench) step(later time.Duration) {
	b.t.Helper()
	b.clock = b.clock.Add(later)
	if err := b.pass(context.Background(), b.clock); err != nil {
		b.t.Fatal(err)
	}
	b.publish()
}

func (b *reconcilerBench) want(log ...string) {
	b.t.Helper()
	if diff := cmp.Diff(log, b.kernel.took()); diff != "" {
		b.t.Errorf("writes (-want +got):\n%s", diff)
	}
}

// Additions go before deletions; the more specific first, and last to go.
//
// invariant 4
func TestOrderOfWrites(t *testing.T) {
	b := newReconcilerBench(t, newRecorder())
	b.apply(upsert("10.2.0.0/16", 2), upsert("10.2.1.0/24", 2), upsert("10.2.1.10/32", 131329), upsert("fd00::/64", 2),
		upsert("fd00::1/128", 131330), upsert("10.3.0.0/16", 2))
	b.step(0)
	b.want("set fd00::1/128 131330", "set fd00::/64 2", "set 10.2.1.10/32 131329", "set 10.2.1.0/24 2",
		"set 10.2.0.0/16 2", "set 10.3.0.0/16 2")
	b.apply(remove("10.2.1.10/32"), remove("10.2.0.0/16"), remove("10.2.1.0/24"), remove("10.9.9.9/32"),
		upsert("10.4.0.0/16", 2), upsert("10.4.1.1/32", 131331))
	b.step(0)
	b.want("set 10.4.1.1/32 131331", "set 10.4.0.0/16 2", "delete 10.2.0.0/16", "delete 10.2.1.0/24", "delete 10.2.1.10/32")
	b.apply(remove("10.4.1.1/32"), upsert("10.4.1.1/32", 131332))
	b.step(0)
	b.want("set 10.4.1.1/32 131332")
}

// invariant 2
// lesson: X4
// lesson: X1
func TestTakesOverAMap(t *testing.T) {
	kernel := newRecorder()
	first := newReconcilerBench(t, kernel)
	first.apply(upsert("10.2.1.10/32", 131329), upsert("10.2.1.11/32", 131330), upsert("10.3.1.10/32", 3<<16+1),
		upsert("10.3.1.11/32", 3<<16+2), upsert("172.18.2.1/32", identity.RemoteNode), upsert("10.2.1.0/24", identity.World))
	first.step(0)
	kernel.took()
	before := kernel.content()

	b := newReconcilerBench(t, kernel)
	b.step(0)
	b.want()
	if diff := cmp.Diff(before, kernel.content()); diff != "" {
		t.Fatalf("an agent that knows nothing changed the map (-before +after):\n%s", diff)
	}
	if s := b.status(); s.Unclaimed != 6 || s.Entries != 6 {
		t.Errorf("status %+v, want 6 entries, all unclaimed", s)
	}

	// What is said and is there is not written, what is there otherwise is.
	b.apply(upsert("10.2.1.10/32", 131329), upsert("10.2.1.11/32", 131331), upsert("172.18.2.1/32", identity.RemoteNode))
	b.step(0)
	b.want("set 10.2.1.11/32 131331")
	if s := b.status(); s.Adopted != 2 || s.Written != 1 || s.Unclaimed != 3 {
		t.Errorf("status %+v, want 2 adopted, 1 written, 3 unclaimed", s)
	}

	// Each cluster's leftovers go when that cluster has been heard, those of no cluster when all have.
	b.heard[2] = true
	b.step(listedInterval)
	b.want()
	b.heard[3] = true
	b.apply(upsert("10.3.1.10/32", 3<<16+9)) // in the last moment
	b.step(listedInterval)
	b.want("set 10.3.1.10/32 196617", "delete 10.3.1.11/32")
	b.heard[0] = true
	b.step(listedInterval)
	b.want("delete 10.2.1.0/24")
	if s := b.status(); s.Pruned != 2 || s.Unclaimed != 0 || s.Entries != 4 || b.inherited != nil {
		t.Errorf("status %+v, want 2 pruned, none unclaimed, 4 entries, and nothing kept in memory", s)
	}
}

// What is claimed between the look at the table and the question who has been heard is not pruned.
//
// invariant 2
func TestPruneSeesWhatIsClaimedMeanwhile(t *testing.T) {
	kernel := newRecorder()
	first := newReconcilerBench(t, kernel)
	first.apply(upsert("10.2.1.10/32", 131329), upsert("10.2.1.11/32", 131330))
	first.step(0)
	kernel.took()
	b := newReconcilerBench(t, kernel)
	b.listed = func(identity.ClusterID) bool {
		b.apply(upsert("10.2.1.10/32", 131329))
		return true
	}
	b.step(0)
	b.want("delete 10.2.1.11/32")
}

// What the table takes back while the map is being taken over goes at once: that is news, not silence.
func TestDeletionDuringTakeover(t *testing.T) {
	kernel := newRecorder()
	first := newReconcilerBench(t, kernel)
	first.apply(upsert("10.2.1.10/32", 131329))
	first.step(0)
	kernel.took()
	b := newReconcilerBench(t, kernel)
	b.step(0)
	b.apply(upsert("10.2.1.10/32", 131329))
	b.step(0)
	b.apply(remove("10.2.1.10/32"))
	b.step(0)
	b.want("delete 10.2.1.10/32")
}

// Foreign or broken keys in our own map go with what nobody claims.
func TestPrunesWhatWeWouldNotWrite(t *testing.T) {
	kernel := newRecorder()
	other := bpf.MakeIPCacheKey(netip.MustParsePrefix("10.2.1.10/32"))
	other.ClusterID = 7
	kernel.entries[other] = bpf.IPCacheValue{Identity: 131329}
	kernel.entries[bpf.IPCacheKey{PrefixLen: 40, Family: 9}] = bpf.IPCacheValue{Identity: 5}
	b := newReconcilerBench(t, kernel)
	b.apply(upsert("10.2.1.10/32", 131329))
	b.step(0)
	b.want("set 10.2.1.10/32 131329")
	b.heard[0], b.heard[2] = true, true
	b.step(listedInterval)
	if diff := cmp.Diff(map[string]uint32{"10.2.1.10/32": 131329}, kernel.content()); diff != "" {
		t.Errorf("content (-want +got):\n%s", diff)
	}
}

// A reader that fell behind compares the whole map, and only then removes what it was not given.
func TestReset(t *testing.T) {
	kernel := newRecorder()
	b := newReconcilerBench(t, kernel)
	b.heard[0], b.heard[2] = true, true
	b.apply(upsert("10.2.1.10/32", 131329), upsert("10.2.1.11/32", 131330), upsert("10.2.0.0/16", 2))
	b.step(0)
	kernel.took()
	b.apply(remove("10.2.1.11/32"))
	// So many come and go that the table forgets the deletion, after another reader has seen it.
	var other ipcache.Revision
	for round := range 4 {
		var add, del []ipcache.Op
		for i := range 4000 {
			prefix := fmt.Sprintf("10.%d.%d.%d/32", 100+round, i>>8, i&0xff)
			add, del = append(add, upsert(prefix, 131400)), append(del, remove(prefix))
		}
		b.apply(add...)
		b.apply(del...)
		_, other, _ = b.table.Changes(other, make([]ipcache.Change, 0, len(add)+4))
		b.apply()
	}
	b.step(listedInterval)
	if s := b.status(); s.Resets != 1 {
		t.Fatalf("%d resets, want 1: the table remembers more than the test believes", s.Resets)
	}
	if diff := cmp.Diff(map[string]uint32{"10.2.1.10/32": 131329, "10.2.0.0/16": 2}, kernel.content()); diff != "" {
		t.Errorf("content (-want +got):\n%s", diff)
	}
	b.want("delete 10.2.1.11/32")
}

// invariant 7
// lesson: K1
func TestMapFull(t *testing.T) {
	kernel := newRecorder()
	kernel.max = 3
	b := newReconcilerBench(t, kernel)
	b.apply(upsert("10.2.1.1/32", 1001), upsert("10.2.1.2/32", 1002), upsert("10.2.1.3/32", 1003))
	b.step(0)
	b.apply(upsert("10.2.1.4/32", 1004), upsert("10.2.1.5/32", 1005), upsert("10.2.1.1/32", 2001))
	b.step(0)
	if s := b.status(); !s.Full || s.Pending != 2 || s.Entries != 3 || s.LastError == "" {
		t.Errorf("status %+v, want full, 2 pending, 3 entries and an error", s)
	}
	if got := kernel.content()["10.2.1.1/32"]; got != 2001 {
		t.Errorf("existing entry has identity %d in the full map, want 2001", got)
	}
	// A pending entry that is taken back is no longer tried; one that changes is written as it is by then.
	b.apply(remove("10.2.1.4/32"), upsert("10.2.1.5/32", 2005))
	b.step(time.Second)
	if s := b.status(); s.Pending != 1 || !s.Full {
		t.Errorf("status %+v, want full, 1 pending", s)
	}
	b.apply(remove("10.2.1.2/32"))
	b.step(retryMin)
	b.step(retryMin)
	want := map[string]uint32{"10.2.1.1/32": 2001, "10.2.1.3/32": 1003, "10.2.1.5/32": 2005}
	if diff := cmp.Diff(want, kernel.content()); diff != "" {
		t.Errorf("content (-want +got):\n%s", diff)
	}
	if s := b.status(); s.Full || s.Pending != 0 || s.LastError != "" || s.Failures == 0 {
		t.Errorf("status %+v, want that all is well and failures are counted", s)
	}
}

// A write that fails is tried again, without holding up any other.
//
// invariant 7
func TestRefusedWrites(t *testing.T) {
	kernel := newRecorder()
	bad := bpf.MakeIPCacheKey(netip.MustParsePrefix("10.2.1.1/32"))
	refuse := func(key bpf.IPCacheKey) error {
		if key == bad {
			return unix.ENOMEM
		}
		return nil
	}
	kernel.refuse = refuse
	b := newReconcilerBench(t, kernel)
	b.apply(upsert("10.2.1.1/32", 1001), upsert("10.2.1.2/32", 1002))
	for range 3 {
		b.step(retryMax)
		if s := b.status(); s.Full || s.Pending != 1 || len(kernel.entries) != 1 {
			t.Fatalf("status %+v, %d entries: want 1 pending, not full, 1 entry", s, len(kernel.entries))
		}
	}
	kernel.refuse = nil
	b.step(0)
	if len(kernel.entries) != 1 {
		t.Error("tried again before its time")
	}
	b.step(retryMax)
	if diff := cmp.Diff(map[string]uint32{"10.2.1.1/32": 1001, "10.2.1.2/32": 1002}, kernel.content()); diff != "" {
		t.Errorf("content (-want +got):\n%s", diff)
	}
	kernel.refuse = refuse
	b.apply(remove("10.2.1.1/32"), remove("10.2.1.2/32"))
	b.step(0)
	kernel.refuse = nil
	b.step(retryMax)
	if len(kernel.entries) != 0 || b.status().Pending != 0 {
		t.Errorf("entries %v, want that the refused deletion was made up for", kernel.content())
	}
}

// Whatever happens in between - failures, restarts, tampering - the map ends equal to the table.
func TestReconcilerEqualsModel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	kernel := newRecorder()
	b := newReconcilerBench(t, kernel)
	b.heard = map[identity.ClusterID]bool{0: true, 2: true}
	model := map[string]uint32{}
	randomPrefix := func() string {
		addr := netip.AddrFrom4([4]byte{10, byte(rng.IntN(3)), byte(rng.IntN(3)), byte(rng.IntN(8))})
		p, _ := addr.Prefix([]int{8, 16, 24, 30, 32, 32, 32}[rng.IntN(7)])
		return p.String()
	}
	for range 3000 {
		switch rng.IntN(10) {
		case 0:
			b.step(time.Duration(rng.IntN(5000)) * time.Millisecond)
		case 1:
			kernel.refuse = func(bpf.IPCacheKey) error {
				if rng.IntN(3) == 0 {
					return []error{unix.ENOMEM, unix.ENOSPC}[rng.IntN(2)]
				}
				return nil
			}
		case 2:
			kernel.refuse = nil
		case 3:
			if rng.IntN(20) == 0 { // restart: only the kernel and the table stay
				table := b.table
				b = newReconcilerBench(t, kernel)
				b.heard = map[identity.ClusterID]bool{0: true, 2: true}
				b.table = table
			}
		case 4:
			if rng.IntN(20) == 0 { // somebody else writes; the comparison of the whole is due
				kernel.entries[bpf.MakeIPCacheKey(netip.MustParsePrefix(randomPrefix()))] = bpf.IPCacheValue{Identity: 131999}
				b.unread = true
			}
		case 5, 6:
			prefix := randomPrefix()
			b.apply(remove(prefix))
			delete(model, prefix)
		default:
			prefix, id := randomPrefix(), uint32(131072+rng.IntN(4))
			b.apply(upsert(prefix, identity.ID(id)))
			model[prefix] = id
		}
	}
	kernel.refuse = nil
	b.step(retryMax)
	b.step(retryMax)
	if diff := cmp.Diff(model, kernel.content()); diff != "" {
		t.Errorf("map differs from the model (-model +map):\n%s", diff)
	}
	if s := b.status(); s.Entries != len(model) || s.Pending != 0 {
		t.Errorf("status %+v, want %d entries, none pending", s, len(model))
	}
}
