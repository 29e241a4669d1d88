// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/bpf/measure"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// fastBench is a fast path in front of a map in memory, with tables that programs see.
type fastBench struct {
	*fastPath
	t      *testing.T
	kernel *recorder
	coll   *ebpf.Collection
}

func newFastBench(t *testing.T) *fastBench {
	b := &fastBench{t: t, kernel: newRecorder(), coll: newMeasure(t, nil, 1, 1)}
	b.fastPath = newFastPath(b.kernel, fastMapsOf(t, b.coll), 10_000, func() int { return 0 })
	t.Cleanup(b.Close)
	return b
}

func (b *fastBench) rebuild() error {
	return b.Dump(func([]bpf.IPCacheKey, []bpf.IPCacheValue) {})
}

// set makes entries of an identity.
func (b *fastBench) set(id uint32, prefixes ...string) (int, error) {
	var keys []bpf.IPCacheKey
	var values []bpf.IPCacheValue
	for _, p := range prefixes {
		keys = append(keys, bpf.MakeIPCacheKey(netip.MustParsePrefix(p)))
		values = append(values, bpf.IPCacheValue{Identity: id})
	}
	return b.Update(keys, values)
}

// seen is the identity that programs find for an address, of which the map, for them, has nothing.
func (b *fastBench) seen(addr string) uint32 {
	b.t.Helper()
	a := netip.MustParseAddr(addr)
	key := bpf.MakeIPCacheKey(netip.PrefixFrom(a, a.BitLen()))
	key.PrefixLen = 0
	if err := b.coll.Maps[measure.LookupMapMeasureList].Put(uint32(0), key); err != nil {
		b.t.Fatal(err)
	}
	return look(b.t, b.coll, measure.LookupProgTryIdentity, 1, 1).Last
}

func (b *fastBench) want(addr string, id uint32) {
	b.t.Helper()
	if got := b.seen(addr); got != id {
		b.t.Errorf("programs find identity %d for %s, want %d", got, addr, id)
	}
}

// checkPart fails unless the map has all that the tables have.
func (b *fastBench) checkPart() (hosts int) {
	b.t.Helper()
	for at := range b.hosts.tables {
		for ip, id := range b.hosts.all(at) {
			hosts++
			key := bpf.IPCacheKey{PrefixLen: []uint32{64, 160}[at], Family: familyAt(at), IP: ip}
			if has := b.kernel.entries[key]; has.Identity != id || id == 0 {
				b.t.Fatalf("%v: the table has identity %d, the map %d", key, id, has.Identity)
			}
		}
	}
	return hosts
}

// Only hosts with an identity have a place in the tables.
func TestFastPathHoldsHosts(t *testing.T) {
	b := newFastBench(t)
	if _, err := b.set(7, "10.0.0.1/32", "fd00::1/128", "10.0.0.0/24", "10.0.0.2/31", "fd00::/64", "::ffff:10.0.0.9/128"); err != nil {
		t.Fatal(err)
	}
	if _, err := b.set(0, "10.0.0.3/32"); err != nil {
		t.Fatal(err)
	}
	other := bpf.MakeIPCacheKey(netip.MustParsePrefix("10.0.0.4/32"))
	other.ClusterID = 5
	if _, err := b.Update([]bpf.IPCacheKey{other}, []bpf.IPCacheValue{{Identity: 9}}); err != nil {
		t.Fatal(err)
	}
	if n := b.checkPart(); n != 3 {
		t.Errorf("%d hosts in the tables, want 3: %+v", n, b.status())
	}
	for addr, id := range map[string]uint32{
		"10.0.0.1": 7, "fd00::1": 7, "::ffff:10.0.0.9": 7, "10.0.0.2": 0, "10.0.0.3": 0, "10.0.0.4": 0, "10.0.0.9": 0, "fd00::": 0,
	} {
		b.want(addr, id)
	}
	if _, err := b.set(0, "10.0.0.1/32"); err != nil { // from now on it says nothing
		t.Fatal(err)
	}
	b.want("10.0.0.1", 0)
}

