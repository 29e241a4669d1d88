// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// ErrExists indicates that a key which was to be created exists with another
// value than the one wanted. It is left as it is.
var ErrExists = errors.New("the key exists with another value")

const (
	defaultTTL          = 15 * time.Minute
	defaultVerify       = time.Minute
	defaultKeysPerLease = 1000 // the cost of a put grows with the keys of its lease

	// revokeTimeout bounds how long the end of something waits for etcd.
	revokeTimeout = 2 * time.Second
)

// WriterConfig says how a Writer keeps its keys. Zero values mean defaults.
type WriterConfig struct {
	// TTL is how long the leased keys outlive their writer (15 min). It is
	// renewed three times in that time.
	TTL time.Duration
	// VerifyInterval is how often the keys are compared with etcd, and put
	// back where somebody deleted or changed them (1 min).
	VerifyInterval time.Duration
	// KeysPerLease bounds the keys of one lease (1,000); for more keys there
	// are more leases.
	KeysPerLease int
	// RevokeOnClose deletes the leased keys when Run ends, so that they do
	// not stay for the rest of the TTL. An agent that restarts wants its keys
	// to stay.
	RevokeOnClose bool
	// Fence, unless it is the zero one, is a condition of every write, see
	// TakeFence. Run ends with ErrFenced when it does not hold, and with
	// ErrHistoryChanged in another etcd, where nobody holds it.
	Fence Fence
	Log   *slog.Logger
}

