// SPDX-License-Identifier: Apache-2.0

package mesh

import "time"

// doubts is for how long nobody vouches for what a cluster says, and what has become of its services meanwhile. It is
// more than an [absence]: the data of a cluster without a heartbeat is followed, but who writes it may be gone.
type doubts struct {
	since time.Time   // zero while there are none
	ends  *time.Timer // when the cluster is lost
	lost  bool
}

// doubt begins or ends the doubts. mu is held.
func (r *remote) doubt(now bool) {
	d := &r.doubts
	if now == !d.since.IsZero() || r.own || r.ended {
		return
	}
	if !now {
		d.end()
		if d.since = (time.Time{}); d.lost {
			d.lost = false
			r.log.Info("remote cluster is back, its backends are used again")
			r.mesh.cfg.Services.SetLost(r.name, false)
		}
		return
	}
	d.since = time.Now()
	if after := r.mesh.cfg.LoseAfter; after > 0 {
		d.ends = time.AfterFunc(after, r.lose)
	}
}

// end stops the clock. mu is held.
func (d *doubts) end() {
	if d.ends != nil {
		d.ends.Stop()
		d.ends = nil
	}
}

// lose is when the doubts have lasted for long enough. The end of the doubts, or of the life, may have outrun it.
func (r *remote) lose() {
	r.mu.Lock()
	defer r.mu.Unlock()
	d := &r.doubts
	if d.since.IsZero() || d.lost || r.ended || time.Since(d.since) < r.mesh.cfg.LoseAfter {
		return
	}
	d.lost = true
	r.log.Warn("remote cluster has been in doubt for too long, its backends are used only where there are no others",
		"since", d.since, "after", r.mesh.cfg.LoseAfter)
	r.mesh.cfg.Services.SetLost(r.name, true)
}
