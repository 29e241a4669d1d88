// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// testimony is what the running agent says of the clusters whose etcds are tried. Without an agent it says nothing.
type testimony struct {
	status *api.Status
	silent bool // only its knowledge of the others counts: it cannot have an opinion of what is new
	now    time.Time
	dir    string // with the configs of clusters, as the agent has it
	file   string // the config of the own cluster's etcd
}

// hear asks the agent, if one runs: that none does is no mistake here.
func hear(ctx context.Context, env environment, socket string) testimony {
	t := testimony{now: env.now()}
	client := api.NewClient(socket)
	status, err := client.Status(ctx)
	if err != nil {
		return t
	}
	t.status = &status
	t.dir, t.file = agentConfigs(ctx, socket)
	return t
}

// agentOptionValues are the values of options that the running agent goes by; "" each if none runs.
func agentOptionValues(ctx context.Context, socket string, names ...string) []string {
	values := make([]string, len(names))
	config, err := api.NewClient(socket).Config(ctx)
	if err != nil {
		return values
	}
	for _, o := range config.Items {
		if i := slices.Index(names, o.Name); i >= 0 {
			values[i] = o.Value
		}
	}
	return values
}

// agentConfigs are the directory with the configs of clusters, and the config of the own cluster's etcd, of the running agent.
func agentConfigs(ctx context.Context, socket string) (dir, file string) {
	values := agentOptionValues(ctx, socket, "clustermesh-config", "kvstore-config")
	return values[0], values[1]
}

// holder is the cluster that has an id, other than the one called name; "" if none is known.
func (t *testimony) holder(id uint32, name string) string {
	if t.status == nil || id == 0 {
		return ""
	}
	if own := t.status.Cluster; uint32(own.ID) == id && own.Name != name {
		return own.Name + " (our own)"
	}
	for i := range t.status.Clusters {
		if c := &t.status.Clusters[i]; c.ID == id && c.Name != name && !c.Own && c.State != api.StateConflict {
			return c.Name
		}
	}
	return ""
}

// layout is how our own cluster numbers identities; as most do, if nobody knows.
func (t *testimony) layout() identity.Layout {
	most := defaultClusters
	if t.status != nil {
		most = int(t.status.Cluster.MaxConnectedClusters)
	}
	layout, err := identity.NewLayout(most)
	if err != nil {
		layout, _ = identity.NewLayout(defaultClusters)
	}
	return layout
}

const agentStep = "agent"

// about is what the agent says of one cluster: whether it follows it, and what of it it does not take.
func (t *testimony) about(d *diagnosis, report func(kvstore.Step)) {
	say := func(o kvstore.Outcome, advice, format string, args ...any) {
		report(kvstore.Step{Name: agentStep, Outcome: o, Message: fmt.Sprintf(format, args...), Advice: advice})
	}
	switch {
	case t.status == nil, t.silent:
		return
	case d.Own:
		t.aboutOwn(d, say)
		return
	case d.Name == t.status.Cluster.Name:
		say(kvstore.StepWarning, "if it is another cluster, give one of the two another name; if it is ours, nothing",
			"the running agent passes the file over: %s is the name of its own cluster", d.Name)
		return
	}
	i := slices.IndexFunc(t.status.Clusters, func(c api.Cluster) bool { return !c.Own && c.Name == d.Name })
	if i < 0 {
		say(kvstore.StepWarning, "put the config into that directory, or see the status of the agent",
			"the running agent does not follow %s: its configs are in %s", d.Name, orDash(t.dir))
		return
	}
	c := &t.status.Clusters[i]
	if !c.Ready {
		advice := "see what failed above; if nothing did, the agent gets there by itself soon"
		if c.State == api.StateConflict || c.ConfigError != "" {
			advice = c.Advice()
		}
		say(kvstore.StepFailed, advice, "%s for %s%s", c.State, age(t.now, c.Since), orNothing(": ", c.LastError))
		return
	}
	if name, of := c.Quotas.Exceeded(); name != "" {
		say(kvstore.StepWarning, "raise "+name+" of this cluster in --mesh-limits if it should have more", "quota %s: %d of %d: what goes beyond is refused",
			name, of.Used, of.Limit)
	}
	if len(c.Rejected) > 0 {
		say(kvstore.StepWarning, "see `weft clusters rejected "+d.Name+"`: each has its reason", "refused by reason: %s", rejectedText(c))
	}
	if c.Waiting > 0 {
		say(kvstore.StepWarning, "see whether agents run on those nodes: `weft explain ADDRESS` names the node", "%s whose node is not known wait",
			count(c.Waiting, "announcement"))
	}
	say(kvstore.StepPassed, "", "%s for %s: %s, %s, %s, %s", c.State, age(t.now, c.Since), count(c.Counts.Nodes, "node"), count(c.Counts.IPs, "endpoint"),
		count(c.Counts.Identities, "identity"), count(c.Counts.Services, "service"))
}

// aboutOwn is what the agent says of the etcd in which it publishes.
func (t *testimony) aboutOwn(d *diagnosis, say func(o kvstore.Outcome, advice, format string, args ...any)) {
	k := t.status.KVStore
	switch {
	case k == nil:
		say(kvstore.StepWarning, "give the agent --kvstore-config "+d.File, "the running agent has no etcd of its own cluster: it publishes nothing")
	case k.Pending > 0 || !k.Ready:
		say(kvstore.StepFailed, "see the steps above, and the keys' own errors in `weft status`", "%s for %s, %s not published%s", k.State, age(t.now, k.Since),
			count(k.Pending, "change"), orNothing(": ", k.LastError))
	default:
		say(kvstore.StepPassed, "", "%s for %s, %s published", k.State, age(t.now, k.Since), count(k.Keys, "key"))
	}
}

// rejectedText counts what of a cluster was refused, by kind and reason.
func rejectedText(c *api.Cluster) string {
	var reasons []string
	for _, reason := range slices.Sorted(maps.Keys(c.Rejected)) {
		reasons = append(reasons, fmt.Sprintf("%s=%d", reason, c.Rejected[reason]))
	}
	return strings.Join(reasons, ", ")
}

// orNothing is a text with what joins it to the one before; nothing if it is empty.
func orNothing(joint, text string) string {
	if text == "" {
		return ""
	}
	return joint + text
}
