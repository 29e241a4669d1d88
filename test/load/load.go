// SPDX-License-Identifier: Apache-2.0

// Package load makes up the state of whole clusters, of any size and the same for the same seed, and writes it into an
// etcd: nodes with their pod prefixes, identities, and workloads whose addresses lie inside their node's prefix.
package load

import (
	"encoding/json"
	"fmt"
	"iter"
	"math/rand/v2"
	"net/netip"
	"strings"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

// Cluster is the size and the seed of a made-up cluster. Clusters of one mesh have either all up to 256 nodes or all more,
// so that no two of them claim one address.
type Cluster struct {
	Name string
	// ID is 1 to 255, or 1 to 15 for a cluster of more than 256 nodes.
	ID identity.ClusterID
	// Nodes share the workloads evenly, at most 250 each; 0: as many as the workloads need. Up to 4,096.
	Nodes      int
	Workloads  int
	Identities int
	// Cached: the keys are those of a copy, under cilium/cache, so that one etcd holds many clusters.
	Cached bool
	Seed   uint64
}

const (
	perNode    = 250 // workloads of one node, inside a /24
	smallNodes = 256
	largeNodes = 4096
)

// NodeCount is the number of nodes.
func (c Cluster) NodeCount() int { return max(c.Nodes, (c.Workloads+perNode-1)/perNode) }

// Entries is how many entries of the map the cluster makes: one for each workload, and of each node two addresses and a
// pod prefix.
func (c Cluster) Entries() int { return c.Workloads + 3*c.NodeCount() }

// Validate reports sizes for which there are not enough addresses.
func (c Cluster) Validate() error {
	nodes, ids := c.NodeCount(), 255
	if nodes > smallNodes {
		ids = 15
	}
	switch {
	case nodes > largeNodes:
		return fmt.Errorf("cluster %s: %d nodes, more than %d", c.Name, nodes, largeNodes)
	case c.ID < 1 || int(c.ID) > ids:
		return fmt.Errorf("cluster %s: id %d is not 1 to %d", c.Name, c.ID, ids)
	case c.Identities < 1 && c.Workloads > 0:
		return fmt.Errorf("cluster %s: workloads without identities", c.Name)
	}
	return nil
}

// place is the number of node n among those of all clusters: 65,536 places divide 10.0.0.0/8 into blocks of 256 addresses.
func (c Cluster) place(n int) int {
	if c.NodeCount() > smallNodes {
		return int(c.ID)*largeNodes + n
	}
	return int(c.ID)*smallNodes + n
}

func (c Cluster) block(n int) [4]byte {
	place := c.place(n)
	return [4]byte{10, byte(place >> 8), byte(place), 0}
}

func (c Cluster) host(n int) netip.Addr {
	place := c.place(n)
	return netip.AddrFrom4([4]byte{172, 16, byte(place >> 8), byte(place)})
}

// Address is that of workload i.
func (c Cluster) Address(i int) netip.Addr {
	nodes := c.NodeCount()
	addr := c.block(i % nodes)
	addr[3] = byte(2 + i/nodes)
	return netip.AddrFrom4(addr)
}

func (c Cluster) identity(i int) identity.ID { return identity.ID(int(c.ID)<<16 + 256 + i) }

// key returns where a key of the cluster's own tree stands: there, or in the copy.
func (c Cluster) key(state, own, rest string) string {
	if !c.Cached {
		return state + "/" + own + "/" + rest
	}
	copied := c.Name
	if state == identity.StatePrefix {
		copied += "/id"
	}
	return identity.CachePrefix(state) + "/" + copied + "/" + rest
}

// Config yields the key by which others learn of the cluster.
func (c Cluster) Config() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		config, _ := json.Marshal(identity.ClusterConfig{
			ID:           uint32(c.ID),
			Capabilities: identity.Capabilities{SyncedCanaries: true, Cached: c.Cached, MaxConnectedClusters: 255},
		})
		yield(identity.ClusterConfigPrefix+"/"+c.Name, string(config))
	}
}

// Objects yields the nodes, the identities and then the workloads.
func (c Cluster) Objects() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		for _, part := range []iter.Seq2[string, string]{c.nodes(), c.identities(), c.workloads()} {
			for key, value := range part {
				if !yield(key, value) {
					return
				}
			}
		}
	}
}

// Canaries yields the keys which say that the rest is complete.
func (c Cluster) Canaries() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		for _, prefix := range []string{node.StatePrefix, identity.StatePrefix, ipcache.StatePrefix, service.StatePrefix} {
			if c.Cached {
				prefix = identity.CachePrefix(prefix)
			}
			if !yield(identity.SyncedPrefix+"/"+c.Name+"/"+prefix, "2026-01-01T00:00:00Z") {
				return
			}
		}
	}
}

func (c Cluster) nodes() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		for i := range c.NodeCount() {
			block := c.block(i)
			router := block
			router[3] = 1
			n := node.Node{
				Name: fmt.Sprintf("%s-n%d", c.Name, i), Cluster: c.Name, ClusterID: uint32(c.ID),
				Addresses: []node.Address{
					{Type: node.InternalIP, IP: c.host(i)}, {Type: node.CiliumInternalIP, IP: netip.AddrFrom4(router)},
				},
				IPv4PodCIDR: netip.PrefixFrom(netip.AddrFrom4(block), 24),
			}
			value, _ := n.Marshal()
			if !yield(c.key(node.StatePrefix, c.Name, n.Name), string(value)) {
				return
			}
		}
	}
}

func (c Cluster) identities() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		for i := range c.Identities {
			labels := identity.MakeLabels(
				identity.Label{Source: identity.SourceK8s, Key: "app", Value: fmt.Sprintf("app-%d", i)},
				identity.Label{Source: identity.SourceK8s, Key: identity.LabelCluster, Value: c.Name},
				identity.Label{Source: identity.SourceK8s, Key: identity.LabelNamespace, Value: fmt.Sprintf("ns-%d", i%50)},
			)
			if !yield(c.key(identity.StatePrefix, "id", fmt.Sprint(uint32(c.identity(i)))), labels.String()) {
				return
			}
		}
	}
}

func (c Cluster) workloads() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		for i := range c.Workloads {
			if !yield(c.Workload(i, 0)) {
				return
			}
		}
	}
}

// WorkloadPrefix is what the keys of all workloads begin with.
func (c Cluster) WorkloadPrefix() string {
	return strings.TrimSuffix(c.key(ipcache.StatePrefix, ipcache.DefaultSpace, "x"), "x")
}

// Workload returns the key and the value of one workload. Generations of it differ in pod and, as a rule, identity.
func (c Cluster) Workload(i int, generation uint64) (key, value string) {
	rnd := rand.New(rand.NewPCG(c.Seed+generation, uint64(c.ID)<<32|uint64(i)))
	addr, app := c.Address(i), rnd.IntN(c.Identities)
	a := ipcache.Announcement{
		Prefix: netip.PrefixFrom(addr, 32), Host: c.host(i % c.NodeCount()), Identity: c.identity(app),
		Namespace: fmt.Sprintf("ns-%d", app%50), Pod: fmt.Sprintf("app-%d-%08x-%05x", app, rnd.Uint32(), rnd.Uint32N(1<<20)),
	}
	encoded, _ := a.Marshal()
	return c.key(ipcache.StatePrefix, ipcache.DefaultSpace, addr.String()), string(encoded)
}
