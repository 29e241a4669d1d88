// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

func mustWrite(t testing.TB, c *Client, cfg WriterConfig) (*Writer, *task) {
	t.Helper()
	w := NewWriter(c, cfg)
	return w, start(t, w.Run)
}

// holds waits until etcd has exactly these keys below p/.
func holds(t *testing.T, e *testutil.Etcd, want map[string]string) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		if got := stored(t, e); !maps.Equal(got, want) {
			return fmt.Errorf("etcd holds %v, want %v", got, want)
		}
		return nil
	})
}

// settled waits until the writer has nothing left to do.
func settled(t *testing.T, w *Writer) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		if s := w.Status(); s.Pending > 0 {
			return fmt.Errorf("%d keys are pending: %v", s.Pending, s.LastError)
		}
		return nil
	})
}

func awaitReady(t testing.TB, w *Writer) {
	t.Helper()
	select {
	case <-w.Ready():
	case <-time.After(testTimeout):
		t.Fatalf("the writer does not get ready: %+v", w.Status())
	}
}

// leaseOf returns the lease of a key, 0 if it has none or is absent, and its
// revision.
func leaseOf(t *testing.T, e *testutil.Etcd, key string) (lease clientv3.LeaseID, revision int64) {
	t.Helper()
	resp, err := e.Client().Get(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range resp.Kvs {
		lease, revision = clientv3.LeaseID(kv.Lease), kv.ModRevision
	}
	return lease, revision
}

func revoke(t *testing.T, e *testutil.Etcd, id clientv3.LeaseID) {
	t.Helper()
	if _, err := e.Client().Revoke(t.Context(), id); err != nil {
		t.Fatal(err)
	}
}

func TestWriterSetsChangesAndDeletes(t *testing.T) {
	e := testutil.StartEtcd(t)
	w := NewWriter(mustDial(t, e), WriterConfig{})
	w.Set("p/a", []byte("1"))
	w.Set("p/b", []byte("1"))
	w.Set("p/c", []byte("1"))
	w.Delete("p/c")
	start(t, w.Run)
	awaitReady(t, w)
	holds(t, e, map[string]string{"a": "1", "b": "1"})
	w.Set("p/a", []byte("2"))
	w.Set("p/a", []byte("3"))
	w.Delete("p/b")
	w.Set("p/d", nil)
	holds(t, e, map[string]string{"a": "3", "d": ""})
	settled(t, w)
	if s := w.Status(); s.Keys != 2 || len(s.Leases) != 1 || len(s.Errors) != 0 {
		t.Errorf("status %+v", s)
	}
	if lease, _ := leaseOf(t, e, "p/a"); LeaseID(lease) != w.Status().Leases[0] {
		t.Errorf("p/a has lease %x, want %x", lease, w.Status().Leases[0])
	}
}

func TestWriterReadyWithNothingToDo(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Stop(t)
	w, _ := mustWrite(t, mustDial(t, e), WriterConfig{})
	awaitReady(t, w)
}

// What is right already is not written again.
func TestWriterWritesOnlyWhatDiffers(t *testing.T) {
	e := testutil.StartEtcd(t)
	w, _ := mustWrite(t, mustDial(t, e), WriterConfig{VerifyInterval: 20 * time.Millisecond})
	w.Set("p/a", []byte("1"))
	holds(t, e, map[string]string{"a": "1"})
	settled(t, w)
	_, before := leaseOf(t, e, "p/a")
	w.Set("p/a", []byte("1"))
	w.mu.Lock()
	w.enqueue("p/a", w.records["p/a"])
	w.mu.Unlock()
	settled(t, w)
	w.Set("p/b", nil)
	holds(t, e, map[string]string{"a": "1", "b": ""})
	if _, after := leaseOf(t, e, "p/a"); after != before {
		t.Errorf("p/a was written again at revision %d, first at %d", after, before)
	}
}

// mechanism: C7, C9, Q1
// lesson: E9
func TestWriterPutsAllAgainWhenALeaseIsLost(t *testing.T) {
	e := testutil.StartEtcd(t)
	w, _ := mustWrite(t, mustDial(t, e), WriterConfig{TTL: 2 * time.Second, KeysPerLease: 3})
	want := make(map[string]string)
	for i := range 7 {
		key := fmt.Sprintf("k%d", i)
		want[key] = "v"
		w.Set("p/"+key, []byte("v"))
	}
	holds(t, e, want)
	settled(t, w)
	if n := len(w.Status().Leases); n != 3 {
		t.Fatalf("%d leases for 7 keys of 3 each", n)
	}
	lost, _ := leaseOf(t, e, "p/k1")
	revoke(t, e, lost)
	if got := stored(t, e); len(got) != 4 {
		t.Fatalf("etcd holds %v after the loss of a lease", got)
	}
	holds(t, e, want)
	settled(t, w)
	if now, _ := leaseOf(t, e, "p/k1"); now == lost || now == 0 {
		t.Errorf("p/k1 has lease %x", now)
	}
}

// A put that meets a lost lease gets another one at once.
func TestWriterMeetsALostLease(t *testing.T) {
	e := testutil.StartEtcd(t)
	w, _ := mustWrite(t, mustDial(t, e), WriterConfig{})
	w.Set("p/a", []byte("1"))
	holds(t, e, map[string]string{"a": "1"})
	settled(t, w)
	lost, _ := leaseOf(t, e, "p/a")
	revoke(t, e, lost)
	w.Set("p/b", []byte("1"))
	holds(t, e, map[string]string{"a": "1", "b": "1"})
}

// The lease is kept alive beyond its time, and left at the end.
// mechanism: C13
func TestWriterKeepsItsLease(t *testing.T) {
	t.Parallel()
	const ttl = 3 * time.Second
	e := testutil.StartEtcd(t)
	w, run := mustWrite(t, mustDial(t, e), WriterConfig{TTL: ttl})
	w.Set("p/a", []byte("1"))
	holds(t, e, map[string]string{"a": "1"})
	lease, before := leaseOf(t, e, "p/a")
	for end := time.Now().Add(ttl * 3 / 2); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if _, now := leaseOf(t, e, "p/a"); now != before {
			t.Fatalf("p/a is at revision %d, was at %d", now, before)
		}
	}
	if err := run.stop(); err != nil {
		t.Error(err)
	}
	left, err := e.Client().TimeToLive(t.Context(), lease)
	if err != nil || left.TTL < 0 {
		t.Errorf("the lease has %d s left: %v", left.TTL, err)
	}
}

