// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// ErrLockLost indicates that a lock or a leadership is not held any more, or
// may not be. What was to be written under it is not.
var ErrLockLost = errors.New("the lock is lost")

const (
	defaultLockTTL     = 25 * time.Second
	defaultLockTimeout = time.Minute
)

// Lock is a lock that is held, by the protocol of etcd's own concurrency
// package: whoever wants the lock of a path puts <path>/<lease id in hex>
// under a lease of its own, and the key with the lowest create revision holds
// it. A lease that ends takes the key with it. The locks of one Client have one
// lease in common.
//
// Holding it means nothing by itself, since a holder can be suspended at any
// instant and find out late that another one took its place. So what the lock
// protects is written with its methods: they write in one transaction with the
// comparison that the lock is held, and return ErrLockLost where it is not.
// All methods may be called concurrently.
type Lock struct {
	c        *Client
	path     string
	key      string
	revision int64 // in which key was created; 0: not known to have been
	lease    *lockLease

	ctx  context.Context // ends with the lock, its cause is why
	over context.CancelCauseFunc

	giving sync.Mutex // held by Unlock
	left   bool       // the lease is not this lock's any more; guarded by giving
	given  bool       // nothing is left to tell etcd; guarded by giving
}

// errLockGiven is why a Lock that was given back is over.
var errLockGiven = errors.New("the lock was given back")

// Lock waits for the lock of a path, 1 min unless the configuration says
// otherwise. Those of this Client that wait for the same one do so in the
// order in which they came, and only the first of them shows in etcd. The
// lock must be given back with Unlock.
func (c *Client) Lock(ctx context.Context, path string) (*Lock, error) {
	bounded, cancel := context.WithTimeout(ctx, c.cfg.LockTimeout)
	defer cancel()
	return c.acquire(bounded, path, nil, false)
}

// acquire waits for the lock of a path as long as ctx lives. One that has its
// lease alone ends with that.
func (c *Client) acquire(ctx context.Context, path string, value []byte, alone bool) (*Lock, error) {
	leave, err := c.turns.await(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("lock %s: wait for others in this process: %w", path, err)
	}
	var pause backoff
	for {
		l, err := c.contend(ctx, path, value, alone)
		if err == nil {
			context.AfterFunc(l.ctx, leave)
			return l, nil
		}
		// An outage is no reason to stop waiting, nor is a lease lost in it.
		if permanent(err) || !pause.wait(ctx) {
			leave()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
	}
}

// contend puts a key for the lock and waits until its turn has come. On an
// error nothing of it stays, or only until its lease ends.
func (c *Client) contend(ctx context.Context, path string, value []byte, alone bool) (*Lock, error) {
	if err := c.waitReady(ctx); err != nil {
		return nil, c.explain(err)
	}
	lease, err := c.leases.lease(ctx, c, alone)
	if err != nil {
		return nil, err
	}
	l := &Lock{c: c, path: path, key: path + "/" + lease.Lease().String(), lease: lease}
	l.ctx, l.over = context.WithCancelCause(lease.ctx)
	err = l.await(ctx, value)
	if err == nil {
		return l, nil
	}
	if lost := l.err(); lost != nil {
		err = lost
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), revokeTimeout)
	defer cancel()
	_ = l.Unlock(ctx) // or the lease ends by itself
	return nil, err
}

// await waits until the lock is held. Failures that may pass are retried: a
// request whose answer was lost does no harm if made again.
func (l *Lock) await(ctx context.Context, value []byte) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(l.ctx, cancel)()
	var (
		pause  backoff
		holder string
	)
	for {
		held, err := l.try(ctx, value, &holder)
		if held {
			return nil
		}
		if err == nil {
			err = l.awaitPredecessor(ctx)
		}
		switch {
		case ctx.Err() != nil && holder != "":
			return fmt.Errorf("%s holds it: %w", holder, ctx.Err())
		case ctx.Err() != nil:
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		case err == nil:
			pause = backoff{}
			continue
		case permanent(err), errors.Is(err, ErrLeaseLost):
			return err
		}
		if !pause.wait(ctx) {
			return err
		}
	}
}

// permanent reports whether trying again would be of no use. A watch that is
// refused for where it begins is begun elsewhere the next time.
func permanent(err error) bool {
	if errors.Is(err, rpctypes.ErrCompacted) || errors.Is(err, rpctypes.ErrFutureRev) {
		return false
	}
	return refused(err) || errors.Is(err, ErrHistoryChanged) || errors.Is(err, ErrClosed)
}

// try puts the key unless it is there, and reports whether it holds the lock,
// or which key does.
func (l *Lock) try(ctx context.Context, value []byte, holder *string) (held bool, err error) {
	if err := l.c.waitReady(ctx); err != nil {
		return false, l.c.explain(err)
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	first := clientv3.OpGet(l.path+"/", clientv3.WithFirstCreate()...)
	resp, err := l.c.etcd.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(l.key), "=", 0)).
		Then(clientv3.OpPut(l.key, string(value), clientv3.WithLease(clientv3.LeaseID(l.lease.Lease()))), first).
		Else(clientv3.OpGet(l.key), first).
		Commit()
	if err != nil {
		l.c.leases.retire(l.lease) // the key may come to be there at any time
		err = l.c.leaseError("put "+l.key+" under", l.lease.Lease(), err)
		if errors.Is(err, ErrLeaseLost) {
			l.lease.over(err)
		}
		return false, err
	}
	l.revision = resp.Header.Revision
	for _, own := range resp.Responses[0].GetResponseRange().GetKvs() {
		l.revision = own.CreateRevision
	}
	// This read sees what the same transaction has put.
	for _, oldest := range resp.Responses[1].GetResponseRange().GetKvs() {
		*holder = string(oldest.Key)
	}
	return *holder == l.key, nil
}

