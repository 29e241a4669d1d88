// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
)

// newFullWest starts cluster west with one object of each kind.
func newFullWest(t *testing.T) *cluster {
	t.Helper()
	west := newWest(t, 1)
	west.identity(257, "web")
	west.node("west-n1", "172.18.2.1", "")
	west.service("shop", "web")
	return west
}

// kept says what is in the tables of a world that follows newFullWest.
func (w *world) kept() [4]int {
	return [4]int{len(w.nodeNames()), w.cfg.Services.Len(), len(w.ips()), w.cfg.Identities.Len()}
}

func (w *world) awaitKept(want [4]int) {
	w.t.Helper()
	w.await("west", "objects", func(RemoteStatus) bool { return w.kept() == want })
}

var fullWest = [4]int{1, 1, 2, 1}

// A cluster that is away for long keeps all it has, and the status says since when it is stale.
func TestAbsenceKeepsByDefault(t *testing.T) {
	t.Parallel()
	west := newFullWest(t)
	w := newWorld(t, withConfig(west))
	if s := w.awaitState("west", Ready); !s.StaleSince.IsZero() || s.LastSuccess.IsZero() {
		t.Errorf("status %+v", s)
	}
	before := time.Now()
	west.etcd.Stop(t)
	s := w.awaitState("west", Stale)
	w.never("something is gone, or back", func() bool {
		now, _ := w.remote("west")
		return w.kept() != fullWest || now.StaleSince != s.StaleSince || now.Withdrawn
	})
	if s.StaleSince.Before(before) || s.LastSuccess.After(time.Now()) {
		t.Errorf("status %+v", s)
	}
}

// What has outlived its time is withdrawn, and no more than that; when the cluster is back, all of it is.
//
// lesson: X5
func TestCacheTTL(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		all  bool
		want [4]int
	}{
		"services": {false, [4]int{1, 0, 2, 1}},
		"all":      {true, [4]int{}},
	} {
		t.Run(name, func(t *testing.T) {
			west := newFullWest(t)
			w := newWorld(t, withConfig(west), func(c *Config) { c.CacheTTL, c.CacheTTLAll = 500*time.Millisecond, tc.all })
			w.awaitState("west", Ready)
			for range 2 { // each absence has its own time
				gone := time.Now()
				west.etcd.Stop(t)
				w.await("west", "the end of its time", func(s RemoteStatus) bool { return s.Withdrawn })
				w.awaitKept(tc.want)
				if s, _ := w.remote("west"); s.State != Stale || s.StaleSince.Before(gone) || s.StaleSince.Add(w.cfg.CacheTTL).After(time.Now()) {
					t.Errorf("status %+v", s)
				}
				if !w.Listed(2) || !w.Listed(0) {
					t.Error("what was withdrawn is not known to be gone")
				}
				_, revision, _ := w.cfg.IPs.Changes(ipcache.Revision{}, make([]ipcache.Change, 0, 16))
				west.etcd.Restart(t)
				w.awaitState("west", Ready)
				w.awaitKept(fullWest)
				s, _ := w.remote("west")
				if s.Withdrawn || !s.StaleSince.IsZero() {
					t.Errorf("status %+v", s)
				}
				changes, _, reset := w.cfg.IPs.Changes(revision, make([]ipcache.Change, 0, 16))
				if n := fullWest[2] - tc.want[2]; len(changes) != n || reset {
					t.Errorf("on return, %d changes of addresses: %v", len(changes), changes)
				}
			}
		})
	}
}

// A cluster that comes back in time loses nothing, however often and for how long it has been away before; and a time that has
// ended means nothing any more when the cluster is back before anything was withdrawn.
func TestCacheTTLNotReached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := testConfig(t)
		cfg.Dir, cfg.CacheTTL = "/nowhere", time.Minute
		m, err := New(cfg)
		must(t, err)
		r := newRemote(m, "west")
		away := func(now bool) absence {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.noteAbsence(now)
			return r.progress.away
		}
		over := func() bool { return away(true).over }
		for range 10 {
			over()
			time.Sleep(59 * time.Second)
			synctest.Wait()
			if over() {
				t.Fatal("the time has ended too early")
			}
			away(false)
			time.Sleep(2 * time.Second)
		}
		since := away(true).since
		time.Sleep(61 * time.Second)
		synctest.Wait()
		if !over() || !since.Equal(away(true).since) {
			t.Error("the time has not ended")
		}
		if a := away(false); a != (absence{}) {
			t.Errorf("after its return: %+v", a)
		}
		if r.forget(); r.progress.away.withdrawn {
			t.Error("withdrawn after its return")
		}
		// When the life ends, so does the time.
		over()
		r.end()
		time.Sleep(time.Hour)
		synctest.Wait()
		if over() {
			t.Error("the time goes on after the end")
		}
	})
}

