// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weftmesh/weft/api"
)

// operatorCollector reads the metrics of an operator off its status.
type operatorCollector struct{ status func() api.OperatorStatus }

var _ prometheus.Collector = operatorCollector{}

func operatorDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(metricPrefix+"operator_"+name, help, labels, nil)
}

var (
	operatorLeader   = operatorDesc("leader", "1 if this replica leads.")
	operatorTerms    = operatorDesc("terms_total", "How often this replica has become the leader.")
	operatorObjects  = operatorDesc("source_objects", "Objects that are known of a source.", "source")
	dutyRuns         = operatorDesc("runs_total", "Rounds of a duty.", "duty")
	dutyErrors       = operatorDesc("errors_total", "Rounds of a duty that failed.", "duty")
	dutyDeleted      = operatorDesc("deleted_total", "Keys and objects that a duty removed.", "duty")
	dutyDuration     = operatorDesc("last_duration_seconds", "How long the last round of a duty took.", "duty")
	dutyKeys         = operatorDesc("keys", "Keys that a duty keeps in etcd.", "duty")
	dutyPending      = operatorDesc("pending", "Keys of a duty that etcd does not have yet.", "duty")
	dutyReady        = operatorDesc("ready", "1 if what a duty is for is true: its export is complete, its last round went well.", "duty")
	operatorAllDescs = []*prometheus.Desc{
		operatorLeader, operatorTerms, operatorObjects, dutyRuns, dutyErrors, dutyDeleted, dutyDuration, dutyKeys, dutyPending, dutyReady,
	}
)

// Describe names all metrics.
func (c operatorCollector) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range operatorAllDescs {
		descs <- d
	}
}

// Collect reads all metrics.
func (c operatorCollector) Collect(metrics chan<- prometheus.Metric) {
	s := c.status()
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	count := func(d *prometheus.Desc, value uint64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(value), labels...)
	}
	gauge(operatorLeader, oneIf(s.IsLeader))
	count(operatorTerms, uint64(s.Terms))
	for _, source := range s.Sources {
		gauge(operatorObjects, float64(source.Objects), source.Name)
	}
	for i := range s.Duties {
		d := &s.Duties[i]
		count(dutyRuns, d.Runs, d.Name)
		count(dutyErrors, d.Errors, d.Name)
		count(dutyDeleted, d.Deleted, d.Name)
		gauge(dutyDuration, d.LastDuration.Seconds(), d.Name)
		gauge(dutyKeys, float64(d.Keys), d.Name)
		gauge(dutyPending, float64(d.Pending), d.Name)
		gauge(dutyReady, oneIf(d.Ready), d.Name)
	}
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
