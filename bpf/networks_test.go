// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
)

// networksMemory hands out ordinary memory, and none once limit pieces are out.
type networksMemory struct{ given, limit int }

var errNoMemory = errors.New("no memory")

func (m *networksMemory) chunk(i int) ([]byte, error) {
	if i != m.given {
		return nil, fmt.Errorf("piece %d is asked for, of which %d are there", i, m.given)
	}
	if m.given == m.limit {
		return nil, errNoMemory
	}
	m.given++
	return make([]byte, NetworksChunkBytes), nil
}

// networkIP returns a host of a network by their numbers.
func networkIP(family Family, network, host int) [16]byte {
	if family == FamilyIPv4 {
		return [16]byte{10, byte(network >> 8), byte(network), byte(host)}
	}
	return [16]byte{0: 0xfd, 7: byte(network >> 10), 8: byte(network >> 2), 14: byte(network), 15: byte(host)}
}

// TestNetworksEqualModel makes random changes to so many networks that their directory grows, while programs see them and
// while none does.
func TestNetworksEqualModel(t *testing.T) {
	rng, seeds := randomSeeds(t)
	seeds[1], seeds[2] = seeds[1]|1, seeds[2]|1
	for _, family := range families {
		for generation := range 2 {
			memory, head := &networksMemory{limit: NetworksSlots}, &FastHead{}
			n := NewNetworks(family, generation, seeds, memory.chunk)
			model, full := map[[16]byte]uint32{}, map[int]bool{}
			for step := range 60_000 {
				if step == 20_000 {
					n.Show(head)
				}
				network := rng.IntN(1500)
				ip := networkIP(family, network, rng.IntN(NetworkHosts))
				switch rng.IntN(8) {
				case 0:
					if err := n.Add(ip); err != nil {
						t.Fatal(err)
					}
					full[network] = true
				case 1, 2:
					if has := n.Delete(ip); has != full[network] {
						t.Fatalf("%v: delete of %v returned %t", family, ip, has)
					}
					delete(model, ip)
				default:
					identity := 1 + rng.Uint32()>>1
					if has := n.Set(ip, identity); has != full[network] || n.Has(ip) != has || has && !n.Touch(ip) {
						t.Fatalf("%v: set of %v returned %t", family, ip, has)
					}
					if full[network] {
						model[ip] = identity
					}
				}
				if got := n.Get(ip); got != model[ip] {
					t.Fatalf("%v: %v has identity %d, want %d", family, ip, got, model[ip])
				}
			}
			got := map[[16]byte]uint32{}
			for ip, identity := range n.All {
				got[ip] = identity
			}
			if fmt.Sprint(got) != fmt.Sprint(model) || n.Len() != len(model) || n.Networks() != len(full) {
				t.Errorf("%v: %d hosts, length %d, in %d networks, differ from the %d in %d of the model",
					family, len(got), n.Len(), n.Networks(), len(model), len(full))
			}
			if n.Bytes() != memory.given*NetworksChunkBytes || head.Shape != n.shape() || head.Generation() != generation {
				t.Errorf("%v: %d bytes, shape %#x, generation %d; want %d pieces, %#x and %d",
					family, n.Bytes(), head.Shape, head.Generation(), memory.given, n.shape(), generation)
			}
			if head.Clear(); head.Shape != 0 || head.Epoch != 0 {
				t.Errorf("%v: head %+v is not clear", family, *head)
			}
		}
	}
}

// TestNetworksWithoutMemory: a network for which there is no memory is not there, and nothing else is lost.
func TestNetworksWithoutMemory(t *testing.T) {
	_, seeds := randomSeeds(t)
	for _, family := range families {
		memory := &networksMemory{}
		n := NewNetworks(family, 0, seeds, memory.chunk)
		first := networkIP(family, 0, 7)
		if err := n.Add(first); !errors.Is(err, errNoMemory) || n.Set(first, 1) || n.Networks() != 0 {
			t.Errorf("%v: error %v, %d networks, want %v and none", family, err, n.Networks(), errNoMemory)
		}
		memory.limit = 1
		count := 0
		for ; ; count++ {
			ip := networkIP(family, count, 7)
			if err := n.Add(ip); err != nil {
				if !errors.Is(err, errNoMemory) {
					t.Fatal(err)
				}
				break
			}
			n.Set(ip, uint32(1+count))
		}
		for range 2 { // the second time, with a network more
			if n.Networks() != count || count < 100 {
				t.Fatalf("%v: %d networks of %d", family, n.Networks(), count)
			}
			for i := range count {
				if got := n.Get(networkIP(family, i, 7)); got != uint32(1+i) {
					t.Fatalf("%v: network %d has identity %d, want %d", family, i, got, 1+i)
				}
			}
			memory.limit = 2
			if err := n.Add(networkIP(family, count, 7)); err != nil {
				t.Fatal(err)
			}
			n.Set(networkIP(family, count, 7), uint32(1+count))
			count++
		}
	}
}

