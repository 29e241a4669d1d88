// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"fmt"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// Op is a write that is part of a guarded transaction.
type Op struct {
	Kind  OpKind
	Key   string
	Value []byte  // not of OpDelete
	Lease LeaseID // under which the key is put; 0: none
	// Revision is for OpUnchanged alone: when the key was last written; 0: it
	// does not exist.
	Revision int64
}

// OpKind says what an Op does.
type OpKind uint8

const (
	OpPut       OpKind = iota // write the key, whatever it holds
	OpCreate                  // write the key, which must not exist
	OpDelete                  // delete the key, if it exists
	OpAbsent                  // write nothing: there must be no key that begins with Key
	OpEqual                   // write nothing: the key must have this value
	OpUnchanged               // write nothing: the key must not have been written since Revision
	OpNone                    // write nothing: no key that begins with Key may have this value; once in a transaction
)

// Put writes a key, without a lease, if the lock is held.
func (l *Lock) Put(ctx context.Context, key string, value []byte) error {
	return l.Txn(ctx, Op{Kind: OpPut, Key: key, Value: value})
}

// Create writes a key that must not exist, without a lease, if the lock is
// held. It returns ErrExists if the key exists.
func (l *Lock) Create(ctx context.Context, key string, value []byte) error {
	return l.Txn(ctx, Op{Kind: OpCreate, Key: key, Value: value})
}

// Delete deletes a key if the lock is held. An absent one is fine.
func (l *Lock) Delete(ctx context.Context, key string) error {
	return l.Txn(ctx, Op{Kind: OpDelete, Key: key})
}

// Txn does all of ops, up to 100 of different keys, at one revision if the
// lock is held, and none otherwise. It returns ErrLockLost where the lock is
// not held, and ErrExists where a key to be created exists, or one is not
// absent, equal or unchanged as ops want it. With any other error it may have been
// done or not.
func (l *Lock) Txn(ctx context.Context, ops ...Op) error { return l.txn(ctx, ops, nil) }

// Finish does what Txn does, and gives the lock back at the same revision.
// After an error the lock has still to be given back with Unlock, which does
// nothing otherwise.
func (l *Lock) Finish(ctx context.Context, ops ...Op) error {
	l.giving.Lock()
	defer l.giving.Unlock()
	if err := l.txn(ctx, ops, []clientv3.Op{clientv3.OpDelete(l.key)}); err != nil {
		return err
	}
	l.over(errLockGiven)
	l.left, l.given = true, true
	_, _ = l.c.leases.leave(ctx, l.c, l.lease) // there is nothing under it that could stay
	return nil
}

// txn does ops, and more if they can be done.
func (l *Lock) txn(ctx context.Context, ops []Op, more []clientv3.Op) error {
	if err := l.err(); err != nil {
		return l.lost(ops, err)
	}
	do, err := Attempt(ops).op(more...)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := l.c.etcd.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(l.key), "=", l.revision)).
		Then(do).
		Commit()
	switch {
	case err != nil:
		return fmt.Errorf("write %s under lock %s: %w", keysOf(ops), l.path, l.c.explain(err))
	case !resp.Succeeded:
		err := fmt.Errorf("%s is gone", l.key)
		l.c.leases.retire(l.lease) // who took the key may have put it again
		l.over(err)
		return l.lost(ops, err)
	case !Attempt(ops).done(resp.Responses[0].GetResponseTxn()):
		return fmt.Errorf("write %s under lock %s: %w", keysOf(ops), l.path, ErrExists)
	}
	return nil
}

// transaction makes of ops what must be so, and what is done then; OpNone is
// for Attempt.op.
func transaction(ops []Op) (as []clientv3.Cmp, do []clientv3.Op) {
	for _, op := range ops {
		switch op.Kind {
		case OpCreate:
			as = append(as, clientv3.Compare(clientv3.CreateRevision(op.Key), "=", 0))
			fallthrough
		case OpPut:
			do = append(do, clientv3.OpPut(op.Key, string(op.Value), clientv3.WithLease(clientv3.LeaseID(op.Lease))))
		case OpDelete:
			do = append(do, clientv3.OpDelete(op.Key))
		case OpAbsent: // all keys of the range must have been created at 0, which none has
			as = append(as, clientv3.Compare(clientv3.CreateRevision(op.Key), "=", 0).WithPrefix())
		case OpEqual:
			as = append(as, clientv3.Compare(clientv3.Value(op.Key), "=", string(op.Value)))
		case OpUnchanged:
			as = append(as, clientv3.Compare(clientv3.ModRevision(op.Key), "=", op.Revision))
		}
	}
	return as, do
}

func (l *Lock) lost(ops []Op, cause error) error {
	return fmt.Errorf("write %s under lock %s: %w: %w", keysOf(ops), l.path, ErrLockLost, cause)
}

func keysOf(ops []Op) string {
	keys := make([]string, len(ops))
	for i, op := range ops {
		keys[i] = op.Key
	}
	return strings.Join(keys, ", ")
}
