// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// writeBatch bounds the keys of one transaction. etcd allows 128
	// operations by default, and takes those of the outer transaction from
	// the allowance of the inner ones, which need two.
	writeBatch = 100
	// writeBytes bounds the text of one transaction, unless a single key has
	// more; etcd allows 1.5 MiB by default.
	writeBytes = 512 << 10
)

// write is one key's part of a transaction: a record as it was when taken.
type write struct {
	key    string
	intent intent
	value  []byte
	said   uint64
	lease  *writerLease
	made   []byte
}

// take returns the next writes, at most one per key, those of Set with a
// lease, for which it asks etcd if need be. They leave the queue.
func (w *Writer) take(ctx context.Context) ([]write, error) {
	for {
		batch, leaseless := w.takeQueued()
		if len(batch) > 0 || !leaseless {
			return batch, nil
		}
		if err := w.grant(ctx); err != nil {
			return nil, err
		}
	}
}

// takeQueued takes from the queue until the batch is full or, leaseless, a key
// comes that no lease has room for.
func (w *Writer) takeQueued() (batch []write, leaseless bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var held []string // canaries that something is missing before
	taken, size := 0, 0
	for _, key := range w.queue {
		r := w.records[key]
		if r != nil && r.intent == intendDelete && !r.mayExist() {
			w.forget(key, r) // its creation, under way when it was said, came to nothing
			r = nil
		}
		if r == nil || !r.queued { // deleted before it was ever written
			taken++
			continue
		}
		if r.canary != nil {
			if w.behind(r) {
				held = append(held, key)
				taken++
				continue
			}
			r.value = r.canary()
		}
		size += len(key) + 2*len(r.value) // compared and put
		if len(batch) == writeBatch || len(batch) > 0 && size > writeBytes {
			break
		}
		if r.intent == intendSet && r.lease == nil {
			if r.lease = w.leaseFor(); r.lease == nil {
				leaseless = true
				break
			}
			r.lease.keys++
		}
		r.queued, r.taken = false, true
		batch = append(batch, write{key: key, intent: r.intent, value: r.value, said: r.said, lease: r.lease, made: r.made})
		taken++
	}
	w.queue = slices.Replace(w.queue, 0, taken, held...)
	return batch, leaseless
}

// op is the write as an operation: it changes etcd only if need be, and only
// if it may.
func (x write) op() clientv3.Op {
	switch x.intent {
	case intendSet:
		same := []clientv3.Cmp{
			clientv3.Compare(clientv3.Value(x.key), "=", string(x.value)),
			clientv3.Compare(clientv3.LeaseValue(x.key), "=", int64(x.lease.id)),
		}
		return clientv3.OpTxn(same, nil, []clientv3.Op{clientv3.OpPut(x.key, string(x.value), clientv3.WithLease(clientv3.LeaseID(x.lease.id)))})
	case intendCreate:
		absent := []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(x.key), "=", 0)}
		return clientv3.OpTxn(absent,
			[]clientv3.Op{clientv3.OpPut(x.key, string(x.value))},
			[]clientv3.Op{clientv3.OpGet(x.key)})
	}
	if x.lease != nil { // under which only this writer puts anything
		ours := []clientv3.Cmp{clientv3.Compare(clientv3.LeaseValue(x.key), "=", int64(x.lease.id))}
		return clientv3.OpTxn(ours, []clientv3.Op{clientv3.OpDelete(x.key)}, nil)
	}
	ours := []clientv3.Cmp{
		clientv3.Compare(clientv3.Value(x.key), "=", string(x.made)),
		clientv3.Compare(clientv3.LeaseValue(x.key), "=", int64(0)),
	}
	return clientv3.OpTxn(ours, []clientv3.Op{clientv3.OpDelete(x.key)}, nil)
}

// write makes a batch true. Its error means that nothing more should be tried
// for now; what is not done then is queued again, or has its error noted and
// waits for the next verification.
func (w *Writer) write(ctx context.Context, batch []write) error {
	err := w.commit(ctx, batch)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		w.requeue(batch)
		return errors.Join(err, w.keepAlive(ctx, leasesOf(batch)))
	case !refused(err):
		w.requeue(batch)
		return err
	}
	// Some key is refused, and the transaction with it: find out which.
	failures := 0
	for i, x := range batch {
		one := batch[i : i+1]
		switch err = w.commit(ctx, one); {
		case err == nil:
		case refused(err):
			failures++
			w.settle(x, nil, fmt.Errorf("write %s: %w", x.key, err))
		default:
			w.requeue(batch[i:])
			return err
		}
	}
	if failures == len(batch) {
		return err
	}
	return nil
}

// refused reports whether etcd answered that it will not do what was asked,
// now or later, rather than that it cannot at the moment.
func refused(err error) bool {
	var e rpctypes.EtcdError
	if !errors.As(err, &e) {
		return status.Code(err) == codes.ResourceExhausted // the message is too large to be sent
	}
	switch e.Code() {
	case codes.InvalidArgument, codes.PermissionDenied, codes.FailedPrecondition, codes.OutOfRange:
		return true
	}
	return false
}

func leasesOf(batch []write) []*writerLease {
	var leases []*writerLease
	for _, x := range batch {
		if x.lease != nil && !slices.Contains(leases, x.lease) {
			leases = append(leases, x.lease)
		}
	}
	return leases
}

// commit writes a batch in one transaction and settles it.
func (w *Writer) commit(ctx context.Context, batch []write) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	ops := make([]clientv3.Op, len(batch))
	for i, x := range batch {
		ops[i] = x.op()
	}
	txn := w.c.etcd.Txn(ctx)
	if w.fenced() {
		txn = txn.If(w.cfg.Fence.holds())
	}
	resp, err := txn.Then(ops...).Commit()
	switch {
	case err != nil:
		return w.c.explain(err)
	case !resp.Succeeded:
		return ErrFenced
	}
	for i, x := range batch {
		w.settle(x, resp.Responses[i].GetResponseTxn(), nil)
	}
	return nil
}

// settle notes what became of a write: its part of the answer, or its error.
func (w *Writer) settle(x write, resp *etcdserverpb.TxnResponse, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.records[x.key]
	if r == nil {
		return
	}
	r.taken = false
	switch {
	case err != nil:
		if x.intent == intendSet && !r.held && r.lease == x.lease {
			r.release() // it was refused, so it is not there
		}
	case x.intent == intendSet:
		r.made, r.held = nil, r.lease == x.lease
	case x.intent == intendCreate && resp.Succeeded:
		r.made = x.value
	case x.intent == intendCreate:
		err = differs(x, resp)
	default:
		r.made = nil
	}
	if err == nil {
		r.since = r.said // what was said meanwhile is what is missing now
	}
	if r.said == x.said {
		r.err = err
		if r.intent == intendDelete && err == nil {
			w.forget(x.key, r)
		}
	}
	w.checkBarriers()
}

// differs judges a key that existed when it was to be created.
func differs(x write, resp *etcdserverpb.TxnResponse) error {
	for _, part := range resp.Responses {
		for _, kv := range part.GetResponseRange().GetKvs() {
			if string(kv.Value) != string(x.value) {
				return fmt.Errorf("create %s: %w", x.key, ErrExists)
			}
		}
	}
	return nil
}

// requeue puts writes that were not done back to where they were taken from.
func (w *Writer) requeue(batch []write) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var keys []string
	for _, x := range batch {
		r := w.records[x.key]
		if r == nil {
			continue
		}
		r.taken = false
		if !r.queued {
			r.queued = true
			keys = append(keys, x.key)
		}
	}
	w.queue = slices.Insert(w.queue, 0, keys...)
}
