// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// One round of attempts to allocate an identity, as every node of the cluster makes it.
const (
	maxAttempts    = 16
	firstBackoff   = 20 * time.Millisecond
	longestBackoff = time.Second
	unlockTimeout  = 2 * time.Second
)

// work allocates what is in the queue until ctx ends.
func (a *Allocator) work(ctx context.Context) error {
	for {
		x, wake := a.next()
		if x != nil {
			a.allocate(ctx, x)
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case <-wake:
		}
	}
}

// next takes an allocation from the queue, or returns nil and when to look again.
func (a *Allocator) next() (*allocation, <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.listed && len(a.queue) > 0 {
		x := a.queue[0]
		a.queue = a.queue[1:]
		if a.used[x.text] == x {
			return x, nil
		}
	}
	return nil, a.wake
}

// retryFailed has allocations that came to nothing worked on again after a rest.
func (a *Allocator) retryFailed(ctx context.Context) error {
	for pause(ctx, retryLook) {
		a.mu.Lock()
		for _, x := range a.used {
			if (x.id == identity.Invalid || x.err != nil || x.moves) && !x.busy && time.Now().After(x.retry) {
				a.enqueue(x)
			}
		}
		a.mu.Unlock()
	}
	return nil
}

// allocate makes one round of attempts.
func (a *Allocator) allocate(ctx context.Context, x *allocation) {
	backoff := firstBackoff
	for range maxAttempts {
		id, err := a.attempt(ctx, x)
		if ctx.Err() != nil {
			return
		}
		if a.attempted(x, id, err) {
			return
		}
		if errors.Is(err, ErrExhausted) || !pause(ctx, backoff/2+rand.N(backoff)) {
			break
		}
		backoff = min(2*backoff, longestBackoff)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	x.busy, x.retry = false, time.Now().Add(retryAfter)
}

// attempted notes what came of an attempt, and reports whether there is no need for another.
func (a *Allocator) attempted(x *allocation, id identity.ID, err error) (done bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil && a.used[x.text] == x {
		// What was bound otherwise since has been seen already, or will be.
		if bound, ok := a.pool.Labels(id); ok && bound != x.text {
			err = fmt.Errorf("identity %s: %w", id, errConflict)
		}
	}
	wanted := a.used[x.text] == x
	switch {
	case err != nil && wanted:
		a.failed++
		if id != x.id {
			a.pool.Release(id)
		}
		if !x.moves && (x.err == nil || x.err.Error() != err.Error()) { // what moves is well where it is
			x.err = err
			a.notify()
		}
		return false
	case !wanted:
		x.busy = false
		if a.byID[id] == nil {
			a.pool.Release(id)
		}
		return true
	}
	if x.id != id {
		a.forget(x) // what an earlier agent had
	}
	a.pool.Bind(id, x.text)
	a.pool.Hold(id)
	a.byID[id] = x
	x.id, x.err, x.busy, x.moves = id, nil, false, false
	a.allocated++
	a.memory.touch()
	a.notify()
	a.converge(x)
	return true
}

// attempt finds the identity of labels under their lock. With an error it may return an identity that it picked.
func (a *Allocator) attempt(ctx context.Context, x *allocation) (identity.ID, error) {
	lease, err := a.leases.get(ctx)
	if err != nil {
		return identity.Invalid, err
	}
	lock, err := a.cfg.Client.Lock(ctx, identity.LockKey(x.text))
	if err != nil {
		return identity.Invalid, err
	}
	defer func() { // which is nothing if all went well
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), unlockTimeout)
		defer cancel()
		_ = lock.Unlock(ctx) // or its lease ends by itself
	}()
	id, known, err := a.choose(x)
	if err != nil {
		return identity.Invalid, err
	}
	b := binding{lock: lock, labels: x.text, id: id, slave: kvstore.Op{
		Kind: kvstore.OpPut, Key: identity.SlaveKey(x.labels, a.cfg.HostIP), Lease: lease, Value: strconv.AppendUint(nil, uint64(id), 10),
	}}
	if known {
		err = b.join(ctx)
	} else {
		err = b.create(ctx)
	}
	if errors.Is(err, kvstore.ErrExists) {
		err = a.again(ctx, &b, err)
	}
	if err != nil && !errors.Is(err, kvstore.ErrExists) {
		a.leases.doubt(lease)
	}
	return id, err
}

