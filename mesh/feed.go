// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
)

// decoder turns the objects of one kind into changes of the tables. Its methods are called by one goroutine at a time;
// key and value are valid during the call, and, until the next flush, their bytes do not change.
type decoder interface {
	// upsert takes a new or changed object. The error is errIgnored, errWaiting, or a refusal; what was known of the key
	// before stays, unless the refusal is a partial one.
	upsert(key, value []byte, revision int64) error
	// withdraw takes back what is in use under key; an unknown key is fine.
	withdraw(key []byte)
	// remove takes back what key stood for, whether in use or not.
	remove(key []byte)
	// rejudge looks again, by the limits that are in force now, at what is in use: of addresses, at the suspects. It takes
	// back what may no longer be, and reports each key of which less, or, without an error, more is in use than before.
	rejudge(suspects []ipcache.Claim, report func(key []byte, err error))
	// flush carries out what the calls before it left undone. It is told when the oldest of what they brought arrived; zero
	// if that is not to be timed.
	flush(arrived time.Time)
}

// holder knows which objects of a kind are in use.
type holder interface {
	has(key []byte) bool
	len() int
}

// errTooManyKeys indicates a cluster whose etcd holds more keys of one kind than are worth to be remembered.
var errTooManyKeys = errors.New("too many keys")

// errJudgeAnew ends a listing or a watch that is to begin anew, so that what was refused is seen again.
var errJudgeAnew = errors.New("limits have changed")

// largestValue bounds one value, in bytes; values of nodes and services grow with labels and backends.
var largestValue = map[string]int{"node": 1 << 20, "service": 4 << 20, "ip": 64 << 10, "identity": 256 << 10}

// feed carries the objects of one kind of one cluster from its etcd through a decoder into the tables. It outlives
// connections: what has been delivered once is compared with what the next connection lists.
type feed struct {
	kind    string // as in Rejection.Kind
	rejects *rejections
	keep    time.Duration // how long the last good value outlives a bad one
	synced  func()        // called when all has been listed over the present connection; no lock is held
	seen    *sightings    // told of all that is delivered
	gate    *gate         // nil for our own cluster
	flushed func()        // called after each batch; nil: by nobody
	crowd   crowd         // with whom the first listing over a connection takes turns
	leave   func()        // ends that turn; it belongs to run, and to deliver meanwhile

	mu      sync.Mutex
	decode  decoder
	prefix  prefix           // replaced, with watcher, by move, between runs of the watcher
	watcher *kvstore.Watcher // of prefix
	sizes   sizes            // of what is in use; nil where the table knows
	holder  holder
	// refused holds the keys of which the last good value is in use instead of the present one, and since when.
	refused map[string]time.Time
	// left holds, after a move, the keys known from the old prefix that the new one has not shown yet.
	left    map[string]struct{}
	moving  bool
	listed  bool      // completely, at least once
	current bool      // completely, over the present connection
	started time.Time // when the watcher began to run over the present connection

	pass   context.Context         // of the watcher's run, nil between runs
	cancel context.CancelCauseFunc // ends it
	// limited: since the last listing began, the limits have refused something. starved: a quota has.
	limited, starved bool
	anew             retry

	halt <-chan struct{} // ends the drain that is going on; nil if none is. It belongs to who drains
}

// retry is when to list anew, so that what was refused is judged by what is in force now.
type retry struct {
	wanted bool
	due    time.Time // not before
	times  int       // in a row, without all having been taken
}

func newFeed(kind string, p prefix, decode decoder, rejects *rejections, keep time.Duration, synced func()) *feed {
	f := &feed{
		kind: kind, decode: decode, rejects: rejects, keep: keep, synced: synced, prefix: p,
		refused: make(map[string]time.Time),
	}
	if h, ok := decode.(holder); ok {
		f.holder = h
	} else {
		f.sizes = make(sizes)
		f.holder = f.sizes
	}
	f.watcher = kvstore.NewWatcher(p.keys, f.deliver)
	return f
}

