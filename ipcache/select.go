// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"net/netip"
	"strings"

	"github.com/weftmesh/weft/identity"
)

// tally counts claims by who makes them, so that a bound on them costs nobody a look through the table. Most claims that
// come together are of one owner, so the last one's count is at hand.
type tally struct {
	clusters []int
	owners   map[Owner]*int
	last     Owner
	count    *int // of last
}

func (n *tally) add(o *Owner, by int) {
	for int(o.Cluster) >= len(n.clusters) {
		n.clusters = append(n.clusters, 0)
	}
	n.clusters[o.Cluster] += by
	if n.count == nil || n.last != *o {
		n.turn(o)
	}
	if *n.count += by; *n.count == 0 {
		delete(n.owners, *o)
		n.count = nil
	}
}

// turn puts the count of another owner at hand.
func (n *tally) turn(o *Owner) {
	if n.owners == nil {
		n.owners = make(map[Owner]*int)
	}
	if n.count = n.owners[*o]; n.count == nil {
		own := *o
		own.Object = strings.Clone(o.Object)
		n.count = new(int)
		n.owners[own] = n.count
	}
	n.last = *o
	n.last.Object = strings.Clone(o.Object)
}

// ClaimsOf is the number of claims, winners or not, that a cluster has in the table.
func (t *Table) ClaimsOf(c identity.ClusterID) int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if int(c) >= len(t.tally.clusters) {
		return 0
	}
	return t.tally.clusters[c]
}

// ClaimsBy is the number of claims that one owner has in the table.
func (t *Table) ClaimsBy(o Owner) int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if n := t.tally.owners[o]; n != nil {
		return *n
	}
	return 0
}

// Holds reports whether owner claims exactly this prefix.
func (t *Table) Holds(prefix netip.Prefix, cidr bool, owner Owner) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	head, ok := t.head(prefix)
	return ok && t.claimOf(head, &Claim{Prefix: prefix, CIDR: cidr, Owner: owner}) != 0
}

// Select returns every claim, winner or not, for which want is true. It looks at the whole table, in steps that do not
// hold writers up; claims that change meanwhile are seen in one of their states. What want is given lacks the names of the
// workload, and is valid during the call; want must not call the table.
func (t *Table) Select(want func(*Claim) bool) []Claim {
	var selected []Claim
	for chunk := 0; t.scan(chunk, func(head slotRef, h *slot) {
		p := t.slots.prefix(h)
		for r := head; r != 0; r = t.next(r) {
			c := t.content(r)
			if c.Prefix = p; want(&c) {
				selected = append(selected, t.claim(p, r))
			}
		}
	}); chunk++ {
	}
	return selected
}
