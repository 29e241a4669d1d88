// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

const (
	// reconcileChunk is how many changes are taken and written at once.
	reconcileChunk = 4096
	// deletionLimit bounds the deletions that wait for additions to go first.
	deletionLimit = 16 * reconcileChunk
	// Failed writes are tried again after retryMin, then at doubled intervals up to retryMax.
	retryMin = 100 * time.Millisecond
	retryMax = 4 * time.Second
	// listedInterval is how often the sources are asked whether what they do not claim may go.
	listedInterval = 250 * time.Millisecond
	// idleInterval bounds the wait for something to do.
	idleInterval = 10 * time.Minute
)

// reconciler makes the kernel's map equal the table. It pulls what changed, so that a slow kernel makes it see fewer
// changes, not more memory. Only its run method and what that calls write the map; status is safe for concurrent use.
type reconciler struct {
	table    *ipcache.Table
	kernel   prefixMap
	underlay underlay
	layout   identity.Layout
	listed   func(identity.ClusterID) bool
	log      *slog.Logger
	// requests ask for a comparison of the whole map with the table, all at once. Step by step one is made all the time.
	requests  <-chan comparison
	pace      comparePace
	scrubbing *scrub // nil between two

	since     ipcache.Revision
	unread    bool // the map is to be read before the next change is taken
	inherited *inherited
	nextPrune time.Time

	// failed are the keys whose last write failed. What they should be is asked of the table when they are tried again.
	failed    map[bpf.IPCacheKey]struct{}
	full      bool // the last of them failed for want of room
	backoff   time.Duration
	lastRetry time.Time
	nextRetry time.Time

	// deletions wait until the additions that were known with them are made.
	deletions []bpf.IPCacheKey

	buf    []ipcache.Change
	keys   []bpf.IPCacheKey
	values []bpf.IPCacheValue

	propagation propagation

	mu          sync.Mutex
	state       MapStatus
	carriedUpTo ipcache.Revision // of the table, which the map has, or refused
}

func newReconciler(cfg *Config, kernel prefixMap) *reconciler {
	return &reconciler{
		table:    cfg.IPs,
		kernel:   kernel,
		underlay: underlay{NodeIPs: cfg.NodeIPs, V6: cfg.Underlay6},
		layout:   cfg.Layout,
		listed:   cfg.Listed,
		log:      cfg.Log,

		pace: cfg.comparePace(),

		unread:  true,
		failed:  map[bpf.IPCacheKey]struct{}{},
		backoff: retryMin,
		buf:     make([]ipcache.Change, 0, reconcileChunk),
		keys:    make([]bpf.IPCacheKey, reconcileChunk),
		values:  make([]bpf.IPCacheValue, reconcileChunk),
		state:   MapStatus{MaxEntries: cfg.MaxEntries},
	}
}

// run reconciles until ctx ends. It calls done after each pass that got to the end of what the table had to say.
func (r *reconciler) run(ctx context.Context, done func()) {
	defer func() {
		r.inherited.Close()
		r.inherited = nil
	}()
	scrub := time.NewTimer(r.pace.pause(0, r.table.Len()/scrubChunk+1, false))
	defer scrub.Stop()
	wait := time.NewTimer(0)
	defer wait.Stop()
	for ctx.Err() == nil {
		changed := r.table.Changed()
		err := r.pass(ctx, time.Now())
		r.publish()
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			r.note(func(s *MapStatus) { s.LastError, s.LastErrorAt = err.Error(), time.Now() })
			r.log.Warn("reconcile ipcache, will try again", "err", err)
		default:
			r.note(func(*MapStatus) { r.carriedUpTo = r.since })
			done()
		}
		wait.Reset(r.idle(time.Now()))
		select {
		case <-ctx.Done():
		case <-changed:
		case <-wait.C:
		case <-scrub.C:
			scrub.Reset(r.scrubStep())
		case c := <-r.requests:
			report, err := r.verify(ctx, c.repair, c.tell)
			c.reply <- comparisonResult{report, err}
		}
	}
}

// idle is how long there is nothing to do unless the table changes.
func (r *reconciler) idle(now time.Time) time.Duration {
	next := idleInterval
	if r.unread {
		next = retryMax
	}
	if len(r.failed) > 0 {
		next = min(next, r.nextRetry.Sub(now))
	}
	if r.inherited != nil {
		next = min(next, r.nextPrune.Sub(now))
	}
	return max(next, 0)
}

// pass takes over the map if that is due, then makes all that the table has to say true: additions first, as they come,
// then deletions, then what nobody claims and what failed before.
func (r *reconciler) pass(ctx context.Context, now time.Time) error {
	for ctx.Err() == nil {
		if r.unread {
			if err := r.read(); err != nil {
				return err
			}
		}
		batch, next, reset := r.table.Changes(r.since, r.buf)
		if reset {
			// Deletions were missed. Reading the map tells what it holds, and the table will speak of the rest.
			if err := r.read(); err != nil {
				return err
			}
			r.note(func(s *MapStatus) { s.Resets++ })
		}
		r.since = next
		r.apply(batch)
		if len(batch) < reconcileChunk {
			break
		}
		if len(r.deletions) >= deletionLimit {
			r.delete()
		}
		if len(r.deletions) == 0 {
			r.carried()
		}
	}
	r.delete()
	r.carried()
	r.prune(now)
	r.retry(now)
	return nil
}

