// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"
	"unique"

	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// withdrawRetry is how long the registry waits before it looks again for what an earlier agent left behind.
const withdrawRetry = 5 * time.Second

// Publisher makes the cluster's etcd hold a set of keys, in its own time. Implementations are safe for concurrent use
// with themselves; the calls do not block on the network.
type Publisher interface {
	// Set puts a key that is to vanish with this node.
	Set(key string, value []byte)
	// Create puts a key that stays, unless it exists already, and keeps it there until Release.
	Create(key string, value []byte)
	// Release ends the care for a key that Create put, and leaves it there.
	Release(key string)
	// Delete takes back what Set put.
	Delete(key string)
}

// Identities finds identities for sets of labels; an [Allocator] does.
type Identities interface {
	// Recalled is closed once what an earlier agent of this node had allocated is known.
	Recalled() <-chan struct{}
	// Want says which sets are in use, by their canonical form: all of them, if they are complete.
	Want(sets map[string]identity.Labels, complete bool)
	// Identity returns the identity of labels, or Invalid and why they have none. One with an error is that of before the
	// restart, and not certain.
	Identity(labels string) (identity.ID, error)
	// Changed returns a channel that closes when Identity or Problems has another answer.
	Changed() <-chan struct{}
	// Problems returns what keeps identities from being kept across restarts.
	Problems() []SourceError
}

var _ Identities = (*Allocator)(nil)

// Config is what a [Registry] works with.
type Config struct {
	// Sources of workloads, the one that takes precedence first. They run by themselves.
	Sources     []Source
	ClusterName string
	ClusterID   identity.ClusterID
	NodeName    string
	// Filter says which labels make an identity.
	Filter identity.Filter
	// HostIP is the address of this node, by which others reach its endpoints. It must be valid if Publisher is set.
	HostIP netip.Addr

	IPs        *ipcache.Table
	Identities *identity.Table
	// Allocator finds the identities of workloads that come without. Nil: they have none.
	Allocator Identities
	// Publisher takes what other nodes and clusters are to know. Nil: nothing is published.
	Publisher Publisher
	// Leftovers are the keys of earlier agents of this node. Nil: none are withdrawn.
	Leftovers Leftovers
	Log       *slog.Logger
}

// Registry keeps this node's endpoints equal to what the sources know.
type Registry struct {
	cfg   Config
	ready chan struct{}
	// questions are for what only keep touches, which answers them in its turn.
	questions chan func()

	// Only keep touches these.
	precedence precedence
	labelled   map[string]labelled        // workloads of the last round, by name
	wanted     map[string]identity.Labels // to be allocated, by canonical form
	inForce    desired

	mu        sync.Mutex
	status    Status // guarded by mu; its slices are replaced, never changed
	addresses addressBook
}

// New assembles a registry; nothing happens before Run.
func New(cfg Config) (*Registry, error) {
	switch {
	case cfg.IPs == nil || cfg.Identities == nil || cfg.Log == nil:
		return nil, errors.New("endpoint: IPs, Identities and Log are required")
	case cfg.Publisher != nil && !cfg.HostIP.IsValid():
		return nil, errors.New("endpoint: publishing endpoints needs the node's address")
	}
	return &Registry{cfg: cfg, ready: make(chan struct{}), questions: make(chan func())}, nil
}

func (r *Registry) String() string { return "endpoints" }

// Ready is closed once every source has been heard and its workloads are in force.
func (r *Registry) Ready() <-chan struct{} { return r.ready }

// Run follows the sources until ctx ends. What is in force then stays: the claims in the tables and the keys in etcd.
func (r *Registry) Run(ctx context.Context) error {
	wake := make(chan struct{}, 1)
	group, ctx := errgroup.WithContext(ctx)
	for _, s := range r.cfg.Sources {
		follow(ctx, group, wake, s.Changed)
		group.Go(func() error {
			select {
			case <-ctx.Done():
			case <-s.Ready():
				poke(wake)
			}
			return nil
		})
	}
	if r.cfg.Allocator != nil {
		follow(ctx, group, wake, r.cfg.Allocator.Changed)
	}
	poke(wake)
	group.Go(func() error { return r.keep(ctx, wake) })
	if r.cfg.Leftovers != nil {
		group.Go(func() error { return r.withdrawOnce(ctx) })
	}
	return group.Wait()
}

// follow pokes wake at every change, until ctx ends.
func follow(ctx context.Context, group *errgroup.Group, wake chan struct{}, changed func() <-chan struct{}) {
	next := changed()
	group.Go(func() error {
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-next:
				next = changed()
				poke(wake)
			}
		}
	})
}

func poke(wake chan struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// keep brings what is in force in line with the sources at every change.
func (r *Registry) keep(ctx context.Context, wake <-chan struct{}) error {
	if r.cfg.Allocator != nil { // else what the kernel knows would be taken for nobody's, for a moment
		select {
		case <-ctx.Done():
			return nil
		case <-r.cfg.Allocator.Recalled():
		}
	}
	ready := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-wake:
			heard := r.heard() // before what is heard
			r.update(heard)
			if heard && !ready {
				ready = true
				r.complete()
			}
		case question := <-r.questions:
			question()
		}
	}
}

