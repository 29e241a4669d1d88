// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

// audience observes a Store of numbers.
type audience struct {
	mu     sync.Mutex
	events []string
}

var _ StoreObserver[int] = (*audience)(nil)

func (a *audience) OnUpdate(key string, v int) { a.add(fmt.Sprintf("update %s=%d", key, v)) }
func (a *audience) OnDelete(key string)        { a.add("delete " + key) }
func (a *audience) OnSync()                    { a.add("sync") }

func (a *audience) add(event string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.events = append(a.events, event)
}

// heard waits until the events since it was last called are these.
func (a *audience) heard(t *testing.T, want ...string) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if !slices.Equal(a.events, want) {
			return fmt.Errorf("heard %q, want %q", a.events, want)
		}
		a.events = nil
		return nil
	})
}

// take returns the events since it or heard was last called.
func (a *audience) take() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	events := a.events
	a.events = nil
	return events
}

// heardOf waits for one event among others.
func (a *audience) heardOf(t *testing.T, want string) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		if events := a.take(); !slices.Contains(events, want) {
			return fmt.Errorf("heard %q, want %q", events, want)
		}
		return nil
	})
}

// storeMember has joined the store below p/.
type storeMember struct {
	*Store[int]
	*audience
	run *task
}

func join(t *testing.T, e *testutil.Etcd, cfg WriterConfig) storeMember {
	t.Helper()
	c := mustDial(t, e, unlimited)
	impatient(c)
	j := storeMember{audience: &audience{}}
	j.Store = NewStore(c, StoreConfig[int]{
		Prefix:   "p/",
		Decode:   func(e Event) (int, error) { return strconv.Atoi(string(e.Value)) },
		Observer: j.audience,
		Writer:   cfg,
	})
	j.run = start(t, j.Run)
	return j
}

func (j storeMember) has(t *testing.T, want map[string]int) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		if got := j.Snapshot(); !maps.Equal(got, want) {
			return fmt.Errorf("the store has %v, want %v", got, want)
		}
		return nil
	})
}

// Whoever joins hears what is there, then that this was all.
//
// mechanism: E1, D3
func TestStoreJoins(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Put(t, "p/a", "1")
	e.Put(t, "p/b", "2")
	s := join(t, e, WriterConfig{})
	ends(t, "joining", s.Ready())
	s.heard(t, "update a=1", "update b=2", "sync")
	if v, ok := s.Get("b"); !ok || v != 2 {
		t.Errorf("b is %d, %v", v, ok)
	}
	if s.String() != "kvstore store p/" {
		t.Errorf("it is called %q", s)
	}
	e.Restart(t)
	e.Put(t, "p/a", "3")
	s.heard(t, "update a=3") // and no sync
}

// Keys are relative to the prefix, and those beside it are not seen.
//
// mechanism: E2
func TestStoreFollows(t *testing.T) {
	e := testutil.StartEtcd(t)
	s := join(t, e, WriterConfig{})
	s.heard(t, "sync")
	e.Put(t, "p2/a", "1")
	e.Put(t, "p/x/y", "1")
	s.heard(t, "update x/y=1")
	e.Put(t, "p/x/y", "2")
	s.heard(t, "update x/y=2")
	e.Delete(t, "p/x/y")
	s.heard(t, "delete x/y")
}

// What cannot be decoded does not replace what could, and is shown.
//
// mechanism: E3
func TestStoreDecodes(t *testing.T) {
	e := testutil.StartEtcd(t)
	s := join(t, e, WriterConfig{})
	e.Put(t, "p/a", "1")
	s.has(t, map[string]int{"a": 1})
	e.Put(t, "p/a", "one")
	e.Put(t, "p/b", "two")
	e.Put(t, "p/c", "3")
	s.has(t, map[string]int{"a": 1, "c": 3})
	if status := s.Status(); len(status.Invalid) != 2 || status.Invalid["a"] == nil || status.Shared != 2 {
		t.Errorf("status %+v", status)
	}
	e.Put(t, "p/a", "4")
	e.Delete(t, "p/b")
	s.has(t, map[string]int{"a": 4, "c": 3})
	testutil.Eventually(t, testTimeout, func() error {
		if status := s.Status(); len(status.Invalid) > 0 {
			return fmt.Errorf("status %+v", status)
		}
		return nil
	})
	e.Put(t, "p/c", "three")
	e.Delete(t, "p/c")
	s.has(t, map[string]int{"a": 4})
	if status := s.Status(); len(status.Invalid) > 0 {
		t.Errorf("status %+v", status)
	}
}

// A local key that somebody deletes or changes is put back as soon as that is
// seen, long before the next comparison; the others hear of a key that went
// and came, this one only that it came.
//
// mechanism: E4
// lesson: E9
func TestStorePutsBackItsOwn(t *testing.T) {
	e := testutil.StartEtcd(t)
	s := join(t, e, WriterConfig{VerifyInterval: time.Hour})
	others := join(t, e, WriterConfig{})
	s.heard(t, "sync")
	s.Set("a", []byte("1"))
	s.heard(t, "update a=1")
	others.has(t, map[string]int{"a": 1})
	e.Delete(t, "p/a")
	s.heard(t, "update a=1")
	for _, foreign := range []string{"7", "x"} {
		e.Put(t, "p/a", foreign)
		holds(t, e, map[string]string{"a": "1"})
	}
	lease, _ := leaseOf(t, e, "p/a")
	revoke(t, e, lease)
	testutil.Eventually(t, testTimeout, func() error {
		if now, _ := leaseOf(t, e, "p/a"); now == 0 || now == lease {
			return fmt.Errorf("a has lease %x", now)
		}
		return nil
	})
	others.has(t, map[string]int{"a": 1})
	s.has(t, map[string]int{"a": 1})
	if slices.Contains(s.take(), "delete a") {
		t.Error("the owner was told that its key is deleted")
	}
	e.Put(t, "p/b", "1") // of somebody else
	s.heardOf(t, "update b=1")
	e.Delete(t, "p/b")
	s.heardOf(t, "delete b")
}

