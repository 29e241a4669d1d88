// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"iter"
	"maps"
	"slices"
	"sync"
)

// Table holds the labels of every known identity of every cluster. Ids of different clusters never collide, since each
// cluster may only claim ids of its own range. It is safe for concurrent use.
type Table struct {
	mu sync.RWMutex
	// labels holds the canonical string rather than the parsed set: a tenth of the memory, and reads are rare.
	labels map[ID]string
}

// NewTable returns an empty table.
func NewTable() *Table { return &Table{labels: make(map[ID]string)} }

// Upsert binds id to labels.
func (t *Table) Upsert(id ID, labels Labels) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.labels[id] = labels.String()
}

// Delete forgets id.
func (t *Table) Delete(id ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.labels, id)
}

// Labels returns what id stands for; reserved identities stand for their own name.
func (t *Table) Labels(id ID) (Labels, bool) {
	t.mu.RLock()
	s, ok := t.labels[id]
	t.mu.RUnlock()
	if ok {
		return ParseLabels(s), true
	}
	return ReservedLabels(id)
}

// Len is the number of identities in the table, reserved ones not counted.
func (t *Table) Len() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.labels)
}

// All yields the identities of the table in ascending order, as they were when the iteration began.
func (t *Table) All() iter.Seq2[ID, Labels] {
	return func(yield func(ID, Labels) bool) {
		t.mu.RLock()
		snapshot := maps.Clone(t.labels)
		t.mu.RUnlock()
		for _, id := range slices.Sorted(maps.Keys(snapshot)) {
			if !yield(id, ParseLabels(snapshot[id])) {
				return
			}
		}
	}
}

// ReservedLabels returns the labels of a reserved identity.
func ReservedLabels(id ID) (Labels, bool) {
	name, ok := reservedNames[id]
	if !ok {
		return nil, false
	}
	labels := MakeLabels(Label{Source: SourceReserved, Key: name})
	if id == KubeAPIServer {
		labels = MakeLabels(labels[0], Label{Source: SourceReserved, Key: RemoteNode.String()})
	}
	return labels, true
}
