// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/weftmesh/weft/identity"
)

// Len is the number of prefixes that somebody claims.
func (t *Table) Len() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.live
}

// head returns the head of p if it has a claim. mu is held.
func (t *Table) head(p netip.Prefix) (slotRef, bool) {
	if !p.IsValid() {
		return 0, false
	}
	k := keyOf(p.Masked())
	r := t.index.find(&t.slots, &k)
	return r, r != 0 && t.slots.at(r).state&slotDead == 0
}

// Get returns the winner for exactly this prefix.
func (t *Table) Get(p netip.Prefix) (Claim, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if r, ok := t.head(p); ok {
		return t.claim(p.Masked(), r), true
	}
	return Claim{}, false
}

// Claims returns every claim for exactly this prefix, the winner first.
func (t *Table) Claims(p netip.Prefix) []Claim {
	t.mu.RLock()
	defer t.mu.RUnlock()
	r, ok := t.head(p)
	if !ok {
		return nil
	}
	return t.chain(r)
}

// chain returns the claims of a head's prefix, the winner first. mu is held.
func (t *Table) chain(head slotRef) []Claim {
	p := t.slots.prefix(t.slots.at(head))
	var all []Claim
	for r := head; r != 0; r = t.next(r) {
		all = append(all, t.claim(p, r))
	}
	slices.SortFunc(all, Claim.Compare)
	return all
}

// Lookup returns the winner for the longest prefix that contains addr: what the kernel's lookup finds once it equals the
// table. IPv4-mapped addresses count as IPv4; zones are ignored.
func (t *Table) Lookup(addr netip.Addr) (Claim, bool) {
	addr = addr.Unmap()
	if !addr.IsValid() {
		return Claim{}, false
	}
	k := keyOf(netip.PrefixFrom(addr, addr.BitLen()))
	t.mu.RLock()
	defer t.mu.RUnlock()
	lengths := &t.lengths[k.family()]
	for length, ok := lengths.longest(int(k.bits)); ok; length, ok = lengths.longest(length - 1) {
		k.shorten(length)
		if r := t.index.find(&t.slots, &k); r != 0 {
			if h := t.slots.at(r); h.state&slotDead == 0 {
				return t.claim(t.slots.prefix(h), r), true
			}
		}
	}
	return Claim{}, false
}

// All yields the winner of every prefix, in no particular order. The table is read in batches and not held in between:
// entries that change meanwhile are seen in one of their states.
func (t *Table) All() iter.Seq[Claim] {
	return func(yield func(Claim) bool) {
		var buf []Claim
		for n := 0; t.scan(n, func(r slotRef, h *slot) { buf = append(buf, t.claim(t.slots.prefix(h), r)) }); n++ {
			for i := range buf {
				if !yield(buf[i]) {
					return
				}
			}
			buf = buf[:0]
		}
	}
}

// ByIdentity yields the prefixes whose winner has this identity, in the order of [netip.Prefix.Compare]. It reads through the
// whole table: who looks for an identity is a person or a policy, and an index would cost every entry its bytes.
func (t *Table) ByIdentity(id identity.ID) iter.Seq[Claim] {
	return func(yield func(Claim) bool) {
		for _, p := range t.heads(netip.Prefix{}, func(h *slot) bool { return h.identity == uint32(id) }) {
			if c, ok := t.Get(p); ok && c.Entry.Identity == id && !yield(c) {
				return
			}
		}
	}
}

// Conflicted is the number of prefixes in conflict: see [Table.Conflicts].
func (t *Table) Conflicted() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.torn
}

// Conflicts yields all claims, the winner first, for each prefix of which another cluster or source than the winner's
// says something else than the winner. Prefixes come in the order of [netip.Prefix.Compare], those after the given one
// only: who reads page by page passes the last prefix of the page before, at first the zero Prefix.
func (t *Table) Conflicts(after netip.Prefix) iter.Seq[[]Claim] {
	return func(yield func([]Claim) bool) {
		if t.Conflicted() == 0 {
			return
		}
		for _, p := range t.heads(after, func(h *slot) bool { return h.state&slotTorn != 0 }) {
			if claims := t.conflict(p); claims != nil && !yield(claims) {
				return
			}
		}
	}
}

// conflict returns the claims for p, the winner first, if they are in conflict.
func (t *Table) conflict(p netip.Prefix) []Claim {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if r, ok := t.head(p); ok && t.slots.at(r).state&slotTorn != 0 {
		return t.chain(r)
	}
	return nil
}

// heads returns, sorted, the prefixes after the given one whose heads are what is wanted. The table is read chunk by chunk
// and not held in between.
func (t *Table) heads(after netip.Prefix, wanted func(*slot) bool) []netip.Prefix {
	var found []netip.Prefix
	for n := 0; t.scan(n, func(r slotRef, h *slot) {
		if wanted(h) {
			if p := t.slots.prefix(h); !after.IsValid() || p.Compare(after) > 0 {
				found = append(found, p)
			}
		}
	}); n++ {
	}
	slices.SortFunc(found, netip.Prefix.Compare)
	return found
}

// scan visits the living heads of one chunk of slots, and reports whether there was such a chunk.
func (t *Table) scan(chunk int, visit func(r slotRef, head *slot)) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if chunk >= len(t.slots.chunks) {
		return false
	}
	slots := t.slots.chunks[chunk].slots
	for i := 0; slots != nil && i < slabChunk; i++ {
		if h := &slots[i]; h.state&(slotHead|slotDead) == slotHead {
			visit(slotRef(chunk*slabChunk+i), h)
		}
	}
	return true
}
