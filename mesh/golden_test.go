// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
	"github.com/weftmesh/weft/kvstore"
)

// goldenIPs is what the recorded state of cluster c (1 east, 2 west) comes to in the ipcache of another one.
func goldenIPs(c int) []string {
	id := func(n int) int { return c<<16 + 257 + n }
	return []string{
		// What node 1 contributes.
		fmt.Sprintf("172.18.%d.1/32 6 remote by %d node/%s-n1", c, c, goldenName[c]),
		fmt.Sprintf("10.%d.1.1/32 6 via 172.18.%d.1 remote by %d node/%s-n1", c, c, c, goldenName[c]),
		fmt.Sprintf("10.%d.1.2/32 4 via 172.18.%d.1 by %d node/%s-n1", c, c, c, goldenName[c]),
		fmt.Sprintf("10.%d.1.3/32 8 via 172.18.%d.1 by %d node/%s-n1", c, c, c, goldenName[c]),
		fmt.Sprintf("10.%d.1.0/24 2 via 172.18.%d.1 by %d node/%s-n1", c, c, c, goldenName[c]),
		// Node 2, which has IPv6, an ExternalIP, a secondary pod CIDR and an encryption key.
		fmt.Sprintf("172.18.%d.2/32 6 remote by %d node/%s-n2", c, c, goldenName[c]),
		fmt.Sprintf("198.51.100.%d/32 6 remote by %d node/%s-n2", c, c, goldenName[c]),
		fmt.Sprintf("fd00:18:%d::2/128 6 remote by %d node/%s-n2", c, c, goldenName[c]),
		fmt.Sprintf("10.%d.2.1/32 6 via 172.18.%d.2 remote by %d node/%s-n2", c, c, c, goldenName[c]),
		fmt.Sprintf("fd00:10:%d:2::1/128 6 via 172.18.%d.2 remote by %d node/%s-n2", c, c, c, goldenName[c]),
		fmt.Sprintf("10.%d.2.2/32 4 via 172.18.%d.2 key 3 by %d node/%s-n2", c, c, c, goldenName[c]),
		fmt.Sprintf("fd00:10:%d:2::2/128 4 via 172.18.%d.2 key 3 by %d node/%s-n2", c, c, c, goldenName[c]),
		fmt.Sprintf("10.%d.2.3/32 8 via 172.18.%d.2 key 3 by %d node/%s-n2", c, c, c, goldenName[c]),
		fmt.Sprintf("10.%d.2.0/24 2 via 172.18.%d.2 key 3 by %d node/%s-n2", c, c, c, goldenName[c]),
		fmt.Sprintf("10.%d.102.0/26 2 via 172.18.%d.2 key 3 by %d node/%s-n2", c, c, c, goldenName[c]),
		fmt.Sprintf("fd00:10:%d:2::/96 2 via 172.18.%d.2 key 3 by %d node/%s-n2", c, c, c, goldenName[c]),
		// The workloads.
		fmt.Sprintf("10.%d.1.10/32 %d via 172.18.%d.1 shop/pod-1 by %d ip", c, id(0), c, c),
		fmt.Sprintf("10.%d.2.10/32 %d via 172.18.%d.2 shop/pod-2 by %d ip", c, id(1), c, c),
		fmt.Sprintf("fd00:10:%d:2::10/128 %d via 172.18.%d.2 key 3 shop/pod-2 by %d ip", c, id(1), c, c),
		fmt.Sprintf("192.0.2.%d/28 %d by %d ip", 16*c, id(0), c),
	}
}

var goldenName = map[int]string{1: "east", 2: "west"}

