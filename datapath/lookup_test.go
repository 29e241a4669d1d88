// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/gaissmai/bart"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// TestLookupAgrees fills a kernel's map from a table, and asks both, bart's trie and a linear scan who is behind addresses.
// Overlapping prefixes of every length and of both families occur, an address and its CIDR, and prefixes not masked.
//
// lesson: C6, C7
func TestLookupAgrees(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	spec, err := bpf.Load()
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		m, err := ebpf.NewMap(spec.Maps[bpf.MapIPCache])
		if err != nil {
			t.Fatal(err)
		}
		compareLookups(t, rnd, m)
		m.Close()
	}
}

func compareLookups(t *testing.T, rnd *rand.Rand, m *ebpf.Map) {
	t.Helper()
	table, trie := ipcache.New(), new(bart.Table[identity.ID])
	for n := range rnd.IntN(400) {
		p := randomPrefix(rnd)
		table.Apply([]ipcache.Op{{Delete: rnd.IntN(4) == 0, Claim: ipcache.Claim{
			Prefix: p, CIDR: rnd.IntN(2) == 0, Entry: ipcache.Entry{Identity: identity.ID(n + 1)},
			Owner: ipcache.Owner{Cluster: identity.ClusterID(rnd.IntN(3)), Source: ipcache.ClusterMesh, Object: "ip"},
		}}})
	}
	changes, _, _ := table.Changes(ipcache.Revision{}, make([]ipcache.Change, 0, 1000))
	all := make(map[netip.Prefix]identity.ID)
	for _, c := range changes {
		if c.Deleted {
			continue
		}
		key, value := (underlay{}).encode(c.Prefix, c.Entry)
		if err := m.Put(key, value); err != nil {
			t.Fatalf("%s: %v", c.Prefix, err)
		}
		trie.Insert(c.Prefix, c.Entry.Identity)
		all[c.Prefix] = c.Entry.Identity
	}
	kernel := &IPCache{m: m}
	for range 400 {
		addr := randomPrefix(rnd).Addr()
		want := all[longest(all, addr)]
		claim, _ := table.Lookup(addr)
		byTrie, _ := trie.Lookup(addr)
		entry, _, err := kernel.Lookup(addr)
		if err != nil {
			t.Fatalf("%s: %v", addr, err)
		}
		if claim.Entry.Identity != want || byTrie != want || entry.Identity != want {
			t.Fatalf("%s: scan %d, table %d, bart %d, kernel %d", addr, want, claim.Entry.Identity, byTrie, entry.Identity)
		}
	}
}

// longest returns the longest prefix that contains addr.
func longest(all map[netip.Prefix]identity.ID, addr netip.Addr) (best netip.Prefix) {
	for p := range all {
		if p.Contains(addr) && (!best.IsValid() || p.Bits() > best.Bits()) {
			best = p
		}
	}
	return best
}

func randomPrefix(rnd *rand.Rand) netip.Prefix {
	var b [16]byte
	for i := range b {
		b[i] = []byte{0, 0, 0, 1, 10, 255}[rnd.IntN(6)]
	}
	b[0] = []byte{10, 0xfd}[rnd.IntN(2)]
	addr := netip.AddrFrom16(b)
	if rnd.IntN(2) == 0 {
		addr = netip.AddrFrom4([4]byte(b[:4]))
	}
	bits := rnd.IntN(addr.BitLen() + 1)
	if rnd.IntN(2) == 0 {
		bits = addr.BitLen() - rnd.IntN(4)
	}
	return netip.PrefixFrom(addr, bits)
}
