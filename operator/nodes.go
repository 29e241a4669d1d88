// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/source"
)

// nodeSource marks, in a node's value, what an operator wrote. Readers pay no heed to it.
const nodeSource = "k8s"

// NodesConfig says what a [Nodes] publishes.
type NodesConfig struct {
	ClusterName string
	ClusterID   uint32
	Source      source.NodeSource
}

// Nodes publishes nodes that have no agent which does. A key that an agent wrote is the agent's: it is neither written nor
// deleted here, and so never comes under the operator's lease, which would outlive the agent's.
type Nodes struct {
	Record
	cfg NodesConfig
}

var _ Duty = (*Nodes)(nil)

// NewNodes returns the duty.
func NewNodes(cfg NodesConfig) (*Nodes, error) {
	if cfg.ClusterName == "" || cfg.ClusterID == 0 || cfg.Source == nil {
		return nil, errors.New("operator: nodes are published by a cluster with a name and a number")
	}
	return &Nodes{cfg: cfg}, nil
}

func (n *Nodes) String() string { return "nodes" }

// Status tells what is published.
func (n *Nodes) Status() DutyStatus {
	s := n.Record.Status()
	s.Name = n.String()
	if s.Running && !closed(n.cfg.Source.Ready()) {
		s.Detail = "waits for " + n.cfg.Source.String() + "; what was published before stays"
	}
	return s
}

// value is what is published of a node.
func (c NodesConfig) value(n node.Node) ([]byte, error) {
	n.Cluster, n.ClusterID, n.Source = c.ClusterName, c.ClusterID, nodeSource
	return n.Marshal()
}

// nodesTerm is one term's work.
type nodesTerm struct {
	cfg    NodesConfig
	t      *Term
	prefix string
	listed chan struct{} // closed when all that was there at first is known
	news   chan struct{} // of capacity 1: something in etcd has changed

	mu    sync.Mutex
	there map[string]nodeKey // in etcd, by node; guarded by mu

	session *kvstore.Session  // whose lease the keys have; only reconcile touches it, and put
	put     map[string]string // what was put under that lease, by node
}

// nodeKey is a node's key in etcd.
type nodeKey struct {
	revision int64
	value    string
	ours     bool // an operator wrote it
}

// Run publishes until the term ends.
func (n *Nodes) Run(ctx context.Context, t *Term) error {
	defer n.Running()()
	term := &nodesTerm{
		cfg: n.cfg, t: t, prefix: node.StatePrefix + "/" + n.cfg.ClusterName + "/", listed: make(chan struct{}), news: make(chan struct{}, 1),
		there: make(map[string]nodeKey), put: make(map[string]string),
	}
	watcher := kvstore.NewWatcher(term.prefix, term.deliver)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return watcher.Run(ctx, t.client) })
	group.Go(func() error { return quiet(ctx, n.follow(ctx, term)) })
	return group.Wait()
}

func (n *Nodes) follow(ctx context.Context, term *nodesTerm) error {
	defer term.end()
	for _, ready := range []<-chan struct{}{n.cfg.Source.Ready(), term.listed} {
		select {
		case <-ctx.Done():
			return nil
		case <-ready:
		}
	}
	for {
		changed := n.cfg.Source.Nodes().Changed()
		begun := time.Now()
		did, keys, err := term.reconcile(ctx)
		if ctx.Err() != nil {
			return nil
		}
		n.Round(begun, did, err)
		n.edit(func(s *DutyStatus) { s.Keys = keys })
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-term.news:
		case <-term.session.Done():
			term.end()
		}
	}
}

// end leaves the keys to the next term, or to a new session.
func (n *nodesTerm) end() {
	if n.session != nil {
		n.session.Orphan()
		n.session = nil
	}
	clear(n.put)
}

// deliver takes what the watcher sees.
func (n *nodesTerm) deliver(events []kvstore.Event) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, e := range events {
		switch e.Kind {
		case kvstore.Synced:
			if !closed(n.listed) {
				close(n.listed)
			}
		case kvstore.Deleted:
			delete(n.there, string(e.Key))
		default:
			n.there[string(e.Key)] = nodeKey{e.Revision, string(e.Value), isOperators(e.Value)}
		}
	}
	select {
	case n.news <- struct{}{}:
	default:
	}
}

// reconcile writes what is missing or differs, and deletes what an operator wrote of nodes that are gone. keys is how many
// it keeps.
func (n *nodesTerm) reconcile(ctx context.Context) (did Outcome, keys int, err error) {
	if n.session == nil {
		if n.session, err = n.t.client.OpenSession(ctx, n.t.ttl); err != nil {
			return did, 0, fmt.Errorf("nodes: %w", err)
		}
	}
	all, _ := n.cfg.Source.Nodes().Snapshot()
	n.mu.Lock()
	there := make(map[string]nodeKey, len(n.there))
	var strays []kvstore.KV
	for name, key := range n.there {
		there[name] = key
		if key.ours && !slices.ContainsFunc(all, func(m node.Node) bool { return m.Name == name }) {
			strays = append(strays, kvstore.KV{Key: n.prefix + name, Revision: key.revision})
		}
	}
	n.mu.Unlock()
	agents := 0
	for _, m := range all {
		switch ours, err := n.publish(ctx, m, there[m.Name]); {
		case err != nil:
			return did, keys, err
		case ours:
			keys++
		default:
			agents++
		}
	}
	slices.SortFunc(strays, func(a, b kvstore.KV) int { return strings.Compare(a.Key, b.Key) })
	did.Deleted, err = n.t.Delete(ctx, strays...)
	for _, kv := range strays {
		delete(n.put, strings.TrimPrefix(kv.Key, n.prefix))
	}
	did.Detail = fmt.Sprintf("%d nodes published here, %d by their agents", keys, agents)
	return did, keys, err
}

// publish writes a node unless etcd has it so already, or it is an agent's; ours is false then.
func (n *nodesTerm) publish(ctx context.Context, m node.Node, there nodeKey) (ours bool, err error) {
	if there.revision != 0 && !there.ours {
		delete(n.put, m.Name)
		return false, nil
	}
	value, err := n.cfg.value(m)
	if err != nil {
		return false, err
	}
	if n.put[m.Name] == string(value) && there.value == string(value) {
		return true, nil
	}
	key := n.prefix + m.Name
	err = n.t.Txn(ctx,
		kvstore.Op{Kind: kvstore.OpUnchanged, Key: key, Revision: there.revision},
		kvstore.Op{Kind: kvstore.OpPut, Key: key, Value: value, Lease: n.session.Lease()})
	switch {
	case errors.Is(err, kvstore.ErrExists): // it has changed meanwhile: the watch will tell
		return true, nil
	case err != nil:
		return false, err
	}
	n.put[m.Name] = string(value)
	return true, nil
}
