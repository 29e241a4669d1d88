// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"fmt"
	"strings"
	"time"

	"k8s.io/client-go/dynamic"
)

// policyKinds are the resources of policies in whose status each node reports.
var policyKinds = []string{"ciliumnetworkpolicies", "ciliumclusterwidenetworkpolicies"}

// policyGC removes what nodes that are gone have reported from the status of policies. It watches policies for as long as the
// API has them.
type policyGC struct {
	*Loop
	objects  *Objects
	client   dynamic.Interface
	followed map[string]*policies // by resource; of Run's goroutine alone
}

var _ Duty = (*policyGC)(nil)

// NewPolicyGC returns the duty. Kinds of policies that the API does not have are left out until it has them.
func NewPolicyGC(objects *Objects, interval time.Duration) (Duty, error) {
	client, err := dynamic.NewForConfig(objects.access)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	g := &policyGC{objects: objects, client: client}
	g.Loop = NewLoop("policy-gc", interval, g.round)
	return g, nil
}

// Run does rounds, and follows the policies between them, until the term ends.
func (g *policyGC) Run(ctx context.Context, t *Term) error {
	g.followed = make(map[string]*policies)
	defer func() {
		for _, p := range g.followed {
			p.stop()
		}
	}()
	return g.Loop.Run(ctx, t)
}

// round compares the nodes that policies name with those that there are. What names a node that was gone in the round
// before, too, is removed.
func (g *policyGC) round(ctx context.Context, t *Term) (Outcome, error) {
	if err := g.follow(ctx, t); err != nil {
		return Outcome{}, err
	}
	if len(g.followed) == 0 {
		return Outcome{Detail: "off: the API has no policies of Cilium's"}, nil
	}
	// Before the nodes are read, what the policies name has been: a node that is new by then is among them.
	named := make(map[string]map[policy][]string, len(g.followed))
	total := 0
	for kind, p := range g.followed {
		if err := p.await(ctx); err != nil {
			return Outcome{}, err
		}
		named[kind] = p.snapshot()
		total += len(named[kind])
	}
	nodes, err := g.objects.nodes(ctx)
	if err != nil {
		return Outcome{}, err
	}
	removed, err := 0, error(nil)
	if len(nodes) > 0 { // a cluster without a node has none that could have gone
		removed, err = g.clear(ctx, t, named, nodes)
	}
	return Outcome{Deleted: removed, Detail: fmt.Sprintf("%d policies with reports, %d nodes, %d reports removed", total, len(nodes), removed)}, err
}

// follow begins to follow the kinds that the API has, and ends with those that it has no more.
func (g *policyGC) follow(ctx context.Context, t *Term) error {
	kinds, err := g.objects.kinds(ctx, ciliumGroup)
	if err != nil {
		return err
	}
	for _, kind := range policyKinds {
		p := g.followed[kind]
		switch {
		case kinds[kind] && p == nil:
			g.followed[kind] = followPolicies(ctx, g.client, kind, kinds[kind+"/status"], t.Log("policy-gc"))
		case kinds[kind] && p.sub != kinds[kind+"/status"], !kinds[kind] && p != nil:
			p.stop()
			delete(g.followed, kind)
		}
	}
	return nil
}

// clear removes the reports of nodes that are gone, one patch for a policy.
func (g *policyGC) clear(ctx context.Context, t *Term, named map[string]map[policy][]string, nodes map[string]bool) (removed int, err error) {
	var problems []error
	for _, kind := range policyKinds {
		p := g.followed[kind]
		if p == nil {
			continue
		}
		for at, gone := range p.gone(named[kind], nodes) {
			if err := t.Confirm(ctx); err != nil {
				return removed, err
			}
			if err := g.patch(ctx, p, at, gone); err != nil {
				problems = append(problems, err)
				continue
			}
			p.cleared(at, gone)
			removed += len(gone)
			t.Log("policy-gc").Debug("reports of nodes that are gone removed", "resource", kind, "namespace", at.namespace, "name", at.name,
				"nodes", strings.Join(gone, " "))
		}
	}
	return removed, summary(problems)
}

// patch removes the reports of nodes from a policy. As a merge it does no harm where they are gone already.
func (g *policyGC) patch(ctx context.Context, p *policies, at policy, gone []string) error {
	reports := make(map[string]any, len(gone))
	for _, name := range gone {
		reports[name] = nil
	}
	var sub []string
	if p.sub {
		sub = []string{"status"}
	}
	path := objectPath(ciliumGroup, p.kind, at.namespace, at.name, sub...)
	_, err := g.objects.merge(ctx, path, map[string]any{"status": map[string]any{"nodes": reports}})
	return err
}
