// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/identity"
)

// A cluster that does not publish itself, or not properly, is waited for, and says why.
//
// mechanism: B1
// lesson: C1 C3
func TestClusterConfigAwaited(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	key := "cilium/cluster-config/west"
	west.etcd.Delete(t, key)
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	s := w.awaitState("west", Failed)
	if !strings.Contains(s.LastError, key) {
		t.Errorf("error %q does not name the key", s.LastError)
	}
	for value, want := range map[string]string{
		"not json":   "invalid character",
		"{}":         "ClusterID 0 is reserved",
		`{"id":256}`: "ClusterID > 255 is not supported",
		`{"id":9}`:   "cluster id is our own",
		`{"id":2,"capabilities":{"endpointSlicesExportMode":"x\u001b"}}`: `invalid EndpointSlicesExportMode "x\x1b"`,
	} {
		west.config(value)
		s := w.await("west", want, func(s RemoteStatus) bool { return strings.Contains(s.LastError, want) })
		if s.State != Failed || len(w.ips()) != 0 {
			t.Errorf("cluster-config %s: status %+v, ips %v", value, s, w.ips())
		}
	}
	west.config(`{"id":2}`)
	w.awaitState("west", Ready)
	w.awaitIPs(westIP(1))
}

// What a cluster says of itself counts at once, both while it is waited for and while it is followed: no interval ends while
// this test runs.
//
// mechanism: B2
// lesson: C3
func TestClusterConfigWatched(t *testing.T) {
	t.Parallel()
	at := testTiming
	at.probe, at.retryMin, at.retryMax = time.Hour, time.Hour, time.Hour
	west := newWest(t, 1)
	west.etcd.Delete(t, "cilium/cluster-config/west")
	w := newWorldAt(t, at, withConfig(west))
	w.awaitState("west", Failed)
	west.config("{}")
	w.await("west", "another error", func(s RemoteStatus) bool { return strings.Contains(s.LastError, "ClusterID 0") })
	west.config(`{"id":2}`)
	first := w.awaitState("west", Ready)
	if first.Reconnects != 0 || !first.LastReconnect.IsZero() {
		t.Errorf("the first connection: status %+v", first)
	}
	w.awaitIPs(westIP(1))
	west.config(`{"id":3}`)
	w.await("west", "id 3", func(s RemoteStatus) bool { return s.State == Ready && s.ClusterID == 3 })
	west.config(`{"id":9}`)
	w.awaitState("west", Stale)
	west.config(`{"id":2,"capabilities":{"syncedCanaries":true}}`)
	w.await("west", "id 2", func(s RemoteStatus) bool { return s.State == Ready && s.ClusterID == 2 && s.Canaries })
	west.etcd.Delete(t, "cilium/cluster-config/west")
	w.awaitState("west", Stale)
	west.config(`{"id":2,"capabilities":{"syncedCanaries":true,"serviceExportsEnabled":true}}`)
	s := w.awaitState("west", Ready)
	w.awaitIPs(westIP(1))
	// What does not change how the cluster is read is no reason to take it up again.
	if s.Reconnects != 2 || s.LastReconnect.Before(first.Since) {
		t.Errorf("status %+v", s)
	}
}

// In a mesh of 511 clusters, all use its layout, and its ids.
//
// lesson: C3
func TestLayoutOf511(t *testing.T) {
	t.Parallel()
	west := newCluster(t, "west", 2)
	w := newWorld(t, withConfig(west), func(c *Config) {
		c.Layout, _ = identity.NewLayout(511)
		c.ClusterID = 400
	})
	for config, want := range map[string]string{
		`{"id":511,"capabilities":{"maxConnectedClusters":255}}`: "mismatched MaxConnectedClusters; local=511, remote=255",
		`{"id":511}`: "mismatched MaxConnectedClusters; local=511, remote=0",
		`{"id":512,"capabilities":{"maxConnectedClusters":511}}`: "ClusterID > 511 is not supported",
		`{"id":400,"capabilities":{"maxConnectedClusters":511}}`: "cluster id is our own",
	} {
		west.config(config)
		w.await("west", want, func(s RemoteStatus) bool { return strings.Contains(s.LastError, want) && s.State == Failed })
	}
	west.config(`{"id":511,"capabilities":{"maxConnectedClusters":511}}`)
	w.awaitState("west", Ready)
	for addr, id := range map[string]int{"10.2.1.1": 511<<15 + 7, "10.2.1.2": 510<<15 + 7, "10.2.1.3": 511<<16 + 7} {
		west.etcd.Put(t, west.ipKey(addr), ipValue(addr, id, "172.18.2.1"))
	}
	w.await("west", "two refusals", func(s RemoteStatus) bool { return s.Rejected["ip/foreign-identity"] == 2 })
	w.awaitIPs(fmt.Sprintf("10.2.1.1/32 %d via 172.18.2.1 by 511 ip", 511<<15+7))
}

