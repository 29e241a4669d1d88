// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weftmesh/weft/api"
)

// busyStatus has something for every metric.
func busyStatus() api.Status {
	s := labStatus(false)
	s.Clusters[0].Rejected = map[string]uint64{"node/mismatch": 2}
	s.KVStore.Certificates = []api.Certificate{{Role: "client", NotAfter: testNow}, {Role: "server", Of: "a", NotAfter: testNow}}
	s.Datapath.Map = api.Map{Entries: 30, MaxEntries: 40, Pending: 1, Unclaimed: 2, Written: 5, Deleted: 4, Pruned: 3, Failures: 6, Error: "x"}
	s.Datapath.Services.Translation = &api.Translation{Flows: 1}
	return s
}

// Names and types are what dashboards and alerts are made of: they are added to, and never changed.
//
// lesson: T3
func TestMetricNames(t *testing.T) {
	c := newCollector(busyStatus, labCounters)
	problems, err := testutil.CollectAndLint(c)
	if err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(c)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range families {
		var labels []string
		for _, pair := range f.Metric[0].Label {
			labels = append(labels, pair.GetName())
		}
		names = append(names, fmt.Sprintf("%-50s %-8s %s", f.GetName(), strings.ToLower(f.GetType().String()), strings.Join(labels, ",")))
	}
	if len(names) != len(c.families) {
		t.Errorf("%d metrics have values, of %d", len(names), len(c.families))
	}
	slices.Sort(names)
	var trimmed strings.Builder
	for _, name := range names {
		trimmed.WriteString(strings.TrimRight(name, " ") + "\n")
	}
	golden(t, "metrics.names", trimmed.String())
}

func TestMetricValues(t *testing.T) {
	want := strings.TrimLeft(`
# HELP weft_bpf_map_pressure How full the map is, 1 being full.
# TYPE weft_bpf_map_pressure gauge
weft_bpf_map_pressure{map_name="ipcache"} 0.75
weft_bpf_map_pressure{map_name="service_backends"} 1.7166170437184214e-05
weft_bpf_map_pressure{map_name="service_frontends"} 4.5777065690089265e-05
weft_bpf_map_pressure{map_name="service_slots"} 7.62939453125e-06
# HELP weft_cert_not_after_seconds Until when the certificates of a role, client, server or ca, are all good, in seconds since 1970.
# TYPE weft_cert_not_after_seconds gauge
weft_cert_not_after_seconds{certificate="ca",cluster="west"} 1.8729738e+09
weft_cert_not_after_seconds{certificate="client",cluster="east"} 1.7952138e+09
weft_cert_not_after_seconds{certificate="client",cluster="west"} 1.7962506e+09
weft_cert_not_after_seconds{certificate="server",cluster="east"} 1.7952138e+09
weft_cert_not_after_seconds{certificate="server",cluster="west"} 1.8211338e+09
# HELP weft_clustermesh_remote_cluster_readiness_status 1 if the remote cluster is connected and has been listed.
# TYPE weft_clustermesh_remote_cluster_readiness_status gauge
weft_clustermesh_remote_cluster_readiness_status{target_cluster="north"} 0
weft_clustermesh_remote_cluster_readiness_status{target_cluster="south"} 0
weft_clustermesh_remote_cluster_readiness_status{target_cluster="west"} 1
# HELP weft_clustermesh_remote_clusters Remote clusters that are configured.
# TYPE weft_clustermesh_remote_clusters gauge
weft_clustermesh_remote_clusters 3
# HELP weft_packets_total Packets that the programs saw since the map was made, before the agent started too.
# TYPE weft_packets_total counter
weft_packets_total{direction="egress",mode="native",verdict="identified"} 3
weft_packets_total{direction="egress",mode="overlay",verdict="identified"} 4
# HELP weft_reconcile_errors What of the kernel is not as it should be: devices, programs, routes.
# TYPE weft_reconcile_errors gauge
weft_reconcile_errors 2
# HELP weft_rejected_total What a cluster published that was not accepted.
# TYPE weft_rejected_total counter
weft_rejected_total{cluster="east",kind="node",reason="mismatch"} 2
weft_rejected_total{cluster="west",kind="ip",reason="range"} 3
weft_rejected_total{cluster="west",kind="node",reason="name"} 1
# HELP weft_service_flows_total Flows to services: given a backend, and refused as there was none.
# TYPE weft_service_flows_total counter
weft_service_flows_total{outcome="chosen"} 1412
weft_service_flows_total{outcome="refused"} 1
# HELP weft_service_write_errors_total Changes of the kernel's table of services that could not be made, and were tried again.
# TYPE weft_service_write_errors_total counter
weft_service_write_errors_total 1
`, "\n")
	err := testutil.CollectAndCompare(newCollector(busyStatus, labCounters), strings.NewReader(want),
		"weft_bpf_map_pressure", "weft_cert_not_after_seconds", "weft_clustermesh_remote_cluster_readiness_status", "weft_clustermesh_remote_clusters",
		"weft_packets_total", "weft_reconcile_errors", "weft_rejected_total", "weft_service_flows_total", "weft_service_write_errors_total")
	if err != nil {
		t.Error(err)
	}
}

