// SPDX-License-Identifier: Apache-2.0

package source

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/service"
)

// still is a source whose table is filled by hand.
type still struct {
	*Table
	ready chan struct{}
}

func (s *still) String() string            { return "still" }
func (s *still) Run(context.Context) error { return nil }
func (s *still) Ready() <-chan struct{}    { return s.ready }
func (s *still) Problems() []string        { return []string{"it does not move"} }

var _ Source = (*still)(nil)

// A source's services reach the table once all have been read, and follow it from then on.
//
// mechanism: H4
func TestFeed(t *testing.T) {
	addr := netip.MustParseAddr
	src := &still{NewTable(true), make(chan struct{})}
	table := service.NewTable()
	feed := NewFeed(src, service.Kubernetes, table)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- feed.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()

	web := service.Name{Namespace: "shop", Name: "web"}
	http, target := []Port{{"http", service.TCP, 80}}, []Port{{"http", service.TCP, 8080}}
	src.PutService(Service{
		Name: web, Addresses: []netip.Addr{addr("10.96.1.10")}, Ports: http, Affinity: 3 * time.Hour,
		Annotations: map[string]string{"service.cilium.io/global": "true", "service.cilium.io/affinity": "near"},
	})
	src.PutBackends(web, "a", []Backend{
		{Addr: addr("10.1.1.1"), Ports: target, Ready: true, Serving: true}, {Addr: addr("10.1.1.2"), Ports: target, Serving: true, Terminating: true},
		{Addr: addr("10.1.1.3"), Ports: target, Ready: true}, {Addr: addr("10.1.1.4"), Ports: target},
	})
	if n := table.Locals(); n != 0 {
		t.Fatalf("%d local services before the source was ready", n)
	}
	close(src.ready)
	<-feed.Ready()
	v, _ := table.Get(web)
	want := &service.Local{
		Service: web, Source: service.Kubernetes, Settings: service.Settings{Global: true, Shared: true}, Addrs: []netip.Addr{addr("10.96.1.10")},
		Ports: []service.NamedPort{{Name: "http", Protocol: service.TCP, Port: 80}}, ClientAffinity: 3 * 3600,
		Backends: []service.Subset{
			{Ports: []service.NamedPort{{Name: "http", Protocol: service.TCP, Port: 8080}}, Addrs: []netip.Addr{addr("10.1.1.1"), addr("10.1.1.3")}},
			{Ports: []service.NamedPort{{Name: "http", Protocol: service.TCP, Port: 8080}}, State: service.Draining, Addrs: []netip.Addr{addr("10.1.1.2")}},
		},
	}
	if diff := cmp.Diff(want, v.Local, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("local service (-want +got):\n%s", diff)
	}
	problems := []string{"it does not move", `service shop/web: annotation service.cilium.io/affinity: affinity "near" is none of none, local and remote`}
	if got := feed.Problems(); !slices.Equal(got, problems) {
		t.Errorf("problems %q", got)
	}

	await := func(what string, cond func() bool) {
		t.Helper()
		testutil.Eventually(t, 30*time.Second, func() error {
			if !cond() {
				return fmt.Errorf("not %s", what)
			}
			return nil
		})
	}
	src.PutNamespace("shop", false, true)
	await("of the cluster alone, as its namespace says", func() bool {
		v, _ := table.Get(web)
		return v.Local != nil && !v.Local.Global && !v.Local.Shared
	})
	src.PutService(Service{Name: web, Addresses: []netip.Addr{addr("10.96.1.11")}, Ports: http})
	await("at its new address", func() bool {
		_, ok := table.Select(service.Frontend{Addr: addr("10.96.1.11"), Port: 80, Protocol: service.TCP})
		return ok && len(feed.Problems()) == 1
	})
	src.RemoveService(web)
	await("gone", func() bool { return table.Locals() == 0 && len(table.Selections()) == 0 })
}

// A reader that has missed too much is given all there is, and forgets the rest.
func TestFeedForgets(t *testing.T) {
	src := &still{NewTable(true), make(chan struct{})}
	close(src.ready)
	table := service.NewTable()
	feed := NewFeed(src, service.Files, table)
	name := func(i int) service.Name { return service.Name{Namespace: "ns", Name: fmt.Sprint(i)} }
	for i := range 3 {
		src.PutService(Service{Name: name(i)})
	}
	feed.take(0)
	src.RemoveService(name(1))
	feed.take(0) // as if its place had been lost
	if _, gone := table.Get(name(1)); gone || table.Locals() != 2 {
		t.Errorf("%d local services, want 2", table.Locals())
	}
}
