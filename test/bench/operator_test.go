// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/service"
)

// What an operator exports.
const (
	exportedServices = 5000
	exportedBackends = 10
	endpointChanges  = 500
	exportedTo       = service.StatePrefix + "/east/"
)

// BenchmarkOperator has `weft operator`, a process of its own, publish the services of a real API server, and then changes
// single endpoints.
//
//	s/export    from the start of the process until all services are in etcd, and declared complete
//	x-put       time of bare transactions with the same values, 100 keys each / time of the export
//	p50, p99    ms from the API server's answer to a change until a watch of etcd has the key
//	x-bare      p99 of a bare put until the watch has it / p99 of the change
//	MiB, peak   resident memory when all is published, and at most
func BenchmarkOperator(b *testing.B) {
	binary := buildWeft(b)
	kubeEtcd := testutil.StartEtcd(b)
	kube := testutil.StartKubeAPIServer(b, kubeEtcd)
	kube.Create(b, "/api/v1/namespaces", `{"metadata": {"name": "shop"}}`)
	kube.FillServices(b, "shop", exportedServices, exportedBackends)
	last := fmt.Sprintf("/api/v1/namespaces/shop/services/service-%d", exportedServices-1)
	testutil.Eventually(b, time.Minute, func() error { return kube.Exists(last) })
	for b.Loop() {
		etcd := startServer(b)
		plain := dial(b, etcd.endpoint)
		progress(b, "exporting %d services", exportedServices)
		process, took := exportWith(b, binary, kube, etcd.endpoint, plain)
		resident, peak := memoryOfProcess(b, process.Pid)
		progress(b, "changing %d endpoints", endpointChanges)
		changes := changeEndpoints(b, kube, plain)
		bare, puts := putBare(b, plain)
		measured(b, "s/export", took.Seconds(), goal{what: "operator: export of 5k services of 10 backends, from start to canary", unit: "s", atMost: 10})
		measured(b, "x-put", bare.Seconds()/took.Seconds(), goal{what: "operator: bare transactions / that export"})
		measured(b, "p50-ms", milliseconds(changes, 50), goal{what: "operator: endpoint changed → key in etcd, p50", unit: "ms"})
		measured(b, "p99-ms", milliseconds(changes, 99), goal{what: "operator: endpoint changed → key in etcd, p99", unit: "ms", atMost: 50})
		measured(b, "x-bare", milliseconds(puts, 99)/milliseconds(changes, 99), goal{what: "operator: p99 of a bare put → watch / that p99"})
		measured(b, "MiB", resident, goal{what: "operator: resident memory at 5k services", unit: "MiB", atMost: 150})
		measured(b, "peak-MiB", peak, goal{what: "operator: peak of resident memory at 5k services", unit: "MiB"})
		if err := process.Signal(syscall.SIGTERM); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(0, "ns/op")
}

// buildWeft makes the binary as it is released.
func buildWeft(b *testing.B) string {
	b.Helper()
	binary := filepath.Join(b.TempDir(), "weft")
	if out, err := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", binary, "../../cmd/weft").CombinedOutput(); err != nil {
		b.Fatalf("build weft: %v\n%s", err, out)
	}
	return binary
}

// exportWith starts an operator, which ends with the benchmark, and waits until it has published everything.
func exportWith(b *testing.B, binary string, kube *testutil.KubeAPIServer, endpoint string, plain *clientv3.Client) (process *os.Process, took time.Duration) {
	b.Helper()
	dir := b.TempDir()
	kubeconfig, etcd := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "etcd.yaml")
	kube.WriteKubeconfig(b, kubeconfig, "", "")
	testutil.MustWriteFile(b, etcd, fmt.Appendf(nil, "endpoints: [%s]\n", endpoint))
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		b.Fatal(err)
	}
	defer log.Close()
	ctx, cancel := context.WithTimeout(b.Context(), 5*time.Minute)
	defer cancel()
	canary := plain.Watch(ctx, "cilium/synced/east/"+service.StatePrefix)
	cmd := exec.Command(binary, strings.Fields(fmt.Sprintf("operator --cluster-name east --cluster-id 1 --election none --kubernetes --kubeconfig %s "+
		"--kvstore-config %s --kvstore-opt etcd.qps=1000000 --operator-socket %s", kubeconfig, etcd, filepath.Join(dir, "socket")))...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	begun := time.Now()
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	for r := range canary {
		if len(r.Events) > 0 {
			break
		}
	}
	took = time.Since(begun)
	resp, err := plain.Get(ctx, exportedTo, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil || resp.Count != exportedServices {
		text, _ := os.ReadFile(log.Name())
		b.Fatalf("%d of %d services are published: %v\n%s", resp.Count, exportedServices, err, text)
	}
	return cmd.Process, took
}

// changeEndpoints changes one backend of one service after the other, and returns how long it took each time from the API
// server's answer until a watch had the key. It may have it before.
func changeEndpoints(b *testing.B, kube *testutil.KubeAPIServer, plain *clientv3.Client) (took []time.Duration) {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	events := plain.Watch(ctx, exportedTo, clientv3.WithPrefix())
	for i := range endpointChanges {
		var endpoints []string
		for n := range exportedBackends {
			endpoints = append(endpoints, fmt.Sprintf(`{"addresses": ["10.200.%d.%d"], "conditions": {"ready": true}}`, i%250, n))
		}
		name := fmt.Sprintf("service-%d", i)
		kube.Patch(b, "/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices/"+name, `{"endpoints": [`+strings.Join(endpoints, ",")+`]}`)
		answered := time.Now()
		took = append(took, max(0, awaitKey(b, events, exportedTo+"shop/"+name).Sub(answered)))
	}
	return took
}

// awaitKey returns when a watch has a key.
func awaitKey(b *testing.B, events clientv3.WatchChan, key string) time.Time {
	b.Helper()
	limit := time.After(time.Minute)
	for {
		select {
		case r := <-events:
			at := time.Now()
			if err := r.Err(); err != nil {
				b.Fatal(err)
			}
			for _, e := range r.Events {
				if string(e.Kv.Key) == key {
					return at
				}
			}
		case <-limit:
			b.Fatalf("%s has not changed for a minute", key)
		}
	}
}

// putBare writes what was published once more, elsewhere: all of it in transactions of 100, and keys one by one.
func putBare(b *testing.B, plain *clientv3.Client) (all time.Duration, each []time.Duration) {
	b.Helper()
	resp, err := plain.Get(b.Context(), exportedTo, clientv3.WithPrefix())
	if err != nil {
		b.Fatal(err)
	}
	begun := time.Now()
	putEach(b, plain, len(resp.Kvs), func(i int) (string, string) { return "bare/" + string(resp.Kvs[i].Key), string(resp.Kvs[i].Value) })
	all = time.Since(begun)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	events := plain.Watch(ctx, "bare/", clientv3.WithPrefix())
	for i := range endpointChanges {
		key, put := "bare/"+string(resp.Kvs[i].Key), time.Now()
		if _, err := plain.Put(b.Context(), key, string(resp.Kvs[i].Value)); err != nil {
			b.Fatal(err)
		}
		each = append(each, awaitKey(b, events, key).Sub(put))
	}
	return all, each
}

func milliseconds(all []time.Duration, percent int) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return float64(sorted[(len(sorted)-1)*percent/100]) / float64(time.Millisecond)
}
