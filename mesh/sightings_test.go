// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
)

// The age of a claim is known to the second when it has come while the cluster was followed, and by a bound when it was
// there before.
func TestSeenAt(t *testing.T) {
	west := newWest(t, 1)
	w := newWorld(t)
	began := time.Now()
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	w.awaitIPs(westIP(1))
	listed := time.Now()
	revision := func() (newest int64) {
		for c := range w.cfg.IPs.All() {
			newest = max(newest, c.Revision)
		}
		return newest
	}
	if at, exact := w.SeenAt(2, revision()); exact || at.Before(began) || at.After(listed) {
		t.Errorf("what was there: seen at %v, exact %t; listed %v to %v", at, exact, began, listed)
	}
	west.ip("10.2.1.2", 257, "172.18.2.1")
	w.awaitIPs(westIP(1), westIP(2))
	check := func() error {
		if at, exact := w.SeenAt(2, revision()); !exact || at.Before(listed) || at.After(time.Now()) {
			return fmt.Errorf("what has come: seen at %v, exact %t", at, exact)
		}
		return nil
	}
	testutil.Eventually(t, soon, check) // the note follows the tables
	if at, exact := w.SeenAt(2, revision()+1000); exact || !at.IsZero() {
		t.Errorf("the future was seen at %v", at)
	}
	if at, _ := w.SeenAt(7, 1); !at.IsZero() {
		t.Errorf("an unknown cluster was seen at %v", at)
	}

	// The revisions of another etcd are others.
	west.etcd.Replace(t)
	west.config(`{"id":2}`)
	west.ip("10.2.1.3", 257, "172.18.2.1")
	w.awaitIPs(westIP(3))
	if at, exact := w.SeenAt(2, revision()); exact || at.Before(listed) {
		t.Errorf("after the change of etcd: seen at %v, exact %t", at, exact)
	}
}

// However much there is to see, the log stays small, is fine for what is new and never claims too little for what is old.
func TestSightingsAreSparse(t *testing.T) {
	var s sightings
	base := time.Now()
	at := func(revision int64) time.Time { return base.Add(time.Duration(revision) * 60 * time.Millisecond) }
	s.note([]kvstore.Event{{Kind: kvstore.Created, Revision: 3}}, base)
	if seen, _ := s.first(3); !seen.IsZero() {
		t.Error("a list that is not complete has been noted")
	}
	s.note([]kvstore.Event{{Kind: kvstore.Created, Revision: 5}, {Kind: kvstore.Synced, Revision: 9}}, base)
	const last = 200_000
	for revision := int64(10); revision <= last; revision++ {
		s.note([]kvstore.Event{{Kind: kvstore.Modified, Revision: revision}, {Kind: kvstore.Deleted, Revision: revision - 5}}, at(revision))
		if len(s.log) > maxSightings {
			t.Fatalf("%d sightings", len(s.log))
		}
	}
	for revision := int64(1); revision <= last; revision += 7 {
		seen, exact := s.first(revision)
		truth := at(max(revision, 0))
		if revision <= 9 {
			truth = base
		}
		switch off := truth.Sub(seen).Abs(); {
		case exact && off > sightingSure:
			t.Fatalf("revision %d: exact, and off by %v", revision, off)
		case !exact && seen.Before(truth) && revision > 9:
			t.Fatalf("revision %d: seen at %v, which claims that it is older than %v", revision, seen, truth)
		case off > at(last).Sub(truth)/10+time.Second && revision > 9:
			t.Fatalf("revision %d of %d: off by %v", revision, last, off)
		case !exact && revision > last-200:
			t.Fatalf("revision %d of %d is not exact", revision, last)
		}
	}
}
