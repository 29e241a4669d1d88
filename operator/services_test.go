// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
	"github.com/weftmesh/weft/service"
	"github.com/weftmesh/weft/source"
)

// fakeSource is a source whose services the test says.
type fakeSource struct {
	*source.Table
	ready chan struct{}
}

var _ source.Source = (*fakeSource)(nil)

func newFakeSource() *fakeSource {
	return &fakeSource{source.NewTable(true), make(chan struct{})}
}

func (f *fakeSource) String() string                { return "fake services" }
func (f *fakeSource) Run(ctx context.Context) error { <-ctx.Done(); return nil }
func (f *fakeSource) Ready() <-chan struct{}        { return f.ready }
func (f *fakeSource) Problems() []string            { return nil }

// global is a service that is shared with all clusters, and put a backend of it.
func (f *fakeSource) global(name string, labels map[string]string) {
	f.PutService(source.Service{
		Name: service.Name{Namespace: "shop", Name: name}, Annotations: map[string]string{"service.cilium.io/global": "true"}, Labels: labels,
		Selector: labels, Addresses: []netip.Addr{netip.MustParseAddr("10.96.1.10")}, Ports: []source.Port{{Name: "http", Protocol: service.TCP, Port: 80}},
	})
}

func (f *fakeSource) backends(name string, backends ...source.Backend) {
	f.PutBackends(service.Name{Namespace: "shop", Name: name}, name+"-1", backends)
}

func backend(addr string) source.Backend {
	return source.Backend{
		Addr: netip.MustParseAddr(addr), Ready: true, Serving: true, Ports: []source.Port{{Name: "http", Protocol: service.TCP, Port: 8080}},
	}
}

const servicesOfEast = service.StatePrefix + "/east/"

// exports is a change of a replica's configuration: it publishes services.
func exports(t testing.TB, from source.Source) func(*Config) {
	return func(c *Config) {
		c.Election.LeaseDuration = 0
		c.Election.By = ElectNone
		c.Duties = append(c.Duties, mustServices(t, from))
	}
}

func mustServices(t testing.TB, from source.Source) *Services {
	t.Helper()
	s, err := NewServices(ServicesConfig{ClusterName: "east", ClusterID: 1, Source: from, Form: WholeServices{}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// list reads the keys below a prefix, relative to it.
func list(t testing.TB, etcd *testutil.Etcd, prefix string) map[string]string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	resp, err := etcd.Client().Get(ctx, prefix, clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]string)
	for _, kv := range resp.Kvs {
		got[strings.TrimPrefix(string(kv.Key), prefix)] = string(kv.Value)
	}
	return got
}

// holds waits until etcd has exactly these keys below a prefix.
func holds(t testing.TB, etcd *testutil.Etcd, prefix string, want map[string]string) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		if diff := cmp.Diff(want, list(t, etcd, prefix)); diff != "" {
			return fmt.Errorf("below %s (-want +got)\n%s", prefix, diff)
		}
		return nil
	})
}

// The value is byte for byte the one of a real cluster.
//
// mechanism: L1 L4
func TestServiceAsRecorded(t *testing.T) {
	want := make(map[string]string)
	for key, value := range golden.Values(t, servicesOfEast) {
		want[strings.TrimPrefix(key, servicesOfEast)] = value
	}
	if len(want) != 2 {
		t.Fatalf("%d services are recorded", len(want))
	}
	etcd, from := testutil.StartEtcd(t), newFakeSource()
	from.global("web", map[string]string{"app": "web"})
	first := backend("10.1.1.10")
	first.Hostname, first.Zone, first.ForZones = "web-0", "z1", []string{"z1"}
	gone := backend("10.1.3.10")
	gone.Ready, gone.Serving = false, false
	from.backends("web", first, backend("10.1.2.10"), gone)
	from.PutService(source.Service{
		Name: service.Name{Namespace: "shop", Name: "headless"}, Annotations: map[string]string{"io.cilium/global-service": "True"},
	})
	from.PutService(source.Service{Name: service.Name{Namespace: "shop", Name: "local"}})
	close(from.ready)
	startReplica(t, "replica", etcd.Endpoint(), exports(t, from))
	holds(t, etcd, servicesOfEast, want)
}

