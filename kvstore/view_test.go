// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

func kv(key, value string, revision int64) *keyValue {
	return &keyValue{Key: []byte("p/" + key), Value: []byte(value), ModRevision: revision}
}

func put(key, value string, revision int64) *mvccpb.Event {
	return &mvccpb.Event{Type: mvccpb.Event_PUT, Kv: kv(key, value, revision)}
}

func del(key string, revision int64) *mvccpb.Event {
	return &mvccpb.Event{Type: mvccpb.Event_DELETE, Kv: kv(key, "", revision)}
}

// mirror is a view with the recorder that it delivers to.
type mirror struct {
	*view
	*recorder
}

func newMirror() mirror {
	r := newRecorder()
	return mirror{newView(prefixed("p/"), r.deliver), r}
}

func (m mirror) mustList(t *testing.T, at position, kvs ...*keyValue) {
	t.Helper()
	if err := m.beginList(at); err != nil {
		t.Fatal(err)
	}
	if err := m.listed(kvs); err != nil {
		t.Fatal(err)
	}
	m.endList()
}

func (m mirror) mustWatch(t *testing.T, events ...*mvccpb.Event) {
	t.Helper()
	if err := m.watched(&etcdserverpb.WatchResponse{Events: events}); err != nil {
		t.Fatal(err)
	}
}

// expect fails the test unless exactly these events came since it was last
// called.
func (m mirror) expect(t *testing.T, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, m.take()); diff != "" {
		t.Errorf("events (-want +got)\n%s", diff)
	}
	m.check(t)
}

// mechanism: D2, D3, D4
func TestViewListThenWatch(t *testing.T) {
	m := newMirror()
	m.mustList(t, position{1, 10}, kv("a", "1", 3), kv("b", "1", 4))
	m.expect(t, "created a=1", "created b=1", "synced")
	m.mustWatch(t, put("a", "2", 11), put("c", "1", 12), del("b", 13), put("b", "2", 14))
	m.expect(t, "modified a=2", "created c=1", "deleted b", "created b=2")
	if m.at.revision != 14 {
		t.Errorf("applied up to %d", m.at.revision)
	}
}

// What a first list brought before it broke is not delivered again by the next one of the same history, and a history that
// is shorter than what it showed is another one.
func TestViewFirstListBreaks(t *testing.T) {
	m := newMirror()
	if err := m.beginList(position{1, 10}); err != nil {
		t.Fatal(err)
	}
	if err := m.listed([]*keyValue{kv("a", "1", 3), kv("b", "1", 4)}); err != nil {
		t.Fatal(err)
	}
	m.expect(t, "created a=1", "created b=1")
	m.mustList(t, position{1, 12}, kv("a", "1", 3), kv("c", "1", 11))
	m.expect(t, "created c=1", "deleted b", "synced")

	m = newMirror()
	if err := m.beginList(position{1, 10}); err != nil {
		t.Fatal(err)
	}
	if err := m.beginList(position{1, 9}); !errors.Is(err, ErrHistoryChanged) {
		t.Errorf("a list at revision 9 after one at 10: %v, want %v", err, ErrHistoryChanged)
	}
}

// A relist delivers what is different, deletions last, and then Synced.
// lesson: X1
func TestViewRelistDeliversDifferences(t *testing.T) {
	m := newMirror()
	m.mustList(t, position{1, 10}, kv("a", "1", 3), kv("b", "1", 4), kv("c", "1", 5))
	m.take()
	m.mustList(t, position{1, 20}, kv("a", "1", 3), kv("c", "2", 15), kv("d", "1", 16))
	m.expect(t, "modified c=2", "created d=1", "deleted b", "synced")
	m.mustList(t, position{1, 20}, kv("a", "1", 3), kv("c", "2", 15), kv("d", "1", 16))
	m.expect(t, "synced")
}

// A list that fails half way deletes nothing, and does not deliver twice what
// it has delivered.
func TestViewFailedListDeletesNothing(t *testing.T) {
	m := newMirror()
	m.mustList(t, position{1, 10}, kv("a", "1", 3), kv("b", "1", 4))
	m.take()
	if err := m.beginList(position{1, 20}); err != nil {
		t.Fatal(err)
	}
	if err := m.listed([]*keyValue{kv("0", "1", 19)}); err != nil {
		t.Fatal(err)
	}
	m.expect(t, "created 0=1")
	m.mustList(t, position{1, 21}, kv("0", "1", 19), kv("b", "1", 4))
	m.expect(t, "deleted a", "synced")
}

// lesson: E12
func TestViewDropsWhatIsNotNews(t *testing.T) {
	m := newMirror()
	m.mustList(t, position{1, 10}, kv("a", "1", 3))
	m.take()
	m.mustWatch(t, put("a", "0", 2), put("z", "0", 10), del("a", 9)) // from before the list
	m.mustWatch(t, put("a", "2", 12))
	m.mustWatch(t, put("a", "2", 12), put("a", "1", 11), del("a", 11)) // duplicate, reordered
	m.mustWatch(t, del("a", 14), del("a", 14), del("unknown", 15))
	m.mustWatch(t, put("a", "3", 13), put("unknown", "1", 14)) // overtaken by their deletions
	m.mustWatch(t, put("a", "4", 16))
	m.expect(t, "modified a=2", "deleted a", "created a=4")
	if m.dropped != 9 {
		t.Errorf("%d events are counted as dropped", m.dropped)
	}
}

