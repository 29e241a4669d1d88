// SPDX-License-Identifier: Apache-2.0

// Package load makes up the state of whole clusters, of any size and the same for the same seed, and writes it into an
// etcd: nodes with their pod prefixes, identities, and workloads whose addresses lie inside their node's prefix.
package load

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"math/rand/v2"
	"net/netip"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
)

// Cluster is the size and the seed of a made-up cluster.
type Cluster struct {
	Name       string
	ID         identity.ClusterID // 1 to 15, so that prefixes of clusters do not overlap
	Workloads  int                // up to 1,000,000
	Identities int
	Seed       uint64
}

const perNode = 250 // workloads of one node, inside a /24

// Nodes is the number of nodes that the workloads need.
func (c Cluster) Nodes() int { return (c.Workloads + perNode - 1) / perNode }

// block returns the /24 of node n: 10.0.0.0/8 is divided into 16 parts of 4096 blocks.
func (c Cluster) block(n int) [4]byte {
	b := int(c.ID)<<12 | n
	return [4]byte{10, byte(b >> 8), byte(b), 0}
}

func (c Cluster) host(n int) netip.Addr {
	return netip.AddrFrom4([4]byte{172, 16 + byte(c.ID), byte(n >> 8), byte(n)})
}

func (c Cluster) id(i int) identity.ID { return identity.ID(int(c.ID)<<16 + 256 + i) }

// Keys yields every key and value of the cluster, its config first and its canaries last.
func (c Cluster) Keys() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		config, _ := json.Marshal(identity.ClusterConfig{
			ID: uint32(c.ID), Capabilities: identity.Capabilities{SyncedCanaries: true, MaxConnectedClusters: 255},
		})
		if !yield(identity.ClusterConfigPrefix+"/"+c.Name, string(config)) {
			return
		}
		for _, part := range []iter.Seq2[string, string]{c.nodes(), c.identities(), c.workloads()} {
			for key, value := range part {
				if !yield(key, value) {
					return
				}
			}
		}
		for _, prefix := range []string{node.StatePrefix, identity.StatePrefix, ipcache.StatePrefix, "cilium/state/services/v1"} {
			if !yield(identity.SyncedPrefix+"/"+c.Name+"/"+prefix, "2026-01-01T00:00:00Z") {
				return
			}
		}
	}
}

func (c Cluster) nodes() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		for i := range c.Nodes() {
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
			if !yield(n.Key(), string(value)) {
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
			if !yield(identity.MasterKey(c.id(i)), labels.String()) {
				return
			}
		}
	}
}

func (c Cluster) workloads() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		rnd := rand.New(rand.NewPCG(c.Seed, uint64(c.ID)))
		for i := range c.Workloads {
			n := i / perNode
			addr := c.block(n)
			addr[3] = byte(2 + i%perNode)
			app := rnd.IntN(max(c.Identities, 1))
			a := ipcache.Announcement{
				Prefix: netip.PrefixFrom(netip.AddrFrom4(addr), 32), Host: c.host(n), Identity: c.id(app),
				Namespace: fmt.Sprintf("ns-%d", app%50), Pod: fmt.Sprintf("app-%d-%08x-%05x", app, rnd.Uint32(), rnd.Uint32N(1<<20)),
			}
			value, _ := a.Marshal()
			if !yield(a.Key(), string(value)) {
				return
			}
		}
	}
}

// batch is etcd's default limit of operations in a transaction.
const batch = 128

// Fill writes the whole cluster.
func (c Cluster) Fill(ctx context.Context, client *clientv3.Client) error {
	var ops []clientv3.Op
	flush := func() error {
		_, err := client.Txn(ctx).Then(ops...).Commit()
		ops = ops[:0]
		return err
	}
	for key, value := range c.Keys() {
		if ops = append(ops, clientv3.OpPut(key, value)); len(ops) == batch {
			if err := flush(); err != nil {
				return fmt.Errorf("fill %s: %w", c.Name, err)
			}
		}
	}
	if len(ops) == 0 {
		return nil
	}
	return flush()
}
