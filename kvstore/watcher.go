// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// progressInterval is how often an idle watch is asked how far it has got. It
// shows that the server lives, and lets a later resumption begin after more
// than the last event of the prefix, which may be compacted long since.
const progressInterval = 10 * time.Second

// Watcher follows one prefix, or one key, over any number of connections, and
// of etcds that take each other's place. It remembers the revision of each key,
// and so delivers only what is different from what it delivered before,
// whatever went wrong in between.
type Watcher struct {
	of span

	// What follows belongs to Run and Drain. While a watch is open, viewMu
	// guards view, which the comparison sees too.
	viewMu    sync.Mutex
	view      *view
	out       *outbox
	mustList  bool      // the last watch cannot be resumed
	compareAt time.Time // when the next comparison is due

	keys     atomic.Int64
	dropped  atomic.Int64
	lists    atomic.Int64
	resumes  atomic.Int64
	compares atomic.Int64
	drift    atomic.Int64
	synced   atomic.Bool
	live     atomic.Bool

	mu          sync.Mutex
	lastError   error     // guarded by mu
	lastErrorAt time.Time // guarded by mu
}

// WatcherStatus is the state of a Watcher.
type WatcherStatus struct {
	Prefix      string // or the one key
	Keys        int    // known, stale ones included
	Revision    int64  // all up to it is delivered
	Synced      bool   // was listed completely at least once
	Live        bool   // a watch that follows on a complete list is open
	Lists       int64  // completed
	Resumes     int64  // watches continued without a list
	Dropped     int64  // events of the server that were not news
	Pending     int    // events that wait for the consumer
	Compares    int64  // comparisons with a list while a watch was open
	Drift       int64  // keys that were found to be wrong by them, and repaired
	LastError   error  // of the last list, watch or comparison that failed, also when all is well again
	LastErrorAt time.Time
}

// NewWatcher returns a watcher of all keys that begin with prefix, which must
// end in "/", so that the prefix of one cluster is not that of another whose
// name is longer.
//
// deliver is called by Run and Drain, never concurrently, with up to 4,096
// events. The slice, and what its events point to, are reused after it
// returns. One that keeps up gets the events in the order in which they came
// about. For one that is more than a delivery behind, those of a key are
// joined: only its latest state is delivered, and nothing of a key that was
// created and deleted meanwhile; the order of different keys is lost then. Where even that exceeds
// 32 MiB, and during a list, the server holds back what follows. Other
// watchers are never affected.
//
// Each completed list ends with one Synced event: the first one, and those
// after a watch that could not be resumed. What is delivered between two of
// them are differences only; keys that vanished unseen are deleted just before
// Synced, after all that was created or modified.
func NewWatcher(prefix string, deliver func([]Event)) *Watcher {
	if prefix == "" || prefix[len(prefix)-1] != '/' {
		panic(fmt.Sprintf("kvstore: watched prefix %q does not end in /", prefix))
	}
	return newWatcher(prefixed(prefix), deliver)
}

// NewKeyWatcher returns a watcher of one key, for a reader whose role grants no
// more than that key. All is as with NewWatcher; the Key of its events is
// empty.
func NewKeyWatcher(key string, deliver func([]Event)) *Watcher {
	if key == "" {
		panic("kvstore: the watched key is empty")
	}
	return newWatcher(span{start: key}, deliver)
}

func newWatcher(of span, deliver func([]Event)) *Watcher {
	w := &Watcher{of: of, view: newView(of, deliver), out: newOutbox(deliver)}
	w.view.hand = w.hand
	return w
}

// String returns the prefix, or the key.
func (w *Watcher) String() string { return w.of.start }

// Len returns how many keys are known.
func (w *Watcher) Len() int { return int(w.keys.Load()) }

// Synced reports whether the keys were listed completely at least once.
func (w *Watcher) Synced() bool { return w.synced.Load() }

// Live reports whether changes are seen as they happen: the prefix is listed
// and a watch is open.
func (w *Watcher) Live() bool { return w.live.Load() }

// Revision returns the revision up to which everything is delivered, 0 before
// the first complete list.
func (w *Watcher) Revision() int64 {
	revision, _ := w.out.position()
	return revision
}

