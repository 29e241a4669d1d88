// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil"
)

// both runs a test with streamed and with paged lists.
func both(t *testing.T, f func(t *testing.T, edit func(*Config))) {
	t.Run("streamed", func(t *testing.T) { f(t, func(*Config) {}) })
	t.Run("paged", func(t *testing.T) { f(t, func(c *Config) { c.Paged, c.PageSize = true, 7 }) })
}

// fill puts n keys below p/ and returns them.
func fill(t testing.TB, e *testutil.Etcd, n int) map[string]string {
	t.Helper()
	keys := make(map[string]string, n)
	for i := range n {
		key, value := fmt.Sprintf("k%04d", i), fmt.Sprintf("v%d", i)
		e.Put(t, "p/"+key, value)
		keys[key] = value
	}
	return keys
}

// mechanism: D1, D2, D3, D4
func TestWatcherListsAndWatches(t *testing.T) {
	both(t, func(t *testing.T, edit func(*Config)) {
		e := testutil.StartEtcd(t)
		e.Put(t, "o/other", "x")
		e.Put(t, "p0", "x")
		want := fill(t, e, 100)
		r := newRecorder()
		w := NewWatcher("p/", r.deliver)
		c := mustDial(t, e, edit)
		run := start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
		r.is(t, want)
		r.awaitLists(t, 1)
		if events := r.take(); len(events) != 101 || !slices.IsSorted(events[:100]) || events[100] != "synced" {
			t.Errorf("the list came as %d events: %q", len(events), events)
		}
		e.Put(t, "p/new", "1")
		e.Put(t, "p/new", "2")
		e.Delete(t, "p/k0000")
		e.Put(t, "p0", "y")
		want["new"] = "2"
		delete(want, "k0000")
		r.is(t, want)
		if diff := cmp.Diff([]string{"created new=1", "modified new=2", "deleted k0000"}, r.take()); diff != "" {
			t.Errorf("events (-want +got)\n%s", diff)
		}
		if w.Len() != 100 || !w.Synced() || !w.Live() {
			t.Errorf("status %+v", w.Status())
		}
		if err := run.stop(); err != nil {
			t.Error(err)
		}
		if r.take() != nil || w.Live() {
			t.Error("the end of Run is not silent")
		}
		w.Drain()
		r.is(t, map[string]string{})
		if w.Len() != 0 || w.Synced() {
			t.Errorf("after Drain: %+v", w.Status())
		}
	})
}

// An outage by itself is no event, and the watch goes on where it was.
// mechanism: D6
// lesson: E1
func TestWatcherResumesAfterRestart(t *testing.T) {
	e := testutil.StartEtcd(t)
	want := fill(t, e, 20)
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	c := mustDial(t, e)
	start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
	r.is(t, want)
	awaitLive(t, w)
	for i := range 3 {
		r.take()
		e.Restart(t)
		e.Put(t, "p/k0001", fmt.Sprint(i))
		e.Delete(t, fmt.Sprintf("p/k000%d", 2+i))
		want["k0001"] = fmt.Sprint(i)
		delete(want, fmt.Sprintf("k000%d", 2+i))
		r.is(t, want)
		got := r.take()
		if diff := cmp.Diff([]string{fmt.Sprintf("modified k0001=%d", i), fmt.Sprintf("deleted k000%d", 2+i)}, got); diff != "" {
			t.Errorf("events (-want +got)\n%s", diff)
		}
		awaitLive(t, w)
	}
	if s := w.Status(); s.Lists != 1 || s.Resumes != 3 {
		t.Errorf("%d lists and %d resumptions", s.Lists, s.Resumes)
	}
}

// What was deleted, changed and compacted during an outage, and nothing else,
// is delivered after it.
// lesson: X1, E2
func TestWatcherRelistsAfterCompaction(t *testing.T) {
	both(t, func(t *testing.T, edit func(*Config)) {
		e := testutil.StartEtcd(t)
		gate := newGate(t, e)
		want := fill(t, e, 50)
		r := newRecorder()
		w := NewWatcher("p/", r.deliver)
		c := mustDial(t, e, edit, gate.use)
		start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
		r.is(t, want)
		r.awaitLists(t, 1)
		r.take()

		gate.shut()
		e.Delete(t, "p/k0007")
		e.Delete(t, "p/k0030")
		e.Put(t, "p/k0040", "changed")
		e.Put(t, "p/born", "1")
		e.Compact(t)
		gate.open()

		r.awaitLists(t, 2)
		if diff := cmp.Diff([]string{"created born=1", "modified k0040=changed", "deleted k0007", "deleted k0030", "synced"}, r.take()); diff != "" {
			t.Errorf("events (-want +got)\n%s", diff)
		}
		want["k0040"], want["born"] = "changed", "1"
		delete(want, "k0007")
		delete(want, "k0030")
		r.is(t, want)
	})
}

