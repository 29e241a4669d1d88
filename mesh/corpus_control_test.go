// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// badConfigs are cluster-configs that no cluster can be joined with.
func badConfigs() map[string]string {
	const good = `{"id":2,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255}}`
	bad := map[string]string{
		"empty": "", "truncated": good[:len(good)/2], "null": "null", "array": "[]", "string": `"x"`, "number": "2",
		"10 MiB of text": strings.Repeat("x", 10<<20), "10 MiB of spaces and no end": "{" + strings.Repeat(" ", 10<<20),
		"depth": strings.Repeat(`{"a":`, 10_001) + "1" + strings.Repeat("}", 10_001), "depth of arrays": strings.Repeat("[", 10_001),
		"NUL": "\x00", "NUL in front": "\x00" + good, "two values": good + good, "invalid UTF-8 outside of text": "\xff" + good,
		"duplicate key, the last counts": `{"id":2,"id":0}`, "no id": `{"capabilities":{}}`,
		"capabilities of the wrong type": `{"id":2,"capabilities":[]}`, "canaries of the wrong type": `{"id":2,"capabilities":{"syncedCanaries":"x"}}`,
		"mode that drives a terminal": `{"id":2,"capabilities":{"endpointSlicesExportMode":"\u001b[2J"}}`,
	}
	for _, number := range []string{"0", "-1", "256", "1e99", "4294967296", "4294967298", "99999999999999999999999999", "2.5", `"2"`, "true", "[2]", "{}", "null"} {
		bad["id "+number] = `{"id":` + number + `}`
	}
	return bad
}

// Every bad cluster-config is refused, without a panic or more memory than a few times its size.
//
// lesson: C1 C8
func TestCorpusOfClusterConfigs(t *testing.T) {
	layout, err := identity.NewLayout(255)
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range badConfigs() {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		config, err := identity.ParseClusterConfig([]byte(value))
		if err == nil {
			err = config.Validate(layout)
		}
		runtime.ReadMemStats(&after)
		if err == nil {
			t.Errorf("%s: accepted: %+v", name, config)
			continue
		}
		if text := printable(err.Error()); strings.ContainsAny(text, "\x00\x1b\n") || len(text) > 2*rejectionTextMax {
			t.Errorf("%s: the error is shown as %q", name, text)
		}
		if took := after.TotalAlloc - before.TotalAlloc; took > 2*uint64(len(value))+2<<20 {
			t.Errorf("%s: %d bytes allocated for a value of %d", name, took, len(value))
		}
	}
}

// A cluster that writes any of it is shown as failed, with the key, counts a failure, and is joined when the key is right. Its
// neighbour notices nothing.
//
// lesson: C1
func TestCorpusOfClusterConfigsByEtcd(t *testing.T) {
	t.Parallel()
	west, east := newWest(t, 1), newCluster(t, "east", 1)
	east.ip("10.1.1.10", 257, "172.18.1.1")
	w := newWorld(t, withConfig(west), withConfig(east))
	w.awaitState("east", Ready)
	w.awaitState("west", Ready)
	const good = `{"id":2,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255}}`
	for name, value := range badConfigs() {
		if len(value) > 1<<20 {
			continue // more than etcd takes
		}
		was := w.awaitState("west", Ready)
		west.config(value)
		s := w.await("west", name, func(s RemoteStatus) bool { return s.State == Stale })
		if s.Failures <= was.Failures || !strings.Contains(s.LastError, "cilium/cluster-config/west") {
			s = w.await("west", "the key", func(s RemoteStatus) bool {
				return s.Failures > was.Failures && strings.Contains(s.LastError, "cilium/cluster-config/west")
			})
		}
		if s.IPs != 1 {
			t.Errorf("%s: %d addresses of west left", name, s.IPs)
		}
		west.config(good)
	}
	w.awaitState("west", Ready)
	if e, _ := w.remote("east"); e.State != Ready || e.Reconnects != 0 || e.IPs != 1 {
		t.Errorf("east: %+v", e)
	}
}

// What stands beside the canaries, whatever its name, makes nothing complete; and what a canary or a heartbeat says does not
// matter, however long or broken it is: that they are written counts.
//
// lesson: C1
func TestCorpusOfCanariesAndHeartbeats(t *testing.T) {
	t.Parallel()
	west := newCluster(t, "west", 2)
	prefix := identity.SyncedPrefix + "/west/"
	west.etcd.DeletePrefix(t, prefix)
	west.ip("10.2.1.1", 257, "172.18.2.1")
	const limit = time.Second
	w := newWorld(t, withConfig(west), func(c *Config) {
		c.Tune = func(k *kvstore.Config) { k.HeartbeatTimeout = limit }
	})
	w.await("west", "joined", func(s RemoteStatus) bool { return s.State == Syncing })
	for _, name := range []string{
		"", "/", "..", "../west/cilium/state/ip/v1", "cilium/state/ip/v1/", "cilium/state/ip/v1\x00", "cilium/state/ip/v1\n", " cilium/state/ip/v1",
		"CILIUM/STATE/IP/V1", "cilium/state/ip", "cilium/cache/ip/v1", "cilium/state/ip/v1/default", "\xff", "\x1b[2J", strings.Repeat("x", 10_000),
	} {
		west.etcd.Put(t, prefix+name, "now")
	}
	w.never("a strange canary was believed", func() bool {
		s, _ := w.remote("west")
		return s.Synced.IPs || len(w.ips()) != 0
	})
	values := []string{"", "\x00", "\xff\xfe", "null", "-1", "1e99", strings.Repeat("[", 10_001), "\x1b[2J", strings.Repeat("x", 1<<20)}
	for i, kind := range []string{"nodes/v1", "services/v1", "ip/v1", "identities/v1"} {
		west.etcd.Put(t, prefix+"cilium/state/"+kind, values[i])
	}
	w.awaitState("west", Ready)
	w.awaitIPs(westIP(1))
	for _, value := range values {
		west.etcd.Put(t, identity.HeartbeatKey, value)
		if s := w.awaitState("west", Ready); len(s.Rejected) != 0 {
			t.Errorf("heartbeat %.20q: %+v", value, s)
		}
	}
	s := w.await("west", "a late heartbeat", func(s RemoteStatus) bool { return s.State == Stale })
	if want := fmt.Sprintf("key %s was not written for %s", identity.HeartbeatKey, limit); !strings.Contains(s.LastError, want) {
		t.Errorf("error %q, want %q", s.LastError, want)
	}
	west.etcd.Put(t, identity.HeartbeatKey, "\xff")
	w.awaitState("west", Ready)
}
