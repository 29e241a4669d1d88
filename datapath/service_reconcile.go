// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/weftmesh/weft/service"
)

// ServiceSource says what each frontend is to lead to. [service.Table] is the one of an agent.
type ServiceSource interface {
	// Changes returns what changed after a revision, of at most so many frontends; nothing means that there is no more. full:
	// the revision is too old to tell deletions, and all frontends follow from here on.
	Changes(since service.Revision, max int) (changes []service.Change, next service.Revision, full bool)
	// Changed returns a channel that is closed at the next change.
	Changed() <-chan struct{}
}

const (
	// serviceChunk is how many changes are taken at once.
	serviceChunk = 1024
	// unclaimedTime is how long backends stay that were found in the kernel and that nobody claims, while a cluster that may
	// do so cannot be heard. Then they go, unless a service would be left without any.
	unclaimedTime = 5 * time.Minute
	// serviceRetryMax bounds the intervals at which failed writes are tried again; that begins with reading everything.
	serviceRetryMax = 15 * time.Second
	// affinityGlance is how often the clients are counted that keep a backend.
	affinityGlance = 10 * time.Second
	// serviceGlance is how often pins and links are looked at.
	serviceGlance = time.Second
)

// serviceReconciler makes the kernel's table of services equal what the source says. Only its run method and what that
// calls write; status is safe for concurrent use.
type serviceReconciler struct {
	source     ServiceSource
	table      *serviceTable
	attacher   *serviceAttacher
	drifted    func(kind string, n int) // is told of what somebody else changed, frontends aside
	listed     func() bool
	affinities affinityMap
	abandoned  func([]abandoned) // is told of backends that are gone, to which sockets may be connected
	algorithm  service.Algorithm
	log        *slog.Logger
	requests   <-chan comparison
	pace       comparePace // of the kernel with the source

	since   service.Revision
	began   time.Time
	settled bool // what was found in the kernel is claimed or gone
	// show: programs may be attached; not before a table that was made anew has what the one before had.
	show      bool
	shown     func()                        // called once when show is set; nil: nobody wants to know
	inherited map[service.Frontend]struct{} // found in the kernel, and not spoken of yet
	spoken    map[service.Frontend]struct{} // while all are told anew; else nil
	failed    map[service.Frontend]error
	backoff   time.Duration
	nextRetry time.Time

	mu    sync.Mutex
	state ServiceStatus
}

// note changes the status.
func (r *serviceReconciler) note(change func(*ServiceStatus)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(&r.state)
}

func (r *serviceReconciler) status() ServiceStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state
}

// adopt takes over what the kernel holds and begins with the source anew.
func (r *serviceReconciler) adopt() error {
	if err := r.table.adopt(); err != nil {
		return err
	}
	r.inherited = make(map[service.Frontend]struct{}, len(r.table.all))
	for f := range r.table.all {
		r.inherited[f] = struct{}{}
	}
	r.settled = len(r.inherited) == 0
	r.again()
	return nil
}

// again begins with the source anew.
func (r *serviceReconciler) again() {
	r.since, r.spoken = service.Revision{}, map[service.Frontend]struct{}{}
}

// run reconciles until ctx ends. It calls done after each pass that left nothing to do.
func (r *serviceReconciler) run(ctx context.Context, done func()) {
	verify := time.NewTimer(r.pace.next(0))
	defer verify.Stop()
	glance := time.NewTicker(serviceGlance)
	defer glance.Stop()
	affinities := time.NewTicker(affinityGlance)
	defer affinities.Stop()
	r.countAffinities()
	for ctx.Err() == nil {
		changed := r.source.Changed()
		r.pass(ctx, time.Now())
		r.attach()
		r.publish()
		if r.well() {
			done()
		}
		if !r.wait(ctx, changed, glance.C, affinities.C, verify) {
			return
		}
	}
}

// wait returns when there may be something to do; false when ctx has ended.
func (r *serviceReconciler) wait(ctx context.Context, changed <-chan struct{}, glance, affinities <-chan time.Time, verify *time.Timer) bool {
	for {
		select {
		case <-ctx.Done():
			return false
		case <-changed:
			return true
		case now := <-glance:
			r.publish()
			if !r.settled || len(r.failed) > 0 && now.After(r.nextRetry) || r.show && !r.attacher.intact() {
				return true
			}
		case <-affinities:
			r.countAffinities()
		case <-verify.C:
			began := time.Now()
			if _, err := r.verify(ctx, true); err != nil {
				r.log.Warn("compare the services with the kernel", "err", err)
			}
			verify.Reset(r.pace.next(time.Since(began)))
			return true
		case c := <-r.requests:
			report, err := r.verify(ctx, c.repair)
			c.reply <- comparisonResult{report, err}
			return true
		}
	}
}

func (r *serviceReconciler) well() bool {
	s := r.status()
	return len(r.failed) == 0 && s.LastError == "" && (!r.show || s.attached())
}