// A cluster that has never been reached has nothing to withdraw; what an agent before this one has left of it in the
// kernel outlives its time, too, if all data does.
func TestCacheTTLOfTheUnknown(t *testing.T) {
	t.Parallel()
	for _, all := range []bool{false, true} {
		w := newWorld(t, func(c *Config) { c.CacheTTL, c.CacheTTLAll = 300*time.Millisecond, all })
		write(t, w.file("west"), "endpoints:\n- http://127.0.0.1:1\n")
		w.awaitState("west", Failed)
		if w.Listed(2) {
			t.Error("listed at once")
		}
		if !all {
			w.never("listed", func() bool { return w.Listed(2) || w.Listed(0) })
			continue
		}
		w.await("west", "the end of its time", func(s RemoteStatus) bool { return w.Listed(2) && w.Listed(0) })
		w.awaitState("west", Failed)
	}
}

// Removing the config of a cluster whose time has ended, or is about to, is the end of it.
func TestCacheTTLAndRemoval(t *testing.T) {
	t.Parallel()
	west := newFullWest(t)
	w := newWorld(t, func(c *Config) { c.CacheTTL, c.CacheTTLAll = 20*time.Millisecond, true })
	for range 5 {
		west.etcd.WriteConfig(t, w.file("west"))
		w.awaitKept(fullWest)
		west.etcd.Stop(t)
		w.remove("west")
		w.awaitGone("west")
		if got := w.kept(); got != [4]int{} {
			t.Fatalf("left: %v", got)
		}
		west.etcd.Restart(t)
	}
}

// Only remote clusters are asked for a heartbeat: the absence of our own operator is no reason to think ill of our etcd.
//
// mechanism: C14
func TestHeartbeatOfRemotesOnly(t *testing.T) {
	t.Parallel()
	own := kvstore.Config{Endpoints: []string{"http://127.0.0.1:1"}}
	cfg := testConfig(t)
	cfg.Own = &own
	m, err := New(cfg)
	must(t, err)
	config, err := newRemote(m, "west").parseConfig([]byte("endpoints:\n- http://127.0.0.1:1\n"))
	if err != nil || config.HeartbeatKey != "cilium/.heartbeat" || m.own.settings.config.HeartbeatKey != "" {
		t.Errorf("heartbeats: remote %q, own %q, %v", config.HeartbeatKey, m.own.settings.config.HeartbeatKey, err)
	}
}

// A remote whose heartbeat stops is stale, and says why, while its data is followed as before: that is no absence.
//
// mechanism: C14
func TestHeartbeatLate(t *testing.T) {
	t.Parallel()
	west := newFullWest(t)
	w := newWorld(t, withConfig(west), func(c *Config) {
		c.CacheTTL, c.CacheTTLAll = 50*time.Millisecond, true
		c.Tune = func(k *kvstore.Config) { k.HeartbeatTimeout = 500 * time.Millisecond }
	})
	w.awaitState("west", Ready)
	w.never("a cluster that has no heartbeat is missing one", func() bool {
		s, _ := w.remote("west")
		return s.State != Ready
	})
	west.etcd.Put(t, "cilium/.heartbeat", "2026-11-20T22:51:44Z")
	s := w.await("west", "a late heartbeat", func(s RemoteStatus) bool { return s.State == Stale })
	if !strings.Contains(s.LastError, "cilium/.heartbeat") || !s.StaleSince.IsZero() || s.Withdrawn || s.Reconnects != 0 {
		t.Errorf("status %+v", s)
	}
	west.ip("10.2.1.2", 257, "172.18.2.1")
	w.awaitIPs(westIP(1), westIP(2), "172.18.2.1/32 6 remote by 2 node/west-n1")
	west.etcd.Put(t, "cilium/.heartbeat", "2026-11-20T22:52:44Z")
	w.awaitState("west", Ready)
}

// The failures and successes of a controller: attempts to connect count each, and the error names what they met.
//
// mechanism: B1, R1
func TestFailuresCounted(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	proxy := testutil.StartProxy(t, west.etcd.Addr())
	proxy.Refuse()
	w := newWorld(t)
	write(t, w.file("west"), "endpoints:\n- "+proxy.Endpoint()+"\n")
	s := w.await("west", "failed attempts", func(s RemoteStatus) bool { return s.Failures >= 3 })
	if !s.LastSuccess.IsZero() || !strings.Contains(s.LastError, proxy.Addr()) {
		t.Errorf("status %+v", s)
	}
	proxy.Forward()
	s = w.awaitState("west", Ready)
	if s.LastSuccess.Before(s.LastErrorAt) || s.Failures < 3 {
		t.Errorf("status %+v", s)
	}
	proxy.Refuse()
	down := w.await("west", "more failures", func(now RemoteStatus) bool { return now.State == Stale && now.Failures > s.Failures })
	if down.LastSuccess.Before(s.LastSuccess) || down.LastErrorAt.Before(down.LastSuccess) {
		t.Errorf("status %+v, before %+v", down, s)
	}
}
