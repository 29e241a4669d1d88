// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"sync"
	"time"
)

// maxPending bounds the text of the events that one slow consumer may leave
// waiting, in bytes; what the server has beyond that waits at the server.
const maxPending = 32 << 20

// eventSize is what an event takes beside its text, its place among the
// pending ones included.
const eventSize = 128

// outbox keeps events until the consumer takes them. One that keeps up gets
// them as they were put, batch by batch, and nothing is copied. For one that
// is behind by more than a delivery, those of a key are joined into one that
// says the same, so that what waits is bounded by the keys, and in any case in
// bytes; whoever puts more is held up then. During a list, which names each
// key once, nothing is joined, and the list itself is held up.
//
// Its goroutine is there only while something waits: an agent of many clusters
// has thousands of these, most of them with nothing to deliver.
//
// Safe for concurrent use; one goroutine at a time puts.
type outbox struct {
	deliver  func([]Event)
	patience int // this many events wait before any are joined
	limit    int // this many bytes wait before whoever puts more does

	mu      sync.Mutex
	changed *sync.Cond // of anything below

	pending []Event
	places  map[string]int // of the keys in pending; nil while nothing is joined
	bytes   int            // of pending and of what is being delivered
	busy    bool           // run is delivering
	running bool           // run is
	stopped bool           // run is to end: nobody is held up any more
	ordered bool           // nothing is joined
	spare   []Event        // a delivered batch's memory

	tasks sync.WaitGroup // run

	since    time.Time // when the oldest of pending was put
	received time.Time // that of what is being delivered

	at        int64 // the revision up to which everything was put
	delivered int64 // the revision up to which everything was delivered
}

func newOutbox(deliver func([]Event)) *outbox {
	o := &outbox{deliver: deliver, patience: maxBatch, limit: maxPending, stopped: true}
	o.changed = sync.NewCond(&o.mu)
	return o
}

// wake sees to it that what is pending is delivered. The caller holds mu.
func (o *outbox) wake() {
	if len(o.pending) > 0 && !o.running && !o.stopped {
		o.running = true
		o.tasks.Go(o.run)
	}
}

// run delivers until nothing is pending or stop is called. What is left then is
// delivered after the next begin.
func (o *outbox) run() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.pending) > 0 && !o.stopped {
		o.deliverBatch()
	}
	o.running = false
}

// deliverBatch takes what is pending and delivers it in parts, unless stopped
// meanwhile. The caller holds mu, which is free during the deliveries.
func (o *outbox) deliverBatch() {
	batch, at := o.pending, o.at
	o.received = o.since
	o.pending, o.places, o.busy = nil, nil, true
	rest := batch
	for len(rest) > 0 && !o.stopped {
		o.changed.Broadcast()
		part := rest[:min(len(rest), maxBatch)]
		o.mu.Unlock()
		o.deliver(part)
		o.mu.Lock()
		rest = rest[len(part):]
		for i := range part {
			o.bytes -= part[i].size()
		}
	}
	o.busy = false
	if len(rest) > 0 {
		o.pending, o.places, o.since = append(rest, o.pending...), nil, o.received
	} else {
		o.delivered = at
		if len(o.pending) == 0 {
			o.delivered = o.at
		}
		if cap(batch) <= 2*maxBatch {
			clear(batch)
			o.spare = batch[:0]
		}
	}
	o.changed.Broadcast()
}

func (e *Event) size() int { return len(e.Key) + len(e.Value) + eventSize }

// begin lets deliver be called, until stop.
func (o *outbox) begin() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stopped = false
	o.wake()
}

// end stops, and waits for what is being delivered. Nobody puts meanwhile.
func (o *outbox) end() {
	o.stop()
	o.tasks.Wait()
}

// stop ends the delivering after the part that is under way.
func (o *outbox) stop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stopped = true
	o.changed.Broadcast()
}

// inOrder switches the joining of events off or on. Before it is on, all is
// delivered, since what a list says must not be joined with what follows.
func (o *outbox) inOrder(ordered bool) {
	o.flush()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ordered = ordered
	if !ordered {
		o.spare = nil // a list needs more than what follows
	}
}

// flush waits until all is delivered, or run is to end.
func (o *outbox) flush() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for (len(o.pending) > 0 || o.busy) && !o.stopped {
		o.changed.Wait()
	}
}

// put adds a batch, whose memory it keeps, and returns other memory for the
// next one.
func (o *outbox) put(batch []Event) (next []Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(o.pending) > 0 && (o.ordered || o.bytes >= o.limit) && !o.stopped {
		o.changed.Wait()
	}
	defer o.wake()
	switch {
	case len(o.pending) == 0:
		next, o.spare = o.spare, nil
		o.pending, o.places, o.since = batch, nil, time.Now()
		for i := range batch {
			o.bytes += batch[i].size()
		}
		return next
	case o.ordered, o.places == nil && len(o.pending)+len(batch) <= o.patience:
		// If ordered, it is stopped: the next run delivers all.
		for i := range batch {
			o.bytes += batch[i].size()
		}
		o.pending = append(o.pending, batch...)
	default:
		o.index(len(batch))
		for i := range batch {
			o.join(batch[i])
		}
	}
	clear(batch)
	return batch[:0]
}

// index makes places, and joins the events that were put before. The caller
// holds mu.
func (o *outbox) index(more int) {
	if o.places != nil {
		return
	}
	o.places = make(map[string]int, len(o.pending)+more)
	before := o.pending
	o.pending = make([]Event, 0, len(before)+more)
	for i := range before {
		o.bytes -= before[i].size()
		o.join(before[i])
	}
}

// join adds an event to pending, as one with what waits for its key. The
// caller holds mu.
func (o *outbox) join(e Event) {
	i, ok := o.places[string(e.Key)]
	if !ok {
		o.places[string(e.Key)] = len(o.pending)
		o.pending = append(o.pending, e)
		o.bytes += e.size()
		return
	}
	old := &o.pending[i]
	o.bytes += e.size() - old.size()
	switch {
	case old.Kind == Created && e.Kind == Deleted:
		o.drop(i, e)
		return
	case old.Kind == Created:
		e.Kind = Created
	case old.Kind == Deleted:
		e.Kind = Modified
	}
	*old = e
}

// drop forgets the pending event i, whose key was created and deleted, e,
// unseen by the consumer. The caller holds mu.
func (o *outbox) drop(i int, e Event) {
	o.bytes -= e.size()
	delete(o.places, string(e.Key))
	last := len(o.pending) - 1
	if i != last {
		o.pending[i] = o.pending[last]
		o.places[string(o.pending[i].Key)] = i
	}
	o.pending[last] = Event{}
	o.pending = o.pending[:last]
}

// crowded reports whether so much waits that what one answer of etcd can bring
// might hold up whoever puts it.
func (o *outbox) crowded() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.pending) > 0 && o.bytes >= o.limit/2
}

// reached tells that everything up to a revision was put.
func (o *outbox) reached(revision int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.at = revision
	if len(o.pending) == 0 && !o.busy {
		o.delivered = revision
	}
}

// position returns the revision up to which all is delivered, and how many
// events wait.
func (o *outbox) position() (delivered int64, pending int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.delivered, len(o.pending)
}

// receivedAt returns when the oldest of what is being delivered was put.
func (o *outbox) receivedAt() time.Time {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.received
}

// empty delivers what the last run left. It is not for during a run.
func (o *outbox) empty() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.stopped = false
	if len(o.pending) > 0 {
		o.deliverBatch()
	}
	o.stopped = true
	o.spare = nil
}
