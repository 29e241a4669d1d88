// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

// What is wrong with one cluster, be it dead, slow or hostile, does not make the changes of another one take longer.
//
// lesson: E15
func TestFaultIsolation(t *testing.T) {
	south, west := newCluster(t, "south", 3), newSite(t, "west", 2)
	west.fillIPs(5000)
	w := newWorld(t, withConfig(south))
	w.awaitState("south", Ready)
	changes := figure(100, 2000)
	idle := w.propagation(south, changes)
	t.Logf("alone: p50 %v, p99 %v", percentile(idle, 50), percentile(idle, 99))
	for _, fault := range []struct {
		name  string
		begin func() (end func())
	}{
		{"dead", func() func() { west.proxy.Refuse(); return west.proxy.Forward }},
		{"silent", func() func() { west.proxy.Pause(); return west.proxy.Forward }},
		{"black hole", func() func() { west.proxy.BlackHole(); return west.proxy.Forward }},
		{"resetting", func() func() { west.proxy.Reset(); return west.proxy.Forward }},
		{"slow", func() func() { west.proxy.Throttle(20_000); return func() { west.proxy.Throttle(0) } }},
		{"hostile", func() func() { return west.flood() }},
	} {
		end := fault.begin()
		// It meets the fault from the beginning, and not only in the middle of its life.
		write(t, filepath.Join(w.dir, ".west"), fmt.Sprintf("%s# %s\n", west.config(), fault.name))
		must(t, os.Rename(filepath.Join(w.dir, ".west"), w.file("west")))
		took := w.propagation(south, changes)
		t.Logf("beside one that is %s: p50 %v, p99 %v", fault.name, percentile(took, 50), percentile(took, 99))
		if p50 := percentile(took, 50); fullFaults && p50 > 10*percentile(idle, 99)+100*time.Millisecond {
			t.Errorf("beside one that is %s, changes took %v, alone %v", fault.name, p50, percentile(idle, 50))
		}
		end()
	}
	if s, _ := w.remote("south"); s.State != Ready || s.Reconnects != 0 || s.Failures != 0 {
		t.Errorf("the other cluster: %+v", s)
	}
	w.awaitWithin(time.Minute, "west", "ready", ready)
}

// flood writes what must be refused, and what changes all the time, as fast as etcd takes it.
func (s *site) flood() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	client := s.etcd.Client()
	go func() {
		defer close(done)
		for i := 0; ctx.Err() == nil; i++ {
			_, _ = client.Put(ctx, s.ipKey(fmt.Sprintf("hostile-%d\x1b[31m", i%1000)), strings.Repeat("{", 1000))
			_, _ = client.Put(ctx, s.ipKey(s.addr(200)), ipValue(s.addr(200), s.id<<16+i%1000, "172.18.2.1"))
			_, _ = client.Put(ctx, s.ipKey("10.3.77.1"), ipValue("10.3.77.1", s.id<<16+1, "172.18.2.1"))
			_, _ = client.Delete(ctx, s.ipKey("10.3.77.1"))
		}
	}()
	return func() {
		cancel()
		<-done
		_, _ = client.Delete(context.Background(), s.ipKey("hostile-"), clientv3.WithPrefix())
	}
}

// As many clusters as a mesh has, in one etcd that holds copies of all: at the start all are ready soon, and each costs
// little.
func TestFaultManyClusters(t *testing.T) {
	clusters, nodes, ips, identities := figure(40, 254), figure(4, 100), figure(20, 1000), figure(5, 100)
	c := &cluster{t: t, etcd: testutil.StartEtcd(t)}
	cfg := testConfig(t)
	cfg.ClusterID = 255
	cfg.Dir = t.TempDir()
	for id := 1; id <= clusters; id++ {
		c.name, c.id = fmt.Sprintf("cluster-%03d", id), id
		c.config(fmt.Sprintf(`{"id":%d,"capabilities":{"syncedCanaries":true,"cached":true,"maxConnectedClusters":255}}`, id))
		c.fill(nodes, func(n int) (string, string) {
			return fmt.Sprintf("cilium/cache/nodes/v1/%s/node-%d", c.name, n), fmt.Sprintf(
				`{"Name":"node-%d","Cluster":%q,"IPAddresses":[{"Type":"InternalIP","IP":"172.%d.%d.%d"}],"IPv4AllocCIDR":null,"ClusterID":%d}`,
				n, c.name, 16+id>>8, id&255, n, id)
		})
		c.fill(ips, func(n int) (string, string) {
			addr := fmt.Sprintf("10.%d.%d.%d", id, n>>8, n&255)
			return fmt.Sprintf("cilium/cache/ip/v1/%s/%s", c.name, addr), ipValue(addr, id<<16+n%identities, fmt.Sprintf("172.%d.%d.1", 16+id>>8, id&255))
		})
		c.fill(identities, func(n int) (string, string) {
			return fmt.Sprintf("cilium/cache/identities/v1/%s/id/%d", c.name, id<<16+n),
				fmt.Sprintf("k8s:app=app-%d;k8s:io.cilium.k8s.policy.cluster=%s;", n, c.name)
		})
		c.canaries("cache")
		c.etcd.WriteConfig(t, filepath.Join(cfg.Dir, c.name))
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	goroutines := runtime.NumGoroutine()

	w := &world{t: t, dir: cfg.Dir, log: &logBuffer{}, timing: defaultTiming}
	cfg.Log = newTextLog(w.log)
	began := time.Now()
	w.run(cfg)
	testutil.Eventually(t, 2*time.Minute, func() error {
		waiting := 0
		for _, s := range w.Status() {
			if s.State != Ready || s.IPs != ips || s.Nodes != nodes || s.Identities != identities {
				waiting++
			}
		}
		if waiting > 0 || len(w.Status()) != clusters {
			return fmt.Errorf("%d of %d clusters are not ready", waiting, clusters)
		}
		return nil
	})
	took := time.Since(began)
	runtime.GC()
	runtime.ReadMemStats(&after)
	perCluster := float64(runtime.NumGoroutine()-goroutines) / float64(clusters)
	heap := (int64(after.HeapAlloc) - int64(before.HeapAlloc)) >> 20
	t.Logf("%d clusters ready in %v; %.0f goroutines each, those of the etcd in this process included; %d MiB of heap", clusters, took, perCluster, heap)
	if fullFaults && took > 100*time.Second || perCluster > 150 || heap > 400 {
		t.Errorf("%v, %.0f goroutines each, %d MiB", took, perCluster, heap)
	}
}
