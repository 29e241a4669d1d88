// SPDX-License-Identifier: Apache-2.0

package source

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/weftmesh/weft/service"
)

// NamespaceAnnotation, on a namespace, says whether its services can be global: they can if it is "true", in any case.
const NamespaceAnnotation = "clustermesh.cilium.io/global"

// lastApplied is a copy of the object that kubectl keeps, which nobody here reads.
const lastApplied = "kubectl.kubernetes.io/last-applied-configuration"

func (k *Kubernetes) putNamespace(n *corev1.Namespace) {
	text, said := n.Annotations[NamespaceAnnotation]
	k.PutNamespace(n.Name, strings.EqualFold(text, "true"), said)
}

func (k *Kubernetes) removeNamespace(n *corev1.Namespace) { k.PutNamespace(n.Name, false, false) }

func (k *Kubernetes) replaceNamespaces(all []*corev1.Namespace) {
	there := make(map[string]bool, len(all))
	for _, n := range all {
		there[n.Name] = true
		k.putNamespace(n)
	}
	k.KeepNamespaces(func(namespace string) bool { return there[namespace] })
}

func (k *Kubernetes) putService(s *corev1.Service) {
	name := service.Name{Namespace: s.Namespace, Name: s.Name}
	if s.Spec.Type == corev1.ServiceTypeExternalName { // a name elsewhere has no backends
		k.removeService(s)
		return
	}
	made, err := makeService(s)
	k.reject("service", name.String(), err)
	k.PutService(made)
}

func (k *Kubernetes) removeService(s *corev1.Service) {
	name := service.Name{Namespace: s.Namespace, Name: s.Name}
	k.reject("service", name.String(), nil)
	k.RemoveService(name)
}

func (k *Kubernetes) replaceServices(all []*corev1.Service) {
	there := make(map[service.Name]bool, len(all))
	for _, s := range all {
		there[service.Name{Namespace: s.Namespace, Name: s.Name}] = true
		k.putService(s)
	}
	k.Keep(func(name service.Name) bool { return there[name] })
	k.keepRejected("service ", func(name string) bool {
		parsed, err := service.ParseName(name)
		return err == nil && there[parsed]
	})
}

// keepRejected forgets what was wrong with objects that are gone.
func (k *Kubernetes) keepRejected(kind string, keep func(name string) bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.rejected, func(key, _ string) bool {
		name, ok := strings.CutPrefix(key, kind)
		return ok && !keep(name)
	})
}

// makeService takes what it can of a Service. The error says what it could not.
func makeService(from *corev1.Service) (Service, error) {
	s := Service{
		Name: service.Name{Namespace: from.Namespace, Name: from.Name}, Labels: maps.Clone(from.Labels), Selector: maps.Clone(from.Spec.Selector),
		Annotations: maps.Clone(from.Annotations),
	}
	delete(s.Annotations, lastApplied)
	var errs []error
	ips := from.Spec.ClusterIPs
	if len(ips) == 0 && from.Spec.ClusterIP != "" {
		ips = []string{from.Spec.ClusterIP}
	}
	for _, text := range ips {
		if text == corev1.ClusterIPNone {
			continue
		}
		addr, err := parseAddr(text)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s.Addresses = append(s.Addresses, addr)
	}
	for _, p := range from.Spec.Ports {
		protocol, err := parseProtocol(p.Protocol)
		if err == nil && (p.Port < 1 || p.Port > 65535) {
			err = fmt.Errorf("port %d is none", p.Port)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s.Ports = append(s.Ports, Port{p.Name, protocol, uint16(p.Port)})
	}
	s.Ports = sortedPorts(s.Ports)
	if from.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		s.Affinity = affinityTime(from.Spec.SessionAffinityConfig)
	}
	return s, errors.Join(errs...)
}

// affinityTime is what the server itself fills in where nothing is given.
func affinityTime(c *corev1.SessionAffinityConfig) time.Duration {
	if c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil && *c.ClientIP.TimeoutSeconds > 0 {
		return time.Duration(*c.ClientIP.TimeoutSeconds) * time.Second
	}
	return time.Duration(corev1.DefaultClientIPServiceAffinitySeconds) * time.Second
}

