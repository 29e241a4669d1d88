// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
)

func clustersCommand(env environment, c *clientOptions) *cobra.Command {
	cmd := group("clusters", "The clusters that the agent follows", clustersList(env, c), clustersGet(env, c), clustersRejected(env, c),
		clustersWatch(env, c), clustersAdd(env, c), clustersRemove(env, c))
	cmd.Aliases = []string{"cluster"}
	return cmd
}

// fetchClusters asks for the remote clusters, and, after them, our own if it is followed.
func fetchClusters(ctx context.Context, c *clientOptions) ([]api.Cluster, error) {
	s, err := api.NewClient(c.socket).Status(ctx)
	return remoteFirst(s.Clusters), err
}

// remoteFirst sorts clusters as they are shown: by name, our own last.
func remoteFirst(clusters []api.Cluster) []api.Cluster {
	slices.SortStableFunc(clusters, func(a, b api.Cluster) int {
		switch {
		case a.Own == b.Own:
			return cmp.Compare(a.Name, b.Name)
		case a.Own:
			return 1
		}
		return -1
	})
	return clusters
}

// knowCluster returns an error that names all clusters if the agent knows none of this name.
func knowCluster(ctx context.Context, c *clientOptions, name string) error {
	s, err := api.NewClient(c.socket).Status(ctx)
	if err != nil || name == s.Cluster.Name {
		return err
	}
	_, err = clusterCalled(remoteFirst(s.Clusters), name)
	return err
}

// oneCluster asks for a cluster by its name.
func oneCluster(ctx context.Context, c *clientOptions, name string) (api.Cluster, error) {
	clusters, err := fetchClusters(ctx, c)
	if err != nil {
		return api.Cluster{}, err
	}
	return clusterCalled(clusters, name)
}

// clusterCalled finds a cluster by its name.
func clusterCalled(clusters []api.Cluster, name string) (api.Cluster, error) {
	var known []string
	for _, cluster := range clusters {
		if cluster.Name == name {
			return cluster, nil
		}
		known = append(known, cluster.Name)
	}
	return api.Cluster{}, fmt.Errorf("cluster %s is not followed: %w: there are %s", name, api.ErrNotFound, orDash(strings.Join(known, ", ")))
}

func clusterName(c *api.Cluster) string {
	if c.Own {
		return c.Name + " (own)"
	}
	return c.Name
}

func clustersList(env environment, c *clientOptions) *cobra.Command {
	number := func(n uint64) string { return strconv.FormatUint(n, 10) }
	cmd := listCommand(env, "list", "List the clusters with their state, counts and freshness", listing[api.Cluster]{
		kind:  api.KindClusterList,
		key:   func(c *api.Cluster) string { return c.Name },
		fetch: func(ctx context.Context, _ []string) ([]api.Cluster, error) { return fetchClusters(ctx, c) },
		settled: func(c api.Cluster) api.Cluster { // else each answer of an etcd would be a change
			c.LastSuccess, c.Lag = time.Time{}, 0
			return c
		},
		columns: []column[api.Cluster]{
			{title: "NAME", cell: clusterName},
			{title: "ID", cell: func(c *api.Cluster) string { return number(uint64(c.ID)) }},
			{title: "STATE", cell: func(c *api.Cluster) string { return c.State }},
			{title: "FOR", cell: func(c *api.Cluster) string { return age(env.now(), c.Since) }},
			{title: "NODES", cell: func(c *api.Cluster) string { return strconv.Itoa(c.Counts.Nodes) }},
			{title: "IPS", cell: func(c *api.Cluster) string { return strconv.Itoa(c.Counts.IPs) }},
			{title: "IDENTITIES", cell: func(c *api.Cluster) string { return strconv.Itoa(c.Counts.Identities) }},
			{title: "SERVICES", cell: func(c *api.Cluster) string { return strconv.Itoa(c.Counts.Services) }},
			{title: "REVISION", cell: func(c *api.Cluster) string { return strconv.FormatInt(c.Revision, 10) }},
			{title: "LAG", cell: func(c *api.Cluster) string { return strconv.FormatInt(c.Lag, 10) }},
			{title: "LAST ANSWER", cell: func(c *api.Cluster) string { return answered(env.now(), c.LastSuccess) }},
			{title: "REJECTED", cell: func(c *api.Cluster) string { return number(rejectedCount(c)) }},
			{title: "FAILURES", wide: true, cell: func(c *api.Cluster) string { return number(c.Failures) }},
			{title: "RECONNECTIONS", wide: true, cell: func(c *api.Cluster) string { return number(c.Reconnects) }},
			{title: "ETCD", wide: true, cell: func(c *api.Cluster) string { return orDash(strings.Join(c.Endpoints, ",")) }},
			{title: "VERSION", wide: true, cell: func(c *api.Cluster) string { return orDash(c.ServerVersion) }},
			{title: "LAST ERROR", wide: true, cell: func(c *api.Cluster) string { return orDash(c.LastError) }},
		},
	})
	cmd.Aliases = []string{"ls"}
	return cmd
}

