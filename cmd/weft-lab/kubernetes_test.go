// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/weftmesh/weft/internal/testutil"
)

// annotate changes one annotation of a cluster's service web in Kubernetes.
func (s *serviceLab) annotate(c clusterPlan, name, value string) {
	s.t.Helper()
	s.must("kubernetes", c.Name, "patch", kubeWeb, fmt.Sprintf(`{"metadata":{"annotations":{"service.cilium.io/%s":%q}}}`, name, value))
}

// scale gives a cluster's service web those IPv4 backends in Kubernetes.
func (s *serviceLab) scale(c clusterPlan, addrs ...netip.Addr) {
	s.t.Helper()
	endpoints, err := json.Marshal(map[string]any{"endpoints": endpointSlice{addrs: addrs}.endpoints()})
	if err != nil {
		s.t.Fatal(err)
	}
	s.must("kubernetes", c.Name, "patch", kubeSlices+"web-4", string(endpoints))
}

// leads4 waits until the kernel of a cluster's first node has those backends at its service's IPv4 address.
func (s *serviceLab) leads4(c clusterPlan, want ...netip.Addr) {
	s.t.Helper()
	testutil.Eventually(s.t, testPatience, func() error { return s.lab.leadsTo(c.Nodes[0], c.Service4, want) })
}

// definitions returns how many kinds are defined in a cluster beside Kubernetes' own.
func (s *serviceLab) definitions(c clusterPlan) int {
	s.t.Helper()
	var list struct{ Items []struct{} }
	answer := s.must("kubernetes", c.Name, "get", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions")
	if err := json.Unmarshal([]byte(answer), &list); err != nil {
		s.t.Fatal(err)
	}
	return len(list.Items)
}

// The whole circle: a Service and its EndpointSlices in the Kubernetes of one cluster, its operator, its etcd, the agent and
// the kernel of the other cluster, and clients there, of which no request may fail. Operators and agents neither need nor make
// any kind of object that Kubernetes does not have.
//
// mechanism: K4
func TestKubernetes(t *testing.T) {
	s := newServiceLab(t, "--kubernetes", "--kube-apiserver", testutil.KubeAPIServerPath(t))
	east, west := s.east, s.west
	if status, well := s.status(); !well || len(status.APIServers) != 2 {
		t.Errorf("the lab is not well: %+v", status)
	}
	if n := s.definitions(east); n != 0 {
		t.Errorf("%d kinds are defined in east", n)
	}
	s.leads(east, east)
	s.leads(west, west)
	s.annotate(east, "affinity", "remote")
	s.testScale()
	s.annotate(east, "affinity", "local")
	s.leads(east, east)
	s.offered(east, west)
	clients := s.clients(east)
	s.only(clients, east, west)
	if out := s.must("exec", "east-1", "weft", "service", "get", "shop/web"); !strings.Contains(out, "kubernetes (not used: etcd)") {
		t.Errorf("the service of east is not the one of Kubernetes:\n%s", out)
	}

	s.annotate(east, "affinity", "remote")
	s.leads(east, west)
	s.only(clients, west, east)
	s.annotate(west, "shared", "false")
	s.leads(east, east)
	s.only(clients, east, west)
	if err := s.published(west); !errors.Is(err, errNoKey) {
		t.Errorf("a service that is not shared is in etcd: %v", err)
	}
	s.annotate(west, "shared", "true")
	s.leads(east, west)
	s.only(clients, west, east)
	s.annotate(east, "global", "false")
	s.leads(east, east)
	s.only(clients, east, west)
	s.annotate(east, "global", "true")
	s.leads(east, west)
	s.testDeletion(clients)
	s.testAbsence(clients)
}

// published returns nil if a cluster's service web is in its etcd.
func (s *serviceLab) published(c clusterPlan) error {
	return askEtcd(s.t.Context(), c.Etcd, "cilium/state/services/v1/"+c.Name+"/"+namespace+"/web")
}

// testScale has west's service grow and shrink while east's follows.
func (s *serviceLab) testScale() {
	s.t.Helper()
	s.leads(s.east, s.west)
	pods := mapped(s.west.webPods(), func(p podPlan) netip.Addr { return p.IPv4 })
	var many []netip.Addr
	for i := range 100 {
		many = append(many, netip.AddrFrom4([4]byte{10, s.west.ID, 1, byte(100 + i)}))
	}
	s.scale(s.west, pods[0])
	s.leads4(s.east, pods[0])
	s.scale(s.west, many...)
	s.leads4(s.east, many...)
	s.scale(s.west)
	s.leads4(s.east, mapped(s.east.webPods(), func(p podPlan) netip.Addr { return p.IPv4 })...)
	s.scale(s.west, pods...)
	s.leads(s.east, s.west)
}

// testDeletion has the Service of west go, and come again.
func (s *serviceLab) testDeletion(clients []*asker) {
	s.t.Helper()
	s.must("kubernetes", "west", "delete", kubeWeb)
	s.leads(s.east, s.east)
	s.only(clients, s.east, s.west)
	web, err := json.Marshal(s.west.web().object())
	if err != nil {
		s.t.Fatal(err)
	}
	s.must("kubernetes", "west", "apply", kubeWeb, string(web))
	s.leads(s.east, s.west)
	s.only(clients, s.west, s.east)
}

// testAbsence has both API servers be away: everything goes on, and what changes when they are back counts.
func (s *serviceLab) testAbsence(clients []*asker) {
	s.t.Helper()
	status, _ := s.status()
	for _, k := range status.APIServers {
		s.kill(k.PID)
	}
	testutil.Eventually(s.t, testPatience, func() error {
		status, _ := s.status()
		if status.APIServers[0].State != stateDead || !strings.Contains(strings.Join(status.Nodes[0].Problems, "; "), "cannot be followed") {
			return fmt.Errorf("nobody misses the API server of east: %+v", status)
		}
		return nil
	})
	s.only(clients, s.west, s.east)
	s.must("up")
	s.annotate(s.east, "affinity", "local")
	s.leads(s.east, s.east)
	s.only(clients, s.east, s.west)
}
