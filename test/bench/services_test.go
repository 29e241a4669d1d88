// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/mesh"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

// BenchmarkServices follows 10,000 services of 10 backends in each of four clusters, all local and global here, from their
// etcds into selections.
//
//	s/merge    from the start of the mesh until a reader of the table has all backends of all services
//	B/service  of heap for each service of each cluster: what the mesh and the table hold of it, local services and selections included
func BenchmarkServices(b *testing.B) {
	const clusters, services, pods = 4, 10_000, 10
	for b.Loop() {
		b.StopTimer()
		dir := b.TempDir()
		for c := range clusters {
			fillServices(b, dir, c, services, pods)
		}
		layout, err := identity.NewLayout(255)
		if err != nil {
			b.Fatal(err)
		}
		table := service.NewTable()
		for i := range services {
			table.PutLocal(service.Local{
				Service: service.Name{Namespace: "shop", Name: fmt.Sprint("service-", i)}, Settings: service.Settings{Global: true},
				Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})}, Ports: []service.NamedPort{{Name: "http", Protocol: service.TCP, Port: 80}},
			})
		}
		m, err := mesh.New(mesh.Config{
			Dir: dir, ClusterName: "here", ClusterID: 9, NodeName: "here-1", Layout: layout,
			IPs: ipcache.New(), Nodes: node.NewTable(), Identities: identity.NewTable(), Services: table, Log: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		begun := time.Now()
		b.StartTimer()
		go func() { done <- m.Run(ctx) }()
		served := awaitServed(b, table, services, clusters*pods)
		measured(b, "s/merge", time.Since(begun).Seconds(), goal{what: "10,000 services × 10 backends × 4 clusters from etcd into selections", unit: "s", atMost: 5})
		b.StopTimer()
		if served < services {
			b.Fatalf("%d frontends changed", served)
		}
		cancel()
		if err := <-done; err != nil {
			b.Fatal(err)
		}
		held := heapInUse()
		runtime.KeepAlive(m)
		runtime.KeepAlive(table)
		m, table = nil, nil
		held -= heapInUse()
		measured(b, "B/service", held/(clusters*services), goal{what: "the same: heap for a service of a cluster", unit: "B", atMost: 1536})
		b.StartTimer()
	}
}

// awaitServed follows the changes, as the kernel's writer does, until each frontend has so many backends.
func awaitServed(b *testing.B, table *service.Table, frontends, backends int) (changes int) {
	has := make(map[service.Frontend]int)
	at, whole := service.Revision{}, 0
	limit := time.After(time.Minute)
	for whole < frontends {
		changed := table.Changed()
		batch, next, _ := table.Changes(at, 256)
		at = next
		for _, c := range batch {
			s, _ := table.Select(c.Frontend) // Added and Removed may tell again what is known
			if len(s.Backends) == backends && has[c.Frontend] != backends {
				whole++
			}
			has[c.Frontend] = len(s.Backends)
			changes++
		}
		if len(batch) > 0 {
			continue
		}
		select {
		case <-changed:
		case <-limit:
			b.Fatalf("%d of %d frontends have all their backends", whole, frontends)
		}
	}
	return changes
}

// fillServices starts the etcd of a cluster with so many services, and writes its config into dir.
func fillServices(b *testing.B, dir string, c, services, pods int) {
	b.Helper()
	name := fmt.Sprint("cluster-", c)
	etcd := testutil.StartEtcd(b)
	keys := map[string]string{
		"cilium/cluster-config/" + name: fmt.Sprintf(`{"id":%d,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255}}`, c+1),
	}
	for _, kind := range []string{"nodes", "services", "identities", "ip"} {
		keys[fmt.Sprintf("cilium/synced/%s/cilium/state/%s/v1", name, kind)] = "2026-11-20T22:37:21Z"
	}
	for i := range services {
		s := service.Service{
			Cluster: name, ClusterID: uint32(c + 1), Namespace: "shop", Name: fmt.Sprint("service-", i), Shared: true, IncludeExternal: true,
			Frontends: map[netip.Addr]service.Ports{netip.AddrFrom4([4]byte{10, 112 + byte(c), byte(i >> 8), byte(i)}): {"http": {Protocol: "TCP", Port: 80}}},
			Backends:  make(map[netip.Addr]service.Ports), Labels: map[string]string{"app": "web"}, Selector: map[string]string{"app": "web"},
		}
		for p := range pods {
			n := i*pods + p
			s.Backends[netip.AddrFrom4([4]byte{10, byte(10*(c+1)) + byte(n>>16), byte(n >> 8), byte(n)})] = service.Ports{"http": {Protocol: "TCP", Port: 8080}}
		}
		value, err := json.Marshal(s)
		if err != nil {
			b.Fatal(err)
		}
		keys[service.StatePrefix+"/"+name+"/shop/"+s.Name] = string(value)
	}
	putAll(b, etcd, keys)
	etcd.WriteConfig(b, filepath.Join(dir, name))
}

// putAll writes keys by the hundred.
func putAll(b *testing.B, etcd *testutil.Etcd, keys map[string]string) {
	b.Helper()
	const most = 100
	var ops []clientv3.Op
	commit := func() {
		if _, err := etcd.Client().Txn(b.Context()).Then(ops...).Commit(); err != nil {
			b.Fatal(err)
		}
		ops = ops[:0]
	}
	for key, value := range keys {
		if ops = append(ops, clientv3.OpPut(key, value)); len(ops) == most {
			commit()
		}
	}
	commit()
}
