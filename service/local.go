// SPDX-License-Identifier: Apache-2.0

package service

import (
	"fmt"
	"net/netip"
	"slices"
)

// Source is where a local service comes from. Where several have a service of one name, the least counts.
type Source uint8

// The sources of local services, the strongest first.
const (
	Kubernetes Source = iota
	Files
	Etcd // what our own cluster's operator has published
	sources
)

var sourceNames = [...]string{Kubernetes: "kubernetes", Files: "files", Etcd: "etcd"}

func (s Source) String() string {
	if s < sources {
		return sourceNames[s]
	}
	return fmt.Sprintf("source %d", uint8(s))
}

// Local is a service of our own cluster. Those in a [Table] are shared: nobody changes one.
type Local struct {
	Service Name
	Source  Source
	Settings
	// Addrs, each with each port, are where the service is reached. A headless service has none.
	Addrs []netip.Addr
	Ports []NamedPort
	// ClientAffinity is for how many seconds a client stays with a backend; 0: it does not.
	ClientAffinity uint32
	Backends       []Subset
}

// frontends yields each frontend once, with the name of its port.
func (l *Local) frontends(yield func(at Frontend, port string)) {
	for _, addr := range l.Addrs {
		for i, p := range l.Ports {
			twice := slices.ContainsFunc(l.Ports[:i], func(q NamedPort) bool { return q.Port == p.Port && q.Protocol == p.Protocol })
			if !twice {
				yield(Frontend{addr, p.Port, p.Protocol}, p.Name)
			}
		}
	}
}

// sameBut reports whether l and m differ in nothing but their backends.
func (l *Local) sameBut(m *Local) bool {
	return l.Settings == m.Settings && l.ClientAffinity == m.ClientAffinity && slices.Equal(l.Addrs, m.Addrs) && slices.Equal(l.Ports, m.Ports)
}

// normalized is a copy in the form that the table needs.
func (l Local) normalized() *Local {
	l.Addrs, l.Ports = slices.Clone(l.Addrs), slices.Clone(l.Ports)
	for i, addr := range l.Addrs {
		l.Addrs[i] = addr.Unmap()
	}
	slices.SortFunc(l.Addrs, netip.Addr.Compare)
	l.Addrs = slices.Compact(l.Addrs)
	sortPorts(&l.Ports)
	l.Backends = normalize(slices.Clone(l.Backends))
	return &l
}
