// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"path/filepath"

	"go.yaml.in/yaml/v3"
)

// frontPort is where services listen; their backends do at [servicePort].
const frontPort = 80

// serviceFile is the declaration of a service, as agents and operators read it.
type serviceFile struct {
	Name      string        `yaml:"name"`
	Namespace string        `yaml:"namespace"`
	Global    bool          `yaml:"global"`
	Shared    bool          `yaml:"shared"`
	Affinity  string        `yaml:"affinity"`
	Addresses []netip.Addr  `yaml:"addresses"`
	Ports     []filePort    `yaml:"ports"`
	Backends  []fileBackend `yaml:"backends"`
}

type filePort struct {
	Name     string `yaml:"name"`
	Port     uint16 `yaml:"port"`
	Target   uint16 `yaml:"target"`
	Protocol string `yaml:"protocol"`
}

type fileBackend struct {
	IP netip.Addr `yaml:"ip"`
}

// web returns the global service that every cluster of the lab has: its pods web, at an address of its own.
func (c clusterPlan) web() serviceFile {
	s := serviceFile{
		Name: "web", Namespace: namespace, Global: true, Shared: true, Affinity: "local",
		Addresses: []netip.Addr{c.Service4, c.Service6},
		Ports: []filePort{
			{Name: "http", Port: frontPort, Target: servicePort, Protocol: "TCP"},
			{Name: "http-udp", Port: frontPort, Target: servicePort, Protocol: "UDP"},
		},
	}
	for _, p := range c.webPods() {
		s.Backends = append(s.Backends, fileBackend{p.IPv4}, fileBackend{p.IPv6})
	}
	return s
}

// webPods returns the pods web of a cluster, one for each node.
func (c clusterPlan) webPods() []podPlan {
	var pods []podPlan
	for _, n := range c.Nodes {
		pods = append(pods, n.Pods[0])
	}
	return pods
}

// services is the directory of a cluster's services; its operator and its agents read it.
func (l *lab) services(cluster string) string { return filepath.Join(l.dir, "services", cluster) }

// declareService writes the file that makes a service known to a cluster.
func (l *lab) declareService(c clusterPlan, s serviceFile) error {
	content, err := yaml.Marshal(s)
	if err != nil {
		return err
	}
	return writeFile(filepath.Join(l.services(c.Name), s.Name+".yaml"), content)
}
