// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"sync"

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

// apply carries out what has been gathered, and empties the batch.
func (b *batch) apply(t *ipcache.Table) {
	if b.ops == nil {
		return
	}
	t.Apply(*b.ops)
	clear(*b.ops) // strings in it alias memory that is about to change
	*b.ops = (*b.ops)[:0]
	opBuffers.Put(b.ops)
	b.ops = nil
}
