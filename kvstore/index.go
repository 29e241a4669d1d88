// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"errors"
	"hash/maphash"
	"iter"
	"math"
)

// errIndexFull indicates that the keys of one prefix need more than 2 GiB.
var errIndexFull = errors.New("too many keys under one prefix: more than 2 GiB of key text")

// index remembers for each key the revision that was last applied to it. It is
// a hash table of its own making because of its size: a node follows millions
// of keys, and this takes about 30 bytes and the key's own text for one, in a
// few thousand objects that the garbage collector need not look into.
//
// A deleted key stays, as its own tombstone, until the table is rebuilt, so
// that a late event from before the deletion is still recognised. The zero
// value is an empty index. Not safe for concurrent use.
type index struct {
	seed maphash.Seed

	// slots is the table, open addressed with linear probing; its length is
	// 1<<bits. A slot is 0 when free, else the number of its entry plus one in
	// the low bits, and above them as much of the key's hash as fits, which
	// saves most looks at entries that do not match.
	slots []uint32
	bits  uint

	entries [][]entry // chunks of entryChunk, the last one shorter
	used    int       // entries in use, live or dead
	live    int

	// arena holds the text of the keys; a key lies within one chunk.
	arena [][]byte
}

const (
	entryChunk   = 1024
	arenaChunk   = 64 << 10
	firstChunk   = 1 << 10 // of the arena; most prefixes hold little
	minIndexBits = 6

	// maxArena is half of what a place can name: a rebuild, which packs some
	// of the same keys anew, never needs more than twice the chunks.
	maxArena = 1 << 15

	entryDead  = 1 << 0
	entryStale = 1 << 1
	flagBits   = 2
)

// entry is what is known of one key. All its fields are of 32 bits, so that it
// takes 20 bytes and not 24.
type entry struct {
	revisionLow, revisionHigh uint32
	digest                    uint32 // of the value
	place                     uint32 // arena chunk in the high half, offset in the low
	size                      uint32 // length of the key << flagBits | flags
}

func (e *entry) revision() int64 {
	return int64(e.revisionHigh)<<32 | int64(e.revisionLow)
}

func (e *entry) set(revision int64, digest uint32) {
	e.revisionLow, e.revisionHigh = uint32(revision), uint32(revision>>32)
	e.digest = digest
}

func (e *entry) alive() bool { return e.size&entryDead == 0 }
func (e *entry) stale() bool { return e.size&entryStale != 0 }
func (e *entry) keep()       { e.size &^= entryStale }

// find returns what is known of key, dead or alive, or nil. The result is good
// until the next insert.
func (x *index) find(key []byte) *entry {
	if len(x.slots) == 0 {
		return nil
	}
	e, _ := x.probe(key, maphash.Bytes(x.seed, key))
	return e
}

// probe walks from the key's first slot to its entry, or to the free slot that
// it would take.
func (x *index) probe(key []byte, hash uint64) (*entry, uint64) {
	mask := uint64(len(x.slots) - 1)
	tag := uint32(hash>>32) << x.bits
	for i := hash & mask; ; i = (i + 1) & mask {
		slot := x.slots[i]
		if slot == 0 {
			return nil, i
		}
		if slot&^uint32(mask) != tag {
			continue
		}
		if e := x.entry(int(slot&uint32(mask)) - 1); string(x.key(e)) == string(key) {
			return e, i
		}
	}
}

func (x *index) entry(n int) *entry { return &x.entries[n/entryChunk][n%entryChunk] }

// key returns the text of an entry's key, good until the next insert.
func (x *index) key(e *entry) []byte {
	offset, size := e.place&0xffff, e.size>>flagBits
	return x.arena[e.place>>16][offset : offset+size : offset+size]
}

// insert adds a key that find does not know.
func (x *index) insert(key []byte, revision int64, digest uint32) (*entry, error) {
	if len(x.arena) >= maxArena || len(key) > math.MaxUint32>>flagBits {
		return nil, errIndexFull
	}
	if x.used+1 > len(x.slots)/4*3 {
		x.rebuild()
	}
	e := x.add(entry{place: x.store(key), size: uint32(len(key)) << flagBits})
	e.set(revision, digest)
	x.link(key)
	x.live++
	return e, nil
}

// store copies key to the arena.
func (x *index) store(key []byte) (place uint32) {
	last := len(x.arena) - 1
	if last < 0 || cap(x.arena[last])-len(x.arena[last]) < max(len(key), 1) {
		size := arenaChunk
		if last < 6 { // 1 KiB, 2 KiB, … 32 KiB, and then the full size
			size = firstChunk << (last + 1)
		}
		x.arena = append(x.arena, make([]byte, 0, max(size, len(key))))
		last++
	}
	offset := len(x.arena[last])
	x.arena[last] = append(x.arena[last], key...)
	return uint32(last)<<16 | uint32(offset)
}

// add appends an entry.
func (x *index) add(e entry) *entry {
	last := x.used / entryChunk
	if last == len(x.entries) {
		var chunk []entry
		if last > 0 {
			chunk = make([]entry, 0, entryChunk)
		}
		x.entries = append(x.entries, chunk)
	}
	x.entries[last] = append(x.entries[last], e)
	x.used++
	return &x.entries[last][len(x.entries[last])-1]
}

// link gives the last entry, whose key this is, its slot.
func (x *index) link(key []byte) {
	hash := maphash.Bytes(x.seed, key)
	_, slot := x.probe(key, hash)
	x.slots[slot] = uint32(hash>>32)<<x.bits | uint32(x.used)
}

// revive makes a dead key live again.
func (x *index) revive(e *entry) {
	e.size &^= entryDead | entryStale
	x.live++
}

// bury makes a live key its tombstone.
func (x *index) bury(e *entry, revision int64) {
	e.set(revision, 0)
	e.size |= entryDead
	x.live--
}

// all yields every live entry, in order of first insertion. The body may bury
// the entry it is given.
func (x *index) all() iter.Seq[*entry] {
	return func(yield func(*entry) bool) {
		for n := range x.used {
			if e := x.entry(n); e.alive() && !yield(e) {
				return
			}
		}
	}
}

// markStale marks every live key.
func (x *index) markStale() {
	for e := range x.all() {
		e.size |= entryStale
	}
}

// forgetRevisions keeps the live keys only, at revision 0: what is known of
// them is from another history.
func (x *index) forgetRevisions() {
	x.purge()
	for e := range x.all() {
		e.set(0, 0)
	}
}

// newest returns the live entry with the highest revision, nil if there is
// none.
func (x *index) newest() *entry {
	var newest *entry
	for e := range x.all() {
		if newest == nil || e.revision() > newest.revision() {
			newest = e
		}
	}
	return newest
}

// purge drops all tombstones.
func (x *index) purge() {
	if x.used > x.live {
		x.rebuild()
	}
}

// rebuild makes a table that the live entries fill to at most three fifths,
// and drops the tombstones.
func (x *index) rebuild() {
	bits := uint(minIndexBits)
	for x.live*5 > 3<<bits {
		bits++
	}
	old := *x
	*x = index{seed: old.seed, slots: make([]uint32, 1<<bits), bits: bits}
	if len(old.slots) == 0 {
		x.seed = maphash.MakeSeed()
	}
	if old.used == old.live {
		x.entries, x.arena, x.live = old.entries, old.arena, old.live
		for x.used < old.used {
			x.used++
			x.link(x.key(x.entry(x.used - 1)))
		}
		return
	}
	for e := range old.all() {
		key := old.key(e)
		moved := *e
		moved.place = x.store(key)
		x.add(moved)
		x.link(key)
		x.live++
	}
}
