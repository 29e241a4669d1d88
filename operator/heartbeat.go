// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

const (
	heartbeatInterval = time.Minute
	heartbeatTimeout  = 25 * time.Second
)

// Heartbeat writes [identity.HeartbeatKey] each minute, or more often where its lease is short, and at once when a term begins:
// readers give up on a cluster after two minutes without, which must not pass because a leader died, and agents take one without
// the key for one without an operator.
type Heartbeat struct {
	loop  *Loop
	lease kvstore.LeaseID // under which it was last written
	of    *Term           // whose lease it is
}

var _ Duty = (*Heartbeat)(nil)

// NewHeartbeat returns the duty of an operator whose keys have leases of a TTL.
func NewHeartbeat(ttl time.Duration) *Heartbeat {
	h := new(Heartbeat)
	h.loop = NewLoop("heartbeat", min(heartbeatInterval, ttl/3), h.beat)
	return h
}

func (h *Heartbeat) String() string { return h.loop.String() }

// Status tells of the beats.
func (h *Heartbeat) Status() DutyStatus { return h.loop.Status() }

// Run beats until the term ends.
func (h *Heartbeat) Run(ctx context.Context, t *Term) error { return h.loop.Run(ctx, t) }

func (h *Heartbeat) beat(ctx context.Context, t *Term) (Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, heartbeatTimeout)
	defer cancel()
	if err := h.renew(ctx, t); err != nil {
		return Outcome{}, fmt.Errorf("heartbeat: %w", err)
	}
	value := time.Now().UTC().Format(time.RFC3339)
	err := t.Txn(ctx, kvstore.Op{Kind: kvstore.OpPut, Key: identity.HeartbeatKey, Value: []byte(value), Lease: h.lease})
	if err != nil {
		return Outcome{}, fmt.Errorf("heartbeat: %w", err)
	}
	return Outcome{Detail: value}, nil
}

// renew sees to it that there is a lease. Nothing else renews it: who does not beat any more lets it end.
func (h *Heartbeat) renew(ctx context.Context, t *Term) (err error) {
	if h.of == t {
		if _, err := t.client.KeepAliveOnce(ctx, h.lease); !errors.Is(err, kvstore.ErrLeaseLost) {
			return err
		}
	}
	h.of = nil
	if h.lease, _, err = t.client.Grant(ctx, t.ttl); err == nil {
		h.of = t
	}
	return err
}
