// SPDX-License-Identifier: Apache-2.0

package ipcache

import "math"

// interned keeps each value once, under a small number, as long as somebody refers to it. Number 0 is the zero value.
type interned[T comparable] struct {
	ids    map[T]uint32
	values []T
	refs   []uint32
	free   []uint32
}

func newInterned[T comparable]() interned[T] {
	return interned[T]{ids: make(map[T]uint32), values: make([]T, 1), refs: make([]uint32, 1)}
}

func (n *interned[T]) acquire(v T) uint32 {
	if v == n.values[0] {
		return 0
	}
	id, ok := n.ids[v]
	if !ok {
		if last := len(n.free) - 1; last >= 0 {
			id, n.free = n.free[last], n.free[:last]
			n.values[id] = v
		} else {
			id = uint32(len(n.values))
			n.values, n.refs = append(n.values, v), append(n.refs, 0)
		}
		n.ids[v] = id
	}
	n.refs[id]++
	return id
}

func (n *interned[T]) release(id uint32) {
	if id == 0 {
		return
	}
	if n.refs[id]--; n.refs[id] == 0 {
		delete(n.ids, n.values[id])
		n.values[id] = n.values[0]
		n.free = append(n.free, id)
	}
}

// metadata keeps namespace and pod name of every claim back to back in one block without pointers. Names of pods rarely
// repeat, so they are not interned; what is released is squeezed out when it is half of the whole. Reference 0 is "none".
type metadata struct {
	buf  []byte
	dead int
}

// nameLimit is the length up to which a name is kept; Kubernetes allows 253 bytes.
const nameLimit = 255

// clip bounds a name to what a record can hold.
func clip(name string) string { return name[:min(len(name), nameLimit)] }

// add stores a record. A block that has no room left keeps the entry and loses only its names.
func (m *metadata) add(namespace, pod string) uint32 {
	if namespace == "" && pod == "" || len(m.buf) > math.MaxUint32-2*nameLimit-2 {
		return 0
	}
	if len(m.buf) == 0 {
		m.buf = append(m.buf, 0) // so that no reference is 0
	}
	ref := uint32(len(m.buf))
	for _, s := range [...]string{clip(namespace), clip(pod)} {
		m.buf = append(m.buf, byte(len(s)))
		m.buf = append(m.buf, s...)
	}
	return ref
}

// raw returns the record of ref.
func (m *metadata) raw(ref uint32) []byte {
	rec := m.buf[ref:]
	n := int(rec[0])
	return rec[:n+2+int(rec[n+1])]
}

func (m *metadata) get(ref uint32) (namespace, pod string) {
	if ref == 0 {
		return "", ""
	}
	rec := m.raw(ref)
	n := int(rec[0])
	return string(rec[1 : 1+n]), string(rec[n+2:])
}

func (m *metadata) release(ref uint32) {
	if ref != 0 {
		m.dead += len(m.raw(ref))
	}
}

// wasteful reports whether enough of the block is dead for a compaction to pay.
func (m *metadata) wasteful() bool { return m.dead > 1<<16 && m.dead > len(m.buf)/2 }
