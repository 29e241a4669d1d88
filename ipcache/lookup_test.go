// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/gaissmai/bart"

	"github.com/weftmesh/weft/identity"
)

// scanAll is the plainest lookup.
func scanAll(all map[netip.Prefix]identity.ID, addr netip.Addr) (id identity.ID, found bool) {
	bits := -1
	for p, i := range all {
		if p.Contains(addr) && p.Bits() > bits {
			id, bits = i, p.Bits()
		}
	}
	return id, bits >= 0
}

// agreement holds the table's lookup to a linear scan and to bart's trie, over the same prefixes.
type agreement struct {
	table *Table
	trie  bart.Table[identity.ID]
	all   map[netip.Prefix]identity.ID
}

func newAgreement() *agreement {
	return &agreement{table: New(), all: make(map[netip.Prefix]identity.ID)}
}

func (a *agreement) set(p netip.Prefix, id identity.ID) {
	c := Claim{Prefix: p, Owner: Owner{Cluster: 2, Source: ClusterMesh, Object: "ip"}, Entry: Entry{Identity: id}}
	a.table.Apply([]Op{{Claim: c}})
	a.trie.Insert(p.Masked(), id)
	a.all[p.Masked()] = id
}

func (a *agreement) remove(p netip.Prefix) {
	c := Claim{Prefix: p, Owner: Owner{Cluster: 2, Source: ClusterMesh, Object: "ip"}}
	a.table.Apply([]Op{{Delete: true, Claim: c}})
	a.trie.Delete(p.Masked())
	delete(a.all, p.Masked())
}

func (a *agreement) check(t *testing.T, addr netip.Addr) {
	t.Helper()
	want, wantOK := scanAll(a.all, addr)
	if got, ok := a.table.Lookup(addr); got.Entry.Identity != want || ok != wantOK || ok && !got.Prefix.Contains(addr) {
		t.Fatalf("%s: the table finds %v, %v, a linear scan %v, %v", addr, got, ok, want, wantOK)
	}
	if got, ok := a.trie.Lookup(addr); got != want || ok != wantOK {
		t.Fatalf("%s: bart finds %v, %v, a linear scan %v, %v", addr, got, ok, want, wantOK)
	}
}

// randomPrefix returns prefixes that contain each other often, of both families and all lengths, not all of them masked.
func randomPrefix(rnd *rand.Rand) netip.Prefix {
	addr := randomAddr(rnd)
	bits := rnd.IntN(addr.BitLen() + 1)
	if rnd.IntN(2) == 0 {
		bits = addr.BitLen() - rnd.IntN(4)
	}
	p := netip.PrefixFrom(addr, bits)
	if rnd.IntN(2) == 0 {
		return p.Masked()
	}
	return p
}