// Received tells, during a delivery, when the oldest of its events came from
// etcd.
func (w *Watcher) Received() time.Time { return w.out.receivedAt() }

// LastError returns what last ended a list or a watch, nil if nothing did. Why
// there is no connection at all is in Client.Status.
func (w *Watcher) LastError() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lastError
}

// Status returns the present state.
func (w *Watcher) Status() WatcherStatus {
	revision, pending := w.out.position()
	w.mu.Lock()
	defer w.mu.Unlock()
	return WatcherStatus{
		Prefix: w.of.start, Keys: w.Len(), Revision: revision, Synced: w.Synced(), Live: w.Live(),
		Lists: w.lists.Load(), Resumes: w.resumes.Load(), Dropped: w.dropped.Load(), Pending: pending,
		Compares: w.compares.Load(), Drift: w.drift.Load(),
		LastError: w.lastError, LastErrorAt: w.lastErrorAt,
	}
}

// Run follows the keys through c until ctx ends, and returns nil then. It
// begins with a list; a watch that breaks is resumed where it was, or, where
// etcd has compacted what is missing, preceded by another list. Failures are
// retried with a back-off of 50 ms to 1 min.
//
// It returns ErrHistoryChanged when another etcd answers. Nothing is deleted
// then: call it again with a new Client, and what the new etcd lacks is
// deleted when it has been listed completely.
//
// What the consumer has not taken when ctx ends, it gets from the next Run, or
// from Drain.
func (w *Watcher) Run(ctx context.Context, c *Client) error {
	w.out.begin()
	defer w.out.end()
	stopped := make(chan struct{})
	end := context.AfterFunc(ctx, func() {
		defer close(stopped)
		w.out.stop()
	})
	defer func() {
		if !end() {
			<-stopped // or it would stop the next run
		}
	}()
	err := w.followAlways(ctx, c)
	w.out.flush()
	return err
}

// followAlways follows until ctx ends, the client is closed, or another etcd
// answers.
func (w *Watcher) followAlways(ctx context.Context, c *Client) error {
	defer w.live.Store(false)
	var pause backoff
	w.mustList = true
	listed := c.limiter.bootstrapping()
	defer listed()
	c.status.follows(w, phaseListing)
	defer c.status.follows(w, phaseEnded)
	for {
		err := w.follow(ctx, c, listed)
		w.live.Store(false)
		if ctx.Err() != nil {
			return nil
		}
		w.failed(err)
		c.status.failed(err)
		c.status.follows(w, phaseBroken)
		if errors.Is(err, ErrHistoryChanged) {
			w.view.abandon()
			w.publish()
			return err
		}
		if errors.Is(err, ErrClosed) {
			return err
		}
		if !pause.wait(ctx) {
			return nil
		}
	}
}

// Drain delivers Deleted for every known key and forgets all. It must not run
// concurrently with Run.
func (w *Watcher) Drain() {
	w.out.empty()
	w.view.hand = atOnce(w.out.deliver)
	w.view.drain()
	w.view.hand = w.hand
	w.synced.Store(false)
	w.publish()
}

// follow lists, unless the last watch can be resumed, and watches until
// something fails. It calls listed when a list is complete.
func (w *Watcher) follow(ctx context.Context, c *Client, listed func()) error {
	if err := c.waitReady(ctx); err != nil {
		return err
	}
	if !w.mustList {
		same, err := w.resumable(ctx, c)
		if err != nil {
			return err
		}
		w.mustList = !same
	}
	if w.mustList {
		if err := onAnotherStack(func() error { return w.list(ctx, c) }); err != nil {
			return err
		}
		w.mustList = false
		listed()
	} else {
		w.view.resumed()
		w.resumes.Add(1)
	}
	return w.watch(ctx, c)
}

// onAnotherStack calls f and waits for it. What f needs of a stack, several times
// what it takes to wait for events, is given back when it returns, which the
// stack of a goroutine that goes on would be only after several collections, if
// at all.
func onAnotherStack(f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return <-done
}

