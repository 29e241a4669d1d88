// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// westIP is the winner for the address 10.2.1.n of cluster west's identity 131329.
func westIP(n int) string {
	return fmt.Sprintf("10.2.1.%d/32 131329 via 172.18.2.1 by 2 ip", n)
}

// newWest starts cluster west (id 2) with some addresses 10.2.1.n.
func newWest(t *testing.T, addresses ...int) *cluster {
	t.Helper()
	c := newCluster(t, "west", 2)
	for _, n := range addresses {
		c.ip(fmt.Sprintf("10.2.1.%d", n), 257, "172.18.2.1")
	}
	return c
}

func ready(s RemoteStatus) bool { return s.State == Ready }

// While etcd is away, and after it is back, nothing is lost; what was deleted meanwhile is noticed.
//
// mechanism: B2 B3 D1 D2 G11
// lesson: X1 X5
func TestEtcdAway(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1, 2, 3)
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	w.awaitIPs(westIP(1), westIP(2), westIP(3))

	west.etcd.Stop(t)
	s := w.awaitState("west", Stale)
	if s.LastError == "" || s.LastErrorAt.IsZero() {
		t.Errorf("stale without an error: %+v", s)
	}
	w.awaitIPs(westIP(1), westIP(2), westIP(3))

	west.etcd.Restart(t)
	w.awaitState("west", Ready)
	west.ip("10.2.1.4", 257, "172.18.2.1")
	w.awaitIPs(westIP(1), westIP(2), westIP(3), westIP(4))
	if !w.Listed(2) {
		t.Error("cluster 2 is not listed any more")
	}
}

// Deletions during an outage are found by the next listing, even if etcd has compacted them away; nothing else is deleted
// on the way there.
//
// mechanism: D2 D6
// lesson: X1
func TestDeletedWhileAway(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1, 2, 3)
	west.identity(257, "web")
	west.node("west-n1", "172.18.2.1", "10.2.1.0")
	west.node("west-n2", "172.18.2.2", "10.2.2.0")
	west.service("shop", "web")
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)

	// The config leads elsewhere for a while, to nothing.
	write(t, w.file("west"), "endpoints:\n- http://127.0.0.1:1\n")
	w.awaitState("west", Stale)
	west.etcd.Delete(t, west.ipKey("10.2.1.2"))
	west.etcd.Delete(t, "cilium/state/nodes/v1/west/west-n2")
	west.etcd.Delete(t, "cilium/state/identities/v1/id/131329")
	west.etcd.Delete(t, "cilium/state/services/v1/west/shop/web")
	west.etcd.Compact(t)
	if got := len(w.ips()); got != 3+4 {
		t.Errorf("%d entries while etcd is away, want 7", got)
	}

	west.etcd.WriteConfig(t, w.file("west"))
	s := w.awaitState("west", Ready)
	w.awaitIPs(westIP(1), westIP(3), "172.18.2.1/32 6 remote by 2 node/west-n1", "10.2.1.0/24 2 via 172.18.2.1 by 2 node/west-n1")
	if s.Nodes != 1 || s.IPs != 2 || s.Identities != 0 || s.Services != 0 || s.Reconnects == 0 {
		t.Errorf("status %+v", s)
	}
	if diff := cmp.Diff([]string{"west/west-n1"}, w.nodeNames()); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
}