// A restarted writer takes over what its predecessor left.
// mechanism: E2
func TestWriterTakesOverAfterRestart(t *testing.T) {
	e := testutil.StartEtcd(t)
	first, run := mustWrite(t, mustDial(t, e), WriterConfig{})
	first.Set("p/a", []byte("1"))
	first.Set("p/gone", []byte("1"))
	awaitReady(t, first)
	holds(t, e, map[string]string{"a": "1", "gone": "1"})
	if err := run.stop(); err != nil {
		t.Fatal(err)
	}
	old, _ := leaseOf(t, e, "p/a")
	second := NewWriter(mustDial(t, e), WriterConfig{})
	second.Set("p/a", []byte("1"))
	start(t, second.Run)
	awaitReady(t, second)
	if now, _ := leaseOf(t, e, "p/a"); now == old || now == 0 {
		t.Errorf("p/a has lease %x, before %x", now, old)
	}
	revoke(t, e, old) // as it ends by itself after the TTL
	holds(t, e, map[string]string{"a": "1"})
}

func TestWriterCreates(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Put(t, "p/same", "1")
	e.Put(t, "p/other", "theirs")
	w := NewWriter(mustDial(t, e), WriterConfig{VerifyInterval: 50 * time.Millisecond})
	for _, key := range []string{"p/new", "p/same", "p/other"} {
		w.Create(key, []byte("1"))
	}
	start(t, w.Run)
	awaitReady(t, w)
	holds(t, e, map[string]string{"new": "1", "same": "1", "other": "theirs"})
	if lease, _ := leaseOf(t, e, "p/new"); lease != 0 {
		t.Errorf("p/new has lease %x", lease)
	}
	if s := w.Status(); len(s.Errors) != 1 || !errors.Is(s.Errors["p/other"], ErrExists) {
		t.Errorf("errors %v", s.Errors)
	}
	// It is created once the other one is gone, and again when it is deleted.
	e.Delete(t, "p/other")
	e.Delete(t, "p/new")
	holds(t, e, map[string]string{"new": "1", "same": "1", "other": "1"})
	testutil.Eventually(t, testTimeout, func() error {
		if s := w.Status(); len(s.Errors) > 0 {
			return fmt.Errorf("errors %v", s.Errors)
		}
		return nil
	})
	for _, key := range []string{"p/new", "p/same", "p/other"} {
		w.Delete(key)
	}
	holds(t, e, map[string]string{"same": "1"}) // which was there before
}

