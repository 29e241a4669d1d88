// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"math"
	"math/bits"
	"math/rand/v2"
	"time"
)

const (
	backoffMin = 50 * time.Millisecond
	backoffMax = time.Minute

	// stableAfter is how long an attempt must have lasted for the next failure
	// to count as the first one again.
	stableAfter = time.Minute
)

// backoff spaces the attempts of everything in this package that is retried:
// dialling, following a prefix, writing. The delay is drawn evenly between
// backoffMin and a bound that doubles with each attempt up to backoffMax, so
// that clients which lost the same server at the same instant come back spread
// out. An attempt that lasted is forgiven in proportion: a minute forgives all,
// a second bounds the next delay by 6.4 s, and each doubling halves that, so
// that a server which restarts now and then is met again soon, and one which
// hangs up at once is not stormed. The zero value is ready; it is pure but for
// rand.
type backoff struct {
	failures int
	started  time.Time // when the attempt that next announced begins
	rand     func() float64
}

// next returns how long to wait, from now, before the attempt after the one
// that has just ended.
func (b *backoff) next(now time.Time) time.Duration {
	if !b.started.IsZero() {
		b.failures = min(b.failures, unforgiven(now.Sub(b.started)))
	}
	bound := backoffMax
	if b.failures < 20 { // beyond, the shift alone exceeds backoffMax
		bound = min(bound, backoffMin<<(b.failures+1))
	}
	b.failures++
	draw := rand.Float64
	if b.rand != nil {
		draw = b.rand
	}
	d := backoffMin + time.Duration(draw()*float64(bound-backoffMin))
	b.started = now.Add(d)
	return d
}

// unforgiven returns how many failures still count after an attempt that
// lasted so long.
func unforgiven(lasted time.Duration) int {
	switch {
	case lasted < time.Second:
		return math.MaxInt
	case lasted >= stableAfter:
		return 0
	}
	return 7 - bits.Len(uint(lasted/time.Second))
}

// wait sleeps until the next attempt is due and reports whether ctx still
// lives.
func (b *backoff) wait(ctx context.Context) bool {
	return sleep(ctx, b.next(time.Now()))
}

// sleep pauses for d and reports whether ctx still lives.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