// TestNetworksHaveABound: the map has room for so many tables, and who asks for more is told.
func TestNetworksHaveABound(t *testing.T) {
	_, seeds := randomSeeds(t)
	one := make([]byte, NetworksChunkBytes)
	n := NewNetworks(FamilyIPv4, 1, seeds, func(int) ([]byte, error) { return one, nil }) // what they hold does not matter
	for i := 0; ; i++ {
		at, err := n.allocate(blockWords)
		if err == nil && at == i*blockWords {
			continue
		}
		if err == nil || i != generationWords/blockWords || len(n.chunks) != NetworksSlots {
			t.Errorf("block %d: at %d, error %v, with %d tables", i, at, err, len(n.chunks))
		}
		return
	}
}

// showNetworks makes networks that programs see.
func showNetworks(t testing.TB, maps map[string]*ebpf.Map, family Family, generation int, seeds [3]uint64) (*Networks, *FastHead) {
	t.Helper()
	mapped := func(m *ebpf.Map, size int) []byte {
		memory, err := syscall.Mmap(m.FD(), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = syscall.Munmap(memory) })
		return memory
	}
	heads := mapped(maps[MapFast], 4096)
	head := (*FastHead)(unsafe.Pointer(&heads[uintptr(family-FamilyIPv4)*unsafe.Sizeof(FastHead{})]))
	head.Seeds = seeds
	n := NewNetworks(family, generation, seeds, func(i int) ([]byte, error) {
		spec, err := NetworksChunkSpec()
		if err != nil {
			return nil, err
		}
		m, err := ebpf.NewMap(spec)
		if err != nil {
			return nil, err
		}
		defer m.Close()
		return mapped(m, NetworksChunkBytes), maps[MapNetworks].Put(NetworksSlot(family, generation)+uint32(i), m)
	})
	n.Show(head)
	return n, head
}

// TestProgramsFindWhatNetworksHold compares writer and reader, with the map empty but for a prefix of each family, while
// the directory grows and comes to lie in several tables.
func TestProgramsFindWhatNetworksHold(t *testing.T) {
	p := newProber(t)
	rng, seeds := randomSeeds(t)
	seeds[1], seeds[2] = seeds[1]|1, seeds[2]|1
	for _, family := range families {
		const elsewhere = 77
		all := map[Family]string{FamilyIPv4: "0.0.0.0/0", FamilyIPv6: "::/0"}[family]
		mustPut(t, p.Maps[MapIPCache], MakeIPCacheKey(netip.MustParsePrefix(all)), IPCacheValue{Identity: elsewhere})
		for generation := range 2 {
			n, head := showNetworks(t, p.Maps, family, generation, seeds)
			for i := range 4000 {
				ip := networkIP(family, rng.IntN(2000), rng.IntN(NetworkHosts))
				if i%4 == 0 {
					if err := n.Add(ip); err != nil {
						t.Fatal(err)
					}
				}
				if i%8 == 1 {
					n.Delete(ip)
				} else {
					n.Set(ip, 1000+rng.Uint32N(1000))
				}
				want := n.Get(ip)
				if want == 0 {
					want = elsewhere
				}
				if got := p.find(t, family, ip); got != want {
					t.Fatalf("%v: %v has identity %d for programs, want %d", family, ip, got, want)
				}
			}
			if n.Bytes() < 2*NetworksChunkBytes {
				t.Errorf("%v: %d bytes, want more than one table", family, n.Bytes())
			}
			for ip, identity := range n.All {
				if got := p.find(t, family, ip); got != identity {
					t.Fatalf("%v: %v has identity %d for programs, want %d", family, ip, got, identity)
				}
				if rng.IntN(2) == 0 {
					break
				}
			}
			host := networkIP(family, 1, 1)
			if err := n.Add(host); err != nil {
				t.Fatal(err)
			}
			n.Set(host, 5)
			head.Clear()
			if got := p.find(t, family, host); got != elsewhere {
				t.Errorf("%v: identity %d without a shape, want that of the map", family, got)
			}
		}
	}
}

// TestSettingsTellOfNetworks: where the settings were written by a version that does not keep the head right, programs
// leave alone what it leads to.
func TestSettingsTellOfNetworks(t *testing.T) {
	k := loadKernel(t)
	_, seeds := randomSeeds(t)
	n, _ := showNetworks(t, k.Maps, FamilyIPv4, 0, seeds)
	peer := other4
	frame := ethernet(ethTypeIPv4, v4{src: peer, dst: east4, protocol: ProtocolUDP, ihl: -1}.with(udp()))
	key := MakeIPCacheKey(netip.PrefixFrom(peer, 32))
	if err := n.Add(key.IP); err != nil {
		t.Fatal(err)
	}
	n.Set(key.IP, 4242)
	for layout, want := range map[uint8]uint32{FastLayout: 4242, 0: 2, FastLayout + 1: 2} {
		c := MakeConfig(1, false)
		c.FastLayout = layout
		k.configure(t, c)
		k.run(t, Ingress, frame, nil)
		if got := k.next(t).SrcIdentity; got != want {
			t.Errorf("layout %d in the settings: %v is %d, want %d", layout, peer, got, want)
		}
	}
}
