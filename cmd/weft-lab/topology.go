// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

const (
	nodesPerCluster = 2
	namespace       = "shop"
	// maxConnectedClusters is said by everybody in the mesh.
	maxConnectedClusters = 255
	etcdPort             = 2379
	// routeProtocol marks the routes that weft installs.
	routeProtocol = 119
)

// clusterPlan is one cluster of the lab: an etcd and its nodes.
type clusterPlan struct {
	Name     string
	ID       uint8
	Etcd     etcdPlan
	Service4 netip.Addr // of the service web
	Service6 netip.Addr
	Nodes    []nodePlan
}

// etcdPlan is where a cluster's etcd lives.
type etcdPlan struct {
	Cluster   string
	ClusterID uint8
	NetNS     string
	Port      string // its port on the bridge
	Address   netip.Prefix
}

// endpoint returns the URL at which clients reach the etcd.
func (e etcdPlan) endpoint() string {
	return "http://" + netip.AddrPortFrom(e.Address.Addr(), etcdPort).String()
}

// nodePlan is one node: a network namespace on the bridge, with an agent and pods.
type nodePlan struct {
	Name      string
	Cluster   string
	ClusterID uint8
	Number    uint8
	NetNS     string
	IPv4      netip.Prefix
	IPv6      netip.Prefix
	PodCIDR4  netip.Prefix
	PodCIDR6  netip.Prefix
	Gateway4  netip.Addr // first hop of its pods
	Gateway6  netip.Addr // the node's own address towards its pods
	Pods      []podPlan
}

// podPlan is one workload: a network namespace behind a veth of its node.
type podPlan struct {
	Name     string
	Node     string
	Cluster  string
	App      string
	NetNS    string
	Device   string // the veth's end in the node
	IPv4     netip.Addr
	IPv6     netip.Addr
	Identity uint32
}

// path is the pod's name as the commands take it: east-1/web.
func (p podPlan) path() string { return p.Node + "/" + p.Name }

// topology is the whole lab: a pure function of the prefix of its namespaces' names.
type topology struct {
	Prefix   string
	Clusters []clusterPlan
}

// newTopology returns the two clusters of the lab. Network namespaces are named <prefix>-….
func newTopology(prefix string) topology {
	t := topology{Prefix: prefix}
	for i, name := range []string{"east", "west"} {
		t.Clusters = append(t.Clusters, t.newCluster(name, uint8(i+1)))
	}
	return t
}

func (t topology) newCluster(name string, id uint8) clusterPlan {
	c := clusterPlan{Name: name, ID: id, Etcd: etcdPlan{
		Cluster:   name,
		ClusterID: id,
		NetNS:     t.Prefix + "-etcd-" + name,
		Port:      "etcd-" + name,
		Address:   netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 18, id, 100}), 16),
	}}
	c.Service4 = netip.AddrFrom4([4]byte{10, 96, id, 80})
	c.Service6 = netip.MustParseAddr(fmt.Sprintf("fd00:96:%d::80", id))
	for number := uint8(1); number <= nodesPerCluster; number++ {
		c.Nodes = append(c.Nodes, t.newNode(name, id, number))
	}
	return c
}

func (t topology) newNode(cluster string, id, number uint8) nodePlan {
	n := nodePlan{
		Name:      fmt.Sprintf("%s-%d", cluster, number),
		Cluster:   cluster,
		ClusterID: id,
		Number:    number,
		IPv4:      netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 18, id, number}), 16),
		IPv6:      netip.PrefixFrom(nodeAddr6(id, number), 32),
		PodCIDR4:  netip.PrefixFrom(netip.AddrFrom4([4]byte{10, id, number, 0}), 24),
		PodCIDR6:  netip.PrefixFrom(podAddr6(id, number, 0), 64),
		Gateway4:  netip.AddrFrom4([4]byte{10, id, number, 1}),
		Gateway6:  podAddr6(id, number, 1),
	}
	n.NetNS = t.Prefix + "-" + n.Name
	n.Pods = []podPlan{n.pod("web", "web", 10), n.pod("db", "db", 11)}
	return n
}

// pod returns the pod of that name with the given last byte (hex digits in IPv6 are written as the decimal ones).
func (n nodePlan) pod(name, app string, host uint8) podPlan {
	return podPlan{
		Name:     name,
		Node:     n.Name,
		Cluster:  n.Cluster,
		App:      app,
		NetNS:    n.NetNS + "-" + name,
		Device:   "pod-" + name,
		IPv4:     netip.AddrFrom4([4]byte{10, n.ClusterID, n.Number, host}),
		IPv6:     podAddr6(n.ClusterID, n.Number, host),
		Identity: identityOf(n.ClusterID, app),
	}
}

