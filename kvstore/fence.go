// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// ErrFenced indicates that somebody else has taken the fence behind which was
// to be written. What was to be written is not.
var ErrFenced = errors.New("another one has taken over")

// Fence is a key as its holder wrote it. Of all who take the same key's fence
// only the last one holds it, and nothing is written behind the fence of the
// others, whatever they believe, from the moment on when it was taken: what is
// written behind a fence is one transaction with the comparison.
//
// It needs no lease and no clock, and so gives safety whatever election says
// who should take it.
type Fence struct {
	Key      string
	Revision int64 // in which the holder wrote the key
}

func (f Fence) holds() clientv3.Cmp {
	return clientv3.Compare(clientv3.ModRevision(f.Key), "=", f.Revision)
}

// Held is the condition that a fence holds, as a part of another transaction,
// such as one of Lock.Txn.
func (f Fence) Held() Op { return Op{Kind: OpUnchanged, Key: f.Key, Revision: f.Revision} }

// TakeFence writes key and so takes its fence from whoever has it. entitled is
// asked after the present holder was read, and before the fence is taken from
// it: one who was entitled, was then suspended, and was succeeded meanwhile
// takes nothing from its successor. It returns entitled's error, and ErrFenced
// when somebody else was quicker.
func (c *Client) TakeFence(ctx context.Context, key string, value []byte, entitled func(context.Context) error) (Fence, error) {
	before, _, err := c.Get(ctx, key)
	if err != nil {
		return Fence{}, fmt.Errorf("take the fence: %w", err)
	}
	if err := entitled(ctx); err != nil {
		return Fence{}, fmt.Errorf("take the fence %s: %w", key, err)
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.etcd.Txn(ctx).
		If(Fence{key, before.Revision}.holds()).
		Then(clientv3.OpPut(key, string(value))).
		Commit()
	switch {
	case err != nil:
		return Fence{}, fmt.Errorf("take the fence %s: %w", key, c.explain(err))
	case !resp.Succeeded:
		return Fence{}, fmt.Errorf("take the fence %s: %w", key, ErrFenced)
	}
	return Fence{key, resp.Header.Revision}, nil
}

// AwaitFenced waits until the fence is taken by somebody else, or ctx ends,
// and returns ErrFenced or ctx's error, or another one when that will not be
// known any more, as in an etcd that has another history.
func (c *Client) AwaitFenced(ctx context.Context, f Fence) error {
	var pause backoff
	for {
		err := c.waitReady(ctx)
		if err == nil {
			var now KV
			if now, _, err = c.Get(ctx, f.Key); err == nil && now.Revision != f.Revision {
				return fmt.Errorf("fence %s: %w", f.Key, ErrFenced)
			}
		}
		if err == nil {
			err = c.awaitChange(ctx, f.Key, f.Revision)
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && permanent(err):
			return err
		case err == nil:
			pause = backoff{}
		case !pause.wait(ctx):
			return ctx.Err()
		}
	}
}

// TxnBehind does all of ops, up to 100 of different keys, at one revision if
// the fence holds, and none otherwise. It returns ErrFenced where the fence
// does not hold, and ErrExists where a condition of ops does not. With any
// other error it may have been done or not.
func (c *Client) TxnBehind(ctx context.Context, f Fence, ops ...Op) error {
	do, err := Attempt(ops).op()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.etcd.Txn(ctx).If(f.holds()).Then(do).Commit()
	switch {
	case err != nil:
		return fmt.Errorf("write %s: %w", keysOf(ops), c.explain(err))
	case !resp.Succeeded:
		return fmt.Errorf("write %s: %w", keysOf(ops), ErrFenced)
	case !Attempt(ops).done(resp.Responses[0].GetResponseTxn()):
		return fmt.Errorf("write %s: %w", keysOf(ops), ErrExists)
	}
	return nil
}

// DeleteBehind deletes those of keys that nobody has written since they were
// read, as long as the fence holds, and returns how many it deleted, also when
// it could not try all. It returns ErrFenced where the fence does not hold.
func (c *Client) DeleteBehind(ctx context.Context, f Fence, read ...KV) (deleted int, err error) {
	for len(read) > 0 {
		n := min(len(read), writeBatch)
		some, err := c.deleteBatchBehind(ctx, f, read[:n])
		deleted += some
		if err != nil {
			return deleted, err
		}
		read = read[n:]
	}
	return deleted, nil
}

func (c *Client) deleteBatchBehind(ctx context.Context, f Fence, read []KV) (deleted int, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	ops := make([]clientv3.Op, len(read))
	for i, kv := range read {
		unchanged := []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(kv.Key), "=", kv.Revision)}
		ops[i] = clientv3.OpTxn(unchanged, []clientv3.Op{clientv3.OpDelete(kv.Key)}, nil)
	}
	resp, err := c.etcd.Txn(ctx).If(f.holds()).Then(ops...).Commit()
	switch {
	case err != nil:
		return 0, fmt.Errorf("delete %d keys such as %s: %w", len(read), read[0].Key, c.explain(err))
	case !resp.Succeeded:
		return 0, fmt.Errorf("delete %d keys such as %s: %w", len(read), read[0].Key, ErrFenced)
	}
	for _, r := range resp.Responses {
		if r.GetResponseTxn().Succeeded {
			deleted++
		}
	}
	return deleted, nil
}