// When the cluster-config goes bad under a connection, what is known stays, and is stale, until it is good again. A missing
// one changes nothing: it is leased, and its writer may be away.
//
// lesson: C3
func TestClusterConfigGoesBad(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	west.config(`{"id":9}`)
	w.awaitState("west", Stale)
	w.awaitIPs(westIP(1))
	west.config(`{"id":2}`)
	if s := w.awaitState("west", Ready); s.Canaries {
		t.Errorf("status %+v", s)
	}
	west.etcd.Delete(t, "cilium/cluster-config/west")
	w.await("west", "a missing config", func(s RemoteStatus) bool { return strings.Contains(s.LastError, "cluster-config is missing") })
	west.ip("10.2.1.2", 257, "172.18.2.1")
	w.awaitIPs(westIP(1), westIP(2))
	west.config(`{"id":2}`)
	w.awaitState("west", Ready)
}

// A cluster that changes its id takes back what it claimed under the old one, and starts over under the new one.
//
// lesson: C3 R11
func TestClusterIDChanges(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	west.identity(257, "web")
	west.node("west-n1", "172.18.2.1", "")
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	west.config(`{"id":3}`)
	s := w.await("west", "id 3", func(s RemoteStatus) bool { return s.State == Ready && s.ClusterID == 3 })
	// Nothing of the old id is valid under the new one.
	w.awaitIPs()
	if s.Rejected["ip/foreign-identity"] != 1 || s.Rejected["identity/foreign-identity"] != 1 || s.Rejected["node/mismatch"] != 1 {
		t.Errorf("refused: %v", s.Rejected)
	}
	if len(w.identityIDs()) != 0 || len(w.nodeNames()) != 0 {
		t.Errorf("left: identities %v, nodes %v", w.identityIDs(), w.nodeNames())
	}
	if !w.Listed(2) || !w.Listed(3) {
		t.Error("not listed: the free id, or the new one")
	}
	west.id = 3
	west.ip("10.2.1.1", 257, "172.18.2.1")
	w.awaitIPs(fmt.Sprintf("10.2.1.1/32 %d via 172.18.2.1 by 3 ip", 3<<16+257))
}

// Two clusters swap their ids, one after the other, and neither blocks the other for ever.
func TestClusterIDsSwapped(t *testing.T) {
	t.Parallel()
	east, west := newCluster(t, "east", 1), newCluster(t, "west", 2)
	w := newWorld(t)
	east.etcd.WriteConfig(t, w.file("east"))
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("east", Ready)
	w.awaitState("west", Ready)
	east.config(`{"id":2}`)
	w.awaitState("east", Conflict)
	west.config(`{"id":1}`)
	for name, id := range map[string]uint32{"east": 2, "west": 1} {
		w.await(name, "its new id", func(s RemoteStatus) bool { return s.State == Ready && s.ClusterID == id })
	}
}

// Of two clusters with one id the first keeps it, and the second waits, visibly, until the first is gone.
//
// lesson: C3
func TestClusterIDConflict(t *testing.T) {
	t.Parallel()
	west, south := newWest(t, 1), newCluster(t, "south", 2)
	south.ip("10.3.1.1", 258, "172.18.3.1")
	w := newWorld(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	south.etcd.WriteConfig(t, w.file("south"))
	s := w.awaitState("south", Conflict)
	if !strings.Contains(s.LastError, "cluster west holds") || s.ClusterID != 2 {
		t.Errorf("status %+v", s)
	}
	w.awaitIPs(westIP(1))
	if !w.Listed(2) || !w.Listed(7) || w.Listed(0) {
		t.Error("listed: not 2, or not 7, or 0")
	}
	w.remove("west")
	w.awaitState("south", Ready)
	w.awaitIPs("10.3.1.1/32 131330 via 172.18.3.1 by 2 ip")
}

// Ids are given to who comes first, and back.
func TestClusterIDs(t *testing.T) {
	ids := newClusterIDs()
	freed := ids.changed()
	var got []bool
	for _, step := range []struct {
		id   identity.ClusterID
		name string
	}{{2, "west"}, {2, "west"}, {2, "south"}, {3, "south"}} {
		got = append(got, ids.reserve(step.id, step.name) == nil)
	}
	if diff := cmp.Diff([]bool{true, true, false, true}, got); diff != "" {
		t.Errorf("reserve (-want +got):\n%s", diff)
	}
	ids.release(2, "south") // is not its own
	if isClosed(freed) || ids.reserve(2, "north") == nil {
		t.Error("a cluster has released another's id")
	}
	ids.release(2, "west")
	if !isClosed(freed) || ids.reserve(2, "north") != nil {
		t.Error("the id is not free")
	}
}
