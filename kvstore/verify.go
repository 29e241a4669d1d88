// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// verify compares all keys with etcd, and queues those that are not there as
// they should be: deleted or changed by others, or refused before.
func (w *Writer) verify(ctx context.Context) error {
	w.mu.Lock()
	keys := w.inOrder(func(r *record) bool { return r.intent != intendDelete || r.err != nil })
	w.mu.Unlock()
	for batch := range slices.Chunk(keys, writeBatch) {
		if err := w.verifyBatch(ctx, batch); err != nil {
			return err
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.doubt = false
	return nil
}

// verifyBatch reads keys at one revision, in a transaction without writes,
// which costs etcd no proposal.
func (w *Writer) verifyBatch(ctx context.Context, keys []string) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	ops := make([]clientv3.Op, len(keys))
	for i, key := range keys {
		ops[i] = clientv3.OpGet(key)
	}
	resp, err := w.c.etcd.Txn(ctx).Then(ops...).Commit()
	if err != nil {
		return fmt.Errorf("verify: %w", w.c.explain(err))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, key := range keys {
		var stored *keyValue
		if kvs := resp.Responses[i].GetResponseRange().GetKvs(); len(kvs) > 0 {
			stored = kvs[0]
		}
		r := w.records[key]
		if r == nil || r.queued || r.err == nil && r.heldBy(stored) {
			continue
		}
		if r.err != nil {
			w.enqueue(key, r)
			continue
		}
		w.cfg.Log.Info("etcd key is not as it should be: writing it again", "key", key, "exists", stored != nil)
		w.restore(key, r)
	}
	return nil
}

// heldBy reports whether a key of etcd, nil if it is absent, is as it should
// be. It is not asked of keys to delete.
func (r *record) heldBy(stored *keyValue) bool {
	if stored == nil || string(stored.Value) != string(r.value) {
		return false
	}
	return r.intent == intendCreate || r.lease != nil && stored.Lease == int64(r.lease.id)
}

// saw tells what a watch saw of a key, and reports whether the key is one that
// is to be there. If it is not as it should be it is put back at once. What was
// seen may be old, which costs a comparison in etcd and no more.
func (w *Writer) saw(key string, value []byte, exists bool) (own bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.records[key]
	if r == nil || r.intent == intendDelete {
		return false
	}
	right := exists && string(value) == string(r.value)
	if !right && !r.queued && !errors.Is(r.err, ErrExists) {
		w.cfg.Log.Debug("etcd key is seen not to be as it should be: writing it again", "key", key, "exists", exists)
		w.restore(key, r)
	}
	return true
}