// The recorded state of two real Cilium clusters becomes exactly the entries that it stands for.
//
// mechanism: A1 A2 B6 F1 F2 F5 G9 G10 I1 I2
func TestGoldenState(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for c, name := range goldenName {
		etcd := testutil.StartEtcd(t)
		etcd.Load(t, golden.Path(t, fmt.Sprintf("kvstore-state-%s.jsonl", name)))
		etcd.WriteConfig(t, w.file(name))
		s := w.awaitState(name, Ready)
		want := RemoteStatus{
			Name: name, ClusterID: uint32(c), State: Ready, ConfigFile: w.file(name), Endpoints: []string{etcd.Endpoint()},
			Nodes: 2, IPs: 4, Identities: 2, Services: 2, Canaries: true, Synced: Synced{true, true, true, true},
			Rejected: map[string]uint64{}, LastRejections: []Rejection{},
		}
		want.Since, want.EtcdClusterID, want.ServerVersion, want.Revision = s.Since, s.EtcdClusterID, s.ServerVersion, s.Revision
		want.LastSuccess = s.LastSuccess
		want.Quotas = s.Quotas
		if diff := cmp.Diff(want, s); diff != "" || s.EtcdClusterID == 0 || s.Revision == 0 || s.LastSuccess.IsZero() {
			t.Errorf("status (-want +got):\n%s", diff)
		}
	}
	w.awaitIPs(append(goldenIPs(1), goldenIPs(2)...)...)
	if diff := cmp.Diff([]string{"east/east-n1", "east/east-n2", "west/west-n1", "west/west-n2"}, w.nodeNames()); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]identity.ID{65793, 65794, 131329, 131330}, w.identityIDs()); diff != "" {
		t.Errorf("identities (-want +got):\n%s", diff)
	}
	labels, _ := w.cfg.Identities.Labels(131330)
	if got, _ := labels.Get(identity.SourceK8s, "app"); got != "db" {
		t.Errorf("identity 131330 is app %q, want db: %v", got, labels)
	}
	if got := w.cfg.Services.Len(); got != 4 {
		t.Errorf("%d services, want 4", got)
	}

	// Then one of them goes, and takes with it what is its own, and nothing else.
	w.remove("west")
	w.awaitGone("west")
	w.awaitIPs(goldenIPs(1)...)
	if diff := cmp.Diff([]string{"east/east-n1", "east/east-n2"}, w.nodeNames()); diff != "" {
		t.Errorf("nodes after the removal (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]identity.ID{65793, 65794}, w.identityIDs()); diff != "" {
		t.Errorf("identities after the removal (-want +got):\n%s", diff)
	}
	if got := w.cfg.Services.Len(); got != 2 {
		t.Errorf("%d services after the removal, want 2", got)
	}
}

// The copy that a KVStoreMesh keeps of several clusters is read from one etcd, each cluster from its own part.
//
// mechanism: B6 B9
func TestGoldenCache(t *testing.T) {
	t.Parallel()
	etcd := testutil.StartEtcd(t)
	etcd.Load(t, golden.Path(t, "kvstore-cache-mock.jsonl"))
	// The recorded clusters are made up at random: addresses of one lie in a pod CIDR of the other.
	w := newWorld(t, func(c *Config) { c.Limits.Default.Overlaps = true })
	etcd.WriteConfig(t, w.file("cluster-001"))
	etcd.WriteConfig(t, w.file("cluster-002"))
	for _, name := range []string{"cluster-001", "cluster-002"} {
		s := w.awaitState(name, Ready)
		if s.Nodes != 2 || s.IPs != 3 || s.Identities != 3 || s.Services != 1 || !s.Cached || len(s.Rejected) != 0 {
			t.Errorf("status of %s: %+v", name, s)
		}
	}
	node := func(c int, name string, host, pods string, n int) []string {
		return []string{
			fmt.Sprintf("%s/32 6 remote by %d node/%s", host, c, name),
			fmt.Sprintf("10.0.0.%d/32 6 via %s remote by %d node/%s", n, host, c, name),
			fmt.Sprintf("10.0.0.%d/32 4 via %s by %d node/%s", n+1, host, c, name),
			fmt.Sprintf("10.0.0.%d/32 8 via %s by %d node/%s", n+2, host, c, name),
			fmt.Sprintf("%s 2 via %s by %d node/%s", pods, host, c, name),
		}
	}
	want := []string{
		"10.0.0.24/32 76494 via 172.16.0.3 calf/creative-giraffe by 1 ip",
		"10.0.0.25/32 70908 via 172.16.0.4 herring/light-skylark by 1 ip",
		"10.0.0.26/32 76494 via 172.16.0.3 narwhal/factual-quail by 1 ip",
		"10.0.0.27/32 168636 via 172.16.0.1 ape/inspired-snipe by 2 ip",
		"10.0.0.28/32 168636 via 172.16.0.1 kangaroo/meet-stag by 2 ip",
		"10.0.0.29/32 168636 via 172.16.0.2 cow/magical-chipmunk by 2 ip",
	}
	want = append(want, node(2, "feasible-ant", "172.16.0.1", "10.0.0.16/28", 1)...)
	want = append(want, node(2, "many-sparrow", "172.16.0.2", "10.0.0.32/28", 4)...)
	want = append(want, node(1, "enhanced-drake", "172.16.0.3", "10.0.0.48/28", 12)...)
	want = append(want, node(1, "magnetic-prawn", "172.16.0.4", "10.0.0.64/28", 15)...)
	w.awaitIPs(want...)
}