func parseAddr(text string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(text)
	if err != nil || addr.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%q is not an IP address", text)
	}
	return addr.Unmap(), nil
}

// parseProtocol reads a protocol, which is TCP where none is given.
func parseProtocol(p corev1.Protocol) (service.Protocol, error) {
	if p == "" {
		return service.TCP, nil
	}
	return service.ParseProtocol(string(p))
}

// owner is the service that a slice belongs to.
func owner(s *discoveryv1.EndpointSlice) service.Name {
	return service.Name{Namespace: s.Namespace, Name: s.Labels[discoveryv1.LabelServiceName]}
}

func (k *Kubernetes) putSlice(s *discoveryv1.EndpointSlice) {
	name, backends, err := owner(s), []Backend(nil), error(nil)
	if name.Name != "" && s.AddressType != discoveryv1.AddressTypeFQDN {
		backends, err = makeBackends(s)
	}
	k.reject("endpointslice", s.Namespace+"/"+s.Name, err)
	key := s.Namespace + "/" + s.Name
	if before, ok := k.owners[key]; ok && before != name { // by its label, which anybody may change
		k.RemoveBackends(before, s.Name)
	}
	delete(k.owners, key)
	if name.Name == "" || s.AddressType == discoveryv1.AddressTypeFQDN {
		return
	}
	k.owners[key] = name
	k.PutBackends(name, s.Name, backends)
}

func (k *Kubernetes) removeSlice(s *discoveryv1.EndpointSlice) {
	key := s.Namespace + "/" + s.Name
	k.reject("endpointslice", key, nil)
	if name, ok := k.owners[key]; ok {
		k.RemoveBackends(name, s.Name)
		delete(k.owners, key)
	}
}

func (k *Kubernetes) replaceSlices(all []*discoveryv1.EndpointSlice) {
	there := make(map[string]bool, len(all))
	for _, s := range all {
		there[s.Namespace+"/"+s.Name] = true
		k.putSlice(s)
	}
	for key, name := range k.owners {
		if !there[key] {
			k.RemoveBackends(name, strings.TrimPrefix(key, name.Namespace+"/"))
			delete(k.owners, key)
		}
	}
	k.keepRejected("endpointslice ", func(name string) bool { return there[name] })
}

// makeBackends takes what it can of a slice. The error says what it could not.
func makeBackends(s *discoveryv1.EndpointSlice) (backends []Backend, err error) {
	var (
		ports []Port
		errs  []error
	)
	for _, p := range s.Ports {
		if p.Port == nil { // all ports, which is not a port of a service
			continue
		}
		protocol, err := parseProtocol(deref(p.Protocol))
		if err == nil && (*p.Port < 1 || *p.Port > 65535) {
			err = fmt.Errorf("port %d is none", *p.Port)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		ports = append(ports, Port{deref(p.Name), protocol, uint16(*p.Port)})
	}
	ports = sortedPorts(ports)
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		b := Backend{Ports: ports, Hostname: deref(e.Hostname), Zone: deref(e.Zone), Node: deref(e.NodeName)}
		// What is not said is true, and serving is what ready is.
		b.Ready = e.Conditions.Ready == nil || *e.Conditions.Ready
		b.Serving = b.Ready
		if e.Conditions.Serving != nil {
			b.Serving = *e.Conditions.Serving
		}
		b.Terminating = deref(e.Conditions.Terminating)
		if e.Hints != nil {
			for _, z := range e.Hints.ForZones {
				b.ForZones = append(b.ForZones, z.Name)
			}
		}
		for _, text := range e.Addresses {
			if b.Addr, err = parseAddr(text); err != nil {
				errs = append(errs, err)
				continue
			}
			backends = append(backends, b)
		}
	}
	return backends, errors.Join(errs...)
}

func deref[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}
