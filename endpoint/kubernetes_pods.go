// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/weftmesh/weft/ipcache"
)

// kubernetesSource is the Source of workloads that are pods.
const kubernetesSource = "kubernetes"

// pods holds what is used of the pods of one node and of the namespaces of the cluster, and nothing else of them: neither
// objects nor lists are kept. It is safe for concurrent use.
type pods struct {
	mu         sync.Mutex
	byName     map[string]pod               // by namespace/name; guarded by mu
	namespaces map[string]map[string]string // labels by name; guarded by mu
	changed    chan struct{}                // closed and replaced at the next change; guarded by mu
}

// pod is what is used of a pod.
type pod struct {
	uid, namespace, name, serviceAccount string
	ips                                  []netip.Addr
	labels                               map[string]string
	ports                                []ipcache.NamedPort
	leaving                              bool   // it has been asked to end, and has not yet
	problem                              string // why a part of it is not used
}

func newPods() *pods {
	return &pods{byName: make(map[string]pod), namespaces: make(map[string]map[string]string), changed: make(chan struct{})}
}

// podOf takes what is used from a pod. ok is false for those that are no workloads of the mesh: pods in the network of
// their host have its address, pods that have ended have given theirs back, and others have none yet.
func podOf(p *corev1.Pod) (taken pod, ok bool) {
	if p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return pod{}, false
	}
	taken = pod{
		// What outlives the object must not keep the message that it came in.
		uid: strings.Clone(string(p.UID)), namespace: strings.Clone(p.Namespace), name: strings.Clone(p.Name),
		serviceAccount: cmp.Or(strings.Clone(p.Spec.ServiceAccountName), defaultName),
		labels:         cloneLabels(p.Labels), ports: podPorts(&p.Spec), leaving: p.DeletionTimestamp != nil,
	}
	taken.ips, taken.problem = podAddresses(&p.Status)
	return taken, len(taken.ips) > 0 || taken.problem != ""
}

func cloneLabels(labels map[string]string) map[string]string {
	cloned := make(map[string]string, len(labels))
	for key, value := range labels {
		cloned[strings.Clone(key)] = strings.Clone(value)
	}
	return cloned
}

// podAddresses are the addresses of a pod that can be a workload's. Each that cannot is left out and told.
func podAddresses(status *corev1.PodStatus) (ips []netip.Addr, problem string) {
	texts := []string{status.PodIP}
	for _, ip := range status.PodIPs {
		texts = append(texts, ip.IP)
	}
	for _, text := range texts {
		if text == "" {
			continue
		}
		ip, err := netip.ParseAddr(text)
		ip = ip.Unmap()
		switch {
		case err != nil:
			problem = fmt.Sprintf("%q is not an IP address", text)
		case ip.Zone() != "" || !ip.IsGlobalUnicast():
			problem = fmt.Sprintf("ip %s cannot be a workload's: want a global unicast address", ip)
		case !slices.Contains(ips, ip):
			ips = append(ips, ip)
		}
	}
	return ips, problem
}

// podPorts are the named ports of the containers that run as long as the pod does, by name. Of two with one name the first
// counts, as for Services.
func podPorts(spec *corev1.PodSpec) []ipcache.NamedPort {
	containers := slices.Clone(spec.Containers)
	for i := range spec.InitContainers {
		if policy := spec.InitContainers[i].RestartPolicy; policy != nil && *policy == corev1.ContainerRestartPolicyAlways {
			containers = append(containers, spec.InitContainers[i])
		}
	}
	var ports []ipcache.NamedPort
	for i := range containers {
		for _, p := range containers[i].Ports {
			known := slices.ContainsFunc(ports, func(q ipcache.NamedPort) bool { return q.Name == p.Name })
			if p.Name == "" || known || p.ContainerPort < 1 || p.ContainerPort > 65535 {
				continue
			}
			ports = append(ports, ipcache.NamedPort{
				Name: strings.Clone(p.Name), Port: uint16(p.ContainerPort), Protocol: strings.Clone(cmp.Or(string(p.Protocol), "TCP")),
			})
		}
	}
	slices.SortFunc(ports, func(a, b ipcache.NamedPort) int { return strings.Compare(a.Name, b.Name) })
	return ports
}

