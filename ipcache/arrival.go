// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"sync"

	"github.com/weftmesh/weft/identity"
)

// Arrival says whose news a batch carries, and since when they are known here, so that whoever brings the table's content
// elsewhere can tell how long that took.
type Arrival struct {
	Cluster identity.ClusterID
	// At is in nanoseconds since 1970, as the table has no clock; 0: nobody wants to know.
	At int64
}

// maxArrivals bounds how many arrivals wait for the table's reader. A reader that is further behind misses the newest.
const maxArrivals = 4096

// arrivals are those of the batches that changed the table and were not taken yet. It has a lock of its own because it is
// read by who otherwise only reads the table.
type arrivals struct {
	mu   sync.Mutex
	ring []arrived // made when first needed
	next int       // the oldest
	held int
}

// arrived is an arrival and the last change that it brought.
type arrived struct {
	Arrival
	rev uint64
}

func (a *arrivals) add(n arrived) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ring == nil {
		a.ring = make([]arrived, maxArrivals)
	}
	if a.held == len(a.ring) {
		return
	}
	a.ring[(a.next+a.held)%len(a.ring)] = n
	a.held++
}

// ApplyArrived is [Table.Apply] for news whose way is to be timed.
func (t *Table) ApplyArrived(ops []Op, from Arrival) (refused int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.rev
	refused = t.apply(ops)
	if from.At != 0 && t.rev != before {
		t.arrivals.add(arrived{from, t.rev})
	}
	return refused
}

// Arrived appends to buf, and forgets, the arrivals whose changes a reader has been given by the time it stands at upTo.
// There is one such reader. A change that was overtaken by a later one of the same prefix counts as given.
func (t *Table) Arrived(upTo Revision, buf []Arrival) []Arrival {
	a := &t.arrivals
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.held > 0 && a.ring[a.next].rev <= upTo.at {
		buf = append(buf, a.ring[a.next].Arrival)
		a.next, a.held = (a.next+1)%len(a.ring), a.held-1
	}
	return buf
}
