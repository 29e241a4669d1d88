// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// A thousand of 10,000 keys that are deleted, and compacted, during an outage
// are deleted by the relist, and no others.
// lesson: E2, X1
func TestFaultDeletedWhileAway(t *testing.T) {
	t.Parallel()
	e := testutil.StartEtcd(t)
	p := testutil.StartProxy(t, e.Addr())
	n := figure(1_000, 10_000)
	want := fillMany(t, e, n, "v")
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	r.awaitStart(t, w, dialThrough(t, p), want)
	r.take()
	p.Refuse()
	var gone []string
	for i := 0; i < n; i += 10 {
		key := fmt.Sprintf("k%06d", i)
		e.Delete(t, "p/"+key)
		delete(want, key)
		gone = append(gone, "deleted "+key)
	}
	e.Compact(t)
	p.Forward()
	r.awaitLists(t, 2)
	if got := r.take(); !slices.Equal(got, append(gone, "synced")) {
		t.Errorf("%d events, want %d deletions and synced", len(got), len(gone))
	}
	r.is(t, want)
}

// An etcd that lost its data, and is filled again at 500 keys a second with the
// canary last, costs no key before the canary, and leaves none that it lacks
// after it.
// lesson: E3, X2
func TestFaultWipedAndRefilled(t *testing.T) {
	t.Parallel()
	e := testutil.StartEtcd(t)
	p := testutil.StartProxy(t, e.Addr())
	n := figure(500, 5_000)
	want := fillMany(t, e, n, "v")
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	c := dialThrough(t, p)
	run := start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
	r.is(t, want)
	awaitLive(t, w)
	r.take()

	e.Wipe(t)
	r.otherHistory()
	if err := run.wait(t); !errors.Is(err, ErrHistoryChanged) {
		t.Fatalf("Run returned %v", err)
	}
	again := dialThrough(t, p)
	canary := newRecorder()
	start(t, func(ctx context.Context) error { return NewWatcher("synced/", canary.deliver).Run(ctx, again) })
	canary.awaitLists(t, 1)
	fresh := make(map[string]string, n)
	for i := range n - 100 { // the last hundred are gone
		key := fmt.Sprintf("k%06d", n-1-i)
		e.Put(t, "p/"+key, "v")
		fresh[key] = "v"
		time.Sleep(2 * time.Millisecond)
	}
	if events := r.take(); events != nil || w.Len() != n {
		t.Errorf("before the canary %d keys are known, of %d, after %d events", w.Len(), n, len(events))
	}
	e.Put(t, "synced/p", "now")
	canary.is(t, map[string]string{"p": "now"})
	start(t, func(ctx context.Context) error { return w.Run(ctx, again) })
	r.is(t, fresh)
	deleted := 0
	for _, ev := range r.take() {
		if strings.HasPrefix(ev, "deleted") {
			deleted++
		}
	}
	if deleted != 100 {
		t.Errorf("%d keys were deleted, of 100", deleted)
	}
}

// The same endpoint is another etcd all at once, with a lower or a higher
// revision: its first answer tells, nothing of it is taken for the old one's,
// and what is known stays until it is listed.
// lesson: E4, X3
func TestFaultOtherEtcd(t *testing.T) {
	t.Parallel()
	for name, extra := range map[string]int{"lower": -20, "higher": 200} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e, other := testutil.StartEtcd(t), testutil.StartEtcd(t)
			p := testutil.StartProxy(t, e.Addr())
			want := fill(t, e, 50)
			fresh := fill(t, other, 50+extra)
			other.Put(t, "p/k0003", "other")
			fresh["k0003"] = "other"
			r := newRecorder()
			w := NewWatcher("p/", r.deliver)
			c := dialThrough(t, p)
			run := start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
			r.is(t, want)
			awaitLive(t, w)
			r.take()
			before := c.Status().EtcdClusterID

			p.SwapTarget(other.Addr())
			p.Cut()
			if err := run.wait(t); !errors.Is(err, ErrHistoryChanged) {
				t.Fatalf("Run returned %v", err)
			}
			other.Put(t, "p/k0004", "unseen")
			fresh["k0004"] = "unseen"
			if events := r.take(); events != nil || w.Len() != len(want) {
				t.Errorf("of the other etcd: %q, and %d keys are known", events, w.Len())
			}
			if got := c.Status().EtcdClusterID; got != before {
				t.Errorf("the status has the cluster id of another etcd: %x, before %x", got, before)
			}
			r.otherHistory()
			next := dialThrough(t, p)
			start(t, func(ctx context.Context) error { return w.Run(ctx, next) })
			r.is(t, fresh)
			events := r.take()
			for _, ev := range []string{"modified k0003=other", "modified k0004=unseen"} {
				if !slices.Contains(events, ev) {
					t.Errorf("no event %q", ev)
				}
			}
		})
	}
}

