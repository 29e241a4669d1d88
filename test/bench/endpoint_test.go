// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/endpoint"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
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

// startLocal runs it, without bounds on its requests; the allocator alone, if it is not to hear of workloads. Sources are those
// besides the one that the API writes to.
func startLocal(b *testing.B, etcd *server, alone bool, sources ...endpoint.Source) *local {
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
		Sources: append(sources, l.added), ClusterName: "west", ClusterID: 2, NodeName: "west-n1", HostIP: host, Filter: filter,
		IPs: ipcache.New(), Identities: identity.NewTable(), Allocator: l.allocator, Publisher: l.writer, Leftovers: l.client, Log: log,
	})
	must(err)
	ctx, cancel := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	runs := []func(context.Context) error{l.writer.Run, l.allocator.Run, l.added.Run, l.registry.Run}
	for _, source := range sources {
		runs = append(runs, source.Run)
	}
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

// BenchmarkEndpoint measures how long it takes until the kernel of a node of another cluster knows a workload, for labels that
// the node has already and for new ones: of a pod from the moment at which the API server has stored its address, and of one
// that somebody adds through the API from before it is written to disk. The identity is allocated, it and the address are put into
// etcd, the other agent has read them. A plain client's put that a plain client's watch sees is measured among them: known labels
// take one of those, new ones three in a row.
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
	pods := newPodBench(b)
	l := startLocal(b, etcd, false, pods.source)
	n := 0
	// await waits until the kernel knows an address, or knows it no more, and returns when that was.
	await := func(addr netip.Addr, there bool) time.Time {
		for end := time.Now().Add(patience); ; time.Sleep(20 * time.Microsecond) {
			_, ok, err := kernel.Lookup(addr)
			switch now := time.Now(); {
			case err == nil && ok == there:
				return now
			case now.After(end):
				b.Fatalf("%s is known: %t, want %t: %v", addr, ok, there, err)
			}
		}
	}
	add := func(from bencher, app string) (name string, addr netip.Addr, took time.Duration) {
		n++
		name, addr = fmt.Sprintf("pod-%d", n), netip.AddrFrom4([4]byte{10, 2, byte(1 + n>>8), byte(n)})
		begun := from.add(name, app, addr)
		return name, addr, await(addr, true).Sub(begun)
	}
	api := addedBench{b, l.added}
	for range 100 { // as many as a node has
		add(api, "known")
	}
	seen := bareWatch(b, etcd)
	for run := 0; b.Loop(); run++ {
		took := make(map[string][]time.Duration)
		sample := func(kind string, from bencher, app string) {
			name, addr, appeared := add(from, app)
			took[kind] = append(took[kind], appeared)
			begun := from.remove(name)
			took["gone"] = append(took["gone"], await(addr, false).Sub(begun))
		}
		for i := range samples { // in turns, so that what the machine does meanwhile is the same for all
			unique := fmt.Sprintf("new-%d-%d", run, i)
			took["bare"] = append(took["bare"], seen(i))
			sample("pod-known", pods, "known")
			sample("pod-new", pods, "pod-"+unique)
			sample("api-known", api, "known")
			sample("api-new", api, "api-"+unique)
		}
		for _, kind := range []struct {
			name, what string
			p50, p99   float64
		}{
			{"bare", "bare put → watch", 0, 0},
			{"pod-known", "pod → another cluster's kernel, known labels", 20, 100},
			{"pod-new", "pod → another cluster's kernel, new labels", 20, 100},
			{"api-known", "added by API, on disk → another cluster's kernel, known labels", 0, 0},
			{"api-new", "added by API, on disk → another cluster's kernel, new labels", 0, 0},
			{"gone", "removed → gone from another cluster's kernel", 0, 1000},
		} {
			all := took[kind.name]
			slices.Sort(all)
			measured(b, kind.name+"-p50-ms", all[len(all)/2].Seconds()*1e3, goal{what: kind.what + ": p50", unit: "ms", atMost: kind.p50})
			measured(b, kind.name+"-p99-ms", all[len(all)*99/100].Seconds()*1e3, goal{what: kind.what + ": p99", unit: "ms", atMost: kind.p99})
		}
	}
	b.ReportMetric(0, "ns/op")
}

