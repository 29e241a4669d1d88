// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"fmt"
	"slices"
)

// Canary wants key to tell that all that was said before is in etcd: it is set,
// to what value returns at that time, when every key said before is written or
// deleted, and not while one of them waits, fails or is lost with its lease.
// After that it is a key as those of Set; where it has to be put again, as in
// an etcd that was emptied, it again comes last, with a value of that time.
// value must not call the Writer.
func (w *Writer) Canary(key string, value func() []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r, ok := w.records[key]
	if !ok {
		r = &record{}
		w.records[key] = r
	}
	w.say(r)
	r.intent, r.canary = intendSet, value
	w.enqueue(key, r)
}

// behind reports whether something is missing that was said before a record.
// The caller holds mu.
func (w *Writer) behind(canary *record) bool {
	for _, r := range w.records {
		if r != canary && r.missing() && r.since < canary.said {
			return true
		}
	}
	return false
}

// barrier is passed when nothing is missing that was said up to a moment.
type barrier struct {
	said   uint64
	passed chan<- struct{} // is closed then
}

// Flush waits until all that was said before it is in etcd, while Run runs.
// Its error is that of ctx, with one of what etcd does not have.
func (w *Writer) Flush(ctx context.Context) error {
	passed := make(chan struct{})
	w.mu.Lock()
	w.barriers = append(w.barriers, barrier{w.said, passed})
	w.checkBarriers()
	w.mu.Unlock()
	select {
	case <-passed:
		return nil
	case <-ctx.Done():
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.barriers = slices.DeleteFunc(w.barriers, func(b barrier) bool { return b.passed == passed })
	for key, r := range w.records {
		switch {
		case r.missing() && r.err != nil:
			return fmt.Errorf("%w: %w", ctx.Err(), r.err)
		case r.missing() && w.lastErr != nil:
			return fmt.Errorf("write %s: %w: %w", key, ctx.Err(), w.lastErr)
		}
	}
	return ctx.Err()
}

// start makes Ready tell of what was said before.
func (w *Writer) start() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.started {
		w.started = true
		w.barriers = append(w.barriers, barrier{w.said, w.ready})
		w.checkBarriers()
	}
}

// checkBarriers lets those wait no more who have nothing to wait for. The
// caller holds mu.
func (w *Writer) checkBarriers() {
	if len(w.barriers) == 0 {
		return
	}
	w.barriers = slices.DeleteFunc(w.barriers, func(b barrier) bool {
		for _, r := range w.records {
			if r.missing() && r.since <= b.said {
				return false
			}
		}
		close(b.passed)
		return true
	})
}
