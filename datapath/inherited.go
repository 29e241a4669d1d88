// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"cmp"
	"slices"

	"github.com/weftmesh/weft/bpf"
)

// inherited holds the entries that a map was found with and of which the table has not spoken since: 48 bytes each,
// without pointers, and gone as the table speaks. It serves both ends of taking over a map: what the table says that is
// there already need not be written, and what the table never says is to be pruned.
//
// Entries belong to a group, of which there are few: whether one may be pruned is decided by group.
type inherited struct {
	entries []inheritedEntry // sorted by key
	spoken  []uint64         // bit i: the table has spoken of entries[i]
	left    int              // entries not spoken of
	groups  map[uint16]int   // of those, how many by group
	group   func(bpf.IPCacheValue) uint16
}

type inheritedEntry struct {
	key   bpf.IPCacheKey
	value bpf.IPCacheValue
}

// inherit takes entries over.
func inherit(entries []inheritedEntry, group func(bpf.IPCacheValue) uint16) *inherited {
	slices.SortFunc(entries, func(a, b inheritedEntry) int { return compareKeys(a.key, b.key) })
	h := &inherited{
		entries: entries,
		spoken:  make([]uint64, (len(entries)+63)/64),
		left:    len(entries),
		groups:  map[uint16]int{},
		group:   group,
	}
	for i := range entries {
		h.groups[group(entries[i].value)]++
	}
	return h
}

// compareKeys is any total order.
func compareKeys(a, b bpf.IPCacheKey) int {
	return cmp.Or(
		bytes.Compare(a.IP[:], b.IP[:]),
		cmp.Compare(a.PrefixLen, b.PrefixLen),
		cmp.Compare(a.Family, b.Family),
		cmp.Compare(a.ClusterID, b.ClusterID),
		cmp.Compare(a.Pad, b.Pad),
	)
}

// speak notes that the table has spoken of key and returns the value that the kernel holds for it. ok is false if key was
// not found there, or spoken of before, since when it may have been written.
func (h *inherited) speak(key bpf.IPCacheKey) (value bpf.IPCacheValue, ok bool) {
	i, found := slices.BinarySearchFunc(h.entries, key, func(e inheritedEntry, key bpf.IPCacheKey) int {
		return compareKeys(e.key, key)
	})
	if !found || !h.cross(i) {
		return bpf.IPCacheValue{}, false
	}
	return h.entries[i].value, true
}

// cross marks entry i as spoken of; false if it was.
func (h *inherited) cross(i int) bool {
	word, bit := i/64, uint64(1)<<(i%64)
	if h.spoken[word]&bit != 0 {
		return false
	}
	h.spoken[word] |= bit
	h.left--
	h.groups[h.group(h.entries[i].value)]--
	return true
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
	for i := range h.entries {
		if e := &h.entries[i]; named[h.group(e.value)] && h.cross(i) {
			keys = append(keys, e.key)
		}
	}
	return keys
}

// compact frees the memory of what was spoken of, once that is the larger part.
func (h *inherited) compact() {
	if h.left > len(h.entries)/2 {
		return
	}
	rest := make([]inheritedEntry, 0, h.left)
	for i := range h.entries {
		if h.spoken[i/64]&(1<<(i%64)) == 0 {
			rest = append(rest, h.entries[i])
		}
	}
	h.entries, h.spoken = rest, make([]uint64, (len(rest)+63)/64)
}
