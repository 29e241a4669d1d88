// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
)

// limiter bounds what a Client asks of its etcd: so many calls a second, with
// bursts after a while of rest, and so many at once. Many nodes share an etcd,
// and each of them alone could keep it busy.
//
// As a gRPC interceptor it sees every attempt of every call, the pages of a
// list, the tokens of a login and the openings of streams included, but not
// the messages of a stream.
type limiter struct {
	steady, bootstrap rate
	inflight          chan struct{} // holds an element for each call under way

	calls atomic.Uint64 // that had their turn

	mu      sync.Mutex
	full    time.Time // when, without further calls, the whole burst is there again
	listing int       // Watchers that make their first list: the bootstrap rate counts
}

// errNoTurn indicates a call whose turn would have come after its deadline.
var errNoTurn = fmt.Errorf("the client's own limit of calls per second is reached: %w", context.DeadlineExceeded)

// rate is one call every interval, and burst at once.
type rate struct {
	interval time.Duration
	burst    int
}

// take returns how long to wait for the turn of what is taken n times, and when
// the whole burst is there again after it, which full was before.
func (r rate) take(full, now time.Time, n int) (after time.Time, wait time.Duration) {
	if full.Before(now) {
		full = now
	}
	after = full.Add(time.Duration(n) * r.interval)
	return after, max(0, after.Add(-time.Duration(r.burst)*r.interval).Sub(now))
}

func newLimiter(cfg Config) *limiter {
	return &limiter{
		steady:    rate{time.Second / time.Duration(cfg.QPS), cfg.Burst},
		bootstrap: rate{time.Second / time.Duration(cfg.BootstrapQPS), cfg.BootstrapQPS},
		inflight:  make(chan struct{}, cfg.MaxInflight),
	}
}

// bootstrapping lets calls pass at the bootstrap rate until done is called,
// which may be more than once.
func (l *limiter) bootstrapping() (done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listing++
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.listing--
	})
}

// reserve takes the next turn and returns how long it is away, unless that is
// after the deadline.
func (l *limiter) reserve(now, deadline time.Time) (wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.steady
	if l.listing > 0 {
		r = l.bootstrap
	}
	full, wait := r.take(l.full, now, 1)
	if !deadline.IsZero() && now.Add(wait).After(deadline) {
		return 0, false
	}
	l.full = full
	return wait, true
}

// enter waits for a call's turn. Its error is that of ctx; otherwise leave
// must follow.
func (l *limiter) enter(ctx context.Context) error {
	select {
	case l.inflight <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	deadline, bounded := ctx.Deadline()
	if !bounded { // clientv3's watches give a time all the same
		deadline = time.Time{}
	}
	wait, ok := l.reserve(time.Now(), deadline)
	if !ok {
		l.leave()
		return errNoTurn
	}
	if wait > 0 && !sleep(ctx, wait) {
		l.leave()
		return ctx.Err()
	}
	l.calls.Add(1)
	return nil
}

func (l *limiter) leave() { <-l.inflight }

// unary is a grpc.UnaryClientInterceptor.
func (l *limiter) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	if err := l.enter(ctx); err != nil {
		return err
	}
	defer l.leave()
	return invoke(ctx, method, req, reply, cc, opts...)
}

// stream is a grpc.StreamClientInterceptor. An open stream is not in flight:
// watches last, and a list waits for its reader.
func (l *limiter) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	if err := l.enter(ctx); err != nil {
		return nil, err
	}
	defer l.leave()
	return open(ctx, desc, cc, method, opts...)
}
