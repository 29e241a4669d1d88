// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"iter"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Reads and writes that are done once, for people at a command line. What
// should stay true is for a Watcher and a Writer.

// deleteBatch bounds the keys that one transaction of DeletePrefix deletes:
// etcd serves nothing else while it applies one.
const deleteBatch = 1000

func kvOf(kv *keyValue) KV {
	return KV{Key: string(kv.Key), Value: kv.Value, Revision: kv.ModRevision, Version: kv.Version, Lease: LeaseID(kv.Lease)}
}

// All reads the keys that begin with prefix, in ascending order and at one
// revision, without holding them all in memory: a value is good until the next
// one is asked for. An error is the last that it yields.
func (c *Client) All(ctx context.Context, prefix string) iter.Seq2[KV, error] {
	return func(yield func(KV, error) bool) {
		at, err := c.head(ctx, prefixed(prefix))
		if err == nil {
			err = c.list(ctx, prefixed(prefix), at.revision, func(chunk []*keyValue) error {
				for _, kv := range chunk {
					if !yield(kvOf(kv), nil) {
						return errEnough
					}
				}
				return nil
			})
		}
		if err != nil && !errors.Is(err, errEnough) {
			yield(KV{}, err)
		}
	}
}

// errEnough ends a list whose reader wants no more of it.
var errEnough = errors.New("enough was read")

// First reads the first key that begins with prefix. ok tells whether there is
// one.
func (c *Client) First(ctx context.Context, prefix string) (kv KV, ok bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.etcd.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithLimit(1))
	if err != nil {
		return KV{}, false, fmt.Errorf("list %s: %w", prefix, c.explain(err))
	}
	if len(resp.Kvs) == 0 {
		return KV{}, false, nil
	}
	return kvOf(resp.Kvs[0]), true, nil
}

// Put writes a key, without a lease.
func (c *Client) Put(ctx context.Context, key string, value []byte) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if _, err := c.etcd.Put(ctx, key, string(value)); err != nil {
		return fmt.Errorf("put %s: %w", key, c.explain(err))
	}
	return nil
}

// Delete deletes a key, and reports whether it existed.
func (c *Client) Delete(ctx context.Context, key string) (existed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.etcd.Delete(ctx, key)
	if err != nil {
		return false, fmt.Errorf("delete %s: %w", key, c.explain(err))
	}
	return resp.Deleted > 0, nil
}

// DeletePrefix deletes the keys that begin with prefix, in transactions of
// about 1,000, and returns how many it deleted, also when it could not delete
// all. Keys that come while it runs may stay.
func (c *Client) DeletePrefix(ctx context.Context, prefix string) (deleted int64, err error) {
	start, end := prefix, clientv3.GetPrefixRangeEnd(prefix)
	for more := true; more; {
		var n int64
		if n, start, more, err = c.deleteSome(ctx, start, end); err != nil {
			return deleted, fmt.Errorf("delete %s: %w", prefix, c.explain(err))
		}
		deleted += n
	}
	return deleted, nil
}

// deleteSome deletes the first keys from start on and before end, and returns
// where to go on.
func (c *Client) deleteSome(ctx context.Context, start, end string) (deleted int64, next string, more bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	found, err := c.etcd.Get(ctx, start, clientv3.WithRange(end), clientv3.WithLimit(deleteBatch), clientv3.WithKeysOnly())
	if err != nil || len(found.Kvs) == 0 {
		return 0, start, false, err
	}
	next = string(found.Kvs[len(found.Kvs)-1].Key) + "\x00"
	resp, err := c.etcd.Delete(ctx, start, clientv3.WithRange(next))
	if err != nil {
		return 0, start, false, err
	}
	return resp.Deleted, next, found.More, nil
}

// ListLeases reads all leases and the keys of each, leaving out leases that end
// meanwhile.
func (c *Client) ListLeases(ctx context.Context) ([]LeaseInfo, error) {
	ids, err := c.Leases(ctx)
	if err != nil {
		return nil, err
	}
	leases := make([]LeaseInfo, 0, len(ids))
	for _, id := range ids {
		info, err := c.TimeToLive(ctx, id)
		if errors.Is(err, ErrLeaseLost) {
			continue
		}
		if err != nil {
			return nil, err
		}
		leases = append(leases, info)
	}
	return leases, nil
}

// DeleteIfUnchanged deletes a key if nobody has written it since it was read,
// and reports whether it did.
func (c *Client) DeleteIfUnchanged(ctx context.Context, read KV) (deleted bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.etcd.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(read.Key), "=", read.Revision)).
		Then(clientv3.OpDelete(read.Key)).
		Commit()
	if err != nil {
		return false, fmt.Errorf("delete %s: %w", read.Key, c.explain(err))
	}
	return resp.Succeeded, nil
}
