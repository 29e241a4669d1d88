// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// ErrExhausted indicates a cluster whose range has no free identity left.
var ErrExhausted = errors.New("the cluster's range of identities is exhausted")

// errConflict indicates an identity that etcd binds to other labels than those that this node uses it for.
var errConflict = errors.New("the identity stands for other labels in etcd, and is given up")

// How an [Allocator] works.
const (
	// defaultParallel bounds the allocations under way at once, each of which waits for etcd most of the time.
	defaultParallel = 64
	// retryAfter is how long labels rest after a round of attempts that came to nothing.
	retryAfter = 5 * time.Second
	retryLook  = time.Second
)

// AllocatorConfig is what an [Allocator] works with.
type AllocatorConfig struct {
	Client      *kvstore.Client
	ClusterName string
	ClusterID   identity.ClusterID
	Layout      identity.Layout
	// StateDir is where the identities in use are kept for the next agent of this node. It is made when there is
	// something to keep.
	StateDir string
	// HostIP names this node among those that use an identity.
	HostIP netip.Addr
	// Observe is told of keys that bind identities when they are written or deleted, so that those in use are put back.
	// May be nil.
	Observe func(key string, value []byte, exists bool)
	// Parallel bounds the allocations under way at once; 0: 64.
	Parallel int
	Log      *slog.Logger
}

// Allocator finds the identities of sets of labels, the same ones as all nodes of the cluster find. [Allocator.Want] says
// which sets are in use; Run finds an identity for each, and the others are forgotten. An identity that was found is
// kept, whatever happens to etcd, for as long as its labels are wanted, unless etcd binds it to other labels. It is also kept
// on disk: the next agent of the node has it from the start, and makes sure of it when etcd can be asked.
//
// With the identity of labels that had none, Run makes etcd hold a key that binds the two, and one that says that this
// node uses it, which vanishes after a while: it is for a [Publisher] to keep both.
type Allocator struct {
	cfg      AllocatorConfig
	ready    chan struct{}
	recalled chan struct{}
	leases   handover
	memory   *memory

	mu        sync.Mutex
	listed    bool
	before    map[string]identity.ID // what an earlier agent had, by labels, unless that is known to be wanted no more
	pool      *identity.Pool
	used      map[string]*allocation // by canonical labels
	byID      map[identity.ID]*allocation
	queue     []*allocation // to be worked on
	failed    int64         // attempts that came to nothing
	allocated int64         // that did not
	changed   chan struct{} // closed and replaced when an allocation changes
	wake      chan struct{} // closed and replaced when the queue grows
}

// allocation is a set of labels in use. Guarded by Allocator.mu, but for the labels.
type allocation struct {
	labels identity.Labels
	text   string
	id     identity.ID // Invalid: none yet
	err    error       // why not, or why it is not certain
	moves  bool        // etcd has another identity for these labels, which all are to use: this one stands until it is joined
	busy   bool        // queued or worked on
	retry  time.Time
}

// AllocatorStatus is the state of an [Allocator].
type AllocatorStatus struct {
	Listed    bool             // all identities of the cluster are known
	Used      int              // sets of labels in use
	Waiting   int              // of those without an identity
	Restored  int              // of those with the identity that an earlier agent had, which etcd has not confirmed
	Free      int              // identities of the cluster's range
	Allocated int64            // identities that were found for labels in use, ever
	Failed    int64            // attempts that came to nothing, ever
	Errors    map[string]error // by labels: why they have no identity, or no certain one
}

