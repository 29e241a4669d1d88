// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// However many listings hang, another one begins soon; one that is over makes room at once.
//
// lesson: E15
func TestCrowd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, start := newCrowd(), time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		hang := func() func() {
			leave, err := c.enter(ctx)
			if err != nil {
				t.Fatal(err)
			}
			return leave
		}
		leave := hang()
		for range crowdSize - 1 {
			hang()
		}
		leave()
		leave() // gives up its own place alone
		hang()
		if d := time.Since(start); d != 0 {
			t.Errorf("the first listings waited for %s", d)
		}
		for range crowdSize {
			hang()
		}
		if d := time.Since(start); d != crowdPatience {
			t.Errorf("behind listings that hang, others waited for %s, want %s", d, crowdPatience)
		}
		cancel()
		if _, err := c.enter(ctx); err == nil {
			t.Error("one that has ended was let in")
		}
		time.Sleep(2 * crowdPatience)
		if len(c) != 0 {
			t.Errorf("%d places are never given up", len(c))
		}
	})
}
