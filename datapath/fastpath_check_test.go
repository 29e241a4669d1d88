// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/weftmesh/weft/bpf"
)

// What somebody else writes into the tables, or shows instead of them, is found by a comparison, and only that. What they lack
// costs time alone, and is put back.
//
// lesson: K2
func TestFastPathCheck(t *testing.T) {
	b := newFastBench(t)
	if err := b.rebuild(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.set(131329, "10.2.1.10/32", "10.2.1.11/32", "10.2.1.0/24"); err != nil {
		t.Fatal(err)
	}
	ip := netip.MustParseAddr("10.2.1.11").As4()
	other := netip.MustParseAddr("10.9.9.9").As4()
	at := func(a [4]byte) (ip [16]byte) { copy(ip[:], a[:]); return ip }
	table := func() *hostTable { return b.hosts.tables[0] }
	// behind writes such that the writer of the table does not know of it.
	behind := func(write, undo func()) {
		write()
		image := bytes.Clone(table().memory)
		undo()
		copy(table().memory, image)
	}
	for _, v := range []struct {
		what    string
		write   func()
		drifted uint64
		wrong   bool
	}{
		{"nothing", func() {}, 0, false},
		{"another identity", func() { table().Set(at(ip), 999) }, 1, true},
		{"no identity", func() { table().Delete(at(ip)) }, 0, false},
		{"a host that the map does not have", func() {
			behind(func() { table().Set(at(other), 999) }, func() { table().Delete(at(other)) })
		}, 1, true},
		{"no table", func() {
			if err := b.maps.hosts.Delete(uint32(0)); err != nil {
				t.Fatal(err)
			}
		}, 0, true},
		{"nothing again", func() {}, 0, false},
	} {
		before := b.status()
		v.write()
		next := b.Walk()
		keys, values := make([]bpf.IPCacheKey, 8), make([]bpf.IPCacheValue, 8)
		n, end, err := next(keys, values)
		if err != nil || n != 3 || !end {
			t.Fatalf("%d entries, end %t, %v", n, end, err)
		}
		one, err := b.Check(keys[:n], values[:n], false)
		if err != nil {
			t.Fatal(err)
		}
		other, err := b.Check(nil, nil, true)
		if err != nil || (one || other) != v.wrong {
			t.Errorf("%s: something is wrong: %t, %t, %v", v.what, one, other, err)
		}
		after := b.status()
		if rebuilt := after.Rebuilds > before.Rebuilds; rebuilt != (v.what[:7] != "nothing") || after.Drift-before.Drift != v.drifted {
			t.Errorf("%s: %+v after %+v", v.what, after, before)
		}
		b.want("10.2.1.11", 131329)
		b.want("10.9.9.9", 0)
		b.checkPart()
	}
}

// TestFastPathCheckNetworks is the same of what somebody else does to networks that are full of hosts.
//
// lesson: K2
func TestFastPathCheckNetworks(t *testing.T) {
	b := newFastBench(t)
	keys := networkKeys(bpf.FamilyIPv6, 1, 100)
	b.update(keys, identitiesFrom(1000, len(keys)))
	networks := func() *hostNetworks { return b.hosts.networks[1] }
	for _, v := range []struct {
		what  string
		write func()
	}{
		{"nothing", func() {}},
		{"another identity", func() { networks().Set(keys[7].IP, 999) }},
		{"a host that the map does not have", func() {
			ip := networkKeys(bpf.FamilyIPv6, 1, 200)[150].IP
			networks().Set(ip, 999)
			image := bytes.Clone(networks().memory[0])
			networks().Delete(ip) // the writer does not know of it
			copy(networks().memory[0], image)
		}},
		{"another shape", func() { b.maps.heads[1].Clear() }},
		{"other seeds", func() { b.maps.heads[1].Seeds[0]++ }},
		{"no memory", func() {
			if err := networks().clear(); err != nil {
				t.Fatal(err)
			}
		}},
		{"networks where there are none", func() { b.maps.heads[0].Shape = 1 << 32 }},
	} {
		before := b.status().Rebuilds
		v.write()
		for at := 0; at < len(keys); at += 10 {
			if _, err := b.Check(keys[at:at+10], identitiesFrom(uint32(1000+at), 10), at+10 == len(keys)); err != nil {
				t.Fatal(err)
			}
		}
		if rebuilt := b.status().Rebuilds > before; rebuilt != (v.what != "nothing") {
			t.Errorf("%s: rebuilt %t", v.what, rebuilt)
		}
		b.wantKeys(networkKeys(bpf.FamilyIPv6, 1, 256))
		b.checkPart()
	}
}
