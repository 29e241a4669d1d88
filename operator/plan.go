// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/node"
)

// Planned is what becomes of one key.
type Planned struct {
	Key string
	// Action is create, change, delete or keep.
	Action string
	Value  []byte // that is put; nil for delete
}

// Actions of a [Planned].
const (
	ActionCreate = "create"
	ActionChange = "change"
	ActionDelete = "delete"
	ActionKeep   = "keep" // it is as it should be, leases aside
)

// PlanServices tells what a [Services] would make of the keys that etcd has, by key, once its source, which must be running,
// has been read. It writes nothing.
func PlanServices(ctx context.Context, client *kvstore.Client, cfg ServicesConfig) ([]Planned, error) {
	if err := awaitSource(ctx, cfg.Source.String(), cfg.Source.Ready(), cfg.Source.Problems); err != nil {
		return nil, err
	}
	changes, _, _ := cfg.Source.Changes(0)
	want := make(map[string][]byte)
	for _, c := range changes {
		values, err := cfg.publishable(c.Service)
		if err != nil {
			return nil, fmt.Errorf("service %s: %w", c.Name, err)
		}
		for _, kv := range values {
			want[cfg.prefix()+kv.key] = kv.value
		}
	}
	return plan(ctx, client, cfg.prefix(), want, func(kvstore.KV) bool { return true })
}

// PlanNodes is PlanServices for a [Nodes]. Keys of agents are left out.
func PlanNodes(ctx context.Context, client *kvstore.Client, cfg NodesConfig) ([]Planned, error) {
	if err := awaitSource(ctx, cfg.Source.String(), cfg.Source.Ready(), cfg.Source.Problems); err != nil {
		return nil, err
	}
	prefix := node.StatePrefix + "/" + cfg.ClusterName + "/"
	all, _ := cfg.Source.Nodes().Snapshot()
	want := make(map[string][]byte)
	for _, n := range all {
		value, err := cfg.value(n)
		if err != nil {
			return nil, err
		}
		want[prefix+n.Name] = value
	}
	return plan(ctx, client, prefix, want, func(kv kvstore.KV) bool { return isOperators(kv.Value) })
}

// awaitSource waits until a source has been read. Its error says what keeps it from that.
func awaitSource(ctx context.Context, name string, ready <-chan struct{}, problems func() []string) error {
	select {
	case <-ready:
		return nil
	case <-ctx.Done():
	}
	err := fmt.Errorf("%s: not read yet: %w", name, ctx.Err())
	for _, p := range problems() {
		err = errors.Join(err, errors.New(p))
	}
	return err
}

// plan compares what is wanted with what there is. Keys that are not ours stay out of it, also where they are wanted.
func plan(ctx context.Context, client *kvstore.Client, prefix string, want map[string][]byte, ours func(kvstore.KV) bool) ([]Planned, error) {
	there, _, err := client.List(ctx, prefix)
	if err != nil {
		return nil, err
	}
	var all []Planned
	for _, kv := range there {
		value, wanted := want[kv.Key]
		delete(want, kv.Key)
		switch {
		case !ours(kv):
		case !wanted:
			all = append(all, Planned{Key: kv.Key, Action: ActionDelete})
		case string(value) == string(kv.Value):
			all = append(all, Planned{Key: kv.Key, Action: ActionKeep, Value: value})
		default:
			all = append(all, Planned{Key: kv.Key, Action: ActionChange, Value: value})
		}
	}
	for key, value := range want {
		all = append(all, Planned{Key: key, Action: ActionCreate, Value: value})
	}
	slices.SortFunc(all, func(a, b Planned) int { return strings.Compare(a.Key, b.Key) })
	return all, nil
}

// isOperators reports whether an operator wrote a node.
func isOperators(value []byte) bool {
	n, err := node.Parse(value)
	return err == nil && n.Source == nodeSource
}