func (w *Watcher) list(ctx context.Context, c *Client) error {
	head, err := c.head(ctx, w.of)
	if err != nil {
		return err
	}
	w.out.inOrder(true)
	if err := w.view.beginList(head); err != nil {
		return err
	}
	err = c.list(ctx, w.of, head.revision, func(chunk []*keyValue) error {
		err := w.view.listed(chunk)
		w.publish()
		return err
	})
	if err != nil {
		return err
	}
	w.view.endList()
	w.out.inOrder(false)
	w.synced.Store(true)
	w.lists.Add(1)
	w.publish()
	return nil
}

// resumable reports whether etcd still has the history that was followed so
// far: whether the newest key known stood at our revision as we know it, value
// included. The cluster id alone does not tell, as an etcd that is started anew
// with the same settings has the same one. Where there is nothing to compare, or it is
// compacted, a list has to tell.
func (w *Watcher) resumable(ctx context.Context, c *Client) (bool, error) {
	newest := w.view.known.newest()
	if newest == nil {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	key := w.of.start + string(w.view.known.key(newest))
	resp, err := c.etcd.Get(ctx, key, clientv3.WithRev(max(w.view.at.revision, newest.revision())))
	switch {
	case errors.Is(err, rpctypes.ErrCompacted), errors.Is(err, rpctypes.ErrFutureRev):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("resume %s: %w", w, c.explain(err))
	}
	if resp.Header.ClusterId != w.view.at.cluster || len(resp.Kvs) != 1 {
		return false, nil
	}
	kv := resp.Kvs[0]
	return kv.ModRevision == newest.revision() && uint32(maphash.Bytes(w.view.seed, kv.Value)) == newest.digest, nil
}

// watch applies what happens after view.at until the watch breaks.
func (w *Watcher) watch(ctx context.Context, c *Client) error {
	err := w.watchOver(ctx, c, false)
	if errors.Is(err, errFlooded) {
		err = w.watchOver(ctx, c, true)
	}
	w.mustList = w.mustList || errors.Is(err, errDrifted)
	return fmt.Errorf("watch %s: %w", w, err)
}

// watchOver watches over the stream of all watches of c, or over one apart.
func (w *Watcher) watchOver(ctx context.Context, c *Client, apart bool) error {
	wt := c.streams.carry(w, apart)
	defer c.streams.leave(wt)
	ctx, cancel := context.WithCancel(ctx)
	compare := startDuty(w.untilComparison(c.cfg.CompareInterval), func() time.Duration { return w.compareAgain(ctx, c, wt.end) })
	defer compare.stop()
	defer cancel()
	select {
	case err := <-wt.ended:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// answered applies one answer of the watch. viewMu is held.
func (w *Watcher) answered(resp *etcdserverpb.WatchResponse) error {
	if id := resp.Header.GetClusterId(); id != 0 && id != w.view.at.cluster {
		return fmt.Errorf("%w: cluster id %x, before %x", ErrHistoryChanged, id, w.view.at.cluster)
	}
	if resp.CompactRevision != 0 {
		w.mustList = true
		return fmt.Errorf("revision %d and later ones up to %d are compacted", w.view.at.revision+1, resp.CompactRevision)
	}
	if resp.Canceled {
		w.mustList = true
		return fmt.Errorf("ended by the server: %s", resp.CancelReason)
	}
	if err := w.view.watched(resp); err != nil {
		w.mustList = true
		return err
	}
	w.publish()
	return nil
}

func (c *Client) progressInterval() time.Duration {
	return min(progressInterval, c.cfg.LivenessTimeout/3)
}

// hand puts a batch into the outbox. Whoever is delivered it finds in Len what
// it says.
func (w *Watcher) hand(batch []Event) (next []Event) {
	w.keys.Store(int64(w.view.known.live))
	return w.out.put(batch)
}

// publish makes the view's figures readable by others.
func (w *Watcher) publish() {
	w.keys.Store(int64(w.view.known.live))
	w.out.reached(w.view.at.revision)
	w.dropped.Store(w.view.dropped)
}

func (w *Watcher) failed(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lastError, w.lastErrorAt = err, time.Now()
}
