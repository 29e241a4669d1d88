// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/weftmesh/weft/kvstore"
)

// DutyStatus is what has become of a duty in all terms of this replica.
type DutyStatus struct {
	Name    string
	Running bool // this replica leads, and does it
	Ready   bool // what it is for is true: its export is complete, its last round went well
	Runs    uint64
	Errors  uint64
	Deleted uint64 // keys or objects that it removed
	Keys    int    // that it keeps; 0 where it keeps none
	Pending int    // of these, not in etcd yet
	// LastRun is when the last round began, and LastDuration how long it took.
	LastRun      time.Time
	LastDuration time.Duration
	LastError    error // of the last round that failed, also when all is well again
	LastErrorAt  time.Time
	Problems     []string // what is wrong at present
	// Detail says in words what the last round did.
	Detail string
}

// Outcome is what a round did.
type Outcome struct {
	Deleted int
	Detail  string
	// Problems are what a round that went well has found not to be.
	Problems []string
}

// Record counts what a duty does. The zero value is ready; all methods may be called concurrently.
type Record struct {
	mu sync.Mutex
	s  DutyStatus
}

// Running notes that the leader does it, until stopped is called.
func (r *Record) Running() (stopped func()) {
	r.edit(func(s *DutyStatus) { s.Running = true })
	return func() { r.edit(func(s *DutyStatus) { s.Running, s.Ready = false, false }) }
}

// Round notes a round that began at begun and has ended. That a term ended during it is no error.
func (r *Record) Round(begun time.Time, did Outcome, err error) {
	r.edit(func(s *DutyStatus) {
		s.Runs++
		s.LastRun, s.LastDuration = begun, time.Since(begun)
		s.Deleted += uint64(max(0, did.Deleted))
		s.Ready, s.Detail = err == nil, did.Detail
		s.Problems = did.Problems
		if err != nil && !errors.Is(err, context.Canceled) {
			s.Errors++
			s.LastError, s.LastErrorAt = err, time.Now()
			s.Problems = append([]string{err.Error()}, did.Problems...)
		}
	})
}

func (r *Record) edit(do func(*DutyStatus)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	do(&r.s)
}

// Status returns what was noted.
func (r *Record) Status() DutyStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.s
}

// Loop is a duty that is done in rounds.
type Loop struct {
	Record
	name  string
	every time.Duration
	round func(context.Context, *Term) (Outcome, error)
}

var _ Duty = (*Loop)(nil)

// loopRetry is after how long a round follows on one that failed, if it is not due sooner.
const loopRetry = time.Minute

// NewLoop returns a duty that calls round at the beginning of each term and then every so often, or a minute after one that
// failed: it is up to each round to do all it can.
func NewLoop(name string, every time.Duration, round func(context.Context, *Term) (Outcome, error)) *Loop {
	return &Loop{name: name, every: every, round: round}
}

func (l *Loop) String() string { return l.name }

// Status tells what the rounds did.
func (l *Loop) Status() DutyStatus {
	s := l.Record.Status()
	s.Name = l.name
	return s
}

// Run does rounds until the term ends.
func (l *Loop) Run(ctx context.Context, t *Term) error {
	defer l.Running()()
	for {
		begun := time.Now()
		did, err := l.round(ctx, t)
		if ctx.Err() != nil {
			return nil
		}
		l.Round(begun, did, err)
		switch {
		case over(err):
			return err
		case err != nil:
			t.Log(l.name).Warn("round failed", "err", err)
		}
		pause := l.every
		if err != nil {
			pause = min(pause, loopRetry)
		}
		if !sleep(ctx, pause) {
			return nil
		}
	}
}

// over reports whether an error ends the term.
func over(err error) bool {
	return errors.Is(err, kvstore.ErrFenced) || errors.Is(err, kvstore.ErrHistoryChanged) || errors.Is(err, kvstore.ErrClosed)
}
