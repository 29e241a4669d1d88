// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"fmt"
	"hash/maphash"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// EventKind says what an Event tells.
type EventKind uint8

const (
	Created  EventKind = iota // the key was not known before
	Modified                  // the key was written again
	Deleted                   // the key is gone
	Synced                    // the list that the events before belong to is complete
)

// String returns the kind's name in lower case.
func (k EventKind) String() string {
	switch k {
	case Created:
		return "created"
	case Modified:
		return "modified"
	case Deleted:
		return "deleted"
	case Synced:
		return "synced"
	}
	return fmt.Sprintf("EventKind(%d)", uint8(k))
}

// Event is one difference between what was known of a prefix and what etcd
// holds now.
type Event struct {
	Kind EventKind

	// Key is relative to the prefix. Key and Value are good only until the
	// call that delivers them returns, and must not be changed. Value is nil
	// for Deleted; both are for Synced.
	Key, Value []byte

	// Revision is that of the write; for Deleted that of the deletion, or
	// the last one known of the key if the deletion itself was not seen; for
	// Synced that of the list.
	Revision int64
}

// maxBatch bounds the events of one delivery.
const maxBatch = 4096

// view is what is known of one span of keys, and the rules by which lists and watch
// answers turn into events. It does no I/O and knows no time, so that every
// order of answers can be tested. Not safe for concurrent use.
//
// A list runs beginList, listed for each chunk, endList; a failed one is begun
// again. A watch runs watched for each answer, preceded by resumed if it is
// not the first since the list.
type view struct {
	of span
	// hand takes a batch of at most maxBatch events, and returns memory for
	// the next one. What the events point to is never written again.
	hand func([]Event) (next []Event)

	known index
	seed  maphash.Seed // of the values' digests

	at position // all that happened up to here is applied; revision 0: nothing is
	// listing is the position of the last list, complete or not: the keys that
	// are known come from its history.
	listing position
	// floor is the revision that the present watch began after. Events up to
	// it are echoes, which some versions of etcd send.
	floor int64
	// notified is the revision of the last progress notification.
	notified int64

	dropped int64   // events that were not newer than what was known
	events  []Event // to be handed over
}

func newView(of span, deliver func([]Event)) *view {
	return &view{of: of, hand: atOnce(deliver), seed: maphash.MakeSeed()}
}

// atOnce hands batches to deliver as they come.
func atOnce(deliver func([]Event)) func([]Event) []Event {
	return func(events []Event) []Event {
		deliver(events)
		clear(events)
		return events[:0]
	}
}

// relative returns what a key of the span has beyond its start.
func (v *view) relative(key []byte) (rest []byte, ok bool) {
	n := len(v.of.start)
	if len(key) < n || string(key[:n]) != v.of.start || v.of.end == "" && len(key) > n {
		return nil, false
	}
	return key[n:], true
}

// beginList starts a list at head: every key known is stale until it appears.
// It returns ErrHistoryChanged when the history is shorter than it was.
func (v *view) beginList(head position) error {
	seen := v.listing.revision
	if v.at.cluster == v.listing.cluster {
		seen = max(seen, v.at.revision)
	}
	switch {
	case head.cluster != v.listing.cluster:
		v.known.forgetRevisions()
	case head.revision < seen:
		err := fmt.Errorf("%w: list %s: revision %d, before %d", ErrHistoryChanged, v.of, head.revision, seen)
		v.abandon()
		return err
	}
	v.known.markStale()
	v.listing = head
	return nil
}

// listed applies a chunk of the list.
func (v *view) listed(kvs []*keyValue) error {
	for _, kv := range kvs {
		key, ok := v.relative(kv.Key)
		if !ok {
			v.dropped++
			continue
		}
		digest := uint32(maphash.Bytes(v.seed, kv.Value))
		e := v.known.find(key)
		switch {
		case e != nil && e.alive() && e.revision() == kv.ModRevision && e.digest == digest:
			// The digest differs where two histories of one cluster id gave
			// two writes the same revision.
			e.keep()
		case e != nil && e.alive():
			e.keep()
			e.set(kv.ModRevision, digest)
			v.emit(Event{Kind: Modified, Key: key, Value: kv.Value, Revision: kv.ModRevision})
		default:
			if err := v.create(e, key, kv, digest); err != nil {
				return err
			}
		}
	}
	v.flush()
	return nil
}

