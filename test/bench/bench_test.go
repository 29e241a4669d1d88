// SPDX-License-Identifier: Apache-2.0

// Package bench measures weft against bare baselines of the same run, since times of different runs, and of different
// machines, cannot be compared: what counts are the ratios.
package bench

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/mesh"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
	"github.com/weftmesh/weft/test/load"
)

// entries of a made-up cluster in the map: its workloads, and of each node two addresses and a pod prefix.
func entries(c load.Cluster) int { return c.Workloads + 3*c.Nodes() }

// BenchmarkEtcdToKernel measures the first sync of one cluster, from an etcd to the kernel's map, everything included,
// against (a) a bare range of the same keys, page by page, and (b) a bare batch update of the same map. etcd runs in a
// process of its own.
//
//	entries/s   weft, from the appearance of the cluster's config to the last entry in the map
//	x-range     time of (a) / time of weft; 1 is as fast as only reading the keys
//	x-batch     time of (b) / time of weft; 1 is as fast as only writing the map
//	x-both      (time of (a) + time of (b)) / time of weft
//	cpu-us      CPU time of this process for an entry, user and system, in microseconds
//	heap-B      Go heap for an entry when all is in place
func BenchmarkEtcdToKernel(b *testing.B) {
	for _, n := range []int{10_000, 100_000} {
		b.Run(fmt.Sprintf("%dk", n/1000), func(b *testing.B) {
			cluster := load.Cluster{Name: "west", ID: 2, Workloads: n, Identities: 500, Seed: 1}
			addDevice(b)
			etcd := startEtcd(b)
			client := dial(b, etcd)
			if err := cluster.Fill(b.Context(), client); err != nil {
				b.Fatal(err)
			}
			var pages, batches, all, cpu, heap float64
			rounds := 0
			for b.Loop() {
				rounds++
				pages += rangePages(b, client, "cilium/state/").Seconds()
				batches += writeBatches(b, cluster).Seconds()
				r := sync(b, etcd, cluster)
				all += r.took.Seconds()
				cpu += r.cpu.Seconds()
				heap += r.heap
			}
			perEntry := float64(entries(cluster) * rounds)
			b.ReportMetric(perEntry/all, "entries/s")
			b.ReportMetric(pages/all, "x-range")
			b.ReportMetric(batches/all, "x-batch")
			b.ReportMetric((pages+batches)/all, "x-both")
			b.ReportMetric(cpu*1e6/perEntry, "cpu-us")
			b.ReportMetric(heap/perEntry, "heap-B")
			b.ReportMetric(0, "ns/op")
		})
	}
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

// rangePages is baseline (a): one page after the other, at one revision, nothing decoded.
func rangePages(b *testing.B, client *clientv3.Client, prefix string) time.Duration {
	b.Helper()
	const page = 10_000
	start := time.Now()
	key, end, rev := prefix, clientv3.GetPrefixRangeEnd(prefix), int64(0)
	for {
		resp, err := client.Get(b.Context(), key, clientv3.WithRange(end), clientv3.WithLimit(page), clientv3.WithRev(rev))
		if err != nil {
			b.Fatal(err)
		}
		if !resp.More {
			return time.Since(start)
		}
		rev = resp.Header.Revision
		key = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
}

// writeBatches is baseline (b): keys and values are at hand, and are written into a fresh map of the same kind.
func writeBatches(b *testing.B, cluster load.Cluster) time.Duration {
	b.Helper()
	spec, err := bpf.Load()
	if err != nil {
		b.Fatal(err)
	}
	m, err := ebpf.NewMap(spec.Maps[bpf.MapIPCache])
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	keys := make([]bpf.IPCacheKey, 0, entries(cluster))
	values := make([]bpf.IPCacheValue, 0, entries(cluster))
	add := func(p netip.Prefix, id identity.ID, tunnel netip.Addr) {
		keys = append(keys, bpf.MakeIPCacheKey(p))
		values = append(values, bpf.MakeIPCacheValue(uint32(id), tunnel, 0, 0))
	}
	for key, value := range cluster.Keys() {
		if len(key) > len(ipcache.StatePrefix) && key[:len(ipcache.StatePrefix)] == ipcache.StatePrefix {
			a, err := ipcache.ParseAnnouncement([]byte(filepath.Base(key)), []byte(value))
			if err != nil {
				b.Fatal(err)
			}
			add(a.Prefix, a.Identity, a.Host)
		}
	}
	const batch = 4096
	start := time.Now()
	for i := 0; i < len(keys); i += batch {
		end := min(i+batch, len(keys))
		if _, err := m.BatchUpdate(keys[i:end], values[i:end], nil); err != nil {
			b.Fatal(err)
		}
	}
	return time.Since(start)
}

type result struct {
	took, cpu time.Duration
	heap      float64
}

func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func heapInUse() float64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// sync runs mesh and datapath until every entry is in the kernel's map.
func sync(b *testing.B, etcd string, cluster load.Cluster) result {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	bpffs, dir := testutil.MountBPFFS(b), b.TempDir()
	layout, err := identity.NewLayout(255)
	if err != nil {
		b.Fatal(err)
	}
	ips, nodes := ipcache.New(), node.NewTable()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	m, err := mesh.New(mesh.Config{
		Dir: dir, ClusterName: "east", ClusterID: 1, NodeName: "east-1", Layout: layout,
		IPs: ips, Nodes: nodes, Identities: identity.NewTable(), Services: service.NewTable(), Log: log,
	})
	if err != nil {
		b.Fatal(err)
	}
	d, err := datapath.New(datapath.Config{
		BPFFS: bpffs, Devices: []string{device}, RoutingMode: datapath.RoutingNone, MaxEntries: 1 << 20,
		ClusterName: "east", NodeName: "east-1", Layout: layout, IPs: ips, Nodes: nodes, Listed: m.Listed, Log: log,
	})
	if err != nil {
		b.Fatal(err)
	}
	errs := make(chan error, 2)
	go func() { errs <- d.Run(ctx) }()
	go func() { errs <- m.Run(ctx) }()
	select {
	case <-d.Ready():
	case err := <-errs:
		b.Fatalf("ended early: %v", err)
	}
	heap, cpu, start := heapInUse(), cpuTime(b), time.Now()
	config := fmt.Appendf(nil, "endpoints:\n- %s\n", etcd)
	if err := os.WriteFile(filepath.Join(dir, cluster.Name), config, 0o600); err != nil {
		b.Fatal(err)
	}
	for d.Status().IPCache.Entries < entries(cluster) {
		if time.Since(start) > 2*time.Minute {
			b.Fatalf("only %d of %d entries are in the map", d.Status().IPCache.Entries, entries(cluster))
		}
		time.Sleep(500 * time.Microsecond)
	}
	r := result{took: time.Since(start), cpu: cpuTime(b) - cpu, heap: heapInUse() - heap}
	cancel()
	for range 2 {
		if err := <-errs; err != nil {
			b.Fatal(err)
		}
	}
	return r
}