// TestFastPathOrder: while the map changes an entry, and whenever it fails to, programs do not find the entry in a table.
//
// invariant 4
func TestFastPathOrder(t *testing.T) {
	b := newFastBench(t)
	var broken error
	at := ""
	b.kernel.refuse = func(key bpf.IPCacheKey) error {
		p, _ := key.Prefix()
		if got := b.seen(p.Addr().String()); got != 0 {
			t.Errorf("programs find identity %d for %v in a table while the map changes it", got, p)
		}
		if p.Addr().String() == at {
			return broken
		}
		return nil
	}
	three := []string{"10.0.0.1/32", "fd00::2/128", "10.0.0.3/32"}
	for id := uint32(1); id <= 2; id++ { // new ones, then changed ones
		if n, err := b.set(id, three...); n != 3 || err != nil {
			t.Fatalf("set %d, %v", n, err)
		}
		for _, addr := range []string{"10.0.0.1", "fd00::2", "10.0.0.3"} {
			b.want(addr, id)
		}
	}
	broken, at = unix.ENOMEM, "fd00::2"
	if n, err := b.set(3, three...); n != 1 || !errors.Is(err, unix.ENOMEM) {
		t.Fatalf("set %d, %v, want 1 and ENOMEM", n, err)
	}
	b.want("10.0.0.1", 3)
	b.want("fd00::2", 0)
	b.want("10.0.0.3", 0)
	keys := []bpf.IPCacheKey{bpf.MakeIPCacheKey(netip.MustParsePrefix("10.0.0.1/32")), bpf.MakeIPCacheKey(netip.MustParsePrefix("fd00::2/128"))}
	if n, err := b.Delete(keys); n != 1 || err == nil {
		t.Fatalf("deleted %d, %v, want 1 and an error", n, err)
	}
	b.want("10.0.0.1", 0)
	b.checkPart()
	// A rebuild finds the entry that a failed write left alone.
	if err := b.rebuild(); err != nil {
		t.Fatal(err)
	}
	b.want("fd00::2", 2)
	b.want("10.0.0.3", 2)
}

// TestFastPathIsPartOfTheMap: whatever fails and whatever others do, a table has nothing that the map has not, and after a
// rebuild it has all hosts that there is room for.
//
// mechanism: G4
func TestFastPathIsPartOfTheMap(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	b := newFastBench(t)
	create := b.hosts.create
	for round := range 2000 {
		b.kernel.refuse, b.hosts.create = nil, create
		if rng.IntN(3) == 0 {
			b.kernel.refuse = func(bpf.IPCacheKey) error {
				return []error{nil, nil, unix.ENOSPC}[rng.IntN(3)]
			}
		}
		if rng.IntN(3) == 0 {
			b.hosts.create = func(bpf.Family, int) (*hostTable, error) { return nil, unix.ENOMEM }
		}
		var keys []bpf.IPCacheKey
		var values []bpf.IPCacheValue
		first := rng.IntN(5000)
		for i := range 1 + rng.IntN(40) {
			keys = append(keys, tortureKey(first+i))
			values = append(values, bpf.IPCacheValue{Identity: 1 + rng.Uint32N(100)})
		}
		switch n := rng.IntN(10); {
		case n < 3:
			_, _ = b.Delete(keys)
		case n == 3 && round%5 == 0:
			_ = b.rebuild()
		default:
			_, _ = b.Update(keys, values)
		}
		b.checkPart()
	}
	b.kernel.refuse, b.hosts.create = nil, create
	if err := b.rebuild(); err != nil {
		t.Fatal(err)
	}
	s := b.status()
	n := b.checkPart()
	crowded := s.IPv4.Crowded + s.IPv6.Crowded
	if n+crowded != len(b.kernel.entries) || crowded > n/100 || s.IPv4.Entries+s.IPv6.Entries != n || s.Drift != 0 || s.LastError != "" {
		t.Errorf("%d of %d hosts are in the tables; status %+v", n, len(b.kernel.entries), s)
	}
}

// TestFastPathWithoutMemory: where a table cannot be had, the map alone is asked, the status says why, and a later rebuild
// makes up for it.
func TestFastPathWithoutMemory(t *testing.T) {
	b := newFastBench(t)
	create := b.hosts.create
	b.hosts.create = func(bpf.Family, int) (*hostTable, error) { return nil, unix.ENOMEM }
	if _, err := b.set(7, "10.0.0.1/32"); err != nil {
		t.Fatal(err)
	}
	b.want("10.0.0.1", 0)
	if s := b.status(); s.LastError == "" || s.IPv4 != (HostTableStatus{}) {
		t.Errorf("status %+v, want an error and no table", s)
	}
	b.hosts.create = create
	if err := b.rebuild(); err != nil {
		t.Fatal(err)
	}
	b.want("10.0.0.1", 7)
	if s := b.status(); s.LastError != "" || s.IPv4.Entries != 1 || s.Rebuilds != 1 {
		t.Errorf("status %+v, want an entry, a rebuild and no error", s)
	}
	// What somebody else removed from the map is noticed, and a table that nobody needs goes.
	clear(b.kernel.entries)
	b.want("10.0.0.1", 7)
	if err := b.rebuild(); err != nil {
		t.Fatal(err)
	}
	b.want("10.0.0.1", 0)
	if s := b.status(); s.Drift != 1 || s.IPv4 != (HostTableStatus{}) {
		t.Errorf("status %+v, want a drift of 1 and no table", s)
	}
}