// The annotations mean what they mean to a real cluster.
func TestExported(t *testing.T) {
	for _, v := range golden.Lines[struct {
		Annotations map[string]string
		Shared      bool
	}](t, "service-annotations.jsonl") {
		if got := exported(v.Annotations); got != v.Shared {
			t.Errorf("%v: exported %v, want %v", v.Annotations, got, v.Shared)
		}
	}
}

// Each step of a service's life is exactly the change of its key that it should be.
//
// mechanism: L4
// lesson: O6
func TestServiceTransitions(t *testing.T) {
	etcd, from := testutil.StartEtcd(t), newFakeSource()
	close(from.ready)
	startReplica(t, "replica", etcd.Endpoint(), exports(t, from))
	value := func(edit func(*service.Service)) string {
		s := service.Service{
			Cluster: "east", ClusterID: 1, Namespace: "shop", Name: "web", IncludeExternal: true, Shared: true,
			Frontends: map[netip.Addr]service.Ports{netip.MustParseAddr("10.96.1.10"): {"http": {Protocol: "TCP", Port: 80}}},
			Backends:  map[netip.Addr]service.Ports{}, Labels: map[string]string{}, Selector: map[string]string{},
		}
		edit(&s)
		text, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	name := service.Name{Namespace: "shop", Name: "web"}
	bare := value(func(*service.Service) {})
	from.global("web", nil)
	holds(t, etcd, servicesOfEast, map[string]string{"shop/web": bare})

	// From no backend to 10,000 and back.
	full, many := []source.Backend{}, value(func(s *service.Service) {
		for i := range 10_000 {
			s.Backends[netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})] = service.Ports{"http": {Protocol: "TCP", Port: 8080}}
		}
	})
	for i := range 10_000 {
		full = append(full, backend(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String()))
	}
	from.backends("web", full...)
	holds(t, etcd, servicesOfEast, map[string]string{"shop/web": many})
	from.backends("web")
	holds(t, etcd, servicesOfEast, map[string]string{"shop/web": bare})

	// Not shared any more, shared again, and its namespace left out and taken in again.
	from.PutService(source.Service{Name: name, Annotations: map[string]string{"service.cilium.io/global": "true", "service.cilium.io/shared": "false"}})
	holds(t, etcd, servicesOfEast, map[string]string{})
	from.global("web", nil)
	holds(t, etcd, servicesOfEast, map[string]string{"shop/web": bare})
	from.PutNamespace("shop", false, true)
	holds(t, etcd, servicesOfEast, map[string]string{})
	from.PutNamespace("shop", true, true)
	holds(t, etcd, servicesOfEast, map[string]string{"shop/web": bare})

	// Another name.
	from.RemoveService(name)
	from.global("shop", nil)
	holds(t, etcd, servicesOfEast, map[string]string{"shop/shop": strings.Replace(bare, `"name":"web"`, `"name":"shop"`, 1)})

	// Ending, but still serving; then not.
	ending := backend("10.1.1.10")
	ending.Ready, ending.Terminating = false, true
	from.backends("shop", ending)
	serving := strings.Replace(value(func(s *service.Service) {
		s.Backends[ending.Addr] = service.Ports{"http": {Protocol: "TCP", Port: 8080}}
	}), `"name":"web"`, `"name":"shop"`, 1)
	holds(t, etcd, servicesOfEast, map[string]string{"shop/shop": serving})
	ending.Serving = false
	from.backends("shop", ending)
	holds(t, etcd, servicesOfEast, map[string]string{"shop/shop": strings.Replace(bare, `"name":"web"`, `"name":"shop"`, 1)})
}