// bencher is where workloads come from. Its methods return when that was told of which the effect is waited for.
type bencher interface {
	add(name, app string, addr netip.Addr) time.Time
	remove(name string) time.Time
}

// addedBench adds workloads as somebody does through the API.
type addedBench struct {
	b     *testing.B
	added *endpoint.Manual
}

func (a addedBench) add(name, app string, addr netip.Addr) time.Time {
	begun := time.Now()
	if _, err := a.added.Put(fmt.Appendf(nil, `{"name":%q,"namespace":"shop","ip":%q,"labels":{"app":%q}}`, name, addr, app)); err != nil {
		a.b.Fatal(err)
	}
	return begun
}

func (a addedBench) remove(name string) time.Time {
	begun := time.Now()
	if err := a.added.Remove("shop", name); err != nil {
		a.b.Fatal(err)
	}
	return begun
}

// podBench is an API server with pods of one node, and the source that follows them.
type podBench struct {
	b      *testing.B
	server *testutil.KubeAPIServer
	source *endpoint.Kubernetes
	stored chan podStored
}

// podStored is that the server has written something about a pod.
type podStored struct {
	at   time.Time
	gone bool
}

func newPodBench(b *testing.B) *podBench {
	b.Helper()
	etcd := testutil.StartEtcd(b)
	p := &podBench{b: b, server: testutil.StartKubeAPIServer(b, etcd), stored: make(chan podStored, 100)}
	p.server.Create(b, "/api/v1/namespaces", `{"metadata": {"name": "shop"}}`)
	kubeconfig := filepath.Join(b.TempDir(), "kubeconfig")
	p.server.WriteKubeconfig(b, kubeconfig, "", "")
	var err error
	p.source, err = endpoint.NewKubernetes(endpoint.KubernetesConfig{Kubeconfig: kubeconfig, NodeName: "west-n1", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	events := etcd.Client().Watch(b.Context(), "/registry/pods/", clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	<-events
	go func() {
		for resp := range events {
			now := time.Now()
			for _, e := range resp.Events {
				p.stored <- podStored{now, e.Type == clientv3.EventTypeDelete}
			}
		}
	}()
	return p
}

// add makes a pod and gives it an address, as a kubelet does, and returns when the server had stored that.
func (p *podBench) add(name, app string, addr netip.Addr) time.Time {
	const pods = "/api/v1/namespaces/shop/pods"
	p.server.Create(p.b, pods, fmt.Sprintf(`{"metadata": {"name": %q, "labels": {"app": %q}}, "spec": {"nodeName": "west-n1", "containers": [{"name": "c", "image": "i"}]}}`, name, app))
	p.await(false)
	p.server.Patch(p.b, pods+"/"+name+"/status", fmt.Sprintf(`{"status": {"phase": "Running", "podIP": %q, "podIPs": [{"ip": %q}]}}`, addr, addr))
	return p.await(false)
}

func (p *podBench) remove(name string) time.Time {
	p.server.Delete(p.b, "/api/v1/namespaces/shop/pods/"+name)
	return p.await(true)
}

// await waits until the server has written that a pod is there, or is gone, and returns when that was.
func (p *podBench) await(gone bool) time.Time {
	for {
		if s := <-p.stored; s.gone == gone {
			return s.at
		}
	}
}

// bareWatch returns what measures how long it takes until a plain client's watch tells of a plain client's put.
func bareWatch(b *testing.B, etcd *server) func(i int) time.Duration {
	b.Helper()
	writer, reader := dial(b, etcd.endpoint), dial(b, etcd.endpoint)
	events := reader.Watch(b.Context(), "bare/watched", clientv3.WithCreatedNotify())
	<-events
	return func(i int) time.Duration {
		begun := time.Now()
		if _, err := writer.Put(b.Context(), "bare/watched", strconv.Itoa(i)); err != nil {
			b.Fatal(err)
		}
		select {
		case <-events:
			return time.Since(begun)
		case <-time.After(patience):
			b.Fatal("the watch tells nothing of a put")
			return 0
		}
	}
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
