// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// errUnanswered indicates an etcd that has never answered yet.
var errUnanswered = errors.New("etcd has never answered: see that it runs and can be reached")

// overdue tells, once, when an etcd that somebody waits for has not answered
// for Config.InitialTimeout. It ends nothing: an etcd may come up at any time.
// The zero value is ready.
type overdue struct {
	mu    sync.Mutex
	timer *time.Timer // set by the first begin or by stop
}

// begin starts the clock, unless it was started before.
func (o *overdue) begin(c *Client) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.timer != nil {
		return
	}
	o.timer = time.AfterFunc(c.cfg.InitialTimeout, func() {
		s := c.status.get()
		if !s.LastContact.IsZero() {
			return
		}
		err := errUnanswered
		if s.LastError != nil {
			err = fmt.Errorf("%w: %w", err, s.LastError)
		}
		c.log.Error("timed out while waiting for etcd, and goes on waiting", "endpoints", strings.Join(c.cfg.Endpoints, ","),
			"waited", c.cfg.InitialTimeout, "err", err)
	})
}

// stop ends the clock for good.
func (o *overdue) stop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.timer == nil {
		o.timer = time.NewTimer(0)
	}
	o.timer.Stop()
}