// pass makes all that the source has to say true.
func (r *serviceReconciler) pass(ctx context.Context, now time.Time) {
	// Asked before the source is, so that what is complete is in what it says.
	listed := r.settled || r.listed()
	if len(r.failed) > 0 && now.After(r.nextRetry) {
		r.again()
	}
	for ctx.Err() == nil {
		batch, next, full := r.source.Changes(r.since, serviceChunk)
		if full {
			r.spoken = map[service.Frontend]struct{}{}
		}
		r.since = next
		for i := range batch {
			r.apply(&batch[i], now)
		}
		if len(batch) == 0 {
			break
		}
	}
	if ctx.Err() != nil {
		return
	}
	r.sweep(listed, now)
	if !r.settled {
		r.settle(listed, now)
	}
	r.show = r.show || r.settled
	if r.show && r.shown != nil {
		r.shown()
		r.shown = nil
	}
	if len(r.failed) > 0 && now.After(r.nextRetry) {
		r.backoff = min(max(2*r.backoff, retryMin), serviceRetryMax)
		r.nextRetry = now.Add(r.backoff)
	}
	if gone := r.table.takeAbandoned(); len(gone) > 0 {
		r.abandoned(gone)
	}
}

// ended takes note of what came of looking for sockets whose backends are gone. It is safe for concurrent use.
func (r *serviceReconciler) ended(e endedSockets) {
	r.note(func(s *ServiceStatus) {
		s.Destroyed += uint64(e.sockets)
		s.Namespaces, s.DestroyError = e.namespaces, ""
		if e.err != nil {
			s.DestroyError = oneLine(e.err)
		}
	})
}

// settings are those of a selection.
func (r *serviceReconciler) settings(c *service.Selection) serviceSettings {
	algorithm := c.Algorithm
	if algorithm == service.AlgorithmDefault {
		algorithm = r.algorithm
	}
	return serviceSettings{
		affinity: c.ClientAffinity,
		maglev:   algorithm == service.Maglev,
	}
}

// apply makes one change.
func (r *serviceReconciler) apply(c *service.Change, now time.Time) {
	delete(r.inherited, c.Frontend)
	switch err := r.change(c); {
	case err != nil:
		r.fail(c.Frontend, err, now)
	case c.Whole || c.Deleted: // after a failure, nothing less says that all is as it should be
		delete(r.failed, c.Frontend)
	}
}

func (r *serviceReconciler) change(c *service.Change) error {
	if c.Deleted {
		return r.table.remove(c.Frontend)
	}
	if r.spoken != nil {
		r.spoken[c.Frontend] = struct{}{}
	}
	if c.Protocol != service.TCP && c.Protocol != service.UDP {
		return r.table.remove(c.Frontend) // sockets of other protocols run no program; see Status
	}
	s := r.table.all[c.Frontend]
	switch {
	case s == nil && !c.Whole:
		return errors.New("it is not there yet") // all of it is asked for again
	case s == nil:
		return r.write(s, c, c.Backends, nil)
	case !c.Whole:
		return r.write(s, c, c.Added, c.Removed)
	}
	have := r.table.list(s)
	add, remove := differ(have, c.Backends)
	for _, b := range c.Backends {
		delete(s.unclaimed, b)
	}
	remove = slices.DeleteFunc(remove, func(b service.Backend) bool { _, ok := s.unclaimed[b]; return ok })
	return r.write(s, c, add, remove)
}

// write makes a change of backends, without those of another family, which a frontend cannot lead to.
func (r *serviceReconciler) write(s *kernelService, c *service.Change, add, remove []service.Backend) error {
	foreign := func(b service.Backend) bool { return b.Addr.Unmap().Is4() != c.Addr.Unmap().Is4() }
	if slices.ContainsFunc(add, foreign) {
		add = slices.DeleteFunc(slices.Clone(add), foreign)
	}
	if s != nil {
		for _, b := range add {
			delete(s.unclaimed, b)
		}
	}
	settings := r.settings(&c.Selection)
	err := r.table.change(c.Frontend, settings, add, remove)
	if !errors.Is(err, errServicesFull) {
		return err
	}
	// What goes must go, and makes room for some of what comes.
	if s != nil || len(add) == 0 {
		err = r.table.change(c.Frontend, settings, nil, remove)
	}
	for i := 0; i < len(add) && (err == nil || i == 0); i++ {
		err = r.table.change(c.Frontend, settings, add[i:i+1], nil)
	}
	return err
}

// differ compares two sorted lists.
func differ(have, want []service.Backend) (add, remove []service.Backend) {
	for len(have) > 0 && len(want) > 0 {
		switch c := have[0].Compare(want[0]); {
		case c == 0:
			have, want = have[1:], want[1:]
		case c < 0:
			remove, have = append(remove, have[0]), have[1:]
		default:
			add, want = append(add, want[0]), want[1:]
		}
	}
	return append(add, want...), append(remove, have...)
}

