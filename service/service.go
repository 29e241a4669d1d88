// SPDX-License-Identifier: Apache-2.0

package service

import (
	"encoding/json"
	"fmt"
	"net/netip"
)

// StatePrefix, joined with cluster, namespace and name, is where a cluster publishes a service.
const StatePrefix = "cilium/state/services/v1"

// Port is where a service or a backend listens.
type Port struct {
	Protocol string // TCP, UDP or SCTP
	Port     uint16
}

// Ports are the ports of one address by their name, which may be empty.
type Ports map[string]Port

// Service is what one cluster publishes of one service.
type Service struct {
	Cluster         string                `json:"cluster"`
	Namespace       string                `json:"namespace"`
	Name            string                `json:"name"`
	Frontends       map[netip.Addr]Ports  `json:"frontends"` // addresses of the service in its own cluster
	Backends        map[netip.Addr]Ports  `json:"backends"`
	Hostnames       map[netip.Addr]string `json:"hostnames,omitempty"`
	Zones           map[netip.Addr]Zone   `json:"zones,omitempty"`
	Labels          map[string]string     `json:"labels"`
	Selector        map[string]string     `json:"selector"`
	IncludeExternal bool                  `json:"includeExternal"` // backends of other clusters are wanted
	Shared          bool                  `json:"shared"`          // backends are offered to other clusters
	ClusterID       uint32                `json:"clusterID"`
}

// Zone is the topology of one backend.
type Zone struct {
	Zone     string    `json:"zone"`
	ForZones []ForZone `json:"forZones,omitempty"`
}

// ForZone names a zone whose clients a backend is meant for.
type ForZone struct {
	Name string `json:"name"`
}

// Parse decodes what a cluster published. Every key of frontends and backends must be an address, without a zone or a
// prefix length.
func Parse(value []byte) (Service, error) {
	var s Service
	if err := json.Unmarshal(value, &s); err != nil {
		return Service{}, fmt.Errorf("service: %w", err)
	}
	for _, side := range []map[netip.Addr]Ports{s.Frontends, s.Backends} {
		for addr := range side {
			if !addr.IsValid() || addr.Zone() != "" {
				return Service{}, fmt.Errorf("service: invalid IP address: %q", addr)
			}
		}
	}
	return s, nil
}

// Validate checks that the service is what cluster, known by clusterID, may publish under key ("namespace/name").
func (s Service) Validate(key, cluster string, clusterID uint32) error {
	switch got := s.Namespace + "/" + s.Name; {
	case s.Cluster != cluster:
		return fmt.Errorf("unexpected cluster name: got %q, expected %q", s.Cluster, cluster)
	case got != key:
		return fmt.Errorf("namespaced name does not match key: got %q, expected %q", got, key)
	case s.ClusterID != clusterID:
		return fmt.Errorf("unexpected cluster ID: got %d, expected %d", s.ClusterID, clusterID)
	}
	return nil
}
