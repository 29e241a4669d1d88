// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// ClusterConfigConfig says what a [ClusterConfig] asserts.
type ClusterConfigConfig struct {
	ClusterName string
	Config      identity.ClusterConfig
	// Canaries are prefixes that others write, each node its part, and that are declared complete here. In an etcd where one
	// never was, as after it was emptied, CanaryDelay passes before: the time in which those who are alive have written
	// again what they had there.
	Canaries    []string
	CanaryDelay time.Duration
}

// ClusterConfig keeps the cluster's description of itself in etcd, whoever changes or deletes it, and declares complete what
// no single writer can.
type ClusterConfig struct {
	Record
	cfg   ClusterConfigConfig
	key   string
	value []byte

	mu     sync.Mutex
	writer *kvstore.Writer // of the present term; guarded by mu
}

var _ Duty = (*ClusterConfig)(nil)

// NewClusterConfig returns the duty.
func NewClusterConfig(cfg ClusterConfigConfig) (*ClusterConfig, error) {
	if cfg.ClusterName == "" || cfg.Config.ID == 0 {
		return nil, errors.New("operator: a cluster's config needs the cluster's name and number")
	}
	value, err := json.Marshal(cfg.Config)
	if err != nil {
		return nil, fmt.Errorf("operator: cluster config: %w", err)
	}
	return &ClusterConfig{cfg: cfg, key: identity.ClusterConfigPrefix + "/" + cfg.ClusterName, value: value}, nil
}

func (c *ClusterConfig) String() string { return "cluster-config" }

// Status tells what is kept.
func (c *ClusterConfig) Status() DutyStatus {
	s := c.Record.Status()
	s.Name = c.String()
	c.mu.Lock()
	w := c.writer
	c.mu.Unlock()
	if w != nil {
		status := w.Status()
		s.Keys, s.Pending = status.Keys, status.Pending
		s.Ready = s.Running && status.Pending == 0
		for _, err := range status.Errors {
			s.Problems = append(s.Problems, err.Error())
		}
	}
	return s
}

func (c *ClusterConfig) setWriter(w *kvstore.Writer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writer = w
}

// Run keeps the keys until the term ends.
func (c *ClusterConfig) Run(ctx context.Context, t *Term) error {
	defer c.Running()()
	w := t.Writer(c.String())
	c.setWriter(w)
	defer c.setWriter(nil)
	w.Set(c.key, c.value)
	watcher := kvstore.NewKeyWatcher(c.key, func(events []kvstore.Event) {
		for _, e := range events {
			if e.Kind != kvstore.Synced {
				w.Observe(c.key, e.Value, e.Kind != kvstore.Deleted)
			}
		}
	})
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return w.Run(ctx) })
	group.Go(func() error { return watcher.Run(ctx, t.client) })
	group.Go(func() error { return quiet(ctx, c.declare(ctx, t, w)) })
	return group.Wait()
}

// declare writes the canaries: at once those that were there, as a former leader wrote them, and the others later.
func (c *ClusterConfig) declare(ctx context.Context, t *Term, w *kvstore.Writer) error {
	begun := time.Now()
	var later []string
	for _, prefix := range c.cfg.Canaries {
		key := canaryKey(c.cfg.ClusterName, prefix)
		_, there, err := t.client.Get(ctx, key)
		switch {
		case err != nil:
			return err
		case there:
			w.Canary(key, canaryValue)
		default:
			later = append(later, key)
		}
	}
	c.Round(begun, Outcome{Detail: fmt.Sprintf("%d prefixes were complete already", len(c.cfg.Canaries)-len(later))}, nil)
	if len(later) == 0 || !sleep(ctx, c.cfg.CanaryDelay) {
		return nil
	}
	for _, key := range later {
		w.Canary(key, canaryValue)
	}
	c.Round(time.Now(), Outcome{Detail: fmt.Sprintf("%d prefixes declared complete", len(later))}, nil)
	return nil
}
