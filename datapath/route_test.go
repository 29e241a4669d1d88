// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/node"
)

// testNode is a node with one address and any number of pod CIDRs of each family.
func testNode(cluster string, id uint32, name string, ips []string, cidrs ...string) node.Node {
	n := node.Node{Name: name, Cluster: cluster, ClusterID: id}
	for _, ip := range ips {
		n.Addresses = append(n.Addresses, node.Address{Type: "InternalIP", IP: netip.MustParseAddr(ip)})
	}
	for _, s := range cidrs {
		switch p := netip.MustParsePrefix(s); {
		case p.Addr().Is4() && !n.IPv4PodCIDR.IsValid():
			n.IPv4PodCIDR = p
		case p.Addr().Is4():
			n.IPv4SecondaryPodCIDRs = append(n.IPv4SecondaryPodCIDRs, p)
		case !n.IPv6PodCIDR.IsValid():
			n.IPv6PodCIDR = p
		default:
			n.IPv6SecondaryPodCIDRs = append(n.IPv6SecondaryPodCIDRs, p)
		}
	}
	return n
}

var testLocal = localNode{
	Mode:    func(string) RoutingMode { return RoutingNative },
	Cluster: "east", Node: "east-1",
	IPs:      []netip.Addr{netip.MustParseAddr("172.18.1.1"), netip.MustParseAddr("fd00:18:1::1")},
	PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.1.0/24"), netip.MustParsePrefix("fd00:10:1:1::/64")},
}

// describe writes a claim on one line.
func describe(c routeClaim) string {
	s := c.Prefix.String() + " via " + c.Gateway.String() + " " + c.Node.String()
	if c.Err != nil {
		s += ": " + c.Err.Error()
	}
	return s
}

func TestPlanRoutes(t *testing.T) {
	nodes := []node.Node{
		testNode("east", 1, "east-1", []string{"172.18.1.1"}, "10.1.1.0/24"), // ourselves
		testNode("east", 1, "east-2", []string{"172.18.1.2", "fd00:18:1::2"}, "10.1.2.0/24", "fd00:10:1:2::/64", "10.1.2.0/24"),
		testNode("west", 2, "west-1", []string{"172.18.2.1"}, "10.2.1.0/24", "fd00:10:2:1::/64", "10.2.9.0/26"),
	}
	want := []string{
		"10.1.2.0/24 via 172.18.1.2 east/east-2",
		"10.2.1.0/24 via 172.18.2.1 west/west-1",
		"10.2.9.0/26 via 172.18.2.1 west/west-1",
		"fd00:10:1:2::/64 via fd00:18:1::2 east/east-2",
		"fd00:10:2:1::/64 via invalid IP west/west-1: node west/west-1 has no IPv6 address",
	}
	for range 6 { // whatever the order
		nodes = append(nodes[1:], nodes[0])
		var got []string
		for _, c := range planRoutes(nodes, testLocal) {
			got = append(got, describe(c))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("claims (-want +got):\n%s", diff)
		}
	}
}

// Of several nodes with one pod CIDR the lowest cluster goes first, unless its wish cannot be granted.
func TestPlanRoutesContested(t *testing.T) {
	nodes := []node.Node{
		testNode("west", 2, "a", []string{"172.18.2.1"}, "10.9.0.0/24"),
		testNode("south", 3, "a", []string{"172.18.3.1"}, "10.9.0.0/24", "10.9.1.0/24"),
		testNode("north", 4, "a", []string{"fd00:18:4::1"}, "10.9.2.0/24"),
		testNode("north", 5, "b", []string{"172.18.5.1"}, "10.9.2.0/24"),
	}
	want := []string{
		"10.9.0.0/24 via 172.18.2.1 west/a",
		"10.9.0.0/24 via 172.18.3.1 south/a: node west/a claims this pod CIDR too and goes first",
		"10.9.1.0/24 via 172.18.3.1 south/a",
		"10.9.2.0/24 via invalid IP north/a: node north/a has no IPv4 address",
		"10.9.2.0/24 via 172.18.5.1 north/b",
	}
	for range nodes {
		nodes = append(nodes[1:], nodes[0])
		var got []string
		for _, c := range planRoutes(nodes, testLocal) {
			got = append(got, describe(c))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("claims (-want +got):\n%s", diff)
		}
	}
}

