// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// unlimited lifts the rate limit, which tests of what is done would only wait for.
func unlimited(cfg *Config) { cfg.QPS, cfg.MaxInflight = 10_000, 1000 }

func shortLocks(cfg *Config) { cfg.LockTTL = time.Second }

func mustOpen(t *testing.T, c *Client, ttl time.Duration) *Session {
	t.Helper()
	s, err := c.OpenSession(t.Context(), ttl)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Orphan)
	return s
}

// exists reports whether a key is in etcd.
func exists(t *testing.T, e *testutil.Etcd, key string) bool {
	t.Helper()
	_, ok := e.Get(t, key)
	return ok
}

// gone waits until a key is not in etcd.
func gone(t *testing.T, e *testutil.Etcd, key string) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		if exists(t, e, key) {
			return fmt.Errorf("%s is there", key)
		}
		return nil
	})
}

// ends waits until a channel is closed.
func ends(t *testing.T, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(testTimeout):
		t.Fatalf("%s does not end", what)
	}
}

// The lease article's ways of use, on the real server.
//
// mechanism: Q1, Q5
func TestLeaseOperations(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	ctx := t.Context()
	id, ttl, err := c.Grant(ctx, 1500*time.Millisecond)
	if err != nil || id == 0 || ttl != 2*time.Second {
		t.Fatalf("grant: lease %v, TTL %v, %v", id, ttl, err)
	}
	if err := (&Session{c: c, id: id, ctx: ctx, lease: lease{ttl: ttl, renewed: time.Now()}}).Put(ctx, "p/a", nil); err != nil {
		t.Fatal(err)
	}
	if ids, err := c.Leases(ctx); err != nil || len(ids) != 1 || ids[0] != id {
		t.Errorf("leases %v, %v", ids, err)
	}
	if ttl, err := c.KeepAliveOnce(ctx, id); err != nil || ttl != 2*time.Second {
		t.Errorf("keep alive once: %v, %v", ttl, err)
	}
	info, err := c.TimeToLive(ctx, id)
	if err != nil || info.Granted != 2*time.Second || info.TTL > 2*time.Second || len(info.Keys) != 1 || info.Keys[0] != "p/a" {
		t.Errorf("time to live: %+v, %v", info, err)
	}
	if err := c.Revoke(ctx, id); err != nil {
		t.Error(err)
	}
	if exists(t, e, "p/a") {
		t.Error("p/a outlives its lease")
	}
	_, err = c.KeepAliveOnce(ctx, id)
	_, ttlErr := c.TimeToLive(ctx, id)
	for _, err := range []error{err, ttlErr, c.Revoke(ctx, id)} {
		if !errors.Is(err, ErrLeaseLost) {
			t.Errorf("%v, want %v", err, ErrLeaseLost)
		}
	}
}

// A lease that nobody renews ends, and the keys of it with it; etcd, not its
// client, counts the time.
//
// mechanism: Q2, Q3
func TestLeaseEndsByItself(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	// The least that etcd grants is one and a half elections, here of 100 ms.
	if _, ttl, err := c.Grant(t.Context(), time.Nanosecond); err != nil || ttl != time.Second {
		t.Errorf("the shortest lease has %v: %v", ttl, err)
	}
	s := mustOpen(t, c, time.Second)
	if err := s.Put(t.Context(), "p/a", []byte("1")); err != nil {
		t.Fatal(err)
	}
	s.Orphan()
	begun := time.Now()
	gone(t, e, "p/a")
	if _, err := c.TimeToLive(t.Context(), s.Lease()); !errors.Is(err, ErrLeaseLost) {
		t.Errorf("%v after the end", err)
	}
	t.Logf("gone after %v", time.Since(begun))
}

