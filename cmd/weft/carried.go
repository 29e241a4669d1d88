// SPDX-License-Identifier: Apache-2.0

package main

import (
	"sync"

	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/mesh"
)

// carried knows which of the clusters that have been listed are in the kernel, too, with all that the list had. It is safe for
// concurrent use.
type carried struct {
	kernel interface {
		Now() datapath.Moment
		Carried(datapath.Moment) bool
	}

	mu    sync.Mutex
	since map[string]*datapath.Moment // by cluster, at or after its list; nil: it is there
}

// look updates what is known by the present state of all clusters, and returns those that are ready but on their way.
func (c *carried) look(clusters []mesh.RemoteStatus) (underway map[string]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	since := map[string]*datapath.Moment{}
	underway = map[string]bool{}
	for _, r := range clusters {
		if r.State != mesh.Ready {
			continue
		}
		moment, known := c.since[r.Name]
		if !known {
			now := c.kernel.Now()
			moment = &now
		}
		if moment != nil && c.kernel.Carried(*moment) {
			moment = nil
		}
		since[r.Name], underway[r.Name] = moment, moment != nil
	}
	c.since = since
	return underway
}
