// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/weftmesh/weft/identity"
)

// Op is one step of a batch: a claim made or renewed, or, with Delete, taken back. Of a deleted claim only Prefix, CIDR
// and Owner matter. The strings of an Op may alias a buffer that is reused after [Table.Apply] returned.
type Op struct {
	Delete bool
	Claim  Claim
}

// Table is the table of claims. It is safe for concurrent use; writers hand in batches, since every batch takes the lock once.
// An entry costs about 90 bytes with the names of its workload, and none of it is scanned by the garbage collector.
type Table struct {
	mu      sync.RWMutex
	slots   slab
	index   index
	others  map[slotRef]slotRef // by head, where there is more than one claim: the next one
	origins interned[origin]
	names   names
	sweepAt slotRef    // where the sweep of the names is
	live    int        // prefixes with a claim
	torn    int        // of these, in conflict
	lengths [2]lengths // of prefixes with a claim, by family
	tally   tally      // claims, by who makes them

	changes
	arrivals arrivals
	changed  chan struct{}
	waiting  atomic.Bool // somebody holds changed
}

// origin is what all claims for the workloads of one node have in common, most often.
type origin struct {
	owner Owner
	host  netip.Addr
	key   uint8
	flags Flags
}

func (o origin) own() origin {
	o.owner.Object = strings.Clone(o.owner.Object)
	return o
}

// New returns an empty table.
func New() *Table {
	return &Table{
		slots: newSlab(), index: newIndex(), others: make(map[slotRef]slotRef), origins: newInterned(origin.own), names: newNames(),
		changes: changes{floor: tombstoneFloor, unreadLimit: unreadLimit}, changed: make(chan struct{}),
	}
}

// Apply carries out ops in order. Prefixes are masked: 10.0.0.1/8 is 10.0.0.0/8. What is no prefix, or one of IPv4-mapped
// addresses, which no packet carries, is passed over and counted in the result.
func (t *Table) Apply(ops []Op) (refused int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.apply(ops)
}

// apply carries out ops. mu is held.
func (t *Table) apply(ops []Op) (refused int) {
	before := t.rev
	for i := range ops {
		c := &ops[i].Claim
		p := c.Prefix.Masked()
		switch {
		case !p.IsValid() || p.Addr().Is4In6():
			refused++
		case ops[i].Delete:
			t.delete(keyOf(p), c)
		default:
			t.upsert(keyOf(p), c)
		}
	}
	t.compact(len(ops))
	if t.rev != before && t.waiting.Swap(false) {
		close(t.changed)
		t.changed = make(chan struct{})
	}
	return refused
}

// upsert makes or renews one claim. mu is held.
func (t *Table) upsert(k prefixKey, c *Claim) {
	head := t.index.find(&t.slots, &k)
	if head == 0 {
		head = t.slots.alloc()
		h := t.slots.at(head)
		t.slots.setKey(h, k)
		t.index.insert(&k, head)
		t.append(&t.slots, head)
		t.fill(h, c)
		t.count(h, 1)
		return
	}
	h := t.slots.at(head)
	if h.state&slotDead != 0 {
		h.state &^= slotDead
		t.tombstones--
		t.fill(h, c)
		t.count(h, 1)
		t.touch(head)
		return
	}
	was := t.looks(h)
	if mine := t.claimOf(head, c); mine != 0 {
		// Acquire before release: a value that stays is not given up in between.
		m := t.slots.at(mine)
		old := *m
		t.fill(m, c)
		t.drain(&old)
	} else {
		mine = t.slots.alloc()
		t.fill(t.slots.at(mine), c)
		t.link(head, mine)
	}
	t.elect(head)
	if t.looks(h) != was {
		t.touch(head)
	}
}

// delete takes back one claim; an unknown one is fine. mu is held.
func (t *Table) delete(k prefixKey, c *Claim) {
	head := t.index.find(&t.slots, &k)
	if head == 0 || t.slots.at(head).state&slotDead != 0 {
		return
	}
	mine := t.claimOf(head, c)
	if mine == 0 {
		return
	}
	h := t.slots.at(head)
	was := t.looks(h)
	if mine == head {
		if h.state&slotShared == 0 {
			t.count(h, -1)
			t.drain(h)
			h.state |= slotDead
			t.bury(head)
			t.touch(head)
			return
		}
		// The head stays: the next claim moves into it, and its own slot goes.
		mine = t.next(head)
		t.swapClaims(head, mine)
	}
	t.unlink(head, mine)
	t.drain(t.slots.at(mine))
	t.slots.release(mine)
	t.elect(head)
	if t.looks(h) != was {
		t.touch(head)
	}
}

// next returns the claim after r in the chain of a prefix, or 0.
func (t *Table) next(r slotRef) slotRef {
	s := t.slots.at(r)
	switch {
	case s.state&slotHead == 0:
		return s.older
	case s.state&slotShared != 0:
		return t.others[r]
	}
	return 0
}