// A node that claims what is not between pods does not get it.
func TestPlanRoutesRefuses(t *testing.T) {
	for cidr, why := range map[string]string{
		"0.0.0.0/0":           "default route",
		"::/0":                "default route",
		"0.0.0.0/1":           "overlaps 0.0.0.0/8",
		"128.0.0.0/1":         "overlaps 169.254.0.0/16",
		"127.0.0.0/8":         "overlaps 127.0.0.0/8",
		"127.1.2.0/24":        "overlaps 127.0.0.0/8",
		"169.254.169.254/32":  "overlaps 169.254.0.0/16",
		"224.0.0.0/24":        "overlaps 224.0.0.0/3",
		"255.255.255.255/32":  "overlaps 224.0.0.0/3",
		"::1/128":             "overlaps ::1/128",
		"fe80::/64":           "overlaps fe80::/10",
		"ff02::/16":           "overlaps ff00::/8",
		"::ffff:10.0.0.0/120": "overlaps ::ffff:0.0.0.0/96",
		"10.1.1.0/24":         "this node's own 10.1.1.0/24",
		"10.1.0.0/16":         "this node's own 10.1.1.0/24",
		"10.1.1.128/25":       "this node's own 10.1.1.0/24",
		"fd00:10:1::/48":      "this node's own fd00:10:1:1::/64",
		"172.18.1.0/24":       "holds the node address 172.18.1.1",
		"172.18.3.0/24":       "holds the node address 172.18.3.1",
		"fd00:18:1::1/128":    "holds the node address fd00:18:1::1",
	} {
		nodes := []node.Node{
			testNode("west", 2, "evil", []string{"172.18.2.1", "fd00:18:2::1"}, cidr),
			testNode("south", 3, "victim", []string{"172.18.3.1"}),
		}
		claims := planRoutes(nodes, testLocal)
		if len(claims) != 1 || claims[0].Err == nil || !strings.Contains(claims[0].Err.Error(), why) {
			t.Errorf("%s: claims %v, want an error about %q", cidr, claims, why)
		}
	}
	claims := planRoutes([]node.Node{testNode("west", 2, "w", []string{"172.18.1.1"}, "10.9.0.0/24")}, testLocal)
	if len(claims) != 1 || claims[0].Err == nil || !strings.Contains(claims[0].Err.Error(), "this node's address") {
		t.Errorf("node with our address: claims %v, want an error", claims)
	}
}

func testRoute(prefix, gateway string) route {
	p := netip.MustParsePrefix(prefix)
	return route{Prefix: p, Gateway: netip.MustParseAddr(gateway), IfIndex: 2, Metric: defaultMetric(p)}
}

func TestDiffRoutes(t *testing.T) {
	wanted := map[netip.Prefix]route{}
	for _, r := range []route{
		testRoute("10.2.1.0/24", "172.18.2.1"), // there already
		testRoute("10.2.2.0/24", "172.18.2.2"), // there with another gateway
		testRoute("10.2.0.0/16", "172.18.2.3"), // missing
		testRoute("10.2.3.0/26", "172.18.2.3"), // missing
		testRoute("10.3.0.0/24", "172.18.2.1"), // taken by somebody
		testRoute("10.4.0.0/24", "172.18.2.1"), // taken by somebody, and ours is there with another gateway
		testRoute("10.5.0.0/24", "172.18.2.1"), // there, and there with another metric
	} {
		wanted[r.Prefix] = r
	}
	ours := func(prefix, gateway string) kernelRoute {
		return kernelRoute{route: testRoute(prefix, gateway), Protocol: routeProtocol, Plain: true}
	}
	foreign := func(prefix, gateway string) kernelRoute {
		return kernelRoute{route: testRoute(prefix, gateway), Protocol: 3, Plain: true}
	}
	metric := ours("10.5.0.0/24", "172.18.2.1")
	metric.Metric = 7
	have := []kernelRoute{
		ours("10.2.1.0/24", "172.18.2.1"), ours("10.2.2.0/24", "172.18.2.9"),
		foreign("10.3.0.0/24", "172.18.7.7"),
		foreign("10.4.0.0/24", "172.18.7.7"), ours("10.4.0.0/24", "172.18.2.8"),
		ours("10.5.0.0/24", "172.18.2.1"), metric,
		ours("10.8.0.0/16", "172.18.2.1"), ours("10.8.1.0/24", "172.18.2.1"), // of nobody any more
		ours("10.9.0.0/24", "172.18.2.1"), // no verdict about its node
		foreign("10.10.0.0/24", "172.18.7.7"),
	}
	keep := map[netip.Prefix]bool{netip.MustParsePrefix("10.9.0.0/24"): true}

	for _, prune := range []bool{true, false} {
		changes := diffRoutes(wanted, keep, have, prune)
		var set, removed []string
		for _, c := range changes.set {
			s := c.Prefix.String()
			if c.Replace {
				s += " replace"
			}
			set = append(set, s)
		}
		for _, r := range changes.remove {
			removed = append(removed, r.Prefix.String())
		}
		wantSet := []string{"10.2.3.0/26", "10.2.2.0/24 replace", "10.2.0.0/16"}
		wantRemoved, wantWaiting := []string{"10.8.0.0/16", "10.5.0.0/24", "10.8.1.0/24"}, 0
		if !prune {
			wantRemoved, wantWaiting = []string{"10.5.0.0/24"}, 2
		}
		slices.SortFunc(removed[min(len(removed), 1):], strings.Compare) // equal lengths, in any order
		if diff := cmp.Diff(wantSet, set); diff != "" {
			t.Errorf("prune %v: set (-want +got):\n%s", prune, diff)
		}
		if diff := cmp.Diff(wantRemoved, removed); diff != "" {
			t.Errorf("prune %v: removed (-want +got):\n%s", prune, diff)
		}
		if changes.waiting != wantWaiting {
			t.Errorf("prune %v: %d routes wait, want %d", prune, changes.waiting, wantWaiting)
		}
		if len(changes.conflicts) != 2 {
			t.Errorf("prune %v: conflicts %v, want those of 10.3.0.0/24 and 10.4.0.0/24", prune, changes.conflicts)
		}
	}
}
