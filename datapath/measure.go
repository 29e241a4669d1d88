// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/weftmesh/weft/bpf"
)

// Cost is what weft's work in the kernel takes on this machine. Each figure stands beside a baseline of the same run.
type Cost struct {
	// Write is the time to write an entry, WriteHash that of an entry of the same size into a plain hash map.
	Write, WriteHash time.Duration
	// Packet is the time that a program takes for a packet of a known address, World for one that nobody claims, Empty
	// that of a program that does nothing. What they look up is in the caches of the processor.
	Packet, World, Empty time.Duration
}

// Measure finds out what maps of so many entries cost. It works on maps and programs of its own, which are neither pinned nor
// attached and are gone when it returns: an agent that runs is not disturbed, but for the time of one processor, some tenths
// of a second, and about 150 bytes of memory for an entry. It tells what it measures now and how much of that is done, and ends with ctx.
func Measure(ctx context.Context, entries int, tell func(what string, done, total int)) (Cost, error) {
	var c Cost
	spec, err := bpf.Load()
	if err != nil {
		return c, err
	}
	spec.Maps[bpf.MapIPCache].MaxEntries = uint32(entries)
	spec.Programs["empty"] = &ebpf.ProgramSpec{
		Name: "empty", Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		return c, explain("load programs and maps", err)
	}
	defer coll.Close()
	if err := coll.Maps[bpf.MapConfig].Put(uint32(0), bpf.MakeConfig(0, false)); err != nil { // no samples
		return c, explain("configure programs", err)
	}
	tell("entry", 0, entries)
	if err := c.writes(coll, entries); err != nil {
		return c, err
	}
	return c, c.packets(ctx, coll, entries, tell)
}

// measuredAddr is the address of entry i; from `entries` on, nobody's.
func measuredAddr(i int) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], 10<<24|uint32(i))
	return netip.AddrFrom4(b)
}

// writes fills the map as an agent does, and a hash map as a baseline.
func (c *Cost) writes(coll *ebpf.Collection, entries int) error {
	keys, values := make([]bpf.IPCacheKey, entries), make([]bpf.IPCacheValue, entries)
	for i, at := range rand.Perm(entries) {
		keys[i] = bpf.MakeIPCacheKey(netip.PrefixFrom(measuredAddr(at), 32))
		values[i] = bpf.IPCacheValue{Identity: uint32(1<<16 + 256 + at%1000)}
	}
	hash, err := ebpf.NewMap(&ebpf.MapSpec{
		Type: ebpf.Hash, KeySize: coll.Maps[bpf.MapIPCache].KeySize(), ValueSize: coll.Maps[bpf.MapIPCache].ValueSize(), MaxEntries: uint32(entries),
	})
	if err != nil {
		return explain("make a hash map", err)
	}
	defer hash.Close()
	fast, err := openFastMaps(coll.Maps)
	if err != nil {
		return err
	}
	defer fast.Close()
	ours := newFastPath(&kernelMap{m: coll.Maps[bpf.MapIPCache]}, fast, uint32(entries), func() int { return entries })
	defer ours.Close()
	if err := ours.Dump(func([]bpf.IPCacheKey, []bpf.IPCacheValue) {}); err != nil { // as an agent that starts
		return err
	}
	for _, w := range []struct {
		to   prefixMap
		took *time.Duration
	}{{ours, &c.Write}, {&kernelMap{m: hash}, &c.WriteHash}} {
		start := time.Now()
		if done, err := w.to.Update(keys, values); err != nil {
			return fmt.Errorf("write entry %d of %d: %w", done, entries, err)
		}
		*w.took = time.Since(start) / time.Duration(entries)
	}
	return nil
}

// packets runs the program of incoming packets, and one that does nothing, in turn. The figures are medians.
func (c *Cost) packets(ctx context.Context, coll *ebpf.Collection, entries int, tell func(what string, done, total int)) error {
	const frames, repeat = 101, 2000
	known, world, empty := make([]time.Duration, frames), make([]time.Duration, frames), make([]time.Duration, frames)
	program := coll.Programs[bpf.Programs[0].Name]
	for i := range frames {
		if err := ctx.Err(); err != nil {
			return err
		}
		tell("packet", 3*i*repeat, 3*frames*repeat)
		for _, m := range []struct {
			program *ebpf.Program
			from    netip.Addr
			took    *time.Duration
		}{
			{program, measuredAddr(rand.IntN(entries)), &known[i]}, {program, measuredAddr(entries + i), &world[i]},
			{coll.Programs["empty"], measuredAddr(0), &empty[i]},
		} {
			_, took, err := m.program.Benchmark(measuredFrame(m.from), repeat, nil)
			if err != nil {
				return explain("run program", err)
			}
			*m.took = took
		}
	}
	for _, m := range []struct {
		all []time.Duration
		to  *time.Duration
	}{{known, &c.Packet}, {world, &c.World}, {empty, &c.Empty}} {
		slices.Sort(m.all)
		*m.to = m.all[frames/2]
	}
	return nil
}

// measuredFrame is an Ethernet frame with a packet of UDP.
func measuredFrame(from netip.Addr) []byte {
	frame := make([]byte, 14+20+8+64)
	frame[12], frame[13] = 0x08, 0x00
	packet := frame[14:]
	packet[0], packet[8], packet[9] = 0x45, 64, bpf.ProtocolUDP
	binary.BigEndian.PutUint16(packet[2:], uint16(len(packet)))
	source, destination := from.As4(), measuredAddr(1).As4()
	copy(packet[12:], source[:])
	copy(packet[16:], destination[:])
	binary.BigEndian.PutUint16(packet[20:], 1000)
	binary.BigEndian.PutUint16(packet[22:], 2000)
	binary.BigEndian.PutUint16(packet[24:], uint16(len(packet)-20))
	return frame
}
