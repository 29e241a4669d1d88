// SPDX-License-Identifier: Apache-2.0

// Package source owns the services of the own cluster as Kubernetes or files have them: it makes whole services of the
// objects that come one by one, and hands on which of them have changed. What is published or served of them is decided
// elsewhere.
package source

import (
	"context"
	"net/netip"
	"time"

	"github.com/weftmesh/weft/service"
)

// Service is a service of the own cluster with all of its backends. It is never changed once it was handed out.
type Service struct {
	service.Name
	Annotations, Labels, Selector map[string]string
	// Addresses are those of the cluster alone, as a ClusterIP; none of a headless service.
	Addresses []netip.Addr
	Ports     []Port
	// Affinity is for how long a client stays with a backend; 0: it does not.
	Affinity time.Duration
	// Global is what the namespace, or the default for namespaces, says: without it no annotation makes a service global.
	Global bool
	// Backends are sorted by address, one of each.
	Backends []Backend
	// Pieces are the backends as the source has them, sorted by name: an address may be in several.
	Pieces []Piece
}

// Piece is a part of a service's backends, such as an EndpointSlice. Its name is its alone in the service's namespace.
type Piece struct {
	Name     string
	Backends []Backend
}

// Port is where a service listens.
type Port struct {
	Name     string
	Protocol service.Protocol
	Port     uint16
}

// Backend is one address behind a service.
type Backend struct {
	Addr  netip.Addr
	Ports []Port // sorted by name, and by protocol and number where several have one
	// Ready: new connections are welcome. Serving: it answers, though it may be about to end. Terminating: it is.
	Ready, Serving, Terminating bool
	Hostname, Zone, Node        string
	ForZones                    []string
}

// Usable reports whether other clusters are told of the backend.
func (b *Backend) Usable() bool { return b.Ready || b.Serving }

// Change is a service that is not what it was, or, with nil, is gone.
type Change struct {
	service.Name
	Service *Service
}

// Revision numbers what a source has told, from 1 on. 0 is before all of it.
type Revision uint64

// Source is where services come from.
type Source interface {
	String() string
	// Run follows the source until ctx ends.
	Run(ctx context.Context) error
	// Ready is closed once all services have been read.
	Ready() <-chan struct{}
	// Changed returns a channel that closes when Changes or Problems have something new.
	Changed() <-chan struct{}
	// Changes returns each service once that has changed since a revision. full tells that it is all there are, because the
	// revision is 0 or too old: what is not among them is gone.
	Changes(since Revision) (changes []Change, next Revision, full bool)
	// Len is how many services there are.
	Len() int
	// Problems returns what keeps services from being read at present, in words.
	Problems() []string
}
