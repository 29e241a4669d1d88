// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// errFlooded indicates a watch that brings more than its consumer takes, or
// than any should, and so would hold up those that share its stream.
var errFlooded = errors.New("the watch needs a stream of its own")

// everyWatch is the id in answers that are for all watches of a stream.
const everyWatch = -1

// streams carries the watches of one Client. They share a stream, since one
// costs as much memory as hundreds of keys, and an agent of hundreds of
// clusters has several watches of each. A watch that floods goes on over a
// stream of its own, where the server holds back what follows, and the others
// are not affected.
type streams struct {
	c      *Client
	intake intake

	mu     sync.Mutex
	shared *stream // to which watches are added; nil: the next one opens it
}

// carry has the view of w follow etcd over the shared stream, or over one apart,
// until the watch ends. leave must follow.
func (s *streams) carry(w *Watcher, apart bool) *watch {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.shared
	if apart || st == nil {
		st = s.open(apart)
	}
	if !apart {
		s.shared = st
	}
	wt := &watch{w: w, stream: st, from: w.view.at.revision + 1, ended: make(chan error, 1)}
	st.joining = append(st.joining, wt)
	if len(st.joining) == 1 {
		st.create()
	}
	return wt
}

// open starts a stream. mu is held.
func (s *streams) open(apart bool) *stream {
	st := &stream{of: s, apart: apart, watches: make(map[int64]*watch), done: make(chan struct{})}
	st.ctx, st.watchdog = newWatchdog(clientv3.WithRequireLeader(s.c.etcd.Ctx()), s.c.cfg.LivenessTimeout)
	go func() {
		defer close(st.done)
		err := st.run()
		for _, wt := range st.close() {
			wt.end(err)
		}
		st.watchdog.stop()
		st.sending.Wait()
	}()
	return st
}

// leave gives a watch up. Its view belongs to the caller again when it returns,
// and a stream that carries nothing else has ended.
func (s *streams) leave(wt *watch) {
	wt.w.viewMu.Lock()
	wt.gone = true
	wt.w.viewMu.Unlock()
	st := wt.stream
	if st.drop(wt) {
		st.watchdog.stop()
		<-st.done
	}
}

// watch is what one Watcher follows over a stream.
type watch struct {
	w      *Watcher
	stream *stream
	from   int64      // the revision that it begins with
	id     int64      // that etcd gave it; guarded by streams.mu
	left   bool       // guarded by streams.mu
	gone   bool       // nothing is applied any more; guarded by w.viewMu
	ended  chan error // gets the first reason why the watch is over
}

// end tells why the watch is over, unless somebody has.
func (wt *watch) end(err error) {
	select {
	case wt.ended <- err:
	default:
	}
}

// apply applies an answer to the view, and returns how many events of it were
// no news. Where it would hold up the other watches of the stream, because the
// consumer is behind or what comes is held back, the watch ends instead.
func (wt *watch) apply(resp *etcdserverpb.WatchResponse, held bool) (junk int, ok bool) {
	w := wt.w
	w.viewMu.Lock()
	defer w.viewMu.Unlock()
	if wt.gone {
		return 0, false
	}
	if !wt.stream.apart && len(resp.Events) > 0 && (held || w.out.crowded()) {
		wt.gone = true
		wt.end(errFlooded)
		return 0, false
	}
	before := w.view.dropped
	if err := w.answered(resp); err != nil {
		wt.gone = true
		wt.end(err)
	} else if resp.Created {
		w.live.Store(true)
		wt.stream.of.c.status.follows(w, phaseLive)
	}
	return int(w.view.dropped - before), true
}

// stream is one stream of etcd that carries watches. One goroutine reads it and
// applies what it reads to the views.
type stream struct {
	of       *streams
	apart    bool // it carries one watch, which floods
	ctx      context.Context
	watchdog *watchdog
	told     atomic.Bool    // etcd has given an answer without events
	sending  sync.WaitGroup // send
	done     chan struct{}  // closed when all of it is over

	// What follows is guarded by streams.mu.

	rpc     etcdserverpb.Watch_WatchClient // nil until the stream is open
	closed  bool
	watches map[int64]*watch // by the id that etcd gave them
	// joining are the watches that have no id yet. The answer that gives one
	// does not say whose it is, so that only the first is being asked for.
	joining []*watch
	out     []*etcdserverpb.WatchRequest // to be sent
	busy    bool                         // send is running
}

// run opens the stream and reads it until it breaks.
func (st *stream) run() error {
	c := st.of.c
	rpc, err := etcdserverpb.NewWatchClient(c.etcd.ActiveConnection()).Watch(st.ctx, c.callOptions()...)
	if err != nil {
		return err
	}
	st.opened(rpc)
	progress := startDuty(c.progressInterval(), st.askProgress)
	defer progress.stop()
	defer st.watchdog.stop()
	for {
		st.watchdog.waiting()
		resp, err := rpc.Recv()
		st.watchdog.busy()
		if err != nil {
			return st.watchdog.explain(err)
		}
		if wait := st.dispatch(resp); wait > 0 {
			sleep(st.ctx, wait)
		}
	}
}