// endList completes the list: what is still stale was deleted.
func (v *view) endList() {
	for e := range v.known.all() {
		if e.stale() {
			revision := e.revision()
			v.known.bury(e, v.listing.revision)
			v.emit(Event{Kind: Deleted, Key: v.known.key(e), Revision: revision})
		}
	}
	v.emit(Event{Kind: Synced, Revision: v.listing.revision})
	v.flush()
	v.known.purge() // the floor protects from what the tombstones did
	v.at, v.floor, v.notified = v.listing, v.listing.revision, 0
	v.events = nil // what follows needs less memory
}

// resumed tells that a new watch begins after v.at.
func (v *view) resumed() { v.floor, v.notified = v.at.revision, 0 }

// watched applies an answer of the watch.
func (v *view) watched(resp *etcdserverpb.WatchResponse) error {
	for _, ev := range resp.Events {
		if err := v.happened(ev); err != nil {
			return err
		}
	}
	v.flush()
	switch {
	case resp.Fragment:
		// More of the same revisions follows.
	case len(resp.Events) > 0:
		v.at.revision = max(v.at.revision, resp.Events[len(resp.Events)-1].Kv.GetModRevision())
	case !resp.Created && !resp.Canceled:
		// A progress notification. Before etcd 3.5.8 one could overtake
		// events, so only the one before it is believed.
		v.at.revision = max(v.at.revision, v.notified)
		v.notified = resp.Header.GetRevision()
	}
	return nil
}

func (v *view) happened(ev *mvccpb.Event) error {
	kv := ev.Kv
	key, ok := v.relative(kv.GetKey())
	if !ok || kv.ModRevision <= v.floor {
		v.dropped++
		return nil
	}
	e := v.known.find(key)
	if e != nil && kv.ModRevision <= e.revision() {
		v.dropped++
		return nil
	}
	if ev.Type == mvccpb.Event_DELETE {
		return v.remove(e, key, kv.ModRevision)
	}
	digest := uint32(maphash.Bytes(v.seed, kv.Value))
	if e == nil || !e.alive() {
		return v.create(e, key, kv, digest)
	}
	e.set(kv.ModRevision, digest)
	v.emit(Event{Kind: Modified, Key: key, Value: kv.Value, Revision: kv.ModRevision})
	return nil
}

// create makes a key live that is unknown (e is nil) or dead.
func (v *view) create(e *entry, key []byte, kv *keyValue, digest uint32) error {
	if e == nil {
		if _, err := v.insert(key, kv.ModRevision, digest); err != nil {
			return err
		}
	} else {
		v.known.revive(e)
		e.set(kv.ModRevision, digest)
	}
	v.emit(Event{Kind: Created, Key: key, Value: kv.Value, Revision: kv.ModRevision})
	return nil
}

// remove makes a key dead. One that is not live leaves a tombstone only: it
// may have been written before, in an event that is yet to come.
func (v *view) remove(e *entry, key []byte, revision int64) error {
	if e != nil && !e.alive() {
		e.set(revision, 0)
		return nil
	}
	if e == nil {
		e, err := v.insert(key, revision, 0)
		if err == nil {
			v.known.bury(e, revision)
		}
		return err
	}
	v.known.bury(e, revision)
	v.emit(Event{Kind: Deleted, Key: key, Revision: revision})
	return nil
}

func (v *view) insert(key []byte, revision int64, digest uint32) (*entry, error) {
	e, err := v.known.insert(key, revision, digest)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", v.of, err)
	}
	return e, nil
}

// abandon gives up the history: what is known stays, and is stale.
func (v *view) abandon() {
	v.known.forgetRevisions()
	v.at, v.listing = position{}, position{}
}

// drain emits Deleted for all that is known, and forgets it.
func (v *view) drain() {
	for e := range v.known.all() {
		v.emit(Event{Kind: Deleted, Key: v.known.key(e), Revision: e.revision()})
	}
	v.flush()
	v.known, v.at, v.listing, v.floor = index{}, position{}, position{}, 0
}

func (v *view) emit(e Event) {
	v.events = append(v.events, e)
	if len(v.events) == maxBatch {
		v.flush()
	}
}

// flush hands over the events gathered.
func (v *view) flush() {
	if len(v.events) == 0 {
		return
	}
	v.events = v.hand(v.events)
}
