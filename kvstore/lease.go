// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// lease is one lease of a Writer. Guarded by Writer.mu, but for id.
type lease struct {
	id      clientv3.LeaseID
	keys    int // records that name it
	renewAt time.Time
}

// leaseFor returns a lease with room for a key, nil if there is none. The
// caller holds mu.
func (w *Writer) leaseFor() *lease {
	for _, l := range w.leases {
		if l.keys < w.cfg.KeysPerLease {
			return l
		}
	}
	return nil
}

// grant gets another lease.
func (w *Writer) grant(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := w.c.etcd.Grant(ctx, int64(math.Ceil(w.cfg.TTL.Seconds())))
	if err != nil {
		return fmt.Errorf("grant a lease: %w", w.c.explain(err))
	}
	l := &lease{id: resp.ID, renewAt: time.Now().Add(renewAfter(resp.TTL))}
	w.mu.Lock()
	w.leases = append(w.leases, l)
	w.mu.Unlock()
	w.cfg.Log.Info("etcd lease granted", "lease", fmt.Sprintf("%x", int64(resp.ID)), "ttl", time.Duration(resp.TTL)*time.Second)
	return nil
}

// renewAfter is how long a lease of ttl seconds is left alone.
func renewAfter(ttl int64) time.Duration { return time.Duration(ttl) * time.Second / 3 }

// renew keeps alive the leases whose time has come.
func (w *Writer) renew(ctx context.Context) error {
	now := time.Now()
	var due []*lease
	w.mu.Lock()
	for _, l := range w.leases {
		if !now.Before(l.renewAt) {
			due = append(due, l)
		}
	}
	w.mu.Unlock()
	return w.keepAlive(ctx, due)
}

// keepAlive renews leases. One that etcd does not know any more is lost, which
// is no error: its keys are queued to be put under another one.
func (w *Writer) keepAlive(ctx context.Context, leases []*lease) error {
	for _, l := range leases {
		ttl, err := w.keepAliveOnce(ctx, l.id)
		if err != nil {
			return fmt.Errorf("keep lease %x alive: %w", int64(l.id), w.c.explain(err))
		}
		if ttl <= 0 {
			w.cfg.Log.Warn("etcd lease lost: its keys are put again", "lease", fmt.Sprintf("%x", int64(l.id)))
			w.lose(l)
			continue
		}
		w.mu.Lock()
		l.renewAt = time.Now().Add(renewAfter(ttl))
		w.mu.Unlock()
	}
	return nil
}

// keepAliveOnce renews a lease and returns what is left of it, in seconds, 0
// if it does not exist. The method of clientv3 would repeat itself without a
// pause while etcd has no leader.
func (w *Writer) keepAliveOnce(ctx context.Context, id clientv3.LeaseID) (ttl int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	stream, err := etcdserverpb.NewLeaseClient(w.c.etcd.ActiveConnection()).LeaseKeepAlive(ctx, w.c.callOptions()...)
	if err != nil {
		return 0, err
	}
	// An error of Send is told, and better, by Recv.
	_ = stream.Send(&etcdserverpb.LeaseKeepAliveRequest{ID: int64(id)})
	resp, err := stream.Recv()
	if errors.Is(rpctypes.Error(err), rpctypes.ErrLeaseNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return resp.TTL, nil
}

// lose drops a lease that is gone, and its keys with it, and has them put
// again in their old order.
func (w *Writer) lose(gone *lease) {
	w.mu.Lock()
	defer w.mu.Unlock()
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
			w.enqueue(key, r)
		}
	}
	w.checkReady()
}
