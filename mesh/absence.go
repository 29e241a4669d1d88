// SPDX-License-Identifier: Apache-2.0

package mesh

import "time"

// absence is for how long a cluster has not been followed, and what has become of its data meanwhile.
type absence struct {
	since     time.Time   // zero while it is followed
	ends      *time.Timer // at the end of the time to live; nil if there is none
	over      bool        // the time to live has ended, and nothing has been withdrawn yet
	withdrawn bool        // data has been withdrawn, and the cluster is not back yet
}

// noteAbsence begins or ends the absence. mu is held.
func (r *remote) noteAbsence(away bool) {
	a := &r.progress.away
	if away == !a.since.IsZero() {
		return
	}
	if !away {
		if a.ends != nil {
			a.ends.Stop()
		}
		*a = absence{}
		return
	}
	a.since = time.Now()
	if ttl := r.mesh.cfg.CacheTTL; ttl > 0 && !r.own && !r.ended {
		a.ends = time.AfterFunc(ttl, r.outlived)
	}
}

// outlived is when the time to live ends, which the cluster's return may have outrun. What is to be withdrawn must not be
// followed meanwhile, so that this ends the present pass.
func (r *remote) outlived() {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := &r.progress.away
	if !a.since.IsZero() && !a.withdrawn && time.Since(a.since) >= r.mesh.cfg.CacheTTL {
		a.over = true
		r.wake()
	}
}

// forget withdraws, between two passes, the data that has outlived its time, if there is any. The cluster keeps its id, and
// counts as listed: its data is meant to be gone.
func (r *remote) forget() {
	r.mu.Lock()
	a := &r.progress.away
	over := a.over
	a.over = false
	a.withdrawn = a.withdrawn || over
	since := a.since
	r.mu.Unlock()
	if !over {
		return
	}
	all := r.mesh.cfg.CacheTTLAll
	if r.feeds != nil && all {
		r.feeds.drain(r.stop)
	} else if r.feeds != nil {
		r.feeds.services.drain(r.stop)
	}
	r.log.Warn("remote cluster has been away for too long, its data is withdrawn until it returns",
		"since", since, "ttl", r.mesh.cfg.CacheTTL, "all", all)
}