// What an earlier life left is removed, but only once all services are known; keys of other clusters stay, even of one whose
// name begins the same; what others put among the cluster's keys is removed, and what they change or delete is put back.
//
// mechanism: L1
func TestServicesOfOthers(t *testing.T) {
	etcd, from := testutil.StartEtcd(t), newFakeSource()
	others := map[string]string{
		service.StatePrefix + "/west/shop/web":      "west",
		service.StatePrefix + "/eastern/shop/web":   "eastern",
		service.StatePrefix + "/east-2/shop/web":    "east-2",
		"cilium/state/nodes/v1/east/shop/web":       "node",
		"cilium/cache/services/v1/east/shop/web":    "cache",
		strings.TrimSuffix(servicesOfEast, "/"):     "bare",
		"cilium/state/serviceexports/v1/east/a/web": "export",
	}
	for key, value := range others {
		etcd.Put(t, key, value)
	}
	etcd.Put(t, servicesOfEast+"shop/old", "left")
	etcd.Put(t, servicesOfEast+"shop/web", "left")
	from.global("web", nil)
	r := startReplica(t, "replica", etcd.Endpoint(), exports(t, from))
	awaitLeader(t, r)
	testutil.Eventually(t, testTimeout, func() error {
		if s := r.Status().Duties[0]; !strings.Contains(s.Detail, "waits for") {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	canary := canaryKey("east", service.StatePrefix)
	if diff := cmp.Diff(map[string]string{"shop/old": "left", "shop/web": "left"}, list(t, etcd, servicesOfEast)); diff != "" {
		t.Errorf("before all services are known (-want +got)\n%s", diff)
	}
	if _, ok := etcd.Get(t, canary); ok {
		t.Error("the services are declared complete before they are known")
	}
	close(from.ready)
	testutil.Eventually(t, testTimeout, func() error {
		if _, ok := etcd.Get(t, canary); !ok {
			return fmt.Errorf("no canary")
		}
		return nil
	})
	// With the canary all is there, and nothing else.
	left := list(t, etcd, servicesOfEast)
	web := left["shop/web"]
	if len(left) != 1 || web == "" || web == "left" {
		t.Errorf("when the services are declared complete: %v", left)
	}
	etcd.Put(t, servicesOfEast+"shop/foreign", "foreign")
	holds(t, etcd, servicesOfEast, map[string]string{"shop/web": web})
	etcd.Put(t, servicesOfEast+"shop/web", "changed")
	holds(t, etcd, servicesOfEast, map[string]string{"shop/web": web})
	etcd.Delete(t, servicesOfEast+"shop/web")
	holds(t, etcd, servicesOfEast, map[string]string{"shop/web": web})
	for key, value := range others {
		if got, _ := etcd.Get(t, key); got != value {
			t.Errorf("%s is %q, want %q", key, got, value)
		}
	}
}

// Whatever changes and whatever goes wrong - another leader, an etcd that restarts or is emptied, keys that others put, change
// and delete - in the end etcd has exactly what should be published.
//
// lesson: O5
func TestServicesChaos(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	etcd, from := testutil.StartEtcd(t), newFakeSource()
	close(from.ready)
	start := func(i int) *replica {
		return startReplica(t, fmt.Sprintf("replica-%d", i), etcd.Endpoint(), func(c *Config) { c.Duties = []Duty{mustServices(t, from)} })
	}
	replicas := []*replica{start(0), start(1)}
	want := make(map[string]*source.Service)
	name := func() string { return fmt.Sprintf("s%d", random.IntN(20)) }
	steps := []func(){
		func() { n := name(); from.global(n, map[string]string{"v": fmt.Sprint(random.IntN(3))}); want[n] = nil },
		func() { n := name(); from.RemoveService(service.Name{Namespace: "shop", Name: n}); delete(want, n) },
		func() {
			var some []source.Backend
			for i := range random.IntN(5) {
				some = append(some, backend(fmt.Sprintf("10.1.%d.%d", random.IntN(3), i)))
			}
			from.backends(name(), some...)
		},
		func() { etcd.Put(t, servicesOfEast+"shop/"+name(), "foreign") },
		func() { etcd.Delete(t, servicesOfEast+"shop/"+name()) },
		func() { // the leader, or the other one, is replaced
			i := random.IntN(len(replicas))
			if err := replicas[i].stop(); err != nil {
				t.Error(err)
			}
			replicas[i] = start(2 + random.IntN(1000))
		},
	}
	for i := range 400 {
		steps[random.IntN(len(steps))]()
		switch i {
		case 150:
			etcd.Restart(t)
		case 300:
			etcd.Wipe(t)
		}
	}
	all, _, _ := from.Changes(0)
	published := make(map[string]string)
	for _, c := range all {
		values, err := mustServices(t, from).cfg.publishable(c.Service)
		if len(values) != 1 || err != nil {
			t.Fatalf("%s: %d keys, %v", c.Name, len(values), err)
		}
		published[values[0].key] = string(values[0].value)
	}
	if len(published) != len(want) {
		t.Fatalf("%d services of %v", len(published), maps.Keys(want))
	}
	holds(t, etcd, servicesOfEast, published)
	awaitLeader(t, replicas...)
}
