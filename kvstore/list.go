// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

type keyValue = mvccpb.KeyValue

// errSilent indicates that the server is connected and does not answer. A dead
// connection is found by gRPC's keepalive; this is for a server that hangs.
var errSilent = errors.New("etcd is connected and did not answer")

// position is a point in the history of an etcd.
type position struct {
	cluster  uint64
	revision int64
}

// span is what a list or a watch is of: the keys from start on and before end,
// or, without end, the key start alone. The two differ in what a role must
// grant.
type span struct{ start, end string }

// prefixed is the span of all keys that begin with prefix.
func prefixed(prefix string) span { return span{prefix, clientv3.GetPrefixRangeEnd(prefix)} }

// String returns the prefix or the key.
func (s span) String() string { return s.start }

// options returns those of a request for the keys of the span.
func (s span) options(opts []clientv3.OpOption, more ...clientv3.OpOption) []clientv3.OpOption {
	opts = slices.Concat(opts, more)
	if s.end != "" {
		opts = append(opts, clientv3.WithRange(s.end))
	}
	return opts
}

// head returns where etcd's history has got to, by a linearizable read. As a
// reader may be allowed the keys of the span only, the read is of its start.
func (c *Client) head(ctx context.Context, of span) (position, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.etcd.Get(ctx, of.start, clientv3.WithKeysOnly())
	if err != nil {
		return position{}, fmt.Errorf("list %s: %w", of, c.explain(err))
	}
	return position{cluster: resp.Header.ClusterId, revision: resp.Header.Revision}, nil
}

// list yields all keys of a span as they were at revision, in
// ascending order and in chunks, which are deliver's to keep. It ends with
// deliver's first error.
func (c *Client) list(ctx context.Context, of span, revision int64, deliver func([]*keyValue) error, opts ...clientv3.OpOption) error {
	yield := func(kvs []*keyValue) error {
		c.listed.Add(uint64(len(kvs)))
		return deliver(kvs)
	}
	if c.cfg.Paged || c.pagedOnly.Load() {
		return c.listPages(ctx, of, revision, yield, opts)
	}
	begun := false
	stream := func() error {
		return c.listStream(ctx, of, revision, func(kvs []*keyValue) error {
			begun = true
			return yield(kvs)
		}, opts)
	}
	err := stream()
	for i := 0; errors.Is(err, errUnverified) && !begun && i < 3; i++ {
		if err = c.verify(ctx, of); err == nil {
			err = stream()
		}
	}
	if status.Code(err) == codes.Unimplemented && !begun {
		c.pagedOnly.Store(true)
		return c.listPages(ctx, of, revision, yield, opts)
	}
	return err
}

// verify lets every endpoint's connection show its cluster id; calls take them
// in turn.
func (c *Client) verify(ctx context.Context, of span) error {
	for range c.cfg.Endpoints {
		if _, err := c.head(ctx, of); err != nil {
			return err
		}
	}
	return nil
}

// listStream lists as one streamed range. Its error is of code Unimplemented
// before etcd 3.7, and errUnverified over a connection whose history is not
// known.
func (c *Client) listStream(ctx context.Context, of span, revision int64, yield func([]*keyValue) error, opts []clientv3.OpOption) error {
	ctx, watchdog := newWatchdog(ctx, c.cfg.LivenessTimeout)
	defer watchdog.stop()
	watchdog.waiting()
	stream, err := c.etcd.GetStream(ctx, of.start, of.options(opts, clientv3.WithRev(revision))...)
	if err != nil {
		return fmt.Errorf("list %s: %w", of, watchdog.explain(err))
	}
	defer func() {
		// The sending side blocks until each part is taken.
		watchdog.stop()
		for range stream {
		}
	}()
	for part := range stream {
		watchdog.busy()
		if err := part.Err(); err != nil {
			return fmt.Errorf("list %s: %w", of, watchdog.explain(err))
		}
		if err := yield(part.Kvs); err != nil {
			return err
		}
		watchdog.waiting()
	}
	return nil
}

// page is one answer of a paged list.
type page struct {
	kvs  []*keyValue
	more bool
	err  error
}

