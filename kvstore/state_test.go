// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/weftmesh/weft/internal/testutil"
)

// A connection's life, told to the status as the parts of a Client tell it.
// mechanism: C6
func TestStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newClientStatus()
		began := time.Now()
		expect := func(what string, want State) {
			t.Helper()
			switch got := s.get(); {
			case got.State != want:
				t.Errorf("%s: %s, want %s", what, got.State, want)
			case !got.Since.Equal(began):
				t.Errorf("%s: since %s, want %s", what, got.Since, began)
			}
			time.Sleep(time.Second)
		}
		turn := func(what string, want State) {
			t.Helper()
			began = time.Now()
			expect(what, want)
		}
		a, b := connection{"l1", "a"}, connection{"l2", "b"}
		header := &etcdserverpb.ResponseHeader{ClusterId: 7, Revision: 9}
		w, v := NewWatcher("p/", nil), NewWatcher("q/", nil)

		expect("at first", Connecting)
		s.follows(w, phaseListing)
		expect("with a watcher", Connecting)
		s.failed(errors.New("refused"))
		turn("after a refusal", Failed)
		s.connected(a)
		expect("TCP alone", Failed)
		s.answered(a, header)
		turn("after an answer", Syncing)
		s.follows(w, phaseBroken)
		turn("the list fails", Failed)
		s.follows(w, phaseLive)
		turn("it is followed", Ready)
		s.connected(b)
		s.answered(b, header)
		s.disconnected(a)
		expect("one of two connections ends", Ready)
		s.disconnected(b)
		turn("the other one too", Stale)
		s.answered(b, header)
		expect("an answer from before", Stale)
		s.connected(a)
		s.answered(a, header)
		turn("connected again", Ready)
		s.follows(v, phaseListing)
		turn("another watcher", Syncing)
		s.follows(v, phaseLive)
		turn("it is followed too", Ready)
		s.follows(v, phaseBroken)
		turn("its watch breaks", Stale)
		s.follows(v, phaseEnded)
		turn("it ends", Ready)
		s.heartbeat(true)
		turn("no heartbeat", Stale)
		s.heartbeat(false)
		turn("a heartbeat", Ready)
		s.failed(fmt.Errorf("%w: other", ErrHistoryChanged))
		turn("another etcd", Stale)
		s.repinned()
		turn("which is accepted", Ready)
	})
}

func TestStatusCountsLeases(t *testing.T) {
	s := newClientStatus()
	for id := range int64(3) {
		s.leased(nil, &etcdserverpb.LeaseGrantResponse{ID: id})
	}
	s.leased(nil, &etcdserverpb.LeaseKeepAliveResponse{ID: 0, TTL: 10})
	s.leased(nil, &etcdserverpb.LeaseKeepAliveResponse{ID: 1, TTL: 0})
	s.leased(&etcdserverpb.LeaseRevokeRequest{ID: 2}, &etcdserverpb.LeaseRevokeResponse{})
	if n := s.get().Leases; n != 1 {
		t.Errorf("%d leases, want 1", n)
	}
}

