// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Attempt is what is done if it may be: all of its writes where all of its
// conditions hold, and nothing otherwise. It may have one OpNone.
type Attempt []Op

// ErrTooMuch indicates an Attempt with more than one OpNone.
var ErrTooMuch = errors.New("more than one condition of a kind that may be there once")

// AttemptBehind makes attempts of different keys, each by itself, at one
// revision for every 50 of them, as long as the fence holds. It returns what
// became of them: nil where an attempt was done, ErrExists where a condition of
// it does not hold, and another error where etcd refuses it. An error beside
// that tells why no more was tried, ErrFenced if the fence does not hold; then
// there are as many results as are known, and the last 50 may have been done
// or not.
func (c *Client) AttemptBehind(ctx context.Context, f Fence, attempts []Attempt) (results []error, err error) {
	results = make([]error, 0, len(attempts))
	for len(results) < len(attempts) {
		rest := attempts[len(results):]
		batch := rest[:min(len(rest), attemptBatch)]
		some, err := c.attemptBatch(ctx, f, batch)
		if err != nil && refused(err) {
			some, err = c.attemptEach(ctx, f, batch) // some attempt is refused, and the transaction with it
		}
		results = append(results, some...)
		if err != nil {
			return results, err
		}
	}
	return results, nil
}

// attemptBatch bounds the attempts of one transaction, see writeBatch.
const attemptBatch = 50

func (c *Client) attemptEach(ctx context.Context, f Fence, attempts []Attempt) (results []error, err error) {
	for i := range attempts {
		one, err := c.attemptBatch(ctx, f, attempts[i:i+1])
		switch {
		case err == nil:
			results = append(results, one...)
		case refused(err):
			results = append(results, err)
		default:
			return results, err
		}
	}
	return results, nil
}

func (c *Client) attemptBatch(ctx context.Context, f Fence, attempts []Attempt) (results []error, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	ops := make([]clientv3.Op, len(attempts))
	for i, a := range attempts {
		if ops[i], err = a.op(); err != nil {
			return nil, err
		}
	}
	first := keysOf(attempts[0])
	resp, err := c.etcd.Txn(ctx).If(f.holds()).Then(ops...).Commit()
	switch {
	case err != nil:
		return nil, fmt.Errorf("%d attempts such as of %s: %w", len(attempts), first, c.explain(err))
	case !resp.Succeeded:
		return nil, fmt.Errorf("%d attempts such as of %s: %w", len(attempts), first, ErrFenced)
	}
	for i, r := range resp.Responses {
		if attempts[i].done(r.GetResponseTxn()) {
			results = append(results, nil)
		} else {
			results = append(results, ErrExists)
		}
	}
	return results, nil
}

// op is the attempt, and more with it, as a transaction within another one. That no key of a
// range has a value etcd can only compare where there are keys at all, so that
// it takes two comparisons in turn.
func (a Attempt) op(more ...clientv3.Op) (clientv3.Op, error) {
	as, do := transaction(a)
	do = append(do, more...)
	none, ok, err := a.none()
	if err != nil || !ok {
		return clientv3.OpTxn(as, do, nil), err
	}
	empty := clientv3.Compare(clientv3.CreateRevision(none.Key), "=", 0).WithPrefix()
	others := clientv3.Compare(clientv3.Value(none.Key), "!=", string(none.Value)).WithPrefix()
	otherwise := clientv3.OpTxn([]clientv3.Cmp{others}, do, nil)
	return clientv3.OpTxn(as, []clientv3.Op{clientv3.OpTxn([]clientv3.Cmp{empty}, do, []clientv3.Op{otherwise})}, nil), nil
}

// none is the condition that op gives two comparisons.
func (a Attempt) none() (none Op, ok bool, err error) {
	for _, op := range a {
		if op.Kind != OpNone {
			continue
		}
		if ok {
			return Op{}, false, fmt.Errorf("attempt of %s: %w", keysOf(a), ErrTooMuch)
		}
		none, ok = op, true
	}
	return none, ok, nil
}

// done reads off the answer whether the attempt was done.
func (a Attempt) done(r *etcdserverpb.TxnResponse) bool {
	if _, ok, _ := a.none(); !ok || !r.Succeeded {
		return r.Succeeded
	}
	inner := r.Responses[0].GetResponseTxn()
	return inner.Succeeded || inner.Responses[0].GetResponseTxn().Succeeded
}
