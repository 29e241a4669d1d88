// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// heartbeatLimit is how long the heartbeat, written every minute, may fail to
// appear (spec A.11).
const heartbeatLimit = 2 * time.Minute

// errNoHeartbeat indicates that nobody writes to an etcd that is connected,
// or that what is written there does not get here.
var errNoHeartbeat = errors.New("no heartbeat")

// FollowHeartbeat watches Config.HeartbeatKey until ctx ends, and returns nil
// then. When the key was not written for two minutes, the first of which begin
// with the call, the Client's state is Stale. The value that a list finds
// counts as written, a deletion does not. It returns ErrHistoryChanged when
// another etcd answers.
func (c *Client) FollowHeartbeat(ctx context.Context) error {
	if c.cfg.HeartbeatKey == "" {
		<-ctx.Done()
		return nil
	}
	h := newHeart(func(late bool) {
		c.status.heartbeat(late)
		if late {
			c.status.failed(fmt.Errorf("%w: key %s was not written for %s", errNoHeartbeat, c.cfg.HeartbeatKey, heartbeatLimit))
		}
	})
	defer h.stop()
	return NewKeyWatcher(c.cfg.HeartbeatKey, h.deliver).Run(ctx, c)
}

// heart tells when a heartbeat is late, and when it is back.
type heart struct {
	late func(bool)

	mu      sync.Mutex
	timer   *time.Timer
	last    time.Time
	exists  bool // the key, as last delivered
	stopped bool
}

func newHeart(late func(bool)) *heart {
	h := &heart{late: late, last: time.Now()}
	h.timer = time.AfterFunc(heartbeatLimit, h.check)
	return h
}

// deliver takes the events of the key.
func (h *heart) deliver(events []Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range events {
		if e.Kind != Synced {
			h.exists = e.Kind != Deleted
		}
		if h.exists {
			h.last = time.Now()
			h.timer.Reset(heartbeatLimit)
			h.late(false)
		}
	}
}

// check is when the timer ends, which a heartbeat may have outrun.
func (h *heart) check() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.stopped && time.Since(h.last) >= heartbeatLimit {
		h.late(true)
	}
}

func (h *heart) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopped = true
	h.timer.Stop()
	h.late(false)
}
