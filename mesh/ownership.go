// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"net/netip"
	"slices"

	"github.com/weftmesh/weft/node"
)

// usedPrefix is a prefix that a node has, and what for.
type usedPrefix struct {
	prefix netip.Prefix
	use    use
}

// nodePrefixes lists all that a node says it has.
func nodePrefixes(n *node.Node) []usedPrefix {
	var all []usedPrefix
	for _, a := range n.Addresses {
		u := useNode
		if a.Type == node.CiliumInternalIP {
			u = usePod
		}
		all = append(all, usedPrefix{single(a.IP), u})
	}
	for _, addr := range []netip.Addr{n.IPv4Health, n.IPv6Health, n.IPv4Ingress, n.IPv6Ingress} {
		if addr.IsValid() {
			all = append(all, usedPrefix{single(addr), usePod})
		}
	}
	for _, p := range n.PodCIDRs() {
		all = append(all, usedPrefix{p, usePod})
	}
	return all
}

func prefixesOf(n *node.Node) []netip.Prefix {
	prefixes := nodePrefixes(n)
	all := make([]netip.Prefix, len(prefixes)) // kept for as long as the node is, so of its exact size
	for i := range prefixes {
		all[i] = prefixes[i].prefix
	}
	return all
}

func addressesOf(n *node.Node) []netip.Addr {
	var all []netip.Addr
	for _, a := range n.Addresses {
		all = append(all, a.IP)
	}
	return all
}

// without returns the node without some of its prefixes.
func without(n node.Node, taken map[netip.Prefix]bool) node.Node {
	n.Addresses = slices.DeleteFunc(slices.Clone(n.Addresses), func(a node.Address) bool { return taken[single(a.IP)] })
	for _, addr := range []*netip.Addr{&n.IPv4Health, &n.IPv6Health, &n.IPv4Ingress, &n.IPv6Ingress} {
		if taken[single(*addr)] {
			*addr = netip.Addr{}
		}
	}
	for _, p := range []*netip.Prefix{&n.IPv4PodCIDR, &n.IPv6PodCIDR} {
		if taken[*p] {
			*p = netip.Prefix{}
		}
	}
	for _, list := range []*[]netip.Prefix{&n.IPv4SecondaryPodCIDRs, &n.IPv6SecondaryPodCIDRs} {
		*list = slices.DeleteFunc(slices.Clone(*list), func(p netip.Prefix) bool { return taken[p] })
	}
	return n
}
