// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/node"
)

// announcement is what is announced of an address, behind a host, by a writer, of a pod.
func announcement(ip, host, metadata, pod string) string {
	namespace, name, _ := strings.Cut(pod, "/")
	return fmt.Sprintf(`{"IP":%q,"Mask":null,"HostIP":%q,"ID":65793,"Key":0,"Metadata":%q,"K8sNamespace":%q,"K8sPodName":%q}`,
		ip, host, metadata, namespace, name)
}

func putNode(t *testing.T, etcd *testutil.Etcd, name, cluster, ip string) {
	t.Helper()
	n := node.Node{Name: name, Cluster: cluster, ClusterID: 1, Addresses: []node.Address{{Type: node.InternalIP, IP: netip.MustParseAddr(ip)}}}
	value, err := n.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	etcd.Put(t, n.Key(), string(value))
}

// announcedIn returns the addresses that an etcd announces.
func announcedIn(t *testing.T, term *Term) string {
	t.Helper()
	var all []string
	for kv, err := range term.client.All(t.Context(), announced) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, strings.TrimPrefix(kv.Key, announced))
	}
	return strings.Join(all, " ")
}

// Only addresses go whose owner is gone, and only after two rounds that found them as they are. What somebody keeps a lease
// for stays, and so does what names no owner.
//
// mechanism: P1
// lesson: O4
func TestAddressGC(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	term := mustBegin(t, etcd)
	for ip, value := range map[string]string{
		"10.1.0.1":         announcement("10.1.0.1", "172.18.1.1", "cilium-global:default:n1:7", ""),
		"10.1.0.2":         announcement("10.1.0.2", "172.18.1.9", "cilium-global:default:n9:7", "shop/web"),
		"10.1.0.3":         announcement("10.1.0.3", "172.18.1.9", "", ""),
		"10.1.0.4":         announcement("10.1.0.4", "", "", ""),
		"10.1.0.5":         announcement("10.1.0.5", "", "other", "shop/web"),
		"10.1.0.6":         announcement("10.1.0.6", "172.18.7.7", "cilium-global:default:n1:8", ""), // the node has another address now
		"10.1.0.7":         announcement("10.1.0.7", "172.18.1.9", "cilium-global:default:n9:9", ""),
		"10.1.0.8":         "{",
		"fd00::1":          announcement("fd00::1", "", "cilium-global:default:n9:7", ""),
		"192.0.2.16/28":    `{"IP":"192.0.2.16","Mask":"////8A==","HostIP":"","ID":65793,"Key":0,"Metadata":""}`,
		"198.51.100.16/28": `{"IP":"198.51.100.16","Mask":"////8A==","HostIP":"172.18.1.9","ID":65793,"Key":0,"Metadata":""}`,
	} {
		etcd.Put(t, announced+ip, value)
	}
	putLeased(t, term, announced+"10.1.0.9", announcement("10.1.0.9", "172.18.1.9", "cilium-global:default:n9:9", ""), time.Hour)
	const all = "10.1.0.1 10.1.0.2 10.1.0.3 10.1.0.4 10.1.0.5 10.1.0.6 10.1.0.7 10.1.0.8 10.1.0.9 192.0.2.16/28 198.51.100.16/28 fd00::1"

	gc := NewAddressGC(AddressGCConfig{ClusterName: "east", Interval: time.Millisecond})
	putNode(t, etcd, "n9", "west", "172.18.1.9") // of another cluster
	for range 3 {                                // no node of the cluster is known
		mustRound(t, gc, term)
		if got := announcedIn(t, term); got != all {
			t.Fatalf("deleted while no node is known: %s", got)
		}
	}
	putNode(t, etcd, "n1", "east", "172.18.1.1")
	mustRound(t, gc, term)
	if got := announcedIn(t, term); got != all {
		t.Fatalf("deleted in the first round: %s", got)
	}
	etcd.Put(t, announced+"10.1.0.7", announcement("10.1.0.7", "172.18.1.9", "cilium-global:default:n9:10", "")) // somebody has it again
	did := mustRound(t, gc, term)
	if got, want := announcedIn(t, term), "10.1.0.1 10.1.0.4 10.1.0.5 10.1.0.6 10.1.0.7 10.1.0.8 10.1.0.9 192.0.2.16/28"; got != want {
		t.Errorf("left: %s\nwant  %s", got, want)
	}
	const want = "12 addresses: 5 without their owner, 1 more that an agent keeps, 1 not understood, 4 deleted"
	if did.Detail != want || did.Deleted != 4 {
		t.Errorf("%+v\nwant %s", did, want)
	}
	// A node that publishes nonsense is a node all the same, whose addresses are not known.
	etcd.Put(t, node.StatePrefix+"/east/n9", "{")
	if did, err := gc.round(t.Context(), term); err == nil || did.Deleted > 0 {
		t.Errorf("%+v, %v", did, err)
	}
}

// An address of a node that is gone goes when nobody renews its lease any more.
func TestAddressGCWaitsForLeases(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	term := mustBegin(t, etcd)
	putNode(t, etcd, "n1", "east", "172.18.1.1")
	lease := putLeased(t, term, announced+"10.1.0.9", announcement("10.1.0.9", "172.18.1.9", "", ""), time.Hour)
	gc := NewAddressGC(AddressGCConfig{ClusterName: "east", Interval: time.Millisecond})
	census := func() addressCensus {
		c, err := takeAddressCensus(t.Context(), term.client, AddressGCConfig{ClusterName: "east"})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if c := census(); c.kept != 1 || len(c.orphans) != 0 {
		t.Errorf("%+v", c)
	}
	if _, err := term.client.KeepAliveOnce(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	if l, err := term.client.TimeToLive(t.Context(), lease); err != nil || !alive(l) {
		t.Errorf("%+v, %v", l, err)
	}
	l, err := term.client.TimeToLive(t.Context(), lease)
	l.TTL = l.Granted / 2
	if err != nil || alive(l) {
		t.Errorf("%+v, %v", l, err)
	}
	mustRound(t, gc, term)
	if got := announcedIn(t, term); got != "10.1.0.9" {
		t.Errorf("left: %s", got)
	}
}

// mechanism: N1
func TestWatchdog(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	term := mustBegin(t, etcd)
	lock := func(path string) interface{ Held() bool } {
		l, err := term.client.Lock(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Unlock(t.Context()) })
		return l
	}
	const leaked, elected = "cilium/state/identities/v1/locks/k8s:app=web;", "cilium/kvstoremesh-lock"
	lock(leaked)
	lock(elected)
	dog := newWatchdog(time.Millisecond)
	if did := mustRound(t, dog, term); did.Deleted != 0 {
		t.Errorf("a lock that was taken just now is freed: %+v", did)
	}
	did := mustRound(t, dog, term)
	if did.Deleted != 1 || !strings.HasPrefix(did.Detail, "freed: "+leaked+"/") {
		t.Errorf("%+v", did)
	}
	if did := mustRound(t, dog, term); did.Deleted != 0 {
		t.Errorf("%+v", did)
	}
	if _, ok, err := term.client.First(t.Context(), elected+"/"); err != nil || !ok {
		t.Errorf("the lock of a leader: %t, %v", ok, err)
	}
}
