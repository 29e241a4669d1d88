// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/bpf/measure"
	"github.com/weftmesh/weft/internal/testutil"
)

const (
	lookupCIDRs = 10_000
	podsPerCIDR = 250
	listLength  = 1 << 20
)

// addresses are the hosts and CIDRs of one family, and what is neither.
type addresses struct {
	family bpf.Family
	hosts  int
}

func (a addresses) addr(block, within uint32, kind byte) netip.Addr {
	if a.family == bpf.FamilyIPv4 {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], uint32(kind)<<24+block<<8+within)
		return netip.AddrFrom4(b)
	}
	b := [16]byte{0: 0xfd, 2: kind}
	binary.BigEndian.PutUint32(b[4:], block)
	binary.BigEndian.PutUint32(b[12:], within)
	return netip.AddrFrom16(b)
}

// host i lives in the pod CIDR i/podsPerCIDR.
func (a addresses) host(i int) netip.Addr {
	return a.addr(uint32(i/podsPerCIDR), uint32(1+i%podsPerCIDR), 10)
}

// cidr i is one without hosts.
func (a addresses) cidr(i int) netip.Prefix {
	p, err := a.addr(uint32(i)*3, 0, 100).Prefix(map[bpf.Family]int{bpf.FamilyIPv4: 24, bpf.FamilyIPv6: 64}[a.family])
	if err != nil {
		panic(err)
	}
	return p
}

// podCIDR holds host i.
func (a addresses) podCIDR(i int) netip.Prefix {
	p, err := a.host(i).Prefix(map[bpf.Family]int{bpf.FamilyIPv4: 24, bpf.FamilyIPv6: 64}[a.family])
	if err != nil {
		panic(err)
	}
	return p
}

// draw returns a source of addresses by its name.
func (a addresses) draw(name string, rng *rand.Rand) func() netip.Addr {
	switch name {
	case "uniform":
		return func() netip.Addr { return a.host(rng.IntN(a.hosts)) }
	case "zipf":
		// Popular hosts are not neighbours.
		perm := rng.Perm(a.hosts)
		z := rand.NewZipf(rng, 1.01, 1, uint64(a.hosts-1))
		return func() netip.Addr { return a.host(perm[z.Uint64()]) }
	case "cidr":
		return func() netip.Addr { return a.addr(uint32(rng.IntN(lookupCIDRs))*3, rng.Uint32N(256), 100) }
	case "sibling": // in a pod CIDR, next to hosts
		return func() netip.Addr {
			return a.addr(uint32(rng.IntN(a.hosts)/podsPerCIDR), []uint32{0, 251, 252, 253, 254, 255}[rng.IntN(6)], 10)
		}
	case "none":
		return func() netip.Addr { return a.addr(rng.Uint32N(1<<16), rng.Uint32N(256), 198) }
	}
	panic(name)
}

// lookupKernel is the measuring programs with filled maps.
type lookupKernel struct {
	*ebpf.Collection
	list   []bpf.IPCacheKey
	tables map[bpf.Family]*bpf.HostTable
	rng    *rand.Rand
}

func mapMemory(b *testing.B, m *ebpf.Map, size int) []byte {
	b.Helper()
	page := unix.Getpagesize()
	memory, err := unix.Mmap(m.FD(), 0, (size+page-1)/page*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = unix.Munmap(memory) })
	return memory[:size]
}

func newLookupKernel(b *testing.B) *lookupKernel {
	b.Helper()
	testutil.RequireRoot(b)
	spec, err := measure.LoadLookup()
	if err != nil {
		b.Fatal(err)
	}
	spec.Maps[bpf.MapIPCache].MaxEntries = 2 << 20
	spec.Maps[measure.LookupMapMeasureList].MaxEntries = listLength
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		b.Fatalf("%+v", err)
	}
	b.Cleanup(coll.Close)
	k := &lookupKernel{Collection: coll, tables: map[bpf.Family]*bpf.HostTable{}, rng: rand.New(rand.NewPCG(1, 2))}
	memory := mapMemory(b, coll.Maps[measure.LookupMapMeasureList], listLength*int(unsafe.Sizeof(bpf.IPCacheKey{})))
	k.list = unsafe.Slice((*bpf.IPCacheKey)(unsafe.Pointer(&memory[0])), listLength)
	return k
}

// fill puts hosts and CIDRs of a family into the trie and the hosts into the fast path.
func (k *lookupKernel) fill(b *testing.B, a addresses) {
	b.Helper()
	inner, err := bpf.HostsSpec(a.family, a.hosts)
	if err != nil {
		b.Fatal(err)
	}
	m, err := ebpf.NewMap(inner)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { m.Close() })
	memory := mapMemory(b, m, int(inner.MaxEntries)*bpf.HostsLineBytes)
	table, err := bpf.NewHostTable(memory, a.family, a.hosts, [3]uint64{k.rng.Uint64(), k.rng.Uint64(), k.rng.Uint64()})
	if err != nil {
		b.Fatal(err)
	}
	var keys []bpf.IPCacheKey
	var values []bpf.IPCacheValue
	add := func(p netip.Prefix, id int) {
		keys = append(keys, bpf.MakeIPCacheKey(p))
		values = append(values, bpf.IPCacheValue{Identity: uint32(id)})
	}
	for _, i := range k.rng.Perm(a.hosts) {
		addr := a.host(i)
		add(netip.PrefixFrom(addr, addr.BitLen()), 131072+i%500)
	}
	for i := range lookupCIDRs {
		add(a.cidr(i), 65536+i)
	}
	for i := 0; i < a.hosts; i += podsPerCIDR {
		add(a.podCIDR(i), 70000+i)
	}
	if _, err := k.Maps[bpf.MapIPCache].BatchUpdate(keys, values, nil); err != nil {
		b.Fatal(err)
	}
	networks, head := k.networks(b, a.family)
	if err := k.Maps[bpf.MapHosts].Put(uint32(a.family-1), m); err != nil {
		b.Fatal(err)
	}
	refused := 0
	for i := range a.hosts {
		if a.hosts >= podsPerCIDR {
			if err := networks.Add(keys[i].IP); err != nil {
				b.Fatal(err)
			}
		}
		if !networks.Set(keys[i].IP, values[i].Identity) && !table.Set(keys[i].IP, values[i].Identity) {
			refused++
		}
	}
	if refused > a.hosts/500 {
		b.Fatalf("the table had no room for %d of %d hosts", refused, a.hosts)
	}
	networks.Show(head)
	head.Epoch = k.rng.Uint64()
}