// run follows the kind over one connection, once start is closed. It returns nil when ctx ends.
func (f *feed) run(ctx context.Context, c *kvstore.Client, start <-chan struct{}) error {
	select {
	case <-start:
	case <-ctx.Done():
		return nil
	}
	for {
		leave, err := f.crowd.enter(ctx)
		if err != nil {
			return nil
		}
		f.leave = leave
		pass := f.begin(ctx)
		err = f.watcher.Run(pass, c)
		leave()
		cause := context.Cause(pass)
		f.end()
		switch {
		case err != nil || ctx.Err() != nil:
			return err
		case !errors.Is(cause, errJudgeAnew):
			return cause
		}
		f.move(f.prefix)
	}
}

// begin starts a run of the watcher, which ends with ctx or when cancel is called.
func (f *feed) begin(ctx context.Context) context.Context {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.started = time.Now()
	f.pass, f.cancel = context.WithCancelCause(ctx)
	return f.pass
}

func (f *feed) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cancel(nil)
	f.pass, f.cancel = nil, nil
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
		f.leave()
		f.synced()
	}
	f.seen.note(events, time.Now())
	if f.flushed != nil {
		f.flushed()
	}
	f.slowDown(len(events))
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
			if f.moving {
				continue // of a listing that was delivered late; what counts is the one to come
			}
			f.sweep()
			synced = true
			if !f.limited {
				f.anew.times = 0
			}
		}
	}
	arrived := time.Time{}
	if f.current && f.watcher.Live() {
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
	err := f.take(e)
	if err == nil {
		if len(f.refused) > 0 {
			delete(f.refused, string(e.Key))
		}
		return
	}
	f.note(e.Key, err)
}

// take hands an object to the decoder, if it is not too much.
func (f *feed) take(e *kvstore.Event) error {
	if most := largestValue[f.kind]; len(e.Value) > most {
		return refuse(reasonTooLarge, fmt.Errorf("the value has %d bytes, more than %d", len(e.Value), most))
	}
	if f.sizes == nil {
		return f.decode.upsert(e.Key, e.Value, e.Revision)
	}
	size := len(e.Key) + len(e.Value)
	if err := f.gate.spendBytes(size - f.sizes[string(e.Key)]); err != nil {
		return err
	}
	err := f.decode.upsert(e.Key, e.Value, e.Revision)
	if err == nil || isPartial(err) {
		f.gate.addBytes(size - f.sizes[string(e.Key)])
		f.sizes[string(e.Key)] = size
	}
	return err
}

// note draws the consequences of an error about the present value of a key.
func (f *feed) note(key []byte, err error) {
	var refused *refusal
	isRefusal := errors.As(err, &refused)
	if isRefusal && refused.partial {
		delete(f.refused, string(key))
	} else if _, ok := f.refused[string(key)]; !ok && f.holder.has(key) {
		f.refused[string(key)] = time.Now()
	}
	if isRefusal {
		f.limited = f.limited || refused.limit
		f.starved = f.starved || refused.reason == reasonQuota
		f.rejects.add(f.kind, key, err)
	}
}

func (f *feed) remove(key []byte) {
	if f.moving {
		f.left[string(key)] = struct{}{}
		return
	}
	f.forget(key)
	f.decode.remove(key)
}

// forget notes that nothing of key is in use any more.
func (f *feed) forget(key []byte) {
	if len(f.refused) > 0 {
		delete(f.refused, string(key))
	}
	if size, ok := f.sizes[string(key)]; ok {
		f.gate.addBytes(-size)
		delete(f.sizes, string(key))
	}
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
		if now.Sub(since) >= f.keep {
			f.decode.withdraw([]byte(key))
			f.forget([]byte(key))
		}
	}
	f.decode.flush(time.Time{})
}

// move makes the feed follow another prefix that holds the same keys, or the same one from the beginning. Nothing is
// deleted until the new prefix has been listed. Not while the watcher runs.
func (f *feed) move(p prefix) {
	f.mu.Lock()
	f.moving = true
	f.limited, f.starved, f.anew.wanted = false, false, false
	if f.left == nil {
		f.left = make(map[string]struct{})
	}
	f.mu.Unlock()

	f.watcher.Drain() // into f.left

	f.mu.Lock()
	defer f.mu.Unlock()
	f.moving, f.current = false, f.current && p == f.prefix
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
	f.halt, f.current = nil, false
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
	s := feedStanding{inUse: max(0, f.holder.len()-len(f.refused)), listed: f.listed, current: f.current}
	if w := f.watcher.Status(); !w.Live && w.LastErrorAt.After(f.started) {
		s.lost = w.LastError
	}
	return s
}
