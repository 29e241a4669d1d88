// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/weftmesh/weft/internal/testutil"
)

// carried tells how many watches the shared stream of c carries, -1 where there
// is none.
func carried(c *Client) int {
	c.streams.mu.Lock()
	defer c.streams.mu.Unlock()
	if c.streams.shared == nil {
		return -1
	}
	return len(c.streams.shared.watches)
}

func awaitCarried(t *testing.T, c *Client, want int) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		if got := carried(c); got != want {
			return fmt.Errorf("the stream carries %d watches, want %d", got, want)
		}
		return nil
	})
}

// Watches come and go on one stream, each gets what is its own, and the stream
// ends with the last of them.
func TestWatchesShareAStream(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e)
	const n = 20
	recorders, tasks := make([]*recorder, n), make([]*task, n)
	follow := func(i int) {
		w := NewWatcher(fmt.Sprintf("p%02d/", i), recorders[i].deliver)
		tasks[i] = start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
	}
	for i := range n {
		recorders[i] = newRecorder()
		follow(i)
	}
	awaitCarried(t, c, n)
	for i := range n {
		if i%2 == 0 {
			if err := tasks[i].stop(); err != nil {
				t.Error(err)
			}
		}
		e.Put(t, fmt.Sprintf("p%02d/a", i), fmt.Sprint(i))
	}
	awaitCarried(t, c, n/2)
	for i := range n {
		if i%2 == 0 {
			recorders[i] = newRecorder()
			follow(i)
		}
	}
	for i := range n {
		recorders[i].is(t, map[string]string{"a": fmt.Sprint(i)})
	}
	awaitCarried(t, c, n)
	for i := range n {
		if err := tasks[i].stop(); err != nil {
			t.Error(err)
		}
	}
	if got := carried(c); got != -1 {
		t.Errorf("a stream of %d watches is left", got)
	}
}

// Watches that are given up while others begin, whatever the order, take
// nothing from each other.
func TestWatchesComeAndGo(t *testing.T) {
	e := testutil.StartEtcd(t)
	want := fill(t, e, 10)
	c := mustDial(t, e)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for j := range 10 {
				ctx, cancel := context.WithCancel(t.Context())
				listed := make(chan struct{})
				w := NewWatcher("p/", func(events []Event) {
					if events[len(events)-1].Kind == Synced {
						close(listed)
					}
				})
				done := make(chan error, 1)
				go func() { done <- w.Run(ctx, c) }()
				<-listed
				if (i+j)%3 > 0 {
					time.Sleep(time.Duration((i*j)%4) * 100 * time.Microsecond)
				}
				cancel()
				if err := <-done; err != nil || w.Len() != len(want) {
					t.Errorf("%v, %d keys", err, w.Len())
				}
			}
		})
	}
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	r.awaitStart(t, w, c, want)
	all.Wait()
	want["k0000"] = "new"
	e.Put(t, "p/k0000", "new")
	r.is(t, want)
	if s := w.Status(); s.Lists != 1 || s.LastError != nil {
		t.Errorf("status %+v", s)
	}
	awaitCarried(t, c, 1)
}

// A watch that breaks alone is resumed, and the others do not notice.
func TestWatchEndsAlone(t *testing.T) {
	e := testutil.StartEtcd(t)
	want := fill(t, e, 10)
	c := mustDial(t, e)
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	r.awaitStart(t, w, c, want)
	end := errors.New("the end")
	c.streams.mu.Lock()
	for _, wt := range c.streams.shared.watches {
		wt.end(end)
	}
	c.streams.mu.Unlock()
	other := newRecorder()
	o := NewWatcher("q/", other.deliver)
	other.awaitStart(t, o, c, map[string]string{})
	want["k0000"] = "new"
	e.Put(t, "p/k0000", "new")
	e.Put(t, "q/a", "1")
	r.is(t, want)
	other.is(t, map[string]string{"a": "1"})
	if s := w.Status(); !errors.Is(s.LastError, end) || s.Resumes != 1 || s.Lists != 1 {
		t.Errorf("status of the one that ended: %+v", s)
	}
	if s := o.Status(); s.LastError != nil || s.Lists != 1 {
		t.Errorf("status of the other: %+v", s)
	}
}

// A watch whose consumer is far behind goes on over a stream of its own, where
// it waits alone; nothing is lost, and the others are told of all at once.
// lesson: E15 R10
func TestFloodGoesApart(t *testing.T) {
	e := testutil.StartEtcd(t)
	want := fill(t, e, 10)
	c := mustDial(t, e)
	r, other := newRecorder(), newRecorder()
	var busy sync.Mutex
	w := NewWatcher("p/", func(events []Event) {
		busy.Lock()
		defer busy.Unlock()
		r.deliver(events)
	})
	w.out.limit = 64 << 10
	r.awaitStart(t, w, c, want)
	other.awaitStart(t, NewWatcher("q/", other.deliver), c, map[string]string{})
	awaitCarried(t, c, 2)
	busy.Lock()
	for i := range 100 {
		key := fmt.Sprintf("k%04d", i)
		want[key] = strings.Repeat("x", 8<<10)
		e.Put(t, "p/"+key, want[key])
	}
	awaitCarried(t, c, 1)
	e.Put(t, "q/a", "1")
	other.is(t, map[string]string{"a": "1"})
	busy.Unlock()
	r.is(t, want)
	if s := w.Status(); s.LastError != nil || s.Lists != 1 || !s.Live {
		t.Errorf("status %+v", s)
	}
}

// Whatever an etcd sends, it is read at a bounded rate in the long run; what
// honest clusters send is never held back.
// lesson: R12
func TestIntake(t *testing.T) {
	answer := func(events int) *etcdserverpb.WatchResponse {
		return &etcdserverpb.WatchResponse{Events: make([]*mvccpb.Event, events)}
	}
	const span = time.Minute
	for _, v := range []struct {
		name string
		cost int
		gap  time.Duration // between answers that are not held back
		most int           // answers that are taken
		held bool
	}{
		{"8,000 changes a second, each alone", costOf(answer(1)), time.Second / 8000, 60 * 8000, false},
		{"90,000 changes at once, each alone", costOf(answer(1)), span / 90_000 / 100, 90_000, false},
		{"notices as fast as it goes", costOf(answer(0)), 0, 5000 + 60*1000, true},
		{"honest events in fives as fast as it goes", costOf(answer(5)), 0, 66_667 + 60*13_334, true},
		{"thousands of events as fast as it goes", costOf(answer(5000)), 0, 200 + 60*40, true},
		{"junk in fives as fast as it goes", costOf(answer(5)) + 4*junkCost, 0, 2410 + 60*482, true},
	} {
		t.Run(v.name, func(t *testing.T) {
			var i intake
			begin := time.Now()
			now, n, held := begin, 0, false
			for ; now.Sub(begin) < span && (v.held || n < v.most); n++ {
				wait := i.take(v.cost, now)
				held = held || wait > 0
				now = now.Add(max(v.gap, wait))
			}
			if n > v.most || held != v.held {
				t.Errorf("%d answers, want at most %d; held back: %v, want %v", n, v.most, held, v.held)
			}
		})
	}
}