// Deleting removes what this writer put and nothing else.
func TestWriterDeletesOnlyItsOwn(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e)
	mine, _ := mustWrite(t, c, WriterConfig{})
	theirs, _ := mustWrite(t, c, WriterConfig{})
	mine.Set("p/moved", []byte("mine"))
	mine.Set("p/kept", []byte("mine"))
	mine.Create("p/made", []byte("mine"))
	holds(t, e, map[string]string{"moved": "mine", "kept": "mine", "made": "mine"})
	theirs.Set("p/moved", []byte("theirs"))
	e.Put(t, "p/made", "changed")
	holds(t, e, map[string]string{"moved": "theirs", "kept": "mine", "made": "changed"})
	mine.Delete("p/moved")
	mine.Delete("p/kept")
	mine.Delete("p/made")
	mine.Delete("p/unknown")
	holds(t, e, map[string]string{"moved": "theirs", "made": "changed"})
	settled(t, mine)
	if s := mine.Status(); s.Keys != 0 || len(mine.records) != 0 {
		t.Errorf("status %+v", s)
	}
}

// A key that is deleted while the request to create it is under way is created
// and then deleted, and one that was there before is left.
func TestWriterDeletesWhatIsBeingCreated(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Put(t, "p/theirs", "")
	w := NewWriter(mustDial(t, e), WriterConfig{})
	w.Create("p/a", []byte("1"))
	w.Create("p/theirs", nil)
	batch, err := w.take(t.Context())
	if err != nil || len(batch) != 2 {
		t.Fatalf("took %v, %v", batch, err)
	}
	w.Delete("p/a")
	w.Delete("p/theirs")
	if err := w.write(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	holds(t, e, map[string]string{"a": "1", "theirs": ""})
	start(t, w.Run)
	holds(t, e, map[string]string{"theirs": ""})
	settled(t, w)
	if len(w.records) != 0 {
		t.Errorf("%d records are left", len(w.records))
	}
}

// What is said while etcd is down is done when it is back.
func TestWriterRemembersThroughAnOutage(t *testing.T) {
	e := testutil.StartEtcd(t)
	w, _ := mustWrite(t, mustDial(t, e), WriterConfig{})
	w.Set("p/a", []byte("1"))
	w.Set("p/b", []byte("1"))
	holds(t, e, map[string]string{"a": "1", "b": "1"})
	e.Stop(t)
	w.Delete("p/a")
	w.Set("p/b", []byte("2"))
	w.Set("p/c", []byte("2"))
	if s := w.Status(); s.Pending != 3 {
		t.Errorf("status %+v", s)
	}
	e.Restart(t)
	holds(t, e, map[string]string{"b": "2", "c": "2"})
}

// mechanism: E4
func TestWriterPutsBackWhatOthersChange(t *testing.T) {
	e := testutil.StartEtcd(t)
	w, _ := mustWrite(t, mustDial(t, e), WriterConfig{VerifyInterval: 50 * time.Millisecond})
	want := map[string]string{"a": "1", "b": "1", "c": "1"}
	for key, value := range want {
		w.Set("p/"+key, []byte(value))
	}
	holds(t, e, want)
	e.Delete(t, "p/a")
	e.Put(t, "p/b", "theirs")
	e.Put(t, "p/c", "1") // without lease
	holds(t, e, want)
	testutil.Eventually(t, testTimeout, func() error {
		if lease, _ := leaseOf(t, e, "p/c"); lease == 0 {
			return errors.New("p/c has no lease")
		}
		return nil
	})
}

// lesson: X3
func TestWriterFollowsToAnotherEtcd(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e)
	w, _ := mustWrite(t, c, WriterConfig{VerifyInterval: 50 * time.Millisecond})
	w.Set("p/a", []byte("1"))
	w.Create("p/b", []byte("1"))
	w.Set("p/c", []byte("1"))
	holds(t, e, map[string]string{"a": "1", "b": "1", "c": "1"})
	e.Replace(t)
	w.Delete("p/c")
	holds(t, e, map[string]string{"a": "1", "b": "1"})
}

