// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"github.com/weftmesh/weft/bpf/measure"
	"github.com/weftmesh/weft/internal/testutil"
)

var families = []Family{FamilyIPv4, FamilyIPv6}

// newTable makes a table in ordinary memory.
func newTable(t testing.TB, family Family, entries int, seeds [3]uint64) *HostTable {
	t.Helper()
	size := int(HostsLines(family, entries)) * HostsLineBytes
	memory := make([]byte, max(size, 1<<15)) // a large object is aligned to a page
	table, err := NewHostTable(memory[:size], family, entries, seeds)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// randomIP returns one of few addresses in few networks, so that the same ones come again.
func randomIP(rng *rand.Rand, family Family) (ip [16]byte) {
	if family == FamilyIPv4 {
		return [16]byte{10, byte(rng.IntN(3)), byte(rng.IntN(8)), byte(rng.IntN(32))}
	}
	return [16]byte{0: 0xfd, 7: byte(rng.IntN(24)), 8: byte(rng.IntN(2)), 15: byte(rng.IntN(16))}
}

func randomSeeds(t testing.TB) (*rand.Rand, [3]uint64) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	return rng, [3]uint64{rng.Uint64(), rng.Uint64(), rng.Uint64()}
}

// content is what a table yields.
func content(t testing.TB, table *HostTable) map[[16]byte]uint32 {
	t.Helper()
	all := map[[16]byte]uint32{}
	for ip, identity := range table.All {
		if _, twice := all[ip]; twice {
			t.Errorf("%v is in the table twice", ip)
		}
		all[ip] = identity
	}
	return all
}

// TestHostTableEqualsModel makes random changes to small tables, at most loads up to twice what they are planned for.
func TestHostTableEqualsModel(t *testing.T) {
	rng, seeds := randomSeeds(t)
	for _, family := range families {
		table, model := newTable(t, family, 400, seeds), map[[16]byte]uint32{}
		refused := 0
		for range 100_000 {
			ip := randomIP(rng, family)
			switch had := model[ip]; rng.IntN(3) {
			case 0:
				if gone := table.Delete(ip); gone != (had != 0) {
					t.Fatalf("%v: delete of %v, which has %d, returned %t", family, ip, had, gone)
				}
				delete(model, ip)
			default:
				identity := 1 + rng.Uint32N(1<<31)
				if table.Set(ip, identity) {
					model[ip] = identity
				} else if refused++; had != 0 {
					t.Fatalf("%v: no room for %v, which is in the table", family, ip)
				}
			}
			if got := table.Get(ip); got != model[ip] {
				t.Fatalf("%v: %v has identity %d, want %d", family, ip, got, model[ip])
			}
		}
		got := content(t, table)
		if fmt.Sprint(got) != fmt.Sprint(model) || table.Len() != len(model) {
			t.Errorf("%v: %d entries, length %d, differ from the %d of the model", family, len(got), table.Len(), len(model))
		}
		if refused == 0 || refused > 30_000 {
			t.Errorf("%v: %d of some 66,000 refused: want a table that was full at times", family, refused)
		}
		for ip := range model {
			table.Delete(ip)
		}
		for i := lineWords; i < len(table.words)-table.groups*64*hostsSlotWords(family); i++ {
			if w := table.words[i].Load(); w != 0 {
				t.Fatalf("%v: word %d of summary or tags is %#x in an empty table", family, i, w)
			}
		}
	}
}

// TestHostTableEmptySlotIsEmpty: with tag 1, an empty slot above one that matches looks like a match, and still holds the
// address that was deleted from it.
func TestHostTableEmptySlotIsEmpty(t *testing.T) {
	_, seeds := randomSeeds(t)
	for _, family := range families {
		table := newTable(t, family, 1, seeds)
		var same [][16]byte
		for i := 0; len(same) < 2; i++ {
			ip := [16]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}
			p := table.place(table.address(&ip))
			if p.tag != 1 {
				continue
			}
			first := p
			if len(same) > 0 {
				first = table.place(table.address(&same[0]))
			}
			if p.first == first.first && p.second == first.second {
				same = append(same, ip)
			}
		}
		// Both go into one bucket if the other one is fuller.
		other := table.place(table.address(&same[0])).second
		table.words[other].Store(0xfe_fe_fe)
		table.Set(same[0], 1)
		table.Set(same[1], 2)
		table.Delete(same[1])
		if got := table.Get(same[1]); got != 0 {
			t.Errorf("%v: identity %d after the deletion", family, got)
		}
		table.Set(same[1], 3)
		table.Delete(same[0])
		if got := table.Get(same[1]); got != 3 || table.Len() != 1 {
			t.Errorf("%v: identity %d, %d entries, want 3 of the only one", family, got, table.Len())
		}
	}
}

