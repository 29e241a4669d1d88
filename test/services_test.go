// SPDX-License-Identifier: Apache-2.0

package test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/mesh"
	nodes "github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/operator"
	"github.com/weftmesh/weft/service"
	"github.com/weftmesh/weft/source"
)

const servicesPatience = time.Minute

var webFrontend = service.Frontend{Addr: netip.MustParseAddr("10.96.0.1"), Port: 80, Protocol: service.TCP}

// exporter is the part of cluster east that publishes services, of files, in one form after the other.
type exporter struct {
	etcd  *testutil.Etcd
	files string
}

// serve publishes the service with this one backend.
func (e *exporter) serve(t *testing.T, backend string) {
	t.Helper()
	testutil.MustWriteFile(t, filepath.Join(e.files, "web.yaml"), fmt.Appendf(nil,
		"{name: web, namespace: shop, global: true, ports: [{name: http, port: 80, target: 8080}], backends: [{ip: %s}]}\n", backend))
}

// run has an operator publish in the form that mode is, until stop is called. What is published otherwise stays for withdrawAfter.
func (e *exporter) run(t *testing.T, mode string, withdrawAfter time.Duration) (stop func()) {
	t.Helper()
	from := source.NewFiles(e.files)
	slices, err := operator.NewServiceSlices()
	if err != nil {
		t.Fatal(err)
	}
	config, err := operator.NewClusterConfig(operator.ClusterConfigConfig{
		ClusterName: "east", Canaries: []string{nodes.StatePrefix, identity.StatePrefix, ipcache.StatePrefix},
		Config: identity.ClusterConfig{ID: 1, Capabilities: identity.Capabilities{SyncedCanaries: true, MaxConnectedClusters: 255, EndpointSlicesExportMode: mode}},
	})
	if err != nil {
		t.Fatal(err)
	}
	duties := []operator.Duty{config, operator.NewHeartbeat(time.Minute)}
	for form, withdrawn := range map[operator.ServiceForm]bool{operator.WholeServices{}: mode == identity.SlicesOnly, slices: mode == ""} {
		s, err := operator.NewServices(operator.ServicesConfig{
			ClusterName: "east", ClusterID: 1, Source: from, Form: form, Withdrawn: withdrawn, WithdrawAfter: withdrawAfter,
		})
		if err != nil {
			t.Fatal(err)
		}
		duties = append(duties, s)
	}
	o, err := operator.New(operator.Config{
		ClusterName: "east", ClusterID: 1, Name: "replica", LeaseTTL: time.Minute, Election: operator.Election{By: operator.ElectNone},
		Etcd: kvstore.Config{Endpoints: []string{e.etcd.Endpoint()}, QPS: 100_000}, Duties: duties, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	return runAll(t, from, o)
}

// runAll runs tasks until stop is called, or the test ends.
func runAll(t *testing.T, tasks ...interface{ Run(context.Context) error }) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for _, task := range tasks {
		running.Go(func() {
			if err := task.Run(ctx); err != nil {
				t.Errorf("%v: %v", task, err)
			}
		})
	}
	stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// startReader follows east in another cluster, which has the service without backends of its own.
func startReader(t *testing.T, east *testutil.Etcd, preferSlices bool) *service.Table {
	t.Helper()
	layout, err := identity.NewLayout(255)
	if err != nil {
		t.Fatal(err)
	}
	table, dir := service.NewTable(), t.TempDir()
	east.WriteConfig(t, filepath.Join(dir, "east"))
	table.PutLocal(service.Local{
		Service: service.Name{Namespace: "shop", Name: "web"}, Settings: service.Settings{Global: true}, Addrs: []netip.Addr{webFrontend.Addr},
		Ports: []service.NamedPort{{Name: "http", Protocol: service.TCP, Port: 80}},
	})
	m, err := mesh.New(mesh.Config{
		Dir: dir, ClusterName: "west", ClusterID: 2, NodeName: "west-1", Layout: layout, PreferSlices: preferSlices,
		IPs: ipcache.New(), Nodes: nodes.NewTable(), Identities: identity.NewTable(), Services: table, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	runAll(t, m)
	return table
}

// leadsTo waits until the service leads to one backend alone.
func leadsTo(t *testing.T, table *service.Table, backend string) {
	t.Helper()
	want := service.Backend{Addr: netip.MustParseAddr(backend), Port: 8080}
	testutil.Eventually(t, servicesPatience, func() error {
		s, _ := table.Select(webFrontend)
		if len(s.Backends) != 1 || s.Backends[0] != want {
			return fmt.Errorf("backends %v, want %s", s.Backends, want)
		}
		return nil
	})
}

// gaps counts how often a reader of the table finds the service without backends, until stop is called.
func gaps(table *service.Table) (stop func() int) {
	done, counted := make(chan struct{}), make(chan int)
	go func() {
		found := 0
		for at := (service.Revision{}); ; {
			changed := table.Changed()
			_, next, _ := table.Changes(at, 16)
			if at = next; !hasBackends(table) {
				found++
			}
			select {
			case <-changed:
			case <-done:
				counted <- found
				return
			}
		}
	}()
	return func() int {
		close(done)
		return <-counted
	}
}

func hasBackends(table *service.Table) bool {
	s, _ := table.Select(webFrontend)
	return len(s.Backends) > 0
}

// An operator goes over from whole services to slices and back, and those who read them in the one form or the other follow
// without ever being without a backend.
//
// mechanism: L1 L4
func TestServiceForms(t *testing.T) {
	e := &exporter{etcd: testutil.StartEtcd(t), files: t.TempDir()}
	e.serve(t, "10.1.0.1")
	stop := e.run(t, "", 0)
	readers := []*service.Table{startReader(t, e.etcd, false), startReader(t, e.etcd, true)}
	var counts []func() int
	for _, r := range readers {
		leadsTo(t, r, "10.1.0.1")
		counts = append(counts, gaps(r))
	}
	for i, mode := range []string{identity.SlicesToo, identity.SlicesOnly, identity.SlicesToo, "", identity.SlicesOnly, ""} {
		stop()
		stop = e.run(t, mode, time.Hour)
		backend := fmt.Sprintf("10.1.0.%d", 2+i)
		e.serve(t, backend) // a change that comes in the new form alone
		for _, r := range readers {
			leadsTo(t, r, backend)
		}
		// Now that all have gone over, what is left of the other form is nothing to them.
		stop()
		stop = e.run(t, mode, 0)
		if withdrawn, ok := map[string]string{"": service.SlicePrefix, identity.SlicesOnly: service.StatePrefix}[mode]; ok {
			testutil.Eventually(t, servicesPatience, func() error {
				left, err := e.etcd.Client().Get(t.Context(), withdrawn+"/east/", clientv3.WithPrefix())
				if err == nil && left.Count > 0 {
					err = fmt.Errorf("%d keys are left below %s", left.Count, withdrawn)
				}
				return err
			})
		}
		for _, r := range readers {
			leadsTo(t, r, backend)
		}
	}
	for i, count := range counts {
		if n := count(); n > 0 {
			t.Errorf("reader %d was %d times without a backend", i, n)
		}
	}
}
