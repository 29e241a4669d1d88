// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weftmesh/weft/service"
)

func TestServiceMetrics(t *testing.T) {
	c := serviceCollector{func(most int) service.Counts {
		if most != mostServices {
			t.Errorf("asked for %d services", most)
		}
		return service.Counts{
			Local: 7, Global: 3, Frontends: 9, Empty: 2, Contested: 1, Left: 1, Clusters: []service.ClusterCount{{Cluster: "west", Services: 4, Ready: 40, Draining: 2, Lost: true}},
			Services: []service.ServiceCount{{Name: service.Name{Namespace: "shop", Name: "web\xff"}, Used: 5}},
		}
	}}
	const want = `
# HELP weft_service_backends_used Backends in use by the address of the service that has the fewest; the first global services by name.
# TYPE weft_service_backends_used gauge
weft_service_backends_used{namespace="shop",service="web�"} 5
# HELP weft_service_cluster_lost Whether the remote cluster's backends are used only where there are no others.
# TYPE weft_service_cluster_lost gauge
weft_service_cluster_lost{target_cluster="west"} 1
# HELP weft_service_frontends_without_backends Addresses of local services that lead nowhere: who connects is refused.
# TYPE weft_service_frontends_without_backends gauge
weft_service_frontends_without_backends 2
# HELP weft_service_offered_backends Addresses that the remote cluster offers as backends.
# TYPE weft_service_offered_backends gauge
weft_service_offered_backends{state="draining",target_cluster="west"} 2
weft_service_offered_backends{state="ready",target_cluster="west"} 40
`
	if err := testutil.CollectAndCompare(c, strings.NewReader(want), "weft_service_backends_used", "weft_service_cluster_lost",
		"weft_service_frontends_without_backends", "weft_service_offered_backends"); err != nil {
		t.Error(err)
	}
	if n := testutil.CollectAndCount(c); n != 11 {
		t.Errorf("%d metrics, want 11", n)
	}
}
