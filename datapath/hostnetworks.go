// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// fastMaps are the maps in which programs look for hosts, opened for writing.
type fastMaps struct {
	hosts    *ebpf.Map // its tables
	networks *ebpf.Map // its tables
	heads    [2]*bpf.FastHead
	memory   []byte // of heads
}

// openFastMaps finds the maps among those of the programs.
func openFastMaps(maps map[string]*ebpf.Map) (*fastMaps, error) {
	memory, err := mapMemory(maps[bpf.MapFast])
	if err != nil {
		return nil, explain("map "+bpf.MapFast+" into memory", err)
	}
	f := &fastMaps{hosts: maps[bpf.MapHosts], networks: maps[bpf.MapNetworks], memory: memory}
	f.heads[0] = (*bpf.FastHead)(unsafe.Pointer(&memory[0]))
	f.heads[1] = (*bpf.FastHead)(unsafe.Pointer(&memory[unsafe.Sizeof(bpf.FastHead{})]))
	return f, nil
}

// forgetForeign is called before the settings are written. If the last agent to write them did not keep the heads right, for it
// was a version that has others or none, programs have left them alone since, and must not find again what is there.
func forgetForeign(maps map[string]*ebpf.Map) error {
	var settings bpf.Config
	if err := maps[bpf.MapConfig].Lookup(uint32(0), &settings); err != nil {
		return explain("read settings of the programs", err)
	}
	if settings.FastLayout == bpf.FastLayout {
		return nil
	}
	for at := range maps[bpf.MapFast].MaxEntries() {
		if err := maps[bpf.MapFast].Put(at, bpf.FastHead{}); err != nil {
			return explain("clear map "+bpf.MapFast, err)
		}
	}
	return nil
}

func (f *fastMaps) Close() { _ = unix.Munmap(f.memory) }

// mapMemory maps all of an array into memory.
func mapMemory(m *ebpf.Map) ([]byte, error) {
	page := unix.Getpagesize()
	size := (int(m.MaxEntries())*int(m.ValueSize()) + page - 1) / page * page
	return unix.Mmap(m.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
}

// hostNetworks are the networks of a family that are full of hosts: one of the two generations that the map has room for.
type hostNetworks struct {
	*bpf.Networks
	family     bpf.Family
	generation int
	outer      *ebpf.Map
	memory     [][]byte
	ids        []ebpf.MapID // of the tables that the memory is
}

// newHostNetworks makes a generation without networks, of which programs must not have the shape. What an agent has left
// there that was killed is removed, and no program uses it any more when this returns.
func newHostNetworks(outer *ebpf.Map, family bpf.Family, generation int, seeds [3]uint64) (*hostNetworks, error) {
	n := &hostNetworks{family: family, generation: generation, outer: outer}
	n.Networks = bpf.NewNetworks(family, generation, seeds, n.chunk)
	return n, n.clear()
}

// clear takes all memory of the generation away from programs. The kernel returns from each removal when no program that
// was running then is running any more, and before Linux 6.8 from each look, too. So pieces are taken from the last to the first,
// as they are put from the first to the last: behind one that is missing there is none, whoever was killed meanwhile.
func (n *hostNetworks) clear() error {
	first, there := bpf.NetworksSlot(n.family, n.generation), uint32(0)
	var err error
	for ; there < bpf.NetworksSlots && err == nil; there++ {
		var id uint32
		err = n.outer.Lookup(first+there, &id)
	}
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		there, err = there-1, nil
	}
	for ; there > 0 && err == nil; there-- {
		err = n.outer.Delete(first + there - 1)
	}
	if err != nil {
		return fmt.Errorf("take networks of %v hosts out of map %s: %w", n.family, bpf.MapNetworks, err)
	}
	return nil
}

// chunk makes the i-th piece of memory and puts it where programs find it who have the shape.
func (n *hostNetworks) chunk(i int) ([]byte, error) {
	spec, err := bpf.NetworksChunkSpec()
	if err != nil {
		return nil, err
	}
	spec.Name = "weft_net_" + n.family.String()
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, explain(fmt.Sprintf("create memory for networks of %v hosts", n.family), err)
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return nil, explain(fmt.Sprintf("look at memory for networks of %v hosts", n.family), err)
	}
	id, _ := info.ID()
	memory, err := mapMemory(m)
	if err != nil {
		return nil, explain(fmt.Sprintf("map networks of %v hosts into memory", n.family), err)
	}
	if err := n.outer.Put(bpf.NetworksSlot(n.family, n.generation)+uint32(i), m); err != nil {
		_ = unix.Munmap(memory)
		return nil, fmt.Errorf("put networks of %v hosts into map %s: %w", n.family, bpf.MapNetworks, err)
	}
	n.memory, n.ids = append(n.memory, memory), append(n.ids, id)
	return memory, nil
}

// differ reports whether programs see others. For n that is nil, they are to see none.
func (n *hostNetworks) differ(head *bpf.FastHead) (bool, error) {
	if n == nil {
		return atomic.LoadUint64(&head.Shape) != 0, nil
	}
	for i, id := range n.ids {
		shown, err := shownAt(n.outer, bpf.NetworksSlot(n.family, n.generation)+uint32(i))
		if err != nil || shown != id {
			return err == nil, err
		}
	}
	return !n.ShownBy(head), nil
}

// Close ends the writing. What programs see of it, the kernel keeps.
func (n *hostNetworks) Close() {
	if n == nil {
		return
	}
	for _, memory := range n.memory {
		_ = unix.Munmap(memory)
	}
	n.memory = nil
}