func (c WriterConfig) withDefaults() WriterConfig {
	if c.TTL <= 0 {
		c.TTL = defaultTTL
	}
	if c.VerifyInterval <= 0 {
		c.VerifyInterval = defaultVerify
	}
	if c.KeysPerLease <= 0 {
		c.KeysPerLease = defaultKeysPerLease
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Writer makes etcd equal a set of desired keys. Set, Create and Delete only
// say what should be true, at any time and from any goroutine, and never
// block; Run makes it true, as a rule in the order in which it was said, and
// keeps it so. What is not yet true when etcd is unreachable is not forgotten.
type Writer struct {
	c   *Client
	cfg WriterConfig

	wake  chan struct{} // of capacity 1: there is something to write
	ready chan struct{}

	mu       sync.Mutex
	records  map[string]*record
	queue    []string // keys to write, in order
	said     uint64   // counts what was said
	barriers []barrier
	started  bool // Run was called: ready is among the barriers, or closed
	leases   []*writerLease
	doubt    bool // a lease was lost: others, and keys without one, may be as well
	lastErr  error
	lastAt   time.Time
}

// WriterStatus is the state of a Writer.
type WriterStatus struct {
	Keys        int // desired
	Pending     int // writes and deletions that etcd does not have yet
	Leases      []LeaseID
	LastError   error // of the last request that failed, also when all is well again
	LastErrorAt time.Time
	Errors      map[string]error // by key: why it is not in etcd, and will not be before something changes
}

// record is what should be true of one key. Guarded by Writer.mu.
type record struct {
	intent intent
	value  []byte
	said   uint64 // when it was last said, in order
	since  uint64 // when that was said since which etcd is behind; 0: it was lost
	queued bool
	taken  bool // a request about it is under way
	err    error
	canary func() []byte // makes the value of a canary, nil for other keys

	// lease is the one under which the key was last tried to be put, nil if
	// it never was or if that lease is lost, and the key with it. held tells
	// that etcd has confirmed it.
	lease *writerLease
	held  bool
	// made is the value with which this writer is known to have created the
	// key, nil if it did not. When the answer to a creation is lost, the key
	// counts as another's: to leave one is better than to take one away.
	made []byte
}

type intent uint8

const (
	intendSet    intent = iota // value under a lease
	intendCreate               // value without lease, unless the key exists
	intendDelete               // no such key of ours
)

// NewWriter returns a writer to c's etcd. When another etcd takes that one's
// place, everything is put there: c then has the new one's history.
func NewWriter(c *Client, cfg WriterConfig) *Writer {
	return &Writer{
		c:       c,
		cfg:     cfg.withDefaults(),
		wake:    make(chan struct{}, 1),
		ready:   make(chan struct{}),
		records: make(map[string]*record),
	}
}

// Set wants key to have value, under a lease: it vanishes when the writer has
// been gone for the TTL. A value that another writer gave it is overwritten.
func (w *Writer) Set(key string, value []byte) { w.want(key, intendSet, value) }

// Create wants key to exist, without a lease. If it exists with another value
// that one stays, and Status tells ErrExists for the key. A key is either set
// or created, never now the one and now the other.
func (w *Writer) Create(key string, value []byte) { w.want(key, intendCreate, value) }

// Delete wants key not to exist as this writer put it. What another writer put
// there meanwhile, or this one's predecessor before a restart, stays; the
// latter until its lease ends. So does a created key that existed before.
func (w *Writer) Delete(key string) { w.want(key, intendDelete, nil) }

// Release ends the care for a key that was to be created, and leaves it in
// etcd: whoever else uses it may go on.
func (w *Writer) Release(key string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r := w.records[key]; r != nil && r.intent == intendCreate {
		w.forget(key, r)
	}
}

// Observe tells the writer what a watch saw of a key. One that is to be there
// and is not as it should be is put back at once.
func (w *Writer) Observe(key string, value []byte, exists bool) { w.saw(key, value, exists) }

// deleteAll wants no key of this writer to exist.
func (w *Writer) deleteAll() {
	w.mu.Lock()
	keys := w.inOrder(func(*record) bool { return true })
	w.mu.Unlock()
	for _, key := range keys {
		w.Delete(key)
	}
}

func (w *Writer) want(key string, to intent, value []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r, ok := w.records[key]
	switch {
	case !ok && to == intendDelete:
		return
	case !ok:
		r = &record{}
		w.records[key] = r
	case r.canary == nil && r.intent == to && bytes.Equal(r.value, value):
		return
	}
	w.say(r)
	r.intent, r.value, r.canary = to, bytes.Clone(value), nil
	if to == intendDelete && !r.mayExist() && !r.taken {
		w.forget(key, r)
		return
	}
	w.enqueue(key, r)
}

// say numbers what is wanted now of a record. The caller holds mu.
func (w *Writer) say(r *record) {
	w.said++
	if !r.missing() {
		r.since = w.said
	}
	r.said, r.err = w.said, nil
}

// missing reports whether etcd does not have what was last said of the key. A
// key to create that exists is not missing, whatever it holds.
func (r *record) missing() bool {
	return r.queued || r.taken || r.err != nil && !errors.Is(r.err, ErrExists)
}

// mayExist reports whether etcd may hold the key as this writer put it.
func (r *record) mayExist() bool { return r.lease != nil || r.made != nil }

// enqueue has a key written. The caller holds mu.
func (w *Writer) enqueue(key string, r *record) {
	if !r.queued {
		r.queued = true
		w.queue = append(w.queue, key)
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// restore has a key written that etcd had, and has lost. The caller holds mu.
func (w *Writer) restore(key string, r *record) {
	r.since = 0
	w.enqueue(key, r)
}

// forget ends the care for a key that is gone. The caller holds mu.
func (w *Writer) forget(key string, r *record) {
	r.release()
	delete(w.records, key)
	w.checkBarriers()
}

// release gives up the key's place in its lease. The caller holds mu.
func (r *record) release() {
	if r.lease != nil {
		r.lease.keys--
	}
	r.lease, r.held = nil, false
}

// Ready is closed when all that was wanted before Run is in etcd, or is known
// to be refused for good.
func (w *Writer) Ready() <-chan struct{} { return w.ready }

// String returns the task's name.
func (w *Writer) String() string { return "kvstore writer" }

// Status returns the present state.
func (w *Writer) Status() WriterStatus {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := WriterStatus{LastError: w.lastErr, LastErrorAt: w.lastAt, Errors: make(map[string]error)}
	for key, r := range w.records {
		if r.intent != intendDelete {
			s.Keys++
		}
		if r.queued || r.taken {
			s.Pending++
		}
		if r.err != nil {
			s.Errors[key] = r.err
		}
	}
	for _, l := range w.leases {
		s.Leases = append(s.Leases, l.id)
	}
	return s
}

// Run writes until ctx ends, and returns nil then. Failures are retried with a
// back-off of 50 ms to 1 min. The leases are not revoked at the end, so that
// the keys of an agent that restarts stay, unless RevokeOnClose says so; it
// takes up to 2 s then, and what keeps a lease from being revoked is returned.
// A Writer with a Fence ends with ErrFenced, too.
func (w *Writer) Run(ctx context.Context) error {
	w.start()
	err := w.keep(ctx)
	if err != nil || !w.cfg.RevokeOnClose {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), revokeTimeout)
	defer cancel()
	return w.revoke(ctx)
}

// fenced reports whether it writes behind a fence.
func (w *Writer) fenced() bool { return w.cfg.Fence != Fence{} }

// keep writes until ctx ends, the client is closed, or the fence is another's.
func (w *Writer) keep(ctx context.Context) error {
	var pause backoff
	verify := time.Now().Add(w.cfg.VerifyInterval)
	for {
		err := w.work(ctx, &verify)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, ErrClosed), errors.Is(err, ErrFenced):
			return err
		case w.fenced() && errors.Is(err, ErrHistoryChanged):
			return err
		case err == nil:
			if !w.idle(ctx, verify) {
				return nil
			}
			continue
		case errors.Is(err, ErrHistoryChanged):
			w.cfg.Log.Warn("another etcd answers: all keys are put again", "err", err)
			w.startOver()
		}
		w.failed(err)
		if !pause.wait(ctx) {
			return nil
		}
	}
}

// work does all that is due.
func (w *Writer) work(ctx context.Context, verify *time.Time) error {
	if err := w.c.waitReady(ctx); err != nil {
		return err
	}
	for { // leases fall due while there is much to write
		if err := w.renew(ctx); err != nil {
			return err
		}
		if w.doubtful() || !time.Now().Before(*verify) {
			if err := w.verify(ctx); err != nil {
				return err
			}
			*verify = time.Now().Add(w.cfg.VerifyInterval)
		}
		batch, err := w.take(ctx)
		if err != nil || len(batch) == 0 {
			return err
		}
		if err := w.write(ctx, batch); err != nil {
			return err
		}
	}
}

func (w *Writer) doubtful() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.doubt
}

