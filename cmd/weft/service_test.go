// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/service"
)

// labServices are one of each kind: global, offered by others alone, and headless.
func labServices() []api.Service {
	return []api.Service{
		{
			Namespace: "shop", Name: "web",
			Local:    &api.LocalService{Source: "kubernetes", Global: true, Shared: true, Affinity: "local", Algorithm: "default", ClientAffinity: 30, Ready: 2, Shadowed: []string{"etcd"}},
			Clusters: []api.ServiceCluster{{Cluster: "north", ClusterID: 3, Ready: 1, Lost: true}, {Cluster: "west", ClusterID: 2, Slices: 2, Shared: true, Ready: 1, Draining: 1}},
			Frontends: []api.ServiceFrontend{
				{IP: addr("10.96.1.10"), Port: 80, Protocol: "TCP", PortName: "http", Used: 2, Why: "affinity", Backends: []api.ServiceBackend{
					{IP: addr("10.1.1.10"), Port: 8080, Cluster: "east", State: "ready", Used: true, InKernel: true},
					{IP: addr("10.1.1.11"), Port: 8080, Cluster: "east", State: "ready", Used: true},
					{IP: addr("10.2.1.10"), Port: 8080, Cluster: "west", State: "ready", Why: "affinity prefers others"},
					{IP: addr("10.2.1.11"), Port: 8080, Cluster: "west", State: "draining", Why: "others are ready", InKernel: true},
					{IP: addr("10.3.1.10"), Port: 8080, Cluster: "north", State: "ready", Lost: true, Why: "others have some whose cluster is not lost"},
				}, Kernel: &api.KernelFrontend{
					Backends: 3, Algorithm: "random", ClientAffinity: 30, Chosen: 1412, Refused: 1,
					Strays: []netip.AddrPort{netip.MustParseAddrPort("10.1.1.9:8080")},
				}},
				{IP: addr("fd00:96::10"), Port: 80, Protocol: "TCP", PortName: "http", Why: "no backend", Kernel: &api.KernelFrontend{Absent: true}},
				{IP: addr("192.0.2.80"), Port: 80, Protocol: "TCP", PortName: "http", Why: "another service has the frontend", Holder: "shop/front"},
			},
		},
		{Namespace: "shop", Name: "evil\x1b[2J", Clusters: []api.ServiceCluster{{Cluster: "west", ClusterID: 2, Ready: 5}}, Frontends: []api.ServiceFrontend{}},
		{Namespace: "shop", Name: "db", Local: &api.LocalService{Source: "files", Affinity: "none", Algorithm: "maglev", Ready: 3}, Clusters: []api.ServiceCluster{}, Frontends: []api.ServiceFrontend{}},
	}
}

func TestServiceViews(t *testing.T) {
	a := tablesOnly(t)
	name := service.Name{Namespace: "shop", Name: "web"}
	subset := func(text string) []service.Subset {
		return []service.Subset{{Ports: []service.NamedPort{{Name: "http", Protocol: service.TCP, Port: 8080}}, Addrs: []netip.Addr{addr(text)}}}
	}
	local := service.Local{
		Service: name, Source: service.Files, Settings: service.Settings{Global: true, Affinity: service.AffinityRemote},
		Addrs: []netip.Addr{addr("10.96.1.10")}, Ports: []service.NamedPort{{Name: "http", Protocol: service.TCP, Port: 80}}, Backends: subset("10.1.1.10"),
	}
	a.services.PutLocal(local)
	local.Source = service.Etcd
	a.services.PutLocal(local)
	a.services.Put(service.Offer{Service: name, Cluster: "west", ClusterID: 2, Shared: true, Backends: subset("10.2.1.10")})
	want := api.Service{
		Namespace: "shop", Name: "web",
		Local:    &api.LocalService{Source: "files", Global: true, Affinity: "remote", Algorithm: "default", Ready: 1, Shadowed: []string{"etcd"}},
		Clusters: []api.ServiceCluster{{Cluster: "west", ClusterID: 2, Shared: true, Ready: 1}},
		Frontends: []api.ServiceFrontend{{
			IP: addr("10.96.1.10"), Port: 80, Protocol: "TCP", PortName: "http", Used: 1, Why: "affinity", Backends: []api.ServiceBackend{
				{IP: addr("10.1.1.10"), Port: 8080, Cluster: "east", State: "ready", Why: "affinity prefers others"},
				{IP: addr("10.2.1.10"), Port: 8080, Cluster: "west", State: "ready", Used: true},
			},
		}},
	}
	same := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
	got, ok := a.findService("shop", "web")
	if diff := cmp.Diff(want, got, same); diff != "" || !ok {
		t.Errorf("found %v (-want +got)\n%s", ok, diff)
	}
	want.Frontends[0].Backends = nil
	for s := range a.listServices {
		if diff := cmp.Diff(want, s, same); diff != "" {
			t.Errorf("in the list (-want +got)\n%s", diff)
		}
	}
	if _, ok := a.findService("shop", "db"); ok {
		t.Error("a service that nobody has was found")
	}
}
