// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"sync"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// batch gathers what one batch of events does to the ipcache, so that it takes the table's lock once. The zero batch is
// empty. Its buffer is borrowed while there is something in it: listings fill large ones, and there are many remotes.
type batch struct{ ops *[]ipcache.Op }

var opBuffers = sync.Pool{New: func() any { return new([]ipcache.Op) }}

func (b *batch) add(op ipcache.Op) {
	if b.ops == nil {
		b.ops = opBuffers.Get().(*[]ipcache.Op)
	}
	*b.ops = append(*b.ops, op)
}

func (b *batch) len() int {
	if b.ops == nil {
		return 0
	}
	return len(*b.ops)
}

// apply carries out what has been gathered and came from where from says, and empties the batch.
func (b *batch) apply(t *ipcache.Table, from ipcache.Arrival) {
	if b.ops == nil {
		return
	}
	t.ApplyArrived(*b.ops, from)
	clear(*b.ops) // strings in it alias memory that is about to change
	*b.ops = (*b.ops)[:0]
	opBuffers.Put(b.ops)
	b.ops = nil
}

// arrival is how the table is told of a time.
func arrival(cluster identity.ClusterID, at time.Time) ipcache.Arrival {
	if at.IsZero() {
		return ipcache.Arrival{}
	}
	return ipcache.Arrival{Cluster: cluster, At: at.UnixNano()}
}
