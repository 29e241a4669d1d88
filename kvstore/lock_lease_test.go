// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// The locks of a client have one lease, which ends some time after the last of them; a leader has one for itself.
func TestLocksShareALease(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	first, second := mustLock(t, c, "a"), mustLock(t, c, "b")
	leader, err := c.Campaign(t.Context(), "leader", nil)
	if err != nil {
		t.Fatal(err)
	}
	if first.lease != second.lease || leader.lease == first.lease {
		t.Error("want one lease for two locks, and another for a leader")
	}
	mustUnlock(t, first)
	if exists(t, e, first.Key()) || !exists(t, e, second.Key()) {
		t.Error("want the key of one lock gone, and that of the other there")
	}
	if err := second.Put(t.Context(), "p/a", []byte("1")); err != nil {
		t.Error(err)
	}
	mustUnlock(t, second)
	if again := mustLock(t, c, "a"); again.lease != first.lease || again.Revision() == first.Revision() {
		t.Error("want the same lease and another key")
	} else {
		mustUnlock(t, again)
	}
	if err := leader.Resign(t.Context()); err != nil {
		t.Error(err)
	}
	if c.leases.idle == nil {
		t.Error("nothing will end the lease")
	}
	c.leases.end(first.lease) // as when nobody has needed it for long
	testutil.Eventually(t, testTimeout, func() error {
		leases, err := c.Leases(t.Context())
		if err == nil && len(leases) != 0 {
			err = fmt.Errorf("leases %v", leases)
		}
		return err
	})
	third := mustLock(t, c, "a")
	if third.lease == first.lease {
		t.Error("a lock got a lease that has ended")
	}
	mustUnlock(t, third)
}

// A lease under which a key may be that nobody knows of is given to no further lock, and ends with those that have it.
func TestDoubtfulLeaseIsRetired(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	first, second := mustLock(t, c, "a"), mustLock(t, c, "b")
	e.Delete(t, first.Key())
	if err := first.Put(t.Context(), "p/a", nil); !errors.Is(err, ErrLockLost) {
		t.Errorf("put: %v", err)
	}
	ends(t, "the lock", first.Lost())
	third := mustLock(t, c, "c")
	if third.lease == first.lease {
		t.Error("the lease was given to another lock")
	}
	if err := second.Put(t.Context(), "p/a", []byte("1")); err != nil {
		t.Errorf("another lock of that lease: %v", err)
	}
	for _, l := range []*Lock{first, second, third} {
		mustUnlock(t, l)
	}
	if _, err := c.TimeToLive(t.Context(), first.lease.Lease()); !errors.Is(err, ErrLeaseLost) {
		t.Errorf("the lease: %v", err)
	}
	waits(t, e, "a", 0)
	waits(t, e, "b", 0)
	waits(t, e, "c", 0)
}

// A lock that cannot be given back, since etcd is away, does not outlive its lease, though others of the client hold.
func TestUnlockWhileEtcdIsAway(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	impatient(c)
	first, second := mustLock(t, c, "a"), mustLock(t, c, "b")
	e.Stop(t)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if err := first.Unlock(ctx); err == nil {
		t.Fatal("unlocked without etcd")
	}
	if first.Held() {
		t.Error("the lock is held still")
	}
	e.Restart(t)
	mustUnlock(t, mustLock(t, mustDial(t, e, unlimited), "c")) // etcd is back
	other := mustLock(t, c, "c")
	if other.lease == first.lease {
		t.Error("the lease was given to another lock")
	}
	mustUnlock(t, other)
	testutil.Eventually(t, testTimeout, func() error { return first.Unlock(t.Context()) })
	if exists(t, e, first.Key()) || !exists(t, e, second.Key()) {
		t.Error("want the key of one lock gone, and that of the other there")
	}
	mustUnlock(t, second)
}

// What is written with the end of a lock is written if it is held, at the revision at which it ends.
func TestLockFinishes(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	l := mustLock(t, c, lockPath)
	e.Put(t, "p/theirs", "1")
	if err := l.Finish(t.Context(), Op{Kind: OpCreate, Key: "p/theirs"}); !errors.Is(err, ErrExists) || !l.Held() {
		t.Errorf("%v, held: %v", err, l.Held())
	}
	if err := l.Finish(t.Context(), Op{Kind: OpPut, Key: "p/a", Value: []byte("1")}); err != nil {
		t.Error(err)
	}
	_, written := leaseOf(t, e, "p/a")
	if exists(t, e, l.Key()) || l.Held() {
		t.Error("the lock is there still")
	}
	resp, err := e.Client().Get(t.Context(), "p/a")
	if err != nil || resp.Header.Revision != written {
		t.Errorf("the lock ended after revision %d, at %d, %v", written, resp.Header.Revision, err)
	}
	mustUnlock(t, l)
	next := mustLock(t, c, lockPath)
	e.Delete(t, next.Key())
	if err := next.Finish(t.Context(), Op{Kind: OpPut, Key: "p/b"}); !errors.Is(err, ErrLockLost) {
		t.Errorf("finish: %v", err)
	}
	holds(t, e, map[string]string{"theirs": "1", "a": "1"})
	mustUnlock(t, next)
}
