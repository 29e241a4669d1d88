// SPDX-License-Identifier: Apache-2.0

package ipcache

import "net/netip"

// Audit holds a [Table] against a copy of it that somebody reads through, some entries at a time, while the table goes on
// changing: [Audit.Check] says what belongs to the entries that were found, [Audit.Missing] which ones were not. It takes a bit
// for each entry. It is for one goroutine.
type Audit struct {
	table   *Table
	upTo    uint64   // what changed later need not be in the copy
	checked []uint64 // by slot of the head
	chunk   int      // where Missing goes on
}

// Audit begins an audit of a copy that holds all that [Table.Changes] had told up to a revision.
func (t *Table) Audit(upTo Revision) *Audit { return &Audit{table: t, upTo: upTo.at} }

// Found is what a table has for a prefix.
type Found struct {
	Entry Entry // without the names of the workload
	OK    bool
}

// Check returns, in found, what the table has for prefixes, which are masked, and notes that the copy has them.
func (a *Audit) Check(prefixes []netip.Prefix, found []Found) {
	t := a.table
	t.mu.RLock()
	defer t.mu.RUnlock()
	a.makeRoom()
	const some = 64 // whose places in the index are read ahead: reads that depend on nothing wait for memory together
	for len(prefixes) > 0 {
		n := min(len(prefixes), some)
		for _, p := range prefixes[:n] {
			if p.IsValid() {
				k := keyOf(p)
				t.index.touch(&k)
			}
		}
		for i, p := range prefixes[:n] {
			found[i] = Found{}
			if r, ok := t.head(p); ok {
				a.mark(r)
				found[i] = Found{Entry: t.looks(t.slots.at(r)), OK: true}
			}
		}
		prefixes, found = prefixes[n:], found[n:]
	}
}

// Missing looks at the next so many slots of the table, at about, and yields the prefixes among them that have not been checked,
// though the copy should have them, each once. Of a copy that is read in the order of [CompareWalk], the prefix that was read last,
// as upTo, spares those that are still to come; the zero Prefix spares none. Once all slots were looked at it returns true, and
// the next call begins again with the first. yield must not use the table.
func (a *Audit) Missing(slots int, upTo netip.Prefix, yield func(netip.Prefix, Entry)) (all bool) {
	a.table.mu.RLock()
	a.makeRoom()
	a.table.mu.RUnlock()
	for range max(1, slots/slabChunk) {
		more := a.table.scan(a.chunk, func(r slotRef, h *slot) {
			if h.rev > a.upTo || a.marked(r) { // slots that came since makeRoom are newer than upTo
				return
			}
			if p := a.table.slots.prefix(h); !upTo.IsValid() || CompareWalk(p, upTo) <= 0 {
				a.mark(r)
				yield(p, a.table.looks(h))
			}
		})
		if !more {
			a.chunk = 0
			return true
		}
		a.chunk++
	}
	return false
}

// makeRoom has a bit for each slot. mu is held.
func (a *Audit) makeRoom() {
	if missing := len(a.table.slots.chunks)*slabChunk/64 - len(a.checked); missing > 0 {
		a.checked = append(a.checked, make([]uint64, missing)...)
	}
}

func (a *Audit) mark(r slotRef) { a.checked[r/64] |= 1 << (r % 64) }

func (a *Audit) marked(r slotRef) bool { return a.checked[r/64]&(1<<(r%64)) != 0 }

// CompareWalk orders masked prefixes as the kernel walks through an LPM trie: IPv4 before IPv6, low addresses before high ones,
// and what is inside a prefix before that prefix.
func CompareWalk(a, b netip.Prefix) int {
	if a.Overlaps(b) {
		return b.Bits() - a.Bits()
	}
	return a.Addr().Compare(b.Addr())
}
