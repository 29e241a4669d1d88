// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weftmesh/weft/service"
)

// mostServices bounds the services that have metrics of their own, of which there may be tens of thousands: the first ones by
// name.
const mostServices = 500

// serviceCollector makes metrics of the table of services.
type serviceCollector struct {
	count func(most int) service.Counts
}

var _ prometheus.Collector = serviceCollector{}

func serviceDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(metricPrefix+"service_"+name, help, labels, nil)
}

var (
	serviceLocal     = serviceDesc("local", "Services of our own cluster.")
	serviceGlobal    = serviceDesc("global", "Services of our own cluster that want backends of other clusters.")
	serviceFrontends = serviceDesc("frontends", "Addresses at which local services are reached.")
	serviceEmpty     = serviceDesc("frontends_without_backends", "Addresses of local services that lead nowhere: who connects is refused.")
	serviceContested = serviceDesc("frontends_contested", "Addresses that several local services claim.")
	serviceOffers    = serviceDesc("offers", "Services that the remote cluster offers backends for.", "target_cluster")
	serviceOffered   = serviceDesc("offered_backends", "Addresses that the remote cluster offers as backends.", "target_cluster", "state")
	serviceLost      = serviceDesc("cluster_lost", "Whether the remote cluster's backends are used only where there are no others.", "target_cluster")
	serviceUsed      = serviceDesc("backends_used", "Backends in use by the address of the service that has the fewest; the first global services by name.",
		"namespace", "service")
	serviceUnlisted = serviceDesc("unlisted", "Global services that have no metric of their own.")
)

// Describe names all metrics.
func (serviceCollector) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		serviceLocal, serviceGlobal, serviceFrontends, serviceEmpty, serviceContested, serviceOffers, serviceOffered, serviceLost, serviceUsed, serviceUnlisted,
	} {
		descs <- d
	}
}

// Collect reads all metrics.
func (c serviceCollector) Collect(metrics chan<- prometheus.Metric) {
	add := func(d *prometheus.Desc, value float64, labels ...string) {
		for i := range labels {
			labels[i] = strings.ToValidUTF8(labels[i], "\uFFFD")
		}
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	n := c.count(mostServices)
	add(serviceLocal, float64(n.Local))
	add(serviceGlobal, float64(n.Global))
	add(serviceFrontends, float64(n.Frontends))
	add(serviceEmpty, float64(n.Empty))
	add(serviceContested, float64(n.Contested))
	add(serviceUnlisted, float64(n.Left))
	for _, of := range n.Clusters {
		lost := 0.0
		if of.Lost {
			lost = 1
		}
		add(serviceOffers, float64(of.Services), of.Cluster)
		add(serviceOffered, float64(of.Ready), of.Cluster, service.Ready.String())
		add(serviceOffered, float64(of.Draining), of.Cluster, service.Draining.String())
		add(serviceLost, lost, of.Cluster)
	}
	for _, s := range n.Services {
		add(serviceUsed, float64(s.Used), s.Namespace, s.Name.Name)
	}
}
