// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"net/netip"
)

// StatePrefix, joined with cluster and node name, is where a node publishes itself.
const StatePrefix = "cilium/state/nodes/v1"

// Types of a node's addresses, of those that weft gives a meaning to.
const (
	InternalIP       = "InternalIP"
	ExternalIP       = "ExternalIP"
	CiliumInternalIP = "CiliumInternalIP" // the address of the node in its own pod network
)

// Address is one address of a node.
type Address struct {
	Type string
	IP   netip.Addr
}

// Node is what a machine says of itself. Addresses that it does not have are the zero [netip.Addr], and so for prefixes;
// prefixes are masked.
type Node struct {
	Name, Cluster string
	// ClusterID must be the id in the cluster's config.
	ClusterID uint32
	Addresses []Address

	IPv4PodCIDR, IPv6PodCIDR                     netip.Prefix
	IPv4SecondaryPodCIDRs, IPv6SecondaryPodCIDRs []netip.Prefix
	IPv4Health, IPv6Health                       netip.Addr
	IPv4Ingress, IPv6Ingress                     netip.Addr

	// Source is where the writer has the node from. Readers know better: it is kept for round trips only.
	Source string
	// EncryptKey is 0 for none, an IPsec SPI, or 255 for WireGuard.
	EncryptKey          uint8
	Labels, Annotations map[string]string
	WireguardPubKey     string
	BootID              string

	// Preference is this reader's own, and no part of what the node says of itself. It stands here so that all who ask for
	// the node's address get the same one.
	Preference Preference
}

// Key is the key under which the node publishes itself.
func (n Node) Key() string { return StatePrefix + "/" + n.Cluster + "/" + n.Name }

// IP is the node's address of one family, by which its peers reach it: the first that its Preference names, else the first
// InternalIP, else the last ExternalIP, else the first address of another type. The address in its pod network is never it. It
// is the zero Addr if there is none.
func (n Node) IP(v6 bool) netip.Addr {
	for _, choice := range n.Preference {
		for _, a := range n.Addresses {
			if a.IP.Is6() == v6 && a.Type != CiliumInternalIP && choice.matches(a) {
				return a.IP
			}
		}
	}
	var external, other netip.Addr
	for _, a := range n.Addresses {
		if a.IP.Is6() != v6 {
			continue
		}
		switch {
		case a.Type == InternalIP:
			return a.IP
		case a.Type == ExternalIP:
			external = a.IP
		case a.Type != CiliumInternalIP && !other.IsValid():
			other = a.IP
		}
	}
	if external.IsValid() {
		return external
	}
	return other
}

// PodCIDRs lists the prefixes of the node's pods, of each family the primary one first.
func (n Node) PodCIDRs() []netip.Prefix {
	var all []netip.Prefix
	for _, family := range []struct {
		primary   netip.Prefix
		secondary []netip.Prefix
	}{{n.IPv4PodCIDR, n.IPv4SecondaryPodCIDRs}, {n.IPv6PodCIDR, n.IPv6SecondaryPodCIDRs}} {
		if family.primary.IsValid() {
			all = append(all, family.primary)
		}
		all = append(all, family.secondary...)
	}
	return all
}

// Validate checks that the node is what cluster, known by clusterID, may publish under key (the last element of the whole
// key). Ids above maxCluster do not exist in the reader's mesh.
func (n Node) Validate(key, cluster string, clusterID, maxCluster uint32) error {
	switch {
	case n.Cluster != cluster:
		return fmt.Errorf("unexpected cluster name: got %q, expected %q", n.Cluster, cluster)
	case n.Name == "":
		return fmt.Errorf("name is unset")
	case n.Name != key:
		return fmt.Errorf("name does not match key: got %q, expected %q", n.Name, key)
	case n.ClusterID > maxCluster:
		return fmt.Errorf("ClusterID > %d is not supported", maxCluster)
	case n.ClusterID != clusterID:
		return fmt.Errorf("unexpected cluster ID: got %d, expected %d", n.ClusterID, clusterID)
	}
	return nil
}