// A key that etcd refuses does not keep the others waiting.
func TestWriterIsolatesARefusedKey(t *testing.T) {
	e := testutil.StartEtcd(t)
	w := NewWriter(mustDial(t, e), WriterConfig{})
	want := make(map[string]string)
	for i := range 20 {
		key := fmt.Sprintf("k%02d", i)
		want[key] = "v"
		w.Set("p/"+key, []byte("v"))
	}
	w.Set("p/large", make([]byte, 3<<20)) // more than a client sends
	w.Set("", []byte("v"))
	start(t, w.Run)
	holds(t, e, want)
	testutil.Eventually(t, testTimeout, func() error {
		if s := w.Status(); len(s.Errors) != 2 || s.Errors["p/large"] == nil || s.Errors[""] == nil {
			return fmt.Errorf("errors %v", s.Errors)
		}
		return nil
	})
	select {
	case <-w.Ready():
		t.Error("ready with keys that are not in etcd")
	default:
	}
	w.Delete("p/large")
	w.Set("", []byte("v2"))
	settled(t, w)
	w.Delete("")
	settled(t, w)
	if s := w.Status(); len(s.Errors) != 0 || s.Keys != 20 {
		t.Errorf("status %+v", s)
	}
	awaitReady(t, w)
}

// Thousands of keys take a few dozen requests.
func TestWriterWritesManyKeys(t *testing.T) {
	e := testutil.StartEtcd(t)
	w := NewWriter(mustDial(t, e), WriterConfig{})
	want := make(map[string]string)
	for i := range 5000 {
		key, value := fmt.Sprintf("k%04d", i), fmt.Sprintf("%0200d", i)
		want[key] = value
		w.Set("p/"+key, []byte(value))
	}
	begin := time.Now()
	start(t, func(ctx context.Context) error { return w.Run(ctx) })
	awaitReady(t, w)
	t.Logf("%d keys in %v", len(want), time.Since(begin))
	holds(t, e, want)
	if n := len(w.Status().Leases); n != 5 {
		t.Errorf("%d leases", n)
	}
	for i := range 4990 {
		key := fmt.Sprintf("k%04d", i)
		delete(want, key)
		w.Delete("p/" + key)
	}
	holds(t, e, want)
}

// A released key stays, and is not put back; one that is observed to be gone is.
func TestWriterReleasesAndObserves(t *testing.T) {
	e := testutil.StartEtcd(t)
	w, _ := mustWrite(t, mustDial(t, e), WriterConfig{})
	w.Create("p/a", []byte("1"))
	w.Create("p/b", []byte("2"))
	holds(t, e, map[string]string{"a": "1", "b": "2"})
	settled(t, w)
	w.Release("p/a")
	if s := w.Status(); s.Keys != 1 {
		t.Errorf("%d keys are kept, want 1", s.Keys)
	}
	e.Delete(t, "p/a")
	e.Delete(t, "p/b")
	w.Observe("p/a", nil, false)
	w.Observe("p/b", nil, false)
	holds(t, e, map[string]string{"b": "2"})
}
