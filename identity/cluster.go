// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"encoding/json"
	"errors"
	"fmt"
)

// ClusterID numbers a cluster of the mesh: 1 to [Layout.MaxCluster]. 0 means "no mesh".
type ClusterID uint16

// Layout says how the 24 bits of a global identity divide into cluster and number. All clusters of one mesh use the same
// layout. The zero Layout is not valid; use [NewLayout].
type Layout struct {
	max   ClusterID
	shift uint8
}

// NewLayout returns the layout for meshes of up to maxClusters clusters: 255 (8 + 16 bits) or 511 (9 + 15 bits).
func NewLayout(maxClusters int) (Layout, error) {
	switch maxClusters {
	case 255:
		return Layout{max: 255, shift: 16}, nil
	case 511:
		return Layout{max: 511, shift: 15}, nil
	}
	return Layout{}, fmt.Errorf("max connected clusters %d: want 255 or 511", maxClusters)
}

// MaxCluster is the highest cluster id of the layout.
func (l Layout) MaxCluster() ClusterID { return l.max }

// Range returns the first and the last identity that cluster c may allocate.
func (l Layout) Range(c ClusterID) (lo, hi ID) {
	lo = ID(c) << l.shift
	hi = lo | (1<<l.shift - 1)
	if c == 0 {
		lo = minAllocated
	}
	return lo, hi
}

// Contains reports whether id is one that cluster c may allocate.
func (l Layout) Contains(c ClusterID, id ID) bool {
	lo, hi := l.Range(c)
	return lo <= id && id <= hi
}

// Cluster is the id of the cluster that allocated id: 0 if id is reserved, has no global scope, or comes from a cluster
// that is in no mesh.
func (l Layout) Cluster(id ID) ClusterID {
	if id.Reserved() || id > scopeGlobal {
		return 0
	}
	return ClusterID(id >> l.shift)
}

// maxClusterName bounds the length of a cluster's name.
const maxClusterName = 32

// ErrClusterName indicates a name that no cluster of the mesh can have.
var ErrClusterName = errors.New("must consist of lower case alphanumeric characters and '-', and must start and end with an alphanumeric character")

// ValidateClusterName checks the rule that names of clusters follow: 1 to 32 characters of [a-z0-9-], neither the first
// nor the last a hyphen. The error wraps [ErrClusterName].
func ValidateClusterName(name string) error {
	if name == "" {
		return fmt.Errorf("cluster name must not be empty: %w", ErrClusterName)
	}
	if len(name) > maxClusterName {
		return fmt.Errorf("cluster name %q is longer than %d characters: %w", name, maxClusterName, ErrClusterName)
	}
	for i := range len(name) {
		c := name[i]
		inner := c == '-' && i != 0 && i != len(name)-1
		if !inner && (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return fmt.Errorf("cluster name %q: %w", name, ErrClusterName)
		}
	}
	return nil
}

// The values of [Capabilities.EndpointSlicesExportMode] beside the empty one.
const (
	SlicesToo  = "services-and-endpointslices"
	SlicesOnly = "endpointslices-only"
)

// ClusterConfig is what a cluster says of itself under cilium/cluster-config/<name>.
type ClusterConfig struct {
	ID           uint32       `json:"id,omitempty"`
	Capabilities Capabilities `json:"capabilities"`
}

// Capabilities tells readers of a cluster's etcd how to read it.
type Capabilities struct {
	// SyncedCanaries: the writer sets cilium/synced/<cluster>/<prefix> once a prefix is complete.
	SyncedCanaries bool `json:"syncedCanaries,omitempty"`
	// Cached: the data stands under cilium/cache, copied there from the cluster's own etcd.
	Cached bool `json:"cached,omitempty"`
	// MaxConnectedClusters is the writer's [Layout]: 255 or 511.
	MaxConnectedClusters uint32 `json:"maxConnectedClusters,omitempty"`
	// ServiceExportsEnabled is nil where the writer does not know service exports.
	ServiceExportsEnabled *bool `json:"serviceExportsEnabled,omitempty"`
	// EndpointSlicesExportMode is empty where only services are exported.
	EndpointSlicesExportMode string `json:"endpointSlicesExportMode,omitempty"`
}

// ParseClusterConfig decodes the value of a cluster-config key.
func ParseClusterConfig(value []byte) (ClusterConfig, error) {
	var c ClusterConfig
	if err := json.Unmarshal(value, &c); err != nil {
		return ClusterConfig{}, fmt.Errorf("cluster config: %w", err)
	}
	return c, nil
}

// Validate checks whether a node that uses layout local can read a cluster with config c.
func (c ClusterConfig) Validate(local Layout) error {
	caps := c.Capabilities
	switch {
	case c.ID == 0:
		return errors.New("ClusterID 0 is reserved")
	case c.ID > uint32(local.max):
		return fmt.Errorf("ClusterID > %d is not supported", local.max)
	// Readers of 255 clusters understand every writer whose id they accept: identities of a larger mesh that lie
	// outside their range are refused one by one.
	case local.max != 255 && caps.MaxConnectedClusters != uint32(local.max):
		return fmt.Errorf("mismatched MaxConnectedClusters; local=%d, remote=%d", local.max, caps.MaxConnectedClusters)
	}
	switch caps.EndpointSlicesExportMode {
	case "", SlicesToo, SlicesOnly:
		return nil
	}
	return fmt.Errorf("invalid EndpointSlicesExportMode %q", caps.EndpointSlicesExportMode)
}
