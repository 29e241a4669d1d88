// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/endpoint"
)

// Metrics are read off the agent's status, and the counters in the kernel, when somebody asks: nothing is counted twice.
// Names follow those of Cilium, so that dashboards carry over. Packets are told by verdict and direction only: by identity
// there may be hundreds of thousands, see `weft bpf counters list`.

const metricPrefix = "weft_"

// family is all metrics of one name.
type family struct {
	name, help string
	labels     []string
	kind       prometheus.ValueType
	each       func(*snapshot, emit)
}

// emit adds a metric with the values of the family's labels.
type emit func(value float64, labels ...string)

// snapshot is what the metrics of one answer are read off.
type snapshot struct {
	api.Status
	version  api.VersionInfo
	counters []counter
}

// collector makes metrics of snapshots.
type collector struct {
	status   func() api.Status
	counters func() ([]counter, error)
	families []family
	descs    []*prometheus.Desc
	packets  int // index of the first family that needs counters, the last ones
}

var _ prometheus.Collector = (*collector)(nil)

func newCollector(status func() api.Status, counters func() ([]counter, error)) *collector {
	families := slices.Concat(meshFamilies, kvstoreFamilies, kernelFamilies)
	c := &collector{status: status, counters: counters, packets: len(families), families: append(families, packetFamilies...)}
	for _, f := range c.families {
		c.descs = append(c.descs, prometheus.NewDesc(metricPrefix+f.name, f.help, f.labels, nil))
	}
	return c
}

// Describe names all metrics.
func (c *collector) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		descs <- d
	}
}

// Collect reads all metrics. Counters that cannot be read are missing, and an error of the answer.
func (c *collector) Collect(metrics chan<- prometheus.Metric) {
	s := &snapshot{Status: c.status(), version: versionInfo()}
	families := c.families
	var err error
	if s.counters, err = c.counters(); err != nil {
		metrics <- prometheus.NewInvalidMetric(c.descs[c.packets], err)
		families = families[:c.packets]
	}
	for i, f := range families {
		f.each(s, func(value float64, labels ...string) {
			for i := range labels {
				labels[i] = strings.ToValidUTF8(labels[i], "\uFFFD")
			}
			metrics <- prometheus.MustNewConstMetric(c.descs[i], f.kind, value, labels...)
		})
	}
}

// metrics answers with the metrics of the agent, of its process and of the Go run time.
func (a *agent) metrics() http.Handler {
	counters := func() ([]counter, error) { return listCounters(a.cfg.bpffs) }
	return newHandler(a.log, newCollector(a.status, counters), propagationCollector{a.datapath.Propagation, a.clusterNames},
		serviceCollector{a.services.Count})
}

func newHandler(log *slog.Logger, ours ...prometheus.Collector) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(ours...)
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorLog:      slog.NewLogLogger(log.With("task", "metrics").Handler(), slog.LevelWarn),
		ErrorHandling: promhttp.ContinueOnError, Registry: registry,
	})
}

// remoteGauge is a family with one value for each remote cluster.
func remoteGauge(name, help string, value func(*api.Cluster) float64) family {
	return family{"clustermesh_remote_cluster_" + name, help, []string{"target_cluster"}, prometheus.GaugeValue,
		func(s *snapshot, emit emit) {
			for c := range s.remotes {
				emit(value(c), c.Name)
			}
		}}
}

// quotaGauge is a family with a value for each quota of each remote cluster.
func quotaGauge(name, help string, value func(api.Quota) int64) family {
	return family{"clustermesh_remote_cluster_quota_" + name, help, []string{"target_cluster", "quota"}, prometheus.GaugeValue,
		func(s *snapshot, emit emit) {
			for c := range s.remotes {
				emit(float64(value(c.Quotas.Entries)), c.Name, "entries")
				emit(float64(value(c.Quotas.Bytes)), c.Name, "bytes")
			}
		}}
}

// remotes yields the remote clusters.
func (s *snapshot) remotes(yield func(*api.Cluster) bool) {
	for i := range s.Clusters {
		if c := &s.Clusters[i]; !c.Own && !yield(c) {
			return
		}
	}
}

// single is a family of one gauge without labels.
func single(name, help string, value func(*snapshot) float64) family {
	return family{name, help, nil, prometheus.GaugeValue, func(s *snapshot, emit emit) { emit(value(s)) }}
}

func bit(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// seconds is a time as Prometheus knows it; 0 for none.
func seconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}

