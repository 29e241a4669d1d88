// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// networkKeys are hosts of one network of a family, as many as there are to be.
func networkKeys(family bpf.Family, network byte, hosts int) (keys []bpf.IPCacheKey) {
	for i := range hosts {
		addr := netip.AddrFrom4([4]byte{10, 7, network, byte(i)})
		if family == bpf.FamilyIPv6 {
			addr = netip.AddrFrom16([16]byte{0: 0xfd, 13: 7, 14: network, 15: byte(i)})
		}
		keys = append(keys, bpf.MakeIPCacheKey(netip.PrefixFrom(addr, addr.BitLen())))
	}
	return keys
}

func identitiesFrom(first uint32, n int) []bpf.IPCacheValue {
	values := make([]bpf.IPCacheValue, n)
	for i := range values {
		values[i].Identity = first + uint32(i)
	}
	return values
}

// update sets keys one after the other, so that each finds what the one before has left.
func (b *fastBench) update(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) {
	b.t.Helper()
	for i := range keys {
		if _, err := b.Update(keys[i:i+1], values[i:i+1]); err != nil {
			b.t.Fatal(err)
		}
	}
}

// wantKeys wants programs to find what the map has of keys. Of hosts that no network has, the table may have no room for some, or
// none where programs look.
func (b *fastBench) wantKeys(keys []bpf.IPCacheKey) {
	b.t.Helper()
	hidden := 0
	for _, key := range keys {
		p, err := key.Prefix()
		if err != nil {
			b.t.Fatal(err)
		}
		at, _ := hostIndex(&key)
		want := b.kernel.entries[key].Identity
		switch got := b.seen(p.Addr().String()); {
		case got == want:
		case got == 0 && (b.hosts.networks[at] == nil || b.hosts.networks[at].Get(key.IP) == 0):
			hidden++
		default:
			b.t.Fatalf("programs find identity %d for %v, want %d", got, p, want)
		}
	}
	if hidden > 1+len(keys)/10 {
		b.t.Fatalf("programs do not find %d of %d hosts; status %+v", hidden, len(keys), b.status())
	}
}

// slots is how many tables of networks programs could reach.
func (b *fastBench) slots() (n int) {
	for at := range b.maps.networks.MaxEntries() {
		var id uint32
		switch err := b.maps.networks.Lookup(at, &id); {
		case err == nil:
			n++
		case !errors.Is(err, ebpf.ErrKeyNotExist):
			b.t.Fatal(err)
		}
	}
	return n
}

// TestFastPathNetworks: a network becomes full host by host, changes, and is nearly empty after a while; programs find what
// the map has, whoever keeps it. Hosts of other networks stay in the table. A rebuild puts a network where it belongs, and
// leaves no memory behind.
//
// mechanism: G4
func TestFastPathNetworks(t *testing.T) {
	const few = bpf.NetworkIsFull - 1
	for _, family := range []bpf.Family{bpf.FamilyIPv4, bpf.FamilyIPv6} {
		t.Run(family.String(), func(t *testing.T) {
			b, at := newFastBench(t), familyIndex(family)
			lonely, full := networkKeys(family, 1, few), networkKeys(family, 2, 3*few)
			check := func(networks, hosts int) {
				t.Helper()
				b.wantKeys(lonely)
				b.wantKeys(networkKeys(family, 2, bpf.NetworkHosts))
				b.checkPart()
				if s := b.hosts.status(at); s.Networks != networks || s.Entries != hosts {
					t.Fatalf("%+v, want %d hosts, and %d networks full of them", s, hosts, networks)
				}
				if got := b.slots(); got != networks {
					t.Fatalf("programs can reach %d tables of networks, want %d", got, networks)
				}
			}
			rebuild := func() {
				t.Helper()
				if err := b.rebuild(); err != nil {
					t.Fatal(err)
				}
			}
			b.update(lonely, identitiesFrom(1000, len(lonely)))
			check(0, few)
			b.update(full, identitiesFrom(2000, len(full)))
			check(1, 4*few)
			for range 3 {
				rebuild()
				check(1, 4*few)
			}
			b.update(full, identitiesFrom(3000, len(full)))
			check(1, 4*few)
			if _, err := b.Delete(full[few:]); err != nil {
				t.Fatal(err)
			}
			check(1, 2*few)
			rebuild()
			check(0, 2*few)
			if s := b.status(); s.Drift != 0 || s.LastError != "" {
				t.Errorf("status %+v, want no drift and no error", s)
			}
		})
	}
}

