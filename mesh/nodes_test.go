// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
)

// publish stores a node of the cluster with addresses, "Type=IP", and a pod CIDR.
func (c *cluster) publish(name, podCIDR string, addresses ...node.Address) {
	c.t.Helper()
	n := node.Node{Name: name, Cluster: c.name, ClusterID: uint32(c.id), Addresses: addresses, IPv4PodCIDR: netip.MustParsePrefix(podCIDR)}
	value, err := n.Marshal()
	must(c.t, err)
	c.etcd.Put(c.t, n.Key(), string(value))
}

// By which address a node is reached is the reader's choice, cluster by cluster, and all who ask get the same one.
func TestNodeIPPreference(t *testing.T) {
	east, west := newCluster(t, "east", 1), newWest(t)
	prefer := func(texts ...string) (p node.Preference) {
		for _, text := range texts {
			choice, err := node.ParseChoice(text)
			must(t, err)
			p = append(p, choice)
		}
		return p
	}
	w := newWorld(t, withConfig(east), withConfig(west), func(c *Config) {
		c.Preferences = node.Preferences{"": prefer("ExternalIP"), "west": prefer("192.168.0.0/16", "Wireguard")}
	})
	addresses := func(last int) []node.Address {
		var all []node.Address
		for i, kind := range []string{node.CiliumInternalIP, node.InternalIP, node.ExternalIP, "Wireguard"} {
			all = append(all, node.Address{Type: kind, IP: netip.MustParseAddr(fmt.Sprintf("%s.%d", []string{"10.77.1", "172.18.1", "198.51.100", "100.64.1"}[i], last))})
		}
		return all
	}
	east.publish("n1", "10.1.1.0/24", addresses(1)...)
	west.publish("n2", "10.2.1.0/24", addresses(2)...)
	w.awaitIP("10.1.1.0/24", "10.1.1.0/24 2 via 198.51.100.1 by 1 node/n1")
	w.awaitIP("10.2.1.0/24", "10.2.1.0/24 2 via 100.64.1.2 by 2 node/n2")
	w.awaitIP("10.77.1.2/32", "10.77.1.2/32 6 via 100.64.1.2 remote by 2 node/n2")
	for cluster, want := range map[string]string{"east/n1": "198.51.100.1", "west/n2": "100.64.1.2"} {
		n, _ := w.cfg.Nodes.Get(cluster[:4], cluster[5:])
		if got := n.IP(false).String(); got != want {
			t.Errorf("%s is reached by %s, want %s", cluster, got, want)
		}
	}

	// An address of the preferred prefix takes over, and the old ones go when the node has them no more.
	west.publish("n2", "10.2.2.0/24", node.Address{Type: node.InternalIP, IP: netip.MustParseAddr("172.18.1.2")},
		node.Address{Type: node.InternalIP, IP: netip.MustParseAddr("192.168.7.2")})
	w.awaitIP("10.2.2.0/24", "10.2.2.0/24 2 via 192.168.7.2 by 2 node/n2")
	for _, gone := range []string{"10.2.1.0/24", "100.64.1.2/32", "198.51.100.2/32", "10.77.1.2/32"} {
		w.awaitIP(gone, "")
	}
}

// A node is replaced by another one of the same name: what the kernel is told of are the new address and pods, and of the
// old ones that they are gone.
//
// mechanism: F4
// lesson: X9
func TestNodeReplaced(t *testing.T) {
	t.Parallel()
	west := newWest(t)
	w := newWorld(t, withConfig(west))
	west.node("n1", "172.18.2.1", "10.2.1.0")
	w.awaitIPs("172.18.2.1/32 6 remote by 2 node/n1", "10.2.1.0/24 2 via 172.18.2.1 by 2 node/n1")
	_, revision, _ := w.cfg.IPs.Changes(ipcache.Revision{}, make([]ipcache.Change, 0, 16))
	west.node("n1", "172.18.2.9", "10.2.9.0")
	w.awaitIPs("172.18.2.9/32 6 remote by 2 node/n1", "10.2.9.0/24 2 via 172.18.2.9 by 2 node/n1")
	changes, _, _ := w.cfg.IPs.Changes(revision, make([]ipcache.Change, 0, 16))
	if len(changes) != 4 {
		t.Errorf("changes %v, want two that come and two that go", changes)
	}
	nodes, _ := w.cfg.Nodes.Snapshot()
	if len(nodes) != 1 || nodes[0].IP(false).String() != "172.18.2.9" {
		t.Errorf("nodes %v", nodes)
	}
}

// The datapath is told of an address only by its owner: a remote node that claims one of ours, or one of a stronger
// source, changes nothing there, neither when it comes nor when it goes.
//
// mechanism: F3
func TestNodeAddressOfAnother(t *testing.T) {
	t.Parallel()
	west := newWest(t)
	w := newWorld(t, withConfig(west))
	ours := ipcache.Claim{
		Prefix: netip.MustParsePrefix("172.18.9.1/32"), Owner: ipcache.Owner{Cluster: 9, Source: ipcache.Local, Object: "node/here-1"},
		Entry: ipcache.Entry{Identity: identity.Host},
	}
	w.cfg.IPs.Apply([]ipcache.Op{{Claim: ours}})
	w.awaitState("west", Ready)
	_, revision, _ := w.cfg.IPs.Changes(ipcache.Revision{}, make([]ipcache.Change, 0, 16))
	for range 3 {
		west.node("n1", "172.18.9.1", "")
		w.await("west", "its node", func(s RemoteStatus) bool { return s.Nodes == 1 })
		if got := len(w.cfg.IPs.Claims(ours.Prefix)); got > 2 {
			t.Errorf("%d claims", got)
		}
		west.etcd.Delete(t, "cilium/state/nodes/v1/west/n1")
		w.await("west", "no node", func(s RemoteStatus) bool { return s.Nodes == 0 })
	}
	if changes, _, reset := w.cfg.IPs.Changes(revision, make([]ipcache.Change, 0, 16)); len(changes) != 0 || reset {
		t.Errorf("the datapath has been told of %v", changes)
	}
	w.awaitIPs("172.18.9.1/32 1 by 9 node/here-1")
}
