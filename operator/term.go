// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/kvstore"
)

// Duty is something that the leader does.
type Duty interface {
	String() string
	// Run does it until ctx, which is the term's, ends, and returns nil then. After an error it is run again, in the same
	// term unless that is over. Whatever it writes to etcd it writes with t.
	Run(ctx context.Context, t *Term) error
	// Status tells what has been done in all terms of this replica. Concurrently with Run.
	Status() DutyStatus
}

// Term is one leadership of one replica. What it writes is written only while no other replica has begun a term, however
// long the process was stopped and whatever it believes: of all methods ErrFenced ([kvstore.ErrFenced]) tells that the term
// is over. All methods may be called concurrently.
type Term struct {
	client *kvstore.Client
	fence  kvstore.Fence
	ttl    time.Duration
	since  time.Time
	log    *slog.Logger
}

// Client is for reading alone; it lives as long as the term.
func (t *Term) Client() *kvstore.Client { return t.client }

// Fence is for what is written in other ways than with the methods here, such as under a lock: see [kvstore.Fence.Held].
func (t *Term) Fence() kvstore.Fence { return t.fence }

// Log is where a duty logs.
func (t *Term) Log(duty string) *slog.Logger { return t.log.With("duty", duty) }

// Writer returns a writer of leased keys, which stay when the term ends and are taken over by the next one. Its Run ends
// with ErrFenced when the term is over.
func (t *Term) Writer(duty string) *kvstore.Writer {
	return kvstore.NewWriter(t.client, t.writes(duty))
}

// writes is how a duty writes.
func (t *Term) writes(duty string) kvstore.WriterConfig {
	return kvstore.WriterConfig{TTL: t.ttl, Fence: t.fence, Log: t.Log(duty)}
}

// Txn does all of ops, up to 100 of different keys, or none. It returns [kvstore.ErrExists] where a condition of theirs does
// not hold.
func (t *Term) Txn(ctx context.Context, ops ...kvstore.Op) error {
	return t.client.TxnBehind(ctx, t.fence, ops...)
}

// Delete deletes those of keys that nobody has written since they were read, and returns how many.
func (t *Term) Delete(ctx context.Context, read ...kvstore.KV) (deleted int, err error) {
	return t.client.DeleteBehind(ctx, t.fence, read...)
}

// Attempt makes attempts, each by itself: see [kvstore.Client.AttemptBehind].
func (t *Term) Attempt(ctx context.Context, attempts ...kvstore.Attempt) (results []error, err error) {
	return t.client.AttemptBehind(ctx, t.fence, attempts)
}

// Confirm asks etcd whether the term lasts, before something is written that no fence guards. It returns ErrFenced if it does
// not.
func (t *Term) Confirm(ctx context.Context) error { return t.Txn(ctx) }

// govern takes the fence and runs the duties until the office is lost, the fence taken, or ctx ends.
func (o *Operator) govern(ctx context.Context, client *kvstore.Client, office office) error {
	since := time.Now()
	fence, err := client.TakeFence(ctx, FenceKey, Leader{Name: o.cfg.Name, Election: o.cfg.Election.String(), Since: since.UTC()}.marshal(), office.confirm)
	if err != nil {
		return err
	}
	t := &Term{client: client, fence: fence, ttl: o.cfg.LeaseTTL, since: since, log: o.cfg.Log}
	o.begin(t)
	defer o.begin(nil)
	o.cfg.Log.Info("Leading the operator HA deployment", "operatorID", o.cfg.Name, "revision", fence.Revision)

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case <-office.lost:
			return errLost
		}
	})
	group.Go(func() error { return quiet(ctx, client.AwaitFenced(ctx, fence)) })
	for _, d := range o.cfg.Duties {
		group.Go(func() error { return t.perform(ctx, d) })
	}
	return group.Wait()
}

// errLost indicates that the election says that this replica does not lead any more.
var errLost = errors.New("the leadership is lost")

// quiet leaves out errors that only tell that ctx has ended.
func quiet(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// perform runs a duty until the term is over. Only that ends it: a duty that fails keeps no other one from being done.
func (t *Term) perform(ctx context.Context, d Duty) error {
	pause := retryLeast
	for {
		begun := time.Now()
		err := d.Run(ctx, t)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, kvstore.ErrFenced), errors.Is(err, kvstore.ErrHistoryChanged), errors.Is(err, kvstore.ErrClosed):
			return fmt.Errorf("%s: %w", d, err)
		case time.Since(begun) > time.Minute:
			pause = retryLeast
		}
		t.Log(d.String()).Warn("duty failed, trying again", "err", err, "pause", pause)
		if !sleep(ctx, jitter(pause)) {
			return nil
		}
		pause = min(2*pause, retryMost)
	}
}

func (o *Operator) begin(t *Term) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.term = t
	if t != nil {
		o.terms++
		o.err, o.errAt = nil, time.Time{}
	}
}
