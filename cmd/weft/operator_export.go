// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/operator"
)

const kindExportPlan = "ExportPlan"

// plannedJSON is what becomes of a key, as JSON.
type plannedJSON struct {
	Action string `json:"action"` // create, change, delete or keep
	Key    string `json:"key"`
	bytesJSON
}

func operatorExport(env environment) *cobra.Command {
	var (
		options *operatorOptions
		out     *output
		dry     bool
		timeout time.Duration
	)
	cmd := newCommand("export", "Show what the leader would write and delete now", func(cmd *cobra.Command, _ []string) error {
		cfg, err := options.load(cmd.Flags())
		switch {
		case err != nil:
			return err
		case !dry:
			return usagef("export: the leader of the running operators publishes by itself; --dry-run shows what it would do now")
		case timeout <= 0:
			return usagef("--timeout %s: want a duration above 0, such as 10s", timeout)
		}
		p := startProgress(env)
		p.say("reading what is published, and what is to be")
		all, err := planExport(cmd.Context(), cfg, timeout, p)
		p.end()
		if err != nil {
			return err
		}
		list := api.List[plannedJSON]{Meta: api.MetaOf(kindExportPlan), Items: []plannedJSON{}}
		for _, p := range all {
			j := plannedJSON{Action: p.Action, Key: p.Key}
			if p.Value != nil {
				j.bytesJSON = makeBytes(p.Value)
			}
			list.Items = append(list.Items, j)
		}
		if out.forPrograms() {
			return out.object(env.stdout, list)
		}
		t := out.table(env.stdout, "ACTION", "KEY")
		for _, p := range list.Items {
			if p.Action != operator.ActionKeep || out.full() {
				t.row(p.Action, p.Key)
			}
		}
		return t.flush()
	})
	options = newOperatorOptions(cmd.Flags())
	cmd.Flags().BoolVar(&dry, "dry-run", false, "look, and touch nothing")
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "how long etcd and the Kubernetes API may take, a `duration`")
	out = outputFlags(cmd)
	return cmd
}

// planExport reads the sources once, and compares.
func planExport(ctx context.Context, cfg operatorConfig, timeout time.Duration, p *progress) (all []operator.Planned, err error) {
	d := &operatorDaemon{cfg: cfg, log: slog.New(slog.DiscardHandler)}
	if _, err := d.exports(); err != nil {
		return nil, err
	}
	if d.services == nil && d.nodes == nil {
		return nil, usagef("export: nothing is published: give --kubernetes, --services-dir or --nodes-dir")
	}
	cfg.kvstore.QPS = commandQPS
	client, err := kvstore.Dial(cfg.kvstore, d.log)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	p.countBy(func() int { return int(client.Status().Listed) }, "key")
	ctx, cancel := context.WithTimeout(ctx, timeout)
	var reading sync.WaitGroup
	defer reading.Wait()
	defer cancel()
	if d.services != nil {
		reading.Go(func() { _ = d.services.Run(ctx) }) // why it cannot be read is among its problems
		forms, bad := cfg.serviceForms(d.services)
		err = bad
		for i := 0; i < len(forms) && err == nil; i++ {
			var services []operator.Planned
			services, err = operator.PlanServices(ctx, client, forms[i])
			all = slices.Concat(all, services)
		}
	}
	if d.nodes != nil && err == nil {
		reading.Go(func() { _ = d.nodes.Run(ctx) })
		var nodes []operator.Planned
		nodes, err = operator.PlanNodes(ctx, client, operator.NodesConfig{
			ClusterName: cfg.clusterName, ClusterID: uint32(cfg.clusterID), Source: d.nodes,
		})
		all = slices.Concat(all, nodes)
	}
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return nil, fmt.Errorf("not done within %s (--timeout): %w", timeout, err)
	}
	return all, err
}
