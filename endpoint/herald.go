// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// How long a [Herald] waits, unless its configuration says otherwise.
const (
	// defaultSettle is for an etcd that is new to this agent: other nodes may be about to write what they have.
	defaultSettle = 10 * time.Second
	// defaultRefill is for an etcd that was emptied: all nodes have to notice, some after a long back-off.
	defaultRefill = 2 * time.Minute
	// heraldJitter spreads those who see at the same moment that something is missing, so that most find it there.
	heraldJitter = time.Second
	heraldFlush  = 30 * time.Second
)

// HeraldConfig is what a [Herald] works with.
type HeraldConfig struct {
	Client      *kvstore.Client
	ClusterName string
	// Config describes the cluster.
	Config identity.ClusterConfig
	// Prefixes are declared complete.
	Prefixes []string
	// TTL of the lease of what is written; 0: 15 min.
	TTL time.Duration
	// Settle and Refill are how long prefixes stay undeclared in an etcd that had none declared when it was first seen, and
	// in one that was emptied; 0: 10 s and 2 min.
	Settle, Refill time.Duration
	// Published is closed once all that this node has to say was handed to its writer.
	Published <-chan struct{}
	// Flush waits until etcd has it.
	Flush func(context.Context) error
	Log   *slog.Logger
}

// Herald writes what is said once for a whole cluster, where no operator does: the cluster's config, and which prefixes are
// complete. Every node has one, and the first to see that a key is missing writes it, under a lease. A key that is there is
// left alone, whoever wrote it; and nothing is written in a cluster with a heartbeat, which is an operator's.
type Herald struct {
	cfg    HeraldConfig
	config string // its key
	ready  chan struct{}
	wake   chan struct{}

	mu        sync.Mutex
	unlisted  int             // of the three watches
	described []byte          // the cluster's config in etcd; nil: none
	heartbeat bool            // somebody writes one
	declared  map[string]bool // prefixes
	published bool            // this node has said what it has to say
	quietTill time.Time       // nothing is declared before; zero: not known yet
}

// NewHerald assembles a herald; nothing happens before Run.
func NewHerald(cfg HeraldConfig) (*Herald, error) {
	if cfg.Client == nil || cfg.ClusterName == "" || cfg.Config.ID == 0 || cfg.Published == nil || cfg.Flush == nil || cfg.Log == nil {
		return nil, errors.New("endpoint: a herald needs Client, ClusterName, Config, Published, Flush and Log")
	}
	if cfg.Settle == 0 {
		cfg.Settle = defaultSettle
	}
	if cfg.Refill == 0 {
		cfg.Refill = defaultRefill
	}
	return &Herald{
		cfg: cfg, config: identity.ClusterConfigPrefix + "/" + cfg.ClusterName, ready: make(chan struct{}), wake: make(chan struct{}, 1),
		unlisted: 3, declared: make(map[string]bool),
	}, nil
}

func (h *Herald) String() string { return "cluster description" }

// Ready is closed once it is known what others have written.
func (h *Herald) Ready() <-chan struct{} { return h.ready }

// Run writes what is missing until ctx ends. What it has written then stays for as long as its lease.
func (h *Herald) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, w := range []*kvstore.Watcher{
		kvstore.NewKeyWatcher(h.config, h.see(func(_ string, value []byte, _ bool) { h.described = slices.Clone(value) })),
		kvstore.NewKeyWatcher(identity.HeartbeatKey, h.see(func(_ string, _ []byte, exists bool) { h.heartbeat = exists })),
		kvstore.NewWatcher(h.canary(""), h.see(func(prefix string, _ []byte, exists bool) { h.declared[prefix] = exists })),
	} {
		group.Go(func() error { return h.follow(ctx, w) })
	}
	group.Go(func() error { return h.awaitPublished(ctx) })
	group.Go(func() error { return h.write(ctx) })
	return group.Wait()
}

// canary is the key that declares a prefix complete.
func (h *Herald) canary(prefix string) string {
	return identity.SyncedPrefix + "/" + h.cfg.ClusterName + "/" + prefix
}

// follow runs a watcher, also into an etcd that takes the place of the first.
func (h *Herald) follow(ctx context.Context, w *kvstore.Watcher) error {
	for {
		err := w.Run(ctx, h.cfg.Client)
		if !errors.Is(err, kvstore.ErrHistoryChanged) {
			return err
		}
		h.mu.Lock()
		h.quietTill = time.Now().Add(h.cfg.Refill)
		h.mu.Unlock()
		if !pause(ctx, retryLook) {
			return nil
		}
	}
}

