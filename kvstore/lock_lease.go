// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"sync"
	"time"
)

// lockLeases gives the locks of one Client their leases: a common one as a
// rule, since a lease for each would cost two requests more than the lock
// itself, and etcd a write to disk for each of them. The common lease ends
// when no lock has needed it for its TTL.
//
// What must hold is that a key under it is only there while its lock is: nobody
// else would get that lock as long as other locks keep the lease alive. So a
// lease under which a key may be that no lock knows of, since the answer to a
// request was lost, is retired: new locks get another one, and it is revoked
// after the last lock that has it.
type lockLeases struct {
	turn   chan struct{}  // of capacity 1, held by who opens the common one
	ending sync.WaitGroup // the timer, while it is set or its function runs

	mu     sync.Mutex
	common *lockLease  // nil: none; guarded by mu, as is the timer
	idle   *time.Timer // ends common; nil: it is in use
}

// lockLease is the lease of some locks.
type lockLease struct {
	*Session
	locks int // that have it; guarded by lockLeases.mu
}

func newLockLeases() *lockLeases { return &lockLeases{turn: make(chan struct{}, 1)} }

// lease returns the lease for one more lock: the common one, or one that the
// lock has for itself alone, which ends with it.
func (q *lockLeases) lease(ctx context.Context, c *Client, alone bool) (*lockLease, error) {
	if alone {
		s, err := c.OpenSession(ctx, c.cfg.LockTTL)
		return &lockLease{Session: s, locks: 1}, err
	}
	if l := q.join(); l != nil {
		return l, nil
	}
	select {
	case q.turn <- struct{}{}:
		defer func() { <-q.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if l := q.join(); l != nil { // opened meanwhile
		return l, nil
	}
	s, err := c.OpenSession(ctx, c.cfg.LockTTL)
	if err != nil {
		return nil, err
	}
	l := &lockLease{Session: s, locks: 1}
	q.mu.Lock()
	q.common = l
	q.mu.Unlock()
	return l, nil
}

// join returns the common lease for one more lock, nil if there is none that
// lives.
func (q *lockLeases) join() *lockLease {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.common == nil {
		return nil
	}
	q.busy()
	if q.common.Err() != nil {
		q.common = nil
		return nil
	}
	q.common.locks++
	return q.common
}

// busy stops the timer. The caller holds mu.
func (q *lockLeases) busy() {
	if q.idle != nil && q.idle.Stop() {
		q.ending.Done()
	}
	q.idle = nil
}

// retire has new locks not use a lease.
func (q *lockLeases) retire(l *lockLease) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.common == l {
		q.common = nil
	}
}

// endsWith reports whether a lease ends when so many locks more have left it.
func (q *lockLeases) endsWith(l *lockLease, locks int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.common != l && l.locks <= locks
}

// leave ends the use of a lease by one lock. If no lock has it, or will have
// it, the lease is revoked: ended tells that it is, and the keys under it gone.
func (q *lockLeases) leave(ctx context.Context, c *Client, l *lockLease) (ended bool, err error) {
	q.mu.Lock()
	l.locks--
	unused, common := l.locks == 0, q.common == l
	if unused && common {
		q.ending.Add(1)
		q.idle = time.AfterFunc(c.cfg.LockTTL, func() {
			defer q.ending.Done()
			q.end(l)
		})
	}
	q.mu.Unlock()
	if !unused || common {
		return false, nil
	}
	err = l.Close(ctx)
	return err == nil, err
}

// end closes the common lease unless a lock has joined it.
func (q *lockLeases) end(l *lockLease) {
	q.mu.Lock()
	over := q.common == l && l.locks == 0
	if over {
		q.common, q.idle = nil, nil
	}
	q.mu.Unlock()
	if over {
		ctx, cancel := context.WithTimeout(context.Background(), revokeTimeout)
		defer cancel()
		_ = l.Close(ctx) // or it ends by itself
	}
}

// close ends the common lease of a Client that is about to be closed, if no
// lock has it, and, where etcd is away, leaves it to end by itself.
func (q *lockLeases) close(reachable bool) {
	q.mu.Lock()
	q.busy()
	l := q.common
	q.mu.Unlock()
	if l != nil && reachable {
		q.end(l)
	}
	q.ending.Wait()
}
