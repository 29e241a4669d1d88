// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

const (
	backoffMin = 50 * time.Millisecond
	backoffMax = time.Minute

	// backoffGrowth is the factor between the bounds of one pause and the next.
	// It is also how many times the mean the attempts in a second can be.
	backoffGrowth = 1.5

	// stableAfter is how long an attempt must have lasted for the next failure
	// to count as the first one again.
	stableAfter = time.Minute
)

// backoff spaces the attempts of everything in this package that is retried:
// dialling, following a prefix, writing. The n-th pause lies between backoffMin
// and backoffMax, between two bounds that grow by backoffGrowth with each
// attempt, at a place that is drawn once and kept, the phase. So of clients
// which lost the same server at the same instant each tries once in every
// period of an ever longer row, and all evenly spread over it. Whenever the
// server is back, they come back evenly over what remains of a period and a
// part of the next one, which is at most backoffGrowth times as long. Were each
// pause drawn anew, most of those that wait after a long outage would be near
// its end, and the first seconds would have many times the mean.
//
// An attempt that lasted is forgiven in proportion: a minute forgives all, a
// second bounds the next pause by 4.3 s, and each doubling about halves that,
// so that a server which restarts now and then is met again soon, and one which
// hangs up at once is not stormed. The zero value is ready; it is pure but for
// the phase.
type backoff struct {
	failures int       // below 0 the pause is the least
	started  time.Time // when the attempt that next announced begins
	phase    float64   // in [0, 1)
	drawn    bool      // phase is
}

// phases is where the last phase was drawn. The steps of a golden section keep
// any number of consecutive phases evenly apart, which those of a process with
// many clients are; where they begin is left to chance, as other processes
// have clients too.
var (
	firstPhase = rand.Uint64()
	phases     atomic.Uint64
)

func drawPhase() float64 {
	const section = 0x9E3779B97F4A7C15 // of 1<<64
	return float64((firstPhase+phases.Add(section))>>11) / (1 << 53)
}

// newBackoff returns one whose first attempt begins now, and which has its
// phase already.
func newBackoff(now time.Time) *backoff {
	return &backoff{started: now, phase: drawPhase(), drawn: true}
}

// next returns how long to wait, from now, before the attempt after the one
// that has just ended.
func (b *backoff) next(now time.Time) time.Duration {
	if !b.drawn {
		b.phase, b.drawn = drawPhase(), true
	}
	if !b.started.IsZero() {
		b.failures = min(b.failures, unforgiven(now.Sub(b.started)))
	}
	least, most := bound(b.failures), bound(b.failures+1)
	b.failures++
	d := least + time.Duration(b.phase*float64(most-least))
	b.started = now.Add(d)
	return d
}

// bound returns the least pause after so many failures before the last one,
// which is also the most of the pause before.
func bound(failures int) time.Duration {
	return time.Duration(min(float64(backoffMax), float64(backoffMin)*math.Pow(backoffGrowth, float64(max(0, failures)))))
}

// unforgiven returns how many failures still count after an attempt that
// lasted so long.
func unforgiven(lasted time.Duration) int {
	if lasted < time.Second {
		return math.MaxInt
	}
	most := float64(backoffMin) * backoffGrowth * float64(stableAfter) / float64(lasted)
	return max(0, int(math.Log(most/float64(bound(1)))/math.Log(backoffGrowth)))
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
