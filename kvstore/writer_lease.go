// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// writerLease is one of a Writer's leases. Guarded by Writer.mu, but for id
// and what Run alone reads.
type writerLease struct {
	lease
	keys int // records that name it
}

// leaseFor returns a lease with room for a key, nil if there is none. The
// caller holds mu.
func (w *Writer) leaseFor() *writerLease {
	for _, l := range w.leases {
		if l.keys < w.cfg.KeysPerLease {
			return l
		}
	}
	return nil
}

// grant gets another lease.
func (w *Writer) grant(ctx context.Context) error {
	l, err := w.c.grant(ctx, w.cfg.TTL)
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.leases = append(w.leases, &writerLease{lease: l})
	w.mu.Unlock()
	w.cfg.Log.Info("etcd lease granted", "lease", l.id, "ttl", l.ttl)
	return nil
}

// renew keeps alive the leases whose time has come.
func (w *Writer) renew(ctx context.Context) error {
	now := time.Now()
	var due []*writerLease
	w.mu.Lock()
	for _, l := range w.leases {
		if !now.Before(l.renewAt()) {
			due = append(due, l)
		}
	}
	w.mu.Unlock()
	return w.keepAlive(ctx, due)
}

// keepAlive renews leases. One that etcd does not know any more is lost, which
// is no error: its keys are queued to be put under another one. However long
// it was not renewed, as long as etcd has it its keys are there.
func (w *Writer) keepAlive(ctx context.Context, leases []*writerLease) error {
	for _, l := range leases {
		renewed := l.lease
		err := w.c.renew(ctx, &renewed)
		switch {
		case errors.Is(err, ErrLeaseLost):
			w.cfg.Log.Warn("etcd lease lost: its keys are put again", "lease", l.id)
			w.lose(l)
			continue
		case err != nil:
			return err
		}
		w.mu.Lock()
		l.lease = renewed
		w.mu.Unlock()
	}
	return nil
}

// lose drops a lease that is gone, and its keys with it, and has them put
// again in their old order. Before that, all keys are compared with etcd: the
// first loss to be noticed may be one of many, and in an etcd that was emptied
// a canary must not be put before what it speaks of.
func (w *Writer) lose(gone *writerLease) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.doubt = true
	for i, l := range w.leases {
		if l == gone {
			w.leases = append(w.leases[:i:i], w.leases[i+1:]...)
			break
		}
	}
	for _, key := range w.inOrder(func(r *record) bool { return r.lease == gone }) {
		r := w.records[key]
		r.release()
		if r.intent == intendDelete && !r.mayExist() {
			w.forget(key, r)
		} else {
			w.restore(key, r)
		}
	}
	w.checkBarriers()
}

// revoke ends all leases, and so deletes the keys under them.
func (w *Writer) revoke(ctx context.Context) error {
	var failures []error
	for len(w.leases) > 0 {
		l := w.leases[0]
		if err := w.c.Revoke(ctx, l.id); err != nil && !errors.Is(err, ErrLeaseLost) {
			failures = append(failures, err)
		}
		w.mu.Lock()
		w.leases = w.leases[1:]
		w.mu.Unlock()
	}
	if len(failures) > 0 {
		return fmt.Errorf("the keys stay until their leases end, within %v: %w", w.cfg.TTL, errors.Join(failures...))
	}
	return nil
}
