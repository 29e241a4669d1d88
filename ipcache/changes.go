// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"net/netip"
	"sync/atomic"
)

// Revision is a reader's place in the history of a [Table]. The zero Revision is the beginning.
type Revision struct {
	at    uint64  // the last change that the reader was given
	floor uint64  // deletions up to here are no news to the reader, since it began later
	last  slotRef // the head of that change, if nothing has happened to it since: where the next answer begins
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
	// given is the newest change that a reader was given.
	given atomic.Uint64

	tombstones  int
	floor       int // tombstoneFloor and unreadLimit, but in tests
	unreadLimit int
	dead        []slotRef // heads that died, in that order; some live again
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

const (
	// tombstoneFloor is how many tombstones are kept whatever the size of the table, for readers that others are ahead of.
	tombstoneFloor = 4096
	// unreadLimit is how many are kept if nobody has read them: 30 MiB for whoever drains faster than the kernel forgets.
	unreadLimit = 1 << 19
)

// compact bounds what is kept of the past, after a batch of n ops and with work in proportion: tombstones, the oldest
// first, and dead names. mu is held.
//
// What nobody has read yet is kept, so that a drain needs no reset; what somebody has read is kept for others in
// proportion to what lives. A reader that comes too late for forgotten ones learns by a reset.
func (t *Table) compact(n int) {
	limit, given := t.floor+t.live/2, t.given.Load()
	for budget := 4*n + 64; budget > 0 && t.tombstones > limit; budget-- {
		r := t.dead[0]
		p := t.slots.at(r)
		if p.state&slotDead != 0 && p.rev > given && t.tombstones <= t.unreadLimit {
			break
		}
		t.dead = t.dead[1:]
		if p.state &^= slotQueued; p.state&slotDead != 0 {
			t.forget(r)
		}
	}
	if len(t.dead) == 0 {
		t.dead = nil
	}
	t.sweepNames(4*n + 64)
}

// forget ends a tombstone.
func (t *Table) forget(r slotRef) {
	p := t.slots.at(r)
	t.compacted = max(t.compacted, p.rev)
	t.unorder(&t.slots, r)
	k := keyOf(t.slots.prefix(p))
	t.index.remove(&k, r)
	t.slots.release(r)
	t.tombstones--
}

// sweepNames takes the sweep of the names, if one is due, further by some slots.
func (t *Table) sweepNames(budget int) {
	if !t.names.sweeping {
		if !t.names.wasteful() {
			return
		}
		t.names.giveUp()
		t.sweepAt = 0
	}
	for ; budget > 0; budget-- {
		switch n := int(t.sweepAt / slabChunk); {
		case n == len(t.slots.chunks):
			t.names.swept()
			return
		case t.slots.chunks[n].slots == nil:
			t.sweepAt += slabChunk
		default:
			s := t.slots.at(t.sweepAt)
			s.names = t.names.moved(s.names)
			t.sweepAt++
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
	r := t.after(since)
	for ; r != 0 && len(batch) < max(cap(buf), 1); r = t.slots.at(r).newer {
		s := t.slots.at(r)
		change := Change{Prefix: t.slots.prefix(s), Deleted: s.state&slotDead != 0}
		if !change.Deleted {
			change.Entry, change.Owner = t.looks(s), t.origins.values[s.origin].owner
		}
		batch = append(batch, change)
		since.at, since.last = s.rev, r
	}
	for given := t.given.Load(); since.at > given && !t.given.CompareAndSwap(given, since.at); given = t.given.Load() {
	}
	return batch, since, reset
}

// after returns the oldest head that changed after since. mu is held.
func (t *Table) after(since Revision) slotRef {
	if since.at == 0 {
		return t.oldest
	}
	if n := since.last / slabChunk; t.slots.chunks[n].slots != nil && t.slots.at(since.last).rev == since.at {
		return t.slots.at(since.last).newer
	}
	var r slotRef
	for p := t.newest; p != 0 && t.slots.at(p).rev > since.at; p = t.slots.at(p).older {
		r = p
	}
	return r
}

// Latest is the place of a reader that has been given everything.
func (t *Table) Latest() Revision {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return Revision{at: t.rev}
}

// Reaches reports whether a reader at r has been given all that one at other has.
func (r Revision) Reaches(other Revision) bool { return r.at >= other.at }

// Changed returns a channel that is closed at the next change. Take it before the [Table.Changes] that it guards.
func (t *Table) Changed() <-chan struct{} {
	t.mu.RLock()
	defer t.mu.RUnlock()
	t.waiting.Store(true)
	return t.changed
}