// WireGuard's key, IPv6 addresses and pod CIDRs of both families.
func TestGoldenCacheIPv6WireGuard(t *testing.T) {
	t.Parallel()
	etcd := testutil.StartEtcd(t)
	etcd.Load(t, golden.Path(t, "kvstore-cache-mock-ipv6-wireguard.jsonl"))
	w := newWorld(t, func(c *Config) { c.DualStack = true })
	for id, name := range map[int]string{1: "cluster-001", 2: "cluster-002"} {
		c := cluster{t: t, etcd: etcd, name: name, id: id}
		c.config(fmt.Sprintf(`{"id":%d,"capabilities":{"syncedCanaries":true,"cached":true,"maxConnectedClusters":255}}`, id))
		c.canaries("cache")
		etcd.WriteConfig(t, w.file(name))
	}
	if s := w.awaitState("cluster-002", Ready); s.Services != 1 || s.IPs != 0 {
		t.Errorf("status %+v", s)
	}
	w.awaitState("cluster-001", Ready)
	w.awaitIPs(
		"10.0.0.139/32 127755 via 172.16.0.5 key 255 pegasus/native-cheetah by 1 ip",
		"fd00::87/128 98870 via 172.16.0.6 key 255 ape/safe-longhorn by 1 ip",
		"172.16.0.4/32 6 remote by 1 node/model-gelding",
		"fc00::4/128 6 remote by 1 node/model-gelding",
		"10.0.0.52/32 6 via 172.16.0.4 remote by 1 node/model-gelding",
		"fd00::34/128 6 via 172.16.0.4 remote by 1 node/model-gelding",
		"10.0.0.53/32 4 via 172.16.0.4 key 255 by 1 node/model-gelding",
		"fd00::35/128 4 via 172.16.0.4 key 255 by 1 node/model-gelding",
		"10.0.0.54/32 8 via 172.16.0.4 key 255 by 1 node/model-gelding",
		"fd00::36/128 8 via 172.16.0.4 key 255 by 1 node/model-gelding",
		"10.0.0.64/28 9 via 172.16.0.4 key 255 by 1 node/model-gelding",
		"fd00::400/120 10 via 172.16.0.4 key 255 by 1 node/model-gelding",
	)
}

// Our own cluster is read from its own etcd, without a cluster-config, with a stronger source, and but for our own node.
//
// mechanism: H2
func TestOwnCluster(t *testing.T) {
	t.Parallel()
	etcd := testutil.StartEtcd(t)
	etcd.Load(t, golden.Path(t, "kvstore-state-east.jsonl"))
	etcd.Delete(t, "cilium/cluster-config/east")
	etcd.DeletePrefix(t, "cilium/synced/")
	w := newWorld(t, func(c *Config) {
		c.Dir, c.ClusterName, c.ClusterID, c.NodeName = "", "east", 1, "east-n2"
		c.Own = &kvstore.Config{Endpoints: []string{etcd.Endpoint()}}
	})
	s := w.awaitState("east", Ready)
	if !s.Own || s.Nodes != 1 || s.IPs != 4 || s.Identities != 2 || s.Services != 2 {
		t.Errorf("status %+v", s)
	}
	w.awaitIPs(
		"172.18.1.1/32 6 by 1 node/east-n1",
		"10.1.1.1/32 6 via 172.18.1.1 by 1 node/east-n1",
		"10.1.1.2/32 4 via 172.18.1.1 by 1 node/east-n1",
		"10.1.1.3/32 8 via 172.18.1.1 by 1 node/east-n1",
		"10.1.1.0/24 2 via 172.18.1.1 by 1 node/east-n1",
		"10.1.1.10/32 65793 via 172.18.1.1 shop/pod-1 by 1 ip",
		"10.1.2.10/32 65794 via 172.18.1.2 shop/pod-2 by 1 ip",
		"192.0.2.16/28 65793 by 1 ip",
		"fd00:10:1:2::10/128 65794 via 172.18.1.2 key 3 shop/pod-2 by 1 ip",
	)
	for c := range w.cfg.IPs.All() {
		if c.Owner.Source.String() != "kvstore" {
			t.Errorf("%s has source %s, want kvstore", c.Prefix, c.Owner.Source)
		}
	}
	<-w.Ready()
	if !w.Listed(1) || !w.Listed(0) || !w.Listed(2) {
		t.Error("not listed: our own cluster, or all clusters, or one that nobody has")
	}
}
