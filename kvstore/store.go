// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"

	"golang.org/x/sync/errgroup"
)

// StoreConfig says what a Store shares.
type StoreConfig[T any] struct {
	// Prefix of the keys in etcd, with "/" at its end.
	Prefix string
	// Decode makes a value of what etcd holds. What it is given is good only
	// until it returns. A key whose value it refuses keeps its last good one,
	// as long as the key is there.
	Decode func(Event) (T, error)
	// Observer may be nil.
	Observer StoreObserver[T]
	// Writer says how the local keys are kept; its VerifyInterval is how often
	// they are compared with etcd, besides being watched. A store with a Fence
	// ends as a Writer with one does.
	Writer WriterConfig
}

// StoreObserver is told what happens to a Store, never concurrently, while Get
// and Snapshot tell the same. It must not call Delete or Close.
type StoreObserver[T any] interface {
	// OnUpdate tells a key that is new or has another value.
	OnUpdate(key string, value T)
	// OnDelete tells a key that is gone, and was told by OnUpdate before.
	OnDelete(key string)
	// OnSync is called once, when all that was there at first has been told.
	OnSync()
}

// Store is a set of keys that all who join it share: each puts its local keys,
// which vanish with it, and sees those of all, its own included. A local key
// that anybody changes or deletes is put back at once; the others are no
// business of this one, whoever left them. Keys are relative to the prefix.
type Store[T any] struct {
	c       *Client
	cfg     StoreConfig[T]
	log     *slog.Logger
	writer  *Writer
	watcher *Watcher
	ready   chan struct{}
	closed  chan struct{}
	once    sync.Once // closes closed

	telling sync.Mutex      // held while the observer is told
	hidden  map[string]bool // local keys whose deletion was not told; guarded by telling
	synced  bool            // guarded by telling

	mu      sync.Mutex
	shared  map[string]T     // guarded by mu
	invalid map[string]error // guarded by mu
}

// StoreStatus is the state of a Store.
type StoreStatus struct {
	Shared  int              // keys that have a value
	Invalid map[string]error // by key: why its present value is not in use
	Writer  WriterStatus     // of the local keys
	Watcher WatcherStatus
}

// NewStore returns a store in c's etcd. When another etcd takes that one's
// place, a store without a Fence follows to it and c has the new one's history:
// c is for this store alone.
func NewStore[T any](c *Client, cfg StoreConfig[T]) *Store[T] {
	s := &Store[T]{
		c:       c,
		cfg:     cfg,
		writer:  NewWriter(c, cfg.Writer),
		ready:   make(chan struct{}),
		closed:  make(chan struct{}),
		hidden:  make(map[string]bool),
		shared:  make(map[string]T),
		invalid: make(map[string]error),
	}
	s.log = s.writer.cfg.Log
	s.watcher = NewWatcher(cfg.Prefix, s.deliver)
	return s
}

// String returns the task's name.
func (s *Store[T]) String() string { return "kvstore store " + s.cfg.Prefix }

// Ready is closed when all that was there at first is known.
func (s *Store[T]) Ready() <-chan struct{} { return s.ready }

// Run keeps the local keys and follows all until ctx ends or Close is called,
// and returns nil then. The local keys stay when ctx ends, unless the Writer's
// RevokeOnClose says otherwise.
func (s *Store[T]) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		select {
		case <-s.closed:
			cancel()
		case <-ctx.Done():
		}
		return nil
	})
	g.Go(func() error { return s.writer.Run(ctx) })
	g.Go(func() error { return s.follow(ctx) })
	return g.Wait()
}

// follow runs the watcher, also into another etcd.
func (s *Store[T]) follow(ctx context.Context) error {
	var pause backoff
	for {
		err := s.watcher.Run(ctx, s.c)
		if !errors.Is(err, ErrHistoryChanged) || s.writer.fenced() {
			return err
		}
		s.log.Warn("another etcd answers: the store is read again", "prefix", s.cfg.Prefix, "err", err)
		s.c.history.repin()
		if !pause.wait(ctx) {
			return nil
		}
	}
}

// Set makes key a local one and wants it to have value. It never blocks; Flush
// waits until it is done.
func (s *Store[T]) Set(key string, value []byte) { s.writer.Set(s.cfg.Prefix+key, value) }

// Canary puts a key, which need not be below the prefix, when all that was set
// and deleted before it is in etcd: see [Writer.Canary].
func (s *Store[T]) Canary(key string, value func() []byte) { s.writer.Canary(key, value) }

// Delete deletes a local key. It never waits for etcd.
func (s *Store[T]) Delete(key string) {
	s.writer.Delete(s.cfg.Prefix + key)
	s.telling.Lock()
	defer s.telling.Unlock()
	if s.hidden[key] {
		s.deleted(key) // nothing more will be seen of it
	}
}

// Flush waits until what was set and deleted before it is in etcd, while Run
// runs. Its error is that of ctx, with one of what etcd does not have.
func (s *Store[T]) Flush(ctx context.Context) error { return s.writer.Flush(ctx) }

// Close deletes the local keys, so that nobody has to wait until their lease
// ends, and ends Run. Its error says that etcd could not be told before ctx
// ended.
func (s *Store[T]) Close(ctx context.Context) error {
	defer s.once.Do(func() { close(s.closed) })
	s.writer.deleteAll()
	return s.writer.Flush(ctx)
}

// Get returns the value of a key, local or not, as last seen in etcd.
func (s *Store[T]) Get(key string) (value T, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	value, ok = s.shared[key]
	return value, ok
}

// Snapshot returns a copy of all keys and values.
func (s *Store[T]) Snapshot() map[string]T {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.shared)
}

// Status returns the present state.
func (s *Store[T]) Status() StoreStatus {
	status := StoreStatus{Writer: s.writer.Status(), Watcher: s.watcher.Status()}
	s.mu.Lock()
	defer s.mu.Unlock()
	status.Shared, status.Invalid = len(s.shared), maps.Clone(s.invalid)
	return status
}

// deliver takes what the watcher sees.
func (s *Store[T]) deliver(events []Event) {
	s.telling.Lock()
	defer s.telling.Unlock()
	for _, e := range events {
		key := string(e.Key)
		switch e.Kind {
		case Synced:
			s.sync()
		case Deleted:
			if s.writer.saw(s.cfg.Prefix+key, nil, false) {
				s.hidden[key] = true
			} else {
				s.deleted(key)
			}
		default:
			s.writer.saw(s.cfg.Prefix+key, e.Value, true)
			delete(s.hidden, key)
			s.updated(key, e)
		}
	}
}

func (s *Store[T]) updated(key string, e Event) {
	value, err := s.cfg.Decode(e)
	s.mu.Lock()
	if err != nil {
		s.invalid[key] = err
	} else {
		delete(s.invalid, key)
		s.shared[key] = value
	}
	s.mu.Unlock()
	switch {
	case err != nil:
		s.log.Warn("etcd key has a value that cannot be used", "key", s.cfg.Prefix+key, "err", err)
	case s.cfg.Observer != nil:
		s.cfg.Observer.OnUpdate(key, value)
	}
}

func (s *Store[T]) deleted(key string) {
	delete(s.hidden, key)
	s.mu.Lock()
	_, known := s.shared[key]
	delete(s.shared, key)
	delete(s.invalid, key)
	s.mu.Unlock()
	if known && s.cfg.Observer != nil {
		s.cfg.Observer.OnDelete(key)
	}
}

func (s *Store[T]) sync() {
	if s.synced {
		return
	}
	s.synced = true
	if s.cfg.Observer != nil {
		s.cfg.Observer.OnSync()
	}
	close(s.ready)
}
