// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/bpf/measure"
)

// nearBench is a map with its fast path, and programs that remember what they find.
type nearBench struct {
	t      *testing.T
	coll   *ebpf.Collection
	path   *fastPath
	listed []netip.Addr
}

func newNearBench(t *testing.T, listed []netip.Addr) *nearBench {
	b := &nearBench{t: t, coll: newMeasure(t, nil, uint32(len(listed)), 1<<16), listed: listed}
	b.path = newFastPath(&kernelMap{m: b.coll.Maps[bpf.MapIPCache]}, fastMapsOf(t, b.coll), 1<<16, func() int { return 0 })
	t.Cleanup(b.path.Close)
	return b
}

// find asks a program once for each address, or so often that it remembers, and returns what it said of the last.
func (b *nearBench) find(i, times int) uint32 {
	key := bpf.MakeIPCacheKey(netip.PrefixFrom(b.listed[i], b.listed[i].BitLen()))
	key.PrefixLen = 0
	if err := b.coll.Maps[measure.LookupMapMeasureList].Put(uint32(0), key); err != nil {
		b.t.Fatal(err)
	}
	return look(b.t, b.coll, measure.LookupProgTryNear, uint32(times), 1).Last
}

// known is how many addresses the CPUs are sure of.
func (b *nearBench) known() (n int) {
	const known, stateAt, size = 3, 30, 32 // struct near_end in lib/structs.h
	var perCPU [][]byte
	near := b.coll.Maps[bpf.MapNear]
	for i := range near.MaxEntries() {
		if err := near.Lookup(i, &perCPU); err != nil {
			b.t.Fatal(err)
		}
		for _, end := range perCPU {
			if len(end) == size && end[stateAt] == known {
				n++
			}
		}
	}
	return n
}

// TestNearEnds: whatever is written to the map, a program that remembered addresses takes no answer from before, be they
// hosts, in a network, or without entry, and while their tables grow and are made anew.
func TestNearEnds(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var listed []netip.Addr
	for i := range 4 {
		listed = append(listed, netip.AddrFrom4([4]byte{10, 0, byte(i), 7}), netip.MustParseAddr(fmt.Sprintf("fd00:0:0:%d::7", i)))
	}
	b := newNearBench(t, listed)
	truth := map[netip.Prefix]uint32{}
	want := func(addr netip.Addr) uint32 {
		for bits := addr.BitLen(); bits >= 0; bits-- {
			if p, err := addr.Prefix(bits); err == nil && truth[p] != 0 {
				return truth[p]
			}
		}
		return 0
	}
	change := func(p netip.Prefix, identity uint32) {
		t.Helper()
		var err error
		if keys := []bpf.IPCacheKey{bpf.MakeIPCacheKey(p)}; identity != 0 {
			_, err = b.path.Update(keys, []bpf.IPCacheValue{{Identity: identity}})
		} else if truth[p] != 0 {
			_, err = b.path.Delete(keys)
		}
		if err != nil {
			t.Fatal(err)
		}
		truth[p] = identity
	}
	other := 0
	for round := range 400 {
		addr := listed[rng.IntN(len(listed))]
		bits := []int{addr.BitLen(), addr.BitLen() - 8, addr.BitLen() - 24}[rng.IntN(3)]
		p, err := addr.Prefix(bits)
		if err != nil {
			t.Fatal(err)
		}
		for i := range listed {
			b.find(i, 4)
		}
		switch rng.IntN(20) {
		case 0:
			if err := b.path.Dump(func([]bpf.IPCacheKey, []bpf.IPCacheValue) {}); err != nil {
				t.Fatal(err)
			}
		case 1: // others come, until the table is a larger one
			for range 10 {
				other++
				change(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 9, byte(other >> 8), byte(other)}), 32), 5)
			}
		case 2, 3, 4, 5, 6:
			change(p, 0)
		default:
			change(p, uint32(1000+round))
		}
		for i, addr := range listed {
			if got, want := b.find(i, 1), want(addr); got != want {
				t.Fatalf("round %d: %v is %d after a change to %v, want %d", round, addr, got, p, want)
			}
		}
	}
	for i := range listed {
		b.find(i, 4)
	}
	if n := b.known(); n == 0 {
		t.Error("no CPU remembers any address")
	}
}

// TestNearEndsOfAKilledWriter: from the moment at which a writer begins, programs ask for every address, and so they do for
// as long as it does not end.
func TestNearEndsOfAKilledWriter(t *testing.T) {
	addr := netip.MustParseAddr("10.1.2.3")
	b := newNearBench(t, []netip.Addr{addr})
	keys := []bpf.IPCacheKey{bpf.MakeIPCacheKey(netip.MustParsePrefix("10.1.2.0/24")), bpf.MakeIPCacheKey(netip.MustParsePrefix("192.0.2.1/32"))}
	if _, err := b.path.Update(keys, []bpf.IPCacheValue{{Identity: 7}, {Identity: 8}}); err != nil {
		t.Fatal(err)
	}
	if got := b.find(0, 4); got != 7 {
		t.Fatalf("%v is %d, want 7", addr, got)
	}
	if b.known() == 0 {
		t.Fatal("no CPU remembers the address")
	}
	b.path.beginWrite()
	for identity := uint32(9); identity < 20; identity++ {
		if err := b.coll.Maps[bpf.MapIPCache].Put(keys[0], bpf.IPCacheValue{Identity: identity}); err != nil {
			t.Fatal(err)
		}
		if got := b.find(0, 4); got != identity {
			t.Fatalf("%v is %d, want %d", addr, got, identity)
		}
	}
}
