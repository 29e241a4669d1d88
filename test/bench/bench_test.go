// SPDX-License-Identifier: Apache-2.0

// Package bench measures weft against bare baselines of the same run, since times of different runs, and of different
// machines, cannot be compared: what counts are the ratios.
package bench

import (
	"fmt"
	"os"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/test/load"
)

// long makes some benchmarks take the time that their targets name.
var long = os.Getenv("WEFT_BENCH_LONG") != ""

// BenchmarkEtcdToKernel measures the first sync of one cluster, from an etcd to the kernel's map, everything included,
// against the bare pipeline. etcd, weft and the bare pipeline run in processes of their own.
//
//	entries/s  weft, from the appearance of the cluster's config to the last entry in the map
//	x-bare     entries/s of weft / entries/s of the bare pipeline
//	cpu-us     CPU time of the agent's process for an entry, user and system, in microseconds
//	x-cpu      CPU time of the bare pipeline for an entry / that of weft
//	heap-B     Go heap for an entry when all is in place
//	peak-MiB   the agent's resident memory at its peak
func BenchmarkEtcdToKernel(b *testing.B) {
	for _, n := range []int{10_000, 100_000, 500_000} {
		b.Run(fmt.Sprintf("%dk", n/1000), func(b *testing.B) {
			cluster := load.Cluster{Name: "west", ID: 2, Workloads: n, Identities: 500, Seed: 1}
			etcd := startServer(b)
			etcd.fill(b, cluster)
			var atLeast, cpu, heap float64
			if n == 500_000 {
				atLeast, cpu, heap = 0.5, 5, 150
			}
			what := fmt.Sprintf("first sync of %dk entries: ", n/1000)
			for b.Loop() {
				for range 3 { // taken in turn, against the machine's moods
					compareSyncs(b, etcd, cluster, [...]goal{
						{what: what + "rate / bare pipeline", atLeast: atLeast},
						{what: what + "rate", unit: "entries/s"},
						{what: what + "CPU an entry", unit: "µs", atMost: cpu},
						{what: what + "Go heap an entry", unit: "B", atMost: heap},
						{what: what + "peak of resident memory", unit: "MiB"},
					})
				}
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// compareSyncs measures one sync by the bare pipeline and one by weft.
func compareSyncs(b *testing.B, etcd *server, cluster load.Cluster, goals [5]goal) {
	b.Helper()
	workloads, entries := float64(cluster.Workloads), float64(cluster.Entries())
	settle(b)
	bare := runBare(b, etcd, cluster.WorkloadPrefix(), cluster.Workloads)
	settle(b)
	s := firstSync(b, etcd, cluster)
	s.agent.end()
	progress(b, "weft %s, bare %s", s.took, bare.Took)
	rate := entries / s.took.Seconds()
	measured(b, "x-bare", rate/(workloads/bare.Took.Seconds()), goals[0])
	measured(b, "entries/s", rate, goals[1])
	measured(b, "cpu-us", s.cpu.Seconds()*1e6/entries, goals[2])
	measured(b, "heap-B", s.heap/entries, goals[3])
	measured(b, "peak-MiB", s.peak, goals[4])
	b.ReportMetric(bare.CPU.Seconds()/workloads/(s.cpu.Seconds()/entries), "x-cpu")
	b.ReportMetric(bare.Heap/workloads, "bare-heap-B")
}

// synced is an agent that has brought a whole cluster into the kernel.
type synced struct {
	agent      *agent
	took, cpu  time.Duration
	heap, peak float64
}

func firstSync(b *testing.B, etcd *server, cluster load.Cluster) synced {
	b.Helper()
	a := startAgent(b, newPlace(b))
	before := a.now(b)
	start := a.place.join(b, etcd, cluster.Name)
	done := a.await(b, "written", cluster.Entries())
	after := a.now(b)
	return synced{agent: a, took: done.At - start, cpu: done.CPU - before.CPU, heap: after.Heap - before.Heap, peak: after.Peak}
}

// BenchmarkMillion measures what a cluster of a million workloads costs, through its life: first sync, an agent that is
// killed and started again over unchanged entries, and the drain when the config is removed.
//
//	peak-MiB    the agent's resident memory at its peak, from first sync to restart
//	restart-s   from the start of the second agent until all entries are known to be right; it writes none of them
//	drain-s     from the removal of the config until the last entry is gone
//
// lesson: L1 L5
func BenchmarkMillion(b *testing.B) {
	cluster := load.Cluster{Name: "west", ID: 2, Workloads: 1_000_000, Identities: 500, Seed: 1}
	etcd := startServer(b)
	etcd.fill(b, cluster)
	for b.Loop() {
		settle(b)
		bare := runBare(b, etcd, cluster.WorkloadPrefix(), cluster.Workloads)
		settle(b)
		s := firstSync(b, etcd, cluster)
		entries := float64(cluster.Entries())
		progress(b, "first sync in %s, bare %s; killing the agent and starting another", s.took, bare.Took)
		x := entries / s.took.Seconds() / (float64(cluster.Workloads) / bare.Took.Seconds())
		measured(b, "x-bare", x, goal{what: "first sync of 1M entries: rate / bare pipeline"})
		measured(b, "entries/s", entries/s.took.Seconds(), goal{what: "first sync of 1M entries: rate", unit: "entries/s"})
		measured(b, "cpu-us", s.cpu.Seconds()*1e6/entries, goal{what: "first sync of 1M entries: CPU an entry", unit: "µs"})
		measured(b, "peak-MiB", s.peak, goal{what: "1M entries: peak of resident memory", unit: "MiB", atMost: 400})
		_ = s.agent.cmd.Process.Kill()
		s.agent.end()
		settle(b)

		start := clock()
		a := startAgent(b, s.agent.place)
		done := a.await(b, "adopted", cluster.Entries())
		progress(b, "restarted in %s; removing the cluster's config", done.At-start)
		measured(b, "restart-s", (done.At - start).Seconds(), goal{what: "restart over 1M unchanged entries", unit: "s", atMost: 3})
		measured(b, "restart-writes", float64(done.Map.Written), goal{what: "restart over 1M unchanged entries: written"})
		measured(b, "restart-peak-MiB", done.Peak, goal{what: "restart over 1M entries: peak of resident memory", unit: "MiB", atMost: 400})
		if done.Map.Written != 0 {
			b.Errorf("the second agent wrote %d entries, want none", done.Map.Written)
		}
		a.rest(b)
		const still = 25 * time.Second
		before, began := a.await(b, "written", 0), clock()
		time.Sleep(still)
		after, lasted := a.await(b, "written", 0), clock()-began
		measured(b, "rest-percent", 100*(after.CPU-before.CPU).Seconds()/lasted.Seconds(),
			goal{what: "1M entries compared over and over: CPU", unit: "% of a core", atMost: 5})
		if !after.Map.VerifiedAt.After(before.Map.VerifiedAt) {
			b.Errorf("the map was not compared as a whole in %s", lasted)
		}
		start = a.leave(b, cluster.Name)
		done = a.await(b, "deleted", cluster.Entries())
		measured(b, "drain-s", (done.At - start).Seconds(), goal{what: "drain of 1M entries", unit: "s", atMost: 10})
		a.end()
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkClusters measures a mesh of 255 clusters, each of 100 nodes, 1,000 workloads and 100 identities, of which one
// etcd holds the copies.
//
//	ready-s       from the start of the agent until every cluster is listed and every entry is in the map
//	resident-MiB  the agent's resident memory soon after, when what the lists needed is given back
//	peak-MiB      and at its peak
//	rest-percent  CPU time of the agent's process for 10 s in which nothing happens, in percent of one core
//
// lesson: L4
func BenchmarkClusters(b *testing.B) {
	const own, count = 1, 255
	etcd := startServer(b)
	var clusters []load.Cluster
	entries := 0
	progress(b, "filling etcd with %d clusters", count-own)
	for id := own + 1; id <= count; id++ {
		c := load.Cluster{
			Name: fmt.Sprintf("c%03d", id), ID: identity.ClusterID(id), Nodes: 100, Workloads: 1000, Identities: 100, Cached: true, Seed: 1,
		}
		etcd.order(b, order{Do: "fill", Cluster: &c})
		etcd.done(b)
		clusters, entries = append(clusters, c), entries+c.Entries()
	}
	for b.Loop() {
		settle(b)
		place := newPlace(b)
		for _, c := range clusters {
			place.join(b, etcd, c.Name)
		}
		start := clock()
		a := startAgent(b, place)
		a.await(b, "written", entries)
		done := a.await(b, "listed", len(clusters))
		progress(b, "ready after %s", done.At-start)
		measured(b, "ready-s", (done.At - start).Seconds(), goal{what: "254 remote clusters: ready", unit: "s", atMost: 10})
		measured(b, "resident-MiB", a.rest(b).Resident, goal{what: "254 remote clusters: resident memory", unit: "MiB", atMost: 200})
		measured(b, "peak-MiB", done.Peak, goal{what: "254 remote clusters: peak of resident memory", unit: "MiB"})
		before := a.await(b, "written", 0)
		time.Sleep(10 * time.Second)
		after := a.await(b, "written", 0)
		measured(b, "rest-percent", 100*(after.CPU-before.CPU).Seconds()/(after.At-before.At).Seconds(),
			goal{what: "254 remote clusters: CPU at rest", unit: "% of a core", atMost: 5})
		b.ReportMetric(done.CPU.Seconds()*1e6/float64(entries), "cpu-us")
		a.end()
	}
	b.ReportMetric(0, "ns/op")
}

func dial(b *testing.B, endpoint string) *clientv3.Client {
	b.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, MaxCallRecvMsgSize: 1 << 30})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = client.Close() })
	return client
}

type result struct {
	took, cpu time.Duration
	heap      float64
}
