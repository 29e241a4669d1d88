// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

// Config is what a [Mesh] is made of.
type Config struct {
	// Dir holds one client config per remote cluster, under the cluster's name. Empty: there are no remote clusters.
	Dir string

	ClusterName string
	ClusterID   identity.ClusterID
	NodeName    string
	Layout      identity.Layout
	// DualStack: the world has one identity per family. Underlay6: nodes reach each other over IPv6.
	DualStack, Underlay6 bool

	// Own is our own cluster's etcd, whose nodes, addresses, identities and services are followed too; nil: they are not.
	//
	// The announcements of our own node are among them. They are not filtered: the node's own claims come from a stronger
	// source, and what it has left behind in an earlier life must be known until it is withdrawn.
	Own *kvstore.Config

	// Tune completes the config of each remote cluster by what its file does not say, such as rates; nil: by nothing.
	Tune func(*kvstore.Config)

	IPs        *ipcache.Table
	Nodes      *node.Table
	Identities *identity.Table
	Services   *service.Table

	// SyncTimeout bounds how long readiness waits for remote clusters. Default: 1 minute.
	SyncTimeout time.Duration
	// CacheTTL is how long the services of a remote cluster that cannot be followed stay in use, with CacheTTLAll all its
	// data; 0: for ever.
	CacheTTL    time.Duration
	CacheTTLAll bool
	// LoseAfter is how long a remote cluster may be in doubt, without a connection or a heartbeat, before its backends are used
	// only where there are no others; 0: for ever.
	LoseAfter time.Duration
	// PreferSlices: services of clusters that publish them whole and in slices are read in slices.
	PreferSlices bool
	// Preferences say by which of their addresses nodes are reached.
	Preferences node.Preferences
	// KeepInvalid is how long the last good value of a key stays in use when the key has got a bad one. Default: 10 minutes.
	KeepInvalid time.Duration

	// OwnPrefixes are the addresses and the pod CIDRs of this node, which no remote may claim.
	OwnPrefixes []netip.Prefix
	// LimitsFile says what remotes may claim. It is read again when it changes. Empty: they may claim what Limits says.
	LimitsFile string
	// Limits are the limits where the file says nothing. Default: DefaultLimits(MaxEntries).
	Limits *Limits
	// MaxEntries is the size of the map that the ipcache is meant for, of which no cluster may fill more than a part by
	// default. 0: it has no bound.
	MaxEntries int

	Log *slog.Logger
}

const (
	// afterLists is how long the first lists are given to come to rest.
	afterLists = 2 * time.Second

	defaultSyncTimeout = time.Minute
	defaultKeepInvalid = 10 * time.Minute
)

func (c *Config) complete() error {
	c.SyncTimeout = cmp.Or(c.SyncTimeout, defaultSyncTimeout)
	c.KeepInvalid = cmp.Or(c.KeepInvalid, defaultKeepInvalid)
	if c.Limits == nil {
		c.Limits = new(DefaultLimits(c.MaxEntries))
	}
	if c.IPs == nil || c.Nodes == nil || c.Identities == nil || c.Services == nil || c.Log == nil {
		return errors.New("mesh: a table or the log is missing")
	}
	if c.Dir == "" && c.Own == nil {
		return nil
	}
	if err := identity.ValidateClusterName(c.ClusterName); err != nil {
		return fmt.Errorf("mesh: our own cluster: %w", err)
	}
	if c.Dir != "" && (c.ClusterID == 0 || c.ClusterID > c.Layout.MaxCluster()) {
		return fmt.Errorf("mesh: our own cluster id %d: with remote clusters it must be 1 to %d", c.ClusterID, c.Layout.MaxCluster())
	}
	return nil
}

// timing holds the intervals of a mesh.
type timing struct {
	quiet, settle, rescan, poll time.Duration // see dir
	probe                       time.Duration // between looks at what time alone changes
	request                     time.Duration // bounds one request
	silence                     time.Duration // a connection without an answer for so long is given up
	retryMin, retryMax          time.Duration // between attempts to connect
}

