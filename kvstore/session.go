// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// errSessionClosed is why a Session that was closed or orphaned is over.
var errSessionClosed = errors.New("the session was closed")

// Session is a lease that is kept alive: what is put under it is there as long
// as the session, and vanishes with it. It is over when it is closed, when etcd
// says that the lease is gone, or when the lease was not renewed for its TTL,
// as in a process that was stopped or cut off: whoever relies on it then must
// not wait for etcd's word. All methods may be called concurrently.
type Session struct {
	c  *Client
	id LeaseID

	ctx     context.Context // ends with the session, its cause is Err
	over    context.CancelCauseFunc
	stopped chan struct{} // closed when keep has returned

	closing sync.Mutex // held by Close and Orphan
	settled bool       // nothing is left to revoke; guarded by closing

	mu    sync.Mutex
	lease lease // guarded by mu
}

// OpenSession gets a lease and keeps it alive, asking three times in its TTL,
// until Close or Orphan. A TTL of 0 means 15 min; see Grant for the least. The
// lease has nothing to do with ctx.
func (c *Client) OpenSession(ctx context.Context, ttl time.Duration) (*Session, error) {
	if ttl <= 0 {
		ttl = defaultTTL
	}
	l, err := c.grant(ctx, ttl)
	if err != nil {
		return nil, err
	}
	c.log.Info("etcd lease granted", "lease", l.id, "ttl", l.ttl)
	s := &Session{c: c, id: l.id, lease: l, stopped: make(chan struct{})}
	s.ctx, s.over = context.WithCancelCause(c.etcd.Ctx()) // ends with the client
	go func() {
		defer close(s.stopped)
		s.over(s.keep())
	}()
	return s, nil
}

// Lease returns the id of the lease.
func (s *Session) Lease() LeaseID { return s.id }

// Done is closed when the session is over.
func (s *Session) Done() <-chan struct{} { return s.ctx.Done() }

// Err returns nil while the session lasts, and then why it is over:
// ErrLeaseLost, ErrHistoryChanged or ErrClosed, unless it was closed. It looks
// at the clock, and so knows of a suspension before Done does.
func (s *Session) Err() error {
	if s.ctx.Err() == nil && s.expired(time.Now()) {
		s.over(s.outlived(nil))
	}
	err := context.Cause(s.ctx)
	if errors.Is(err, context.Canceled) {
		return ErrClosed
	}
	return err
}

// Put writes a key that lasts as long as the session. It returns ErrLeaseLost
// where the lease is.
func (s *Session) Put(ctx context.Context, key string, value []byte) error {
	if err := s.Err(); err != nil {
		return fmt.Errorf("put %s: %w", key, err)
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := s.c.etcd.Put(ctx, key, string(value), clientv3.WithLease(clientv3.LeaseID(s.id)))
	if err = s.c.leaseError("put "+key+" under", s.id, err); errors.Is(err, ErrLeaseLost) {
		s.over(err)
	}
	return err
}

// Create writes a key that lasts as long as the session, unless it exists, and
// reports whether it did not. It returns ErrLeaseLost where the lease is.
func (s *Session) Create(ctx context.Context, key string, value []byte) (created bool, err error) {
	if err := s.Err(); err != nil {
		return false, fmt.Errorf("create %s: %w", key, err)
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := s.c.etcd.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, string(value), clientv3.WithLease(clientv3.LeaseID(s.id)))).
		Commit()
	if err = s.c.leaseError("create "+key+" under", s.id, err); errors.Is(err, ErrLeaseLost) {
		s.over(err)
	}
	return err == nil && resp.Succeeded, err
}

// KeepAliveOnce renews the lease now.
func (s *Session) KeepAliveOnce(ctx context.Context) error {
	err := s.renew(ctx)
	if errors.Is(err, ErrLeaseLost) {
		s.over(err)
	}
	return err
}

// TimeToLive asks etcd how long the lease lives if it is not renewed.
func (s *Session) TimeToLive(ctx context.Context) (time.Duration, error) {
	info, err := s.c.TimeToLive(ctx, s.id)
	return info.TTL, err
}

// Orphan ends the session and leaves the lease, and what is under it, to end
// by themselves.
func (s *Session) Orphan() {
	s.closing.Lock()
	defer s.closing.Unlock()
	s.settled = true
	s.stop()
}

// Close ends the session, and the lease with all that is under it. When etcd
// cannot be told so, the error says it, and the lease ends by itself within
// its TTL; Close may be tried again. After Orphan it does nothing.
func (s *Session) Close(ctx context.Context) error {
	s.closing.Lock()
	defer s.closing.Unlock()
	s.stop()
	if s.settled {
		return nil
	}
	err := s.c.Revoke(ctx, s.id)
	s.settled = err == nil || errors.Is(err, ErrLeaseLost)
	if s.settled {
		return nil
	}
	return err
}

func (s *Session) stop() {
	s.over(errSessionClosed)
	<-s.stopped
}

// keep renews the lease until the session is over, and returns why it is.
func (s *Session) keep() error {
	var pause backoff
	s.mu.Lock()
	next := s.lease.renewAt()
	s.mu.Unlock()
	for sleep(s.ctx, time.Until(next)) {
		err := s.attempt()
		now := time.Now()
		switch {
		case s.expired(now): // also by an answer that came too late
			return s.outlived(err)
		case errors.Is(err, ErrLeaseLost), errors.Is(err, ErrHistoryChanged), errors.Is(err, ErrClosed):
			return err
		}
		s.mu.Lock()
		next = s.lease.renewAt()
		if err != nil {
			next = now.Add(min(pause.next(now), s.lease.ttl/6, s.lease.expiry().Sub(now)))
		}
		s.mu.Unlock()
	}
	return context.Cause(s.ctx)
}

// attempt tries to renew the lease, and gives up soon enough to try again.
func (s *Session) attempt() error {
	s.mu.Lock()
	ctx, cancel := context.WithDeadline(s.ctx, earlier(time.Now().Add(s.lease.ttl/3), s.lease.expiry()))
	s.mu.Unlock()
	defer cancel()
	if err := s.c.waitReady(ctx); err != nil {
		return err
	}
	return s.renew(ctx)
}

func (s *Session) renew(ctx context.Context) error {
	renewed := lease{id: s.id}
	if err := s.c.renew(ctx, &renewed); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if renewed.renewed.After(s.lease.renewed) {
		s.lease = renewed
	}
	return nil
}

func (s *Session) expired(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !now.Before(s.lease.expiry())
}

// outlived is why the session is over when its lease was not renewed, with what
// went wrong at last, if anything did.
func (s *Session) outlived(last error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := fmt.Errorf("%w: lease %s was not renewed for its %v", ErrLeaseLost, s.id, s.lease.ttl)
	if last != nil {
		err = fmt.Errorf("%w: %w", err, last)
	}
	return err
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
