// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"slices"
	"sync"
)

type name struct{ cluster, namespace, service string }

// Table holds the services that clusters publish, each cluster's contribution apart. It is safe for concurrent use.
// Services in it are shared: nobody changes the maps of one.
type Table struct {
	mu       sync.RWMutex
	services map[name]Service
}

// NewTable returns an empty table.
func NewTable() *Table { return &Table{services: make(map[name]Service)} }

// Upsert puts s in place of what its cluster published before.
func (t *Table) Upsert(s Service) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.services[name{s.Cluster, s.Namespace, s.Name}] = s
}

// Delete forgets a cluster's contribution; an unknown one is fine.
func (t *Table) Delete(cluster, namespace, service string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.services, name{cluster, namespace, service})
}

// Len is the number of contributions.
func (t *Table) Len() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.services)
}

// Snapshot returns all contributions, ordered by namespace, name and cluster.
func (t *Table) Snapshot() []Service {
	t.mu.RLock()
	defer t.mu.RUnlock()
	all := make([]Service, 0, len(t.services))
	for _, s := range t.services {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b Service) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Cluster, b.Cluster))
	})
	return all
}
