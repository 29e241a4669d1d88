// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"time"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

const (
	// scrubChunk is how many entries of the map are compared at once: half a millisecond, for which changes wait.
	scrubChunk = 512
	// scrubScans is how often, during a walk, the table is scanned for entries that the walk should have met.
	scrubScans = 8
)

// scrub is one comparison of the map with the table, made in steps. Between them the map may be written, if only by the
// reconciler, which it is a part of and whose goroutine it is for.
//
// It walks through the map, and holds what it meets against the table. Of entries that the table has and the map lacks, it hears
// by scanning the table while it walks, for what belongs before the place that it has come to; so they need not wait for the next
// walk, even if they went right after this one had passed them.
type scrub struct {
	*reconciler
	next   mapWalk
	walked bool           // next has met all entries
	last   bpf.IPCacheKey // the one that it met last
	audit  *ipcache.Audit // of what it met

	scanning bool
	upTo     netip.Prefix // how far the walk was when the scan began; zero: at its end

	prefixes []netip.Prefix // of the entries that are being compared, as are keys, values and found
	keys     []bpf.IPCacheKey
	values   []bpf.IPCacheValue
	found    []ipcache.Found

	compared int
	drift    int           // entries that somebody else had changed
	misled   bool          // programs found something else before they looked into the map
	took     time.Duration // all steps together
}

// suspect is an entry that is not as the table had it when it was looked at.
type suspect struct {
	key           bpf.IPCacheKey
	want, have    bpf.IPCacheValue
	wanted, there bool
}

// newScrub begins a comparison, chunk entries at a time.
func (r *reconciler) newScrub(chunk int) *scrub {
	return &scrub{
		reconciler: r,
		next:       r.kernel.Walk(),
		audit:      r.table.Audit(r.since),
		prefixes:   make([]netip.Prefix, chunk),
		keys:       make([]bpf.IPCacheKey, chunk),
		values:     make([]bpf.IPCacheValue, chunk),
		found:      make([]ipcache.Found, chunk),
	}
}

// gone tells of keys that the map does not have any more. Where the last one was the walk could not go on; it begins again.
func (s *scrub) gone(keys []bpf.IPCacheKey) {
	if s == nil || s.walked {
		return
	}
	for i := range keys {
		if keys[i] == s.last {
			s.next, s.last = s.kernel.Walk(), bpf.IPCacheKey{}
			return
		}
	}
}

// step compares some more entries and returns those that differ; done after the last. What the table has to say and was not taken
// yet is no difference.
func (s *scrub) step() (suspects []suspect, done bool, err error) {
	began := time.Now()
	if !s.walked {
		if suspects, err = s.walk(); err != nil {
			return nil, false, err
		}
	}
	suspects, done = s.scan(suspects)
	if len(suspects) > 0 {
		fresh, err := s.untaken()
		if err != nil {
			return nil, false, err
		}
		kept := suspects[:0]
		for _, one := range suspects {
			if !fresh[one.key] {
				kept = append(kept, one)
			}
		}
		suspects = kept
	}
	if done {
		err = s.check(nil, nil, true)
	}
	s.took += time.Since(began)
	return suspects, done, err
}

// walk looks at the next entries of the map.
func (s *scrub) walk() (suspects []suspect, err error) {
	n, end, err := s.next(s.keys, s.values)
	if err != nil {
		return nil, err
	}
	s.walked = end
	if n == 0 {
		return nil, nil
	}
	s.last = s.keys[n-1]
	for i := range n {
		if s.prefixes[i], err = s.keys[i].Prefix(); err != nil || s.keys[i].ClusterID != 0 {
			s.prefixes[i] = netip.Prefix{} // not one that weft would write
		}
	}
	s.audit.Check(s.prefixes[:n], s.found)
	right := 0 // entries as they should be
	for i := range n {
		one := suspect{key: s.keys[i], have: s.values[i], there: true}
		if one.wanted = s.found[i].OK; one.wanted {
			s.compared++
			_, one.want = s.underlay.encode(s.prefixes[i], s.found[i].Entry)
		}
		// Those to ask are asked before the table is asked for news. What was found in the map is pruned in its time.
		if one.wanted && one.want != one.have || !one.wanted && s.mayGo(one) {
			suspects = append(suspects, one)
			continue
		}
		s.keys[right], s.values[right] = one.key, one.have
		right++
	}
	return suspects, s.check(s.keys[:right], s.values[:right], false)
}

// check looks at what programs find before they look into the map.
func (s *scrub) check(keys []bpf.IPCacheKey, values []bpf.IPCacheValue, all bool) error {
	wrong, err := s.kernel.Check(keys, values, all)
	s.misled = s.misled || wrong
	return err
}

// mayGo reports whether an entry that the table does not have may be deleted.
func (s *scrub) mayGo(one suspect) bool {
	return s.listed(identity.ClusterID(s.group(one.have))) && !s.inherited.holds(one.key)
}

// scan looks through more of the table for entries that the walk has passed and not met. done: that was the last of them.
func (s *scrub) scan(suspects []suspect) (_ []suspect, done bool) {
	if !s.scanning {
		var err error
		if s.upTo, err = s.last.Prefix(); err != nil && !s.walked {
			return suspects, false // somebody else's key, which has no place among ours
		}
		if s.walked {
			s.upTo = netip.Prefix{}
		}
		s.scanning = true
	}
	all := s.audit.Missing(scrubScans*len(s.keys), s.upTo, func(p netip.Prefix, e ipcache.Entry) {
		s.compared++
		key, want := s.underlay.encode(p, e)
		suspects = append(suspects, suspect{key: key, want: want, wanted: true})
	})
	s.scanning = !all
	return suspects, all && !s.upTo.IsValid()
}

// mend makes right what differs, and returns how much of that somebody else had changed: what the kernel refuses for the time
// being is a difference, but no drift, and is tried again in its time.
func (r *reconciler) mend(suspects []suspect) (drift int) {
	var keys []bpf.IPCacheKey
	for i := range suspects {
		if _, known := r.failed[suspects[i].key]; !known {
			keys = append(keys, suspects[i].key)
		}
	}
	if len(keys) > 0 {
		r.repair(keys)
		r.note(func(s *MapStatus) { s.Drift += uint64(len(keys)) })
	}
	return len(keys)
}

// scrubStep takes the comparison that is under way a step further, or begins one, makes right what differs, and returns how long to
// wait for the next step.
func (r *reconciler) scrubStep() time.Duration {
	if r.unread {
		return r.pace.shortest
	}
	if r.scrubbing == nil {
		r.scrubbing = r.newScrub(scrubChunk)
	}
	s := r.scrubbing
	before := s.took
	suspects, done, err := s.step()
	if err != nil {
		r.log.Warn("compare the map with the table", "err", err)
		r.scrubbing = nil
		return r.pace.shortest
	}
	if drift := r.mend(suspects); drift > 0 {
		if s.drift == 0 {
			r.log.Warn("the map ipcache was changed by somebody else; repairing", "entry", r.describe(suspects[0]).Object, "entries", drift)
		}
		s.drift += drift
		r.publish()
	}
	if done {
		r.scrubbing = nil
		r.note(func(s *MapStatus) { s.VerifiedAt = time.Now() })
	}
	return r.pace.pause(s.took-before, r.table.Len()/scrubChunk+1, s.drift > 0 && !done)
}
