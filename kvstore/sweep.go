// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// LockSweeper frees locks that are held for too long by a holder that lives,
// and so renews its lease, but has lost its way. It takes nothing from the
// safety of what the lock guards: the holder's next write finds it lost. Not
// safe for concurrent use.
type LockSweeper struct {
	c      *Client
	fence  Fence
	prefix string
	held   map[string]int64 // keys that held a lock at the last sweep, and their revisions
}

// NewLockSweeper returns a sweeper of all locks whose paths begin with prefix,
// for as long as the fence holds. There must be no election among them, since
// a leader stays.
func NewLockSweeper(c *Client, f Fence, prefix string) *LockSweeper {
	return &LockSweeper{c: c, fence: f, prefix: prefix}
}

// Sweep deletes the keys that hold their locks, did so at the last sweep, and
// have not been written since, and returns them, also beside an error: of a key
// that etcd refuses to delete, or why no more was tried, which is ErrFenced if
// the fence does not hold. How often it is called is how long a lock may be
// held.
func (s *LockSweeper) Sweep(ctx context.Context) (freed []string, err error) {
	held, err := s.holders(ctx)
	if err != nil {
		return nil, fmt.Errorf("list locks: %w", err)
	}
	var (
		leaked   []string
		attempts []Attempt
	)
	for key, revision := range held {
		if s.held[key] == revision {
			leaked = append(leaked, key)
			attempts = append(attempts, Attempt{{Kind: OpUnchanged, Key: key, Revision: revision}, {Kind: OpDelete, Key: key}})
		}
	}
	s.held = held
	results, err := s.c.AttemptBehind(ctx, s.fence, attempts)
	for i, result := range results {
		switch {
		case result == nil:
			freed = append(freed, leaked[i])
			delete(held, leaked[i])
		case !errors.Is(result, ErrExists):
			err = errors.Join(err, fmt.Errorf("free %s: %w", leaked[i], result))
		}
	}
	slices.Sort(freed)
	return freed, err
}

// holders returns the oldest key of each path, with its revision.
func (s *LockSweeper) holders(ctx context.Context) (map[string]int64, error) {
	at, err := s.c.head(ctx, prefixed(s.prefix))
	if err != nil {
		return nil, err
	}
	type holder struct {
		key               string
		created, modified int64
	}
	byPath := make(map[string]holder)
	err = s.c.list(ctx, prefixed(s.prefix), at.revision, func(chunk []*keyValue) error {
		for _, kv := range chunk {
			key := string(kv.Key)
			path := key[:strings.LastIndexByte(key, '/')+1] // a label string may itself hold "/"
			if h, ok := byPath[path]; !ok || kv.CreateRevision < h.created {
				byPath[path] = holder{key, kv.CreateRevision, kv.ModRevision}
			}
		}
		return nil
	})
	held := make(map[string]int64, len(byPath))
	for _, h := range byPath {
		held[h.key] = h.modified
	}
	return held, err
}