// A cluster that says when its data is complete is not believed before: an etcd that is only half filled deletes nothing.
//
// mechanism: D3
// lesson: X2
func TestCanaries(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1, 2, 3)
	west.node("west-n1", "172.18.2.1", "")
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	full := []string{westIP(1), westIP(2), westIP(3), "172.18.2.1/32 6 remote by 2 node/west-n1"}
	w.awaitIPs(full...)

	west.etcd.Replace(t)
	west.config(`{"id":2,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255}}`)
	west.ip("10.2.1.1", 257, "172.18.2.1")
	s := w.await("west", "joined again", func(s RemoteStatus) bool { return s.Reconnects > 0 })
	if s.State != Stale {
		t.Errorf("state %s, want stale", s.State)
	}
	west.etcd.Put(t, "cilium/synced/west/cilium/state/ip/v1/x", "not this one")
	west.etcd.Put(t, "cilium/synced/west/cilium/cache/ip/v1", "nor this")
	w.never("something was deleted before the canary", func() bool { return len(w.ips()) != len(full) })

	// One kind after the other.
	west.ip("10.2.1.2", 257, "172.18.2.1")
	west.etcd.Put(t, "cilium/synced/west/cilium/state/ip/v1", "now")
	w.awaitIPs(westIP(1), westIP(2), "172.18.2.1/32 6 remote by 2 node/west-n1")
	s = w.await("west", "addresses", func(s RemoteStatus) bool { return s.Synced.IPs })
	if s.State != Stale || s.Synced.Nodes {
		t.Errorf("with one canary: %+v", s)
	}
	west.canaries("state")
	w.awaitState("west", Ready)
	w.awaitIPs(westIP(1), westIP(2))
}

// The first time, too, a cluster counts as listed only when it says that it is complete.
//
// lesson: X2 X4
func TestCanariesFirstTime(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	west.etcd.DeletePrefix(t, "cilium/synced/")
	w := newWorld(t, withConfig(west))
	w.awaitState("west", Syncing)
	w.never("listed, or ready, or filled", func() bool { return w.Listed(2) || w.Listed(0) || isClosed(w.Ready()) || len(w.ips()) > 0 })
	west.canaries("state")
	w.awaitState("west", Ready)
	w.awaitIPs(westIP(1))
	<-w.Ready()
	if !w.Listed(2) || !w.Listed(0) || !w.Listed(3) {
		t.Error("not listed")
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Older writers have no canaries: all kinds start at once.
func TestNoCanaries(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	west.etcd.DeletePrefix(t, "cilium/synced/")
	west.config(`{"id":2}`)
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	if s := w.awaitState("west", Ready); s.Canaries {
		t.Errorf("status %+v", s)
	}
	w.awaitIPs(westIP(1))
}

// Behind the same config there may suddenly be another etcd, whose revisions mean nothing: the same numbers stand for
// other values. What it has counts when it is complete, and nothing of both is mixed.
//
// mechanism: B2
// lesson: X3 E4
func TestAnotherEtcd(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1, 2)
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	before := w.awaitState("west", Ready)
	w.awaitIPs(westIP(1), westIP(2))

	west.etcd.Replace(t)
	west.config(`{"id":2,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255}}`)
	west.canaries("state")
	west.ip("10.2.1.1", 258, "172.18.2.7") // under the revision that it had in the other etcd
	west.ip("10.2.1.3", 257, "172.18.2.1")
	after := w.await("west", "the other etcd", func(s RemoteStatus) bool { return ready(s) && s.EtcdClusterID != before.EtcdClusterID })
	w.awaitIPs("10.2.1.1/32 131330 via 172.18.2.7 by 2 ip", westIP(3))
	if after.Reconnects == 0 {
		t.Errorf("status %+v", after)
	}
	west.etcd.Delete(t, west.ipKey("10.2.1.1"))
	w.awaitIPs(westIP(3))
}

// Changing the layout, as when a KVStoreMesh is put in between, deletes nothing but what the copy lacks.
func TestLayoutChange(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1, 2)
	west.identity(257, "web")
	west.identity(258, "db")
	west.node("west-n1", "172.18.2.1", "")
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)

	for key, value := range map[string]string{
		"cilium/cache/ip/v1/west/10.2.1.2":             ipValue("10.2.1.2", 131329, "172.18.2.1"),
		"cilium/cache/ip/v1/west/10.2.1.3":             ipValue("10.2.1.3", 131329, "172.18.2.1"),
		"cilium/cache/ip/v1/east/10.2.1.4":             ipValue("10.2.1.4", 131329, "172.18.2.1"),
		"cilium/cache/identities/v1/west/id/131329":    "k8s:app=web;k8s:io.cilium.k8s.policy.cluster=west;",
		"cilium/cache/nodes/v1/west/west-n1":           `{"Name":"west-n1","Cluster":"west","ClusterID":2,"IPAddresses":[{"Type":"InternalIP","IP":"172.18.2.1"}]}`,
		"cilium/cache/services/v1/west-2/shop/web":     `{}`,
		"cilium/cache/identities/v1/west/value/131333": "no identity, as it is not under id/",
	} {
		west.etcd.Put(t, key, value)
	}
	west.config(`{"id":2,"capabilities":{"syncedCanaries":true,"cached":true,"maxConnectedClusters":255}}`)
	w.await("west", "the new layout", func(s RemoteStatus) bool { return s.Cached })
	w.never("something was deleted before the copy is complete", func() bool {
		return len(w.ips()) != 3 || len(w.identityIDs()) != 2 || len(w.nodeNames()) != 1
	})
	west.canaries("cache")
	w.awaitState("west", Ready)
	w.awaitIPs(westIP(2), westIP(3), "172.18.2.1/32 6 remote by 2 node/west-n1")
	if diff := cmp.Diff([]identity.ID{131329}, w.identityIDs()); diff != "" {
		t.Errorf("identities (-want +got):\n%s", diff)
	}
	// And on removal all of it goes.
	w.remove("west")
	w.awaitGone("west")
	w.awaitIPs()
	if len(w.identityIDs()) != 0 || len(w.nodeNames()) != 0 {
		t.Errorf("left: identities %v, nodes %v", w.identityIDs(), w.nodeNames())
	}
}