func randomAddr(rnd *rand.Rand) netip.Addr {
	var b [16]byte
	for i := range b {
		b[i] = []byte{0, 0, 0, 1, 10, 255}[rnd.IntN(6)]
	}
	if rnd.IntN(2) == 0 {
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	b[0] = 0xfd
	return netip.AddrFrom16(b)
}

// lesson: C6
func TestLookupAgrees(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for range 20 {
		a := newAgreement()
		for n := range rnd.IntN(300) {
			if p := randomPrefix(rnd); rnd.IntN(4) == 0 {
				a.remove(p)
			} else {
				a.set(p, identity.ID(n+1))
			}
		}
		for range 300 {
			a.check(t, randomAddr(rnd))
		}
		for p := range a.all {
			a.check(t, p.Addr())
		}
		if a.table.Len() != len(a.all) {
			t.Errorf("%d prefixes, want %d", a.table.Len(), len(a.all))
		}
	}
}

// FuzzLookup makes a table of the input, 18 bytes a step, and looks up every address that occurs in it.
//
// lesson: C7
func FuzzLookup(f *testing.F) {
	step := func(op byte, p string) []byte {
		prefix := netip.MustParsePrefix(p)
		b := [18]byte{0: op, 1: byte(prefix.Bits())}
		if prefix.Addr().Is4() {
			b[0] |= 2
			a4 := prefix.Addr().As4()
			copy(b[2:], a4[:])
		} else {
			a16 := prefix.Addr().As16()
			copy(b[2:], a16[:])
		}
		return b[:]
	}
	var script []byte
	for _, p := range []string{"0.0.0.0/0", "10.0.0.1/8", "10.0.0.1/32", "10.0.0.0/31", "::/0", "fd00::1/64", "fd00::1/128", "::ffff:10.0.0.1/128"} {
		script = append(script, step(0, p)...)
		f.Add(script)
	}
	f.Add(append(script, step(1, "10.0.0.9/8")...))
	f.Fuzz(func(t *testing.T, script []byte) {
		a := newAgreement()
		var addrs []netip.Addr
		for n := 1; len(script) >= 18 && n < 200; n, script = n+1, script[18:] {
			addr := netip.AddrFrom16([16]byte(script[2:18]))
			if script[0]&2 != 0 {
				addr = netip.AddrFrom4([4]byte(script[2:6]))
			}
			p := netip.PrefixFrom(addr, int(script[1])) // may be none at all
			if !p.IsValid() || p.Masked().Addr().Is4In6() {
				if refused := a.table.Apply([]Op{{Claim: Claim{Prefix: p}}}); refused != 1 {
					t.Fatalf("%v was not refused", p)
				}
				continue
			}
			if addrs = append(addrs, addr); script[0]&1 != 0 {
				a.remove(p)
			} else {
				a.set(p, identity.ID(n))
			}
		}
		for _, addr := range addrs {
			if !addr.Is4In6() { // which the table looks up as IPv4
				a.check(t, addr)
			}
		}
	})
}

// What is no prefix is refused, and counted; what is not masked is taken as what it means. Nothing of it breaks the table.
//
// mechanism: G7
// lesson: C6
func TestStrangePrefixes(t *testing.T) {
	table := New()
	strange := []netip.Prefix{
		{}, netip.PrefixFrom(netip.Addr{}, 0), netip.PrefixFrom(netip.MustParseAddr("10.0.0.1"), 33), netip.PrefixFrom(netip.MustParseAddr("10.0.0.1"), -1),
		netip.PrefixFrom(netip.MustParseAddr("fd00::1"), 129), netip.MustParsePrefix("::ffff:10.0.0.1/128"), netip.MustParsePrefix("::ffff:0.0.0.0/96"),
	}
	for _, p := range strange {
		c := Claim{Prefix: p, Owner: Owner{Cluster: 2, Source: Source(200), Object: "ip"}, Entry: Entry{Identity: 300}}
		if refused := table.Apply([]Op{{Claim: c}, {Delete: true, Claim: c}}); refused != 2 {
			t.Errorf("%v: %d of 2 refused", p, refused)
		}
		if c, ok := table.Get(p); ok {
			t.Errorf("Get of %v: %v", p, c)
		}
		if claims := table.Claims(p); claims != nil {
			t.Errorf("Claims of %v: %v", p, claims)
		}
	}
	if _, ok := table.Lookup(netip.Addr{}); ok || table.Len() != 0 {
		t.Errorf("something came in: %d prefixes", table.Len())
	}
	unmasked := claimed(t, "10.0.0.0/8", 2, 300)
	unmasked.Prefix = netip.MustParsePrefix("10.0.0.1/8")
	table.Apply(made(unmasked))
	want := claimed(t, "10.0.0.0/8", 2, 300)
	for _, p := range []string{"10.0.0.1/8", "10.0.0.0/8", "10.9.9.9/8"} {
		if got, _ := table.Get(netip.MustParsePrefix(p)); got != want {
			t.Errorf("Get of %s: %v", p, got)
		}
		if got := table.Claims(netip.MustParsePrefix(p)); len(got) != 1 || got[0] != want {
			t.Errorf("Claims of %s: %v", p, got)
		}
	}
	if got, _ := table.Lookup(netip.MustParseAddr("::ffff:10.1.2.3")); got != want {
		t.Errorf("Lookup of a mapped address: %v", got)
	}
	if table.Apply([]Op{{Delete: true, Claim: claimed(t, "10.0.0.0/8", 2, 300)}}); table.Len() != 0 {
		t.Error("what was made unmasked cannot be taken back masked")
	}
}

// BenchmarkLookup sets the table's lookup beside bart's, among addresses of pods and CIDRs of their nodes.
func BenchmarkLookup(b *testing.B) {
	for _, v := range []struct{ pods, cidrs int }{{10_000, 100}, {1_000_000, 10_000}} {
		table, trie := New(), new(bart.Table[Claim])
		var ops []Op
		add := func(p netip.Prefix, id identity.ID) {
			c := Claim{Prefix: p, CIDR: !p.IsSingleIP(), Owner: Owner{Cluster: 2, Source: ClusterMesh, Object: "ip"}, Entry: Entry{Identity: id}}
			ops = append(ops, Op{Claim: c})
			trie.Insert(p, c)
		}
		addr := func(n uint32) netip.Addr {
			var b [4]byte
			binary.BigEndian.PutUint32(b[:], 10<<24+n)
			return netip.AddrFrom4(b)
		}
		perNode := uint32(v.pods / v.cidrs)
		for n := range uint32(v.cidrs) {
			add(netip.PrefixFrom(addr(n<<8), 24), 2)
			for i := range perNode {
				add(netip.PrefixFrom(addr(n<<8+i), 32), 131329)
			}
		}
		table.Apply(ops)
		for name, pick := range map[string]func(rnd *rand.Rand) netip.Addr{
			"pod":  func(rnd *rand.Rand) netip.Addr { return addr(rnd.Uint32N(uint32(v.cidrs))<<8 + rnd.Uint32N(perNode)) },
			"cidr": func(rnd *rand.Rand) netip.Addr { return addr(rnd.Uint32N(uint32(v.cidrs))<<8 + 255) },
			"none": func(rnd *rand.Rand) netip.Addr { return netip.AddrFrom4([4]byte{192, 168, 0, byte(rnd.Uint32())}) },
		} {
			addrs := make([]netip.Addr, 1<<16)
			rnd := rand.New(rand.NewPCG(1, 2))
			for i := range addrs {
				addrs[i] = pick(rnd)
			}
			for lookup, find := range map[string]func(netip.Addr) (Claim, bool){"weft": table.Lookup, "bart": trie.Lookup} {
				b.Run(fmt.Sprintf("%d/%s/%s", v.pods, name, lookup), func(b *testing.B) {
					i := 0
					for b.Loop() {
						find(addrs[i&(1<<16-1)])
						i++
					}
				})
			}
		}
	}
}
