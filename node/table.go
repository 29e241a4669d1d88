// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"slices"
	"sync"
)

// Revision counts the changes of a [Table]; it only grows.
type Revision uint64

type name struct{ cluster, node string }

// Table holds the nodes of every cluster. It is safe for concurrent use. Nodes in it are shared: nobody changes the
// slices and maps of one.
type Table struct {
	mu      sync.RWMutex
	nodes   map[name]Node
	rev     Revision
	changed chan struct{}
}

// NewTable returns an empty table.
func NewTable() *Table {
	return &Table{nodes: make(map[name]Node), changed: make(chan struct{})}
}

// Upsert puts n in place of what was known of it.
func (t *Table) Upsert(n Node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.nodes[name{n.Cluster, n.Name}] = n
	t.touch()
}

// Delete forgets a node; an unknown one is fine.
func (t *Table) Delete(cluster, node string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.nodes[name{cluster, node}]; !ok {
		return
	}
	delete(t.nodes, name{cluster, node})
	t.touch()
}

// touch makes a change visible to readers. mu is held.
func (t *Table) touch() {
	t.rev++
	close(t.changed)
	t.changed = make(chan struct{})
}

// Get returns one node.
func (t *Table) Get(cluster, node string) (Node, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	n, ok := t.nodes[name{cluster, node}]
	return n, ok
}

// Snapshot returns all nodes, ordered by cluster and name, and the revision that they stand for. Nodes are few enough,
// and what follows from them is small enough, that readers take the whole rather than differences.
func (t *Table) Snapshot() ([]Node, Revision) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	nodes := make([]Node, 0, len(t.nodes))
	for _, n := range t.nodes {
		nodes = append(nodes, n)
	}
	slices.SortFunc(nodes, func(a, b Node) int {
		return cmp.Or(cmp.Compare(a.Cluster, b.Cluster), cmp.Compare(a.Name, b.Name))
	})
	return nodes, t.rev
}

// Changed returns a channel that is closed at the next change. Take it before the [Table.Snapshot] that it guards.
func (t *Table) Changed() <-chan struct{} {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.changed
}
