// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"maps"
	"math/bits"
	"slices"
)

// numbers hands out the numbers of records, from 1 on. One that is given back is kept until recycle.
type numbers struct {
	next, limit uint32 // those from next on were never used
	free        []uint32
	retired     []uint32
}

// newNumbers has all numbers below limit but 0 and those that are in use.
func newNumbers(limit int, used map[uint32]struct{}) numbers {
	n := numbers{next: 1, limit: uint32(limit)}
	for _, number := range slices.Sorted(maps.Keys(used)) {
		for ; n.next < number; n.next++ {
			n.free = append(n.free, n.next)
		}
		n.next = number + 1
	}
	return n
}

func (n *numbers) take() (uint32, bool) {
	if last := len(n.free) - 1; last >= 0 {
		number := n.free[last]
		n.free = n.free[:last]
		return number, true
	}
	if n.next >= n.limit {
		return 0, false
	}
	n.next++
	return n.next - 1, true
}

func (n *numbers) retire(number uint32) { n.retired = append(n.retired, number) }

// recycle lets retired numbers be taken again: no program knows them any more.
func (n *numbers) recycle() {
	n.free = append(n.free, n.retired...)
	n.retired = n.retired[:0]
}

// used is how many numbers are neither free nor waiting to be.
func (n *numbers) used() int { return int(n.next) - 1 - len(n.free) - len(n.retired) }

// minRoom is the least room, in slots: services that grow from one backend to a few stay where they are.
const minRoom = 4

// span is a range of slots.
type span struct{ place, room uint32 }

// spans hands out ranges of slots: buddies, whose room is a power of two and whose place is a multiple of it. A range that
// is given back is kept until recycle.
type spans struct {
	size    uint32
	free    [32]map[uint32]struct{} // places, by the logarithm of their room
	retired []span
	used    uint32 // slots
}

// newSpans has room for size slots, a power of two.
func newSpans(size uint32) spans {
	s := spans{size: size}
	for i := range s.free {
		s.free[i] = map[uint32]struct{}{}
	}
	s.free[bits.TrailingZeros32(size)][0] = struct{}{}
	return s
}

func roomFor(slots int) uint32 {
	if slots <= minRoom {
		return minRoom
	}
	return 1 << bits.Len32(uint32(slots-1))
}

// take returns a range with room for a number of slots.
func (s *spans) take(slots int) (span, bool) {
	room := roomFor(slots)
	order := bits.TrailingZeros32(room)
	from := order
	for from < len(s.free) && len(s.free[from]) == 0 {
		from++
	}
	if from == len(s.free) {
		return span{}, false
	}
	var place uint32
	for place = range s.free[from] {
		break
	}
	s.split(place, from, place, order)
	s.used += room
	return span{place, room}, true
}

// split takes a range out of a larger free one, whose other parts stay free.
func (s *spans) split(free uint32, from int, place uint32, order int) {
	delete(s.free[from], free)
	for from > order {
		from--
		half := uint32(1) << from
		if place < free+half {
			s.free[from][free+half] = struct{}{}
		} else {
			s.free[from][free] = struct{}{}
			free += half
		}
	}
}

// reserve takes a certain range. It reports whether that is one, and free.
func (s *spans) reserve(r span) bool {
	if r.room < minRoom || r.room&(r.room-1) != 0 || r.place%r.room != 0 || uint64(r.place)+uint64(r.room) > uint64(s.size) {
		return false
	}
	order := bits.TrailingZeros32(r.room)
	for from := order; from < len(s.free) && uint64(1)<<from <= uint64(s.size); from++ {
		free := r.place &^ (1<<from - 1)
		if _, ok := s.free[from][free]; ok {
			s.split(free, from, r.place, order)
			s.used += r.room
			return true
		}
	}
	return false
}

func (s *spans) retire(r span) {
	if r.room > 0 {
		s.retired = append(s.retired, r)
	}
}

// recycle lets retired ranges be taken again, and joins neighbours.
func (s *spans) recycle() {
	for _, r := range s.retired {
		s.used -= r.room
		order := bits.TrailingZeros32(r.room)
		for ; uint32(1)<<order < s.size; order++ {
			buddy := r.place ^ 1<<order
			if _, ok := s.free[order][buddy]; !ok {
				break
			}
			delete(s.free[order], buddy)
			r.place &^= 1 << order
		}
		s.free[order][r.place] = struct{}{}
	}
	s.retired = s.retired[:0]
}
