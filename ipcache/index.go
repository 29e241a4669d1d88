// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
)

// index finds the head of a prefix: open addressing with linear probing. The hash is seeded, since the addresses come
// from strangers. A cell holds the slot and, above it, 32 bits of the hash, which place the cell and tell most strangers
// apart: slots lie all over the memory, and a look at one that is not ours is what costs.
//
// Cells stand in ascending order, so a search ends at the first greater one, and an index of another size is written from
// front to back without a look at any slot: cheap enough to grow by a quarter instead of twofold.
type index struct {
	cells []cell // of these, tail at the end are nobody's home: they take what is pushed beyond
	live  int
	seed  [2]uint64
}

type cell uint64

func makeCell(hash uint32, r slotRef) cell { return cell(hash)<<32 | cell(r) }

func (c cell) hash() uint32  { return uint32(c >> 32) }
func (c cell) slot() slotRef { return slotRef(c) }

const (
	indexFloor = 64
	indexTail  = 1024
)

func newIndex() index {
	return index{cells: make([]cell, indexFloor+indexTail), seed: [2]uint64{rand.Uint64(), rand.Uint64()}}
}

func (x *index) hash(k *prefixKey) uint32 {
	hi := binary.LittleEndian.Uint64(k.upper[:8]) ^ x.seed[0]
	lo := uint64(binary.LittleEndian.Uint32(k.upper[8:]))<<32 ^ uint64(k.low) ^ x.seed[1] ^ uint64(k.bits)<<56
	if k.v6 {
		lo ^= 1 << 48
	}
	h, l := bits.Mul64(hi, lo|1)
	h2, l2 := bits.Mul64(h^l^lo, 0x9e3779b97f4a7c15)
	mixed := h2 ^ l2 ^ hi
	return uint32(mixed ^ mixed>>32)
}

// size is the number of cells that are homes.
func (x *index) size() int { return len(x.cells) - indexTail }

// home is where the search for a hash begins.
func (x *index) home(hash uint32) int { return int(uint64(hash) * uint64(x.size()) >> 32) }

// search returns the place of the first cell that is not before c: c's own, or where it belongs.
func (x *index) search(c cell) int {
	i := x.home(c.hash())
	for i < len(x.cells) && x.cells[i] != 0 && x.cells[i] < c {
		i++
	}
	return i
}

// find returns the head of k, or 0.
func (x *index) find(s *slab, k *prefixKey) slotRef {
	hash := x.hash(k)
	for _, c := range x.cells[x.search(makeCell(hash, 0)):] {
		if c == 0 || c.hash() != hash {
			break
		}
		if s.holds(s.at(c.slot()), k) {
			return c.slot()
		}
	}
	return 0
}

// touch reads where a search for k begins.
func (x *index) touch(k *prefixKey) cell { return x.cells[x.home(x.hash(k))] }

// insert adds the head of k, which the index does not hold. At most four fifths of the cells are in use.
func (x *index) insert(k *prefixKey, r slotRef) {
	c := makeCell(x.hash(k), r)
	if (x.live+1)*5 > x.size()*4 {
		x.grow()
	}
	for {
		i := x.search(c)
		for end := i; end < len(x.cells); end++ {
			if x.cells[end] == 0 {
				copy(x.cells[i+1:end+1], x.cells[i:end])
				x.cells[i] = c
				x.live++
				return
			}
		}
		x.grow() // the tail is full
	}
}

func (x *index) grow() { x.resize(x.size() + x.size()/4) }

func (x *index) resize(size int) {
	old := x.cells
	x.cells = make([]cell, size+indexTail)
	next := 0
	for _, c := range old {
		if c != 0 {
			next = max(next, x.home(c.hash()))
			x.cells[next] = c
			next++
		}
	}
}

// remove takes out the head r of k, and closes the gap.
func (x *index) remove(k *prefixKey, r slotRef) {
	i := x.search(makeCell(x.hash(k), r))
	end := i + 1
	for end < len(x.cells) && x.cells[end] != 0 && x.home(x.cells[end].hash()) < end {
		end++
	}
	copy(x.cells[i:], x.cells[i+1:end])
	x.cells[end-1] = 0
	if x.live--; x.size() > indexFloor && x.live < x.size()/4 {
		x.resize(x.size() / 2)
	}
}