// An etcd that was wiped and then written to in just the same way, but for a
// value, is another one.
// lesson: X3, E13
func TestFaultWipedTwin(t *testing.T) {
	t.Parallel()
	e := testutil.StartEtcd(t)
	g := newGate(t, e)
	e.Put(t, "p/a", "1")
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	r.awaitStart(t, w, dialThrough(t, g.proxy), map[string]string{"a": "1"})
	g.shut()
	r.otherHistory()
	e.Wipe(t)
	e.Put(t, "p/a", "2")
	g.open()
	testutil.Eventually(t, testTimeout, func() error { return r.equals(map[string]string{"a": "2"}) })
}

// A thousand reconnections leave heap, goroutines and file descriptors where
// they were.
// lesson: X6
func TestFaultReconnectLeak(t *testing.T) {
	e := testutil.StartEtcd(t)
	p := testutil.StartProxy(t, e.Addr())
	want := fill(t, e, 200)
	const clients = 10
	var watchers []*Watcher
	var through []*Client
	for range clients {
		w := NewWatcher("p/", func([]Event) {})
		watchers, through = append(watchers, w), append(through, dialThrough(t, p, unlimited))
	}
	reconnect := func(rounds int) {
		for range rounds {
			var runs []*task
			for i, w := range watchers {
				impatient(through[i])
				runs = append(runs, start(t, func(ctx context.Context) error { return w.Run(ctx, through[i]) }))
			}
			resumes := make([]int64, len(watchers))
			for i, w := range watchers {
				awaitLive(t, w)
				if w.Len() != len(want) {
					t.Fatalf("%d keys are known, of %d", w.Len(), len(want))
				}
				resumes[i] = w.Status().Resumes
			}
			p.Cut()
			for i, w := range watchers {
				testutil.Eventually(t, testTimeout, func() error {
					if w.Status().Resumes > resumes[i] {
						return nil // it was dead, and is back already
					}
					return dead(w)()
				})
			}
			for _, run := range runs {
				_ = run.stop()
			}
		}
	}
	reconnect(2) // what is made once is made
	before := usage(t)
	reconnect(figure(5, 100))
	testutil.Eventually(t, testTimeout, func() error { // what was closed ends
		after := usage(t)
		// A connection more or less may be on its way.
		if after.heap > before.heap+before.heap/10+512<<10 || after.goroutines > before.goroutines+3*clients || after.fds > before.fds+2*clients {
			return fmt.Errorf("heap, goroutines or file descriptors grew: %+v, before %+v", after, before)
		}
		t.Logf("before %+v, after %+v", before, after)
		return nil
	})
}

type resources struct {
	heap            uint64
	goroutines, fds int
}

