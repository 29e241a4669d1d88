// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// errDrifted indicates that a comparison found more amiss than is worth
// repairing key by key.
var errDrifted = errors.New("what is known differs from etcd in too many keys: listing anew")

// maxRepairs bounds the keys that one comparison repairs itself.
const maxRepairs = 1000

// suspect is a key that a list has otherwise than the view.
type suspect struct {
	key      string // relative to the prefix
	revision int64  // as listed; 0: it was not
}

// untilComparison returns how long it is until the next comparison is due. That
// does not depend on how long the watches before it lasted.
func (w *Watcher) untilComparison(every time.Duration) time.Duration {
	if every < 0 {
		return never
	}
	if w.compareAt.IsZero() {
		w.compareAt = time.Now().Add(every/2 + rand.N(every))
	}
	return max(0, time.Until(w.compareAt))
}

// compareAgain compares what is known with etcd, and returns when to do it next.
// It ends the watch with errDrifted when that is to be dealt with. A watch should have
// told of everything, but some versions of etcd have lost events.
func (w *Watcher) compareAgain(ctx context.Context, c *Client, end func(error)) time.Duration {
	w.compareAt = time.Time{}
	err := w.compare(ctx, c)
	switch {
	case ctx.Err() != nil:
		return never
	case errors.Is(err, errDrifted):
		end(err)
		return never
	case err != nil:
		w.failed(fmt.Errorf("compare %s: %w", w, err))
	}
	return w.untilComparison(c.cfg.CompareInterval)
}

// compare lists the keys at one revision, without their values, while the
// watch goes on. What differs is looked at again when the watch must have told
// of it; what differs still is repaired, by delivering it, and counted.
func (w *Watcher) compare(ctx context.Context, c *Client) error {
	head, err := c.head(ctx, w.of)
	if err != nil {
		return err
	}
	suspects, err := w.suspects(ctx, c, head.revision)
	if err != nil || len(suspects) == 0 {
		return err
	}
	// Three times, since a progress notification is believed when the next
	// one has come.
	if !sleep(ctx, 3*c.progressInterval()) {
		return ctx.Err()
	}
	w.viewMu.Lock()
	suspects = w.view.stillSuspect(suspects)
	w.viewMu.Unlock()
	if len(suspects) > maxRepairs {
		w.drift.Add(int64(len(suspects)))
		return errDrifted
	}
	for _, s := range suspects {
		if err := w.repair(ctx, c, s.key, head.revision); err != nil {
			return err
		}
	}
	return nil
}

func (w *Watcher) suspects(ctx context.Context, c *Client, revision int64) ([]suspect, error) {
	w.viewMu.Lock()
	w.view.known.markStale()
	w.viewMu.Unlock()
	var suspects []suspect
	err := c.list(ctx, w.of, revision, func(kvs []*keyValue) error {
		w.viewMu.Lock()
		defer w.viewMu.Unlock()
		suspects = w.view.compared(suspects, kvs)
		return nil
	}, clientv3.WithKeysOnly())
	if err != nil {
		return nil, err
	}
	w.viewMu.Lock()
	defer w.viewMu.Unlock()
	w.compares.Add(1)
	return w.view.unlisted(suspects, revision), nil
}

// repair looks at one key, and delivers it if the view was wrong.
func (w *Watcher) repair(ctx context.Context, c *Client, key string, revision int64) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.etcd.Get(ctx, w.of.start+key)
	if err != nil {
		return c.explain(err)
	}
	var kv *keyValue
	if len(resp.Kvs) > 0 {
		kv = resp.Kvs[0]
	}
	w.viewMu.Lock()
	defer w.viewMu.Unlock()
	repaired, err := w.view.repair([]byte(key), kv, revision)
	if repaired {
		w.drift.Add(1)
	}
	w.publish()
	return err
}

// compared adds to suspects those of a list's keys that are not known, or only
// as they were before. The others lose their mark.
func (v *view) compared(suspects []suspect, kvs []*keyValue) []suspect {
	for _, kv := range kvs {
		key, ok := v.relative(kv.Key)
		if !ok {
			continue
		}
		if e := v.known.find(key); e == nil || e.revision() < kv.ModRevision {
			suspects = append(suspects, suspect{string(key), kv.ModRevision})
		} else {
			e.keep()
		}
	}
	return suspects
}

// unlisted adds to suspects those that are known, since before the list's
// revision, and have kept their mark.
func (v *view) unlisted(suspects []suspect, revision int64) []suspect {
	listed := make(map[string]bool, len(suspects))
	for _, s := range suspects {
		listed[s.key] = true
	}
	for e := range v.known.all() {
		if e.stale() && e.revision() <= revision && !listed[string(v.known.key(e))] {
			suspects = append(suspects, suspect{key: string(v.known.key(e))})
		}
	}
	return suspects
}

// stillSuspect leaves out what the watch has told of since.
func (v *view) stillSuspect(suspects []suspect) []suspect {
	var still []suspect
	for _, s := range suspects {
		e := v.known.find([]byte(s.key))
		if s.revision == 0 && e != nil && e.alive() || s.revision > 0 && (e == nil || e.revision() < s.revision) {
			still = append(still, s)
		}
	}
	return still
}

// repair makes a suspect of the list at revision what it is now: kv, nil if it
// is absent. It reports whether the view was wrong, for which all that has
// happened to the key must have been applied.
func (v *view) repair(key []byte, kv *keyValue, revision int64) (wrong bool, err error) {
	defer v.flush()
	e := v.known.find(key)
	if kv == nil {
		if e == nil || !e.alive() || e.revision() > revision || v.at.revision < revision {
			return false, nil
		}
		last := e.revision()
		v.known.bury(e, revision)
		v.emit(Event{Kind: Deleted, Key: key, Revision: last})
		return true, nil
	}
	if kv.ModRevision > v.at.revision || e != nil && e.revision() >= kv.ModRevision {
		return false, nil
	}
	digest := uint32(maphash.Bytes(v.seed, kv.Value))
	if e == nil || !e.alive() {
		return true, v.create(e, key, kv, digest)
	}
	e.set(kv.ModRevision, digest)
	v.emit(Event{Kind: Modified, Key: key, Value: kv.Value, Revision: kv.ModRevision})
	return true, nil
}
