// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"fmt"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Leadership is an election that was won: the lock of a path whose key has a
// value, by which the others know the leader. It is the protocol of etcd's own
// concurrency package. What only the leader may write is written with the
// methods of Lock.
type Leadership struct{ *Lock }

// Campaign puts oneself forward as leader of a path and waits, as long as ctx
// lives, until one is. The leadership must be given up with Resign; it ends
// with its lease, which it has for itself.
func (c *Client) Campaign(ctx context.Context, path string, value []byte) (*Leadership, error) {
	l, err := c.acquire(ctx, path, value, true)
	if err != nil {
		return nil, err
	}
	return &Leadership{l}, nil
}

// Proclaim changes the leader's value. It returns ErrLockLost if one is not
// the leader any more.
func (l *Leadership) Proclaim(ctx context.Context, value []byte) error {
	return l.Txn(ctx, Op{Kind: OpPut, Key: l.key, Value: value, Lease: l.lease.Lease()})
}

// Resign gives the leadership up, as Unlock does a lock.
func (l *Leadership) Resign(ctx context.Context) error { return l.Unlock(ctx) }

// Leader returns the key and value of the leader of a path. ok tells whether
// there is one.
func (c *Client) Leader(ctx context.Context, path string) (leader KV, ok bool, err error) {
	leader, ok, _, err = c.leader(ctx, path)
	return leader, ok, err
}

func (c *Client) leader(ctx context.Context, path string) (leader KV, ok bool, at int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.etcd.Get(ctx, path+"/", clientv3.WithFirstCreate()...)
	if err != nil {
		return KV{}, false, 0, fmt.Errorf("leader of %s: %w", path, c.explain(err))
	}
	if len(resp.Kvs) == 0 {
		return KV{}, false, resp.Header.Revision, nil
	}
	return kvOf(resp.Kvs[0]), true, resp.Header.Revision, nil
}

// Observe calls observe with the leader of a path, whenever there is another
// one, or none, or the leader's value has changed. Changes in quick succession
// may be told as one. It ends with ctx, and returns nil then, or with
// ErrHistoryChanged, ErrClosed or a refusal of etcd's; other failures are
// retried.
func (c *Client) Observe(ctx context.Context, path string, observe func(leader KV, ok bool)) error {
	var pause backoff
	told := int64(-1) // revision of what was last told, 0: there was no leader
	for {
		at, err := c.observe(ctx, path, &told, observe)
		if err == nil {
			err = c.awaitChange(ctx, path+"/", at, clientv3.WithPrefix())
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && permanent(err):
			return err
		case err == nil:
			pause = backoff{}
		case !pause.wait(ctx):
			return nil
		}
	}
}

// observe tells the present leader if it is not what was told last, and returns
// the revision up to which that is the truth.
func (c *Client) observe(ctx context.Context, path string, told *int64, observe func(leader KV, ok bool)) (int64, error) {
	if err := c.waitReady(ctx); err != nil {
		return 0, err
	}
	leader, ok, at, err := c.leader(ctx, path)
	if err == nil && leader.Revision != *told {
		*told = leader.Revision
		observe(leader, ok)
	}
	return at, err
}