// TestHostTableHoldsWhatItIsPlannedFor: at the planned load, next to nothing finds its buckets full.
func TestHostTableHoldsWhatItIsPlannedFor(t *testing.T) {
	_, seeds := randomSeeds(t)
	const entries = 100_000
	for _, family := range families {
		table, refused := newTable(t, family, entries, seeds), 0
		for i := range entries {
			ip := [16]byte{0: 10, 1: byte(i >> 16), 2: byte(i >> 8), 3: byte(i)}
			if family == FamilyIPv6 {
				ip = [16]byte{0: 0xfd, 6: byte(i >> 16), 7: byte(i >> 8), 15: byte(i)}
			}
			if !table.Set(ip, 1) {
				refused++
			}
		}
		perEntry := float64(len(table.words)*8) / entries
		t.Logf("%v: %d of %d refused; %.1f bytes of kernel memory and %.1f of heap an entry", family, refused, entries,
			perEntry, float64(4*len(table.hosts))/entries)
		if refused > entries/500 {
			t.Errorf("%v: %d of %d refused, want at most %d", family, refused, entries, entries/500)
		}
		if most := map[Family]float64{FamilyIPv4: 14, FamilyIPv6: 48.5}[family]; perEntry > most {
			t.Errorf("%v: %.1f bytes an entry, want at most %.1f", family, perEntry, most)
		}
	}
}

// TestHostTableTakesPods: IPv6 addresses of pods differ in their last bytes alone. Whatever the seeds, they spread.
func TestHostTableTakesPods(t *testing.T) {
	const tables, networks, hosts = 2000, 4, 31
	rng, _ := randomSeeds(t)
	refused := 0
	for range tables {
		table := newTable(t, FamilyIPv6, 128, [3]uint64{rng.Uint64(), rng.Uint64(), rng.Uint64()})
		for i := range networks * hosts {
			if !table.Set([16]byte{0: 0xfd, 14: byte(i / hosts), 15: byte(i % hosts)}, 1) {
				refused++
			}
		}
	}
	t.Logf("%d of %d refused", refused, tables*networks*hosts)
	if refused > tables*networks*hosts/1000 {
		t.Errorf("%d of %d refused, want at most one in a thousand", refused, tables*networks*hosts)
	}
}

// TestNetworksTakePods: nor do networks of pods come to lie upon each other, which would make their directory larger.
func TestNetworksTakePods(t *testing.T) {
	const directories, networks = 200, 200
	rng, _ := randomSeeds(t)
	places := 0
	for range directories {
		seeds := [3]uint64{rng.Uint64(), rng.Uint64() | 1, rng.Uint64() | 1}
		n := NewNetworks(FamilyIPv6, 0, seeds, (&networksMemory{limit: NetworksSlots}).chunk)
		for i := range networks {
			if err := n.Add([16]byte{0: 0xfd, 14: byte(i)}); err != nil {
				t.Fatal(err)
			}
		}
		places += n.places
	}
	t.Logf("%d places for a network", places/directories/networks)
	if places > 16*directories*networks {
		t.Errorf("%d places for %d networks, want at most 16 for each", places/directories, networks)
	}
}

// TestHostTableFlooded: who knew the seeds and sent addresses of one bucket would fill two buckets and no more; the rest
// finds no room, and others are not harmed.
func TestHostTableFlooded(t *testing.T) {
	rng, seeds := randomSeeds(t)
	for _, family := range families {
		table := newTable(t, family, 10_000, seeds)
		victim := randomIP(rng, family)
		want := table.place(table.address(&victim))
		stored, tried := 0, 0
		for i := uint32(0); tried < 200; i++ {
			ip := [16]byte{0: 11, 1: byte(i >> 16), 2: byte(i >> 8), 3: byte(i)}
			if p := table.place(table.address(&ip)); p.first/lineWords != want.first/lineWords {
				continue
			}
			if tried++; table.Set(ip, 7) {
				stored++
			}
		}
		if stored > groupBuckets*bucketSlots {
			t.Errorf("%v: %d of one group stored, want at most %d", family, stored, groupBuckets*bucketSlots)
		}
		if table.Set(victim, 9) && table.Get(victim) != 9 {
			t.Errorf("%v: %v is stored but not found", family, victim)
		}
		others := 0
		for range 1000 {
			ip := randomIP(rng, family)
			if p := table.place(table.address(&ip)); p.first/lineWords == want.first/lineWords {
				continue
			}
			if others++; !table.Set(ip, 8) || table.Get(ip) != 8 {
				t.Fatalf("%v: no room for %v, which is of another group", family, ip)
			}
		}
		if others == 0 {
			t.Errorf("%v: all were of the flooded group", family)
		}
	}
}

func TestNewHostTableRefusesNonsense(t *testing.T) {
	memory := make([]byte, 1<<16)
	if _, err := NewHostTable(memory, FamilyNone, 10, [3]uint64{}); err == nil {
		t.Error("a table of no family: no error")
	}
	if _, err := NewHostTable(memory, FamilyIPv4, 1_000_000, [3]uint64{}); err == nil {
		t.Error("a million entries in 64 KiB: no error")
	}
	if _, err := NewHostTable(memory[8:], FamilyIPv4, 10, [3]uint64{}); err == nil {
		t.Error("memory that is not aligned: no error")
	}
}