// TestFastPathGrows: tables follow the number of hosts that are alone in their networks, up and, at a rebuild, down; when a
// table is made larger, what is expected is made room for at once.
func TestFastPathGrows(t *testing.T) {
	b := newFastBench(t)
	b.hosts.limit = 100_000
	add := func(from, to int) {
		var keys []bpf.IPCacheKey
		for i := from; i < to; i++ {
			keys = append(keys, bpf.MakeIPCacheKey(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), byte(i >> 16)}), 32)))
		}
		if _, err := b.Update(keys, make([]bpf.IPCacheValue, len(keys))); err != nil {
			t.Fatal(err)
		}
		values := make([]bpf.IPCacheValue, len(keys))
		for i := range values {
			values[i].Identity = uint32(1000 + from + i)
		}
		if _, err := b.Update(keys, values); err != nil {
			t.Fatal(err)
		}
	}
	last := 0
	for n := 100; n <= 20_000; n *= 2 {
		add(n/2, n)
		s := b.status().IPv4
		if s.Capacity < s.Entries || s.Capacity > 4*n+500 || s.Capacity < last {
			t.Errorf("%d hosts: %+v", n, s)
		}
		last = s.Capacity
	}
	b.want("10.49.0.0", 1000+49*256)
	for key := range b.kernel.entries {
		if key.IP[1] > 0 {
			delete(b.kernel.entries, key)
		}
	}
	if err := b.rebuild(); err != nil {
		t.Fatal(err)
	}
	if s := b.status().IPv4; s.Entries == 0 || s.Capacity > last/8 {
		t.Errorf("after a rebuild of few: %+v", s)
	}
	b.hosts.expected = func() int { return 50_000 }
	add(30_000, 35_000)
	if s := b.status().IPv4; s.Capacity < 50_000 || s.Networks != 0 {
		t.Errorf("with 50,000 expected: %+v", s)
	}
}

// TestFastPathOutlivesTheAgent: programs go on reading the tables while no agent runs; the next agent replaces them without
// a gap.
//
// invariant 1
// lesson: A1
func TestFastPathOutlivesTheAgent(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	h.cfg.IPs.Apply([]ipcache.Op{upsert("10.2.1.10/32", 131329), upsert("fd00::1/128", 131330), upsert("10.2.0.0/16", 2)})
	pinned := func() map[uint32]uint32 {
		ids := map[uint32]uint32{}
		m, err := ebpf.LoadPinnedMap(h.cfg.BPFFS+"/weft/hosts", nil)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		for at := range uint32(2) {
			var id uint32
			if err := m.Lookup(at, &id); err == nil {
				ids[at] = id
			}
		}
		return ids
	}
	a := h.start()
	h.wantEntries(map[string]identity.ID{"10.2.1.10/32": 131329, "fd00::1/128": 131330, "10.2.0.0/16": 2})
	if s := a.Status().FastPath; s.IPv4.Entries != 1 || s.IPv6.Entries != 1 || s.Rebuilds != 1 || s.LastError != "" {
		t.Errorf("status %+v, want an entry of each family and one rebuild", s)
	}
	first := pinned()
	a.stop()
	if after := pinned(); len(first) != 2 || fmt.Sprint(after) != fmt.Sprint(first) {
		t.Errorf("tables %v without the agent, %v with it: want the same two", after, first)
	}
	a = h.start()
	testutil.Eventually(t, patience, func() error {
		if s := a.Status().FastPath; s.IPv4.Entries != 1 || s.IPv6.Entries != 1 {
			return fmt.Errorf("status %+v, want an entry of each family", s)
		}
		return nil
	})
	for at, id := range pinned() {
		if id == first[at] {
			t.Errorf("table %d is still that of the agent before", at)
		}
	}
	if s := a.Status(); s.IPCache.Written != 0 {
		t.Errorf("status %+v, want nothing written", s.IPCache)
	}
}
