// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"time"

	"github.com/weftmesh/weft/kvstore"
)

// Status is the present state of a replica.
type Status struct {
	Name        string
	Election    string
	Leads       bool
	Since       time.Time // when the term began; zero while it does not lead
	Terms       int       // that this replica has had
	Leader      Leader    // who began the last term, as etcd tells; the zero Leader if that is not known
	LastError   error     // why the last term ended, or does not begin
	LastErrorAt time.Time
	KVStore     kvstore.Status
	Duties      []DutyStatus
}

// Status returns the present state, without any network traffic.
func (o *Operator) Status() Status {
	o.mu.Lock()
	s := Status{
		Name: o.cfg.Name, Election: o.cfg.Election.String(), Leads: o.term != nil, Terms: o.terms, Leader: o.leader,
		LastError: o.err, LastErrorAt: o.errAt,
	}
	if o.term != nil {
		s.Since = o.term.since
	}
	client := o.client
	o.mu.Unlock()
	s.KVStore.Endpoints = o.cfg.Etcd.Endpoints
	if client != nil {
		s.KVStore = client.Status()
	}
	for _, d := range o.cfg.Duties {
		s.Duties = append(s.Duties, d.Status())
	}
	return s
}
