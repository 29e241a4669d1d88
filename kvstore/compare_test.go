// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"fmt"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// eager has a client compare all the time.
func eager(c *Config) {
	c.CompareInterval, c.LivenessTimeout = 20*time.Millisecond, 900*time.Millisecond
}

// awaitCompares waits until n more comparisons are done.
func awaitCompares(t *testing.T, w *Watcher, n int64) {
	t.Helper()
	end := w.Status().Compares + n
	testutil.Eventually(t, testTimeout, func() error {
		if s := w.Status(); s.Compares < end {
			return fmt.Errorf("%d comparisons, of %d: %v", s.Compares, end, s.LastError)
		}
		return nil
	})
}

// A watch that has told lies, or not all, is found out, and what it said is
// put right.
// lesson: E12
func TestCompareRepairsDrift(t *testing.T) {
	both(t, func(t *testing.T, edit func(*Config)) {
		e := testutil.StartEtcd(t)
		want := fill(t, e, 50)
		r := newRecorder()
		w := NewWatcher("p/", r.deliver)
		r.awaitStart(t, w, mustDial(t, e, edit, eager), want)
		e.Put(t, "p/more", "1")
		want["more"] = "1"
		r.is(t, want)
		awaitCompares(t, w, 2)
		if s := w.Status(); s.Drift != 0 {
			t.Errorf("status %+v", s)
		}
		r.take()
		r.otherHistory() // the lies have revisions too
		w.viewMu.Lock()
		mirror := mirror{w.view, r}
		mirror.mustWatch(t, put("phantom", "1", w.view.at.revision), del("k0007", w.view.at.revision))
		w.out.flush()
		r.otherHistory()
		w.view.known.purge() // as if the deletion had not been told, but the creation had been lost
		w.view.known.find([]byte("k0008")).set(1, 0)
		w.viewMu.Unlock()
		testutil.Eventually(t, testTimeout, func() error {
			if s := w.Status(); s.Drift != 3 {
				return fmt.Errorf("status %+v", s)
			}
			return nil
		})
		r.is(t, want)
		awaitCompares(t, w, 2)
		if s := w.Status(); s.Drift != 3 || s.Lists != 1 {
			t.Errorf("status %+v", s)
		}
	})
}

// Too much drift is repaired by a list. A comparison that is under way when it
// happens may see a part of it, and leaves the rest, or is itself the one that
// sees too much.
func TestCompareListsAnew(t *testing.T) {
	e := testutil.StartEtcd(t)
	want := fillMany(t, e, 2*(maxRepairs+1), "v")
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	r.awaitStart(t, w, mustDial(t, e, eager), want)
	r.otherHistory()
	w.viewMu.Lock()
	for entry := range w.view.known.all() {
		entry.set(1, 0)
	}
	w.viewMu.Unlock()
	testutil.Eventually(t, testTimeout, func() error {
		if s := w.Status(); s.Drift <= maxRepairs || s.Lists != 2 || !s.Live {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	r.is(t, want)
}

// While keys are written, created and deleted, nothing is taken for drift.
func TestCompareDuringWrites(t *testing.T) {
	e := testutil.StartEtcd(t)
	want := fill(t, e, 50)
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	r.awaitStart(t, w, mustDial(t, e, eager), want)
	for i := 0; w.Status().Compares < 20; i++ {
		key := fmt.Sprintf("n%02d", i%97)
		e.Put(t, "p/"+key, fmt.Sprint(i))
		if i%3 == 0 {
			e.Delete(t, "p/"+key)
		}
	}
	r.is(t, stored(t, e))
	if s := w.Status(); s.Drift != 0 || s.Lists != 1 {
		t.Errorf("status %+v", s)
	}
}