// Another etcd behind the same address ends the run. All is kept until the new
// one is listed completely, and nothing of the old one is left then.
// lesson: X3, E4
func TestWatcherMeetsAnotherEtcd(t *testing.T) {
	both(t, func(t *testing.T, edit func(*Config)) {
		e := testutil.StartEtcd(t)
		want := fill(t, e, 30)
		r := newRecorder()
		w := NewWatcher("p/", r.deliver)
		first := mustDial(t, e, edit)
		run := start(t, func(ctx context.Context) error { return w.Run(ctx, first) })
		r.is(t, want)
		awaitLive(t, w)
		r.take()

		e.Replace(t)
		if err := run.wait(t); !errors.Is(err, ErrHistoryChanged) {
			t.Fatalf("Run returned %v", err)
		}
		if _, _, err := first.Get(t.Context(), "p/k0001"); !errors.Is(err, ErrHistoryChanged) {
			t.Errorf("the old client answers: %v", err)
		}
		if events := r.take(); events != nil {
			t.Errorf("events of the new etcd: %q", events)
		}
		if w.Len() != len(want) {
			t.Errorf("%d keys are known, want %d", w.Len(), len(want))
		}

		r.otherHistory()
		e.Put(t, "p/k0003", "other")
		e.Put(t, "p/z", "1")
		second := mustDial(t, e, edit)
		start(t, func(ctx context.Context) error { return w.Run(ctx, second) })
		r.awaitLists(t, 2)
		events := r.take()
		head := []string{"modified k0003=other", "created z=1", "deleted k0000"}
		if len(events) != 2+29+1 || !slices.Equal(events[:3], head) || events[31] != "synced" {
			t.Errorf("events %q", events)
		}
		r.is(t, map[string]string{"k0003": "other", "z": "1"})
	})
}

// An etcd that lost its data may have the same cluster id. Its revision tells.
// lesson: X3, E3
func TestWatcherMeetsAWipedEtcd(t *testing.T) {
	e := testutil.StartEtcd(t)
	want := fill(t, e, 30)
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	first := mustDial(t, e)
	run := start(t, func(ctx context.Context) error { return w.Run(ctx, first) })
	r.is(t, want)
	awaitLive(t, w)
	r.take()

	e.Wipe(t)
	if err := run.wait(t); !errors.Is(err, ErrHistoryChanged) {
		t.Fatalf("Run returned %v", err)
	}
	if events := r.take(); events != nil || w.Len() != len(want) {
		t.Errorf("%d keys are known, after events %q", w.Len(), events)
	}
	r.otherHistory()
	e.Put(t, "p/k0003", "other")
	second := mustDial(t, e)
	start(t, func(ctx context.Context) error { return w.Run(ctx, second) })
	r.is(t, map[string]string{"k0003": "other"})
}

// Neither cluster id nor revision tell when a wiped etcd was filled beyond
// where the old one was: then its keys do. A watch that was simply resumed
// would miss what happened before.
// lesson: X3, E3
func TestWatcherMeetsARefilledEtcd(t *testing.T) {
	e := testutil.StartEtcd(t)
	g := newGate(t, e)
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	r.awaitStart(t, w, mustDial(t, e, g.use), fill(t, e, 30))
	g.shut()
	e.Wipe(t)
	r.otherHistory()
	want := make(map[string]string)
	for i := range 40 { // in another order, and with other values at the same revisions
		key := fmt.Sprintf("k%04d", (i*7+3)%50)
		e.Put(t, "p/"+key, fmt.Sprint("new", i))
		want[key] = fmt.Sprint("new", i)
	}
	g.open()
	r.is(t, want)
}

// A later run continues with what an earlier one knew, through another client.
func TestWatcherRunsAgain(t *testing.T) {
	e := testutil.StartEtcd(t)
	want := fill(t, e, 10)
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	for i := range 3 {
		c := mustDial(t, e)
		run := start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
		r.awaitLists(t, i+1)
		if err := run.stop(); err != nil {
			t.Fatal(err)
		}
		r.is(t, want)
		if n := len(r.take()); i > 0 && n != 3 {
			t.Errorf("run %d delivered %d events", i, n)
		}
		e.Delete(t, fmt.Sprintf("p/k000%d", i))
		delete(want, fmt.Sprintf("k000%d", i))
		e.Put(t, "p/k0009", fmt.Sprint(i))
		want["k0009"] = fmt.Sprint(i)
	}
}

