// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"fmt"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// LockSweeper frees locks that are held for too long by a holder that lives,
// and so renews its lease, but has lost its way. It takes nothing from the
// safety of what the lock guards: the holder's next write finds it lost. Not
// safe for concurrent use.
type LockSweeper struct {
	c      *Client
	prefix string
	held   map[string]int64 // keys that held a lock at the last sweep, and their create revisions
}

// NewLockSweeper returns a sweeper of all locks whose paths begin with prefix.
// There must be no election among them, since a leader stays.
func NewLockSweeper(c *Client, prefix string) *LockSweeper {
	return &LockSweeper{c: c, prefix: prefix}
}

// Sweep deletes the keys that hold their locks and did so at the last sweep,
// and returns them, also beside an error. How often it is called is how long a
// lock may be held.
func (s *LockSweeper) Sweep(ctx context.Context) (freed []string, err error) {
	held, err := s.holders(ctx)
	if err != nil {
		return nil, fmt.Errorf("list locks: %w", err)
	}
	for key, created := range held {
		if s.held[key] != created {
			continue
		}
		deleted, err := s.free(ctx, key, created)
		if err != nil {
			s.held = held
			return freed, fmt.Errorf("free %s: %w", key, err)
		}
		if deleted {
			freed = append(freed, key)
		}
		delete(held, key)
	}
	s.held = held
	return freed, nil
}

// holders returns the oldest key of each path, with its create revision.
func (s *LockSweeper) holders(ctx context.Context) (map[string]int64, error) {
	at, err := s.c.head(ctx, prefixed(s.prefix))
	if err != nil {
		return nil, err
	}
	type holder struct {
		key     string
		created int64
	}
	byPath := make(map[string]holder)
	err = s.c.list(ctx, prefixed(s.prefix), at.revision, func(chunk []*keyValue) error {
		for _, kv := range chunk {
			key := string(kv.Key)
			path := key[:strings.LastIndexByte(key, '/')+1] // a label string may itself hold "/"
			if h, ok := byPath[path]; !ok || kv.CreateRevision < h.created {
				byPath[path] = holder{key, kv.CreateRevision}
			}
		}
		return nil
	})
	held := make(map[string]int64, len(byPath))
	for _, h := range byPath {
		held[h.key] = h.created
	}
	return held, err
}

// free deletes a key unless it was created again since.
func (s *LockSweeper) free(ctx context.Context, key string, created int64) (deleted bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := s.c.etcd.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", created)).
		Then(clientv3.OpDelete(key)).
		Commit()
	if err != nil {
		return false, s.c.explain(err)
	}
	return resp.Succeeded, nil
}