// dispatch applies an answer to the views that it is for, and returns how long
// to take no other.
func (st *stream) dispatch(resp *etcdserverpb.WatchResponse) (wait time.Duration) {
	if len(resp.Events) == 0 && !resp.Created {
		st.told.Store(true)
	}
	to, junk := st.addressees(resp), 0
	if len(to) == 0 {
		junk = len(resp.Events)
	}
	wait = st.of.intake.take(costOf(resp), time.Now())
	for _, wt := range to {
		n, ok := wt.apply(resp, wait > 0)
		if !ok && len(resp.Events) > 0 {
			return 0 // it waits where it is alone
		}
		junk += n
	}
	if junk > 0 {
		wait = st.of.intake.take(junk*junkCost, time.Now())
	}
	return wait
}

// addressees returns the watches that an answer is for.
func (st *stream) addressees(resp *etcdserverpb.WatchResponse) []*watch {
	st.of.mu.Lock()
	defer st.of.mu.Unlock()
	switch {
	case resp.Created:
		return st.created(resp)
	case resp.WatchId == everyWatch && len(resp.Events) == 0:
		return slices.Collect(maps.Values(st.watches))
	}
	if wt := st.watches[resp.WatchId]; wt != nil {
		return []*watch{wt}
	}
	return nil
}

// opened has the watches that wait for the stream created.
func (st *stream) opened(rpc etcdserverpb.Watch_WatchClient) {
	st.of.mu.Lock()
	defer st.of.mu.Unlock()
	st.rpc = rpc
	st.create()
}

// create asks for the first watch that has no id. mu is held.
func (st *stream) create() {
	if st.rpc == nil || len(st.joining) == 0 {
		return
	}
	wt := st.joining[0]
	st.send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CreateRequest{
		CreateRequest: &etcdserverpb.WatchCreateRequest{
			Key:            []byte(wt.w.of.start),
			RangeEnd:       []byte(wt.w.of.end),
			StartRevision:  wt.from,
			ProgressNotify: true,
			Fragment:       true,
		},
	}})
}

// created gives the watch that was asked for its id, and asks for the next one.
// mu is held.
func (st *stream) created(resp *etcdserverpb.WatchResponse) []*watch {
	if len(st.joining) == 0 {
		return nil
	}
	wt := st.joining[0]
	st.joining = st.joining[1:]
	st.create()
	switch {
	case resp.Canceled: // it was refused
	case wt.left:
		st.cancel(resp.WatchId)
		return nil
	case st.watches[resp.WatchId] != nil:
		wt.end(fmt.Errorf("etcd gave two watches the id %d", resp.WatchId))
		return nil
	default:
		wt.id = resp.WatchId
		st.watches[wt.id] = wt
	}
	return []*watch{wt}
}

// drop forgets a watch, and reports whether the stream carries no other; it is
// closed to others then.
func (st *stream) drop(wt *watch) (last bool) {
	st.of.mu.Lock()
	defer st.of.mu.Unlock()
	wt.left = true
	if st.watches[wt.id] == wt {
		delete(st.watches, wt.id)
		st.cancel(wt.id)
	} else if i := slices.Index(st.joining, wt); i > 0 || i == 0 && st.rpc == nil {
		st.joining = slices.Delete(st.joining, i, i+1)
	}
	last = len(st.watches) == 0 && !slices.ContainsFunc(st.joining, func(wt *watch) bool { return !wt.left })
	if last && st.of.shared == st {
		st.of.shared = nil
	}
	return last
}

// close sees to it that nothing is sent any more and no watch joins, and
// returns the watches that the stream carried.
func (st *stream) close() []*watch {
	st.of.mu.Lock()
	defer st.of.mu.Unlock()
	st.closed = true
	if st.of.shared == st {
		st.of.shared = nil
	}
	return slices.AppendSeq(st.joining, maps.Values(st.watches))
}

// cancel tells etcd that a watch is not wanted. mu is held.
func (st *stream) cancel(id int64) {
	st.send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CancelRequest{
		CancelRequest: &etcdserverpb.WatchCancelRequest{WatchId: id},
	}})
}

// send has a request sent, by a goroutine that is there only meanwhile: a server
// that does not read holds up nobody else. mu is held.
func (st *stream) send(r *etcdserverpb.WatchRequest) {
	if st.closed {
		return
	}
	st.out = append(st.out, r)
	if !st.busy {
		st.busy = true
		st.sending.Go(st.sendAll)
	}
}

func (st *stream) sendAll() {
	st.of.mu.Lock()
	defer st.of.mu.Unlock()
	for len(st.out) > 0 {
		r := st.out[0]
		st.out = st.out[1:]
		st.of.mu.Unlock()
		_ = st.rpc.Send(r) // an error is told, and better, by Recv
		st.of.mu.Lock()
	}
	st.out, st.busy = nil, false
}

// askProgress asks for a progress notification, and returns when to ask for the
// next one. Some streams are told of none: those of an etcd to which nobody
// writes, and those of etcd's gRPC proxy. Until the first one has come, any
// answer of etcd shows that it lives.
func (st *stream) askProgress() time.Duration {
	c := st.of.c
	of, ok := st.requestProgress()
	if ok && !st.told.Load() {
		if _, err := c.head(st.ctx, of); err == nil {
			st.watchdog.again()
		}
	}
	return c.progressInterval()
}

// requestProgress returns what one of the watches is of, if there is any.
func (st *stream) requestProgress() (of span, ok bool) {
	st.of.mu.Lock()
	defer st.of.mu.Unlock()
	if len(st.out) == 0 { // or the server does not read
		st.send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_ProgressRequest{
			ProgressRequest: &etcdserverpb.WatchProgressRequest{},
		}})
	}
	for _, wt := range st.watches {
		return wt.w.of, true
	}
	return span{}, false
}
