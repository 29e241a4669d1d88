// SPDX-License-Identifier: Apache-2.0

package service

import "slices"

// Revision is a reader's place in the history of a [Table]. The zero Revision is the beginning.
type Revision struct {
	at    uint64 // the last change that the reader was given
	floor uint64 // deletions up to here are no news to the reader, since it began later
	base  uint64 // when the reader had been given everything; it has been given some of what came later
}

// changes orders frontends by their last change, the oldest first, and keeps some of those that are gone.
type changes struct {
	rev, told  uint64
	root       front // of the ring: newer is the oldest, older the newest
	tombstones int
	limit      int // of tombstones
	dead       []death
	// compacted is the newest deletion that is not remembered.
	compacted uint64
}

// death is a frontend that was gone at a revision. It may be back.
type death struct {
	of  *front
	rev uint64
}

func (d death) past() bool { return !d.of.dead || d.of.rev != d.rev }

// tombstoneLimit is how many frontends that are gone are remembered for readers that have not heard of it.
const tombstoneLimit = 4096

func newChanges() changes { return changes{limit: tombstoneLimit} }

// touch makes a frontend's change the newest.
func (c *changes) touch(f *front) {
	if c.root.newer == nil {
		c.root.newer, c.root.older = &c.root, &c.root
	}
	c.unorder(f)
	newest := c.root.older
	newest.newer, f.older = f, newest
	f.newer, c.root.older = &c.root, f
	c.rev++
	f.rev = c.rev
}

func (c *changes) unorder(f *front) {
	if f.newer != nil {
		f.older.newer, f.newer.older = f.newer, f.older
		f.older, f.newer = nil, nil
	}
}

// bury remembers a frontend that is gone for a while. mu is held.
func (t *Table) bury(f *front) {
	c := &t.changes
	c.tombstones++
	c.dead = append(c.dead, death{f, f.rev})
	if len(c.dead) > 2*c.limit {
		c.dead = slices.DeleteFunc(c.dead, death.past)
	}
	for c.tombstones > c.limit {
		d := c.dead[0]
		c.dead = c.dead[1:]
		if d.past() {
			continue
		}
		c.compacted = max(c.compacted, d.rev)
		c.unorder(d.of)
		delete(t.fronts, d.of.at)
		c.tombstones--
	}
}

// announce wakes who waits, if anything has changed. mu is held.
func (t *Table) announce() {
	if t.changes.told != t.changes.rev {
		t.changes.told = t.changes.rev
		close(t.changed)
		t.changed = make(chan struct{})
	}
}

// Changed returns a channel that is closed at the next change. Take it before the [Table.Changes] that it guards.
func (t *Table) Changed() <-chan struct{} {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.changed
}

// Changes returns at most max frontends whose selection has changed after since, oldest first and each once, and the place
// to ask from next. An empty answer means that the reader has seen everything.
//
// A reader at the beginning, and one that has fallen so far behind that deletions were forgotten, is told full: the answers
// begin with the oldest frontend, and after the next empty one the reader removes what it holds and was not given.
func (t *Table) Changes(since Revision, most int) (batch []Change, next Revision, full bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	c := &t.changes
	if since == (Revision{}) || max(since.at, since.floor) < c.compacted {
		since, full = Revision{floor: c.rev}, true
	}
	if c.root.newer == nil {
		return nil, since, full
	}
	f := &c.root
	for f.older != &c.root && f.older.rev > since.at {
		f = f.older
	}
	for ; f != &c.root && len(batch) < max(most, 1); f = f.newer {
		since.at = f.rev
		if f.dead && f.rev <= since.floor {
			continue
		}
		batch = append(batch, f.change(since.base))
	}
	if f == &c.root {
		since.at, since.base = c.rev, c.rev
	}
	return batch, since, full
}

// change is what is news to a reader that has seen everything up to base, and perhaps more.
func (f *front) change(base uint64) Change {
	if f.dead {
		return Change{Selection: Selection{Frontend: f.at}, Deleted: true}
	}
	c := Change{Selection: f.selection()}
	if c.Added, c.Removed, c.Whole = f.log.since(base); c.Whole {
		c.Backends = slices.Clone(f.backends)
	}
	return c
}

// selection is without the backends.
func (f *front) selection() Selection {
	return Selection{Frontend: f.at, Service: f.service, ClientAffinity: f.clientAffinity, Algorithm: f.algorithm}
}

// Select returns what a frontend leads to.
func (t *Table) Select(at Frontend) (s Selection, ok bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	f := t.fronts[at]
	if f == nil || f.dead {
		return Selection{}, false
	}
	s = f.selection()
	s.Backends = slices.Clone(f.backends)
	return s, true
}

// Selections returns what all frontends lead to, in their order.
func (t *Table) Selections() []Selection {
	t.mu.RLock()
	all := make([]Selection, 0, len(t.fronts)-t.changes.tombstones)
	for _, f := range t.fronts {
		if !f.dead {
			s := f.selection()
			s.Backends = slices.Clone(f.backends)
			all = append(all, s)
		}
	}
	t.mu.RUnlock()
	slices.SortFunc(all, func(a, b Selection) int { return a.Frontend.Compare(b.Frontend) })
	return all
}
