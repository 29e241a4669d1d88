// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

// The tests of faults have two forms: a short one, which is part of every run,
// and the full one with the figures that are wanted of weft, for which
// WEFT_TEST_FAULTS is set ("make test-faults").
var fullFaults = os.Getenv("WEFT_TEST_FAULTS") != ""

// figure is a number of either form.
func figure[T any](short, full T) T {
	if fullFaults {
		return full
	}
	return short
}

// dialAt returns a client of endpoints with the defaults of Config, closed when
// the test ends.
func dialAt(t testing.TB, endpoints []string, edit ...func(*Config)) *Client {
	t.Helper()
	cfg := Config{Endpoints: endpoints}
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

// dialThrough returns a client of the server behind a proxy.
func dialThrough(t testing.TB, p *testutil.Proxy, edit ...func(*Config)) *Client {
	t.Helper()
	return dialAt(t, []string{p.Endpoint()}, edit...)
}

// keys is what etcd holds, by any kind of server of the tests.
type keys interface {
	Client() *clientv3.Client
	Put(t testing.TB, key, value string)
	Delete(t testing.TB, key string)
	Compact(t testing.TB)
}

// fillMany puts n keys below p/ quickly and returns them.
func fillMany(t testing.TB, e keys, n int, value string) map[string]string {
	t.Helper()
	want := make(map[string]string, n)
	var ops []clientv3.Op
	for i := range n {
		key := fmt.Sprintf("k%06d", i)
		want[key] = value
		ops = append(ops, clientv3.OpPut("p/"+key, value))
	}
	for batch := range slices.Chunk(ops, 100) {
		if _, err := e.Client().Txn(t.Context()).Then(batch...).Commit(); err != nil {
			t.Fatal(err)
		}
	}
	return want
}

// allowed is how long something may take that weft is wanted to do within full.
// On a machine that others use, that says nothing about weft: the full form
// alone insists on it.
func allowed(full time.Duration) time.Duration { return figure(max(full, 2*testTimeout), full) }

// eventually is Eventually with a limit of the test's own, returning how long it
// took.
func eventually(t testing.TB, within time.Duration, cond func() error) time.Duration {
	t.Helper()
	begin := time.Now()
	testutil.Eventually(t, within, cond)
	return time.Since(begin)
}

// equals reports how the recorder's state differs from want.
func (r *recorder) equals(want map[string]string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !maps.Equal(r.state, want) {
		return fmt.Errorf("%d keys are known where etcd has %d, or their values differ", len(r.state), len(want))
	}
	return nil
}

// noDeletes fails the test if a deletion was delivered since take was last
// called.
func (r *recorder) noDeletes(t testing.TB, when string) {
	t.Helper()
	for _, e := range r.take() {
		if strings.HasPrefix(e, "deleted") {
			t.Errorf("%s: %s", when, e)
		}
	}
	r.check(t)
}

// dead reports that a watcher still believes to be live.
func dead(w *Watcher) func() error {
	return func() error {
		if w.Live() {
			return errors.New("the watcher believes to be live")
		}
		return nil
	}
}

// live reports that a watcher is not live.
func live(w *Watcher) func() error {
	return func() error {
		if !w.Live() {
			return fmt.Errorf("the watch of %s is not open: %v", w, w.LastError())
		}
		return nil
	}
}

// followed runs a watcher for good, with a new client for each history, as its
// users do.
func followed(t testing.TB, w *Watcher, r *recorder, dial func() *Client) {
	t.Helper()
	first := dial()
	var clients sync.Map
	start(t, func(ctx context.Context) error {
		for c := first; ; {
			err := w.Run(ctx, c)
			if !errors.Is(err, ErrHistoryChanged) {
				return err
			}
			r.otherHistory()
			c.Close()
			c = dial()
			clients.Store(c, true)
			if !sleep(ctx, backoffMin) {
				return nil
			}
		}
	})
}
