// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"net/netip"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// Workload is something that runs on this node under addresses of its own, as its source knows it. Sources hand over
// values that nobody changes afterwards, their maps and slices included.
type Workload struct {
	Source string // kubernetes, file or api
	Origin string // where in the source: file:line, the UID of a pod

	Namespace, Name, ServiceAccount string
	IPs                             []netip.Addr
	Labels                          map[string]string // as Kubernetes writes them, without a source
	NamespaceLabels                 map[string]string
	Ports                           []ipcache.NamedPort
	ID                              uint32      // its number within the node; 0: any
	Identity                        identity.ID // 0: to be allocated for its labels
}

// Source knows workloads of this node. All but Run may be called at any time, from any goroutine.
type Source interface {
	// Run follows the source until ctx ends.
	Run(ctx context.Context) error
	// Ready is closed once all workloads have been heard of.
	Ready() <-chan struct{}
	String() string
	// Workloads returns all there are now, in an order that does not change by itself.
	Workloads() []Workload
	// Changed returns a channel that closes at the next change of what Workloads or Problems return.
	Changed() <-chan struct{}
	// Problems returns what keeps the source, or a part of it, from being known.
	Problems() []SourceError
}