// A local key that is deleted by its owner after somebody else did so, while
// it cannot be put back, is told as deleted.
func TestStoreTellsWhatWasNotPutBack(t *testing.T) {
	e := testutil.StartEtcd(t)
	s := join(t, e, WriterConfig{VerifyInterval: time.Hour})
	s.heard(t, "sync")
	s.Set("a", []byte("1"))
	s.heard(t, "update a=1")
	if err := s.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.deliver([]Event{{Kind: Deleted, Key: []byte("a"), Revision: 1 << 40}})
	s.Delete("a")
	testutil.Eventually(t, testTimeout, func() error {
		if _, ok := s.Get("a"); ok {
			return errors.New("a is there")
		}
		return nil
	})
}

// Even what no watch sees is repaired, by the periodic comparison: here the
// same value without the lease that lets it vanish with its writer.
//
// mechanism: E5, L1, B7
func TestStoreSyncsPeriodically(t *testing.T) {
	e := testutil.StartEtcd(t)
	s := join(t, e, WriterConfig{VerifyInterval: 50 * time.Millisecond})
	s.Set("a", []byte("1"))
	s.has(t, map[string]int{"a": 1})
	e.Put(t, "p/a", "1")
	testutil.Eventually(t, testTimeout, func() error {
		if lease, _ := leaseOf(t, e, "p/a"); lease == 0 {
			return errors.New("a has no lease")
		}
		return nil
	})
}

// Set and Delete with Flush, Put for keys that are not kept, Snapshot, Close.
//
// mechanism: E6
func TestStoreSetsDeletesAndCloses(t *testing.T) {
	e := testutil.StartEtcd(t)
	s := join(t, e, WriterConfig{})
	ctx := t.Context()
	s.Set("a", []byte("1"))
	s.Set("b", []byte("1"))
	if err := s.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	if got := stored(t, e); !maps.Equal(got, map[string]string{"a": "1", "b": "1"}) {
		t.Errorf("etcd holds %v after Flush", got)
	}
	if err := s.c.Put(ctx, "p/once", []byte("5")); err != nil {
		t.Error(err)
	}
	s.has(t, map[string]int{"a": 1, "b": 1, "once": 5})
	s.Set("a", []byte("2"))
	s.Delete("b")
	s.Delete("once") // not a local key
	if err := s.Flush(ctx); err != nil {
		t.Fatal(err)
	}
	s.has(t, map[string]int{"a": 2, "once": 5})
	if status := s.Status(); status.Writer.Keys != 1 || status.Shared != 2 {
		t.Errorf("status %+v", status)
	}
	if err := s.Close(ctx); err != nil {
		t.Error(err)
	}
	if err := s.run.wait(t); err != nil {
		t.Error(err)
	}
	if got := stored(t, e); !maps.Equal(got, map[string]string{"once": "5"}) {
		t.Errorf("etcd holds %v after Close", got)
	}
	if err := s.Close(ctx); err != nil {
		t.Error(err)
	}
}

func TestStoreClosesWithoutEtcd(t *testing.T) {
	e := testutil.StartEtcd(t)
	s := join(t, e, WriterConfig{})
	s.Set("a", []byte("1"))
	s.has(t, map[string]int{"a": 1})
	e.Stop(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := s.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("close: %v", err)
	}
	if err := s.run.wait(t); err != nil {
		t.Error(err)
	}
}

// What a member left that is gone is not this one's to delete: it ends with
// the lease of who put it, and a joining member takes over only what it sets.
//
// mechanism: E7
func TestStoreLeavesStaleKeys(t *testing.T) {
	e := testutil.StartEtcd(t)
	old := join(t, e, WriterConfig{})
	old.Set("a", []byte("1"))
	old.Set("b", []byte("1"))
	old.has(t, map[string]int{"a": 1, "b": 1})
	if err := old.run.stop(); err != nil {
		t.Fatal(err)
	}
	lease, _ := leaseOf(t, e, "p/a")
	s := join(t, e, WriterConfig{VerifyInterval: 20 * time.Millisecond})
	s.Set("a", []byte("1"))
	s.Delete("b")
	testutil.Eventually(t, testTimeout, func() error {
		if now, _ := leaseOf(t, e, "p/a"); now == lease {
			return errors.New("a has its old lease")
		}
		return s.Flush(t.Context())
	})
	holds(t, e, map[string]string{"a": "1", "b": "1"})
	revoke(t, e, clientv3.LeaseID(lease))
	s.has(t, map[string]int{"a": 1})
}

// lesson: X3
func TestStoreFollowsToAnotherEtcd(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Put(t, "p/theirs", "1")
	s := join(t, e, WriterConfig{VerifyInterval: time.Hour})
	s.Set("ours", []byte("1"))
	s.has(t, map[string]int{"theirs": 1, "ours": 1})
	e.Replace(t)
	e.Put(t, "p/new", "1")
	s.has(t, map[string]int{"new": 1, "ours": 1})
	e.Delete(t, "p/ours")
	holds(t, e, map[string]string{"new": "1", "ours": "1"})
}