func answered(now, at time.Time) string {
	if at.IsZero() {
		return "never"
	}
	return ago(now, at)
}

func rejectedCount(c *api.Cluster) (n uint64) {
	for _, count := range c.Rejected {
		n += count
	}
	return n
}

// clusterDetail is one cluster as an answer.
type clusterDetail struct {
	api.Meta
	api.Cluster
}

func clustersGet(env environment, c *clientOptions) *cobra.Command {
	var out *output
	const short = "Show everything about a cluster as a tree"
	cmd := newCommand("get NAME", short, func(cmd *cobra.Command, args []string) error {
		cluster, err := oneCluster(cmd.Context(), c, args[0])
		if err != nil {
			return err
		}
		if out.forPrograms() {
			return out.object(env.stdout, clusterDetail{api.MetaOf(api.KindCluster), cluster})
		}
		p := &statusPrinter{w: env.stdout, now: env.now(), ink: env.ink(), full: true}
		p.cluster(&cluster)
		return nil
	})
	someCluster.completes(cmd, env, false)
	out = outputFlags(cmd)
	return cmd
}

// rejections are what was refused of one cluster.
type rejections struct {
	Cluster string          `json:"cluster"`
	Counts  []rejectedKind  `json:"counts"` // since the agent started
	Last    []api.Rejection `json:"last"`   // oldest first, at most 100
}

type rejectedKind struct {
	Kind   string `json:"kind"`
	Reason string `json:"reason"`
	Count  uint64 `json:"count"`
}

func clustersRejected(env environment, c *clientOptions) *cobra.Command {
	var out *output
	const short = "Show what clusters published that was not accepted: how much of which kind, and the last 100 of each"
	cmd := newCommand("rejected", short, func(cmd *cobra.Command, args []string) error {
		clusters, err := fetchClusters(cmd.Context(), c)
		if len(args) > 0 && err == nil {
			var one api.Cluster
			one, err = oneCluster(cmd.Context(), c, args[0])
			clusters = []api.Cluster{one}
		}
		if err != nil {
			return err
		}
		items := []rejections{}
		for i := range clusters {
			if r := makeRejections(&clusters[i]); len(r.Counts) > 0 || len(args) > 0 {
				items = append(items, r)
			}
		}
		if out.forPrograms() {
			return out.object(env.stdout, api.List[rejections]{Meta: api.MetaOf(api.KindRejections), Items: items})
		}
		return printRejections(env, out, items)
	})
	cmd.Use = "rejected [NAME]"
	someCluster.completes(cmd, env, false)
	out = outputFlags(cmd)
	return cmd
}

func makeRejections(c *api.Cluster) rejections {
	r := rejections{Cluster: c.Name, Counts: []rejectedKind{}, Last: present(c.Rejections)}
	for _, key := range slices.Sorted(maps.Keys(c.Rejected)) {
		kind, reason, _ := strings.Cut(key, "/")
		r.Counts = append(r.Counts, rejectedKind{kind, reason, c.Rejected[key]})
	}
	return r
}

func printRejections(env environment, out *output, items []rejections) error {
	t := out.table(env.stdout, "CLUSTER", "KIND", "REASON", "COUNT")
	last := 0
	for _, r := range items {
		for _, n := range r.Counts {
			t.row(r.Cluster, n.Kind, n.Reason, strconv.FormatUint(n.Count, 10))
		}
		last += len(r.Last)
	}
	if err := t.flush(); err != nil || last == 0 {
		return err
	}
	fmt.Fprintln(env.stdout)
	t = out.table(env.stdout, "TIME", "CLUSTER", "KIND", "KEY", "REASON")
	for _, r := range items {
		for _, x := range r.Last {
			t.row(x.At.Local().Format(time.DateTime), r.Cluster, x.Kind, x.Key, x.Reason)
		}
	}
	return t.flush()
}