var meshFamilies = []family{
	{"build_info", "The build of the agent; always 1.", []string{"version", "revision", "goversion"}, prometheus.GaugeValue,
		func(s *snapshot, emit emit) { emit(1, s.version.Version, s.version.Revision, s.version.Go) }},
	single("healthy", "1 if weft status says ok.", func(s *snapshot) float64 { return bit(s.Healthy) }),
	single("ready", "1 if the kernel is what the agent knows.", func(s *snapshot) float64 { return bit(len(s.Unready()) == 0) }),
	single("problems", "Problems that weft status lists.", func(s *snapshot) float64 { return float64(len(s.Problems)) }),
	single("clustermesh_remote_clusters", "Remote clusters that are configured.", func(s *snapshot) (n float64) {
		for range s.remotes {
			n++
		}
		return n
	}),
	remoteGauge("nodes", "Nodes of the remote cluster.", func(c *api.Cluster) float64 { return float64(c.Counts.Nodes) }),
	remoteGauge("services", "Services of the remote cluster.", func(c *api.Cluster) float64 { return float64(c.Counts.Services) }),
	remoteGauge("endpoints", "Addresses of workloads of the remote cluster.", func(c *api.Cluster) float64 { return float64(c.Counts.IPs) }),
	remoteGauge("identities", "Identities of the remote cluster.", func(c *api.Cluster) float64 { return float64(c.Counts.Identities) }),
	remoteGauge("failures", "Connections to the remote cluster that could not be made or were lost.",
		func(c *api.Cluster) float64 { return float64(c.Failures) }),
	remoteGauge("last_failure_ts", "When something last failed with the remote cluster, in seconds since 1970; 0: never.",
		func(c *api.Cluster) float64 { return seconds(c.LastErrorAt) }),
	remoteGauge("readiness_status", "1 if the remote cluster is connected and has been listed.",
		func(c *api.Cluster) float64 { return bit(c.Ready) }),
	remoteGauge("reconnections", "Connections to the remote cluster after the first.",
		func(c *api.Cluster) float64 { return float64(c.Reconnects) }),
	remoteGauge("last_success_ts", "When the etcd of the remote cluster last answered, in seconds since 1970; 0: never.",
		func(c *api.Cluster) float64 { return seconds(c.LastSuccess) }),
	remoteGauge("waiting", "Announced addresses of the remote cluster that are not used because their node is not known.",
		func(c *api.Cluster) float64 { return float64(c.Waiting) }),
	quotaGauge("used", "What the remote cluster has of what is limited.", func(q api.Quota) int64 { return q.Used }),
	quotaGauge("limit", "What the remote cluster may have; 0: any amount.", func(q api.Quota) int64 { return q.Limit }),
	{"clustermesh_remote_cluster_held_back_total", "How often changes of the remote cluster came faster than they may.",
		[]string{"target_cluster"}, prometheus.CounterValue, func(s *snapshot, emit emit) {
			for c := range s.remotes {
				emit(float64(c.Quotas.HeldBack), c.Name)
			}
		}},
	{"rejected_total", "What a cluster published that was not accepted.", []string{"cluster", "kind", "reason"}, prometheus.CounterValue,
		func(s *snapshot, emit emit) {
			for _, c := range s.Clusters {
				for _, key := range slices.Sorted(maps.Keys(c.Rejected)) {
					kind, reason, _ := strings.Cut(key, "/")
					emit(float64(c.Rejected[key]), c.Name, kind, reason)
				}
			}
		}},
	single("ipcache_prefixes", "Prefixes that somebody claims.", func(s *snapshot) float64 { return float64(s.Tables.IPs) }),
	single("ipcache_conflicts", "Prefixes of which several clusters or sources say different things.",
		func(s *snapshot) float64 { return float64(s.Tables.Conflicts) }),
	single("identities", "Identities whose labels are known.", func(s *snapshot) float64 { return float64(s.Tables.Identities) }),
	single("nodes", "Nodes of all clusters.", func(s *snapshot) float64 { return float64(s.Tables.Nodes) }),
	single("services", "Services of all remote clusters.", func(s *snapshot) float64 { return float64(s.Tables.Services) }),
	single("endpoints", "Workloads of this node.", func(s *snapshot) float64 { return float64(len(s.Endpoints.Items)) }),
	{"endpoint_state", "Workloads of this node by state.", []string{"endpoint_state"}, prometheus.GaugeValue, func(s *snapshot, emit emit) {
		states := make(map[string]int)
		for i := range s.Endpoints.Items {
			states[s.Endpoints.Items[i].State]++
		}
		for _, state := range []endpoint.State{endpoint.Identified, endpoint.Waiting, endpoint.Restored} {
			emit(float64(states[string(state)]), string(state))
		}
	}},
	{"identity_label_sets", "Sets of labels of this node's workloads, by the state of their identity.", []string{"state"}, prometheus.GaugeValue,
		allocatorFamily(func(a *api.Allocator, emit emit) {
			emit(float64(a.LabelSets-a.Waiting-a.Restored), string(endpoint.Identified))
			emit(float64(a.Waiting), string(endpoint.Waiting))
			emit(float64(a.Restored), string(endpoint.Restored))
		})},
	{"identity_free", "Identities of the cluster's range that stand for nothing.", nil, prometheus.GaugeValue,
		allocatorFamily(func(a *api.Allocator, emit emit) { emit(float64(a.Free)) })},
	{"identity_allocations_total", "Attempts to find the identity of labels.", []string{"outcome"}, prometheus.CounterValue,
		allocatorFamily(func(a *api.Allocator, emit emit) {
			emit(float64(a.Allocated), "success")
			emit(float64(a.Failed), "fail")
		})},
}