// awaitPredecessor waits until the key that is next before this one is gone.
// That it alone is watched saves the others from waking at each release.
func (l *Lock) awaitPredecessor(ctx context.Context) error {
	before, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	last := append(clientv3.WithLastCreate(), clientv3.WithMaxCreateRev(l.revision-1), clientv3.WithKeysOnly())
	resp, err := l.c.etcd.Get(before, l.path+"/", last...)
	if err != nil || len(resp.Kvs) == 0 {
		return err
	}
	return l.c.awaitChange(ctx, string(resp.Kvs[0].Key), resp.Header.Revision, clientv3.WithFilterPut())
}

// awaitChange waits until something happens to a key, or to a range, after a
// revision. That a watch fails may mean that something did.
func (c *Client) awaitChange(ctx context.Context, key string, after int64, options ...clientv3.OpOption) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	options = append(options, clientv3.WithRev(after+1))
	for resp := range c.etcd.Watch(clientv3.WithRequireLeader(ctx), key, options...) {
		if err := resp.Err(); err != nil {
			return fmt.Errorf("watch %s: %w", key, c.explain(err))
		}
		if len(resp.Events) > 0 {
			return nil
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("watch %s: it ended", key)
}

// Key returns the key in etcd that holds the lock.
func (l *Lock) Key() string { return l.key }

// Revision returns the revision in which the key was created: of two holders
// of one lock, the later one has the higher.
func (l *Lock) Revision() int64 { return l.revision }

// Lost is closed when the lock is not held any more: it was given back, its
// lease was lost, or a write found it gone.
func (l *Lock) Lost() <-chan struct{} { return l.ctx.Done() }

// Held reports whether the lock is held as far as can be known without asking
// etcd.
func (l *Lock) Held() bool { return l.err() == nil }

// err returns nil while the lock is held, and then why it is not. As the
// session's, it looks at the clock.
func (l *Lock) err() error {
	if err := l.lease.Err(); err != nil {
		return err
	}
	return context.Cause(l.ctx)
}

// Unlock gives the lock back; what it was for has been done. An error means
// that etcd could not be told, and that the next one has to wait until the
// lease ends; it may be tried again.
func (l *Lock) Unlock(ctx context.Context) error {
	l.giving.Lock()
	defer l.giving.Unlock()
	if l.given {
		return nil
	}
	// Those of this process have their turn after the key is gone: they would
	// take it for their own.
	defer l.over(errLockGiven)
	if err := l.give(ctx); err != nil {
		return fmt.Errorf("unlock %s: %w", l.path, err)
	}
	l.given = true
	return nil
}

// give deletes the key, by itself or with its lease. The caller holds giving.
func (l *Lock) give(ctx context.Context) error {
	leases := l.c.leases
	switch {
	case l.left && leases.endsWith(l.lease, 0): // an earlier attempt failed
		return l.lease.Close(ctx)
	case l.left:
		return l.deleteKey(ctx)
	case leases.endsWith(l.lease, 1):
		l.left = true
		_, err := leases.leave(ctx, l.c, l.lease)
		return err
	}
	l.left = true
	err := l.deleteKey(ctx)
	if err != nil {
		leases.retire(l.lease)
	}
	if ended, _ := leases.leave(ctx, l.c, l.lease); ended {
		return nil
	}
	return err
}

// deleteKey deletes the key, unless another lock of this Client has put it
// since. That cannot be while it is not known whether this one did.
func (l *Lock) deleteKey(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var own []clientv3.Cmp
	if l.revision != 0 {
		own = append(own, clientv3.Compare(clientv3.CreateRevision(l.key), "=", l.revision))
	}
	if _, err := l.c.etcd.Txn(ctx).If(own...).Then(clientv3.OpDelete(l.key)).Commit(); err != nil {
		return fmt.Errorf("delete %s: %w", l.key, l.c.explain(err))
	}
	return nil
}

// turns lets the members of one process take turns at each path, first come
// first served. The zero value is ready.
type turns struct {
	mu    sync.Mutex
	lines map[string][]chan struct{} // guarded by mu; a turn is closed when it has come
}

// await waits until it is the caller's turn. leave, which may be called more
// than once, ends it.
func (q *turns) await(ctx context.Context, path string) (leave func(), err error) {
	turn := make(chan struct{})
	q.mu.Lock()
	if q.lines == nil {
		q.lines = make(map[string][]chan struct{})
	}
	q.lines[path] = append(q.lines[path], turn)
	if len(q.lines[path]) == 1 {
		close(turn)
	}
	q.mu.Unlock()
	leave = sync.OnceFunc(func() { q.leave(path, turn) })
	select {
	case <-turn:
		return leave, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}

func (q *turns) leave(path string, turn chan struct{}) {
	q.mu.Lock()
	defer q.mu.Unlock()
	line := q.lines[path]
	i := slices.Index(line, turn)
	line = slices.Delete(line, i, i+1)
	switch {
	case len(line) == 0:
		delete(q.lines, path)
		return
	case i == 0:
		close(line[0])
	}
	q.lines[path] = line
}
