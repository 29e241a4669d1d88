// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/operator"
)

const (
	kindLeftoverList = "LeftoverList"

	// dnsWatchInterval is how often it is looked whether the pods of the cluster's DNS are announced.
	dnsWatchInterval = time.Minute
)

// gcOptions are the options of the duties that collect what nobody needs any more.
type gcOptions struct {
	identityInterval       time.Duration
	identityRate           int
	addressInterval        time.Duration
	ciliumEndpointInterval time.Duration
	policyInterval         time.Duration
}

func (o *gcOptions) add(flags *pflag.FlagSet) {
	flags.DurationVar(&o.identityInterval, "identity-gc-interval", 15*time.Minute,
		"time between two looks for identities that no node uses, a `duration`; the second one that finds the same deletes it; 0: never")
	flags.IntVar(&o.identityRate, "identity-gc-rate-limit", 2500, "`number` of identities that are deleted in a minute at most; 0: no limit")
	flags.DurationVar(&o.addressInterval, "endpoint-gc-interval", 5*time.Minute,
		"time between two looks for announced addresses whose node or pod is gone, a `duration`; 0: never")
	flags.DurationVar(&o.ciliumEndpointInterval, "cilium-endpoint-gc-interval", 5*time.Minute,
		"with --kubernetes, time between two looks for CiliumEndpoint objects whose pod is gone, a `duration`; 0: never")
	flags.DurationVar(&o.policyInterval, "cnp-node-status-gc-interval", 2*time.Minute,
		"with --kubernetes, time between two looks for what nodes that are gone said in the status of Cilium's policies, a `duration`; 0: never")
}

// leastGCInterval keeps a round from following on the one before.
const leastGCInterval = time.Second

func (o *gcOptions) check() error {
	for _, interval := range []struct {
		name  string
		value time.Duration
	}{
		{"identity-gc-interval", o.identityInterval}, {"endpoint-gc-interval", o.addressInterval},
		{"cilium-endpoint-gc-interval", o.ciliumEndpointInterval}, {"cnp-node-status-gc-interval", o.policyInterval},
	} {
		if interval.value != 0 && interval.value < leastGCInterval {
			return fmt.Errorf("--%s %s: want at least %s, or 0 for never", interval.name, interval.value, leastGCInterval)
		}
	}
	if o.identityRate < 0 {
		return fmt.Errorf("--identity-gc-rate-limit %d: want a number of identities a minute, or 0 for no limit", o.identityRate)
	}
	return nil
}

// gcDuties are those that collect.
func (c *operatorConfig) gcDuties() ([]operator.Duty, error) {
	duties := []operator.Duty{operator.NewWatchdog()}
	cfg, err := c.leftovers()
	if err != nil {
		return nil, err
	}
	if c.gc.identityInterval > 0 {
		duties = append(duties, operator.NewIdentityGC(cfg.Identities))
	}
	if c.gc.addressInterval > 0 {
		duties = append(duties, operator.NewAddressGC(cfg.Addresses))
	}
	objects := cfg.Addresses.Objects
	if objects == nil {
		return duties, nil
	}
	duties = append(duties, operator.NewDNSWatch(objects, dnsWatchInterval))
	if c.gc.ciliumEndpointInterval > 0 {
		duties = append(duties, operator.NewCiliumEndpointGC(objects, c.gc.ciliumEndpointInterval))
	}
	if c.gc.policyInterval > 0 {
		policies, err := operator.NewPolicyGC(objects, c.gc.policyInterval)
		if err != nil {
			return nil, err
		}
		duties = append(duties, policies)
	}
	return duties, nil
}

// leftovers says where to look for what nobody needs any more.
func (c *operatorConfig) leftovers() (cfg operator.LeftoverConfig, err error) {
	layout, err := identity.NewLayout(c.maxConnectedClusters)
	if err != nil {
		return cfg, err
	}
	cfg.Identities = operator.IdentityGCConfig{
		ClusterName: c.clusterName, ClusterID: identity.ClusterID(c.clusterID), Layout: layout,
		Interval: c.gc.identityInterval, PerMinute: c.gc.identityRate,
	}
	cfg.Addresses = operator.AddressGCConfig{ClusterName: c.clusterName, Interval: c.gc.addressInterval}
	if c.kubernetes {
		cfg.Addresses.Objects, err = operator.NewObjects(c.kubeconfig)
	}
	return cfg, err
}

// leftoverJSON is something that nobody needs any more, as JSON.
type leftoverJSON struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
	Why  string `json:"why"`
}

func operatorGC(env environment) *cobra.Command {
	var (
		options *operatorOptions
		out     *output
		dry     bool
		timeout time.Duration
	)
	const short = "Show what the leader would begin to collect now"
	cmd := newCommand("gc", short, func(cmd *cobra.Command, _ []string) error {
		cfg, err := options.load(cmd.Flags())
		switch {
		case err != nil:
			return err
		case !dry:
			return usagef("gc: what nobody needs any more the leader of the running operators collects by itself; --dry-run shows it")
		case timeout <= 0:
			return usagef("--timeout %s: want a duration above 0, such as 10s", timeout)
		}
		p := startProgress(env)
		p.say("looking for what nobody needs")
		found, err := findLeftovers(cmd.Context(), cfg, timeout, p)
		p.end()
		if err != nil {
			return err
		}
		list := api.List[leftoverJSON]{Meta: api.MetaOf(kindLeftoverList), Items: []leftoverJSON{}}
		for _, l := range found {
			list.Items = append(list.Items, leftoverJSON(l))
		}
		if out.forPrograms() {
			return out.object(env.stdout, list)
		}
		t := out.table(env.stdout, "KIND", "NAME", "WHY")
		for _, l := range list.Items {
			t.row(l.Kind, l.Name, l.Why)
		}
		return t.flush()
	})
	options = newOperatorOptions(cmd.Flags())
	cmd.Flags().BoolVar(&dry, "dry-run", false, "look, and touch nothing")
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "how long etcd and the Kubernetes API may take, a `duration`")
	out = outputFlags(cmd)
	return cmd
}

func findLeftovers(ctx context.Context, cfg operatorConfig, timeout time.Duration, p *progress) ([]operator.Leftover, error) {
	where, err := cfg.leftovers()
	if err != nil {
		return nil, &usageError{cause: err}
	}
	cfg.kvstore.QPS = commandQPS
	client, err := kvstore.Dial(cfg.kvstore, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	p.countBy(func() int { return int(client.Status().Listed) }, "key")
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	found, err := operator.FindLeftovers(bounded, client, where)
	if err != nil && errors.Is(bounded.Err(), context.DeadlineExceeded) {
		return nil, fmt.Errorf("not done within %s (--timeout): %w", timeout, err)
	}
	return found, err
}