func podKey(p *corev1.Pod) string { return p.Namespace + "/" + p.Name }

// tell wakes who waits for a change. mu is held.
func (s *pods) tell() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// wake tells of a change that is not one of the pods.
func (s *pods) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tell()
}

// put takes one pod as it is now. What changes of a pod is mostly of no interest here, and then nobody is told.
func (s *pods) put(p *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if setPod(s.byName, p) {
		s.tell()
	}
}

// setPod puts what is used of a pod into a set of them, and reports whether that makes a difference.
func setPod(in map[string]pod, p *corev1.Pod) bool {
	key := podKey(p)
	before, was := in[key]
	now, is := podOf(p)
	if !is {
		delete(in, key)
		return was
	}
	if was && reflect.DeepEqual(before, now) {
		return false
	}
	in[key] = now
	return true
}

func (s *pods) remove(p *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := podKey(p)
	if _, ok := s.byName[key]; ok {
		delete(s.byName, key)
		s.tell()
	}
}

// replace takes all pods of the node: those that are missing are gone.
func (s *pods) replace(all []*corev1.Pod) {
	next := make(map[string]pod, len(all))
	for _, p := range all {
		setPod(next, p)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !reflect.DeepEqual(s.byName, next) {
		s.byName = next
		s.tell()
	}
}

func (s *pods) putNamespace(n *corev1.Namespace) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before, known := s.namespaces[n.Name]
	if known && maps.Equal(before, n.Labels) {
		return
	}
	s.namespaces[strings.Clone(n.Name)] = cloneLabels(n.Labels)
	s.tellOf(n.Name)
}

func (s *pods) removeNamespace(n *corev1.Namespace) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.namespaces, n.Name)
	s.tellOf(n.Name)
}

// tellOf wakes who waits for a change if a namespace has pods here. mu is held.
func (s *pods) tellOf(namespace string) {
	for _, p := range s.byName {
		if p.namespace == namespace {
			s.tell()
			return
		}
	}
}

func (s *pods) replaceNamespaces(all []*corev1.Namespace) {
	next := make(map[string]map[string]string, len(all))
	for _, n := range all {
		next[strings.Clone(n.Name)] = cloneLabels(n.Labels)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.namespaces = next
	s.tell()
}

// workloads returns what the pods amount to, by namespace and name, and what is wrong with some of them. A pod whose
// namespace is not known yet waits: without the namespace's labels it would be given another identity for an instant.
func (s *pods) workloads() (all []Workload, problems []SourceError) {
	s.mu.Lock()
	defer s.mu.Unlock()
	staying := s.addressesOfStaying()
	for _, key := range slices.Sorted(maps.Keys(s.byName)) {
		p := s.byName[key]
		if p.problem != "" {
			problems = append(problems, SourceError{Message: "pod " + key + ": " + p.problem})
		}
		labels, known := s.namespaces[p.namespace]
		if !known {
			problems = append(problems, SourceError{Message: "pod " + key + ": waits for the labels of its namespace"})
			continue
		}
		ips := slices.Clone(p.ips)
		if p.leaving {
			ips = slices.DeleteFunc(ips, func(ip netip.Addr) bool { return staying[ip] })
		}
		if len(ips) == 0 {
			continue
		}
		all = append(all, Workload{
			Source: kubernetesSource, Origin: p.uid, Namespace: p.namespace, Name: p.name, ServiceAccount: p.serviceAccount,
			IPs: ips, Labels: p.labels, NamespaceLabels: labels, Ports: p.ports,
		})
	}
	return all, problems
}

// addressesOfStaying are the addresses of pods that have not been asked to end. The network gives an address back before
// the pod that had it is gone from the API, and may hand it out again at once: it is the new pod's then. mu is held.
func (s *pods) addressesOfStaying() map[netip.Addr]bool {
	staying := make(map[netip.Addr]bool)
	for _, p := range s.byName {
		if p.leaving {
			continue
		}
		for _, ip := range p.ips {
			staying[ip] = true
		}
	}
	return staying
}
