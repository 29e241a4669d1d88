// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// IdentityGCConfig says how identities that nobody uses are collected.
type IdentityGCConfig struct {
	ClusterName string
	ClusterID   identity.ClusterID
	Layout      identity.Layout
	// Interval is the time between two rounds; what no node uses is gone after two to three of them.
	Interval time.Duration
	// PerMinute bounds how many are deleted; 0: as many as etcd takes.
	PerMinute int
}

// identityGC deletes the identities of the own cluster that no node uses. One is deleted when it was unused in two rounds
// and has not been bound anew in between, in a transaction that finds it unused once more.
type identityGC struct {
	cfg   IdentityGCConfig
	term  *Term // whose marks they are
	marks identityMarks
}

// NewIdentityGC returns the duty. It reads all keys of identities each round and writes one transaction for every 50 that it
// deletes; no lock is taken, and none that somebody else holds is disregarded.
func NewIdentityGC(cfg IdentityGCConfig) *Loop {
	g := &identityGC{cfg: cfg}
	return NewLoop("identity-gc", cfg.Interval, g.round)
}

func (g *identityGC) round(ctx context.Context, t *Term) (Outcome, error) {
	if g.term != t { // revisions are those of one etcd
		g.term, g.marks = t, nil
	}
	census, err := takeIdentityCensus(ctx, t.Client(), g.cfg)
	if err != nil {
		return Outcome{}, err
	}
	ripe, next := g.marks.ripe(census.unused)
	log := t.Log("identity-gc")
	for _, u := range ripe {
		log.Debug("identity is not used any more", "identity", u.id, "labels", u.labels)
	}
	done, err := g.delete(ctx, t, ripe)
	if err != nil { // the next round comes soon, and must not be the second one for what was marked just now
		next = g.marks
	}
	for _, id := range done.deleted {
		delete(next, id)
	}
	g.marks = next
	detail := fmt.Sprintf("%s, %d marked, %d deleted, %d kept as they were in use after all",
		census.counts, len(next), len(done.deleted), done.kept)
	return Outcome{Deleted: len(done.deleted), Detail: detail}, err
}

func (c identityCounts) String() string {
	return fmt.Sprintf("%d identities: %d used, %d of others, %d leased, %d not understood", c.Own+c.Foreign+c.Invalid, c.Used, c.Foreign, c.Leased, c.Invalid)
}

// takeIdentityCensus reads all keys of identities, in two lists.
func takeIdentityCensus(ctx context.Context, client *kvstore.Client, cfg IdentityGCConfig) (*identityCensus, error) {
	census := newIdentityCensus(cfg.ClusterName, cfg.ClusterID, cfg.Layout)
	for _, list := range []struct {
		prefix string
		note   func(kvstore.KV)
	}{
		{identitySlaves, census.slave}, {identityMasters, census.master},
	} {
		for kv, err := range client.All(ctx, list.prefix) {
			if err != nil {
				return nil, fmt.Errorf("list identities: %w", err)
			}
			list.note(kv)
		}
	}
	return census, nil
}

// deletions is what became of identities that were to be deleted.
type deletions struct {
	deleted []identity.ID
	kept    int // they were in use, or being allocated, when it came to it
}

// delete deletes identities at the configured rate. Those that etcd refuses to delete keep no other one; the error tells of
// them, or why no more was tried.
func (g *identityGC) delete(ctx context.Context, t *Term, ripe []unusedIdentity) (done deletions, err error) {
	batch := len(ripe)
	if g.cfg.PerMinute > 0 {
		batch = max(1, g.cfg.PerMinute/60)
	}
	var problems []error
	for at := 0; at < len(ripe); at += batch {
		some := ripe[at:min(at+batch, len(ripe))]
		attempts := make([]kvstore.Attempt, len(some))
		for i, u := range some {
			attempts[i] = u.deletion()
		}
		results, err := t.Attempt(ctx, attempts...)
		for i, result := range results {
			switch {
			case result == nil:
				done.deleted = append(done.deleted, some[i].id)
			case errors.Is(result, kvstore.ErrExists):
				done.kept++
			default:
				problems = append(problems, fmt.Errorf("identity %s: %w", some[i].id, result))
			}
		}
		if err != nil {
			return done, errors.Join(append(problems, err)...)
		}
		if g.cfg.PerMinute > 0 && at+batch < len(ripe) && !sleep(ctx, time.Duration(len(some))*time.Minute/time.Duration(g.cfg.PerMinute)) {
			break
		}
	}
	return done, summary(problems)
}

// summary tells of the first of many errors, and how many there are.
func summary(errs []error) error {
	switch len(errs) {
	case 0:
		return nil
	case 1:
		return errs[0]
	}
	return fmt.Errorf("%d failures, the first: %w", len(errs), errs[0])
}
