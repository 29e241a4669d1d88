// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// errNoHeartbeat indicates that nobody writes to an etcd that is connected,
// or that what is written there does not get here.
var errNoHeartbeat = errors.New("no heartbeat")

// FollowHeartbeat watches Config.HeartbeatKey until ctx ends, and returns nil
// then. When the key, once seen, was not written for Config.HeartbeatTimeout,
// the Client's state is Stale. The value that a list finds counts as written; a deletion
// does not, and the key stays expected. It returns ErrHistoryChanged when
// another etcd answers, of which nothing is expected until the next call has
// seen the key there.
//
// Readers of Cilium count from the connection, seen or not. Here a
// key that was never there is not missed: older writers have none, and those
// of weft none before an operator runs, and either may be followed. It costs
// nothing, as an etcd that hangs or loses its majority is found sooner by the
// Watchers; the heartbeat tells of an etcd that serves and is not written to.
func (c *Client) FollowHeartbeat(ctx context.Context) error {
	if c.cfg.HeartbeatKey == "" {
		<-ctx.Done()
		return nil
	}
	h := newHeart(c.cfg.HeartbeatTimeout, func(late bool) {
		c.status.heartbeat(late)
		if late {
			c.status.failed(fmt.Errorf("%w: key %s was not written for %s", errNoHeartbeat, c.cfg.HeartbeatKey, c.cfg.HeartbeatTimeout))
		}
	})
	defer h.stop()
	return NewKeyWatcher(c.cfg.HeartbeatKey, h.deliver).Run(ctx, c)
}

// heart tells when a heartbeat that was seen is late, and when it is back.
type heart struct {
	limit time.Duration
	late  func(bool)

	mu      sync.Mutex
	timer   *time.Timer // nil before the key was seen
	last    time.Time
	exists  bool // the key, as last delivered
	stopped bool
}

func newHeart(limit time.Duration, late func(bool)) *heart { return &heart{limit: limit, late: late} }

// deliver takes the events of the key.
func (h *heart) deliver(events []Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range events {
		if e.Kind != Synced {
			h.exists = e.Kind != Deleted
		}
		if h.exists {
			h.beat()
		}
	}
}

// beat is told of a heartbeat. The caller holds mu.
func (h *heart) beat() {
	h.last = time.Now()
	if h.timer == nil {
		h.timer = time.AfterFunc(h.limit, h.check)
	}
	h.timer.Reset(h.limit)
	h.late(false)
}

// check is when the timer ends, which a heartbeat may have outrun.
func (h *heart) check() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.stopped && time.Since(h.last) >= h.limit {
		h.late(true)
	}
}

func (h *heart) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopped = true
	if h.timer != nil {
		h.timer.Stop()
	}
	h.late(false)
}
