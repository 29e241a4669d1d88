// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
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
	inner := &ebpf.MapSpec{
		Type: ebpf.Array, KeySize: 4, ValueSize: bpf.HostsLineBytes, MaxEntries: bpf.HostsLines(a.family, a.hosts),
		Flags: unix.BPF_F_MMAPABLE | unix.BPF_F_INNER_MAP,
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
	start := time.Now()
	if _, err := k.Maps[bpf.MapIPCache].BatchUpdate(keys, values, nil); err != nil {
		b.Fatal(err)
	}
	trie := time.Since(start)
	start = time.Now()
	missed := 0
	for i := range a.hosts {
		if !table.Set(keys[i].IP, values[i].Identity) {
			missed++
		}
	}
	b.Logf("trie %v fast %v missed %d of %d, %.1f B/entry", trie, time.Since(start), missed, a.hosts, float64(len(memory))/float64(a.hosts))
	if err := k.Maps[bpf.MapHosts].Put(uint32(a.family-1), m); err != nil {
		b.Fatal(err)
	}
}

// run returns the time of one pass over the list.
func (k *lookupKernel) run(b *testing.B, program string, n int) (time.Duration, uint32) {
	b.Helper()
	order := struct{ Lookups, At, Length, Known uint32 }{uint32(n), 0, listLength, 0}
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

func BenchmarkLookup(b *testing.B) {
	for _, hosts := range []int{10_000, 100_000, 1_000_000} {
		for _, family := range []bpf.Family{bpf.FamilyIPv4, bpf.FamilyIPv6} {
			b.Run(fmt.Sprintf("%v/%dk", family, hosts/1000), func(b *testing.B) {
				k := newLookupKernel(b)
				a := addresses{family, hosts}
				k.fill(b, a)
				for _, dist := range []string{"uniform", "zipf", "cidr", "sibling", "none"} {
					b.Run(dist, func(b *testing.B) {
						draw := a.draw(dist, k.rng)
						for i := range k.list {
							addr := draw()
							k.list[i] = bpf.MakeIPCacheKey(netip.PrefixFrom(addr, addr.BitLen()))
							k.list[i].PrefixLen = 0
						}
						var nothing, trie, fast time.Duration
						n := 0
						for b.Loop() {
							n += listLength
							t, _ := k.run(b, measure.LookupProgMeasureNothing, listLength)
							nothing += t
							t, known := k.run(b, measure.LookupProgMeasureTrie, listLength)
							trie += t
							t, same := k.run(b, measure.LookupProgMeasureIdentity, listLength)
							fast += t
							if known != same || (known == 0) != (dist == "none") {
								b.Fatalf("known to the trie %d, with the fast path %d of %d", known, same, listLength)
							}
						}
						per := func(d time.Duration) float64 { return float64(d-nothing) / float64(n) }
						b.ReportMetric(per(trie), "trie-ns")
						b.ReportMetric(per(fast), "ns/lookup")
						b.ReportMetric(per(fast)/per(trie), "x-trie")
						b.ReportMetric(0, "ns/op")
					})
				}
			})
		}
	}
}
