// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"sync"
	"time"
)

const (
	// crowdSize is how many listings may begin at about the same time. What etcds send, and what is decoded of it, takes
	// several times the memory of what remains: an agent that starts with hundreds of clusters would need it for all at once.
	crowdSize = 8
	// crowdPatience is how long a listing can keep others waiting. So clusters that are slow, or hang, do not.
	crowdPatience = 40 * time.Millisecond
)

// crowd lets a few in at a time. A nil one lets in everybody.
type crowd chan struct{}

func newCrowd() crowd { return make(crowd, crowdSize) }

// enter waits for a place. leave, which may be called more than once, gives it up; it is given up soon in any case.
func (c crowd) enter(ctx context.Context) (leave func(), err error) {
	if c == nil {
		return func() {}, nil
	}
	select {
	case c <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	release := sync.OnceFunc(func() { <-c })
	timer := time.AfterFunc(crowdPatience, release)
	return func() {
		timer.Stop()
		release()
	}, nil
}
