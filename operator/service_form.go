// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"github.com/weftmesh/weft/service"
	"github.com/weftmesh/weft/source"
)

// ServiceForm is how services are written in etcd.
type ServiceForm interface {
	// String returns the name of the duty that publishes in this form.
	String() string
	// prefix is where all clusters' services are.
	prefix() string
	// values are the keys of a service, relative to the prefix and the cluster.
	values(s *source.Service, cluster string, clusterID uint32) ([]keyValue, error)
}

var (
	_ ServiceForm = WholeServices{}
	_ ServiceForm = (*ServiceSlices)(nil)
)

// WholeServices writes a service with all its backends under one key (format.md, A.7).
type WholeServices struct{}

func (WholeServices) String() string { return "services" }

func (WholeServices) prefix() string { return service.StatePrefix }

func (WholeServices) values(s *source.Service, cluster string, clusterID uint32) ([]keyValue, error) {
	value, err := json.Marshal(makeService(s, cluster, clusterID))
	if err != nil {
		return nil, err
	}
	return []keyValue{{s.Name.String(), value}}, nil
}

// ServiceSlices writes the backends of a service in slices (format.md, A.10): those of Kubernetes one by one, so that a change
// costs as much as its slice.
type ServiceSlices struct{ writer *service.SliceWriter }

// NewServiceSlices returns the form.
func NewServiceSlices() (*ServiceSlices, error) {
	w, err := service.NewSliceWriter()
	return &ServiceSlices{w}, err
}

func (*ServiceSlices) String() string { return "endpointslices" }

func (*ServiceSlices) prefix() string { return service.SlicePrefix }

func (f *ServiceSlices) values(s *source.Service, cluster string, clusterID uint32) (all []keyValue, err error) {
	for _, piece := range s.Pieces {
		for i, slice := range makeSlices(piece.Backends) {
			slice.Cluster, slice.ClusterID, slice.Service, slice.Name = cluster, clusterID, s.Name, piece.Name
			if i > 0 { // with a dot, which no service has in its name
				slice.Name = fmt.Sprintf("%s.%d", piece.Name, i+1)
			}
			value, err := f.writer.Marshal(&slice)
			if err != nil {
				return nil, err
			}
			all = append(all, keyValue{s.Namespace + "/" + slice.Name, value})
		}
	}
	return all, nil
}

// largestSlice is how many endpoints a slice of Kubernetes has at most.
const largestSlice = 1000

// makeSlices makes slices of the usable ones of backends: one, if they are a slice of Kubernetes, where all are of one family
// and have the same ports.
func makeSlices(backends []source.Backend) (all []service.Slice) {
	for i := range backends {
		b := &backends[i]
		if !b.Usable() {
			continue
		}
		fits := func(s service.Slice) bool {
			return s.Endpoints[0].Addr.Is6() == b.Addr.Is6() && len(s.Endpoints) < largestSlice &&
				slices.EqualFunc(s.Ports, b.Ports, func(p service.NamedPort, q source.Port) bool { return p == service.NamedPort(q) })
		}
		at := slices.IndexFunc(all, fits)
		if at < 0 {
			at = len(all)
			all = append(all, service.Slice{})
			for _, p := range b.Ports {
				all[at].Ports = append(all[at].Ports, service.NamedPort(p))
			}
		}
		all[at].Endpoints = append(all[at].Endpoints, service.SliceEndpoint{
			Addr: b.Addr, Ready: b.Ready, Serving: b.Serving, Terminating: b.Terminating,
			Hostname: b.Hostname, Node: b.Node, Zone: b.Zone, ForZones: b.ForZones,
		})
	}
	return all
}

// exported reports whether the annotations of a service say that other clusters may use its backends. What else they say
// wrongly is a matter of who serves it here.
func exported(annotations map[string]string) bool {
	settings, _ := service.ParseSettings(annotations)
	return settings.Global && settings.Shared
}

// makeService is a service as other clusters see it (format.md, A.7): with those backends that are ready, or still serve.
func makeService(from *source.Service, cluster string, clusterID uint32) service.Service {
	s := service.Service{
		Cluster: cluster, ClusterID: clusterID, Namespace: from.Namespace, Name: from.Name.Name, IncludeExternal: true, Shared: true,
		Labels: present(from.Labels), Selector: present(from.Selector), Frontends: make(map[netip.Addr]service.Ports),
		Backends: make(map[netip.Addr]service.Ports), Hostnames: make(map[netip.Addr]string), Zones: make(map[netip.Addr]service.Zone),
	}
	for _, addr := range from.Addresses {
		s.Frontends[addr] = wirePorts(from.Ports)
	}
	for i := range from.Backends {
		b := &from.Backends[i]
		if !b.Usable() {
			continue
		}
		s.Backends[b.Addr] = wirePorts(b.Ports)
		if b.Hostname != "" {
			s.Hostnames[b.Addr] = b.Hostname
		}
		if b.Zone != "" || len(b.ForZones) > 0 {
			z := service.Zone{Zone: b.Zone}
			for _, name := range b.ForZones {
				z.ForZones = append(z.ForZones, service.ForZone{Name: name})
			}
			s.Zones[b.Addr] = z
		}
	}
	return s
}

// present is a map that is written as one, where there is none, too.
func present(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}

func wirePorts(ports []source.Port) service.Ports {
	made := make(service.Ports, len(ports))
	for _, p := range ports {
		made[p.Name] = service.Port{Protocol: p.Protocol.String(), Port: p.Port}
	}
	return made
}
