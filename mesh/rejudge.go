// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"fmt"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// Limits returns the state of the file of limits.
func (m *Mesh) Limits() LimitsStatus { return m.policy.report() }

// dutyCycle is how many times as long as it took the last time is waited before all is judged anew once more.
const dutyCycle = 10

// enforce has all that is in use, or was refused, judged anew whenever the limits, or what the clusters say is theirs, have
// changed, until ctx ends.
func (m *Mesh) enforce(ctx context.Context) {
	due := time.NewTimer(m.timing.poll)
	defer due.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.ground.changed:
		case <-due.C:
		}
		start := time.Now()
		reloaded, unsettled := m.policy.reload(start)
		due.Reset(m.timing.poll)
		if unsettled {
			due.Reset(min(m.timing.poll, m.timing.quiet))
		}
		news := m.ground.publish() || reloaded
		feeds := m.limitedFeeds()
		for _, fs := range feeds {
			// A node that has been gone for long is no host any more.
			news = fs.gate.hosts.expire(start, m.cfg.KeepInvalid) || news
		}
		if news {
			m.rejudge(feeds)
		}
		for _, fs := range feeds {
			for _, f := range fs.inDrainOrder() {
				f.retry(time.Now(), m.timing)
			}
		}
		if news && !sleep(ctx, dutyCycle*time.Since(start)) {
			return
		}
	}
}

// limitedFeeds returns the feeds of all remote clusters that hold an id, by it.
func (m *Mesh) limitedFeeds() map[identity.ClusterID]*feeds {
	all := make(map[identity.ClusterID]*feeds)
	for _, r := range m.all() {
		r.mu.Lock()
		if fs := r.feeds; fs != nil && fs.gate != nil {
			all[fs.id] = fs
		}
		r.mu.Unlock()
	}
	return all
}

// rejudge judges all that is in use by what is in force now: nodes first, since the hosts of addresses are nodes. The
// addresses that must be looked at again are found by one look through the whole table, for all clusters together. What the
// table does not hold yet then has been judged after the change: a batch from before it is waited for.
func (m *Mesh) rejudge(all map[identity.ClusterID]*feeds) {
	judges := make(map[identity.ClusterID]*judge)
	for id, fs := range all {
		fs.nodes.rejudge(nil)
		fs.services.rejudge(nil)
		for _, f := range fs.former {
			f.rejudge(nil)
		}
		judges[id] = &judge{gate: fs.gate}
	}
	for _, fs := range all {
		fs.ips.awaitFlush()
	}
	suspects := make(map[identity.ClusterID][]ipcache.Claim)
	for _, c := range m.cfg.IPs.Select(func(c *ipcache.Claim) bool {
		j := judges[c.Owner.Cluster]
		return j != nil && c.Owner.Object == ipOwnerObject && !j.agrees(c)
	}) {
		suspects[c.Owner.Cluster] = append(suspects[c.Owner.Cluster], c)
	}
	for id, fs := range all {
		fs.ips.rejudge(suspects[id])
	}
}

// agrees reports whether an announcement that has been accepted would be so now.
func (j *judge) agrees(c *ipcache.Claim) bool {
	if _, err := j.identity(c.Entry.Identity); err != nil {
		return false
	}
	wait, err := j.announcement(c.Prefix, c.Entry.Identity, c.Entry.Host)
	return !wait && err == nil
}

// rejudge takes back what may not be used any more, and asks for another listing if there may be something to take that was
// refused.
func (f *feed) rejudge(suspects []ipcache.Claim) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.anew.wanted = f.anew.wanted || f.limited
	f.decode.rejudge(suspects, f.judged)
	f.decode.flush(time.Time{})
}

// awaitFlush returns when all that has been judged before it was called is in the tables.
func (f *feed) awaitFlush() {
	f.mu.Lock() // which a batch holds from the first verdict until it is flushed
	defer f.mu.Unlock()
}

// judged is what the decoder calls with the key of an object of which less or more is in use than before.
func (f *feed) judged(key []byte, err error) {
	if err == nil {
		delete(f.refused, string(key))
		return
	}
	if !isPartial(err) {
		f.forget(key)
	}
	f.note(key, err)
}

// arrived uses the announcements that have waited for nodes that are known by now.
func (f *feed) arrived() {
	d, ok := f.decode.(*ips)
	if !ok || d.judge == nil {
		return
	}
	// That nothing is held tells nothing before the lock is: an announcement whose node was not known when it was judged may
	// be about to be.
	f.mu.Lock()
	defer f.mu.Unlock()
	d.arrived(f.judged)
	d.flush(time.Time{})
}

// retry lists anew if that is wanted, but not too often: who causes it may be another cluster, again and again.
func (f *feed) retry(now time.Time, t timing) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.anew.wanted = f.anew.wanted || f.starved && f.gate.hasRoom()
	if !f.anew.wanted || f.cancel == nil || now.Before(f.anew.due) {
		return
	}
	f.anew.times++
	f.anew.due = now.Add(t.pause(f.anew.times))
	f.cancel(errJudgeAnew) // without effect if the connection has just ended: it is the move that fulfils the wish
}

// hungry reports whether a quota has refused something.
func (f *feed) hungry() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.starved
}

// slowDown holds up the watcher's deliveries if the cluster's changes come too fast, or ends them if it has too many keys.
// Listings are as fast as they can be: they end.
func (f *feed) slowDown(events int) {
	f.mu.Lock()
	pass, watcher := f.pass, f.watcher
	if most := f.gate.mostKeys(); most != 0 && watcher.Len() > most && f.cancel != nil {
		f.cancel(fmt.Errorf("%w: more than %d of kind %s, %d for each entry that the cluster may have; raise its max-entries in the limits if they are honest",
			errTooManyKeys, most, f.kind, keysPerEntry))
	}
	f.mu.Unlock()
	if f.gate == nil || pass == nil || !watcher.Live() {
		return
	}
	if wait := f.gate.pace.take(events, &f.gate.rules().limits, time.Now()); wait > 0 {
		sleep(pass, wait)
	}
}
