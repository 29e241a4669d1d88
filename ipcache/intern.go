// SPDX-License-Identifier: Apache-2.0

package ipcache

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

// metadata keeps namespace and pod name of every claim back to back in blocks without pointers. Names of pods rarely
// repeat, so they are not interned; what is released is squeezed out when it is half of the whole. Reference 0 is "none".
type metadata struct {
	blocks [][]byte // all but the last one full
	size   int      // bytes in use, dead ones included
	dead   int
}

const (
	// nameLimit is the length up to which a name is kept; Kubernetes allows 253 bytes.
	nameLimit = 255
	// A reference is the number of a block and the place in it. A record never crosses blocks.
	blockBits = 16
	blockSize = 1 << blockBits
	maxBlocks = 1 << (32 - blockBits)
)

// clip bounds a name to what a record can hold.
func clip(name string) string { return name[:min(len(name), nameLimit)] }

// room returns a block with space for n more bytes, and its number; nil if there can be no more blocks.
func (m *metadata) room(n int) (block *[]byte, number int) {
	last := len(m.blocks) - 1
	if last < 0 || len(m.blocks[last])+n > blockSize {
		if last+1 == maxBlocks {
			return nil, 0
		}
		m.blocks = append(m.blocks, make([]byte, 0, blockSize))
		last++
		if last == 0 {
			m.blocks[0] = append(m.blocks[0], 0) // so that no reference is 0
		}
	}
	return &m.blocks[last], last
}

// add stores a record. When there is no room left at all, the entry is kept and loses only its names.
func (m *metadata) add(namespace, pod string) uint32 {
	if namespace == "" && pod == "" {
		return 0
	}
	namespace, pod = clip(namespace), clip(pod)
	n := len(namespace) + len(pod) + 2
	block, number := m.room(n)
	if block == nil {
		return 0
	}
	ref := uint32(number<<blockBits | len(*block))
	*block = append(*block, byte(len(namespace)))
	*block = append(*block, namespace...)
	*block = append(*block, byte(len(pod)))
	*block = append(*block, pod...)
	m.size += n
	return ref
}

// copy stores a record of another block.
func (m *metadata) copy(record []byte) uint32 {
	block, number := m.room(len(record))
	ref := uint32(number<<blockBits | len(*block))
	*block = append(*block, record...)
	m.size += len(record)
	return ref
}

// raw returns the record of ref.
func (m *metadata) raw(ref uint32) []byte {
	rec := m.blocks[ref>>blockBits][ref%blockSize:]
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

// wasteful reports whether enough is dead for a compaction to pay.
func (m *metadata) wasteful() bool { return m.dead > blockSize && m.dead > m.size/2 }