func usage(t *testing.T) resources {
	t.Helper()
	time.Sleep(200 * time.Millisecond) // what was closed ends
	for range 3 {
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return resources{heap: m.HeapAlloc, goroutines: runtime.NumGoroutine(), fds: len(fds)}
}

// A consumer that does not return while many events arrive costs bounded
// memory, keeps its watch, and has the last state of each key soon after.
// lesson: E7
func TestFaultSlowConsumer(t *testing.T) {
	e := testutil.StartEtcd34(t)
	want := fillMany(t, e, 1_000, "v")
	r := newRecorder()
	blocked := make(chan chan struct{}, 1)
	w := NewWatcher("p/", func(events []Event) {
		select {
		case release := <-blocked:
			<-release
		default:
		}
		r.deliver(events)
		r.take()
	})
	r.awaitStart(t, w, dialAt(t, []string{e.Endpoint()}), want)
	release := make(chan struct{})
	blocked <- release
	debug.FreeOSMemory()
	before := residentBytes(t)
	begin := time.Now()
	for i := range figure(20, 200) {
		want = fillMany(t, e, 1_000, fmt.Sprintf("%d %s", i, strings.Repeat("x", 100)))
	}
	time.Sleep(time.Until(begin.Add(figure(2*time.Second, time.Minute))))
	grown := residentBytes(t) - before
	close(release)
	took := eventually(t, allowed(5*time.Second), func() error { return r.equals(want) })
	r.check(t)
	t.Logf("%d MiB more, converged after %v", grown>>20, took)
	if grown > 256<<20 {
		t.Errorf("%d MiB more", grown>>20)
	}
	if s := w.Status(); s.Lists != 1 || s.Resumes != 0 {
		t.Errorf("%d lists and %d resumptions: %v", s.Lists, s.Resumes, s.LastError)
	}
}

func residentBytes(t *testing.T) int64 {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	var size, resident int64
	if _, err := fmt.Sscan(string(raw), &size, &resident); err != nil {
		t.Fatal(err)
	}
	return resident * int64(os.Getpagesize())
}

// The servers that weft meets: Debian's 3.4 and the present one, directly and
// behind etcd's own gRPC proxy, which leaves out the cluster id and does not
// answer all that is asked.
// lesson: E16, X12
func TestFaultInterop(t *testing.T) {
	t.Parallel()
	old := func(t *testing.T) (keys, string) {
		e := testutil.StartEtcd34(t)
		return e, e.Endpoint()
	}
	current := func(t *testing.T) (keys, string) {
		e := testutil.StartEtcd(t)
		return e, e.Endpoint()
	}
	behind := func(server func(*testing.T) (keys, string)) func(*testing.T) (keys, string) {
		return func(t *testing.T) (keys, string) {
			e, endpoint := server(t)
			return e, "http://" + testutil.StartGRPCProxy(t, endpoint)
		}
	}
	for name, server := range map[string]func(*testing.T) (keys, string){
		"3.4": old, "3.7": current, "3.4 behind a proxy": behind(old), "3.7 behind a proxy": behind(current),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e, endpoint := server(t)
			_, address, _ := strings.Cut(endpoint, "://")
			p := testutil.StartProxy(t, address)
			want := fillMany(t, e, 300, "v")
			r := newRecorder()
			w := NewWatcher("p/", r.deliver)
			c := dialThrough(t, p, func(c *Config) { c.PageSize, c.LivenessTimeout = 70, 3*time.Second })
			r.awaitStart(t, w, c, want)
			interopWrites(t, c, e, r, want)
			// A prefix where nothing happens is no reason to think that the
			// server hangs.
			time.Sleep(progressInterval + 5*time.Second)
			if s := w.Status(); s.Lists != 1 || s.Resumes != 0 || !s.Live {
				t.Errorf("after some quiet: %+v", s)
			}
			p.Refuse()
			e.Delete(t, "p/k000001")
			delete(want, "k000001")
			e.Compact(t)
			p.Forward()
			r.is(t, want)
			eventually(t, testTimeout, live(w))
		})
	}
}

// interopWrites has a Writer put, change and delete keys, and watches.
func interopWrites(t *testing.T, c *Client, e keys, r *recorder, want map[string]string) {
	t.Helper()
	writer, run := mustWrite(t, c, WriterConfig{})
	writer.Set("p/leased", []byte("1"))
	writer.Create("p/k000002", []byte("another"))
	writer.Create("p/made", []byte("1"))
	awaitReady(t, writer)
	want["leased"], want["made"] = "1", "1"
	r.is(t, want)
	writer.Set("p/leased", []byte("2"))
	writer.Delete("p/made")
	want["leased"] = "2"
	delete(want, "made")
	r.is(t, want)
	if _, err := e.Client().Delete(t.Context(), "p/k000003"); err != nil {
		t.Fatal(err)
	}
	delete(want, "k000003")
	r.is(t, want)
	if s := writer.Status(); !errors.Is(s.Errors["p/k000002"], ErrExists) {
		t.Errorf("the writer's status %+v", s)
	}
	_ = run.stop()
}