// listPages lists in large pages, each fetched while the one before it is
// being yielded.
func (c *Client) listPages(ctx context.Context, of span, revision int64, yield func([]*keyValue) error, opts []clientv3.OpOption) error {
	ctx, cancel := context.WithCancel(ctx)
	fetched := make(chan page)
	// Whatever the reason to leave, the fetcher sees ctx end and closes.
	defer func() {
		cancel()
		for range fetched {
		}
	}()
	go c.fetchPages(ctx, of, append(opts, clientv3.WithRev(revision)), fetched)
	for p := range fetched {
		if p.err != nil {
			return fmt.Errorf("list %s: %w", of, p.err)
		}
		if err := yield(p.kvs); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// Pages that come quickly, in a pageHaste-th of the time that one may take,
// are followed by larger ones, up to pageGrowth times the configured size.
const pageHaste, pageGrowth = 30, 5

// fetchPages sends the pages of a list and closes the channel. A page whose
// answer exceeds the message size is asked for again in smaller ones.
func (c *Client) fetchPages(ctx context.Context, of span, opts []clientv3.OpOption, fetched chan<- page) {
	defer close(fetched)
	start, size := of.start, c.cfg.PageSize
	largest := pageGrowth * size
	for more := true; more; {
		asked := time.Now()
		p := c.fetchPage(ctx, start, of.options(opts, clientv3.WithLimit(size)))
		if status.Code(p.err) == codes.ResourceExhausted && size > 1 {
			size = max(1, size/8)
			largest = size
			continue
		}
		if time.Since(asked) < c.cfg.LivenessTimeout/pageHaste {
			size = min(2*size, largest)
		}
		select {
		case fetched <- p:
		case <-ctx.Done():
			return
		}
		more = p.err == nil && p.more && len(p.kvs) > 0
		if more {
			start = string(p.kvs[len(p.kvs)-1].Key) + "\x00"
		}
	}
}

func (c *Client) fetchPage(ctx context.Context, start string, opts []clientv3.OpOption) page {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.LivenessTimeout)
	defer cancel()
	resp, err := c.etcd.Get(ctx, start, opts...)
	if err != nil {
		return page{err: c.explain(err)}
	}
	if n := len(resp.Kvs); n > 0 && string(resp.Kvs[n-1].Key) < start {
		return page{err: fmt.Errorf("etcd gave keys before %q, from which on it was asked", start)}
	}
	return page{kvs: resp.Kvs, more: resp.More}
}

// watchdog ends a context when waiting for an answer takes too long. Its
// methods are for one goroutine, but for again.
type watchdog struct {
	limit  time.Duration
	timer  *time.Timer
	ctx    context.Context
	cancel context.CancelCauseFunc

	mu    sync.Mutex
	armed bool // guarded by mu
}

func newWatchdog(parent context.Context, limit time.Duration) (context.Context, *watchdog) {
	ctx, cancel := context.WithCancelCause(parent)
	w := &watchdog{limit: limit, ctx: ctx, cancel: cancel}
	w.timer = time.AfterFunc(limit, func() { cancel(errSilent) })
	w.timer.Stop()
	return ctx, w
}

// waiting starts the clock, or starts it anew.
func (w *watchdog) waiting() { w.set(true) }

// busy halts the clock: it is not the server that takes its time.
func (w *watchdog) busy() { w.set(false) }

func (w *watchdog) set(armed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.armed = armed
	if armed {
		w.timer.Reset(w.limit)
	} else {
		w.timer.Stop()
	}
}

// again starts the clock anew if it runs: the server has shown elsewhere that
// it answers.
func (w *watchdog) again() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.armed {
		w.timer.Reset(w.limit)
	}
}

// stop ends the context.
func (w *watchdog) stop() {
	w.busy()
	w.cancel(context.Canceled)
}

// explain replaces the error of a call whose context was cancelled.
func (w *watchdog) explain(err error) error {
	if cause := context.Cause(w.ctx); errors.Is(cause, errSilent) {
		return fmt.Errorf("%w for %s", cause, w.limit)
	}
	return err
}
