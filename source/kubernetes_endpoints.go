// SPDX-License-Identifier: Apache-2.0

//lint:file-ignore SA1019 Endpoints are deprecated, and are all that a server without EndpointSlices has.

package source

import (
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/weftmesh/weft/internal/kube"
	"github.com/weftmesh/weft/service"
)

// endpoints is the kind whose objects stand in for EndpointSlices.
func (k *Kubernetes) endpoints() kube.Kind {
	store := kube.NewReplica(k.putEndpoints, k.removeEndpoints, k.replaceEndpoints)
	return kube.Kind{Client: k.core, Name: "endpoints", Which: notLeases, Object: new(corev1.Endpoints), Store: store}
}

// notLeases leaves out Endpoints that are none: components of Kubernetes used to elect their leaders by them, and wrote them
// every two seconds.
var notLeases = fields.AndSelectors(
	fields.OneTermNotEqualSelector("metadata.name", "kube-scheduler"),
	fields.OneTermNotEqualSelector("metadata.name", "kube-controller-manager"),
)

func (k *Kubernetes) putEndpoints(e *corev1.Endpoints) {
	name := service.Name{Namespace: e.Namespace, Name: e.Name}
	var (
		backends []Backend
		errs     []error
	)
	for i := range e.Subsets {
		made, err := subsetBackends(&e.Subsets[i])
		backends, errs = append(backends, made...), append(errs, err)
	}
	// An address may be in several subsets with different ports.
	slices.SortStableFunc(backends, func(a, b Backend) int { return a.Addr.Compare(b.Addr) })
	k.reject("endpoints", name.String(), errors.Join(errs...))
	k.PutBackends(name, e.Name, joined(backends))
}

func (k *Kubernetes) removeEndpoints(e *corev1.Endpoints) {
	name := service.Name{Namespace: e.Namespace, Name: e.Name}
	k.reject("endpoints", name.String(), nil)
	k.RemoveBackends(name, e.Name)
}

func (k *Kubernetes) replaceEndpoints(all []*corev1.Endpoints) {
	there := make(map[service.Name]bool, len(all))
	for _, e := range all {
		there[service.Name{Namespace: e.Namespace, Name: e.Name}] = true
		k.putEndpoints(e)
	}
	k.KeepBackends(func(name service.Name, _ string) bool { return there[name] })
	k.keepRejected("endpoints ", func(name string) bool {
		parsed, err := service.ParseName(name)
		return err == nil && there[parsed]
	})
}

// subsetBackends takes what it can of a subset of Endpoints. Addresses that are not ready are of no use to anybody.
func subsetBackends(s *corev1.EndpointSubset) (backends []Backend, err error) {
	var (
		ports []Port
		errs  []error
	)
	for _, p := range s.Ports {
		protocol, err := parseProtocol(p.Protocol)
		if err == nil && (p.Port < 1 || p.Port > 65535) {
			err = fmt.Errorf("port %d is none", p.Port)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		ports = append(ports, Port{p.Name, protocol, uint16(p.Port)})
	}
	ports = sortedPorts(ports)
	for _, a := range s.Addresses {
		addr, err := parseAddr(a.IP)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		backends = append(backends, Backend{Addr: addr, Ports: ports, Ready: true, Serving: true, Hostname: a.Hostname, Node: deref(a.NodeName)})
	}
	return backends, errors.Join(errs...)
}
