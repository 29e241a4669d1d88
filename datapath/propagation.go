// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// propagationBounds are the upper bounds of the histograms' buckets.
var propagationBounds = [...]time.Duration{
	50 * time.Microsecond, 100 * time.Microsecond, 200 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second,
}

// Propagation is a histogram of how long news of one cluster took from their arrival to the kernel's map. Lists do not
// count, and of very many news that come faster than the kernel is written, not each one does.
type Propagation struct {
	Cluster identity.ClusterID `json:"cluster"`
	Count   uint64             `json:"count"`
	Sum     time.Duration      `json:"sum"`
	// Buckets hold how many took at most so long, those of shorter bounds included. What took longer than the last bound is
	// in Count only.
	Buckets []PropagationBucket `json:"buckets"`
}

// PropagationBucket is one bucket of a histogram.
type PropagationBucket struct {
	Bound time.Duration `json:"bound"`
	Count uint64        `json:"count"`
}

// propagation measures. It is safe for concurrent use, but for taken, which is the reconciler's.
type propagation struct {
	buf []ipcache.Arrival

	mu       sync.Mutex
	clusters map[identity.ClusterID]*durations
}

// durations counts by bucket, not cumulated, with one more for what is longer than the last bound.
type durations struct {
	counts [len(propagationBounds) + 1]uint64
	sum    time.Duration
}

// taken counts what the table says to have arrived and is now, up to a revision, in the kernel. With valid false it is not:
// then it is forgotten.
func (p *propagation) taken(table *ipcache.Table, upTo ipcache.Revision, valid bool) {
	p.buf = table.Arrived(upTo, p.buf[:0])
	if len(p.buf) == 0 || !valid {
		return
	}
	now := time.Now().UnixNano()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.clusters == nil {
		p.clusters = make(map[identity.ClusterID]*durations)
	}
	for _, a := range p.buf {
		d := p.clusters[a.Cluster]
		if d == nil {
			d = new(durations)
			p.clusters[a.Cluster] = d
		}
		took := max(0, time.Duration(now-a.At)) // the clock may have been set back
		bucket, _ := slices.BinarySearch(propagationBounds[:], took)
		d.counts[bucket]++
		d.sum += took
	}
}

func (p *propagation) histograms() []Propagation {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]Propagation, 0, len(p.clusters))
	for cluster, d := range p.clusters {
		h := Propagation{Cluster: cluster, Sum: d.sum, Buckets: make([]PropagationBucket, len(propagationBounds))}
		for i, bound := range propagationBounds {
			h.Count += d.counts[i]
			h.Buckets[i] = PropagationBucket{Bound: bound, Count: h.Count}
		}
		h.Count += d.counts[len(propagationBounds)]
		all = append(all, h)
	}
	slices.SortFunc(all, func(a, b Propagation) int { return cmp.Compare(a.Cluster, b.Cluster) })
	return all
}

// Propagation returns one histogram for each cluster of which there was any news, in order of their ids. It is safe for
// concurrent use.
func (d *Datapath) Propagation() []Propagation {
	d.mu.Lock()
	r := d.reconciler
	d.mu.Unlock()
	if r == nil {
		return nil
	}
	return r.propagation.histograms()
}
