// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// progress is how far the life of a remote has come.
type progress struct {
	attempt  attempt
	config   error // what is wrong with the cluster-config of a joined cluster
	lost     error // what a connection suffers from that has not failed, as last noticed
	draining bool  // what the cluster has brought is being deleted

	state State // as last noticed
	since time.Time
	away  absence

	lastErr               error
	lastErrAt             time.Time
	lastSuccess           time.Time // when etcd last answered while the cluster was followed
	failures, connections uint64    // without the failures of the present client
	connected             time.Time // when the last of the connections was made
}

// attempt is what the latest attempt to join the cluster has come to.
type attempt uint8

const (
	attemptOpen attempt = iota
	attemptFailed
	attemptConflict
	attemptJoined
)

// note remembers an error for the status. mu is held.
func (r *remote) note(err error) {
	r.progress.lastErr, r.progress.lastErrAt = err, time.Now()
}

// use makes client, or none, the one that the status speaks of.
func (r *remote) use(client *kvstore.Client) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.client != nil {
		r.progress.failures += r.client.Status().FailedDials
	}
	r.client = client
}

// connecting begins a connection. What a failure before it has shown stays shown until it has come to something.
func (r *remote) connecting() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.progress.attempt == attemptJoined {
		r.progress.attempt = attemptOpen
	}
	r.observe()
}

// failed ends an attempt, or a connection, with an error.
func (r *remote) failed(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := &r.progress
	again := p.lastErr != nil && p.attempt != attemptJoined && p.lastErr.Error() == err.Error()
	p.attempt = attemptFailed
	if errors.Is(err, errConflict) {
		p.attempt = attemptConflict
	}
	p.failures++
	r.note(err)
	r.observe()
	if !again && !errors.Is(err, context.Canceled) {
		r.log.Warn("connection to remote cluster failed", "err", err)
	}
}

// joined says that the cluster's config is accepted and its data is about to be followed.
func (r *remote) joined() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.progress.attempt, r.progress.config, r.progress.lost = attemptJoined, nil, nil
	r.progress.connections++
	r.progress.connected = time.Now()
	r.observe()
	r.log.Info("connection to remote cluster established", "clusterID", r.claims, "cached", r.config.Capabilities.Cached,
		"canaries", r.config.Capabilities.SyncedCanaries)
}

// published says what is wrong with the config that the cluster publishes now, nil if nothing is.
func (r *remote) published(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.progress.config = err; err != nil {
		r.note(err)
	}
	r.observe()
}

// look brings the state up to date with what nobody has told.
func (r *remote) look() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.observe()
}

// synced is called by a feed that has been listed.
func (r *remote) synced() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.client != nil {
		r.seen.follow(r.client.Status().EtcdClusterID)
	}
	r.observe()
}

// observe brings the state up to date. mu is held.
func (r *remote) observe() {
	p := &r.progress
	listed, current, lost := r.survey()
	var etcd kvstore.Status
	if r.client != nil {
		etcd = r.client.Status()
	}
	if lost == nil && (p.attempt == attemptJoined || p.attempt == attemptOpen) {
		lost = unreached(etcd)
	}
	r.noteAbsence(p.attempt != attemptJoined || lost != nil)
	// A cluster whose data is followed is not away because of what is doubtful beside it, such as a late heartbeat.
	if lost == nil && p.attempt == attemptJoined && (etcd.State == kvstore.Stale || etcd.State == kvstore.Failed) {
		lost = etcd.LastError
	}
	r.doubt(p.attempt != attemptJoined || lost != nil)
	if p.following(lost) && r.client != nil {
		p.lastSuccess = etcd.LastContact
	}
	if lost != nil && (p.lost == nil || p.lost.Error() != lost.Error()) {
		r.note(lost)
	}
	p.lost = lost
	if listed {
		select {
		case <-r.listed:
		default:
			close(r.listed)
		}
	}
	state := p.stateFor(listed, current)
	if state == p.state {
		return
	}
	r.log.Info("state of remote cluster", "state", state, "was", p.state, "after", time.Since(p.since).Round(time.Millisecond))
	p.state, p.since = state, time.Now()
}

// survey asks the feeds whether all of them have been listed, ever and over this connection, and what they suffer from.
func (r *remote) survey() (listed, current bool, lost error) {
	if r.feeds == nil {
		return false, false, nil
	}
	listed, current = true, true
	for _, f := range r.feeds.inDrainOrder() {
		s := f.standing()
		listed, current = listed && s.listed, current && s.current
		if lost == nil && s.lost != nil {
			lost = s.lost
		}
	}
	return listed, current, lost
}

