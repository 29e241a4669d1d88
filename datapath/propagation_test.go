// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/ipcache"
)

// What arrived is counted when the kernel holds it, additions as well as deletions, by cluster; what the kernel refused is
// not.
func TestPropagation(t *testing.T) {
	b := newReconcilerBench(t, newRecorder())
	apply := func(from ipcache.Arrival, ops ...ipcache.Op) { b.table.ApplyArrived(ops, from) }
	ago := func(d time.Duration) int64 { return time.Now().Add(-d).UnixNano() }
	b.step(0)
	if got := b.propagation.histograms(); len(got) != 0 {
		t.Fatalf("before anything arrived: %v", got)
	}
	apply(ipcache.Arrival{Cluster: 2, At: ago(3 * time.Second)}, upsert("10.2.1.1/32", 131329))
	apply(ipcache.Arrival{Cluster: 3, At: ago(time.Minute)}, upsert("10.3.1.1/32", 196865))
	apply(ipcache.Arrival{}, upsert("10.3.1.2/32", 196865))
	b.step(0)
	apply(ipcache.Arrival{Cluster: 2, At: ago(-time.Hour)}, remove("10.2.1.1/32")) // the clock was set back
	b.step(0)
	b.kernel.refuse = func(bpf.IPCacheKey) error { return errors.New("no") }
	apply(ipcache.Arrival{Cluster: 3, At: ago(0)}, upsert("10.3.1.3/32", 196865))
	b.step(0)

	type short struct {
		Cluster                  int
		Count, Least, In2s, In5s uint64
	}
	var got []short
	for _, h := range b.propagation.histograms() {
		s := short{Cluster: int(h.Cluster), Count: h.Count}
		for _, bucket := range h.Buckets {
			switch bucket.Bound {
			case 50 * time.Microsecond:
				s.Least = bucket.Count
			case 2 * time.Second:
				s.In2s = bucket.Count
			case 5 * time.Second:
				s.In5s = bucket.Count
			}
		}
		got = append(got, s)
		if h.Cluster == 3 && h.Sum < time.Minute {
			t.Errorf("sum of cluster 3 is %s", h.Sum)
		}
	}
	if diff := cmp.Diff([]short{{2, 2, 1, 1, 2}, {3, 1, 0, 0, 0}}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
