// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
)

// errNoAddress indicates a machine without an address that others could reach it by.
var errNoAddress = errors.New("this node has no global address on its devices: give one with --node-ip")

// detectNodeIPs finds the addresses of this node, IPv4 first, at most one of each family: the first global one on the
// devices named. If none is named, the one from which a packet to the world would go, else the first on any device that
// is up.
func detectNodeIPs(devices []string) ([]netip.Addr, error) {
	var candidates []netip.Addr
	if len(devices) == 0 {
		candidates = append(candidates, sourceAddress("udp4", "192.0.2.1:9"), sourceAddress("udp6", "[2001:db8::1]:9"))
	}
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	for _, i := range interfaces {
		named := slices.Contains(devices, i.Name)
		if i.Flags&net.FlagLoopback != 0 || (!named && (len(devices) > 0 || i.Flags&net.FlagUp == 0)) {
			continue
		}
		addrs, err := i.Addrs()
		if err != nil {
			return nil, fmt.Errorf("list addresses of %s: %w", i.Name, err)
		}
		for _, a := range addrs {
			if prefix, err := netip.ParsePrefix(a.String()); err == nil {
				candidates = append(candidates, prefix.Addr().Unmap())
			}
		}
	}
	candidates = slices.DeleteFunc(candidates, func(a netip.Addr) bool { return !a.IsGlobalUnicast() })
	var ips []netip.Addr
	for _, v6 := range []bool{false, true} {
		if of := familyOf(candidates, v6); len(of) > 0 {
			ips = append(ips, of[0])
		}
	}
	if len(ips) == 0 {
		return nil, errNoAddress
	}
	return ips, nil
}

// sourceAddress is the address that the kernel would choose for packets to a destination; the zero Addr if there is no way
// there. No packet is sent.
func sourceAddress(network, destination string) netip.Addr {
	conn, err := net.Dial(network, destination)
	if err != nil {
		return netip.Addr{}
	}
	defer conn.Close()
	local, err := netip.ParseAddrPort(conn.LocalAddr().String())
	if err != nil {
		return netip.Addr{}
	}
	return local.Addr().Unmap().WithZone("")
}

// self is what this node says of itself.
func (c *agentConfig) self() node.Node {
	n := node.Node{
		Name: c.nodeName, Cluster: c.clusterName, ClusterID: uint32(c.clusterID), Source: ipcache.Local.String(), BootID: bootID(),
	}
	for _, ip := range c.nodeIPs {
		n.Addresses = append(n.Addresses, node.Address{Type: node.InternalIP, IP: ip})
	}
	for _, p := range c.podCIDRs {
		primary, secondary := &n.IPv4PodCIDR, &n.IPv4SecondaryPodCIDRs
		if p.Addr().Is6() {
			primary, secondary = &n.IPv6PodCIDR, &n.IPv6SecondaryPodCIDRs
		}
		if primary.IsValid() {
			*secondary = append(*secondary, p)
		} else {
			*primary = p
		}
	}
	return n
}

// bootID tells one boot of the machine from another; empty where the kernel does not say.
func bootID() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
}

// selfClaims are the claims of this node for its own addresses.
func selfClaims(n node.Node) []ipcache.Op {
	var ops []ipcache.Op
	for _, a := range n.Addresses {
		ops = append(ops, ipcache.Op{Claim: ipcache.Claim{
			Prefix: netip.PrefixFrom(a.IP, a.IP.BitLen()),
			Owner:  ipcache.Owner{Cluster: identity.ClusterID(n.ClusterID), Source: ipcache.Local, Object: "node/" + n.Name},
			Entry:  ipcache.Entry{Identity: identity.Host},
		}})
	}
	return ops
}

// ownPrefixes are the addresses and the pod CIDRs of this node.
func ownPrefixes(n node.Node) []netip.Prefix {
	prefixes := n.PodCIDRs()
	for _, a := range n.Addresses {
		prefixes = append(prefixes, netip.PrefixFrom(a.IP, a.IP.BitLen()))
	}
	return prefixes
}