func (p *progress) stateFor(listed, current bool) State {
	following := p.following(p.lost)
	switch {
	case p.draining:
		return Draining
	case p.attempt == attemptConflict:
		return Conflict
	case following && current:
		return Ready
	case listed:
		return Stale
	case following:
		return Syncing
	case p.attempt == attemptOpen && p.lost == nil:
		return Connecting
	}
	return Failed
}

// following reports whether all that the cluster publishes is being followed, if nothing but lost is amiss.
func (p *progress) following(lost error) bool {
	return p.attempt == attemptJoined && p.config == nil && lost == nil
}

// unreached says why there is no connection, nil if there is no reason: it is only being made, or has been let go of.
func unreached(s kvstore.Status) error {
	if s.Connected || s.LastError == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", errNoAnswer, s.LastError)
}

// standing is what others need to know of a remote.
type standing struct {
	holds  identity.ClusterID // the id under which it brings data, 0 if none
	claims identity.ClusterID // the id that the cluster says it has, 0 if that is not known
	listed bool               // its nodes, addresses and identities have all been in the tables
	served bool               // its services have
	// gone: what it has brought, or would bring, is withdrawn, as it has been away for so long.
	gone bool
	// withdrawn: its services are, at least.
	withdrawn bool
}

func (r *remote) standing() standing {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := standing{claims: r.claims, withdrawn: r.progress.away.withdrawn, gone: r.progress.away.withdrawn && r.mesh.cfg.CacheTTLAll}
	if fs := r.feeds; fs != nil {
		s.holds = fs.id
		s.served = fs.services.standing().listed
		s.listed = fs.nodes.standing().listed && fs.ips.standing().listed && fs.identities.standing().listed
	}
	return s
}

func (r *remote) status() RemoteStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.observe()
	p := &r.progress
	s := RemoteStatus{
		Name: r.name, Own: r.own, ClusterID: uint32(r.claims), State: p.state, Since: p.since,
		ConfigFile: r.settings.path, Failures: p.failures, LastSuccess: p.lastSuccess, Reconnects: max(p.connections, 1) - 1,
		Canaries: r.config.Capabilities.SyncedCanaries, Cached: r.config.Capabilities.Cached,
	}
	if s.Reconnects > 0 {
		s.LastReconnect = p.connected
	}
	if err := r.settings.err(); err != nil {
		s.ConfigError = printable(err.Error())
	}
	if p.lastErr != nil {
		s.LastError, s.LastErrorAt = printable(p.lastErr.Error()), p.lastErrAt
	}
	if r.settings.config != nil {
		s.Endpoints = r.settings.config.Endpoints
	}
	if !p.away.since.IsZero() && p.state == Stale {
		s.StaleSince, s.Withdrawn = p.away.since, p.away.withdrawn
	}
	if r.client != nil {
		c := r.client.Status()
		s.Failures += c.FailedDials
		s.EtcdClusterID, s.ServerVersion, s.Revision = c.EtcdClusterID, printable(c.ServerVersion), c.Revision
		s.Warning, s.Lag = printable(c.Warning), c.Lag
		s.Certificates, s.CertificateWarnings = c.Certificates, c.Warnings
	}
	if fs := r.feeds; fs != nil {
		for _, f := range []struct {
			feed   *feed
			count  *int
			synced *bool
		}{
			{fs.nodes, &s.Nodes, &s.Synced.Nodes}, {fs.ips, &s.IPs, &s.Synced.IPs},
			{fs.identities, &s.Identities, &s.Synced.Identities}, {fs.services, &s.Services, &s.Synced.Services},
		} {
			state := f.feed.standing()
			*f.count, *f.synced = state.inUse, state.current
		}
		s.Waiting, s.Quotas = fs.waiting(), fs.quotas()
	}
	s.ServicesLost = r.doubts.lost
	s.Rejected, s.LastRejections = r.rejects.report()
	return s
}

// badFile is the row of a file that should be a cluster's config and cannot be.
func badFile(dir, name string, err error, since time.Time) RemoteStatus {
	text := printable(err.Error())
	return RemoteStatus{
		Name: printable(name), State: Failed, Since: since, ConfigFile: printable(filepath.Join(dir, name)),
		ConfigError: text, LastError: text, LastErrorAt: since,
	}
}
