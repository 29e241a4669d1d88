// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/endpoint"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
)

// local is that part of weft's agent which tells others of the workloads of its node.
type local struct {
	client    *kvstore.Client
	writer    *kvstore.Writer
	allocator *endpoint.Allocator
	added     *endpoint.Manual
	registry  *endpoint.Registry
	stop      func()
}

// startLocal runs it, without bounds on its requests; the allocator alone, if it is not to hear of workloads.
func startLocal(b *testing.B, etcd *server, alone bool) *local {
	b.Helper()
	layout, err := identity.NewLayout(255)
	if err != nil {
		b.Fatal(err)
	}
	log, dir, host := slog.New(slog.DiscardHandler), b.TempDir(), netip.MustParseAddr("172.18.2.1")
	l := &local{}
	must := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	l.client, err = kvstore.Dial(kvstore.Config{Endpoints: []string{etcd.endpoint}, QPS: 1_000_000, BootstrapQPS: 1_000_000}, log)
	must(err)
	l.writer = kvstore.NewWriter(l.client, kvstore.WriterConfig{Log: log})
	l.allocator, err = endpoint.NewAllocator(endpoint.AllocatorConfig{
		Client: l.client, ClusterName: "west", ClusterID: 2, Layout: layout, StateDir: dir, HostIP: host, Observe: l.writer.Observe, Log: log,
	})
	must(err)
	l.added, err = endpoint.NewManual(endpoint.ManualConfig{Dir: dir, ClusterName: "west", ClusterID: 2, Layout: layout, Log: log})
	must(err)
	filter, err := identity.NewFilter()
	must(err)
	l.registry, err = endpoint.New(endpoint.Config{
		Sources: []endpoint.Source{l.added}, ClusterName: "west", ClusterID: 2, NodeName: "west-n1", HostIP: host, Filter: filter,
		IPs: ipcache.New(), Identities: identity.NewTable(), Allocator: l.allocator, Publisher: l.writer, Leftovers: l.client, Log: log,
	})
	must(err)
	ctx, cancel := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	runs := []func(context.Context) error{l.writer.Run, l.allocator.Run, l.added.Run, l.registry.Run}
	if alone {
		runs = runs[:2]
	}
	for _, run := range runs {
		tasks.Go(func() {
			if err := run(ctx); err != nil {
				b.Error(err)
			}
		})
	}
	l.stop = sync.OnceFunc(func() {
		cancel()
		tasks.Wait()
		_ = l.client.Close()
	})
	b.Cleanup(l.stop)
	<-l.allocator.Ready()
	if !alone {
		<-l.registry.Ready()
	}
	return l
}

// labelSets are n sets of labels that nobody has yet.
func labelSets(run string, n int) map[string]identity.Labels {
	sets := make(map[string]identity.Labels, n)
	for i := range n {
		labels := identity.MakeLabels(
			identity.Label{Source: identity.SourceK8s, Key: "app", Value: run + "-" + strconv.Itoa(i)},
			identity.Label{Source: identity.SourceK8s, Key: identity.LabelCluster, Value: "west"},
			identity.Label{Source: identity.SourceK8s, Key: identity.LabelNamespace, Value: "shop"},
		)
		sets[labels.String()] = labels
	}
	return sets
}

// BenchmarkAllocation measures one agent that finds identities for 10,000 sets of labels that are new to the cluster.
//
//	identities/s  weft
//	x-bare        against a plain client that makes the two transactions of each identity, as many at once
//	requests      to etcd, for each identity: new ones, and those that the node has already
func BenchmarkAllocation(b *testing.B) {
	const n = 10_000
	etcd := startServer(b)
	for run := 0; b.Loop(); run++ {
		settle(b)
		bare := bareAllocation(b, etcd, run, n)
		settle(b)
		l := startLocal(b, etcd, true)
		sets := labelSets(fmt.Sprintf("weft%d", run), n)
		before, begun := l.client.Status().Calls, time.Now()
		l.allocator.Want(sets, true)
		l.settled(b)
		took := time.Since(begun)
		calls := l.client.Status().Calls
		progress(b, "weft %s, bare %s", took, bare)
		measured(b, "identities/s", n/took.Seconds(), goal{what: "10k new label sets: identities/s", atLeast: 1000})
		measured(b, "x-bare", bare.Seconds()/took.Seconds(), goal{what: "10k new label sets: rate / bare transactions"})
		measured(b, "requests", float64(calls-before)/n, goal{what: "requests to etcd for a new identity", atMost: 4})
		again := maps.Clone(sets)
		l.allocator.Want(again, true)
		l.settled(b)
		known := l.client.Status().Calls - calls
		measured(b, "requests-known", float64(known)/n, goal{what: "requests to etcd for one that the node has"})
		if known > 10 { // leases are renewed meanwhile
			b.Errorf("%d requests for identities that the node has", known)
		}
		l.stop()
	}
	b.ReportMetric(0, "ns/op")
}

func (l *local) settled(b *testing.B) {
	b.Helper()
	for end := time.After(patience); ; {
		changed := l.allocator.Changed()
		if s := l.allocator.Status(); s.Waiting == 0 {
			return
		}
		select {
		case <-changed:
		case <-end:
			b.Fatalf("identities are missing: %+v", l.allocator.Status())
		}
	}
}