// mechanism: C11
// lesson: E1
func TestClientStates(t *testing.T) {
	e := testutil.StartEtcd(t)
	want := fill(t, e, 10)
	g := newGate(t, e)
	g.shut()
	c := mustDial(t, e, g.use, func(c *Config) { c.LivenessTimeout = 300 * time.Millisecond })
	impatient(c)
	await := func(want State) Status {
		t.Helper()
		var s Status
		testutil.Eventually(t, testTimeout, func() error {
			if s = c.Status(); s.State != want {
				return fmt.Errorf("%s, not %s: %v", s.State, want, s.LastError)
			}
			return nil
		})
		return s
	}
	await(Connecting)
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
	await(Failed)
	g.open()
	s := await(Ready)
	r.is(t, want)
	if s.EtcdClusterID == 0 || s.Endpoint != g.addr || s.Leases != 0 || s.LastError == nil || s.Warning != "" {
		t.Errorf("status %+v", s)
	}
	e.Put(t, "q", "1") // which the watcher is told of by progress notifications
	testutil.Eventually(t, testTimeout, func() error {
		if s := c.Status(); s.Revision != 12 || s.Lag != 0 || s.ServerVersion == "" {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	g.shut()
	await(Stale)
	g.open()
	await(Ready)
}

// A client that only writes is told the version too.
func TestVersionIsProbedOncePerConnection(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e)
	testutil.Eventually(t, testTimeout, func() error {
		if _, err := c.etcd.Put(t.Context(), "p/a", "1"); err != nil {
			return err
		}
		if s := c.Status(); s.ServerVersion == "" {
			return errors.New("the version is not known")
		}
		return nil
	})
	server, cfg := startCounter(t)
	counted := mustDial(t, e, func(c *Config) { *c = cfg })
	for range 5 {
		if _, err := counted.etcd.Txn(t.Context()).Commit(); err != nil {
			t.Fatal(err)
		}
	}
	server.mu.Lock()
	defer server.mu.Unlock()
	if n := len(server.calls); n != 6 {
		t.Errorf("%d calls, where 5 were made and one asks for the version", n)
	}
	if s := counted.Status(); s.Warning == "" {
		t.Errorf("status %+v", s)
	}
}

func TestVersionWarning(t *testing.T) {
	for version, warns := range map[string]bool{
		"3.3.27": true, "3.4.23": true, "3.4.43": true, "3.4.44": false, "3.5.32": true, "3.5.33": false, "3.5.40": false,
		"3.6.0-rc.1": true, "3.6.13": true, "3.6.14": false, "3.7.0": true, "3.7.1": false, "3.7.3+git": false, "3.8.0": false,
		"4.0.0": false, "": false, "not known": false, "3.5": false, "3.x.1": false, "3.5.-1": false, "2.3.8": true,
	} {
		if got := versionWarning(version); (got != "") != warns {
			t.Errorf("%q: warning %q", version, got)
		}
	}
}

func FuzzVersion(f *testing.F) {
	f.Add("3.5.12")
	f.Add("3.6.0-alpha.0+dirty")
	f.Fuzz(func(_ *testing.T, version string) { versionWarning(version) })
}

// mechanism: C10
func TestHeartbeatIsLateAfterTwoMinutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		late := false
		h := newHeart(defaultHeartbeatTimeout, func(is bool) { late = is })
		defer h.stop()
		expect := func(what string, want bool) {
			t.Helper()
			synctest.Wait()
			h.mu.Lock()
			defer h.mu.Unlock()
			if late != want {
				t.Errorf("%s: late is %v", what, late)
			}
		}
		pass := func(d time.Duration) { time.Sleep(d) }
		written := Event{Kind: Modified, Key: []byte{}}
		h.deliver([]Event{{Kind: Synced}})
		pass(time.Hour)
		expect("never seen", false)
		h.deliver([]Event{{Kind: Created, Key: []byte{}}})
		pass(defaultHeartbeatTimeout - 1)
		expect("just before", false)
		pass(1)
		expect("two minutes", true)
		h.deliver([]Event{{Kind: Created, Key: []byte{}}, {Kind: Synced}})
		expect("it is listed", false)
		pass(time.Minute)
		h.deliver([]Event{written})
		pass(2*time.Minute - 1)
		expect("written in time", false)
		h.deliver([]Event{{Kind: Deleted, Key: []byte{}}})
		pass(1)
		expect("a deletion does not count", true)
		pass(time.Hour)
		expect("and what was there once stays expected", true)
		h.deliver([]Event{{Kind: Synced}})
		expect("nor a list without it", true)
		h.deliver([]Event{written})
		expect("it is back", false)
	})
}

func TestFollowHeartbeat(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Put(t, "heartbeat", "now")
	c := mustDial(t, e, func(c *Config) { c.HeartbeatKey = "heartbeat" })
	run := start(t, c.FollowHeartbeat)
	testutil.Eventually(t, testTimeout, func() error {
		if s := c.Status(); s.State != Ready {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	if err := run.stop(); err != nil {
		t.Error(err)
	}
}

// An etcd to which nobody writes any more makes what is known of it stale, and
// no more: nothing is deleted, no watch ends, and one who does not follow the
// heartbeat, as of the own cluster's etcd, does not notice.
//
// mechanism: C14, B8
func TestHeartbeatLateDeletesNothing(t *testing.T) {
	t.Parallel()
	e := testutil.StartEtcd(t)
	want := fill(t, e, 10)
	e.Put(t, "heartbeat", "1")
	heartbeat := func(c *Config) { c.HeartbeatKey, c.HeartbeatTimeout = "heartbeat", 300*time.Millisecond }
	remote, own := mustDial(t, e, heartbeat), mustDial(t, e, heartbeat)
	r, o := newRecorder(), newRecorder()
	w, v := NewWatcher("p/", r.deliver), NewWatcher("p/", o.deliver)
	r.awaitStart(t, w, remote, want)
	o.awaitStart(t, v, own, want)
	run := start(t, remote.FollowHeartbeat)
	await := func(want State) {
		t.Helper()
		testutil.Eventually(t, testTimeout, func() error {
			if s := remote.Status(); s.State != want {
				return fmt.Errorf("%s, not %s: %v", s.State, want, s.LastError)
			}
			return nil
		})
	}
	await(Stale)
	if err := remote.Status().LastError; !errors.Is(err, errNoHeartbeat) {
		t.Errorf("error %v", err)
	}
	e.Put(t, "p/later", "2") // the watches go on
	want["later"] = "2"
	r.is(t, want)
	e.Put(t, "heartbeat", "2")
	await(Ready)
	await(Stale)
	for name, w := range map[string]*Watcher{"remote": w, "own": v} {
		if s := w.Status(); !s.Live || s.Lists != 1 {
			t.Errorf("%s: status %+v", name, s)
		}
	}
	if s := own.Status(); s.State != Ready {
		t.Errorf("the own etcd's status %+v", s)
	}
	if s := remote.Status(); s.Leases != 0 {
		t.Errorf("a reader holds %d leases", s.Leases)
	}
	r.noDeletes(t, "no heartbeat")
	if err := run.stop(); err != nil {
		t.Error(err)
	}
	await(Ready) // nobody waits for it any more
}
