// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

var errNothing = errors.New("nothing has failed")

// A reader whose role grants one key follows it over all that may happen to a
// watch, and is told of no other key.
func TestKeyWatcherNeedsTheKeyOnly(t *testing.T) {
	t.Parallel()
	for name, paged := range map[string]bool{"streamed": false, "paged": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testKeyWatcher(t, paged)
		})
	}
}

func testKeyWatcher(t *testing.T, paged bool) {
	const key = "cilium/cluster-config/east" // all that remote is granted of cilium/cluster-config/
	e := testutil.StartEtcd(t, testutil.WithAuth("east"))
	p := testutil.StartProxy(t, e.Addr())
	c := dialThrough(t, p, unlimited, func(c *Config) {
		c.Username, c.Password, c.Paged = "remote", testutil.Password, paged
		c.LivenessTimeout, c.CompareInterval = 3*time.Second, 500*time.Millisecond
	})
	r := newRecorder()
	w := NewKeyWatcher(key, r.deliver)
	r.awaitStart(t, w, c, map[string]string{})
	is := func(value string) { t.Helper(); r.is(t, map[string]string{"": value}) }

	e.Put(t, key, "1")
	is("1")
	e.Put(t, key+"2", "of another cluster")
	e.Put(t, key, "2")
	is("2")
	p.Refuse()
	e.Put(t, key, "3")
	p.Forward()
	is("3")
	eventually(t, testTimeout, live(w))
	if s := w.Status(); s.Resumes == 0 || s.Lists != 1 || s.Prefix != key {
		t.Errorf("status %+v", s)
	}
	p.Refuse()
	e.Delete(t, key)
	e.Compact(t)
	p.Forward()
	r.is(t, map[string]string{})
	e.Put(t, key, "4")
	is("4")
	eventually(t, testTimeout, func() error {
		if s := w.Status(); s.Compares < 2 || s.Drift != 0 {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	w.failed(errNothing) // since the last outage
	elsewhere, err := e.Client().Put(t.Context(), "elsewhere", "1")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, testTimeout, func() error {
		if s := w.Status(); s.Revision < elsewhere.Header.Revision {
			return fmt.Errorf("no progress notification told that nothing has happened up to %d: %+v", elsewhere.Header.Revision, s)
		}
		return nil
	})
	if err := w.LastError(); !errors.Is(err, errNothing) {
		t.Errorf("the key alone is not enough: %v", err)
	}

	wide := newWatcher(prefixed(key), r.deliver)
	start(t, func(ctx context.Context) error { return wide.Run(ctx, c) })
	eventually(t, testTimeout, func() error {
		if err := wide.LastError(); err == nil || !strings.Contains(err.Error(), "permission denied") {
			return fmt.Errorf("the role grants more than the key: %v", err)
		}
		return nil
	})
}