// Stopping deletes nothing: the datapath lives on with what there is.
//
// mechanism: B5
func TestStopDrainsNothing(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1, 2)
	west.identity(257, "web")
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	w.stop()
	w.awaitIPs(westIP(1), westIP(2))
	if got := w.cfg.Identities.Len(); got != 1 {
		t.Errorf("%d identities, want 1", got)
	}
}

// An address moves from node to node, and from pod to pod, in any order of events, and always belongs to whom it was
// given last.
//
// lesson: X8 X9
func TestReusedIPs(t *testing.T) {
	t.Parallel()
	west := newWest(t)
	west.node("west-n1", "172.18.2.1", "10.2.1.0")
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	w.awaitIP("10.2.1.0/24", "10.2.1.0/24 2 via 172.18.2.1 by 2 node/west-n1")

	// The node is replaced: its successor has its address and its pod CIDR before it is gone.
	west.node("west-n2", "172.18.2.1", "10.2.1.0")
	w.awaitIP("172.18.2.1/32", "172.18.2.1/32 6 remote by 2 node/west-n2")
	west.etcd.Delete(t, "cilium/state/nodes/v1/west/west-n1")
	w.await("west", "one node", func(s RemoteStatus) bool { return s.Nodes == 1 })
	w.awaitIPs("172.18.2.1/32 6 remote by 2 node/west-n2", "10.2.1.0/24 2 via 172.18.2.1 by 2 node/west-n2")

	// It gets another address, and the pod CIDR stays with it.
	west.node("west-n2", "172.18.2.2", "10.2.1.0")
	w.awaitIPs("172.18.2.2/32 6 remote by 2 node/west-n2", "10.2.1.0/24 2 via 172.18.2.2 by 2 node/west-n2")

	// A pod's address goes to another pod on another node.
	west.ip("10.2.1.10", 257, "172.18.2.2")
	west.etcd.Delete(t, west.ipKey("10.2.1.10"))
	west.ip("10.2.1.10", 258, "172.18.2.3")
	w.awaitIP("10.2.1.10/32", "10.2.1.10/32 131330 via 172.18.2.3 by 2 ip")
}