// see returns what takes the events of a watch. note is called with mu held.
func (h *Herald) see(note func(key string, value []byte, exists bool)) func([]kvstore.Event) {
	listed := false
	return func(events []kvstore.Event) {
		h.mu.Lock()
		defer h.mu.Unlock()
		for _, e := range events {
			if e.Kind != kvstore.Synced {
				note(string(e.Key), e.Value, e.Kind != kvstore.Deleted)
				continue
			}
			if !listed {
				listed = true
				h.unlisted--
			}
			if h.unlisted == 0 && h.quietTill.IsZero() {
				h.quietTill = time.Now().Add(h.cfg.Settle)
				close(h.ready)
			}
		}
		poke(h.wake)
	}
}

// missing returns the keys that are to be written now, and when to look again without being woken; zero: not.
func (h *Herald) missing(now time.Time) (keys []string, again time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.unlisted > 0 || h.heartbeat {
		return nil, time.Time{}
	}
	if h.described == nil {
		return []string{h.config}, time.Time{}
	}
	config, err := identity.ParseClusterConfig(h.described)
	if err != nil || !config.Capabilities.SyncedCanaries || config.Capabilities.Cached {
		return nil, time.Time{} // who reads the cluster does not look for them
	}
	for _, prefix := range h.cfg.Prefixes {
		if !h.declared[prefix] {
			keys = append(keys, h.canary(prefix))
		}
	}
	switch {
	case len(keys) == 0 || !h.published:
		return nil, time.Time{}
	case now.Before(h.quietTill):
		return nil, h.quietTill
	}
	return keys, time.Time{}
}

// awaitPublished notes when this node has said what it has to say.
func (h *Herald) awaitPublished(ctx context.Context) error {
	select {
	case <-ctx.Done():
	case <-h.cfg.Published:
		h.mu.Lock()
		h.published = true
		h.mu.Unlock()
		poke(h.wake)
	}
	return nil
}

// write writes what is missing.
func (h *Herald) write(ctx context.Context) error {
	var (
		session *kvstore.Session
		failed  string
	)
	defer func() {
		if session != nil {
			session.Orphan()
		}
	}()
	for {
		keys, again := h.missing(time.Now())
		var err error
		if len(keys) > 0 && pause(ctx, rand.N(heraldJitter)) {
			if keys, _ = h.missing(time.Now()); len(keys) > 0 {
				err = h.put(ctx, &session, keys)
			}
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, kvstore.ErrClosed):
			return err
		case err != nil:
			if failed != err.Error() {
				failed = err.Error()
				h.cfg.Log.Warn("what is said of the cluster as a whole cannot be written yet", "err", err)
			}
			again = time.Now().Add(retryAfter)
		}
		if !h.rest(ctx, again) {
			return nil
		}
	}
}

// rest waits until something has changed, or it is time to look again, and reports whether ctx still lives.
func (h *Herald) rest(ctx context.Context, again time.Time) bool {
	var timer <-chan time.Time
	if !again.IsZero() {
		timer = time.After(time.Until(again))
	}
	select {
	case <-ctx.Done():
		return false
	case <-h.wake:
	case <-timer:
	}
	return true
}

// put writes the keys that do not exist, under a lease that it opens if there is none, or none any more. Canaries come after
// all that this node has said.
func (h *Herald) put(ctx context.Context, session **kvstore.Session, keys []string) error {
	if keys[0] != h.config {
		ctx, cancel := context.WithTimeout(ctx, heraldFlush)
		defer cancel()
		if err := h.cfg.Flush(ctx); err != nil {
			return fmt.Errorf("what this node has to say is not in etcd: %w", err)
		}
	}
	if *session == nil || (*session).Err() != nil {
		s, err := h.cfg.Client.OpenSession(ctx, h.cfg.TTL)
		if err != nil {
			return err
		}
		*session = s
	}
	for _, key := range keys {
		value := []byte(time.Now().Format(time.RFC3339))
		if key == h.config {
			var err error
			if value, err = json.Marshal(h.cfg.Config); err != nil {
				return err
			}
		}
		created, err := (*session).Create(ctx, key, value)
		if err != nil {
			return err
		}
		if created {
			h.cfg.Log.Info("the cluster has no operator that says so: this node does", "key", key, "value", string(value))
		}
	}
	return nil
}