// bareAllocation makes the two transactions that an identity takes: one that puts the key of a lock and reads who holds it,
// one that writes two keys if it is held, and deletes it.
func bareAllocation(b *testing.B, etcd *server, run, n int) time.Duration {
	b.Helper()
	const parallel = 64
	client := dial(b, etcd.endpoint)
	lease, err := client.Grant(b.Context(), 600)
	if err != nil {
		b.Fatal(err)
	}
	under := clientv3.WithLease(lease.ID)
	one := func(labels string, id int) error {
		path := "bare/locks/" + labels
		key := fmt.Sprintf("%s/%x", path, int64(lease.ID))
		locked, err := client.Txn(b.Context()).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
			Then(clientv3.OpPut(key, "", under), clientv3.OpGet(path+"/", clientv3.WithFirstCreate()...)).Commit()
		if err != nil {
			return err
		}
		_, err = client.Txn(b.Context()).If(clientv3.Compare(clientv3.CreateRevision(key), "=", locked.Header.Revision)).
			Then(clientv3.OpPut(fmt.Sprintf("bare/id/%d-%d", run, id), labels), clientv3.OpPut("bare/value/"+labels+"/172.18.2.1", strconv.Itoa(id), under),
				clientv3.OpDelete(key)).Commit()
		return err
	}
	work := slices.Collect(maps.Keys(labelSets(fmt.Sprintf("bare%d", run), n)))
	next := make(chan int)
	errs := make(chan error, parallel)
	begun := time.Now()
	for range parallel {
		go func() {
			var failed error
			for i := range next {
				if err := one(work[i], i); err != nil {
					failed = err
				}
			}
			errs <- failed
		}()
	}
	for i := range n {
		next <- i
	}
	close(next)
	for range parallel {
		if err := <-errs; err != nil {
			b.Fatal(err)
		}
	}
	return time.Since(begun)
}

// describeWest puts what others read of the cluster and of the node before its workloads.
func describeWest(b *testing.B, etcd *server) {
	b.Helper()
	client := dial(b, etcd.endpoint)
	for key, value := range map[string]string{
		"cilium/cluster-config/west":           `{"id":2,"capabilities":{"maxConnectedClusters":255}}`,
		"cilium/state/nodes/v1/west/west-n1":   `{"Name":"west-n1","Cluster":"west","IPAddresses":[{"Type":"InternalIP","IP":"172.18.2.1"}],"ClusterID":2}`,
		"cilium/state/ip/v1/default/10.2.0.99": `{"IP":"10.2.0.99","Mask":null,"HostIP":"172.18.2.1","ID":131072,"Key":0,"Metadata":""}`,
	} {
		if _, err := client.Put(b.Context(), key, value); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkEndpoint measures how long it takes from the moment at which somebody adds a workload to the agent of one cluster
// until the kernel of a node of another cluster knows it, for labels that the node has already and for new ones: what was
// added is on disk, the identity is allocated, both are in etcd, the other agent has read them.
func BenchmarkEndpoint(b *testing.B) {
	const samples = 200
	etcd := startServer(b)
	describeWest(b, etcd)
	remote := startAgent(b, newPlace(b))
	remote.place.join(b, etcd, "west")
	remote.await(b, "listed", 1)
	kernel, err := datapath.OpenIPCache(remote.place.BPFFS)
	if err != nil {
		b.Fatal(err)
	}
	defer kernel.Close()
	l := startLocal(b, etcd, false)
	n := 0
	add := func(app string) time.Duration {
		n++
		addr := netip.AddrFrom4([4]byte{10, 2, byte(1 + n>>8), byte(n)})
		begun := time.Now()
		if _, err := l.added.Put(fmt.Appendf(nil, `{"name":"pod-%d","namespace":"shop","ip":%q,"labels":{"app":%q}}`, n, addr, app)); err != nil {
			b.Fatal(err)
		}
		for {
			_, ok, err := kernel.Lookup(addr)
			switch took := time.Since(begun); {
			case err == nil && ok:
				return took
			case took > patience:
				b.Fatalf("%s is not known: %v", addr, err)
			}
			time.Sleep(20 * time.Microsecond)
		}
	}
	add("known")
	for b.Loop() {
		for _, kind := range []string{"known", "new"} {
			var took []time.Duration
			for i := range samples {
				app := kind
				if kind == "new" {
					app = fmt.Sprintf("new-%d-%d", n, i)
				}
				took = append(took, add(app))
			}
			slices.Sort(took)
			what := "workload added → another cluster's kernel, " + kind + " labels: "
			measured(b, kind+"-p50-ms", took[len(took)/2].Seconds()*1e3, goal{what: what + "p50", unit: "ms", atMost: 20})
			measured(b, kind+"-p99-ms", took[len(took)*99/100].Seconds()*1e3, goal{what: what + "p99", unit: "ms", atMost: 100})
		}
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkEndpointHeap measures the heap of a workload of this node: what declares it, its claim, its keys, its status.
func BenchmarkEndpointHeap(b *testing.B) {
	const n, sets = 2000, 200
	etcd := startServer(b)
	describeWest(b, etcd)
	for b.Loop() {
		l := startLocal(b, etcd, false)
		before := heapInUse()
		for i := range n {
			given := fmt.Appendf(nil, `{"name":"pod-%d","namespace":"shop","ip":"10.2.%d.%d","labels":{"app":"app-%d","tier":"backend","team":"shop"}}`,
				i, 1+i>>8, i&0xff, i%sets)
			if _, err := l.added.Put(given); err != nil {
				b.Fatal(err)
			}
		}
		for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
			s := l.registry.Status()
			if len(s.Endpoints) == n && !slices.ContainsFunc(s.Endpoints, func(e endpoint.Endpoint) bool { return e.State != endpoint.Identified }) {
				break
			}
			if time.Now().After(end) {
				b.Fatalf("%d workloads are known", len(s.Endpoints))
			}
		}
		if err := l.writer.Flush(b.Context()); err != nil {
			b.Fatal(err)
		}
		measured(b, "heap-KiB", (heapInUse()-before)/n/1024, goal{what: "Go heap of a workload of this node", unit: "KiB", atMost: 4})
		l.stop()
	}
	b.ReportMetric(0, "ns/op")
}
