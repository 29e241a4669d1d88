// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/node"
)

// RoutingMode says who carries packets between nodes.
type RoutingMode string

const (
	// RoutingNone leaves routing to others; routes that an earlier life in another mode left are removed.
	RoutingNone RoutingMode = "none"
	// RoutingNative routes each pod CIDR of a node to that node's address, which must be on a directly connected network.
	RoutingNative RoutingMode = "native"
	// RoutingTunnel routes each pod CIDR of a node into the overlay, whose programs send packets to that node's address.
	RoutingTunnel RoutingMode = "tunnel"
)

// Valid reports whether m is a mode.
func (m RoutingMode) Valid() bool {
	return m == RoutingNone || m == RoutingNative || m == RoutingTunnel
}

// routeProtocol is the rtnetlink protocol number of weft's routes: proof of ownership, and shown by `ip route`.
const routeProtocol = 119

// route is a unicast route of the main table, in the form in which two of them are compared. Metric is the kernel's
// default of the family, so that a route of ours never stands beside itself.
type route struct {
	Prefix  netip.Prefix
	Gateway netip.Addr // the zero Addr: the device itself knows the way
	IfIndex int
	Metric  int
}

// defaultMetric is what the kernel gives a route without a metric.
func defaultMetric(p netip.Prefix) int {
	if p.Addr().Is6() {
		return 1024
	}
	return 0
}

// nodeName names a node of any cluster.
type nodeName struct {
	ID            identity.ClusterID
	Cluster, Node string
}

func (n nodeName) String() string { return n.Cluster + "/" + n.Node }

func (n nodeName) compare(o nodeName) int {
	return cmp.Or(cmp.Compare(n.ID, o.ID), cmp.Compare(n.Cluster, o.Cluster), cmp.Compare(n.Node, o.Node))
}

// routeClaim is a node's wish that a prefix be routed to it. Err says why it is not granted.
type routeClaim struct {
	Prefix netip.Prefix
	// Gateway is the node's address: with a tunnel of the underlay's family, else of that of the prefix.
	Gateway netip.Addr
	Tunnel  bool
	Node    nodeName
	Err     error
}

// localNode is what a route must not run over.
type localNode struct {
	Cluster, Node string
	IPs           []netip.Addr
	PodCIDRs      []netip.Prefix
	// Mode says how the nodes of a cluster are reached.
	Mode func(cluster string) RoutingMode
	// Underlay6: the overlay's outer headers are IPv6.
	Underlay6 bool
}

// unroutable are the prefixes that no route of ours may touch, not even with a part of a larger prefix: a node that
// claims one would take over traffic that never was between pods.
var unroutable = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/3"),
	netip.MustParsePrefix("::/128"),
	netip.MustParsePrefix("::1/128"),
	netip.MustParsePrefix("::ffff:0:0/96"),
	netip.MustParsePrefix("fe80::/10"),
	netip.MustParsePrefix("ff00::/8"),
}

// planRoutes returns the wishes of all nodes but our own, ordered by prefix, at most one for each prefix without an
// error. Where several nodes wish for one prefix, the one of the lowest cluster id goes first, then the lowest name: the
// answer does not depend on who came first.
func planRoutes(nodes []node.Node, local localNode) []routeClaim {
	var claims []routeClaim
	nodeIPs := slices.Clone(local.IPs)
	for _, n := range nodes {
		if n.Cluster == local.Cluster && n.Name == local.Node {
			continue
		}
		name := nodeName{ID: identity.ClusterID(n.ClusterID), Cluster: n.Cluster, Node: n.Name}
		claims = append(claims, local.claimsOf(n, name)...)
		for _, v6 := range []bool{false, true} {
			if ip := n.IP(v6); ip.IsValid() {
				nodeIPs = append(nodeIPs, ip)
			}
		}
	}
	slices.SortFunc(nodeIPs, netip.Addr.Compare)
	slices.SortFunc(claims, func(a, b routeClaim) int {
		return cmp.Or(
			a.Prefix.Addr().Compare(b.Prefix.Addr()),
			cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()),
			a.Node.compare(b.Node),
		)
	})
	claims = slices.Compact(claims) // a node may name a CIDR twice

	var granted routeClaim
	for i := range claims {
		c := &claims[i]
		if c.Err = refuse(*c, local, nodeIPs); c.Err != nil {
			continue
		}
		if c.Prefix == granted.Prefix {
			c.Err = fmt.Errorf("node %s claims this pod CIDR too and goes first", granted.Node)
			continue
		}
		granted = *c
	}
	return claims
}

// claimsOf are the wishes of one node: its pod CIDRs, and with a tunnel its own addresses in the pod network too.
func (l localNode) claimsOf(n node.Node, name nodeName) []routeClaim {
	var claims []routeClaim
	switch l.Mode(n.Cluster) {
	case RoutingNative:
		for _, prefix := range n.PodCIDRs() {
			claims = append(claims, routeClaim{Prefix: prefix.Masked(), Gateway: n.IP(prefix.Addr().Is6()), Node: name})
		}
	case RoutingTunnel:
		prefixes := n.PodCIDRs()
		for _, a := range n.Addresses {
			if a.Type == node.CiliumInternalIP {
				prefixes = append(prefixes, netip.PrefixFrom(a.IP, a.IP.BitLen()))
			}
		}
		for _, prefix := range prefixes {
			claims = append(claims, routeClaim{Prefix: prefix.Masked(), Gateway: n.IP(l.Underlay6), Tunnel: true, Node: name})
		}
	}
	return claims
}