// carried notes that the kernel holds all that the table has said, unless it refused something.
func (r *reconciler) carried() { r.propagation.taken(r.table, r.since, len(r.failed) == 0) }

// read takes over what the kernel holds and begins with the table anew.
func (r *reconciler) read() error {
	r.inherited.Close() // free the old before the new
	r.inherited, r.scrubbing = nil, nil
	r.unread = true
	found, err := inherit(r.kernel.Dump, r.group)
	if err != nil {
		return err
	}
	if found.left > 0 {
		r.inherited = found
	}
	r.since, r.unread = ipcache.Revision{}, false
	return nil
}

// group is the cluster that is asked whether an entry may be pruned.
func (r *reconciler) group(v bpf.IPCacheValue) uint16 {
	return uint16(r.layout.Cluster(identity.ID(v.Identity)))
}

// apply writes the additions of a batch, the longest prefix first, and puts the deletions off.
func (r *reconciler) apply(batch []ipcache.Change) {
	// A counting sort by length: place[n] is where the next prefix of n bits goes. Long prefixes have small places.
	var place [128 + 1]int
	for i := range batch {
		if !batch[i].Deleted {
			place[batch[i].Prefix.Bits()]++
		}
	}
	n := 0
	for bits := len(place) - 1; bits >= 0; bits-- {
		n, place[bits] = n+place[bits], n
	}
	for i := range batch {
		c := &batch[i]
		if c.Deleted {
			key := bpf.MakeIPCacheKey(c.Prefix)
			if r.inherited != nil {
				r.inherited.speak(key)
			}
			r.deletions = append(r.deletions, key)
			continue
		}
		at := &place[c.Prefix.Bits()]
		r.keys[*at], r.values[*at] = r.underlay.encode(c.Prefix, c.Entry)
		*at++
	}
	keys, values := r.adopt(r.keys[:n], r.values[:n])
	r.write(keys, values, func(error) bool { return true })
	if h := r.inherited; h != nil && h.left == 0 {
		r.inherited = nil
	}
}

// adopt removes, in place, what the kernel already holds.
func (r *reconciler) adopt(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) ([]bpf.IPCacheKey, []bpf.IPCacheValue) {
	if r.inherited == nil {
		return keys, values
	}
	n := 0
	for i := range keys {
		if has, ok := r.inherited.speak(keys[i]); ok && has == values[i] {
			continue
		}
		keys[n], values[n] = keys[i], values[i]
		n++
	}
	r.note(func(s *MapStatus) { s.Adopted += uint64(len(keys) - n) })
	return keys[:n], values[:n]
}

// write sets entries in order. One that fails is noted, and the next are tried while goOn says so of the error: where the
// map is full, entries that it holds can still be changed.
func (r *reconciler) write(keys []bpf.IPCacheKey, values []bpf.IPCacheValue, goOn func(error) bool) {
	for len(keys) > 0 {
		n, err := r.kernel.Update(keys, values)
		r.succeeded(keys[:n])
		r.note(func(s *MapStatus) { s.Written += uint64(n) })
		if err == nil {
			return
		}
		r.fail(keys[n], err)
		if !goOn(err) {
			return
		}
		keys, values = keys[n+1:], values[n+1:]
	}
}

// delete makes the deletions that were put off, the shortest prefix first, unless the table has the prefix again. It
// returns how many entries are gone by it.
func (r *reconciler) delete() (gone int) {
	if len(r.deletions) == 0 {
		return 0
	}
	slices.SortFunc(r.deletions, func(a, b bpf.IPCacheKey) int {
		return cmp.Or(cmp.Compare(a.PrefixLen, b.PrefixLen), compareKeys(a, b))
	})
	keys := slices.DeleteFunc(r.deletions, r.wanted)
	r.deletions = nil
	for len(keys) > 0 {
		chunk := keys[:min(len(keys), reconcileChunk)]
		n, err := r.kernel.Delete(chunk)
		r.succeeded(chunk[:n])
		r.scrubbing.gone(chunk[:n])
		gone += n
		keys = keys[n:]
		switch {
		case err == nil:
			continue
		case errors.Is(err, ebpf.ErrKeyNotExist):
			r.succeeded(keys[:1])
		default:
			r.fail(keys[0], err)
		}
		keys = keys[1:]
	}
	if gone > 0 {
		// There is room again.
		r.nextRetry = r.lastRetry.Add(retryMin)
		r.note(func(s *MapStatus) { s.Deleted += uint64(gone) })
	}
	return gone
}