// Two clusters claim one address; the loser's claim is there when the winner's is gone.
//
// lesson: C5 X8
func TestOneIPOfTwoClusters(t *testing.T) {
	t.Parallel()
	east, west := newCluster(t, "east", 1), newWest(t, 1)
	west.etcd.Put(t, west.ipKey("10.9.9.9"), ipValue("10.9.9.9", 131329, "172.18.2.1"))
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitIP("10.9.9.9/32", "10.9.9.9/32 131329 via 172.18.2.1 by 2 ip")
	east.ip("10.9.9.9", 257, "172.18.1.1")
	east.etcd.WriteConfig(t, w.file("east"))
	w.awaitIP("10.9.9.9/32", "10.9.9.9/32 65793 via 172.18.1.1 by 1 ip")
	east.etcd.Delete(t, east.ipKey("10.9.9.9"))
	w.awaitIP("10.9.9.9/32", "10.9.9.9/32 131329 via 172.18.2.1 by 2 ip")
}

// An address is used as soon as it is known, whether its identity is or not, and does not change when that comes or goes.
//
// lesson: X7
func TestIPBeforeIdentity(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	w.awaitIPs(westIP(1))
	_, revision, _ := w.cfg.IPs.Changes(ipcache.Revision{}, make([]ipcache.Change, 0, 16))
	awaitIdentities := func(n int) {
		w.await("west", "identities", func(s RemoteStatus) bool { return s.Identities == n })
	}
	west.identity(257, "web")
	awaitIdentities(1)
	west.identity(257, "web2")
	west.etcd.Delete(t, "cilium/state/identities/v1/id/131329")
	awaitIdentities(0)
	w.awaitIPs(westIP(1))
	if changes, _, reset := w.cfg.IPs.Changes(revision, nil); len(changes) != 0 || reset {
		t.Errorf("the ipcache has changed: %v", changes)
	}
}

// What is bad is refused, object by object, and said so; what was good before stays, until the key is deleted; what is
// good beside it is not affected.
//
// mechanism: B6 E3
// lesson: C1 C2 R13
func TestBadValues(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1, 2)
	west.identity(257, "web")
	west.node("west-n1", "172.18.2.1", "")
	west.service("shop", "web")
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	good := []string{westIP(1), westIP(2), "172.18.2.1/32 6 remote by 2 node/west-n1"}
	w.awaitIPs(good...)

	for _, bad := range []string{"not json", "{", `""`, "[]", "\x00", strings.Repeat(`{"a":`, 10000), `{"IP":7}`} {
		west.etcd.Put(t, west.ipKey("10.2.1.1"), bad)
		west.etcd.Put(t, "cilium/state/nodes/v1/west/west-n1", bad)
		west.etcd.Put(t, "cilium/state/services/v1/west/shop/web", bad)
		west.etcd.Put(t, "cilium/state/identities/v1/id/131329", "k8s:app=web;")
	}
	west.etcd.Put(t, west.ipKey("10.2.1.9\n\x1b[31m"), "{}")
	west.etcd.Put(t, west.ipKey("10.9.0.1"), ipValue("10.9.0.1", 65793, "172.18.2.1"))
	west.etcd.Put(t, "cilium/state/nodes/v1/west/west-n2", `{"Name":"west-n2","Cluster":"east","ClusterID":2}`)
	west.etcd.Put(t, "cilium/state/nodes/v1/west2/n", `{"Name":"n","Cluster":"west2","ClusterID":2}`) // not its directory
	want := map[string]uint64{
		"ip/malformed": 8, "ip/foreign-identity": 1, "node/malformed": 6, "node/mismatch": 2,
		"service/malformed": 6, "service/mismatch": 1, "identity/mismatch": 7,
	}
	s := w.await("west", "refusals", func(s RemoteStatus) bool { return cmp.Equal(want, s.Rejected) })
	if s.State != Ready || s.IPs != 1 || s.Nodes != 0 || s.Services != 0 || s.Identities != 0 {
		t.Errorf("status %+v", s)
	}
	var keys []string
	for _, r := range s.LastRejections {
		keys = append(keys, r.Key)
	}
	if all := strings.Join(keys, " "); !strings.Contains(all, `10.2.1.9\n\x1b[31m`) {
		t.Errorf("refused keys %q, want the hostile one escaped", all)
	}
	w.awaitIPs(good...)
	if w.cfg.Services.Len() != 1 || w.cfg.Identities.Len() != 1 || len(w.nodeNames()) != 1 {
		t.Error("a last good value is gone")
	}

	// A good value is in use at once; a deletion is one, whatever the value was.
	west.ip("10.2.1.1", 258, "172.18.2.1")
	w.awaitIP("10.2.1.1/32", "10.2.1.1/32 131330 via 172.18.2.1 by 2 ip")
	for _, key := range []string{"nodes/v1/west/west-n1", "services/v1/west/shop/web", "identities/v1/id/131329", "ip/v1/default/10.2.1.1"} {
		west.etcd.Delete(t, "cilium/state/"+key)
	}
	w.awaitIPs(westIP(2))
	testutil.Eventually(t, soon, func() error {
		if n := w.cfg.Services.Len() + w.cfg.Identities.Len() + len(w.nodeNames()); n != 0 {
			return fmt.Errorf("%d objects left", n)
		}
		return nil
	})
}