// idle sleeps until there is something to do, and reports whether ctx lives.
func (w *Writer) idle(ctx context.Context, verify time.Time) bool {
	due := verify
	w.mu.Lock()
	for _, l := range w.leases {
		if at := l.renewAt(); at.Before(due) {
			due = at
		}
	}
	w.mu.Unlock()
	timer := time.NewTimer(time.Until(due))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
	case <-w.wake:
	}
	return true
}

// startOver wants everything again of an etcd that has nothing of it.
func (w *Writer) startOver() {
	w.mu.Lock()
	lost := w.leases
	w.mu.Unlock()
	for _, l := range lost {
		w.lose(l)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for key, r := range w.records {
		r.made = nil
		if r.intent == intendDelete {
			w.forget(key, r)
		}
	}
	for _, key := range w.inOrder(func(r *record) bool { return r.intent == intendCreate }) {
		w.restore(key, w.records[key])
	}
	w.c.history.repin()
}

// inOrder returns the keys of some records in the order in which they were
// said. The caller holds mu.
func (w *Writer) inOrder(which func(*record) bool) []string {
	var keys []string
	for key, r := range w.records {
		if which(r) {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, func(a, b string) int {
		return int(w.records[a].said) - int(w.records[b].said)
	})
	return keys
}

func (w *Writer) failed(err error) {
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lastErr, w.lastAt = fmt.Errorf("write to etcd: %w", err), now
}