// wanted reports whether the table has an entry for key.
func (r *reconciler) wanted(key bpf.IPCacheKey) bool {
	prefix, err := key.Prefix()
	if err != nil || key.ClusterID != 0 {
		return false // not one that weft would write
	}
	_, ok := r.table.Get(prefix)
	return ok
}

// prune deletes what the map was found with and nobody claims, as far as those who would claim it have been heard
// completely. They are asked before the table is, so that what they claimed meanwhile is there.
func (r *reconciler) prune(now time.Time) {
	if r.inherited == nil || now.Before(r.nextPrune) {
		return
	}
	r.nextPrune = now.Add(listedInterval)
	orphans := r.inherited.take(func(group uint16) bool { return r.listed(identity.ClusterID(group)) })
	if len(orphans) == 0 {
		return
	}
	if r.inherited.left == 0 {
		r.inherited = nil
	}
	r.deletions = append(r.deletions, orphans...)
	pruned := r.delete()
	r.note(func(s *MapStatus) { s.Pruned += uint64(pruned) })
	r.log.Info("pruned entries that nobody claims", "entries", pruned)
}

// retry tries failed keys again when that is due. Of very many it takes some, any.
func (r *reconciler) retry(now time.Time) {
	if len(r.failed) == 0 || now.Before(r.nextRetry) {
		return
	}
	keys := make([]bpf.IPCacheKey, 0, min(len(r.failed), deletionLimit))
	for key := range r.failed {
		if len(keys) == cap(keys) {
			break
		}
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b bpf.IPCacheKey) int {
		return cmp.Or(cmp.Compare(b.PrefixLen, a.PrefixLen), compareKeys(a, b))
	})
	before := len(r.failed)
	r.full = false
	for chunk := range slices.Chunk(keys, reconcileChunk) {
		if r.again(chunk); r.full {
			break
		}
	}
	r.delete()
	r.backoff = min(2*r.backoff, retryMax)
	if len(r.failed) < before {
		r.backoff = retryMin
	}
	r.lastRetry, r.nextRetry = now, now.Add(r.backoff)
}

// again writes failed keys as the table has them now. It gives up when the map is full: what it holds already does not
// fail for want of room, so none of the rest would fit.
func (r *reconciler) again(failed []bpf.IPCacheKey) {
	keys, values := r.keys[:0], r.values[:0]
	for _, key := range failed {
		var claim ipcache.Claim
		prefix, err := key.Prefix()
		wanted := err == nil && key.ClusterID == 0
		if wanted {
			claim, wanted = r.table.Get(prefix)
		}
		if !wanted {
			r.deletions = append(r.deletions, key)
			continue
		}
		_, value := r.underlay.encode(prefix, claim.Entry)
		keys, values = append(keys, key), append(values, value)
	}
	r.write(keys, values, func(err error) bool { return !isFull(err) })
}

// succeeded forgets that keys failed.
func (r *reconciler) succeeded(keys []bpf.IPCacheKey) {
	if len(r.failed) == 0 {
		return
	}
	for _, key := range keys {
		delete(r.failed, key)
	}
}

// fail notes that the write of key failed. The first failure after a time without any is logged.
func (r *reconciler) fail(key bpf.IPCacheKey, err error) {
	first := len(r.failed) == 0
	r.failed[key] = struct{}{}
	if r.full = isFull(err); r.full {
		err = fmt.Errorf("map ipcache is full with %d entries: raise --max-ipcache-entries", r.status().MaxEntries)
	}
	err = fmt.Errorf("write %v: %w", key, err)
	if first {
		r.lastRetry, r.backoff = time.Now(), retryMin
		r.nextRetry = r.lastRetry.Add(r.backoff)
		r.log.Error("kernel refuses an entry, will try again", "err", err)
	}
	r.note(func(s *MapStatus) { s.Failures++; s.LastError, s.LastErrorAt = err.Error(), time.Now() })
}

// isFull reports whether err says that the map has no room for a new key.
func isFull(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.E2BIG) }

// note changes the status.
func (r *reconciler) note(change func(*MapStatus)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(&r.state)
}

// publish brings the status up to date with the state of the reconciler.
func (r *reconciler) publish() {
	orphans := 0
	if r.inherited != nil {
		orphans = r.inherited.left
	}
	wanted := r.table.Len()
	r.note(func(s *MapStatus) {
		s.Pending, s.Unclaimed = len(r.failed), orphans
		s.Entries = max(0, wanted+orphans-len(r.failed))
		s.Full = r.full && len(r.failed) > 0
		if len(r.failed) == 0 && !r.unread {
			s.LastError, s.LastErrorAt = "", time.Time{}
		}
	})
}

// carriedTo is safe for concurrent use.
func (r *reconciler) carriedTo() ipcache.Revision {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.carriedUpTo
}

// status is safe for concurrent use.
func (r *reconciler) status() MapStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state
}