// link puts a claim into a chain, behind the head.
func (t *Table) link(head, r slotRef) {
	t.slots.at(r).older = t.next(head)
	t.others[head] = r
	t.slots.at(head).state |= slotShared
}

func (t *Table) unlink(head, r slotRef) {
	after := t.next(r)
	if p := t.next(head); p != r {
		for t.next(p) != r {
			p = t.next(p)
		}
		t.slots.at(p).older = after
		return
	}
	if t.others[head] = after; after == 0 {
		delete(t.others, head)
		t.slots.at(head).state &^= slotShared
	}
}

// claimOf finds, among the claims of head's prefix, the one that c renews or takes back.
func (t *Table) claimOf(head slotRef, c *Claim) slotRef {
	for r := head; r != 0; r = t.next(r) {
		s := t.slots.at(r)
		if (s.state&slotCIDR != 0) == c.CIDR && t.origins.values[s.origin].owner == c.Owner {
			return r
		}
	}
	return 0
}

// fill puts c's content into a slot that holds none.
func (t *Table) fill(s *slot, c *Claim) {
	s.modRev, s.identity = c.Revision, uint32(c.Entry.Identity)
	s.origin = t.origins.acquire(origin{owner: c.Owner, host: c.Entry.Host, key: c.Entry.EncryptKey, flags: c.Entry.Flags})
	s.names = t.names.add(&c.Entry)
	t.tally.add(&c.Owner, 1)
	s.state &^= slotCIDR
	if c.CIDR {
		s.state |= slotCIDR
	}
}

// drain gives up what a slot's content refers to.
func (t *Table) drain(s *slot) {
	t.tally.add(&t.origins.values[s.origin].owner, -1)
	t.origins.release(s.origin)
	t.names.release(s.names)
	s.origin, s.names = 0, 0
}

// elect puts the strongest claim into the head, and notes whether the others contradict it.
func (t *Table) elect(head slotRef) {
	h := t.slots.at(head)
	best, winner, contradicted := head, Claim{}, false
	if h.state&slotShared != 0 {
		for r := head; r != 0; r = t.next(r) {
			if c := t.content(r); r == head || c.Compare(winner) < 0 {
				best, winner = r, c
			}
		}
		if best != head {
			t.swapClaims(head, best)
		}
		for r := t.next(head); r != 0 && !contradicted; r = t.next(r) {
			contradicted = t.contradicts(t.slots.at(r), h)
		}
	}
	if contradicted != (h.state&slotTorn != 0) {
		h.state ^= slotTorn
		if contradicted {
			t.torn++
		} else {
			t.torn--
		}
	}
}

// contradicts reports whether another cluster or source than the winner's says something else of its prefix. Two objects
// of one cluster and source are no contradiction: so an address looks while it moves from one node to the next.
func (t *Table) contradicts(s, winner *slot) bool {
	a, b := &t.origins.values[s.origin].owner, &t.origins.values[winner.origin].owner
	return (a.Cluster != b.Cluster || a.Source != b.Source) && t.looks(s) != t.looks(winner)
}

// swapClaims exchanges the claims of two slots of one prefix, and nothing of their places in chain and order.
func (t *Table) swapClaims(a, b slotRef) {
	x, y := t.slots.at(a), t.slots.at(b)
	x.modRev, y.modRev = y.modRev, x.modRev
	x.identity, y.identity = y.identity, x.identity
	x.origin, y.origin = y.origin, x.origin
	// The sweep may have passed one of the two, and leave behind what the other brings there.
	x.names, y.names = t.names.moved(y.names), t.names.moved(x.names)
	if (x.state^y.state)&slotCIDR != 0 {
		x.state ^= slotCIDR
		y.state ^= slotCIDR
	}
}

// looks is what readers can tell of a claim: what the kernel holds of it.
func (t *Table) looks(s *slot) Entry {
	o := &t.origins.values[s.origin]
	return Entry{Identity: identity.ID(s.identity), Host: o.host, EncryptKey: o.key, Flags: o.flags}
}

func (t *Table) count(h *slot, by int) {
	family := 0
	if h.state&slotV6 != 0 {
		family = 1
	}
	t.lengths[family].add(int(h.bits), by)
	t.live += by
}

// content reads a slot but for its prefix, and without the names of its workload, and so without allocating.
func (t *Table) content(r slotRef) Claim {
	s := t.slots.at(r)
	return Claim{
		CIDR: s.state&slotCIDR != 0, Owner: t.origins.values[s.origin].owner, Revision: s.modRev, Entry: t.looks(s),
	}
}

// claim reads the claim for p in a slot. mu is held.
func (t *Table) claim(p netip.Prefix, r slotRef) Claim {
	c := t.content(r)
	c.Prefix = p
	t.names.get(t.slots.at(r).names, &c.Entry)
	return c
}