var defaultTiming = timing{
	quiet: 50 * time.Millisecond, settle: 2 * time.Second, rescan: 30 * time.Second, poll: 2 * time.Second,
	probe: 10 * time.Second, request: 10 * time.Second, silence: time.Minute,
	retryMin: 250 * time.Millisecond, retryMax: 30 * time.Second,
}

// Mesh keeps one remote for each config in a directory. Its methods are safe for concurrent use.
type Mesh struct {
	cfg    Config
	timing timing
	ids    *clusterIDs
	ground *ground
	policy *policy
	slices *service.SliceReader
	crowd  crowd   // of the remotes' first listings over a connection
	dir    *dir    // nil without Config.Dir
	own    *remote // nil without Config.Own

	ready   chan struct{}
	scanned chan struct{} // closed when the directory has been looked at for the first time

	mu      sync.Mutex
	seen    bool               // the directory has been read
	remotes map[string]*remote // running, draining ones included
	doubts  map[string]error
	invalid map[string]error
	badAt   map[string]time.Time // since when a name is in doubts or invalid
}

// New checks cfg. It starts nothing. The error wraps [ErrLimits] for a file of limits that cannot be used.
func New(cfg Config) (*Mesh, error) { return newMesh(cfg, defaultTiming) }

func newMesh(cfg Config, t timing) (*Mesh, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	policy, err := newPolicy(&cfg, t)
	if err != nil {
		return nil, err
	}
	reader, err := service.NewSliceReader()
	if err != nil {
		return nil, err
	}
	m := &Mesh{
		cfg: cfg, timing: t, ids: newClusterIDs(), ground: newGround(cfg.ClusterID), policy: policy, slices: reader, crowd: newCrowd(),
		ready: make(chan struct{}), scanned: make(chan struct{}),
		remotes: make(map[string]*remote), badAt: make(map[string]time.Time),
	}
	if cfg.Own != nil {
		m.own = newOwnRemote(m)
	}
	if cfg.Dir == "" {
		m.seen = true
		close(m.scanned)
		return m, nil
	}
	m.dir = &dir{
		path: cfg.Dir, own: cfg.ClusterName, log: cfg.Log,
		quiet: t.quiet, settle: t.settle, rescan: t.rescan, poll: t.poll,
		status: DirStatus{Path: cfg.Dir},
	}
	return m, nil
}

// String names the task.
func (m *Mesh) String() string { return "mesh" }

// Ready is closed when every cluster whose config the first look at the directory has found, and our own, has been listed
// completely, or after Config.SyncTimeout.
func (m *Mesh) Ready() <-chan struct{} { return m.ready }

// Run follows the directory and its clusters until ctx ends, and then returns nil. It deletes nothing on its way out. It is
// called once.
func (m *Mesh) Run(ctx context.Context) error {
	var tasks sync.WaitGroup
	defer tasks.Wait()
	tasks.Go(func() { m.enforce(ctx) })
	if m.own != nil {
		tasks.Go(func() { m.own.run(ctx) })
	}
	if m.dir != nil {
		var first sync.Once
		tasks.Go(func() {
			m.dir.run(ctx, func(want *configs) {
				m.reconcile(ctx, &tasks, want)
				first.Do(func() { close(m.scanned) })
			})
		})
	}
	m.awaitListed(ctx)
	if ctx.Err() == nil {
		close(m.ready)
		// The first lists needed memory, stacks of goroutines included, that what follows does not: with hundreds of
		// clusters, more than all that they brought. It takes two collections until a stack is small again.
		for range 2 {
			if sleep(ctx, afterLists) {
				debug.FreeOSMemory()
			}
		}
		<-ctx.Done()
	}
	return nil
}

// awaitListed returns when all clusters that the first scan has found have been listed, but not too late.
func (m *Mesh) awaitListed(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.SyncTimeout)
	defer cancel()
	select {
	case <-m.scanned:
	case <-ctx.Done():
	}
	for _, r := range m.all() {
		select {
		case <-r.listed:
		case <-r.done:
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				m.cfg.Log.Warn("going on without a cluster that is not synced yet", "cluster", r.name, "waited", m.cfg.SyncTimeout)
			}
		}
	}
}