// A last good value does not outlive its bad successor for ever, and the next good one is in use at once.
func TestBadValueExpires(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1, 2)
	west.node("west-n1", "172.18.2.1", "")
	w := newWorld(t, func(c *Config) { c.KeepInvalid = 500 * time.Millisecond })
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	west.etcd.Put(t, west.ipKey("10.2.1.1"), "bad")
	west.etcd.Put(t, "cilium/state/nodes/v1/west/west-n1", "bad")
	w.await("west", "refusals", func(s RemoteStatus) bool { return len(s.Rejected) == 2 })
	if got := len(w.ips()); got != 3 {
		t.Errorf("%d entries right after the refusals, want 3", got)
	}
	w.awaitIPs(westIP(2))
	if got := w.nodeNames(); len(got) != 0 {
		t.Errorf("nodes %v", got)
	}
	west.ip("10.2.1.1", 257, "172.18.2.1")
	w.awaitIPs(westIP(1), westIP(2))
	s, _ := w.remote("west")
	if s.IPs != 2 || s.Nodes != 0 {
		t.Errorf("status %+v", s)
	}
}

// Of news that come by a watch, the table is told when they arrived; of a list it is not.
func TestArrivals(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1, 2)
	west.node("west-n1", "172.18.2.1", "")
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	var at ipcache.Revision
	arrived := func() []ipcache.Arrival {
		_, at, _ = w.cfg.IPs.Changes(at, make([]ipcache.Change, 0, 100))
		return w.cfg.IPs.Arrived(at, nil)
	}
	if got := arrived(); len(got) != 0 {
		t.Fatalf("of the list: %v", got)
	}
	before := time.Now().UnixNano()
	west.ip("10.2.1.3", 257, "172.18.2.1")
	w.awaitIPs(westIP(1), westIP(2), westIP(3), "172.18.2.1/32 6 remote by 2 node/west-n1")
	after := time.Now().UnixNano()
	if got := arrived(); len(got) != 1 || got[0].Cluster != 2 || got[0].At < before || got[0].At > after {
		t.Errorf("of an address: %v, want one of cluster 2 between %d and %d", got, before, after)
	}
	west.etcd.Delete(t, "cilium/state/nodes/v1/west/west-n1")
	w.awaitIPs(westIP(1), westIP(2), westIP(3))
	if got := arrived(); len(got) != 1 || got[0].Cluster != 2 {
		t.Errorf("of a node: %v, want one of cluster 2", got)
	}
}