// allocatorFamily is for a node that allocates identities.
func allocatorFamily(each func(*api.Allocator, emit)) func(*snapshot, emit) {
	return func(s *snapshot, emit emit) {
		if s.Allocator != nil {
			each(s.Allocator, emit)
		}
	}
}

// translationFamily is for a node whose devices translate packets to services.
func translationFamily(each func(*api.Translation, emit)) func(*snapshot, emit) {
	return func(s *snapshot, emit emit) {
		if of := s.Datapath.Services; of != nil && of.Translation != nil {
			each(of.Translation, emit)
		}
	}
}

// etcd is what is known of the etcd of one cluster.
type etcd struct {
	cluster, scope string
	connected      bool
	revision, lag  int64
	certificates   []api.Certificate
}

// etcds yields every etcd that the agent is a client of. Our own is followed for other nodes over a connection of its own.
func (s *snapshot) etcds(yield func(*etcd) bool) {
	if k := s.KVStore; k != nil && !yield(&etcd{s.Cluster.Name, "own", k.Connected, k.Revision, 0, k.Certificates}) {
		return
	}
	for c := range s.remotes {
		if !yield(&etcd{c.Name, "remote", c.Ready, c.Revision, c.Lag, c.Certificates}) {
			return
		}
	}
}

// etcdGauge is a family with one value for each etcd.
func etcdGauge(name, help string, value func(*etcd) float64) family {
	return family{"kvstore_" + name, help, []string{"cluster", "scope"}, prometheus.GaugeValue, func(s *snapshot, emit emit) {
		for e := range s.etcds {
			emit(value(e), e.cluster, e.scope)
		}
	}}
}

var kvstoreFamilies = []family{
	etcdGauge("connected", "1 if the etcd answers.", func(e *etcd) float64 { return bit(e.connected) }),
	etcdGauge("revision", "The newest revision that the etcd is known to have.", func(e *etcd) float64 { return float64(e.revision) }),
	etcdGauge("lag_revisions", "By how many revisions what is known trails the etcd.", func(e *etcd) float64 { return float64(e.lag) }),
	{"kvstore_initial_sync_completed", "1 if all keys of a kind have been read, or written, once over the present connection.",
		[]string{"scope", "source_cluster", "action"}, prometheus.GaugeValue, func(s *snapshot, emit emit) {
			for _, c := range s.Clusters {
				for _, scope := range slices.Sorted(maps.Keys(c.Synced)) {
					emit(bit(c.Synced[scope]), scope, c.Name, "read")
				}
			}
			if s.KVStore != nil {
				emit(bit(s.KVStore.Ready), "published", s.Cluster.Name, "write")
			}
		}},
	{"kvstore_sync_queue_size", "Changes that the own etcd does not have yet.", []string{"source_cluster"}, prometheus.GaugeValue,
		func(s *snapshot, emit emit) {
			if s.KVStore != nil {
				emit(float64(s.KVStore.Pending), s.Cluster.Name)
			}
		}},
	{"kvstore_published_keys", "Keys that this node keeps in the own etcd.", []string{"source_cluster"}, prometheus.GaugeValue,
		func(s *snapshot, emit emit) {
			if s.KVStore != nil {
				emit(float64(s.KVStore.Keys), s.Cluster.Name)
			}
		}},
	{"cert_not_after_seconds", "Until when the certificates of a role, client, server or ca, are all good, in seconds since 1970.",
		[]string{"cluster", "certificate"}, prometheus.GaugeValue, func(s *snapshot, emit emit) {
			for e := range s.etcds {
				until := make(map[string]time.Time)
				for _, c := range e.certificates {
					if first, ok := until[c.Role]; !ok || c.NotAfter.Before(first) {
						until[c.Role] = c.NotAfter
					}
				}
				for role, at := range until {
					emit(seconds(at), e.cluster, role)
				}
			}
		}},
}

