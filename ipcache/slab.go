// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"encoding/binary"
	"net/netip"
)

// slotRef names a slot of a [slab]; 0 is none.
type slotRef uint32

// slot holds one claim in 48 bytes without a pointer, so that a million of them cost the garbage collector nothing.
// The first slot of a prefix, its head, holds the winner, stands in the index, and has its place in the order of changes;
// it stays the head when winners change, since claims then trade places. A head whose last claim went stays as a
// tombstone until readers can be expected to have seen it.
type slot struct {
	rev      uint64 // head: the table's revision at its last visible change
	modRev   int64
	low      uint32 // head: the last 4 bytes of the address
	upper    uint32 // head: in slab.uppers, what an IPv6 address has before them
	identity uint32
	origin   uint32  // in Table.origins
	names    uint32  // in Table.names
	older    slotRef // head: its neighbour in the order of changes; else the next claim for the prefix; free: the next free slot
	newer    slotRef // head: its neighbour in the order of changes
	bits     uint8   // head
	state    slotState
}

type slotState uint8

const (
	slotHead   slotState = 1 << iota // the first of its prefix
	slotV6                           // head
	slotDead                         // head without a claim
	slotQueued                       // head: stands in Table.dead
	slotShared                       // head: there are other claims, the next one in Table.others
	slotTorn                         // head: a claim of somebody else contradicts the winner
	slotCIDR                         // of the claim
)

const (
	slabChunk = 1 << 10
	slabMask  = slabChunk - 1
)

// slab hands out slots that never move.
type slab struct {
	chunks []chunk
	open   []uint32 // chunks with memory and a free slot; some have neither any more
	absent []uint32 // chunks without memory
	uppers interned[[12]byte]
}

// chunk is a run of slots. The memory of one that nobody uses is given back.
type chunk struct {
	slots *[slabChunk]slot
	free  slotRef
	used  int
	open  bool // stands in slab.open
}

func newSlab() slab {
	s := slab{uppers: newInterned(func(v [12]byte) [12]byte { return v })}
	s.at(s.alloc()).state = slotDead // slot 0 means "none": nobody else gets it, and its chunk always has memory
	return s
}

func (s *slab) at(r slotRef) *slot { return &s.chunks[r/slabChunk].slots[r&slabMask] }

func (s *slab) alloc() slotRef {
	for {
		last := len(s.open) - 1
		if last < 0 {
			s.provide()
			continue
		}
		c := &s.chunks[s.open[last]]
		if c.slots == nil || c.used == slabChunk {
			c.open = false
			s.open = s.open[:last]
			continue
		}
		r := c.free
		p := &c.slots[r&slabMask]
		c.free = p.older
		*p = slot{}
		c.used++
		return r
	}
}

// provide opens a chunk of free slots.
func (s *slab) provide() {
	n := uint32(len(s.chunks))
	if last := len(s.absent) - 1; last >= 0 {
		n, s.absent = s.absent[last], s.absent[:last]
	} else {
		s.chunks = append(s.chunks, chunk{})
	}
	c := &s.chunks[n]
	c.slots = new([slabChunk]slot)
	first := slotRef(n) * slabChunk
	for i := range c.slots {
		c.slots[i].older = first + slotRef(i) + 1
	}
	c.free = first
	s.reopen(n)
}

func (s *slab) reopen(n uint32) {
	if c := &s.chunks[n]; !c.open {
		c.open = true
		s.open = append(s.open, n)
	}
}

func (s *slab) release(r slotRef) {
	n := uint32(r / slabChunk)
	c := &s.chunks[n]
	p := &c.slots[r&slabMask]
	s.uppers.release(p.upper)
	*p = slot{older: c.free}
	c.free = r
	if c.used--; c.used == 0 {
		c.slots = nil
		s.absent = append(s.absent, n)
		return
	}
	s.reopen(n)
}

// capacity is the number of slots that memory is held for.
func (s *slab) capacity() int { return (len(s.chunks) - len(s.absent)) * slabChunk }

// prefixKey is a prefix in parts.
type prefixKey struct {
	upper [12]byte // of an IPv6 address
	low   uint32
	bits  uint8
	v6    bool
}

func keyOf(p netip.Prefix) prefixKey {
	k := prefixKey{bits: uint8(p.Bits())}
	if addr := p.Addr(); addr.Is4() {
		a4 := addr.As4()
		k.low = binary.BigEndian.Uint32(a4[:])
	} else {
		a16 := addr.As16()
		k.v6, k.upper, k.low = true, [12]byte(a16[:12]), binary.BigEndian.Uint32(a16[12:])
	}
	return k
}

// family is 0 for IPv4 and 1 for IPv6.
func (k *prefixKey) family() int {
	if k.v6 {
		return 1
	}
	return 0
}

// shorten makes k the prefix of its address that has so many bits, not more than it has.
func (k *prefixKey) shorten(length int) {
	k.bits = uint8(length)
	if !k.v6 {
		k.low &= ^uint32(0) << (32 - length)
		return
	}
	if length >= 96 {
		k.low &= ^uint32(0) << (128 - length)
		return
	}
	k.low = 0
	whole := length / 8
	k.upper[whole] &= ^byte(0) << (8 - length%8)
	clear(k.upper[whole+1:])
}

// setKey gives a new head its prefix.
func (s *slab) setKey(p *slot, k prefixKey) {
	p.low, p.bits, p.state = k.low, k.bits, slotHead
	if k.v6 {
		p.state |= slotV6
		p.upper = s.uppers.acquire(k.upper)
	}
}

// holds reports whether k is the prefix of a head.
func (s *slab) holds(p *slot, k *prefixKey) bool {
	return p.low == k.low && p.bits == k.bits && p.state&slotV6 != 0 == k.v6 &&
		(!k.v6 || s.uppers.values[p.upper] == k.upper)
}

// prefix is that of a head.
func (s *slab) prefix(p *slot) netip.Prefix {
	if p.state&slotV6 != 0 {
		var a16 [16]byte
		*(*[12]byte)(a16[:]) = s.uppers.values[p.upper]
		binary.BigEndian.PutUint32(a16[12:], p.low)
		return netip.PrefixFrom(netip.AddrFrom16(a16), int(p.bits))
	}
	var a4 [4]byte
	binary.BigEndian.PutUint32(a4[:], p.low)
	return netip.PrefixFrom(netip.AddrFrom4(a4), int(p.bits))
}