// choose returns the identity that labels are known to have, or picks a free one: the one of before the restart if it is.
func (a *Allocator) choose(x *allocation) (id identity.ID, known bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if id, ok := a.pool.ID(x.text); ok {
		return id, true, nil
	}
	if x.id != identity.Invalid {
		return x.id, false, nil // nothing is known to be bound to it, or it would have been given up
	}
	if id, ok := a.pool.Pick(rand.Uint32N); ok {
		return id, false, nil
	}
	return identity.Invalid, false, ErrExhausted
}

// binding is an identity that is about to be used for labels. What makes it ends the lock.
type binding struct {
	lock   *kvstore.Lock
	labels string
	id     identity.ID
	slave  kvstore.Op
}

func (b *binding) master(kind kvstore.OpKind) kvstore.Op {
	return kvstore.Op{Kind: kind, Key: identity.MasterKey(b.id), Value: []byte(b.labels)}
}

// join says that this node uses an identity, too, and puts back the key that binds it if that is gone.
func (b *binding) join(ctx context.Context) error {
	err := b.lock.Finish(ctx, b.master(kvstore.OpEqual), b.slave)
	if errors.Is(err, kvstore.ErrExists) {
		return b.lock.Finish(ctx, b.master(kvstore.OpCreate), b.slave)
	}
	return err
}

// create binds a free identity to labels.
func (b *binding) create(ctx context.Context) error {
	return b.lock.Finish(ctx, kvstore.Op{Kind: kvstore.OpAbsent, Key: identity.SlavePrefix(b.labels)}, b.master(kvstore.OpCreate), b.slave)
}

// again deals with a binding that something stood against: somebody was quicker, and the watch has not told yet, or nodes
// use for these labels an identity that stands for others. In that case alone the binding is made nevertheless.
func (a *Allocator) again(ctx context.Context, b *binding, cause error) error {
	if err := a.reread(ctx, b); err != nil {
		return err
	}
	a.mu.Lock()
	_, found := a.pool.ID(b.labels)
	_, bound := a.pool.Labels(b.id)
	a.mu.Unlock()
	if found || bound {
		return cause
	}
	return b.lock.Finish(ctx, b.master(kvstore.OpCreate), b.slave)
}

// reread looks in etcd for what stood against a binding.
func (a *Allocator) reread(ctx context.Context, b *binding) error {
	masters := map[identity.ID]string{b.id: ""}
	prefix := identity.SlavePrefix(b.labels)
	slaves, _, err := a.cfg.Client.List(ctx, prefix)
	if err != nil {
		return err
	}
	for _, kv := range slaves {
		id, err := identity.ParseKey(string(kv.Value))
		if err == nil && !strings.Contains(strings.TrimPrefix(kv.Key, prefix), "/") {
			masters[id] = b.labels // unless its master says otherwise
		}
	}
	for id := range masters {
		kv, ok, err := a.cfg.Client.Get(ctx, identity.MasterKey(id))
		switch {
		case err != nil:
			return err
		case ok:
			masters[id] = string(kv.Value)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, labels := range masters {
		if labels == "" {
			a.pool.Unbind(id)
		} else {
			a.pool.Bind(id, labels)
		}
	}
	return nil
}

// handover is a succession of leases for keys that another one is to take over soon.
type handover struct {
	client *kvstore.Client

	mu    sync.Mutex
	lease kvstore.LeaseID // guarded by mu, as are the others
	since time.Time
	keys  int
}

// A lease of a handover: how long it lasts, for how long it is given out, and for how many keys, since the cost of a put
// grows with the keys of its lease.
const (
	handoverTTL  = 2 * time.Minute
	handoverUse  = 30 * time.Second
	handoverKeys = 500
)

// get returns a lease that lasts long enough for one more key to be taken over.
func (h *handover) get(ctx context.Context) (kvstore.LeaseID, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lease == 0 || h.keys >= handoverKeys || time.Since(h.since) > handoverUse {
		since := time.Now()
		lease, _, err := h.client.Grant(ctx, handoverTTL)
		if err != nil {
			return 0, err
		}
		h.lease, h.since, h.keys = lease, since, 0
	}
	h.keys++
	return h.lease, nil
}

// doubt says that a lease may be gone.
func (h *handover) doubt(lease kvstore.LeaseID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lease == lease {
		h.lease = 0
	}
}
