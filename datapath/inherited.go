// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"cmp"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// inherited holds the entries that a map was found with and of which the table has not spoken since: 48 bytes each,
// and given back as the table speaks, in memory of its own: Go's would let twice as much be garbage before it collects. It serves both ends of taking over a map: what the table says that is
// there already need not be written, and what the table never says is to be pruned.
//
// Entries belong to a group, of which there are few: whether one may be pruned is decided by group. A nil one is empty.
type inherited struct {
	chunks []inheritedChunk // sorted, as their entries are
	left   int              // entries not spoken of; where there are some, Close gives back their memory
	groups map[uint16]int   // of those, how many by group
	group  func(bpf.IPCacheValue) uint16
}

// inheritedChunk is a run of entries. Their memory is given back once the table has spoken of all of them.
type inheritedChunk struct {
	first   bpf.IPCacheKey
	entries []inheritedEntry
	spoken  []uint64 // bit i: the table has spoken of entries[i]
	left    int
	memory  []byte // that of entries, if it is not Go's
}

type inheritedEntry struct {
	key   bpf.IPCacheKey
	value bpf.IPCacheValue
}

// inherit takes over what dump yields.
func inherit(dump func(yield func([]bpf.IPCacheKey, []bpf.IPCacheValue)) error, group func(bpf.IPCacheValue) uint16) (*inherited, error) {
	h := &inherited{groups: map[uint16]int{}, group: group}
	err := dump(func(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) {
		entries, memory := inheritedMemory(len(keys))
		for i := range keys {
			entries[i] = inheritedEntry{keys[i], values[i]}
			h.groups[group(values[i])]++
		}
		h.add(entries, memory)
	})
	if err != nil {
		h.Close()
		return nil, err
	}
	h.sort()
	return h, nil
}

// inheritedMemory is memory for n entries; if they are few, or the kernel has none, it is Go's.
func inheritedMemory(n int) (entries []inheritedEntry, memory []byte) {
	if n < dumpChunk/2 {
		return make([]inheritedEntry, n), nil
	}
	memory, err := unix.Mmap(-1, 0, n*int(unsafe.Sizeof(inheritedEntry{})), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return make([]inheritedEntry, n), nil
	}
	return unsafe.Slice((*inheritedEntry)(unsafe.Pointer(&memory[0])), n), memory
}

func (c *inheritedChunk) free() {
	if c.memory != nil {
		_ = unix.Munmap(c.memory)
	}
	c.entries, c.spoken, c.memory = nil, nil, nil
}

// Close gives the memory back of what is left. Nothing may be asked afterwards.
func (h *inherited) Close() {
	if h == nil {
		return
	}
	for i := range h.chunks {
		h.chunks[i].free()
	}
}

func (h *inherited) add(entries []inheritedEntry, memory []byte) {
	h.left += len(entries)
	h.chunks = append(h.chunks, inheritedChunk{entries[0].key, entries, make([]uint64, (len(entries)+63)/64), len(entries), memory})
}

// sort brings the entries into order, unless the kernel has yielded them so.
func (h *inherited) sort() {
	byKey := func(a, b inheritedEntry) int { return compareKeys(a.key, b.key) }
	var before *inheritedEntry
	for _, c := range h.chunks {
		if before != nil && byKey(*before, c.entries[0]) > 0 || !slices.IsSortedFunc(c.entries, byKey) {
			all := make([]inheritedEntry, 0, h.left)
			for _, c := range h.chunks {
				all = append(all, c.entries...)
				c.free()
			}
			slices.SortFunc(all, byKey)
			h.chunks, h.left = nil, 0
			for part := range slices.Chunk(all, dumpChunk) {
				h.add(part, nil)
			}
			return
		}
		before = &c.entries[len(c.entries)-1]
	}
}

// compareKeys orders keys as the kernel walks through the map: low addresses before high ones, and what is inside a prefix
// before that prefix.
func compareKeys(a, b bpf.IPCacheKey) int {
	if order := cmp.Or(cmp.Compare(a.ClusterID, b.ClusterID), cmp.Compare(a.Pad, b.Pad), cmp.Compare(a.Family, b.Family)); order != 0 {
		return order
	}
	if a.PrefixLen != b.PrefixLen && sameBits(&a.IP, &b.IP, int(min(a.PrefixLen, b.PrefixLen))-32) {
		return cmp.Compare(b.PrefixLen, a.PrefixLen)
	}
	return bytes.Compare(a.IP[:], b.IP[:])
}

// sameBits reports whether two addresses begin with the same bits.
func sameBits(a, b *[16]byte, bits int) bool {
	whole := max(bits, 0) / 8
	if whole >= len(a) {
		return *a == *b
	}
	rest := byte(0xff) << (8 - max(bits, 0)%8)
	return bytes.Equal(a[:whole], b[:whole]) && (a[whole]^b[whole])&rest == 0
}

// find returns where key is, and whether it is there and was not spoken of.
func (h *inherited) find(key bpf.IPCacheKey) (c *inheritedChunk, i int, ok bool) {
	if h == nil {
		return nil, 0, false
	}
	at, found := slices.BinarySearchFunc(h.chunks, key, func(c inheritedChunk, key bpf.IPCacheKey) int { return compareKeys(c.first, key) })
	if !found {
		if at--; at < 0 {
			return nil, 0, false
		}
	}
	c = &h.chunks[at]
	i, found = slices.BinarySearchFunc(c.entries, key, func(e inheritedEntry, key bpf.IPCacheKey) int { return compareKeys(e.key, key) })
	return c, i, found && c.spoken[i/64]&(1<<(i%64)) == 0
}

// holds reports whether key was found in the map and not spoken of since.
func (h *inherited) holds(key bpf.IPCacheKey) bool {
	_, _, ok := h.find(key)
	return ok
}

// speak notes that the table has spoken of key and returns the value that the kernel holds for it. ok is false if key was
// not found there, or spoken of before, since when it may have been written.
func (h *inherited) speak(key bpf.IPCacheKey) (value bpf.IPCacheValue, ok bool) {
	c, i, ok := h.find(key)
	if !ok {
		return bpf.IPCacheValue{}, false
	}
	value = c.entries[i].value
	h.cross(c, i)
	return value, true
}

// cross marks an entry as spoken of.
func (h *inherited) cross(c *inheritedChunk, i int) {
	h.left--
	h.groups[h.group(c.entries[i].value)]--
	c.spoken[i/64] |= 1 << (i % 64)
	if c.left--; c.left == 0 {
		c.free()
	}
}

// take removes the entries whose group prunable names from those that are left and returns their keys.
func (h *inherited) take(prunable func(group uint16) bool) []bpf.IPCacheKey {
	named := map[uint16]bool{}
	n := 0
	for g, count := range h.groups {
		if count > 0 && prunable(g) {
			named[g] = true
			n += count
		}
	}
	if n == 0 {
		return nil
	}
	keys := make([]bpf.IPCacheKey, 0, n)
	for at := range h.chunks {
		c := &h.chunks[at]
		entries, spoken := c.entries, c.spoken
		for i := range entries {
			if e := &entries[i]; spoken[i/64]&(1<<(i%64)) == 0 && named[h.group(e.value)] {
				keys = append(keys, e.key)
				if h.cross(c, i); c.left == 0 {
					break // the memory of entries is gone
				}
			}
		}
	}
	return keys
}
