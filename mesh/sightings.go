// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

const (
	maxSightings = 1024
	sightingGap  = 100 * time.Millisecond // revisions seen within it are one sighting
	sightingSure = time.Second            // a sighting that took longer is no exact one
	sightingBlur = 16                     // of its age, a sighting may take this part when there are too many
)

// sighting says that all revisions up to one, from that of the sighting before it on, were first seen between two times.
type sighting struct {
	revision int64
	from, at time.Time // from is zero where nobody knows how long they had been there
}

// sightings is a sparse log of when the revisions of one cluster's etcd were first seen, so that the age of a claim can be
// told without a time in each. What is long ago is kept coarsely. It is safe for concurrent use.
type sightings struct {
	mu   sync.Mutex
	etcd uint64 // the history that the revisions belong to
	log  []sighting
}

// follow says whose revisions come next. Those of another etcd mean nothing any more.
func (s *sightings) follow(etcd uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.etcd != etcd {
		s.etcd, s.log = etcd, nil
	}
}

// note takes what a delivery shows. Until the first list is complete, that is nothing: it is older.
func (s *sightings) note(events []kvstore.Event, now time.Time) {
	var newest int64
	listed := false
	for i := range events {
		newest = max(newest, events[i].Revision)
		listed = listed || events[i].Kind == kvstore.Synced
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.log) == 0 {
		if listed {
			s.log = []sighting{{revision: newest, at: now}}
		}
		return
	}
	last := &s.log[len(s.log)-1]
	switch {
	case newest <= last.revision:
	case !last.from.IsZero() && now.Sub(last.from) < sightingGap:
		last.revision, last.at = newest, now
	default:
		s.log = append(s.log, sighting{revision: newest, from: now, at: now})
		s.thin(now)
	}
}

// thin makes room in a full log: neighbours become one where that takes little off what is known of their age. Of a year,
// some 500 sightings stay. The first stays by itself: it alone knows nothing of a beginning.
func (s *sightings) thin(now time.Time) {
	if len(s.log) < maxSightings {
		return
	}
	kept := s.log[:1]
	for _, next := range s.log[1:] {
		last := &kept[len(kept)-1]
		if len(kept) > 1 && next.at.Sub(last.from) <= now.Sub(next.at)/sightingBlur {
			last.revision, last.at = next.revision, next.at
		} else {
			kept = append(kept, next)
		}
	}
	if len(kept) == maxSightings {
		kept = slices.Delete(kept, 1, 2) // only a clock that stands still leads here
	}
	s.log = kept
}

// first returns when revision was first seen. If that is not known exactly, it was at that time or before; the zero time means
// that nothing is known.
func (s *sightings) first(revision int64) (at time.Time, exact bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := sort.Search(len(s.log), func(i int) bool { return s.log[i].revision >= revision })
	if i == len(s.log) {
		return time.Time{}, false
	}
	if seen := s.log[i]; !seen.from.IsZero() && seen.at.Sub(seen.from) <= sightingSure {
		return seen.from, true
	}
	return s.log[i].at, false
}

// SeenAt returns when this node first saw the given revision of a cluster's etcd, which is the age of a claim that bears it.
// exact is false for what was there already when the cluster was first listed, and for what is too long ago to be known
// to the second: it was seen at that time or before. The zero time means that nothing is known.
func (m *Mesh) SeenAt(cluster identity.ClusterID, revision int64) (at time.Time, exact bool) {
	for _, r := range m.all() {
		if r.standing().holds == cluster {
			return r.seen.first(revision)
		}
	}
	return time.Time{}, false
}