// networks makes networks of a family, in memory where programs find it.
func (k *lookupKernel) networks(b *testing.B, family bpf.Family) (*bpf.Networks, *bpf.FastHead) {
	b.Helper()
	heads := mapMemory(b, k.Maps[bpf.MapFast], 2*int(unsafe.Sizeof(bpf.FastHead{})))
	head := (*bpf.FastHead)(unsafe.Pointer(&heads[uintptr(family-bpf.FamilyIPv4)*unsafe.Sizeof(bpf.FastHead{})]))
	head.Seeds = [3]uint64{k.rng.Uint64(), k.rng.Uint64() | 1, k.rng.Uint64() | 1}
	return bpf.NewNetworks(family, 0, head.Seeds, func(i int) ([]byte, error) {
		spec, err := bpf.NetworksChunkSpec()
		if err != nil {
			return nil, err
		}
		m, err := ebpf.NewMap(spec)
		if err != nil {
			return nil, err
		}
		defer m.Close()
		return mapMemory(b, m, bpf.NetworksChunkBytes), k.Maps[bpf.MapNetworks].Put(bpf.NetworksSlot(family, 0)+uint32(i), m)
	}), head
}

// run returns the time of one pass over the list, and how many of its addresses had an identity.
func (k *lookupKernel) run(b *testing.B, program string) (time.Duration, uint32) {
	b.Helper()
	order := measure.Measurement{Lookups: listLength, Length: listLength}
	if err := k.Maps[measure.LookupMapMeasureOrder].Put(uint32(0), order); err != nil {
		b.Fatal(err)
	}
	_, took, err := k.Programs[program].Benchmark(make([]byte, 64), 1, nil)
	if err != nil {
		b.Fatal(err)
	}
	if err := k.Maps[measure.LookupMapMeasureOrder].Lookup(uint32(0), &order); err != nil {
		b.Fatal(err)
	}
	return took, order.Known
}

// compare looks a million addresses up by the trie alone and with the fast path, in turn, and returns the nanoseconds of
// each for a lookup, without what the program takes besides: medians.
func (k *lookupKernel) compare(b *testing.B, draw func() netip.Addr) (trie, fast float64) {
	b.Helper()
	for i := range k.list {
		addr := draw()
		k.list[i] = bpf.MakeIPCacheKey(netip.PrefixFrom(addr, addr.BitLen()))
		k.list[i].PrefixLen = 0
	}
	const rounds = 5
	var tries, fasts [rounds]float64
	for i := range rounds {
		nothing, _ := k.run(b, measure.LookupProgMeasureNothing)
		alone, known := k.run(b, measure.LookupProgMeasureTrie)
		both, same := k.run(b, measure.LookupProgMeasureIdentity)
		if known != same {
			b.Fatalf("%d addresses are known to the trie, %d with the fast path", known, same)
		}
		tries[i], fasts[i] = float64(alone-nothing)/listLength, float64(both-nothing)/listLength
	}
	slices.Sort(tries[:])
	slices.Sort(fasts[:])
	return tries[rounds/2], fasts[rounds/2]
}

// lookupGoals are the bounds for a million hosts: of the ratio to the trie alone, or of the nanoseconds.
var lookupGoals = []struct {
	draw         string
	ratio, limit float64
}{
	{draw: "uniform", ratio: 0.2}, {draw: "zipf", ratio: 0.2}, {draw: "cidr", ratio: 1.3}, {draw: "sibling"},
	{draw: "none", limit: 40},
}

// BenchmarkLookup measures identity lookups, each of which begins when the last has ended, by the code that ships, against
// the same without its fast path.
//
//	trie-ns    the trie alone
//	fast-ns    with the fast path
//	x-trie     fast-ns / trie-ns
func BenchmarkLookup(b *testing.B) {
	for _, hosts := range []int{10_000, 100_000, 1_000_000} {
		for _, family := range []bpf.Family{bpf.FamilyIPv4, bpf.FamilyIPv6} {
			b.Run(fmt.Sprintf("%v/%dk", family, hosts/1000), func(b *testing.B) {
				k := newLookupKernel(b)
				a := addresses{family, hosts}
				k.fill(b, a)
				for _, g := range lookupGoals {
					b.Run(g.draw, func(b *testing.B) {
						if hosts < 1_000_000 {
							g.ratio, g.limit = 0, 0
						}
						what := fmt.Sprintf("lookup, %v, %dk hosts, %s: ", family, hosts/1000, g.draw)
						for b.Loop() {
							trie, fast := k.compare(b, a.draw(g.draw, k.rng))
							measured(b, "trie-ns", trie, goal{what: what + "trie alone", unit: "ns"})
							measured(b, "fast-ns", fast, goal{what: what + "fast path", unit: "ns", atMost: g.limit})
							measured(b, "x-trie", fast/trie, goal{what: what + "fast path / trie alone", atMost: g.ratio})
						}
						b.ReportMetric(0, "ns/op")
					})
				}
			})
		}
	}
}
