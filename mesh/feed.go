// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/weftmesh/weft/kvstore"
)

// decoder turns the objects of one kind into changes of the tables. Its methods are called by one goroutine at a time;
// key and value are valid during the call, and, until the next flush, their bytes do not change.
type decoder interface {
	// upsert takes a new or changed object. The error is errIgnored, or a refusal.
	upsert(key, value []byte, revision int64) error
	// remove takes back what key stood for; an unknown key is fine.
	remove(key []byte)
	// flush carries out what the calls before it left undone. It is told when the oldest of what they brought arrived; zero
	// if that is not to be timed.
	flush(arrived time.Time)
}

// feed carries the objects of one kind of one cluster from its etcd through a decoder into the tables. It outlives
// connections: what has been delivered once is compared with what the next connection lists.
type feed struct {
	kind    string // as in Rejection.Kind
	rejects *rejections
	keep    time.Duration // how long the last good value outlives a bad one
	synced  func()        // called when all has been listed over the present connection; no lock is held
	seen    *sightings    // told of all that is delivered

	mu      sync.Mutex
	decode  decoder
	prefix  prefix           // replaced, with watcher, by move, between connections
	watcher *kvstore.Watcher // of prefix
	// refused holds the keys whose present value is not in use, and since when; zero when the last good value has been
	// withdrawn too. It is proportional to what the remote stores, as is the watcher's own memory.
	refused map[string]time.Time
	// left holds, after a move, the keys known from the old prefix that the new one has not shown yet.
	left    map[string]struct{}
	moving  bool
	listed  bool      // completely, at least once
	current bool      // completely, over the present connection
	started time.Time // when the watcher began to run over the present connection

	halt    <-chan struct{} // ends the drain that is going on; nil if none is. It belongs to who drains
	drained int             // by the present drain, which the watcher has not forgotten yet
}

func newFeed(kind string, p prefix, decode decoder, rejects *rejections, keep time.Duration, synced func()) *feed {
	f := &feed{
		kind: kind, decode: decode, rejects: rejects, keep: keep, synced: synced, prefix: p,
		refused: make(map[string]time.Time),
	}
	f.watcher = kvstore.NewWatcher(p.keys, f.deliver)
	return f
}

// run follows the kind over one connection, once start is closed. It returns nil when ctx ends.
func (f *feed) run(ctx context.Context, c *kvstore.Client, start <-chan struct{}) error {
	select {
	case <-start:
		f.mu.Lock()
		f.started = time.Now()
		f.mu.Unlock()
		return f.watcher.Run(ctx, c)
	case <-ctx.Done():
		return nil
	}
}

// disconnected says that what is known is not being followed any more.
func (f *feed) disconnected() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.current = false
}

// deliver is the watcher's callback.
func (f *feed) deliver(events []kvstore.Event) {
	if f.halt != nil {
		f.retract(events)
		return
	}
	if f.apply(events) {
		f.synced()
	}
	f.seen.note(events, time.Now())
}

// apply takes a batch of events, and reports whether it ended a listing.
func (f *feed) apply(events []kvstore.Event) (synced bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range events {
		e := &events[i]
		switch e.Kind {
		case kvstore.Created, kvstore.Modified:
			f.upsert(e)
		case kvstore.Deleted:
			f.remove(e.Key)
		case kvstore.Synced:
			f.sweep()
			synced = true
		}
	}
	arrived := time.Time{}
	if f.current {
		arrived = f.watcher.Received()
	}
	f.decode.flush(arrived)
	if synced {
		f.listed, f.current = true, true
	}
	return synced
}

func (f *feed) upsert(e *kvstore.Event) {
	if f.left != nil {
		delete(f.left, string(e.Key))
	}
	err := f.decode.upsert(e.Key, e.Value, e.Revision)
	if err == nil {
		if len(f.refused) > 0 {
			delete(f.refused, string(e.Key))
		}
		return
	}
	if _, ok := f.refused[string(e.Key)]; !ok {
		f.refused[string(e.Key)] = time.Now()
	}
	if !errors.Is(err, errIgnored) {
		f.rejects.add(f.kind, e.Key, err)
	}
}

func (f *feed) remove(key []byte) {
	if f.moving {
		f.left[string(key)] = struct{}{}
		return
	}
	if len(f.refused) > 0 {
		delete(f.refused, string(key))
	}
	f.decode.remove(key)
}

// sweep deletes what a move left behind.
func (f *feed) sweep() {
	for key := range f.left {
		f.remove([]byte(key))
	}
	f.left = nil
}

// expire withdraws last good values that are too old by now.
func (f *feed) expire(now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, since := range f.refused {
		if !since.IsZero() && now.Sub(since) >= f.keep {
			f.decode.remove([]byte(key))
			f.refused[key] = time.Time{}
		}
	}
	f.decode.flush(time.Time{})
}

// move makes the feed follow another prefix that holds the same keys. Nothing is deleted until the new prefix has been
// listed. Not concurrently with run.
func (f *feed) move(p prefix) {
	f.mu.Lock()
	f.moving = true
	if f.left == nil {
		f.left = make(map[string]struct{})
	}
	f.mu.Unlock()

	f.watcher.Drain() // into f.left

	f.mu.Lock()
	defer f.mu.Unlock()
	f.moving, f.current = false, false
	f.prefix, f.watcher = p, kvstore.NewWatcher(p.keys, f.deliver)
}

// drainShare is how many objects a drain deletes before it lets others at the tables. A whole delivery would hold up each of
// their changes for milliseconds.
const drainShare = 256

// retract is deliver during a drain.
func (f *feed) retract(events []kvstore.Event) {
	for share := range slices.Chunk(events, drainShare) {
		select {
		case <-f.halt:
			return
		default:
		}
		f.apply(share)
		f.mu.Lock()
		f.drained += len(share)
		f.mu.Unlock()
		runtime.Gosched()
	}
}

// drain deletes all that the feed has brought, a share at a time, so that others get at the tables in between. It reports
// whether it has; when stop is closed, the rest stays. Not concurrently with run.
func (f *feed) drain(stop <-chan struct{}) bool {
	f.halt = stop
	f.watcher.Drain() // which delivers before it returns

	f.mu.Lock()
	defer f.mu.Unlock()
	f.halt, f.drained, f.current = nil, 0, false
	select {
	case <-stop:
		return false
	default:
	}
	f.sweep()
	f.decode.flush(time.Time{})
	return true
}

// feedStanding is how far a feed has come.
type feedStanding struct {
	inUse   int   // objects whose present value is in use
	listed  bool  // completely, at least once
	current bool  // completely, over the present connection
	lost    error // what keeps it from following, nil if nothing does
}

func (f *feed) standing() feedStanding {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := feedStanding{inUse: max(0, f.watcher.Len()-f.drained-len(f.refused)), listed: f.listed, current: f.current}
	if w := f.watcher.Status(); !w.Live && w.LastErrorAt.After(f.started) {
		s.lost = w.LastError
	}
	return s
}