// A resumed watch takes nothing from before it was resumed.
func TestViewResumed(t *testing.T) {
	m := newMirror()
	m.mustList(t, position{1, 10})
	m.mustWatch(t, put("a", "1", 12), del("a", 13))
	m.resumed()
	m.mustWatch(t, put("b", "1", 11), put("a", "1", 12), del("a", 13), put("c", "1", 14))
	m.expect(t, "synced", "created a=1", "deleted a", "created c=1")
}

// The position follows whole revisions only, and a progress notification only
// when the next has come.
func TestViewPosition(t *testing.T) {
	m := newMirror()
	m.mustList(t, position{1, 10})
	at := func(want int64) {
		t.Helper()
		if m.at.revision != want {
			t.Errorf("the position is %d, want %d", m.at.revision, want)
		}
	}
	answer := func(resp *etcdserverpb.WatchResponse) {
		t.Helper()
		if err := m.watched(resp); err != nil {
			t.Fatal(err)
		}
	}
	header := func(revision int64) *etcdserverpb.ResponseHeader {
		return &etcdserverpb.ResponseHeader{Revision: revision}
	}
	answer(&etcdserverpb.WatchResponse{Header: header(30), Created: true})
	at(10)
	answer(&etcdserverpb.WatchResponse{Header: header(30), Fragment: true, Events: []*mvccpb.Event{put("a", "1", 11)}})
	at(10)
	answer(&etcdserverpb.WatchResponse{Header: header(30), Events: []*mvccpb.Event{put("b", "1", 11)}})
	at(11)
	answer(&etcdserverpb.WatchResponse{Header: header(20)})
	at(11)
	answer(&etcdserverpb.WatchResponse{Header: header(30)})
	at(20)
}

// Another history makes everything stale, and is delivered whole, even where
// its revisions happen to be the same.
// lesson: X3
func TestViewOtherHistory(t *testing.T) {
	m := newMirror()
	m.mustList(t, position{1, 10}, kv("a", "1", 3), kv("b", "1", 4))
	m.otherHistory()
	m.take()
	m.mustList(t, position{2, 5}, kv("a", "other", 3))
	m.expect(t, "modified a=other", "deleted b", "synced")
}

// lesson: X3
func TestViewRevisionWentBack(t *testing.T) {
	m := newMirror()
	m.mustList(t, position{1, 10}, kv("a", "1", 3), kv("b", "1", 4))
	m.take()
	if err := m.beginList(position{1, 9}); !errors.Is(err, ErrHistoryChanged) {
		t.Fatalf("error %v", err)
	}
	m.expect(t)
	m.otherHistory()
	m.mustList(t, position{1, 9}, kv("a", "1", 3))
	m.expect(t, "modified a=1", "deleted b", "synced")
}

// An etcd that lost its data and was filled again may have the same cluster id
// and a higher revision, and the same revision for another value.
func TestViewSameRevisionOtherValue(t *testing.T) {
	m := newMirror()
	m.mustList(t, position{1, 10}, kv("a", "1", 3), kv("b", "1", 4))
	m.otherHistory()
	m.take()
	m.mustList(t, position{1, 11}, kv("a", "other", 3), kv("b", "1", 4))
	m.expect(t, "modified a=other", "synced")
}

func TestViewDrain(t *testing.T) {
	m := newMirror()
	m.mustList(t, position{1, 10}, kv("a", "1", 3), kv("b", "1", 4))
	m.take()
	m.drain()
	m.expect(t, "deleted a", "deleted b")
	m.drain()
	m.expect(t)
	m.otherHistory()
	m.mustList(t, position{1, 10}, kv("a", "1", 3))
	m.expect(t, "created a=1", "synced")
}

// Keys outside the prefix are a server's fault, and the key that is the prefix
// itself is a key like others.
func TestViewKeys(t *testing.T) {
	m := newMirror()
	m.mustList(t, position{1, 10}, kv("", "1", 2), &keyValue{Key: []byte("q/a"), ModRevision: 3})
	m.mustWatch(t, &mvccpb.Event{Kv: &keyValue{Key: []byte("p"), ModRevision: 11}}, &mvccpb.Event{})
	m.expect(t, "created =1", "synced")
}

func TestViewDeliversInBatches(t *testing.T) {
	var sizes []int
	v := newView(prefixed("p/"), func(events []Event) { sizes = append(sizes, len(events)) })
	var kvs []*keyValue
	for i := range maxBatch + 10 {
		kvs = append(kvs, kv(string(rune(i+1)), "", 1))
	}
	if err := v.beginList(position{1, 10}); err != nil {
		t.Fatal(err)
	}
	if err := v.listed(kvs); err != nil {
		t.Fatal(err)
	}
	v.endList()
	if diff := cmp.Diff([]int{maxBatch, 10, 1}, sizes); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}