// Following begins when etcd is connected, and ends with its context also
// before.
// mechanism: D5
func TestWatcherWithoutServerEndsWithContext(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Stop(t)
	c := mustDial(t, e)
	w := NewWatcher("p/", newRecorder().deliver)
	run := start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
	testutil.Eventually(t, testTimeout, func() error {
		if c.Status().LastError == nil {
			return errors.New("the status has no error")
		}
		return nil
	})
	if err := run.stop(); err != nil || w.Synced() || w.Live() {
		t.Errorf("error %v, status %+v", err, w.Status())
	}
}

// A consumer that does not return keeps nobody else waiting.
// lesson: E15
func TestSlowConsumerBlocksOnlyItself(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Put(t, "p/a", "1")
	e.Put(t, "q/a", "1")
	release := make(chan struct{})
	slow := NewWatcher("p/", func([]Event) { <-release })
	r := newRecorder()
	quick := NewWatcher("q/", r.deliver)
	c := mustDial(t, e)
	start(t, func(ctx context.Context) error { return slow.Run(ctx, c) })
	start(t, func(ctx context.Context) error { return quick.Run(ctx, c) })
	r.is(t, map[string]string{"a": "1"})
	for i := range 100 {
		e.Put(t, "p/a", fmt.Sprint(i))
		e.Put(t, "q/a", fmt.Sprint(i))
	}
	r.is(t, map[string]string{"a": "99"})
	close(release)
}

// Page by page or as a stream, a list is the same, also with several endpoints
// and with pages that exceed the message size.
func TestListsAreEqual(t *testing.T) {
	e := testutil.StartEtcd(t)
	fill(t, e, 300)
	var want []KV
	for i, edit := range []func(*Config){
		func(*Config) {},
		func(c *Config) { c.Endpoints = append(c.Endpoints, c.Endpoints[0], "http://localhost:"+port(t, e)) },
		func(c *Config) { c.Paged = true },
		func(c *Config) { c.Paged, c.PageSize = true, 1 },
		func(c *Config) { c.Paged, c.PageSize = true, 100 },
		func(c *Config) { c.Paged, c.MaxMessageBytes = true, 2_000 },
	} {
		got, revision, err := mustDial(t, e, edit).List(t.Context(), "p/")
		if err != nil {
			t.Errorf("%d: %v", i, err)
			continue
		}
		if i == 0 {
			want = got
		}
		if diff := cmp.Diff(want, got); diff != "" || len(got) != 300 || revision != 301 {
			t.Errorf("%d: %d keys at revision %d (-want +got)\n%s", i, len(got), revision, diff)
		}
	}
}

func port(t testing.TB, e *testutil.Etcd) string {
	t.Helper()
	ap, err := netip.ParseAddrPort(e.Addr())
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(ap.Port())
}

// gate stands between a client and an etcd, and can be shut without either
// being told but by its connections.
type gate struct {
	proxy *testutil.Proxy
	addr  string
}

func newGate(t testing.TB, e *testutil.Etcd) *gate {
	p := testutil.StartProxy(t, e.Addr())
	return &gate{p, p.Addr()}
}

func (g *gate) use(c *Config) { c.Endpoints = []string{g.proxy.Endpoint()} }

// open lets connections through.
func (g *gate) open() { g.proxy.Forward() }

// shut breaks all connections and refuses further ones.
func (g *gate) shut() { g.proxy.Refuse() }

// An etcd to which nobody writes is not taken for one that hangs, though it
// has no progress to tell of.
func TestWatcherOfAnIdleEtcd(t *testing.T) {
	t.Parallel()
	e := testutil.StartEtcd(t)
	want := fill(t, e, 10)
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	c := mustDial(t, e, func(c *Config) { c.LivenessTimeout = 3 * time.Second })
	r.awaitStart(t, w, c, want)
	live := time.Now()
	testutil.Eventually(t, testTimeout, func() error {
		if s := w.Status(); !s.Live || s.LastError != nil {
			t.Fatalf("status %+v", s)
		}
		if time.Since(live) < 2*c.cfg.LivenessTimeout {
			return errors.New("it has not been idle for long enough")
		}
		return nil
	})
}
