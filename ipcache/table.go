// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"net/netip"
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
// An entry costs about 120 bytes with the names of its workload, and none of it is scanned by the garbage collector.
type Table struct {
	mu     sync.RWMutex
	slots  slab
	index  index
	hosts  interned[netip.Addr]
	owners interned[Owner]
	meta   metadata
	live   int         // prefixes with a claim
	torn   int         // of these, in conflict
	byLen  [2][129]int // of these, by family and length: what Lookup has to try

	changes
	changed chan struct{}
	waiting atomic.Bool // somebody holds changed
}

// New returns an empty table.
func New() *Table {
	return &Table{
		index: newIndex(), hosts: newInterned[netip.Addr](), owners: newInterned[Owner](),
		changed: make(chan struct{}),
	}
}

// Apply carries out ops in order. Prefixes must be valid and masked.
func (t *Table) Apply(ops []Op) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.rev
	for i := range ops {
		if ops[i].Delete {
			t.delete(&ops[i].Claim)
		} else {
			t.upsert(&ops[i].Claim)
		}
	}
	t.compact()
	if t.rev != before && t.waiting.Swap(false) {
		close(t.changed)
		t.changed = make(chan struct{})
	}
}

// upsert makes or renews one claim. mu is held.
func (t *Table) upsert(c *Claim) {
	k := keyOf(c.Prefix)
	head := t.index.find(&t.slots, k)
	if head == 0 {
		head = t.newHead(k)
		t.fill(t.slots.at(head), c)
		t.count(t.slots.at(head), 1)
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
	was := *h
	mine := t.claimOf(head, c)
	if mine == 0 {
		mine = t.slots.alloc()
		m := t.slots.at(mine)
		m.addr, m.bits, m.state = h.addr, h.bits, h.state&slotV6
		m.next, h.next = h.next, mine
		t.fill(m, c)
	} else {
		// Acquire before release: numbers that differ then stand for values that differ.
		m := t.slots.at(mine)
		old := *m
		t.fill(m, c)
		t.drain(&old)
	}
	t.elect(head)
	if !h.looksLike(&was) {
		t.touch(head)
	}
}

// delete takes back one claim; an unknown one is fine. mu is held.
func (t *Table) delete(c *Claim) {
	head := t.index.find(&t.slots, keyOf(c.Prefix))
	if head == 0 || t.slots.at(head).state&slotDead != 0 {
		return
	}
	mine := t.claimOf(head, c)
	if mine == 0 {
		return
	}
	h := t.slots.at(head)
	was := *h
	if mine == head {
		if h.next == 0 {
			t.count(h, -1)
			t.drain(h)
			h.state |= slotDead
			t.bury(head)
			t.touch(head)
			return
		}
		// The head stays: the next claim moves into it, and its own slot goes.
		mine = h.next
		t.swapClaims(head, mine)
	}
	t.unlink(head, mine)
	t.drain(t.slots.at(mine))
	t.slots.release(mine)
	t.elect(head)
	if !h.looksLike(&was) {
		t.touch(head)
	}
}

func (t *Table) newHead(k prefixKey) slotRef {
	head := t.slots.alloc()
	h := t.slots.at(head)
	h.addr, h.bits, h.state = k.addr, k.bits, slotHead
	if k.v6 {
		h.state |= slotV6
	}
	t.index.insert(k, head)
	t.append(&t.slots, head)
	return head
}

// claimOf finds, among the claims of head's prefix, the one that c renews or takes back.
func (t *Table) claimOf(head slotRef, c *Claim) slotRef {
	for r := head; r != 0; r = t.slots.at(r).next {
		s := t.slots.at(r)
		if (s.state&slotCIDR != 0) == c.CIDR && t.owners.values[s.owner] == c.Owner {
			return r
		}
	}
	return 0
}

// fill puts c's content into a slot that holds none.
func (t *Table) fill(s *slot, c *Claim) {
	s.modRev, s.identity, s.key, s.flags = c.Revision, uint32(c.Entry.Identity), c.Entry.EncryptKey, c.Entry.Flags
	s.host, s.owner = t.hosts.acquire(c.Entry.Host), t.owners.acquire(c.Owner)
	s.meta = t.meta.add(c.Entry.Namespace, c.Entry.Pod)
	s.state &^= slotCIDR
	if c.CIDR {
		s.state |= slotCIDR
	}
}

// drain gives up what a slot's content refers to.
func (t *Table) drain(s *slot) {
	t.hosts.release(s.host)
	t.owners.release(s.owner)
	t.meta.release(s.meta)
	s.host, s.owner, s.meta = 0, 0, 0
}

// elect puts the strongest claim into the head, and notes whether the others contradict it.
func (t *Table) elect(head slotRef) {
	best, winner := head, Claim{}
	h := t.slots.at(head)
	if h.next == 0 {
		t.mark(h, false)
		return
	}
	for r := head; r != 0; r = t.slots.at(r).next {
		if c := t.bareClaim(r); r == head || c.Compare(winner) < 0 {
			best, winner = r, c
		}
	}
	if best != head {
		t.swapClaims(head, best)
	}
	contradicted := false
	for r := h.next; r != 0 && !contradicted; r = t.slots.at(r).next {
		contradicted = t.contradicts(t.slots.at(r), h)
	}
	t.mark(h, contradicted)
}

// contradicts reports whether another cluster or source than the winner's says something else of its prefix. Two objects
// of one cluster and source are no contradiction: so an address looks while it moves from one node to the next.
func (t *Table) contradicts(s, winner *slot) bool {
	a, b := t.owners.values[s.owner], t.owners.values[winner.owner]
	return (a.Cluster != b.Cluster || a.Source != b.Source) && !s.looksLike(winner)
}

// mark notes whether a prefix is in conflict.
func (t *Table) mark(head *slot, conflict bool) {
	if was := head.state&slotTorn != 0; was == conflict {
		return
	}
	head.state ^= slotTorn
	if conflict {
		t.torn++
	} else {
		t.torn--
	}
}

// swapClaims exchanges the claims of two slots of one prefix, and nothing of their places in chain and order.
func (t *Table) swapClaims(a, b slotRef) {
	x, y := t.slots.at(a), t.slots.at(b)
	x.modRev, y.modRev = y.modRev, x.modRev
	x.identity, y.identity = y.identity, x.identity
	x.host, y.host = y.host, x.host
	x.owner, y.owner = y.owner, x.owner
	x.meta, y.meta = y.meta, x.meta
	x.key, y.key = y.key, x.key
	x.flags, y.flags = y.flags, x.flags
	if (x.state^y.state)&slotCIDR != 0 {
		x.state ^= slotCIDR
		y.state ^= slotCIDR
	}
}

func (t *Table) unlink(head, r slotRef) {
	p := head
	for t.slots.at(p).next != r {
		p = t.slots.at(p).next
	}
	t.slots.at(p).next = t.slots.at(r).next
}

// looksLike reports whether readers can tell the slot's claim from another's: by what the kernel holds of it.
func (s *slot) looksLike(o *slot) bool {
	return s.identity == o.identity && s.host == o.host && s.key == o.key && s.flags == o.flags
}

func (t *Table) count(h *slot, by int) {
	family := 0
	if h.state&slotV6 != 0 {
		family = 1
	}
	t.byLen[family][h.bits] += by
	t.live += by
}

// claim reads a slot. mu is held.
func (t *Table) claim(r slotRef) Claim {
	c := t.bareClaim(r)
	c.Entry.Namespace, c.Entry.Pod = t.meta.get(t.slots.at(r).meta)
	return c
}

// bareClaim reads a slot without the names of its workload, and so without allocating.
func (t *Table) bareClaim(r slotRef) Claim {
	s := t.slots.at(r)
	return Claim{
		Prefix: s.prefix(), CIDR: s.state&slotCIDR != 0, Owner: t.owners.values[s.owner], Revision: s.modRev,
		Entry: Entry{
			Identity: identity.ID(s.identity), Host: t.hosts.values[s.host], EncryptKey: s.key, Flags: s.flags,
		},
	}
}
