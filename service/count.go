// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"slices"
)

// Counts is what a table holds, in numbers.
type Counts struct {
	Local, Global int // services of our own cluster, and those of them that are global
	Frontends     int
	Empty         int // frontends that lead nowhere
	Contested     int // frontends that several services claim
	Clusters      []ClusterCount
	// Services are the global ones, by name; Left is how many there are beyond those asked for.
	Services []ServiceCount
	Left     int
}

// ClusterCount is what another cluster offers.
type ClusterCount struct {
	Cluster         string
	Services        int // by name
	Ready, Draining int // backend addresses
	Lost            bool
}

// ServiceCount is how many backends a global service has.
type ServiceCount struct {
	Name
	Used    int // by the frontend that has the fewest
	Offered int // by other clusters, addresses
}

// Count adds up what the table holds, with at most so many services one by one. It looks at everything.
func (t *Table) Count(most int) Counts {
	t.mu.RLock()
	c := Counts{Local: t.locals, Frontends: len(t.fronts) - t.changes.tombstones}
	for _, f := range t.fronts {
		if !f.dead && len(f.backends) == 0 {
			c.Empty++
		}
		if len(f.claims) > 1 {
			c.Contested++
		}
	}
	clusters := make(map[string]*ClusterCount, len(t.clusters))
	for name, of := range t.clusters {
		clusters[name] = &ClusterCount{Cluster: name, Services: len(of.names), Lost: of.lost}
	}
	for name, e := range t.entries {
		offered := 0
		for _, o := range e.sum() {
			of := clusters[o.Cluster]
			of.Ready += o.Ready
			of.Draining += o.Draining
			offered += o.Ready + o.Draining
		}
		if l := e.local(); l != nil && l.Global {
			c.Services = append(c.Services, ServiceCount{Name: name, Offered: offered, Used: e.fewest()})
		}
	}
	t.mu.RUnlock()
	for _, of := range clusters {
		c.Clusters = append(c.Clusters, *of)
	}
	slices.SortFunc(c.Clusters, func(a, b ClusterCount) int { return cmp.Compare(a.Cluster, b.Cluster) })
	slices.SortFunc(c.Services, func(a, b ServiceCount) int { return a.Name.Compare(b.Name) })
	c.Global = len(c.Services)
	if c.Left = max(0, c.Global-most); c.Left > 0 {
		c.Services = c.Services[:most]
	}
	return c
}

// fewest is the least number of backends that a frontend of a service has.
func (e *entry) fewest() int {
	least := -1
	for _, f := range e.fronts {
		if f.claims[0].entry == e && (least < 0 || len(f.backends) < least) {
			least = len(f.backends)
		}
	}
	return max(least, 0)
}
