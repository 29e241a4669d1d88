// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
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
	// errStopped indicates that the agent stops in the middle of a drain.
	errStopped = errors.New("stopped while draining")
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
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	tasks, ctx := errgroup.WithContext(ctx)
	news := make(chan struct{}, 1)
	if !r.own {
		watcher := kvstore.NewKeyWatcher(r.configKey(), func([]kvstore.Event) {
			select {
			case news <- struct{}{}:
			default:
			}
		})
		tasks.Go(func() error { return watcher.Run(ctx, client) })
	}
	joined, err = r.live(ctx, client, news)
	cancel()
	// Where the watcher has failed, that is why the rest has ended.
	return joined, cmp.Or(tasks.Wait(), err)
}

// live joins the cluster and follows it, again and again if its config changes, until something else ends that. It returns an
// error always. news says that it is time to look at the cluster-config.
func (r *remote) live(ctx context.Context, client *kvstore.Client, news <-chan struct{}) (joined bool, err error) {
	for {
		if err := r.join(ctx, client, news); err != nil {
			return joined, err
		}
		joined = true
		r.joined()
		err := r.follow(ctx, client, news)
		r.feeds.disconnected()
		if err == nil {
			err = ctx.Err()
		}
		if !errors.Is(err, errReconfigured) {
			return joined, err
		}
		r.log.Info("cluster-config of remote cluster has changed, taking it up again")
	}
}

// join tries until the cluster's config is accepted and the cluster holds its id. It returns an error when ctx has ended,
// or etcd has not answered for so long that another connection is worth a try.
func (r *remote) join(ctx context.Context, client *kvstore.Client, news <-chan struct{}) error {
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
		case <-news:
		case <-freed:
		case <-ctx.Done():
		}
		wait.Stop()
	}
}

// configKey is where the cluster says of itself how it is read.
func (r *remote) configKey() string { return identity.ClusterConfigPrefix + "/" + r.name }

// clusterConfig fetches and checks what the cluster says of itself.
func (r *remote) clusterConfig(ctx context.Context, client *kvstore.Client) (identity.ClusterConfig, error) {
	if r.own {
		return identity.ClusterConfig{ID: uint32(r.mesh.cfg.ClusterID)}, nil
	}
	key := r.configKey()
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
		return kvstore.KV{}, false, fmt.Errorf("%w: %w", errNoAnswer, err)
	}
	return kv, ok, nil
}

// follow keeps the tables up to date until ctx ends, the cluster's config is not what it was, or the connection is of no
// more use. Our own etcd has neither cluster-config nor heartbeat here: the absence of its operator is not the agent's affair.
func (r *remote) follow(ctx context.Context, client *kvstore.Client, news <-chan struct{}) error {
	tasks, ctx := errgroup.WithContext(ctx)
	r.feeds.follow(ctx, tasks, followed{client, r.name, r.config.Capabilities.SyncedCanaries})
	tasks.Go(func() error { return r.attend(ctx, client) })
	if !r.own {
		tasks.Go(func() error { return r.watchConfig(ctx, client, news) })
		tasks.Go(func() error { return client.FollowHeartbeat(ctx) })
	}
	return tasks.Wait()
}

// watchConfig looks at the cluster-config whenever there are news of it. It ends with errReconfigured when the cluster is to
// be taken up in another way.
func (r *remote) watchConfig(ctx context.Context, client *kvstore.Client, news <-chan struct{}) error {
	for failures := 0; ; {
		select {
		case <-news:
		case <-ctx.Done():
			return nil
		}
		err := r.checkConfig(ctx, client)
		for ; errors.Is(err, errNoAnswer) && !errors.Is(err, kvstore.ErrHistoryChanged) && sleep(ctx, r.mesh.timing.pause(failures)); failures++ {
			err = r.checkConfig(ctx, client)
		}
		if ctx.Err() != nil {
			return nil
		}
		failures = 0
		if errors.Is(err, errReconfigured) || errors.Is(err, kvstore.ErrHistoryChanged) {
			return err
		}
		r.published(err)
	}
}

// checkConfig asks etcd for the cluster-config. A missing one is an error, but no reason to give up what is being
// followed: it is written under a lease, which its writer may lose for a while.
func (r *remote) checkConfig(ctx context.Context, client *kvstore.Client) error {
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

// attend does what is due from time to time while a cluster is followed. It ends with errNoAnswer when etcd has said nothing
// for so long that another connection is worth a try: watchers that do not get on say so in the status, and try again
// over the connection that there is.
func (r *remote) attend(ctx context.Context, client *kvstore.Client) error {
	t := r.mesh.timing
	answered := time.Now()
	for sleep(ctx, t.probe/2+rand.N(t.probe)) {
		now := time.Now()
		if contact := client.Status().LastContact; contact.After(answered) {
			answered = contact
		}
		if now.Sub(answered) > t.silence {
			// One answer may take long over a slow line. A small question tells.
			if _, _, err := r.get(ctx, client, identity.HeartbeatKey); err != nil && ctx.Err() == nil {
				return err
			}
			answered = time.Now()
		}
		for _, f := range r.feeds.inDrainOrder() {
			f.expire(now)
		}
		r.look()
	}
	return nil
}

// readsAlike reports whether clusters with these configs are read in the same way.
func readsAlike(a, b identity.ClusterConfig) bool {
	return a.ID == b.ID && a.Capabilities.Cached == b.Capabilities.Cached &&
		a.Capabilities.SyncedCanaries == b.Capabilities.SyncedCanaries &&
		a.Capabilities.EndpointSlicesExportMode == b.Capabilities.EndpointSlicesExportMode
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
