// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/weftmesh/weft/internal/testutil"
)

func TestMain(m *testing.M) {
	if endpoint := os.Getenv(holderEnv); endpoint != "" {
		if err := holdLock(endpoint); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	// Parallel tests mostly wait, so that there may be more of them at once
	// than there are processors.
	flag.Parse()
	if err := flag.Set("test.parallel", "64"); err != nil {
		panic(err)
	}
	code := m.Run()
	if err := leaks(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, "after all tests passed:", err)
		code = 1
	}
	os.Exit(code)
}

// leaks finds goroutines that outlive the tests. A connection between members
// of an etcd may learn that the other end is gone only from its read timeout
// of 5 s, so they are given somewhat longer.
func leaks() error {
	for deadline := time.Now().Add(15 * time.Second); ; {
		err := goleak.Find()
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

const testTimeout = 20 * time.Second

// mustDial returns a client of e's endpoint, closed when the test ends.
func mustDial(t testing.TB, e *testutil.Etcd, edit ...func(*Config)) *Client {
	t.Helper()
	cfg := Config{Endpoints: []string{e.Endpoint()}, QPS: 10_000} // no test waits its turn but those of the limiter
	for _, f := range edit {
		f(&cfg)
	}
	c, err := Dial(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// task runs f until stop, or the end of the test.
type task struct {
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

func start(t testing.TB, f func(context.Context) error) *task {
	ctx, cancel := context.WithCancel(context.Background())
	r := &task{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		r.err = f(ctx)
	}()
	t.Cleanup(func() { r.stop() })
	return r
}

// stop ends the task and returns its error.
func (r *task) stop() error {
	r.cancel()
	<-r.done
	return r.err
}

// wait returns the error of a task that is expected to end by itself.
func (r *task) wait(t testing.TB) error {
	t.Helper()
	select {
	case <-r.done:
	case <-time.After(testTimeout):
		t.Fatal("the task does not end")
	}
	return r.err
}

// recorder consumes a watcher's events: it keeps the state that they lead to
// and the events themselves, and finds what must never happen.
type recorder struct {
	mu     sync.Mutex
	state  map[string]string
	events []string // "created a 1", since the last call of take
	synced int
	revs   map[string]int64
	faults []string
}

func newRecorder() *recorder {
	return &recorder{state: make(map[string]string), revs: make(map[string]int64)}
}

func (r *recorder) deliver(events []Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(events) == 0 || len(events) > maxBatch {
		r.fault("a delivery of %d events", len(events))
	}
	for _, e := range events {
		key := string(e.Key)
		_, known := r.state[key]
		switch e.Kind {
		case Created, Modified:
			if known != (e.Kind == Modified) {
				r.fault("%s %q, known: %v", e.Kind, key, known)
			}
			if e.Revision <= r.revs[key] {
				r.fault("%s %q at revision %d after %d", e.Kind, key, e.Revision, r.revs[key])
			}
			r.state[key] = string(e.Value)
		case Deleted:
			if !known {
				r.fault("deleted %q, which was not there", key)
			}
			if e.Revision < r.revs[key] {
				r.fault("deleted %q at revision %d after %d", key, e.Revision, r.revs[key])
			}
			delete(r.state, key)
		case Synced:
			r.synced++
		}
		if e.Kind != Synced {
			r.revs[key] = e.Revision
		}
		r.events = append(r.events, describe(e))
	}
}

func describe(e Event) string {
	switch e.Kind {
	case Synced:
		return "synced"
	case Deleted:
		return fmt.Sprintf("deleted %s", e.Key)
	}
	return fmt.Sprintf("%s %s=%s", e.Kind, e.Key, e.Value)
}

func (r *recorder) fault(format string, args ...any) {
	r.faults = append(r.faults, fmt.Sprintf(format, args...))
}

// otherHistory lets revisions begin anew.
func (r *recorder) otherHistory() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.revs)
}

// take returns the events since it was last called.
func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	events := r.events
	r.events = nil
	return events
}

func (r *recorder) lists() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.synced
}

// is waits until the state is want.
func (r *recorder) is(t testing.TB, want map[string]string) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if !maps.Equal(r.state, want) {
			return fmt.Errorf("%d keys are known where etcd has %d", len(r.state), len(want))
		}
		return nil
	})
	r.check(t)
}

// awaitStart runs w through c until it follows want live.
func (r *recorder) awaitStart(t testing.TB, w *Watcher, c *Client, want map[string]string) {
	t.Helper()
	start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
	r.is(t, want)
	awaitLive(t, w)
}

// check fails the test if something happened that never must.
func (r *recorder) check(t testing.TB) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.faults {
		t.Error(f)
	}
	r.faults = nil
}

// awaitLists waits until n lists are complete.
func (r *recorder) awaitLists(t testing.TB, n int) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		if got := r.lists(); got < n {
			return fmt.Errorf("%d lists are complete, of %d", got, n)
		}
		return nil
	})
}

// awaitLive waits until the watch is open.
func awaitLive(t testing.TB, w *Watcher) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		if !w.Live() {
			return fmt.Errorf("the watch of %s is not open: %v", w, w.LastError())
		}
		return nil
	})
}
