// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"cmp"
	"hash/fnv"
	"net/netip"
	"slices"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/yamldir"
)

// Status is what there is to know of the endpoints of this node.
type Status struct {
	Endpoints []Endpoint    `json:"endpoints"`
	Errors    []SourceError `json:"errors"`
}

// State says whether an endpoint has its identity.
type State string

// The states of an endpoint.
const (
	// Identified: it has its identity, and others are told.
	Identified State = "ready"
	// Waiting: it has none yet, is known as init on this node, and not announced.
	Waiting State = "waiting-for-identity"
	// Restored: it has the identity that it had before the agent was restarted, and etcd has not been asked yet. That is in
	// force on this node, and what others were told before stays.
	Restored State = "restored"
)

// Endpoint is a workload of this node that is in force.
type Endpoint struct {
	Namespace      string          `json:"namespace"`
	Name           string          `json:"name"`
	ServiceAccount string          `json:"serviceAccount"`
	ID             uint32          `json:"id"`
	IPs            []netip.Addr    `json:"ips"`
	Identity       identity.ID     `json:"identity"`
	Labels         identity.Labels `json:"-"`
	Source         string          `json:"source"`
	Origin         string          `json:"origin"`
	State          State           `json:"state"`
	Reason         string          `json:"reason,omitempty"` // why it is not ready
	Since          time.Time       `json:"since"`            // it has been in this state, with this identity
}

// SourceError says what is wrong with a file, an entry of it, or a source (File is empty then).
type SourceError = yamldir.Problem

// Status returns the endpoints in force, by namespace and name, and what is wrong with others. Safe for concurrent use.
func (r *Registry) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.status
}

// endpointID is the number of an endpoint within its node: the one given, else one made of its name, above those that
// can be given, so that it is the same after every restart.
func (w *Workload) endpointID() uint32 {
	if w.ID != 0 {
		return w.ID
	}
	h := fnv.New32a()
	h.Write([]byte(w.key()))
	const lowest = 1 << 16
	return lowest + h.Sum32()%(1<<31-lowest)
}

// report makes the outcome visible. Without accepted endpoints, those that are in force stay.
func (r *Registry) report(accepted []resolved, problems []SourceError) {
	before := r.Status()
	endpoints := before.Endpoints
	if accepted != nil {
		endpoints = shown(before.Endpoints, accepted)
	}
	r.mu.Lock()
	r.status = Status{Endpoints: endpoints, Errors: problems}
	r.addresses.set(endpoints)
	r.mu.Unlock()
	for _, p := range problems {
		if !slices.Contains(before.Errors, p) {
			r.cfg.Log.Warn("endpoint refused", "err", p)
		}
	}
	if len(endpoints) != len(before.Endpoints) {
		r.cfg.Log.Info("endpoints of this node", "count", len(endpoints), "errors", len(problems))
	}
}

// shown describes endpoints, those that are as before since then.
func shown(before []Endpoint, accepted []resolved) []Endpoint {
	known := make(map[string]*Endpoint, len(before))
	for i := range before {
		known[before[i].Namespace+"/"+before[i].Name] = &before[i]
	}
	now := time.Now()
	endpoints := make([]Endpoint, 0, len(accepted))
	for i := range accepted {
		x := &accepted[i]
		e := Endpoint{
			Namespace: x.Namespace, Name: x.Name, ServiceAccount: x.ServiceAccount, ID: x.endpointID(), IPs: x.IPs,
			Identity: x.id, Labels: x.labels, Source: x.Source, Origin: x.Origin, State: Identified, Since: now,
		}
		switch {
		case x.id == identity.Init:
			e.State = Waiting
		case x.restored():
			e.State = Restored
		}
		if x.err != nil {
			e.Reason = x.err.Error()
		}
		if old := known[x.key()]; old != nil && old.State == e.State && old.Identity == e.Identity && old.Source == e.Source {
			e.Since = old.Since
		}
		endpoints = append(endpoints, e)
	}
	slices.SortFunc(endpoints, func(a, b Endpoint) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return endpoints
}