// show puts a table where programs find it, and returns the memory of its map.
func show(t testing.TB, maps map[string]*ebpf.Map, family Family, entries int, seeds [3]uint64) (*HostTable, []byte) {
	t.Helper()
	spec, err := HostsSpec(family, entries)
	if err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMap(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	size := (int(spec.MaxEntries)*HostsLineBytes + 4095) / 4096 * 4096
	memory, err := syscall.Mmap(m.FD(), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Munmap(memory) })
	table, err := NewHostTable(memory, family, entries, seeds)
	if err != nil {
		t.Fatal(err)
	}
	mustPut(t, maps[MapHosts], uint32(family-FamilyIPv4), m)
	mustPut(t, maps[MapFast], uint32(family-FamilyIPv4), FastHead{Others: math.MaxUint64})
	return table, memory
}

// prober looks up single addresses with the code of the programs.
type prober struct {
	*ebpf.Collection
}

func newProber(t testing.TB) prober {
	t.Helper()
	testutil.RequireRoot(t)
	spec, err := measure.LoadTry()
	if err != nil {
		t.Fatal(err)
	}
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("load the measuring programs: %+v", err)
	}
	t.Cleanup(coll.Close)
	return prober{coll}
}

func (p prober) find(t testing.TB, family Family, ip [16]byte) uint32 {
	t.Helper()
	order := measure.Measurement{Length: 1}
	mustPut(t, p.Maps[measure.LookupMapMeasureList], uint32(0), IPCacheKey{Family: family, IP: ip})
	mustPut(t, p.Maps[measure.LookupMapMeasureOrder], uint32(0), order)
	if _, err := p.Programs[measure.LookupProgTryIdentity].Run(&ebpf.RunOptions{Data: make([]byte, 64)}); err != nil {
		t.Fatal(err)
	}
	if err := p.Maps[measure.LookupMapMeasureOrder].Lookup(uint32(0), &order); err != nil {
		t.Fatal(err)
	}
	return order.Last
}

// TestProgramsFindWhatTheTableHolds compares writer and reader, with the map empty but for a prefix of each family.
func TestProgramsFindWhatTheTableHolds(t *testing.T) {
	p := newProber(t)
	rng, seeds := randomSeeds(t)
	for family, all := range map[Family]string{FamilyIPv4: "0.0.0.0/0", FamilyIPv6: "::/0"} {
		const elsewhere = 77
		mustPut(t, p.Maps[MapIPCache], MakeIPCacheKey(netip.MustParsePrefix(all)), IPCacheValue{Identity: elsewhere})
		table, memory := show(t, p.Maps, family, 400, seeds)
		found, hidden := 0, 0
		for range 4000 {
			ip := randomIP(rng, family)
			switch rng.IntN(4) {
			case 0:
				table.Delete(ip)
			case 1:
				table.Set(ip, 1000+rng.Uint32N(1000))
			default:
				want := table.Get(ip)
				switch got := p.find(t, family, ip); {
				case got == want:
					found++
				case got != elsewhere:
					t.Fatalf("%v: %v has identity %d for programs, %d in the table", family, ip, got, want)
				case want != 0:
					hidden++
				}
			}
		}
		// Where a tag stands in a bucket more often than programs look, they ask the map.
		if found < 500 || hidden > found/100 {
			t.Errorf("%v: programs found %d and did not see %d that the table holds", family, found, hidden)
		}
		// A table of another layout is left alone, as is none at all.
		ip := randomIP(rng, family)
		table.Set(ip, 2000)
		memory[0]++
		if got := p.find(t, family, ip); got != elsewhere {
			t.Errorf("%v: identity %d out of a table of another layout, want that of the map", family, got)
		}
		memory[0]--
		if got := p.find(t, family, ip); got != 2000 {
			t.Errorf("%v: identity %d, want that of the table", family, got)
		}
		if err := p.Maps[MapHosts].Delete(uint32(family - FamilyIPv4)); err != nil {
			t.Fatal(err)
		}
		if got := p.find(t, family, ip); got != elsewhere {
			t.Errorf("%v: identity %d without a table, want that of the map", family, got)
		}
	}
}

// TestFastPathPackets: what programs make of a packet does not depend on where the identity of its peer is found. The
// hosts are in the tables alone here.
func TestFastPathPackets(t *testing.T) {
	k := loadKernel(t)
	_, seeds := randomSeeds(t)
	tables := map[Family]*HostTable{}
	for _, family := range families {
		tables[family], _ = show(t, k.Maps, family, 10, seeds)
	}
	for prefix, identity := range identities {
		key := MakeIPCacheKey(prefix)
		if !prefix.IsSingleIP() || identity == 0 {
			continue
		}
		if !tables[key.Family].Set(key.IP, identity) {
			t.Fatalf("no room for %v", prefix)
		}
		if err := k.Maps[MapIPCache].Delete(key); err != nil {
			t.Fatal(err)
		}
	}
	for group, cases := range allCases() {
		for _, c := range cases {
			t.Run(group+"/"+c.name, func(t *testing.T) {
				if got := line(k.check(t, Ingress, c.frame)); got != c.want {
					t.Errorf("frame %x:\n got %s\nwant %s", c.frame, got, c.want)
				}
				k.check(t, Egress, c.frame)
			})
		}
	}
}