// TestFastPathNetworksWithoutMemory: hosts of a network for which there is no memory stay in the table, the status says
// why, and a later rebuild makes up for it.
func TestFastPathNetworksWithoutMemory(t *testing.T) {
	b := newFastBench(t)
	create := b.hosts.createNetworks
	b.hosts.createNetworks = func(bpf.Family) (*hostNetworks, error) { return nil, unix.ENOMEM }
	keys := networkKeys(bpf.FamilyIPv4, 1, 200)
	b.update(keys, identitiesFrom(1000, len(keys)))
	b.wantKeys(keys)
	if s := b.status(); s.LastError == "" || s.IPv4.Networks != 0 || s.IPv4.Entries+s.IPv4.Crowded < len(keys) {
		t.Errorf("status %+v, want an error, and all hosts in the table but for those that it has no room for", s)
	}
	b.hosts.createNetworks = create
	if err := b.rebuild(); err != nil {
		t.Fatal(err)
	}
	b.wantKeys(keys)
	if s := b.status(); s.LastError != "" || s.IPv4.Networks != 1 || s.IPv4.Entries != len(keys) {
		t.Errorf("status %+v, want all hosts in one network, and no error", s)
	}
}

// TestFastPathOfKilledWriters: a writer ends at any step of a change or a rebuild, and the next one begins with what it left. At
// no time do programs find what the map does not have, and each writer's first rebuild puts all of it right.
func TestFastPathOfKilledWriters(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	b := newFastBench(t)
	type killed struct{}
	left := 0 // steps until the end
	step := func() {
		if left--; left == 0 {
			panic(killed{})
		}
	}
	var all []bpf.IPCacheKey
	for network := range byte(4) {
		all = append(all, networkKeys(bpf.FamilyIPv4, network, 48)...)
		all = append(all, networkKeys(bpf.FamilyIPv6, network, 48)...)
	}
	b.kernel.refuse = func(bpf.IPCacheKey) error { step(); return nil }
	live := func() {
		create, createNetworks, show := b.hosts.create, b.hosts.createNetworks, b.hosts.show
		b.hosts.create = func(family bpf.Family, entries int) (*hostTable, error) { step(); return create(family, entries) }
		b.hosts.createNetworks = func(family bpf.Family) (*hostNetworks, error) { step(); return createNetworks(family) }
		b.hosts.show = func(family bpf.Family, table *hostTable) error { step(); return show(family, table) }
		defer func() {
			if p := recover(); p != nil && p != (killed{}) {
				panic(p)
			}
		}()
		for {
			from := rng.IntN(len(all))
			keys := all[from:min(len(all), from+1+rng.IntN(64))]
			switch rng.IntN(6) {
			case 0:
				_ = b.Dump(func([]bpf.IPCacheKey, []bpf.IPCacheValue) { step() })
			case 1:
				_, _ = b.Delete(keys)
			default:
				_, _ = b.Update(keys, identitiesFrom(rng.Uint32N(1<<30), len(keys)))
			}
		}
	}
	for range 20 {
		left = 1 + rng.IntN(800)
		live()
		b.Close()
		left = -1
		for range 40 {
			key := all[rng.IntN(len(all))]
			p, err := key.Prefix()
			if err != nil {
				t.Fatal(err)
			}
			if got, want := b.seen(p.Addr().String()), b.kernel.entries[key].Identity; got != 0 && got != want {
				t.Fatalf("after a writer was killed, %v is %d for programs and %d in the map", p, got, want)
			}
		}
		b.fastPath = newFastPath(b.kernel, b.maps, 10_000, func() int { return 0 })
		if err := b.rebuild(); err != nil {
			t.Fatal(err)
		}
		b.wantKeys(all)
		b.checkPart()
		s := b.status()
		if s.LastError != "" || s.IPv4.Entries+s.IPv4.Crowded+s.IPv6.Entries+s.IPv6.Crowded != len(b.kernel.entries) {
			t.Fatalf("status %+v, want all %d entries and no error", s, len(b.kernel.entries))
		}
		want := 0
		for _, n := range b.hosts.networks {
			if n != nil {
				want++
			}
		}
		if got := b.slots(); got != want {
			t.Fatalf("programs can reach %d tables of networks, want %d", got, want)
		}
	}
}

// TestFastPathAfterAnotherVersion: what was left in the heads is forgotten if somebody else has written the settings since.
func TestFastPathAfterAnotherVersion(t *testing.T) {
	spec, err := bpf.Load()
	if err != nil {
		t.Fatal(err)
	}
	maps := map[string]*ebpf.Map{}
	for _, name := range []string{bpf.MapConfig, bpf.MapFast} {
		if maps[name], err = ebpf.NewMap(spec.Maps[name]); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = maps[name].Close() })
	}
	left := bpf.FastHead{Seeds: [3]uint64{1, 3, 5}, Shape: 7, Epoch: 9}
	for layout, want := range map[uint8]bpf.FastHead{bpf.FastLayout: left, 0: {}, bpf.FastLayout + 1: {}} {
		settings := bpf.MakeConfig(0, false)
		settings.FastLayout = layout
		if err := errors.Join(maps[bpf.MapConfig].Put(uint32(0), &settings), maps[bpf.MapFast].Put(uint32(1), &left), forgetForeign(maps)); err != nil {
			t.Fatal(err)
		}
		var got bpf.FastHead
		if err := maps[bpf.MapFast].Lookup(uint32(1), &got); err != nil || got != want {
			t.Errorf("layout %d: head %+v, error %v, want %+v", layout, got, err, want)
		}
	}
}
