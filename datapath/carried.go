// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
)

// Moment is a point in the history of the tables of addresses and nodes.
type Moment struct {
	ips   ipcache.Revision
	nodes node.Revision
}

// Now returns the present one. It is safe for concurrent use.
func (d *Datapath) Now() Moment {
	_, nodes := d.cfg.Nodes.Snapshot()
	return Moment{d.cfg.IPs.Latest(), nodes}
}

// Carried reports whether all that the tables held at a moment has been brought to the kernel: it is there, in the map and in the
// routes, or the status says why it is not. It is safe for concurrent use.
func (d *Datapath) Carried(m Moment) bool {
	d.mu.Lock()
	reconciler, nodes := d.reconciler, d.carriedNodes
	d.mu.Unlock()
	return reconciler != nil && reconciler.carriedTo().Reaches(m.ips) && nodes >= m.nodes
}