// nodeAddr6 returns fd00:18:<cluster>::<n>, its numbers read as hexadecimal digits.
func nodeAddr6(cluster, number uint8) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("fd00:18:%d::%d", cluster, number))
}

// podAddr6 returns fd00:10:<cluster>:<n>::<host>, its numbers read as hexadecimal digits.
func podAddr6(cluster, number, host uint8) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("fd00:10:%d:%d::%d", cluster, number, host))
}

// identityOf returns the numeric identity of an app's pods in a cluster: the cluster's id in bits 16 to 23, and below
// it 257 for web, 258 for db, and from 4096 up a number made of the name for any other app, so that equal labels have
// equal identities on every node without an allocator.
func identityOf(cluster uint8, app string) uint32 {
	base := uint32(cluster) << 16
	switch app {
	case "web":
		return base | 257
	case "db":
		return base | 258
	}
	sum := fnv.New32a()
	sum.Write([]byte(app))
	return base | (4096 + sum.Sum32()%(65536-4096))
}

// netNet is the namespace of the bridge that joins all nodes and etcds.
func (t topology) netNet() string { return t.Prefix + "-net" }

// nodes returns the nodes of all clusters.
func (t topology) nodes() []nodePlan {
	var nodes []nodePlan
	for _, c := range t.Clusters {
		nodes = append(nodes, c.Nodes...)
	}
	return nodes
}

// cluster returns the cluster of that name.
func (t topology) cluster(name string) (clusterPlan, error) {
	for _, c := range t.Clusters {
		if c.Name == name {
			return c, nil
		}
	}
	return clusterPlan{}, fmt.Errorf("no cluster %q in the lab: there are %s and %s", name, t.Clusters[0].Name, t.Clusters[1].Name)
}

// node returns the node of that name.
func (t topology) node(name string) (nodePlan, error) {
	nodes := t.nodes()
	i := slices.IndexFunc(nodes, func(n nodePlan) bool { return n.Name == name })
	if i < 0 {
		names := make([]string, len(nodes))
		for i, n := range nodes {
			names[i] = n.Name
		}
		return nodePlan{}, fmt.Errorf("no node %q in the lab: there are %s", name, strings.Join(names, ", "))
	}
	return nodes[i], nil
}

// remoteClusters returns the clusters other than the node's own.
func (t topology) remoteClusters(n nodePlan) []clusterPlan {
	return slices.DeleteFunc(slices.Clone(t.Clusters), func(c clusterPlan) bool { return c.Name == n.Cluster })
}

// owns reports whether a network namespace of that name belongs to a lab with this prefix, pods added later included.
func (t topology) owns(netNS string) bool {
	if netNS == t.netNet() {
		return true
	}
	for _, c := range t.Clusters {
		if netNS == c.Etcd.NetNS {
			return true
		}
		for _, n := range c.Nodes {
			if netNS == n.NetNS || strings.HasPrefix(netNS, n.NetNS+"-") {
				return true
			}
		}
	}
	return false
}

var (
	// podNamePattern keeps a pod's name fit for a device name, "pod-<name>" of at most 15 bytes.
	podNamePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,9}[a-z0-9])?$`)
	prefixPattern  = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$`)
)

func validatePodName(name string) error {
	if !podNamePattern.MatchString(name) {
		return fmt.Errorf("pod name %q: use 1 to 11 lower-case letters, digits and dashes", name)
	}
	return nil
}

func validatePrefix(prefix string) error {
	if !prefixPattern.MatchString(prefix) {
		return fmt.Errorf("prefix %q: use 1 to 32 lower-case letters, digits and dashes", prefix)
	}
	return nil
}

func sortPods(pods []podPlan) {
	slices.SortFunc(pods, func(a, b podPlan) int { return a.IPv4.Compare(b.IPv4) })
}

// freeHost returns the lowest last byte from 12 to 99 that no pod of the node has.
func (n nodePlan) freeHost(pods []podPlan) (uint8, error) {
	for host := uint8(12); host <= 99; host++ {
		addr := netip.AddrFrom4([4]byte{10, n.ClusterID, n.Number, host})
		if !slices.ContainsFunc(pods, func(p podPlan) bool { return p.IPv4 == addr }) {
			return host, nil
		}
	}
	return 0, fmt.Errorf("node %s has no free pod address: remove a pod first", n.Name)
}
