// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
)

// wireNode is the JSON of a node, in the order in which writers emit it. Names are matched without regard to case.
type wireNode struct {
	Name                    string
	Cluster                 string
	IPAddresses             []wireAddress
	IPv4AllocCIDR           *wireCIDR
	IPv4SecondaryAllocCIDRs []wireCIDR
	IPv6AllocCIDR           *wireCIDR
	IPv6SecondaryAllocCIDRs []wireCIDR
	IPv4HealthIP            wireAddr
	IPv6HealthIP            wireAddr
	IPv4IngressIP           wireAddr
	IPv6IngressIP           wireAddr
	ClusterID               uint32
	Source                  string
	EncryptionKey           uint8
	Labels                  map[string]string
	Annotations             map[string]string
	WireguardPubKey         string
	BootID                  string
}

type wireAddress struct {
	Type string
	IP   wireAddr
}

// wireAddr is an address as text, empty for none.
type wireAddr netip.Addr

func (a wireAddr) MarshalText() ([]byte, error) { return netip.Addr(a).MarshalText() }

func (a *wireAddr) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*a = wireAddr{}
		return nil
	}
	addr, err := netip.ParseAddr(string(text))
	if err != nil || addr.Zone() != "" {
		return fmt.Errorf("invalid IP address: %q", text)
	}
	*a = wireAddr(addr.Unmap())
	return nil
}

// wireCIDR is a prefix as address and mask, the mask in base64 of its 4 or 16 bytes.
type wireCIDR struct {
	IP   wireAddr
	Mask []byte
}

func encodeCIDR(p netip.Prefix) wireCIDR {
	return wireCIDR{IP: wireAddr(p.Addr()), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func (c wireCIDR) prefix() (netip.Prefix, error) {
	addr := netip.Addr(c.IP)
	ones, bits := net.IPMask(c.Mask).Size()
	if !addr.IsValid() || bits != addr.BitLen() {
		return netip.Prefix{}, fmt.Errorf("invalid CIDR: address %q with mask %x", addr, c.Mask)
	}
	return netip.PrefixFrom(addr, ones).Masked(), nil
}

// Parse decodes what a node published. Missing and unknown fields are fine; an address or prefix that is none is not.
func Parse(value []byte) (Node, error) {
	var w wireNode
	if err := json.Unmarshal(value, &w); err != nil {
		return Node{}, fmt.Errorf("node: %w", err)
	}
	n := Node{
		Name: w.Name, Cluster: w.Cluster, ClusterID: w.ClusterID, Source: w.Source, EncryptKey: w.EncryptionKey,
		IPv4Health: netip.Addr(w.IPv4HealthIP), IPv6Health: netip.Addr(w.IPv6HealthIP),
		IPv4Ingress: netip.Addr(w.IPv4IngressIP), IPv6Ingress: netip.Addr(w.IPv6IngressIP),
		Labels: w.Labels, Annotations: w.Annotations, WireguardPubKey: w.WireguardPubKey, BootID: w.BootID,
	}
	for _, a := range w.IPAddresses {
		ip := netip.Addr(a.IP)
		if !ip.IsValid() {
			return Node{}, fmt.Errorf("node: invalid IP address: \"\" of type %q", a.Type)
		}
		n.Addresses = append(n.Addresses, Address{Type: a.Type, IP: ip})
	}
	if err := n.decodeCIDRs(w); err != nil {
		return Node{}, fmt.Errorf("node: %w", err)
	}
	return n, n.checkFamilies()
}

func (n *Node) decodeCIDRs(w wireNode) (err error) {
	for _, f := range []struct {
		from *wireCIDR
		to   *netip.Prefix
	}{{w.IPv4AllocCIDR, &n.IPv4PodCIDR}, {w.IPv6AllocCIDR, &n.IPv6PodCIDR}} {
		if f.from == nil {
			continue
		}
		if *f.to, err = f.from.prefix(); err != nil {
			return err
		}
	}
	for _, f := range []struct {
		from []wireCIDR
		to   *[]netip.Prefix
	}{{w.IPv4SecondaryAllocCIDRs, &n.IPv4SecondaryPodCIDRs}, {w.IPv6SecondaryAllocCIDRs, &n.IPv6SecondaryPodCIDRs}} {
		for _, c := range f.from {
			p, err := c.prefix()
			if err != nil {
				return err
			}
			*f.to = append(*f.to, p)
		}
	}
	return nil
}

// checkFamilies refuses a node that puts an address of one family into a field of the other: whoever reads the field
// relies on it.
func (n *Node) checkFamilies() error {
	for field, addr := range map[string]struct {
		netip.Addr
		v6 bool
	}{
		"IPv4HealthIP": {n.IPv4Health, false}, "IPv6HealthIP": {n.IPv6Health, true},
		"IPv4IngressIP": {n.IPv4Ingress, false}, "IPv6IngressIP": {n.IPv6Ingress, true},
		"IPv4AllocCIDR": {n.IPv4PodCIDR.Addr(), false}, "IPv6AllocCIDR": {n.IPv6PodCIDR.Addr(), true},
	} {
		if addr.IsValid() && addr.Is6() != addr.v6 {
			return fmt.Errorf("node: %s holds %s, of the other family", field, addr.Addr)
		}
	}
	for v6, prefixes := range map[bool][]netip.Prefix{false: n.IPv4SecondaryPodCIDRs, true: n.IPv6SecondaryPodCIDRs} {
		for _, p := range prefixes {
			if p.Addr().Is6() != v6 {
				return fmt.Errorf("node: secondary CIDR %s is of the other family than its field", p)
			}
		}
	}
	return nil
}

// Marshal encodes the node as peers expect it: every field, in their order.
func (n Node) Marshal() ([]byte, error) {
	w := wireNode{
		Name: n.Name, Cluster: n.Cluster, ClusterID: n.ClusterID, Source: n.Source, EncryptionKey: n.EncryptKey,
		IPv4HealthIP: wireAddr(n.IPv4Health), IPv6HealthIP: wireAddr(n.IPv6Health),
		IPv4IngressIP: wireAddr(n.IPv4Ingress), IPv6IngressIP: wireAddr(n.IPv6Ingress),
		Labels: n.Labels, Annotations: n.Annotations, WireguardPubKey: n.WireguardPubKey, BootID: n.BootID,
	}
	for _, a := range n.Addresses {
		w.IPAddresses = append(w.IPAddresses, wireAddress{Type: a.Type, IP: wireAddr(a.IP)})
	}
	if n.IPv4PodCIDR.IsValid() {
		c := encodeCIDR(n.IPv4PodCIDR)
		w.IPv4AllocCIDR = &c
	}
	if n.IPv6PodCIDR.IsValid() {
		c := encodeCIDR(n.IPv6PodCIDR)
		w.IPv6AllocCIDR = &c
	}
	for _, p := range n.IPv4SecondaryPodCIDRs {
		w.IPv4SecondaryAllocCIDRs = append(w.IPv4SecondaryAllocCIDRs, encodeCIDR(p))
	}
	for _, p := range n.IPv6SecondaryPodCIDRs {
		w.IPv6SecondaryAllocCIDRs = append(w.IPv6SecondaryAllocCIDRs, encodeCIDR(p))
	}
	value, err := json.Marshal(w)
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", n.Name, err)
	}
	return value, nil
}