const ipcacheMap = "ipcache"

// maps yields what there is of each map: of the ipcache, and of the table of services where there is one. Only what is written
// as entries can be pending; slots that are in pieces can be full before the last is taken.
func (s *snapshot) maps(yield func(string, *api.Map) bool) {
	t := s.Datapath.Services
	if !yield(ipcacheMap, &s.Datapath.Map) || t == nil {
		return
	}
	_ = yield("service_frontends", &api.Map{
		Entries: t.Frontends, MaxEntries: uint32(t.MaxFrontends), Pending: t.Pending, Unclaimed: t.Unclaimed,
	}) && yield("service_backends", &api.Map{Entries: t.Backends, MaxEntries: uint32(t.MaxBackends)}) &&
		yield("service_slots", &api.Map{Entries: t.Slots, MaxEntries: uint32(t.MaxSlots), Full: t.Full})
}

// mapGauge is a family with one value for each map.
func mapGauge(name, help string, value func(*api.Map) float64) family {
	return family{"bpf_map_" + name, help, []string{"map_name"}, prometheus.GaugeValue,
		func(s *snapshot, emit emit) {
			for name, m := range s.maps {
				emit(value(m), name)
			}
		}}
}

// serviceCount is a family about the kernel's table of services, where there is one.
func serviceCount(name, help, label string, kind prometheus.ValueType, values func(*api.ServiceTable, emit)) family {
	var labels []string
	if label != "" {
		labels = []string{label}
	}
	return family{"service_" + name, help, labels, kind, func(s *snapshot, emit emit) {
		if t := s.Datapath.Services; t != nil {
			values(t, emit)
		}
	}}
}