// heard reports whether every source is known completely.
func (r *Registry) heard() bool {
	for _, s := range r.cfg.Sources {
		select {
		case <-s.Ready():
		default:
			return false
		}
	}
	return true
}

// update brings what is in force in line with the sources, all of which have been heard if the outcome is complete.
func (r *Registry) update(complete bool) {
	sources := make([][]Workload, len(r.cfg.Sources))
	var problems []SourceError
	for i, s := range r.cfg.Sources {
		problems = append(problems, s.Problems()...)
		sources[i] = s.Workloads()
	}
	settled, conflicts := r.precedence.settle(sources)
	accepted, refused := r.identify(settled, complete)
	problems = slices.Concat(problems, conflicts, refused)
	if r.cfg.Allocator != nil {
		problems = append(problems, r.cfg.Allocator.Problems()...)
	}
	slices.SortStableFunc(problems, func(a, b SourceError) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line))
	})
	next, err := r.desire(accepted)
	if err != nil {
		// What is in force is better than a part of what is declared.
		r.report(nil, append(problems, SourceError{Message: err.Error()}))
		return
	}
	r.apply(next)
	r.report(accepted, problems)
}

// resolved is a workload with the labels that make its identity, and the identity.
type resolved struct {
	Workload
	labels identity.Labels
	text   string // canonical form of the labels
	id     identity.ID
	err    error // why the identity is not the workload's own yet, or not certain
}

// restored reports whether the identity is that of before a restart, which etcd has not confirmed: it is in force here,
// and nobody is told.
func (x *resolved) restored() bool { return x.err != nil && x.id != identity.Init }

// identify finds the identity of each workload: its own, or the one of its labels. Until that is found it is init.
func (r *Registry) identify(workloads []Workload, complete bool) (accepted []resolved, refused []SourceError) {
	static := make(map[identity.ID]*resolved)
	accepted = make([]resolved, 0, len(workloads)) // static points into it
	r.wanted = make(map[string]identity.Labels)
	before := r.labelled
	r.labelled = make(map[string]labelled, len(workloads))
	for i := range workloads {
		w := &workloads[i]
		x := r.label(w, before)
		first := static[w.Identity]
		switch {
		case x.err != nil:
			refused = append(refused, w.problem("%s", x.err))
			continue
		case slices.Contains(w.IPs, r.cfg.HostIP):
			refused = append(refused, w.problem("ip %s is the address of this node", r.cfg.HostIP))
			continue
		case first != nil && first.text != x.text:
			refused = append(refused, w.problem("identity %s stands already for the labels %s of %s, from %s",
				w.Identity, first.labels, first.key(), first.place()))
			continue
		}
		accepted = append(accepted, resolved{Workload: *w, labels: x.labels, text: x.text, id: w.Identity})
		switch x := &accepted[len(accepted)-1]; {
		case w.Identity == identity.Invalid:
			r.wanted[x.text] = x.labels
		case first == nil:
			static[w.Identity] = x
		}
	}
	r.allocated(accepted, complete)
	return accepted, refused
}

// labelled is what a workload has said of itself, with the labels that make its identity.
type labelled struct {
	said   identity.Workload
	labels identity.Labels
	text   string // canonical form of the labels
	err    error  // why it has none
}

// label finds the labels that make a workload's identity. Most workloads are as they were in the round before, and the patterns
// need not be asked again.
func (r *Registry) label(w *Workload, before map[string]labelled) labelled {
	said := identity.Workload{
		Cluster: r.cfg.ClusterName, Namespace: w.Namespace, ServiceAccount: w.ServiceAccount,
		Labels: w.Labels, NamespaceLabels: w.NamespaceLabels,
	}
	key := w.key()
	x, ok := before[key]
	if !ok || !x.said.Equal(said) {
		x = labelled{said: said}
		if x.labels, x.err = r.cfg.Filter.Labels(said); x.err == nil {
			x.text = unique.Make(x.labels.String()).Value() // many workloads have the same
		}
	}
	r.labelled[key] = x
	return x
}

// errNoAllocator indicates a workload whose identity nobody can find.
var errNoAllocator = errors.New("this node has no etcd to allocate an identity in: give --kvstore-config, or an identity")

func (r *Registry) allocated(accepted []resolved, complete bool) {
	if r.cfg.Allocator != nil {
		r.cfg.Allocator.Want(r.wanted, complete)
	}
	for i := range accepted {
		x := &accepted[i]
		if x.Identity != identity.Invalid {
			continue
		}
		x.err = errNoAllocator
		if r.cfg.Allocator != nil {
			x.id, x.err = r.cfg.Allocator.Identity(x.text)
		}
		if x.id == identity.Invalid {
			x.id = identity.Init
		}
	}
}
