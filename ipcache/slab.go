// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"net/netip"
)

// slotRef names a slot of a [slab]; 0 is none.
type slotRef uint32

// slot holds one claim in 64 bytes without a pointer, so that a million of them cost the garbage collector nothing.
// The first slot of a prefix, its head, holds the winner, stands in the index, and has its place in the order of changes;
// it stays the head when winners change, since claims then trade places. A head whose last claim went stays as a
// tombstone until readers can be expected to have seen it.
type slot struct {
	addr     [16]byte // IPv4 in the first 4 bytes, the rest 0
	rev      uint64   // head: the table's revision at its last visible change
	modRev   int64
	identity uint32
	host     uint32 // in Table.hosts
	owner    uint32 // in Table.owners
	meta     uint32 // in Table.meta
	next     slotRef
	older    slotRef // head: neighbours in the order of changes
	newer    slotRef
	bits     uint8
	state    slotState
	key      uint8
	flags    Flags
}

type slotState uint8

const (
	slotV6     slotState = 1 << iota
	slotCIDR             // of the claim
	slotDead             // head without a claim
	slotQueued           // stands in Table.dead
	slotHead             // the first of its prefix
	slotTorn             // head: a claim of somebody else contradicts the winner
)

const (
	slabChunk = 1 << 10
	slabMask  = slabChunk - 1
)

// slab hands out slots that never move.
type slab struct {
	chunks []*[slabChunk]slot
	free   slotRef // linked through next
	used   int     // slots handed out
}

func (s *slab) at(r slotRef) *slot { return &s.chunks[r/slabChunk][r&slabMask] }

func (s *slab) alloc() slotRef {
	if s.free == 0 {
		first := slotRef(len(s.chunks) * slabChunk)
		s.chunks = append(s.chunks, new([slabChunk]slot))
		for r := first + slabMask; r > first; r-- {
			s.at(r).next = s.free
			s.free = r
		}
		if first != 0 { // slot 0 means "none" and is never handed out
			s.at(first).next = s.free
			s.free = first
		}
	}
	r := s.free
	p := s.at(r)
	s.free = p.next
	*p = slot{}
	s.used++
	return r
}

func (s *slab) release(r slotRef) {
	*s.at(r) = slot{next: s.free}
	s.free = r
	s.used--
}

// capacity is the number of slots that memory is held for.
func (s *slab) capacity() int { return len(s.chunks) * slabChunk }

// index finds the head of a prefix: open addressing with linear probing. The hash is seeded, since the addresses come
// from strangers. A cell holds the slot and, above it, 32 bits of the hash, which place the cell and tell most strangers
// apart: slots lie all over the memory, and a look at one that is not ours is what costs.
type index struct {
	cells []cell
	live  int
	seed  [2]uint64
}

type cell uint64

func makeCell(hash uint32, r slotRef) cell { return cell(hash)<<32 | cell(r) }

func (c cell) hash() uint32  { return uint32(c >> 32) }
func (c cell) slot() slotRef { return slotRef(c) }

func newIndex() index {
	return index{cells: make([]cell, 64), seed: [2]uint64{rand.Uint64(), rand.Uint64()}}
}

// prefixKey is what the index compares.
type prefixKey struct {
	addr [16]byte
	bits uint8
	v6   bool
}

func keyOf(p netip.Prefix) prefixKey {
	k := prefixKey{bits: uint8(p.Bits())}
	if addr := p.Addr(); addr.Is4() {
		a4 := addr.As4()
		copy(k.addr[:], a4[:])
	} else {
		k.addr, k.v6 = addr.As16(), true
	}
	return k
}

func (s *slot) prefixKey() prefixKey {
	return prefixKey{addr: s.addr, bits: s.bits, v6: s.state&slotV6 != 0}
}

func (s *slot) prefix() netip.Prefix {
	if s.state&slotV6 != 0 {
		return netip.PrefixFrom(netip.AddrFrom16(s.addr), int(s.bits))
	}
	return netip.PrefixFrom(netip.AddrFrom4([4]byte(s.addr[:4])), int(s.bits))
}

func (x *index) hash(k prefixKey) uint32 {
	hi := binary.LittleEndian.Uint64(k.addr[:8]) ^ x.seed[0]
	lo := binary.LittleEndian.Uint64(k.addr[8:]) ^ x.seed[1] ^ uint64(k.bits)<<56
	if k.v6 {
		lo ^= 1 << 48
	}
	h, l := bits.Mul64(hi, lo|1)
	h2, l2 := bits.Mul64(h^l^lo, 0x9e3779b97f4a7c15)
	mixed := h2 ^ l2 ^ hi
	return uint32(mixed ^ mixed>>32)
}

// find returns the head of k, or 0.
func (x *index) find(s *slab, k prefixKey) slotRef {
	mask, hash := uint32(len(x.cells)-1), x.hash(k)
	for i := hash & mask; x.cells[i] != 0; i = (i + 1) & mask {
		if c := x.cells[i]; c.hash() == hash && s.at(c.slot()).prefixKey() == k {
			return c.slot()
		}
	}
	return 0
}

// insert adds the head of k, which the index does not hold.
func (x *index) insert(k prefixKey, r slotRef) {
	if (x.live+1)*5 > len(x.cells)*4 {
		old := x.cells
		x.cells = make([]cell, 2*len(old))
		for _, c := range old {
			if c != 0 {
				x.place(c)
			}
		}
	}
	x.place(makeCell(x.hash(k), r))
	x.live++
}

func (x *index) place(c cell) {
	mask := uint32(len(x.cells) - 1)
	i := c.hash() & mask
	for x.cells[i] != 0 {
		i = (i + 1) & mask
	}
	x.cells[i] = c
}

// remove takes out the head r of k, and closes the gap so that probes need no marks of what was.
func (x *index) remove(k prefixKey, r slotRef) {
	mask, hash := uint32(len(x.cells)-1), x.hash(k)
	i := hash & mask
	for x.cells[i] != makeCell(hash, r) {
		i = (i + 1) & mask
	}
	for j := i; ; {
		j = (j + 1) & mask
		if x.cells[j] == 0 {
			break
		}
		home := x.cells[j].hash() & mask
		if (j-home)&mask >= (j-i)&mask {
			x.cells[i] = x.cells[j]
			i = j
		}
	}
	x.cells[i] = 0
	x.live--
}