var kernelFamilies = []family{
	mapGauge("entries", "Entries of the map.", func(m *api.Map) float64 { return float64(m.Entries) }),
	mapGauge("capacity", "How many entries the map has room for.", func(m *api.Map) float64 { return float64(m.MaxEntries) }),
	mapGauge("pressure", "How full the map is, 1 being full.", func(m *api.Map) float64 {
		if m.Full {
			return 1
		}
		return float64(m.Entries) / float64(max(m.MaxEntries, 1))
	}),
	mapGauge("pending", "Changes that the kernel refused and that are tried again.", func(m *api.Map) float64 { return float64(m.Pending) }),
	mapGauge("unclaimed", "Entries found at the start that nobody has claimed yet.", func(m *api.Map) float64 { return float64(m.Unclaimed) }),
	{"bpf_map_ops_total", "Writes to the map.", []string{"map_name", "operation", "outcome"}, prometheus.CounterValue,
		func(s *snapshot, emit emit) {
			m := &s.Datapath.Map
			emit(float64(m.Written), ipcacheMap, "update", "success")
			emit(float64(m.Deleted), ipcacheMap, "delete", "success")
			emit(float64(m.Failures), ipcacheMap, "any", "fail")
		}},
	{"bpf_map_pruned_total", "Entries removed because nobody claims them.", []string{"map_name"}, prometheus.CounterValue,
		func(s *snapshot, emit emit) { emit(float64(s.Datapath.Map.Pruned), ipcacheMap) }},
	{"drift_total", "What somebody else changed in the kernel and was put right.", []string{"kind"},
		prometheus.CounterValue, func(s *snapshot, emit emit) {
			for _, kind := range datapath.Kinds() {
				emit(float64(s.Datapath.Drift[kind]), kind)
			}
		}},
	serviceCount("flows_total", "Flows to services: given a backend, and refused as there was none.", "outcome", prometheus.CounterValue,
		func(t *api.ServiceTable, emit emit) {
			emit(float64(t.Chosen), "chosen")
			emit(float64(t.Refused), "refused")
		}),
	serviceCount("writes_total", "Writes to the kernel's table of services: words of memory, calls to the kernel, and changes written aside.",
		"kind", prometheus.CounterValue, func(t *api.ServiceTable, emit emit) {
			emit(float64(t.Written), "word")
			emit(float64(t.Calls), "call")
			emit(float64(t.Rebuilds), "rebuild")
		}),
	serviceCount("write_errors_total", "Changes of the kernel's table of services that could not be made, and were tried again.", "",
		prometheus.CounterValue, func(t *api.ServiceTable, emit emit) { emit(float64(t.Failures)) }),
	serviceCount("affinities", "Clients that keep a backend.", "", prometheus.GaugeValue,
		func(t *api.ServiceTable, emit emit) { emit(float64(t.Affinities)) }),
	serviceCount("affinities_capacity", "How many clients can keep a backend; the oldest give way.", "", prometheus.GaugeValue,
		func(t *api.ServiceTable, emit emit) { emit(float64(t.MaxAffinities)) }),
	serviceCount("sockets_ended_total", "Connected UDP sockets that were ended as their backend was gone.", "", prometheus.CounterValue,
		func(t *api.ServiceTable, emit emit) { emit(float64(t.Destroyed)) }),
	{"service_translation_flows", "Flows to services whose packets are translated, as last counted, and the most there is room for.",
		[]string{"kind"}, prometheus.GaugeValue, translationFamily(func(t *api.Translation, emit emit) {
			emit(float64(t.Flows), "present")
			emit(float64(t.MaxFlows), "max")
		})},
	{"service_translation_begun_total", "Flows to services that were given a backend by programs at devices.", nil, prometheus.CounterValue,
		translationFamily(func(t *api.Translation, emit emit) { emit(float64(t.Begun)) })},
	{"service_translation_packets_total", "Packets of flows to services, by what became of them; refused, hairpin, clash and failed are dropped.",
		[]string{"outcome"}, prometheus.CounterValue, translationFamily(func(t *api.Translation, emit emit) {
			emit(float64(t.Requests), "request")
			emit(float64(t.Replies), "reply")
			emit(float64(t.Errors), "icmp")
			emit(float64(t.Refused), "refused")
			emit(float64(t.Hairpin), "hairpin")
			emit(float64(t.Clashes), "clash")
			emit(float64(t.Failed), "failed")
		})},
	{"service_translation_answers_total", "Packets dropped as refused or hairpin whose client was told, by a reset or as unreachable.", nil,
		prometheus.CounterValue, translationFamily(func(t *api.Translation, emit emit) { emit(float64(t.Answered)) })},
	single("pod_addresses", "Addresses of this node's own pods that are known at their devices.",
		func(s *snapshot) float64 { return float64(s.Datapath.Pods.Addresses) }),
	single("pod_addresses_missing", "Addresses of this node's own pods whose device is not found.",
		func(s *snapshot) float64 { return float64(len(s.Datapath.Pods.Missing)) }),
	single("reconcile_errors", "What of the kernel is not as it should be: devices, programs, routes.",
		func(s *snapshot) float64 { return float64(s.kernelErrors()) }),
	single("routes", "Routes to the pods of other nodes.", func(s *snapshot) float64 { return float64(s.Datapath.Routes) }),
	{"device_programs_attached", "Programs at work on the device.", []string{"device"}, prometheus.GaugeValue,
		func(s *snapshot, emit emit) {
			for _, d := range s.Datapath.Devices {
				attached := 0
				for _, p := range d.Programs {
					if p.Attached {
						attached++
					}
				}
				emit(float64(attached), d.Name)
			}
		}},
	{"flows_total", "Sampled packets: received from the kernel, and lost because nobody took them in time.", []string{"outcome"},
		prometheus.CounterValue, func(s *snapshot, emit emit) {
			emit(float64(s.Datapath.Flows.Received), "received")
			emit(float64(s.Datapath.Flows.Lost), "lost")
		}},
}

// kernelErrors counts what has an error now.
func (s *snapshot) kernelErrors() int {
	n := len(s.Datapath.Errors)
	if s.Datapath.Map.Error != "" {
		n++
	}
	for _, d := range s.Datapath.Devices {
		if d.Error != "" {
			n++
		}
		for _, p := range d.Programs {
			if p.Error != "" {
				n++
			}
		}
	}
	return n
}

// verdict names packets that are counted together.
type verdict struct{ direction, verdict, mode string }

// verdicts sums the counters of all identities.
func (s *snapshot) verdicts(value func(*counter) uint64, emit emit) {
	sums := make(map[verdict]uint64)
	for i := range s.counters {
		c := &s.counters[i]
		sums[verdict{c.Direction, c.Verdict, c.Mode}] += value(c)
	}
	for v, n := range sums {
		emit(float64(n), v.direction, v.verdict, v.mode)
	}
}

var packetFamilies = []family{
	{"packets_total", "Packets that the programs saw since the map was made, before the agent started too.",
		[]string{"direction", "verdict", "mode"}, prometheus.CounterValue,
		func(s *snapshot, emit emit) { s.verdicts(func(c *counter) uint64 { return c.Packets }, emit) }},
	{"packet_bytes_total", "Bytes of these packets, with the Ethernet header.", []string{"direction", "verdict", "mode"}, prometheus.CounterValue,
		func(s *snapshot, emit emit) { s.verdicts(func(c *counter) uint64 { return c.Bytes }, emit) }},
}