// NewAllocator assembles an allocator; etcd is not asked before Run.
func NewAllocator(cfg AllocatorConfig) (*Allocator, error) {
	if cfg.Client == nil || !cfg.HostIP.IsValid() || cfg.StateDir == "" || cfg.Log == nil {
		return nil, errors.New("endpoint: an allocator needs Client, HostIP, StateDir and Log")
	}
	if cfg.Parallel <= 0 {
		cfg.Parallel = defaultParallel
	}
	lo, hi := cfg.Layout.Range(cfg.ClusterID)
	a := &Allocator{
		cfg: cfg, ready: make(chan struct{}), recalled: make(chan struct{}),
		leases: handover{client: cfg.Client}, pool: identity.NewPool(lo, hi),
		used: make(map[string]*allocation), byID: make(map[identity.ID]*allocation),
		changed: make(chan struct{}), wake: make(chan struct{}),
	}
	a.memory = newMemory(&a.cfg, a.tell)
	return a, nil
}

func (a *Allocator) String() string { return "identity allocator" }

// Ready is closed once all identities of the cluster are known. Nothing is allocated before.
func (a *Allocator) Ready() <-chan struct{} { return a.ready }

// Recalled is closed once what an earlier agent of this node had allocated is known.
func (a *Allocator) Recalled() <-chan struct{} { return a.recalled }

// Run allocates until ctx ends.
func (a *Allocator) Run(ctx context.Context) error {
	a.recall(a.memory.recall(a.cfg.Layout, a.cfg.ClusterID))
	close(a.recalled)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return a.memory.keep(ctx, a.known) })
	group.Go(func() error { return a.follow(ctx, kvstore.NewWatcher(identity.StatePrefix+"/id/", a.seeMasters)) })
	group.Go(func() error { return a.retryFailed(ctx) })
	for range a.cfg.Parallel {
		group.Go(func() error { return a.work(ctx) })
	}
	return group.Wait()
}

// follow runs a watcher, also into an etcd that takes the place of the first: the writer of the same client is who
// decides that it does.
func (a *Allocator) follow(ctx context.Context, w *kvstore.Watcher) error {
	for {
		err := w.Run(ctx, a.cfg.Client)
		if !errors.Is(err, kvstore.ErrHistoryChanged) {
			return err
		}
		if !pause(ctx, retryLook) {
			return nil
		}
	}
}

// pause waits, and reports whether ctx still lives.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// seeMasters takes note of which identity stands for what.
func (a *Allocator) seeMasters(events []kvstore.Event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, e := range events {
		if e.Kind == kvstore.Synced {
			if !a.listed {
				a.listed = true
				close(a.ready)
				a.awaken()
			}
			continue
		}
		id, err := identity.ParseKey(string(e.Key))
		if err != nil {
			continue // nobody's identity, and none that could be picked
		}
		exists := e.Kind != kvstore.Deleted
		if exists {
			a.bound(id, string(e.Value))
		} else {
			a.pool.Unbind(id)
		}
		a.observe(identity.MasterKey(id), e.Value, exists)
	}
}

// bound notes what etcd binds an identity to, and gives the identity up if it is in use for other labels: two sets of
// labels must never share one. The caller holds mu.
func (a *Allocator) bound(id identity.ID, labels string) {
	a.pool.Bind(id, labels)
	if x := a.used[labels]; x != nil {
		a.converge(x)
	}
	x := a.byID[id]
	if x == nil || x.text == labels {
		return
	}
	a.cfg.Log.Warn("identity in use is bound to other labels in etcd: another one is allocated", "identity", id, "labels", x.text, "etcd", labels)
	a.forget(x)
	x.err = fmt.Errorf("identity %s: %w", id, errConflict)
	a.enqueue(x)
	a.notify()
}

// converge has labels use the lowest of the identities that etcd binds to them. That there are several comes of a loss: the keys of
// one were gone, or not seen yet, when another node picked the other. The caller holds mu.
func (a *Allocator) converge(x *allocation) {
	if lowest, ok := a.pool.ID(x.text); !ok || x.id == identity.Invalid || lowest >= x.id || x.moves {
		return
	}
	a.cfg.Log.Warn("etcd has several identities for the same labels: the lowest is used", "identity", x.id, "labels", x.text)
	x.moves = true
	a.enqueue(x)
}

