// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
)

func TestPropagationMetric(t *testing.T) {
	c := propagationCollector{
		histograms: func() []datapath.Propagation {
			return []datapath.Propagation{
				{Cluster: 2, Count: 3, Sum: 11 * time.Second, Buckets: []datapath.PropagationBucket{{Bound: time.Millisecond, Count: 1}, {Bound: 10 * time.Second, Count: 2}}},
				{Cluster: 9, Count: 1, Sum: time.Millisecond, Buckets: []datapath.PropagationBucket{{Bound: time.Millisecond, Count: 1}, {Bound: 10 * time.Second, Count: 1}}},
			}
		},
		names: func() map[identity.ClusterID]string { return map[identity.ClusterID]string{2: "west"} },
	}
	want := `# HELP weft_propagation_seconds From the arrival of a change from the cluster's etcd until the kernel's map holds it.
# TYPE weft_propagation_seconds histogram
weft_propagation_seconds_bucket{cluster="9",le="0.001"} 1
weft_propagation_seconds_bucket{cluster="9",le="10"} 1
weft_propagation_seconds_bucket{cluster="9",le="+Inf"} 1
weft_propagation_seconds_sum{cluster="9"} 0.001
weft_propagation_seconds_count{cluster="9"} 1
weft_propagation_seconds_bucket{cluster="west",le="0.001"} 1
weft_propagation_seconds_bucket{cluster="west",le="10"} 2
weft_propagation_seconds_bucket{cluster="west",le="+Inf"} 3
weft_propagation_seconds_sum{cluster="west"} 11
weft_propagation_seconds_count{cluster="west"} 3
`
	if err := testutil.CollectAndCompare(c, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.CollectAndLint(c); err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
}
