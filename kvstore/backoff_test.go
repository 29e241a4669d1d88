// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// lesson: E14
func TestBackoffGrowsToAMinute(t *testing.T) {
	for name, c := range map[string]struct {
		phase float64
		want  []time.Duration
	}{
		"highest": {1, []time.Duration{75 * time.Millisecond, 112500 * time.Microsecond, 168750 * time.Microsecond}},
		"lowest":  {0, []time.Duration{50 * time.Millisecond, 75 * time.Millisecond, 112500 * time.Microsecond}},
	} {
		t.Run(name, func(t *testing.T) {
			b := backoff{phase: c.phase, drawn: true}
			now := time.Unix(0, 0)
			for i, want := range c.want {
				if got := b.next(now); got != want {
					t.Errorf("attempt %d waits %v, want %v", i, got, want)
				}
			}
			for range 1000 {
				if d := b.next(now); d < backoffMin || d > backoffMax {
					t.Fatalf("a wait of %v", d)
				}
			}
			if d := b.next(now); d != backoffMax {
				t.Errorf("at last it waits %v", d)
			}
		})
	}
}

func TestBackoffForgivesWhatLasted(t *testing.T) {
	for lasted, want := range map[time.Duration]time.Duration{
		0:                      backoffMax,
		-time.Second:           backoffMax,
		time.Second - 1:        backoffMax,
		time.Second:            bound(11), // 4.3 s
		2 * time.Second:        bound(9),
		5 * time.Second:        bound(7),
		31 * time.Second:       bound(2),
		stableAfter - 1:        75 * time.Millisecond,
		stableAfter:            75 * time.Millisecond,
		1000 * time.Hour:       75 * time.Millisecond,
		100 * time.Millisecond: backoffMax,
	} {
		synctest.Test(t, func(t *testing.T) {
			b := backoff{phase: 1, drawn: true}
			for range 20 {
				if !b.wait(t.Context()) {
					t.Fatal("the context has ended")
				}
			}
			time.Sleep(lasted)
			begin := time.Now()
			b.wait(t.Context())
			if got := time.Since(begin); got != want {
				t.Errorf("after an attempt of %v the wait is %v, want %v", lasted, got, want)
			}
		})
	}
}

func TestBackoffWaitEndsWithContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := backoff{failures: 30}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		begin := time.Now()
		if b.wait(ctx) {
			t.Error("the wait ended before the context")
		}
		if got := time.Since(begin); got != time.Millisecond {
			t.Errorf("it took %v", got)
		}
	})
}

// A server that is connected and does not answer is given up; the time that a
// consumer takes is not the server's.
// lesson: E5
func TestWatchdog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, w := newWatchdog(t.Context(), defaultLivenessTimeout)
		defer w.stop()
		for range 3 {
			w.waiting()
			time.Sleep(defaultLivenessTimeout - 1)
			w.busy()
			time.Sleep(time.Hour)
		}
		synctest.Wait()
		if ctx.Err() != nil {
			t.Fatalf("it ended: %v", context.Cause(ctx))
		}
		w.waiting()
		time.Sleep(defaultLivenessTimeout)
		synctest.Wait()
		if err := w.explain(ctx.Err()); !errors.Is(err, errSilent) {
			t.Errorf("error %v", err)
		}
	})
}

// lesson: E14
func TestDialerTakesTurns(t *testing.T) {
	d := newDialer(nil, nil)
	if wait := d.turn("a:1"); wait != 0 {
		t.Errorf("the first attempt waits %v", wait)
	}
	if wait := d.turn("b:1"); wait != 0 {
		t.Errorf("the first attempt at another address waits %v", wait)
	}
	for range 20 {
		if wait := d.turn("a:1"); wait < backoffMin || wait > backoffMax {
			t.Errorf("a further attempt waits %v", wait)
		}
	}
}
