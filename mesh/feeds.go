// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"

	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

// feeds are all that is followed of one cluster, under one id.
type feeds struct {
	id     identity.ClusterID
	cached bool  // the layout: data stands under cilium/cache
	gate   *gate // nil for our own cluster

	nodes, services, ips, identities *feed

	sliced bool    // services come in slices
	former []*feed // of the services in their other form
}

// inDrainOrder lists the feeds such that no address outlives the node behind which it is, nor an identity its addresses.
func (fs *feeds) inDrainOrder() []*feed {
	return []*feed{fs.nodes, fs.services, fs.ips, fs.identities}
}

// newFeeds returns the feeds of r's cluster, which has the id given.
func (r *remote) newFeeds(id identity.ClusterID, cached bool) *feeds {
	cfg := &r.mesh.cfg
	source, local := ipcache.ClusterMesh, ""
	if r.own {
		source, local = ipcache.KVStore, cfg.NodeName
	}
	fs := &feeds{id: id, cached: cached}
	var judges *judge
	if !r.own {
		fs.gate = r.mesh.newGate(r.name, id)
		judges = &judge{gate: fs.gate}
	}
	prefixes := layout(r.name, cached)
	feed := func(kind string, p prefix, d decoder) *feed { return r.newFeed(fs, kind, p, d) }
	fs.nodes = feed("node", prefixes.nodes, &nodes{
		table: cfg.Nodes, ips: cfg.IPs, layout: cfg.Layout, cluster: id, name: r.name, local: local, remote: !r.own,
		source: source, dualStack: cfg.DualStack, underlay6: cfg.Underlay6, prefer: cfg.Preferences.Of(r.name),
		ground: r.mesh.ground, gate: fs.gate, known: make(map[string]knownNode),
	})
	fs.nodes.flushed = func() { fs.ips.arrived() }
	fs.services = feed("service", prefixes.services, r.newServices(fs, nil))
	fs.ips = feed("ip", prefixes.ips, &ips{
		table: cfg.IPs, layout: cfg.Layout, owner: ipcache.Owner{Cluster: id, Source: source, Object: ipOwnerObject},
		judge: judges, held: newHeld(),
	})
	fs.identities = feed("identity", prefixes.identities, &identities{
		table: cfg.Identities, layout: cfg.Layout, cluster: id, name: r.name,
	})
	return fs
}

func (r *remote) newFeed(fs *feeds, kind string, p prefix, d decoder) *feed {
	f := newFeed(kind, p, d, r.rejects, r.mesh.cfg.KeepInvalid, r.synced)
	f.seen = &r.seen
	f.gate = fs.gate
	if !r.own {
		f.crowd = r.mesh.crowd
	}
	return f
}

func (r *remote) newServices(fs *feeds, slices *service.SliceReader) *services {
	return &services{
		table: r.mesh.cfg.Services, slices: slices, cluster: fs.id, name: r.name, gate: fs.gate, known: make(map[string]*knownService),
	}
}

// turn returns feeds that follow the services in the other form. What has come in the form of before goes when all has come in
// the new one. Not while the feeds are run.
func (r *remote) turn(of *feeds, sliced bool) *feeds {
	fs := *of
	p, reader := layout(r.name, fs.cached).services, (*service.SliceReader)(nil)
	if fs.sliced = sliced; sliced {
		p, reader = layout(r.name, fs.cached).slices, r.mesh.slices
	}
	fs.former = []*feed{of.services}
	for _, f := range of.former {
		if f.standing().inUse > 0 {
			fs.former = append(fs.former, f)
		}
	}
	fs.services = r.newFeed(&fs, "service", p, r.newServices(&fs, reader))
	fs.services.synced = func() {
		fs.dropFormer(r.stop)
		r.synced()
	}
	return &fs
}

// dropFormer deletes what has come in a form that is not followed any more, and reports whether it has.
func (fs *feeds) dropFormer(stop <-chan struct{}) bool {
	for _, f := range fs.former {
		if !f.drain(stop) {
			return false
		}
	}
	return true
}

// prefix is where the objects of one kind are.
type prefix struct {
	canary string // as the cluster names it when it says that the kind is complete
	keys   string // what the keys begin with
}

type prefixes struct{ nodes, services, slices, ips, identities prefix }

// layout says where the data of a cluster is: in its own tree, or in a copy.
func layout(cluster string, cached bool) prefixes {
	in := func(state, dir, copied string) prefix {
		if cached {
			p := identity.CachePrefix(state)
			return prefix{canary: p, keys: p + "/" + copied + "/"}
		}
		return prefix{canary: state, keys: state + "/" + dir + "/"}
	}
	return prefixes{
		nodes:      in(node.StatePrefix, cluster, cluster),
		services:   in(service.StatePrefix, cluster, cluster),
		slices:     in(service.SlicePrefix, cluster, cluster),
		ips:        in(ipcache.StatePrefix, ipcache.DefaultSpace, cluster),
		identities: in(identity.StatePrefix, "id", cluster+"/id"),
	}
}

// move makes the feeds follow the other layout.
func (fs *feeds) move(cluster string, cached bool) {
	p := layout(cluster, cached)
	fs.nodes.move(p.nodes)
	if fs.sliced {
		fs.services.move(p.slices)
	} else {
		fs.services.move(p.services)
	}
	fs.ips.move(p.ips)
	fs.identities.move(p.identities)
	fs.cached = cached
}

// followed is what feeds are run over.
type followed struct {
	client   *kvstore.Client
	cluster  string
	canaries bool
}

// follow runs the feeds over one connection, as tasks that end with ctx or when they cannot go on. With canaries, each kind
// waits until the cluster says that it is complete: before that, a missing key may only not have been written yet.
func (fs *feeds) follow(ctx context.Context, tasks *errgroup.Group, of followed) {
	complete := make(map[string]chan struct{})
	for _, f := range fs.inDrainOrder() {
		start := make(chan struct{})
		complete[f.prefix.canary] = start
		if !of.canaries {
			close(start)
		}
		tasks.Go(func() error { return f.run(ctx, of.client, start) })
	}
	if of.canaries {
		waiting, arrived := context.WithCancel(ctx)
		watcher := kvstore.NewWatcher(identity.SyncedPrefix+"/"+of.cluster+"/", func(events []kvstore.Event) {
			for _, e := range events {
				start, waiting := complete[string(e.Key)]
				if waiting && (e.Kind == kvstore.Created || e.Kind == kvstore.Modified) {
					close(start)
					delete(complete, string(e.Key))
				}
			}
			if len(complete) == 0 {
				arrived() // what they say next is for readers that have not listed yet
			}
		})
		tasks.Go(func() error {
			defer arrived()
			return watcher.Run(waiting, of.client)
		})
	}
}

// drain deletes all that has been brought, and reports whether it has; when stop is closed, the rest stays.
func (fs *feeds) drain(stop <-chan struct{}) bool {
	if !fs.dropFormer(stop) {
		return false
	}
	for _, f := range fs.inDrainOrder() {
		if !f.drain(stop) {
			return false
		}
	}
	return true
}

// disconnected says that none of the feeds is followed any more.
func (fs *feeds) disconnected() {
	for _, f := range fs.inDrainOrder() {
		f.disconnected()
	}
}