func (a *Allocator) observe(key string, value []byte, exists bool) {
	if a.cfg.Observe != nil {
		a.cfg.Observe(key, value, exists)
	}
}

// recall takes what an earlier agent had.
func (a *Allocator) recall(before map[string]identity.ID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.before = before
	for _, x := range a.used {
		a.restore(x)
	}
}

// restore gives labels the identity that they had before, until etcd is heard. The caller holds mu.
func (a *Allocator) restore(x *allocation) {
	id, ok := a.before[x.text]
	if !ok || x.id != identity.Invalid || a.byID[id] != nil {
		return
	}
	if bound, ok := a.pool.Labels(id); ok && bound != x.text {
		return
	}
	x.id, x.err = id, errUnconfirmed
	a.byID[id] = x
	a.pool.Hold(id)
	a.notify()
}

// known is what the next agent is to have.
func (a *Allocator) known() map[string]identity.ID {
	a.mu.Lock()
	defer a.mu.Unlock()
	known := maps.Clone(a.before)
	if known == nil {
		known = make(map[string]identity.ID, len(a.used))
	}
	for text, x := range a.used {
		if x.id != identity.Invalid {
			known[text] = x.id
		}
	}
	return known
}

// Want says which sets of labels are in use. It never waits for etcd. That they are complete means that an earlier agent
// had no others that may be wanted still.
func (a *Allocator) Want(sets map[string]identity.Labels, complete bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for text, x := range a.used {
		if _, ok := sets[text]; !ok {
			a.forget(x)
			delete(a.used, text)
			delete(a.before, text)
		}
	}
	for text, labels := range sets {
		if a.used[text] == nil {
			x := &allocation{labels: labels, text: text}
			a.used[text] = x
			a.restore(x)
			a.enqueue(x)
		}
	}
	if complete && a.before != nil {
		a.before = nil
		a.memory.touch()
	}
}

// Identity returns the identity of labels that are wanted, or Invalid and why they have none yet: nil if it is under way.
// An identity with an error is one that an earlier agent had: it is in force on this node, and not to be announced yet.
func (a *Allocator) Identity(labels string) (identity.ID, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	x := a.used[labels]
	if x == nil {
		return identity.Invalid, nil
	}
	return x.id, x.err
}

// Changed returns a channel that closes when Identity has another answer.
func (a *Allocator) Changed() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.changed
}

// Status returns the present state.
func (a *Allocator) Status() AllocatorStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := AllocatorStatus{Listed: a.listed, Used: len(a.used), Free: a.pool.Free(), Allocated: a.allocated, Failed: a.failed, Errors: make(map[string]error)}
	for text, x := range a.used {
		switch {
		case x.id == identity.Invalid:
			s.Waiting++
		case x.err != nil:
			s.Restored++
		}
		if x.err != nil {
			s.Errors[text] = x.err
		}
	}
	return s
}

// forget takes an allocation's identity from it. The caller holds mu.
func (a *Allocator) forget(x *allocation) {
	if x.id != identity.Invalid {
		delete(a.byID, x.id)
		a.pool.Release(x.id)
		x.id, x.moves = identity.Invalid, false
		a.memory.touch()
	}
}

// Problems returns what is wrong with what is kept for the next agent.
func (a *Allocator) Problems() []SourceError { return a.memory.problems() }

// tell is notify for who does not hold mu.
func (a *Allocator) tell() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.notify()
}

// enqueue has an allocation worked on. The caller holds mu.
func (a *Allocator) enqueue(x *allocation) {
	if !x.busy {
		x.busy = true
		a.queue = append(a.queue, x)
		a.awaken()
	}
}

// awaken has the workers look at the queue. The caller holds mu.
func (a *Allocator) awaken() {
	close(a.wake)
	a.wake = make(chan struct{})
}

// notify tells that an allocation has changed. The caller holds mu.
func (a *Allocator) notify() {
	close(a.changed)
	a.changed = make(chan struct{})
}
