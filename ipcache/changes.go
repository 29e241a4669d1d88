// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"net/netip"
	"sync/atomic"
)

// Revision is a reader's place in the history of a [Table]. The zero Revision is the beginning.
type Revision struct {
	at    uint64 // the last change that the reader was given
	floor uint64 // deletions up to here are no news to the reader, since it began later
}

// Change is a prefix whose winner changed, as it is now.
type Change struct {
	Prefix  netip.Prefix
	Deleted bool // nobody claims it any more; Entry and Owner are zero
	// Entry is the winner's, without the names of the workload.
	Entry Entry
	Owner Owner
}

// changes orders heads by their last change, the oldest first, and keeps tombstones of those that are gone.
type changes struct {
	rev            uint64
	oldest, newest slotRef
	// cursor is where the last answer ended: the next question most often begins there.
	cursor atomic.Uint32

	tombstones int
	dead       []slotRef // heads that died, in that order; some live again
	// compacted is the newest deletion that is not remembered.
	compacted uint64
}

// append gives a head that is in no order the newest place.
func (c *changes) append(s *slab, r slotRef) {
	p := s.at(r)
	p.older, p.newer = c.newest, 0
	if c.newest != 0 {
		s.at(c.newest).newer = r
	} else {
		c.oldest = r
	}
	c.newest = r
	c.rev++
	p.rev = c.rev
}

// unorder takes a head out of the order.
func (c *changes) unorder(s *slab, r slotRef) {
	p := s.at(r)
	if p.older != 0 {
		s.at(p.older).newer = p.newer
	} else {
		c.oldest = p.newer
	}
	if p.newer != 0 {
		s.at(p.newer).older = p.older
	} else {
		c.newest = p.older
	}
}

// touch makes a head's change the newest. mu is held.
func (t *Table) touch(r slotRef) {
	t.unorder(&t.slots, r)
	t.append(&t.slots, r)
}

// bury notes that a head died. mu is held.
func (t *Table) bury(r slotRef) {
	t.tombstones++
	if p := t.slots.at(r); p.state&slotQueued == 0 {
		p.state |= slotQueued
		t.dead = append(t.dead, r)
	}
}

// tombstoneFloor is how many tombstones are kept whatever the size of the table.
const tombstoneFloor = 4096

// compact bounds what is kept of the past: tombstones beyond half of the table, the oldest first, and the dead half of
// the names. A reader that has not come to them learns by a reset. mu is held.
func (t *Table) compact() {
	for limit := tombstoneFloor + t.slots.capacity()/2; t.tombstones > limit; {
		r := t.dead[0]
		t.dead = t.dead[1:]
		p := t.slots.at(r)
		p.state &^= slotQueued
		if p.state&slotDead == 0 {
			continue
		}
		t.compacted = max(t.compacted, p.rev)
		t.unorder(&t.slots, r)
		t.index.remove(p.prefixKey(), r)
		t.slots.release(r)
		t.tombstones--
	}
	if t.meta.wasteful() {
		t.compactNames()
	}
}

// compactNames copies the names that are in use into blocks of their own.
func (t *Table) compactNames() {
	old := t.meta
	t.meta = metadata{}
	for head := t.oldest; head != 0; head = t.slots.at(head).newer {
		for r := head; r != 0; r = t.slots.at(r).next {
			if s := t.slots.at(r); s.meta != 0 {
				s.meta = t.meta.copy(old.raw(s.meta))
			}
		}
	}
}

// Changes appends to buf, up to its capacity, what changed after since, oldest first and each prefix once, and returns
// the place to ask from next. An empty answer means that the reader has seen everything.
//
// A reader that falls so far behind that deletions were forgotten is told reset: the answers begin again with the oldest
// entry, and after the next empty one the reader removes what it holds and was not given.
func (t *Table) Changes(since Revision, buf []Change) (batch []Change, next Revision, reset bool) {
	batch = buf[:0]
	t.mu.RLock()
	defer t.mu.RUnlock()
	switch {
	case since == Revision{}:
		since.floor = t.rev
	case max(since.at, since.floor) < t.compacted:
		since, reset = Revision{floor: t.rev}, true
	}
	r := t.after(since.at)
	for ; r != 0 && len(batch) < max(cap(buf), 1); r = t.slots.at(r).newer {
		s := t.slots.at(r)
		change := Change{Prefix: s.prefix(), Deleted: s.state&slotDead != 0}
		if !change.Deleted {
			c := t.bareClaim(r)
			change.Entry, change.Owner = c.Entry, c.Owner
		}
		batch = append(batch, change)
		since.at = s.rev
		t.cursor.Store(uint32(r))
	}
	return batch, since, reset
}

// after returns the oldest head that changed after at. mu is held.
func (t *Table) after(at uint64) slotRef {
	if at == 0 {
		return t.oldest
	}
	if r := slotRef(t.cursor.Load()); r != 0 && t.slots.at(r).rev == at {
		return t.slots.at(r).newer
	}
	var r slotRef
	for p := t.newest; p != 0 && t.slots.at(p).rev > at; p = t.slots.at(p).older {
		r = p
	}
	return r
}

// Changed returns a channel that is closed at the next change. Take it before the [Table.Changes] that it guards.
func (t *Table) Changed() <-chan struct{} {
	t.mu.RLock()
	defer t.mu.RUnlock()
	t.waiting.Store(true)
	return t.changed
}
