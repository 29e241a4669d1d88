// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

const kindBench = "Bench"

// measured is what something takes, beside a baseline of the same run, as JSON.
type measured struct {
	What                string  `json:"what"`
	Nanoseconds         int64   `json:"nanoseconds"`
	Baseline            string  `json:"baseline"`
	BaselineNanoseconds int64   `json:"baselineNanoseconds"`
	Ratio               float64 `json:"ratio"`
	Of                  int     `json:"of"` // how many entries or keys there were
}

func makeMeasured(what string, took time.Duration, baseline string, than time.Duration, of int) measured {
	return measured{
		What: what, Nanoseconds: took.Nanoseconds(), Baseline: baseline, BaselineNanoseconds: than.Nanoseconds(),
		Ratio: float64(took) / float64(max(than, 1)), Of: of,
	}
}

// maxBenchEntries bounds the memory that a measurement takes to some 150 MB.
const maxBenchEntries = 1_000_000

func benchCommand(env environment, c *clientOptions) *cobra.Command {
	var (
		out           *output
		o             *etcdOptions
		entries, keys int
	)
	cmd := newCommand("bench", "Measure what weft's work costs on this machine, without disturbing it", func(cmd *cobra.Command, args []string) error {
		if entries < 1 || entries > maxBenchEntries {
			return usagef("--entries %d: want a number from 1 to %d", entries, maxBenchEntries)
		}
		if keys < 1 {
			return usagef("--keys %d: want a number from 1 on", keys)
		}
		list := api.List[measured]{Meta: api.MetaOf(kindBench)}
		var err error
		p := startProgress(env)
		defer p.end()
		if list.Items, err = benchKernel(cmd.Context(), entries, p); err != nil {
			return err
		}
		if len(args) > 0 {
			items, err := benchEtcds(cmd.Context(), env, c, o, args, keys, p)
			if err != nil {
				return err
			}
			list.Items = append(list.Items, items...)
		}
		return out.show(p.above(env.stdout), list, func(t *table) { printMeasured(t, out, list.Items) })
	})
	cmd.Use = "bench [CLUSTER|FILE]..."
	someCluster.completes(cmd, env, true)
	o = newEtcdOptions(cmd.Flags())
	cmd.Flags().IntVar(&entries, "entries", 100_000, "`number` of addresses in the map that is measured")
	cmd.Flags().IntVar(&keys, "keys", 10_000, "`number` of keys that are listed at most of each etcd")
	out = outputFlags(cmd)
	return cmd
}

func benchKernel(ctx context.Context, entries int, p *progress) ([]measured, error) {
	cost, err := datapath.Measure(ctx, entries, func(what string, done, total int) {
		p.say("measuring the kernel")
		p.didOf(done, total, what)
	})
	if err != nil {
		return nil, fmt.Errorf("measure the kernel: %w", err)
	}
	const nothing = "a program that does nothing"
	return []measured{
		makeMeasured("packet of a known address", cost.Packet, nothing, cost.Empty, entries),
		makeMeasured("packet of the world", cost.World, nothing, cost.Empty, entries),
		makeMeasured("write of an entry", cost.Write, "an entry of a hash map", cost.WriteHash, entries),
	}, nil
}

// benchEtcds lists a part of each etcd that is named.
func benchEtcds(ctx context.Context, env environment, c *clientOptions, o *etcdOptions, args []string, keys int, p *progress) ([]measured, error) {
	o.fromAgent(ctx, c)
	targets, err := o.targets(args)
	if err != nil {
		return nil, err
	}
	var items []measured
	for _, target := range targets {
		p.say("listing the etcd of %s", target.Name)
		m, err := o.bench(ctx, &target, keys, p)
		if err != nil {
			return nil, fmt.Errorf("etcd of %s: %w", target.Name, err)
		}
		items = append(items, m)
	}
	return items, nil
}

// bench reads one key some times, and lists up to so many. It writes nothing.
func (o *etcdOptions) bench(ctx context.Context, d *diagnosis, keys int, p *progress) (measured, error) {
	cfg, err := kvstore.LoadConfig(d.File)
	if err != nil {
		return measured{}, &usageError{cause: err}
	}
	cfg.QPS = commandQPS
	client, err := kvstore.Dial(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return measured{}, err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	const reads = 11 // the first connects
	var took [reads]time.Duration
	for i := range took {
		start := time.Now()
		if _, _, err := client.Get(ctx, identity.HeartbeatKey); err != nil && !kvstore.Denied(err) {
			return measured{}, err
		}
		took[i] = time.Since(start)
	}
	slices.Sort(took[1:])
	listed, start := 0, time.Now()
	for _, prefix := range prefixesOf(d, false) {
		if listed >= keys {
			break
		}
		for _, err := range client.All(ctx, prefix) {
			if err != nil {
				return measured{}, err
			}
			listed++
			p.didOf(listed, keys, "key")
			if listed >= keys {
				break
			}
		}
	}
	if listed == 0 {
		return measured{}, errors.New("it has no key of what is listed: see `weft troubleshoot kvstore`")
	}
	return makeMeasured("list of a key of "+d.Name, time.Since(start)/time.Duration(listed), "a read of one key", took[1+reads/2], listed), nil
}

func printMeasured(t *table, out *output, items []measured) {
	if !out.noHeaders {
		t.row("WHAT", "TAKES", "BASELINE", "TAKES", "RATIO", "OF")
	}
	for i := range items {
		m := &items[i]
		t.row(m.What, durationText(m.Nanoseconds), m.Baseline, durationText(m.BaselineNanoseconds),
			strconv.FormatFloat(m.Ratio, 'f', 2, 64), strconv.Itoa(m.Of))
	}
}

// durationText keeps three digits.
func durationText(nanoseconds int64) string {
	d := time.Duration(nanoseconds)
	for _, unit := range []time.Duration{time.Second, time.Millisecond, time.Microsecond} {
		if d >= unit {
			return d.Round(unit / 100).String()
		}
	}
	return d.String()
}