// refuse returns the reason for which a wish is not granted whatever the kernel's routes are. nodeIPs is sorted.
func refuse(c routeClaim, local localNode, nodeIPs []netip.Addr) error {
	if c.Prefix.Bits() == 0 {
		return errors.New("a pod CIDR cannot be a default route")
	}
	for _, p := range unroutable {
		if p.Overlaps(c.Prefix) {
			return fmt.Errorf("pod CIDR overlaps %v, which is never routed to a node", p)
		}
	}
	for _, p := range local.PodCIDRs {
		if p.Overlaps(c.Prefix) {
			return fmt.Errorf("pod CIDR overlaps this node's own %v", p)
		}
	}
	i, _ := slices.BinarySearchFunc(nodeIPs, c.Prefix.Addr(), netip.Addr.Compare)
	if i < len(nodeIPs) && c.Prefix.Contains(nodeIPs[i]) {
		return fmt.Errorf("pod CIDR holds the node address %v", nodeIPs[i])
	}
	switch {
	case !c.Gateway.IsValid() && c.Tunnel:
		return fmt.Errorf("node %s has no address of the family of the overlay's outer headers", c.Node)
	case !c.Gateway.IsValid() && c.Prefix.Addr().Is6():
		return fmt.Errorf("node %s has no IPv6 address", c.Node)
	case !c.Gateway.IsValid():
		return fmt.Errorf("node %s has no IPv4 address", c.Node)
	case slices.Contains(local.IPs, c.Gateway):
		return fmt.Errorf("node %s has this node's address %v", c.Node, c.Gateway)
	}
	return nil
}

// kernelRoute is a route as the kernel lists it.
type kernelRoute struct {
	route
	Protocol int
	// Plain: a unicast route with one next hop, so that the embedded route says all of it.
	Plain bool
}

func (r kernelRoute) ours() bool { return r.Protocol == routeProtocol }

// routeChanges are the steps from the kernel's routes to the wanted ones, in the order in which they are to be made: the
// more specific before the less specific, and all of them before the first removal; removals the other way round.
type routeChanges struct {
	set    []routeChange
	remove []kernelRoute
	// conflicts maps a wanted prefix to the foreign route that stands in its place.
	conflicts map[netip.Prefix]kernelRoute
	// waiting is how many of our routes nobody wants but may not be pruned yet.
	waiting int
}

// routeChange adds a route, or, with Replace, puts it in place of the one of ours with the same prefix and metric.
type routeChange struct {
	route
	Replace bool
}

// diffRoutes compares what is wanted with what the kernel has. Prefixes with a foreign route are left alone entirely, and
// so are those that keep names. Our other routes are removed if prune says so.
func diffRoutes(wanted map[netip.Prefix]route, keep map[netip.Prefix]bool, have []kernelRoute, prune bool) routeChanges {
	changes := routeChanges{conflicts: map[netip.Prefix]kernelRoute{}}
	inPlace := map[netip.Prefix]bool{} // ours, with the wanted metric
	right := map[netip.Prefix]bool{}   // ours, exactly as wanted
	for _, r := range have {
		w, isWanted := wanted[r.Prefix]
		switch {
		case !r.ours():
			if isWanted {
				changes.conflicts[r.Prefix] = r
			}
		case isWanted && r.Plain && r.route == w:
			right[r.Prefix], inPlace[r.Prefix] = true, true
		case isWanted && r.Metric == w.Metric:
			inPlace[r.Prefix] = true
		}
	}
	for prefix, w := range wanted {
		if _, conflict := changes.conflicts[prefix]; !conflict && !right[prefix] {
			changes.set = append(changes.set, routeChange{route: w, Replace: inPlace[prefix]})
		}
	}
	for _, r := range have {
		w, isWanted := wanted[r.Prefix]
		_, conflict := changes.conflicts[r.Prefix]
		switch {
		case !r.ours(), conflict, keep[r.Prefix]:
		case isWanted && r.Metric == w.Metric: // right, or about to be replaced
		case isWanted, prune:
			changes.remove = append(changes.remove, r)
		default:
			changes.waiting++
		}
	}
	slices.SortFunc(changes.set, func(a, b routeChange) int { return comparePrecise(a.Prefix, b.Prefix) })
	slices.SortFunc(changes.remove, func(a, b kernelRoute) int { return comparePrecise(b.Prefix, a.Prefix) })
	return changes
}

// comparePrecise orders the longer prefix first.
func comparePrecise(a, b netip.Prefix) int {
	return cmp.Or(cmp.Compare(b.Bits(), a.Bits()), a.Addr().Compare(b.Addr()))
}