// fail notes that the kernel is not what it should be.
func (r *serviceReconciler) fail(f service.Frontend, err error, now time.Time) {
	if errors.Is(err, errServicesFull) {
		err = fmt.Errorf("%w: %d frontends and %d backends are in it", err, len(r.table.all), r.table.members.used())
	}
	if len(r.failed) == 0 {
		r.nextRetry, r.backoff = now.Add(retryMin), retryMin
		r.log.Error("a service cannot be written, will try again", "frontend", f, "err", err)
	}
	r.failed[f] = err
	r.note(func(s *ServiceStatus) {
		s.Failures++
		s.LastError, s.LastErrorAt = fmt.Sprintf("frontend %v: %v", f, err), now
	})
}

// sweep ends a round in which all frontends were told: what was not spoken of is gone, but for what was found in the kernel
// and may be spoken of yet.
func (r *serviceReconciler) sweep(listed bool, now time.Time) {
	if r.spoken == nil {
		return
	}
	spoken := r.spoken
	r.spoken = nil
	for f := range r.failed {
		if _, ok := spoken[f]; !ok {
			delete(r.failed, f)
		}
	}
	for f := range r.table.all {
		_, ok := spoken[f]
		_, inherited := r.inherited[f]
		if ok || inherited && !listed {
			continue
		}
		delete(r.inherited, f)
		if err := r.table.remove(f); err != nil {
			r.fail(f, err, now)
		}
	}
}

// settle removes what was found in the kernel and nobody claims, once all have been heard who may; of a service that keeps
// others, also when that takes too long.
func (r *serviceReconciler) settle(listed bool, now time.Time) {
	if !listed && now.Sub(r.began) < unclaimedTime {
		return
	}
	pruned := 0
	for f, s := range r.table.all {
		if _, inherited := r.inherited[f]; inherited {
			if !listed {
				continue
			}
			delete(r.inherited, f)
			pruned++
			if err := r.table.remove(f); err != nil {
				r.fail(f, err, now)
			}
			continue
		}
		if len(s.unclaimed) == 0 || !listed && len(s.unclaimed) == len(s.ids) {
			continue
		}
		gone := make([]service.Backend, 0, len(s.unclaimed))
		for b := range s.unclaimed {
			gone = append(gone, b)
		}
		slices.SortFunc(gone, service.Backend.Compare)
		if err := r.table.change(f, s.settings, nil, gone); err != nil {
			r.fail(f, err, now)
			continue
		}
		pruned += len(gone)
	}
	r.settled = listed
	if pruned > 0 {
		r.log.Info("pruned frontends and backends that nobody claims", "number", pruned)
	}
}

// attach makes the cgroup run the programs.
func (r *serviceReconciler) attach() {
	if !r.show {
		return
	}
	programs, err := r.attacher.sync()
	r.drifted(KindLink, r.attacher.drifted())
	back, putErr := putBackServicePrograms(r.attacher)
	r.drifted(KindProgram, back)
	err = errors.Join(err, putErr)
	if err != nil {
		r.log.Warn("attach to the cgroup, will try again", "err", err)
	}
	r.note(func(s *ServiceStatus) {
		s.Programs, s.AttachError = programs, ""
		if err != nil {
			s.AttachError = oneLine(err)
		}
	})
}

// putBackServicePrograms pins what is not pinned, and returns how many that were.
func putBackServicePrograms(a *serviceAttacher) (back int, err error) {
	var errs []error
	for _, p := range a.programs {
		did, err := putBack(a.dir.file(pinServicesDir, p.Name), programAt, p.handle)
		if did {
			back++
		}
		errs = append(errs, err)
	}
	return back, errors.Join(errs...)
}

// countAffinities brings that number of the status up to date. One that cannot be read stays as it was: nothing hangs on it.
func (r *serviceReconciler) countAffinities() {
	n, err := r.affinities.count()
	if err != nil {
		r.log.Debug("count the clients that keep a backend", "err", err)
		return
	}
	r.note(func(s *ServiceStatus) { s.Affinities, s.MaxAffinities = n, r.affinities.capacity() })
}

// publish brings the status up to date.
func (r *serviceReconciler) publish() {
	t := r.table
	unclaimed := 0
	if !r.settled {
		for f, s := range t.all {
			if _, whole := r.inherited[f]; whole {
				unclaimed++
				continue
			}
			unclaimed += len(s.unclaimed)
		}
	}
	flows := t.flowCounts()
	r.note(func(s *ServiceStatus) {
		s.Chosen, s.Refused = flows.chosen, flows.refused
		s.Frontends, s.MaxFrontends = len(t.all), len(t.services)-1
		s.Backends, s.MaxBackends = t.members.used(), len(t.backends)-1
		s.Slots, s.MaxSlots = int(t.spans.used), len(t.slots)
		s.Pending, s.Unclaimed = len(r.failed), unclaimed
		s.Full = false
		for _, err := range r.failed {
			s.Full = s.Full || errors.Is(err, errServicesFull)
		}
		s.Written, s.Calls, s.Rebuilds = t.counts.Words, t.counts.Calls, t.counts.Rebuilds
		if len(r.failed) == 0 {
			s.LastError, s.LastErrorAt = "", time.Time{}
		}
	})
}