// A key put under a session stays far beyond the TTL, and others see it vanish
// with its writer.
//
// mechanism: C13, Q7
func TestSessionRegistersItsWriter(t *testing.T) {
	t.Parallel()
	const ttl = 3 * time.Second
	e := testutil.StartEtcd(t)
	r := newRecorder()
	r.awaitStart(t, NewWatcher("nodes/", r.deliver), mustDial(t, e, unlimited), nil)
	c := mustDial(t, e, unlimited)
	s := mustOpen(t, c, ttl)
	if err := s.Put(t.Context(), "nodes/n1", []byte("10.0.0.1")); err != nil {
		t.Fatal(err)
	}
	r.is(t, map[string]string{"n1": "10.0.0.1"})
	for end := time.Now().Add(ttl * 3 / 2); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if !exists(t, e, "nodes/n1") || s.Err() != nil {
			t.Fatalf("the key is gone while its session lasts: %v", s.Err())
		}
	}
	if left, err := s.TimeToLive(t.Context()); err != nil || left > ttl {
		t.Errorf("time to live %v, %v", left, err)
	}
	if err := s.KeepAliveOnce(t.Context()); err != nil {
		t.Error(err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	ends(t, "a closed session", s.Done())
	if exists(t, e, "nodes/n1") {
		t.Error("the key outlives the session")
	}
	r.is(t, nil)
	if err := errors.Join(s.Close(t.Context()), s.Close(t.Context())); err != nil {
		t.Error(err)
	}
	if err := s.Put(t.Context(), "nodes/n1", nil); err == nil {
		t.Error("a key was put under a closed session")
	}
}

// The keys know their lease, and the lease is there, after a restart of etcd.
//
// mechanism: Q4, Q6
func TestSessionOutlivesARestartOfEtcd(t *testing.T) {
	e := testutil.StartEtcd(t)
	s := mustOpen(t, mustDial(t, e, unlimited), 3*time.Second)
	if err := s.Put(t.Context(), "p/a", []byte("1")); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		e.Restart(t)
		testutil.Eventually(t, testTimeout, func() error { return s.KeepAliveOnce(t.Context()) })
	}
	if s.Err() != nil || !exists(t, e, "p/a") {
		t.Fatalf("the session is over: %v", s.Err())
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if exists(t, e, "p/a") {
		t.Error("the key lost its lease in a restart")
	}
}

func TestSessionLosesItsLease(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	s := mustOpen(t, c, time.Second)
	if err := c.Revoke(t.Context(), s.Lease()); err != nil {
		t.Fatal(err)
	}
	ends(t, "a session without lease", s.Done())
	if !errors.Is(s.Err(), ErrLeaseLost) {
		t.Errorf("it is over for %v", s.Err())
	}
	if err := s.Close(t.Context()); err != nil {
		t.Errorf("close: %v", err)
	}
	s = mustOpen(t, c, time.Minute)
	if err := c.Revoke(t.Context(), s.Lease()); err != nil {
		t.Fatal(err)
	}
	if err := s.Put(t.Context(), "p/a", nil); !errors.Is(err, ErrLeaseLost) || s.Err() == nil {
		t.Errorf("put: %v, then %v", err, s.Err())
	}
}

// A session that cannot reach etcd is over after its TTL, before etcd ends the
// lease, and without any word of etcd's.
func TestSessionEndsWhenCutOff(t *testing.T) {
	e := testutil.StartEtcd(t)
	s := mustOpen(t, mustDial(t, e, unlimited), time.Second)
	e.Stop(t)
	ends(t, "a session that is cut off", s.Done())
	if !errors.Is(s.Err(), ErrLeaseLost) {
		t.Errorf("it ended for %v", s.Err())
	}
}

func TestSessionEndsInAnotherEtcd(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	impatient(c)
	s := mustOpen(t, c, 2*time.Second)
	e.Replace(t)
	ends(t, "a session of another etcd", s.Done())
	if err := s.Err(); !errors.Is(err, ErrHistoryChanged) && !errors.Is(err, ErrLeaseLost) {
		t.Errorf("it is over for %v", err)
	}
}

func TestSessionEndsWithItsClient(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	s := mustOpen(t, c, time.Hour)
	c.Close()
	ends(t, "a session without client", s.Done())
	if err := s.Err(); !errors.Is(err, ErrClosed) {
		t.Errorf("it is over for %v", err)
	}
	if err := s.Close(t.Context()); err == nil {
		t.Error("a lease was revoked through a closed client")
	}
}

// A process that was stopped finds, before anything else, that its session is
// over: the clock alone says so.
//
// lesson: E11
func TestSessionKnowsOfItsSuspension(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Session{lease: lease{ttl: 25 * time.Second, renewed: time.Now()}}
		s.ctx, s.over = context.WithCancelCause(t.Context())
		time.Sleep(25*time.Second - 1)
		if err := s.Err(); err != nil {
			t.Errorf("%v within the TTL", err)
		}
		time.Sleep(time.Nanosecond)
		if err := s.Err(); !errors.Is(err, ErrLeaseLost) {
			t.Errorf("%v after the TTL", err)
		}
		ends(t, "the session", s.Done())
		// An answer that comes now, of a renewal asked for before, is too late.
		s.lease.renewed = time.Now()
		if s.Err() == nil {
			t.Error("the session came back")
		}
	})
}
