// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
)

// propagationCollector makes metrics of the datapath's histograms, which nobody but the metrics shows.
type propagationCollector struct {
	histograms func() []datapath.Propagation
	names      func() map[identity.ClusterID]string
}

var _ prometheus.Collector = propagationCollector{}

var propagationDesc = prometheus.NewDesc(metricPrefix+"propagation_seconds",
	"From the arrival of a change from the cluster's etcd until the kernel's map holds it.", []string{"cluster"}, nil)

// Describe names the metric.
func (c propagationCollector) Describe(descs chan<- *prometheus.Desc) { descs <- propagationDesc }

// Collect yields a histogram for each cluster that anything came from. A cluster whose name is not known any more goes by
// its id.
func (c propagationCollector) Collect(metrics chan<- prometheus.Metric) {
	names := c.names()
	for _, h := range c.histograms() {
		name, ok := names[h.Cluster]
		if !ok {
			name = fmt.Sprint(uint32(h.Cluster))
		}
		buckets := make(map[float64]uint64, len(h.Buckets))
		for _, b := range h.Buckets {
			buckets[b.Bound.Seconds()] = b.Count
		}
		metrics <- prometheus.MustNewConstHistogram(propagationDesc, h.Count, h.Sum.Seconds(), buckets,
			strings.ToValidUTF8(name, "\uFFFD"))
	}
}
