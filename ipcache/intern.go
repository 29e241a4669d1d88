// SPDX-License-Identifier: Apache-2.0

package ipcache

import "hash/maphash"

// interned keeps each value once, under a small number, as long as somebody refers to it. Number 0 is the zero value.
// The numbers are found by hash chains of numbers, as a map of the values would hold each of them a second time.
type interned[T comparable] struct {
	values []T
	refs   []uint32
	chain  []uint32 // by number: the next one in its chain, or of the free ones; 0: none
	heads  []uint32 // by hash: the first number of the chain
	free   uint32   // the first of the free ones
	used   int
	last   uint32 // acquired last: the next claim is often of the same
	seed   maphash.Seed
	own    func(T) T // makes a copy that aliases nobody's buffer
}

func newInterned[T comparable](own func(T) T) interned[T] {
	return interned[T]{
		values: make([]T, 1), refs: make([]uint32, 1), chain: make([]uint32, 1), heads: make([]uint32, 1), seed: maphash.MakeSeed(), own: own,
	}
}

func (n *interned[T]) acquire(v T) uint32 {
	switch v {
	case n.values[0]:
		return 0
	case n.values[n.last]:
		n.refs[n.last]++
		return n.last
	}
	id := *n.head(&v)
	for id != 0 && n.values[id] != v {
		id = n.chain[id]
	}
	if id == 0 {
		id = n.add(n.own(v))
	}
	n.refs[id]++
	n.last = id
	return id
}

// head is where the chain of a value begins.
func (n *interned[T]) head(v *T) *uint32 {
	return &n.heads[maphash.Comparable(n.seed, *v)&uint64(len(n.heads)-1)]
}

func (n *interned[T]) add(v T) (id uint32) {
	if n.used == len(n.heads) {
		n.spread()
	}
	if id = n.free; id != 0 {
		n.free = n.chain[id]
		n.values[id] = v
	} else {
		id = uint32(len(n.values))
		n.values, n.refs, n.chain = append(n.values, v), append(n.refs, 0), append(n.chain, 0)
	}
	head := n.head(&v)
	n.chain[id], *head = *head, id
	n.used++
	return id
}

// spread makes twice as many chains.
func (n *interned[T]) spread() {
	n.heads = make([]uint32, 2*len(n.heads))
	for id := 1; id < len(n.values); id++ {
		if n.refs[id] > 0 {
			head := n.head(&n.values[id])
			n.chain[id], *head = *head, uint32(id)
		}
	}
}

// release gives up one reference. The memory of many values goes with the last of them.
func (n *interned[T]) release(id uint32) {
	if id == 0 {
		return
	}
	if n.refs[id]--; n.refs[id] > 0 {
		return
	}
	if n.used--; n.used == 0 {
		*n = newInterned(n.own)
		return
	}
	at := n.head(&n.values[id])
	for *at != id {
		at = &n.chain[*at]
	}
	*at = n.chain[id]
	n.values[id] = n.values[0]
	n.chain[id], n.free = n.free, id
}
