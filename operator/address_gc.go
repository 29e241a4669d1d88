// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/node"
)

// AddressGCConfig says how announced addresses without an owner are collected.
type AddressGCConfig struct {
	ClusterName string
	Interval    time.Duration
	// Objects knows the nodes and pods of Kubernetes. nil: there is no Kubernetes, and only nodes count that publish themselves.
	Objects *Objects
}

// addressGC deletes announced addresses whose node, or whose pod, is gone. What an agent keeps a lease for is never
// touched: it is for the agent to withdraw, and vanishes by itself when the agent has.
type addressGC struct {
	cfg   AddressGCConfig
	term  *Term
	marks orphanMarks
}

// NewAddressGC returns the duty.
func NewAddressGC(cfg AddressGCConfig) *Loop {
	g := &addressGC{cfg: cfg}
	return NewLoop("endpoint-gc", cfg.Interval, g.round)
}

func (g *addressGC) round(ctx context.Context, t *Term) (Outcome, error) {
	if g.term != t {
		g.term, g.marks = t, nil
	}
	census, err := takeAddressCensus(ctx, t.Client(), g.cfg)
	if err != nil {
		return Outcome{}, err
	}
	ripe, next := g.marks.ripe(census.orphans)
	log := t.Log("endpoint-gc")
	keys := make([]kvstore.KV, len(ripe))
	for i, o := range ripe {
		log.Debug("address has no owner any more", "key", o.kv.Key, "why", o.why)
		keys[i] = o.kv
	}
	deleted, err := t.Delete(ctx, keys...)
	if err == nil { // else the next round comes soon, and must not be the second one for what was marked just now
		g.marks = next
	}
	return Outcome{Deleted: deleted, Detail: fmt.Sprintf("%s, %d deleted", census, deleted)}, err
}

// addressCensus is what was found of the addresses of a cluster.
type addressCensus struct {
	all, invalid, kept int
	orphans            []orphan
}

func (c addressCensus) String() string {
	return fmt.Sprintf("%d addresses: %d without their owner, %d more that an agent keeps, %d not understood", c.all, len(c.orphans), c.kept, c.invalid)
}

// takeAddressCensus reads who owns addresses, and then the addresses. One whose owner comes in between looks orphaned; but
// what stays as it is until the next round was written before that round reads the owners.
func takeAddressCensus(ctx context.Context, client *kvstore.Client, cfg AddressGCConfig) (addressCensus, error) {
	own, err := readOwners(ctx, client, cfg)
	if err != nil {
		return addressCensus{}, err
	}
	var (
		census addressCensus
		found  []orphan
	)
	for kv, err := range client.All(ctx, announced) {
		if err != nil {
			return addressCensus{}, fmt.Errorf("list addresses: %w", err)
		}
		census.all++
		o, orphaned, err := own.judge(kv)
		switch {
		case err != nil:
			census.invalid++
		case orphaned:
			found = append(found, o)
		}
	}
	census.orphans, err = unleased(ctx, client, found)
	census.kept = len(found) - len(census.orphans)
	return census, err
}

// readOwners reads who announces addresses in a cluster, and whose they are.
func readOwners(ctx context.Context, client *kvstore.Client, cfg AddressGCConfig) (*owners, error) {
	own := newOwners()
	for kv, err := range client.All(ctx, node.StatePrefix+"/"+cfg.ClusterName+"/") {
		if err != nil {
			return nil, fmt.Errorf("list nodes: %w", err)
		}
		n, err := node.Parse(kv.Value)
		if err != nil {
			return nil, fmt.Errorf("%s is no node, and so it is not known whose addresses are orphaned: %w", kv.Key, err)
		}
		own.publish(n)
	}
	if cfg.Objects == nil {
		return own, nil
	}
	if err := cfg.Objects.hosts(ctx, own); err != nil {
		return nil, err
	}
	uids, err := cfg.Objects.pods(ctx)
	if err != nil {
		return nil, err
	}
	own.pods = make(map[string]bool, len(uids))
	for name := range uids {
		own.pods[name] = true
	}
	return own, nil
}

// unleased leaves out what somebody renews a lease for. Each lease is asked for once.
func unleased(ctx context.Context, client *kvstore.Client, found []orphan) ([]orphan, error) {
	leases := map[kvstore.LeaseID]bool{0: false} // alive
	var orphans []orphan
	for _, o := range found {
		kept, known := leases[o.kv.Lease]
		if !known {
			l, err := client.TimeToLive(ctx, o.kv.Lease)
			if err != nil && !errors.Is(err, kvstore.ErrLeaseLost) {
				return nil, err
			}
			kept = err == nil && alive(l)
			leases[o.kv.Lease] = kept
		}
		if !kept {
			orphans = append(orphans, o)
		}
	}
	return orphans, nil
}
