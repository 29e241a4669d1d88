// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

type keyValue = mvccpb.KeyValue

// silence is how long a server may leave a request unanswered that it has the
// means to answer, before the request is given up. A dead connection is found
// by gRPC's keepalive; this finds a server that is connected and hangs.
const silence = 30 * time.Second

// errSilent indicates that the server is connected and does not answer.
var errSilent = errors.New("etcd is connected and did not answer for " + silence.String())

// position is a point in the history of an etcd.
type position struct {
	cluster  uint64
	revision int64
}

// head returns where etcd's history has got to, by a linearizable read. As a
// reader may be allowed the keys under prefix only, the read is of the key
// prefix itself.
func (c *Client) head(ctx context.Context, prefix string) (position, error) {
	if c.status.get().ServerVersion == "" {
		// Some roles must not ask; the version is only for people.
		if err := c.Probe(ctx); errors.Is(err, ErrHistoryChanged) {
			return position{}, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.etcd.Get(ctx, prefix, clientv3.WithKeysOnly())
	if err != nil {
		return position{}, fmt.Errorf("list %s: %w", prefix, c.explain(err))
	}
	return position{cluster: resp.Header.ClusterId, revision: resp.Header.Revision}, nil
}

// list yields all keys that begin with prefix as they were at revision, in
// ascending order and in chunks whose memory is free for reuse after yield. It
// ends with yield's first error.
func (c *Client) list(ctx context.Context, prefix string, revision int64, yield func([]*keyValue) error) error {
	if c.cfg.Paged || c.pagedOnly.Load() {
		return c.listPages(ctx, prefix, revision, yield)
	}
	begun := false
	stream := func() error {
		return c.listStream(ctx, prefix, revision, func(kvs []*keyValue) error {
			begun = true
			return yield(kvs)
		})
	}
	err := stream()
	for i := 0; errors.Is(err, errUnverified) && !begun && i < 3; i++ {
		if err = c.verify(ctx, prefix); err == nil {
			err = stream()
		}
	}
	if status.Code(err) == codes.Unimplemented && !begun {
		c.pagedOnly.Store(true)
		return c.listPages(ctx, prefix, revision, yield)
	}
	return err
}

// verify lets every endpoint's connection show its cluster id; calls take them
// in turn.
func (c *Client) verify(ctx context.Context, prefix string) error {
	for range c.cfg.Endpoints {
		if _, err := c.head(ctx, prefix); err != nil {
			return err
		}
	}
	return nil
}

// listStream lists as one streamed range. Its error is of code Unimplemented
// before etcd 3.7, and errUnverified over a connection whose history is not
// known.
func (c *Client) listStream(ctx context.Context, prefix string, revision int64, yield func([]*keyValue) error) error {
	ctx, watchdog := newWatchdog(ctx, silence)
	defer watchdog.stop()
	watchdog.waiting()
	stream, err := c.etcd.GetStream(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(revision))
	if err != nil {
		return fmt.Errorf("list %s: %w", prefix, watchdog.explain(err))
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
			return fmt.Errorf("list %s: %w", prefix, watchdog.explain(err))
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
func (c *Client) listPages(ctx context.Context, prefix string, revision int64, yield func([]*keyValue) error) error {
	ctx, cancel := context.WithCancel(ctx)
	fetched := make(chan page)
	// Whatever the reason to leave, the fetcher sees ctx end and closes.
	defer func() {
		cancel()
		for range fetched {
		}
	}()
	go c.fetchPages(ctx, prefix, revision, fetched)
	for p := range fetched {
		if p.err != nil {
			return fmt.Errorf("list %s: %w", prefix, p.err)
		}
		if err := yield(p.kvs); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// fetchPages sends the pages of a list and closes the channel. A page whose
// answer exceeds the message size is asked for again in smaller ones.
func (c *Client) fetchPages(ctx context.Context, prefix string, revision int64, fetched chan<- page) {
	defer close(fetched)
	start, end, size := prefix, clientv3.GetPrefixRangeEnd(prefix), c.cfg.PageSize
	for more := true; more; {
		p := c.fetchPage(ctx, start, end, revision, size)
		if status.Code(p.err) == codes.ResourceExhausted && size > 1 {
			size = max(1, size/8)
			continue
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

func (c *Client) fetchPage(ctx context.Context, start, end string, revision, size int64) page {
	ctx, cancel := context.WithTimeout(ctx, silence)
	defer cancel()
	resp, err := c.etcd.Get(ctx, start, clientv3.WithRange(end), clientv3.WithRev(revision), clientv3.WithLimit(size))
	if err != nil {
		return page{err: c.explain(err)}
	}
	return page{kvs: resp.Kvs, more: resp.More}
}

// watchdog ends a context when waiting for an answer takes too long. Its
// methods are for one goroutine.
type watchdog struct {
	limit  time.Duration
	timer  *time.Timer
	ctx    context.Context
	cancel context.CancelCauseFunc
}

func newWatchdog(parent context.Context, limit time.Duration) (context.Context, *watchdog) {
	ctx, cancel := context.WithCancelCause(parent)
	w := &watchdog{limit: limit, ctx: ctx, cancel: cancel}
	w.timer = time.AfterFunc(limit, func() { cancel(errSilent) })
	w.timer.Stop()
	return ctx, w
}

// waiting starts the clock, or starts it anew.
func (w *watchdog) waiting() { w.timer.Reset(w.limit) }

// busy halts the clock: it is not the server that takes its time.
func (w *watchdog) busy() { w.timer.Stop() }

// stop ends the context.
func (w *watchdog) stop() {
	w.timer.Stop()
	w.cancel(context.Canceled)
}

// explain replaces the error of a call that the watchdog cancelled.
func (w *watchdog) explain(err error) error {
	if cause := context.Cause(w.ctx); errors.Is(cause, errSilent) {
		return cause
	}
	return err
}
