// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

var (
	// errNoAnswer indicates an etcd that cannot be reached, or does not do what it is asked.
	errNoAnswer = errors.New("no answer from etcd")
	// errNoClusterConfig indicates an etcd without a cluster-config for the cluster.
	errNoClusterConfig = errors.New("cluster-config is missing")
	// errOwnID indicates a cluster that uses our id.
	errOwnID = errors.New("cluster id is our own")
	// errReconfigured indicates that a cluster's cluster-config is not what it was.
	errReconfigured = errors.New("cluster-config has changed")
)

// connect makes one connection and follows the cluster over it, until ctx ends or the connection is of no more use. It
// reports whether the cluster has been joined.
func (r *remote) connect(ctx context.Context, config kvstore.Config) (joined bool, err error) {
	r.connecting()
	client, err := kvstore.Dial(config, r.log)
	if err != nil {
		return false, fmt.Errorf("connect to etcd: %w", err)
	}
	defer client.Close()
	r.use(client)
	defer r.use(nil)
	for {
		if err := r.join(ctx, client); err != nil {
			return joined, err
		}
		joined = true
		r.joined()
		err := r.follow(ctx, client)
		r.feeds.disconnected()
		if !errors.Is(err, errReconfigured) {
			return joined, err
		}
		r.log.Info("cluster-config of remote cluster has changed, taking it up again")
	}
}

// join tries until the cluster's config is accepted and the cluster holds its id. It returns an error when ctx has ended,
// or etcd has not answered for so long that another connection is worth a try.
func (r *remote) join(ctx context.Context, client *kvstore.Client) error {
	answered := time.Now()
	for failures := 1; ; failures++ {
		freed := r.mesh.ids.changed()
		config, err := r.clusterConfig(ctx, client)
		if err == nil {
			err = r.hold(config)
		}
		if err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		if !errors.Is(err, errNoAnswer) {
			answered = time.Now()
		}
		if errors.Is(err, kvstore.ErrHistoryChanged) || time.Since(answered) > r.mesh.timing.silence {
			return err
		}
		r.failed(err)
		if !errors.Is(err, errConflict) {
			freed = nil
		}
		wait := time.NewTimer(r.mesh.timing.pause(failures))
		select {
		case <-wait.C:
		case <-freed:
		case <-ctx.Done():
		}
		wait.Stop()
	}
}

// clusterConfig fetches and checks what the cluster says of itself.
func (r *remote) clusterConfig(ctx context.Context, client *kvstore.Client) (identity.ClusterConfig, error) {
	if r.own {
		return identity.ClusterConfig{ID: uint32(r.mesh.cfg.ClusterID)}, nil
	}
	key := identity.ClusterConfigPrefix + "/" + r.name
	kv, ok, err := r.get(ctx, client, key)
	if err != nil {
		return identity.ClusterConfig{}, err
	}
	if !ok {
		return identity.ClusterConfig{}, fmt.Errorf(
			"%w: etcd has no key %q; is it the etcd of cluster %s, and does that publish itself?", errNoClusterConfig, key, r.name)
	}
	config, err := identity.ParseClusterConfig(kv.Value)
	if err == nil {
		err = config.Validate(r.mesh.cfg.Layout)
	}
	if err == nil && config.ID == uint32(r.mesh.cfg.ClusterID) {
		err = fmt.Errorf("%w, %d; give one of the two clusters another id", errOwnID, config.ID)
	}
	if err != nil {
		return identity.ClusterConfig{}, fmt.Errorf("etcd key %q: %w", key, err)
	}
	return config, nil
}

func (r *remote) get(ctx context.Context, client *kvstore.Client, key string) (kvstore.KV, bool, error) {
	ctx, cancel := context.WithTimeout(ctx, r.mesh.timing.request)
	defer cancel()
	kv, ok, err := client.Get(ctx, key)
	if err != nil {
		return kvstore.KV{}, false, fmt.Errorf("%w: get %s: %w", errNoAnswer, key, err)
	}
	return kv, ok, nil
}

// follow keeps the tables up to date until ctx ends, the cluster's config is not what it was, or the connection is of no
// more use.
func (r *remote) follow(ctx context.Context, client *kvstore.Client) error {
	tasks, ctx := errgroup.WithContext(ctx)
	tasks.Go(func() error { return r.feeds.follow(ctx, client, r.name, r.config.Capabilities.SyncedCanaries) })
	tasks.Go(func() error { return r.watchConfig(ctx, client) })
	return tasks.Wait()
}

// watchConfig looks at the cluster-config now and then, which also shows whether etcd still answers. It ends with
// errReconfigured, or errNoAnswer after a long silence.
//
// It asks rather than watches because the one key is all that a remote is allowed to read of the prefix.
func (r *remote) watchConfig(ctx context.Context, client *kvstore.Client) error {
	t := r.mesh.timing
	answered := time.Now()
	for sleep(ctx, t.probe/2+rand.N(t.probe)) {
		err := r.checkConfig(ctx, client)
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, errReconfigured) || errors.Is(err, kvstore.ErrHistoryChanged) {
			return err
		}
		now := time.Now()
		if !errors.Is(err, errNoAnswer) {
			answered = now
		}
		r.probed(err)
		if now.Sub(answered) > t.silence {
			return err
		}
		for _, f := range r.feeds.inDrainOrder() {
			f.expire(now)
		}
	}
	return nil
}

// checkConfig asks etcd for the cluster-config. A missing one is an error, but no reason to give up what is being
// followed: it is written under a lease, which its writer may lose for a while.
func (r *remote) checkConfig(ctx context.Context, client *kvstore.Client) error {
	if r.own {
		_, _, err := r.get(ctx, client, identity.HeartbeatKey)
		return err
	}
	config, err := r.clusterConfig(ctx, client)
	switch {
	case errors.Is(err, errNoAnswer), errors.Is(err, errNoClusterConfig):
		return err
	case err != nil:
		return fmt.Errorf("%w: %w", errReconfigured, err)
	case !readsAlike(r.config, config):
		return errReconfigured
	}
	return nil
}

// readsAlike reports whether clusters with these configs are read in the same way.
func readsAlike(a, b identity.ClusterConfig) bool {
	return a.ID == b.ID && a.Capabilities.Cached == b.Capabilities.Cached &&
		a.Capabilities.SyncedCanaries == b.Capabilities.SyncedCanaries
}

// pause is how long to wait after the nth failure in a row.
func (t timing) pause(failures int) time.Duration {
	bound := min(t.retryMax, t.retryMin<<min(failures, 16))
	return bound/2 + rand.N(bound/2)
}

// sleep waits, and reports whether ctx is still alive.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