// reconcile makes the running remotes those that are wanted. A remote that drains keeps its name until it is done; then
// its end brings the name's next config into effect.
func (m *Mesh) reconcile(ctx context.Context, tasks *sync.WaitGroup, want *configs) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seen, m.doubts, m.invalid = want.seen, want.doubts, want.invalid
	m.noteBad()
	for name, f := range want.files {
		r, running := m.remotes[name]
		if running && !r.removing() {
			r.configure(f, want.doubts[name])
			continue
		}
		if running {
			r.next = &f
			continue
		}
		m.start(ctx, tasks, name, f)
	}
	for name, r := range m.remotes {
		if _, ok := want.files[name]; !ok {
			r.next = nil
			r.remove()
		}
	}
}

// start runs a new remote. mu is held.
func (m *Mesh) start(ctx context.Context, tasks *sync.WaitGroup, name string, f file) {
	if ctx.Err() != nil {
		return
	}
	r := newRemote(m, name)
	r.configure(f, nil)
	m.remotes[name] = r
	tasks.Go(func() {
		r.run(ctx)
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.remotes, name)
		if r.next != nil {
			m.start(ctx, tasks, name, *r.next)
		}
	})
}

// noteBad remembers since when each file that makes no remote is bad. mu is held.
func (m *Mesh) noteBad() {
	now := time.Now()
	at := make(map[string]time.Time)
	for _, bad := range []map[string]error{m.doubts, m.invalid} {
		for name := range bad {
			at[name] = now
			if since, ok := m.badAt[name]; ok {
				at[name] = since
			}
		}
	}
	m.badAt = at
}

// all returns the running remotes, our own cluster's included.
func (m *Mesh) all() []*remote {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]*remote, 0, len(m.remotes)+1)
	for _, r := range m.remotes {
		all = append(all, r)
	}
	if m.own != nil {
		all = append(all, m.own)
	}
	return all
}

// Listed reports whether all nodes, addresses and identities of the cluster with this id have been in the tables at least
// once since the start, so that what the tables lack is known to be gone. That is so, too, for an id that no cluster has;
// but as long as there is a configured cluster whose id is not known yet, every unknown id may be that cluster's, and
// before the directory has been read, every cluster's. A cluster
// whose data has outlived Config.CacheTTL has none. Id 0 stands for all clusters.
func (m *Mesh) Listed(id identity.ClusterID) bool {
	m.mu.Lock()
	settled := m.seen
	for name := range m.doubts {
		settled = settled && m.remotes[name] != nil
	}
	m.mu.Unlock()
	if id == m.cfg.ClusterID && id != 0 {
		return m.own == nil || m.own.standing().listed
	}
	for _, r := range m.all() {
		s := r.standing()
		switch {
		case s.gone:
		case id == 0:
			settled = settled && s.listed
		case s.holds == id:
			return s.listed
		case s.holds == 0 && s.claims == 0:
			settled = false
		}
	}
	return settled
}

// ServicesListed reports whether the services of all clusters, our own included, have been in the table at least once since the
// start, so that what it lacks is known to be gone. A cluster whose data has outlived Config.CacheTTL has none.
func (m *Mesh) ServicesListed() bool {
	m.mu.Lock()
	settled := m.seen
	for name := range m.doubts {
		settled = settled && m.remotes[name] != nil
	}
	m.mu.Unlock()
	for _, r := range m.all() {
		s := r.standing()
		settled = settled && (s.served || s.withdrawn)
	}
	return settled
}

// Status returns the state of every cluster, and of every file that should be one's config and cannot, sorted by name.
func (m *Mesh) Status() []RemoteStatus {
	var all []RemoteStatus
	for _, r := range m.all() {
		all = append(all, r.status())
	}
	m.mu.Lock()
	for _, bad := range []map[string]error{m.doubts, m.invalid} {
		for name, err := range bad {
			if m.remotes[name] == nil {
				all = append(all, badFile(m.cfg.Dir, name, err, m.badAt[name]))
			}
		}
	}
	m.mu.Unlock()
	slices.SortFunc(all, func(a, b RemoteStatus) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// Directory returns the state of the directory of configs.
func (m *Mesh) Directory() DirStatus {
	if m.dir == nil {
		return DirStatus{}
	}
	m.dir.mu.Lock()
	defer m.dir.mu.Unlock()
	return m.dir.status
}
