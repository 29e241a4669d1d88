// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"net/netip"
	"slices"
	"sort"
)

// NamedPort is a port at which backends, or frontends, are reached. The name, which may be empty, is what a port of a service
// has in common with the ports of its backends.
type NamedPort struct {
	Name     string
	Protocol Protocol
	Port     uint16
}

// State is whether a backend is to be used.
type State uint8

// The states of backends. What is neither ready nor serving is not offered at all.
const (
	Ready    State = iota
	Draining       // it ends, but answers still: used where nobody is ready
)

var stateNames = [...]string{Ready: "ready", Draining: "draining"}

func (s State) String() string { return stateNames[s] }

// Subset is addresses that are reached at the same ports, and are in the same state.
type Subset struct {
	Ports []NamedPort // sorted by name and protocol, unique
	State State
	Addrs []netip.Addr // sorted and unique; none is v4-mapped or has a zone
}

// target returns the port at which the addresses are reached for the port of a service; 0: at none.
func (s *Subset) target(name string, protocol Protocol) uint16 {
	for i := range s.Ports {
		if p := &s.Ports[i]; p.Protocol == protocol && p.Name == name {
			return p.Port
		}
	}
	return 0
}

// family returns the addresses of one family.
func (s *Subset) family(v6 bool) []netip.Addr {
	all := s.Addrs
	switch {
	case len(all) == 0:
		return nil
	case all[0].Is6() == v6 && all[len(all)-1].Is6() == v6:
		return all
	}
	n := sort.Search(len(all), func(i int) bool { return all[i].Is6() })
	if v6 {
		return all[n:]
	}
	return all[:n]
}

// has reports whether addr is among the addresses.
func (s *Subset) has(addr netip.Addr) bool {
	_, found := slices.BinarySearchFunc(s.Addrs, addr, netip.Addr.Compare)
	return found
}

// Offer is what one cluster offers of one service: all of it, or one slice of it. Offers in a [Table] are shared: nobody
// changes one.
type Offer struct {
	Service   Name
	Cluster   string
	ClusterID uint32
	// Slice is the name of the slice; empty: the offer is the whole service.
	Slice           string
	Shared          bool // the backends are for other clusters, too
	IncludeExternal bool // the cluster itself wants backends of other clusters
	// Frontends are the addresses of the service in its own cluster. They mean nothing elsewhere.
	Frontends []Subset
	Backends  []Subset
}

// Len is the number of backend addresses.
func (o *Offer) Len() int {
	n := 0
	for i := range o.Backends {
		n += len(o.Backends[i].Addrs)
	}
	return n
}

// normalize sorts what stands in no order, and drops what stands there twice or is empty.
func normalize(subsets []Subset) []Subset {
	for i := range subsets {
		s := &subsets[i]
		sortPorts(&s.Ports)
		if !slices.IsSortedFunc(s.Addrs, netip.Addr.Compare) {
			slices.SortFunc(s.Addrs, netip.Addr.Compare)
		}
		if s.Addrs = slices.Compact(s.Addrs); cap(s.Addrs)-len(s.Addrs) > len(s.Addrs)/8 {
			s.Addrs = slices.Clone(s.Addrs) // they stay for long
		}
	}
	return slices.DeleteFunc(subsets, func(s Subset) bool { return len(s.Addrs) == 0 })
}

func comparePorts(a, b NamedPort) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
}

func sortPorts(ports *[]NamedPort) {
	if !slices.IsSortedFunc(*ports, comparePorts) {
		slices.SortFunc(*ports, comparePorts)
	}
	*ports = slices.CompactFunc(*ports, func(a, b NamedPort) bool { return a.Name == b.Name && a.Protocol == b.Protocol })
}

// sameShape reports whether a and b differ in nothing but their addresses, subset by subset.
func sameShape(a, b []Subset) bool {
	return slices.EqualFunc(a, b, func(a, b Subset) bool { return a.State == b.State && slices.Equal(a.Ports, b.Ports) })
}
