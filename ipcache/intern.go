// SPDX-License-Identifier: Apache-2.0

package ipcache

// interned keeps each value once, under a small number, as long as somebody refers to it. Number 0 is the zero value.
type interned[T comparable] struct {
	ids    map[T]uint32
	values []T
	refs   []uint32
	free   []uint32
	last   uint32    // acquired last: the next claim is often of the same
	own    func(T) T // makes a copy that aliases nobody's buffer
}

func newInterned[T comparable](own func(T) T) interned[T] {
	return interned[T]{ids: make(map[T]uint32), values: make([]T, 1), refs: make([]uint32, 1), own: own}
}

func (n *interned[T]) acquire(v T) uint32 {
	switch v {
	case n.values[0]:
		return 0
	case n.values[n.last]:
		n.refs[n.last]++
		return n.last
	}
	id, ok := n.ids[v]
	if !ok {
		id = n.add(n.own(v))
	}
	n.refs[id]++
	n.last = id
	return id
}

func (n *interned[T]) add(v T) (id uint32) {
	if last := len(n.free) - 1; last >= 0 {
		id, n.free = n.free[last], n.free[:last]
		n.values[id] = v
	} else {
		id = uint32(len(n.values))
		n.values, n.refs = append(n.values, v), append(n.refs, 0)
	}
	n.ids[v] = id
	return id
}

// release gives up one reference. The memory of many values goes with the last of them.
func (n *interned[T]) release(id uint32) {
	if id == 0 {
		return
	}
	if n.refs[id]--; n.refs[id] > 0 {
		return
	}
	if delete(n.ids, n.values[id]); len(n.ids) == 0 {
		*n = newInterned(n.own)
		return
	}
	n.values[id] = n.values[0]
	n.free = append(n.free, id)
}
