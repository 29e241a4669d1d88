// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// remote is the life of one cluster, from the appearance of its config to the end of the draining that follows the
// config's removal. What it has brought into the tables outlives its connections.
type remote struct {
	name    string
	own     bool // our own cluster, which has neither file nor cluster-config
	mesh    *Mesh
	log     *slog.Logger
	rejects *rejections
	seen    sightings

	listed chan struct{} // closed when all kinds have been listed completely for the first time
	done   chan struct{} // closed at the end of run

	stop <-chan struct{} // closed when run is to end; nothing is drained then

	next *file // the config to start over with when this life is over; guarded by Mesh.mu

	mu       sync.Mutex
	settings settings
	removed  bool
	ended    bool               // there will be no other pass
	wake     context.CancelFunc // ends the present pass
	client   *kvstore.Client    // of the present connection, nil between connections
	claims   identity.ClusterID // what the cluster's last valid config says
	config   identity.ClusterConfig
	feeds    *feeds // nil until the cluster holds its id
	progress progress
	doubts   doubts
}

// settings is the config of a remote, with what is wrong with its file.
type settings struct {
	path     string
	hash     [sha256.Size]byte // of the last content looked at
	used     [sha256.Size]byte // of the content that config comes from
	config   *kvstore.Config   // the last that parsed; nil if none has yet
	parseErr error             // of the last content looked at
	doubt    error             // why the file is in no state to be judged
}

func (s *settings) err() error {
	for _, err := range []error{s.doubt, s.parseErr} {
		if err != nil {
			return fmt.Errorf("%s: %w", s.path, err)
		}
	}
	return nil
}

func newRemote(m *Mesh, name string) *remote {
	log := m.cfg.Log.With("cluster", name)
	return &remote{
		name: name, mesh: m, log: log, rejects: newRejections(log),
		listed: make(chan struct{}), done: make(chan struct{}), wake: func() {},
		progress: progress{state: Connecting, since: time.Now()},
	}
}

func newOwnRemote(m *Mesh) *remote {
	r := newRemote(m, m.cfg.ClusterName)
	r.own = true
	r.settings.config = m.cfg.Own
	r.claims = m.cfg.ClusterID
	return r
}

// configure makes f the config to connect with. Where the file cannot be judged, or its content does not parse, that is an
// error in the status, and the connection stays as it is.
func (r *remote) configure(f file, doubt error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &r.settings
	known := s.path != ""
	s.path, s.doubt = f.path, doubt
	if known && s.hash == f.hash {
		return
	}
	s.hash = f.hash
	config, err := r.parseConfig(f.content)
	if s.parseErr = err; err != nil {
		r.note(s.err())
		r.log.Warn("config of remote cluster is unusable, the one before it stays", "err", s.err())
		return
	}
	if s.config != nil && s.used == f.hash {
		return // back to what is in use
	}
	s.config, s.used = &config, f.hash
	r.wake()
}

func (r *remote) parseConfig(content []byte) (kvstore.Config, error) {
	config, err := kvstore.ParseConfig(content)
	if err != nil {
		return kvstore.Config{}, err
	}
	config.HeartbeatKey = identity.HeartbeatKey
	if tune := r.mesh.cfg.Tune; tune != nil {
		tune(&config)
	}
	return config, config.Validate()
}

// remove ends the life: what the cluster has brought is deleted, and run returns.
func (r *remote) remove() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.removed {
		r.removed = true
		r.wake()
	}
}

func (r *remote) removing() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.removed
}

// run lives until the remote is removed and has drained, or ctx ends; then nothing is drained.
func (r *remote) run(ctx context.Context) {
	defer close(r.done)
	r.stop = ctx.Done()
	var (
		used     *kvstore.Config
		failures int
	)
	for {
		pass, config := r.begin(ctx)
		if ctx.Err() != nil {
			r.end()
			return
		}
		if r.removing() {
			r.end()
			r.withdraw()
			return
		}
		r.forget()
		if config != used {
			used, failures = config, 0
		}
		if config == nil {
			<-pass.Done()
			continue
		}
		joined, err := r.connect(pass, *config)
		if pass.Err() != nil {
			continue
		}
		r.failed(err)
		if joined {
			failures = 0
		}
		failures++
		sleep(pass, r.mesh.timing.pause(failures))
	}
}

// begin returns the config to use now, and a context that ends when there is another, or none.
func (r *remote) begin(ctx context.Context) (context.Context, *kvstore.Config) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wake()
	if r.removed {
		return ctx, nil
	}
	ctx, r.wake = context.WithCancel(ctx)
	return ctx, r.settings.config
}

// end lets go of the last pass's context, and of the time to live: there is no pass that it could end.
func (r *remote) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	r.noteAbsence(false)
	r.doubts.end()
	r.wake()
}

// hold makes r the holder of the id that config says, with feeds for its layout. What was brought under another id is
// deleted first: the cluster does not claim it any more.
func (r *remote) hold(config identity.ClusterConfig) error {
	id := identity.ClusterID(config.ID)
	if r.feeds != nil && r.feeds.id != id {
		r.log.Info("id of remote cluster has changed, starting over", "old", r.feeds.id, "new", id)
		if r.withdraw(); r.feeds != nil {
			return errStopped
		}
		r.drains(false)
	}
	r.mu.Lock()
	r.claims = id
	r.mu.Unlock()
	if !r.own {
		if err := r.mesh.ids.reserve(id, r.name); err != nil {
			return err
		}
	}
	fs := r.feeds
	switch cached := config.Capabilities.Cached; {
	case fs == nil:
		fs = r.newFeeds(id, cached)
	case fs.cached != cached:
		fs.move(r.name, cached)
	}
	mode := config.Capabilities.EndpointSlicesExportMode
	if sliced := mode == identity.SlicesOnly || mode == identity.SlicesToo && r.mesh.cfg.PreferSlices; sliced != fs.sliced {
		fs = r.turn(fs, sliced)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.config, r.feeds = config, fs
	return nil
}

// withdraw deletes all that the cluster has brought, in batches, and frees its id. When the agent stops, the rest stays.
func (r *remote) withdraw() {
	fs := r.feeds
	if fs == nil {
		return
	}
	r.drains(true)
	if !fs.drain(r.stop) {
		return
	}
	r.mu.Lock()
	r.feeds = nil
	r.mu.Unlock()
	r.mesh.ids.release(fs.id, r.name)
	r.mesh.cfg.Services.SetLost(r.name, false)
	r.log.Info("all resources of remote cluster cleaned up")
}

// drains begins or ends the state of draining.
func (r *remote) drains(now bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.progress.draining = now
	r.observe()
}