// Counters that cannot be read take nothing but themselves out of the answer, and are an error that is counted.
func TestMetricsWithoutCounters(t *testing.T) {
	log := new(buffer)
	handler := newHandler(slog.New(slog.NewTextHandler(log, nil)), newCollector(busyStatus, func() ([]counter, error) { return nil, errors.New("no pins") }))
	for range 2 {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		body := answer.Body.String()
		if answer.Code != http.StatusOK || strings.Contains(body, "weft_packets_total") || contains(body, "weft_healthy 0", "weft_build_info{", "go_goroutines ") != nil {
			t.Fatalf("status %d\n%s", answer.Code, body)
		}
	}
	if err := contains(log.String(), "no pins"); err != nil {
		t.Error(err)
	}
}

// How many series there are depends on how many clusters there are, and on nothing that they publish: not on identities, their
// labels, or who talks to whom. The text is what Prometheus takes for clean.
func TestMetricsAreBounded(t *testing.T) {
	served := func(clusters, pairs int) string {
		status := func() api.Status {
			s := busyStatus()
			one := s.Clusters[1]
			for i := range clusters {
				c := one
				c.Name, c.ID = fmt.Sprintf("region-%d", i), uint32(i+3)
				c.LastError, c.Rejections = "x\"\n\\", []api.Rejection{{Kind: "ip\n", Key: "\x1b[2J", Reason: "\xff"}}
				s.Clusters = append(s.Clusters, c)
			}
			return s
		}
		counters := func() (all []counter, err error) {
			for i := range pairs {
				all = append(all, counter{Source: uint32(i), Destination: uint32(2 * i), Direction: "ingress", Verdict: "identified", Mode: "native", Packets: 1, Bytes: 1})
			}
			return all, nil
		}
		r := httptest.NewRecorder()
		newHandler(slog.New(slog.DiscardHandler), newCollector(status, counters)).ServeHTTP(r, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		return r.Body.String()
	}
	series := func(clusters, pairs int) (n int) {
		for line := range strings.Lines(served(clusters, pairs)) {
			if strings.HasPrefix(line, "weft_") {
				n++
			}
		}
		return n
	}
	none, half, most := series(0, 1), series(127, 1), series(254, 1)
	if each := (most - none) / 254; each > 40 || half-none != 127*each || most-none != 254*each {
		t.Errorf("%d series without clusters, %d with 127, %d with 254: want as many for each, and at most 40", none, half, most)
	}
	if n := series(254, 10_000); n != most {
		t.Errorf("%d series with 10000 pairs of identities, %d with one", n, most)
	}
	check := exec.Command("promtool", "check", "metrics")
	check.Stdin = strings.NewReader(served(254, 10))
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("promtool check metrics: %v (it is in Debian's package prometheus: make deps)\n%s", err, out)
	}
}
