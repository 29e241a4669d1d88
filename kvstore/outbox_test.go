// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil"
)

// What is joined while the consumer is busy says the same as what it is joined
// from.
func TestOutboxJoins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRecorder()
		busy := make(chan struct{})
		m := mirror{newView(prefixed("p/"), nil), r}
		out := newOutbox(func(events []Event) {
			<-busy
			r.deliver(events)
		})
		m.hand, out.patience = out.put, 0
		out.begin()
		m.mustWatch(t, put("a", "1", 1), put("b", "1", 2), put("c", "1", 3))
		synctest.Wait()
		m.mustWatch(t, put("a", "2", 4), del("b", 5), put("new", "1", 6))
		m.mustWatch(t, put("a", "3", 7), put("gone", "1", 8), put("new", "2", 9), put("b", "2", 10))
		m.mustWatch(t, del("c", 11), del("gone", 12), put("gone too", "1", 13), put("last", "1", 14))
		m.mustWatch(t, del("gone too", 15), del("last", 16), put("last", "2", 17), put("c", "2", 18), del("c", 19))
		if delivered, pending := out.position(); delivered != 0 || pending != 5 {
			t.Errorf("%d events wait, and all up to %d is delivered", pending, delivered)
		}
		close(busy)
		out.flush()
		m.expect(t, "created a=1", "created b=1", "created c=1",
			"modified a=3", "modified b=2", "created new=2", "deleted c", "created last=2")
		if out.bytes != 0 {
			t.Errorf("%d bytes are counted in an empty outbox", out.bytes)
		}
		out.reached(19)
		if delivered, pending := out.position(); delivered != 19 || pending != 0 {
			t.Errorf("%d events wait, and all up to %d is delivered", pending, delivered)
		}
		out.end()
	})
}

// TestOutboxOracle puts random writes through a view and an outbox to a
// consumer that is now quick and now slow, stops and goes on, and compares
// what the consumer has with what was written whenever all is delivered. The
// recorder finds what must never happen.
// lesson: E7
func TestOutboxOracle(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	synctest.Test(t, func(t *testing.T) {
		random := rand.New(rand.NewPCG(seed, 0))
		slowness := rand.New(rand.NewPCG(seed, 1))
		m := mirror{newView(prefixed("p/"), nil), newRecorder()}
		most := 0
		out := newOutbox(func(events []Event) {
			time.Sleep(time.Duration(slowness.IntN(3)*slowness.IntN(100)) * time.Millisecond)
			m.recorder.deliver(events)
		})
		out.patience, out.limit = random.IntN(30), 50*eventSize
		m.hand = out.put
		truth, revision := make(map[string]string), int64(0)
		defer out.end()
		for round := range 300 {
			if random.IntN(10) == 0 || round == 0 { // another run, which begins with a list
				out.end()
				out.begin()
				out.inOrder(true)
				var kvs []*keyValue
				for key, value := range truth {
					revision++
					kvs = append(kvs, kv(key, value, revision))
				}
				m.mustList(t, position{1, revision}, kvs...)
				out.inOrder(false)
			}
			for range random.IntN(40) {
				revision++
				key, value := fmt.Sprint(random.IntN(60)), fmt.Sprint(revision)
				if _, ok := truth[key]; ok && random.IntN(2) == 0 {
					delete(truth, key)
					m.mustWatch(t, del(key, revision))
				} else {
					truth[key] = value
					m.mustWatch(t, put(key, value, revision))
				}
				_, pending := out.position()
				most = max(most, pending)
			}
			out.reached(revision)
			time.Sleep(time.Duration(random.IntN(100)) * time.Millisecond)
			if random.IntN(5) == 0 {
				out.flush()
				if diff := cmp.Diff(truth, m.state); diff != "" {
					t.Fatalf("round %d (-want +got)\n%s", round, diff)
				}
				if delivered, _ := out.position(); delivered != revision || out.bytes != 0 {
					t.Fatalf("round %d: delivered up to %d of %d, %d bytes counted", round, delivered, revision, out.bytes)
				}
			}
			m.check(t)
		}
		out.flush()
		if diff := cmp.Diff(truth, m.state); diff != "" {
			t.Errorf("at the end (-want +got)\n%s", diff)
		}
		t.Logf("at most %d events were waiting", most)
	})
}

// A consumer that is busy finds, when it is not any more, the latest state of
// each key, and the watch has gone on all the time. So there is no size of a
// buffer to choose.
// mechanism: D7
// lesson: E7
func TestSlowConsumerGetsTheLatest(t *testing.T) {
	e := testutil.StartEtcd(t)
	want := fill(t, e, 100)
	r := newRecorder()
	var busy sync.Mutex
	w := NewWatcher("p/", func(events []Event) {
		busy.Lock()
		defer busy.Unlock()
		r.deliver(events)
	})
	w.out.patience = 50
	r.awaitStart(t, w, mustDial(t, e), want)
	r.take()
	busy.Lock()
	for i := range 2000 {
		key := fmt.Sprintf("k%04d", i%100)
		want[key] = fmt.Sprint(i)
		e.Put(t, "p/"+key, want[key])
	}
	e.Put(t, "q", "the end")
	testutil.Eventually(t, testTimeout, func() error {
		if s := w.Status(); s.Pending < 99 || s.Pending > 101 || !s.Live || s.Revision > 102 {
			return fmt.Errorf("status %+v", s)
		}
		w.viewMu.Lock()
		defer w.viewMu.Unlock()
		if at := w.view.at.revision; at != 2101 {
			return fmt.Errorf("the watch has got to %d", at)
		}
		return nil
	})
	busy.Unlock()
	r.is(t, want)
	if n := len(r.take()); n > 300 {
		t.Errorf("2000 writes of 100 keys came as %d events", n)
	}
}

// What a consumer has not taken when the run ends is not lost.
func TestRunLeavesNothingBehind(t *testing.T) {
	e := testutil.StartEtcd(t)
	want := fill(t, e, 10)
	r := newRecorder()
	var busy sync.Mutex
	w := NewWatcher("p/", func(events []Event) {
		busy.Lock()
		defer busy.Unlock()
		r.deliver(events)
	})
	c := mustDial(t, e)
	run := start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
	r.is(t, want)
	awaitLive(t, w)
	busy.Lock()
	for i := range 10 {
		want[fmt.Sprint(i)] = "1"
		e.Put(t, "p/"+fmt.Sprint(i), "1")
	}
	testutil.Eventually(t, testTimeout, func() error {
		if n := w.Len(); n != 20 {
			return fmt.Errorf("%d keys are known", n)
		}
		return nil
	})
	run.cancel()
	busy.Unlock()
	if err := run.stop(); err != nil {
		t.Error(err)
	}
	again := start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
	r.is(t, want)
	if err := again.stop(); err != nil {
		t.Error(err)
	}
	w.Drain()
	r.is(t, map[string]string{})
}

// A delivery tells when the oldest of its events came.
func TestOutboxTellsWhenItWasPut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var out *outbox
		var got []time.Duration
		out = newOutbox(func([]Event) {
			got = append(got, out.receivedAt().Sub(start))
			time.Sleep(10 * time.Second)
		})
		out.begin()
		for _, key := range []string{"a", "b", "c"} { // at 1 s, 2 s and 3 s; b and c wait for a
			time.Sleep(time.Second)
			out.put([]Event{{Kind: Created, Key: []byte(key)}})
		}
		out.flush()
		out.end()
		if diff := cmp.Diff([]time.Duration{time.Second, 2 * time.Second}, got); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
	})
}
