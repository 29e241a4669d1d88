// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/operator"
)

const kindAccess = "EtcdAccess"

// accessJSON is what etcd-init did, or would do.
type accessJSON struct {
	api.Meta
	Server  string                 `json:"server"`            // version
	Warning string                 `json:"warning,omitempty"` // what is wrong with that version
	DryRun  bool                   `json:"dryRun"`
	Changes []kvstore.AccessChange `json:"changes"`
}

// etcdInitOptions are the options of etcd-init.
type etcdInitOptions struct {
	etcd    etcdOptions
	cluster string
	remotes []string
	shared  bool
	dry     bool
	out     *output
}

func operatorEtcdInit(env environment) *cobra.Command {
	o := new(etcdInitOptions)
	const short = "Make the users and roles of the cluster's etcd, one user for each remote cluster"
	cmd := newCommand("etcd-init", short, func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context(), env) })
	flags := cmd.Flags()
	o.etcd.flags(flags)
	flags.StringVar(&o.cluster, "cluster-name", defaultCluster, "`name` of the cluster whose etcd it is")
	flags.StringSliceVar(&o.remotes, "remote", nil, "`name` of a cluster that may read this one, given for each; users of clusters that are not named are deleted")
	flags.BoolVar(&o.shared, "shared-user", false, "let clusters also read as the user remote, whose certificate they share")
	flags.BoolVar(&o.dry, "dry-run", false, "print what would be changed, and change nothing")
	o.out = outputFlags(cmd)
	return cmd
}

func (o *etcdInitOptions) run(ctx context.Context, env environment) error {
	if o.etcd.config == "" {
		return usagef("--kvstore-config: name the etcd of the cluster")
	}
	file, err := o.etcd.file()
	if err != nil {
		return err
	}
	cfg, err := kvstore.LoadConfig(file)
	if err != nil {
		return &usageError{cause: err}
	}
	want, err := operator.NewAccess(operator.AccessConfig{
		Cluster: o.cluster, Remotes: o.remotes, SharedUser: o.shared, Username: cfg.Username, Password: string(cfg.Password),
	})
	if err != nil {
		return &usageError{cause: err}
	}
	planned := false
	did := accessJSON{Meta: api.MetaOf(kindAccess), DryRun: o.dry, Changes: []kvstore.AccessChange{}}
	err = o.etcd.do(ctx, func(ctx context.Context, client *kvstore.Client) error {
		plan, err := client.PlanAccess(ctx, want)
		if err != nil {
			return err
		}
		planned = true
		if !o.dry {
			plan, err = client.ApplyAccess(ctx, plan)
		}
		did.Changes = present(plan)
		s := client.Status()
		did.Server, did.Warning = s.ServerVersion, s.Warning
		return err
	})
	if !planned {
		return err
	}
	return errors.Join(err, o.print(env, did, err == nil))
}

// print tells what was done. Where all went well and nothing was to be done, it says so.
func (o *etcdInitOptions) print(env environment, did accessJSON, well bool) error {
	if o.out.forPrograms() {
		return o.out.object(env.stdout, did)
	}
	if did.Warning != "" {
		complain(env.stderr, errors.New(did.Warning))
	}
	for _, x := range did.Changes {
		if _, err := fmt.Fprintln(env.stdout, printable(x.String())); err != nil {
			return err
		}
	}
	if !o.out.forPeople() {
		return nil
	}
	last := count(len(did.Changes), "change")
	switch {
	case !well:
		last += " made, then it failed; given again, the command goes on from there"
	case o.dry:
		last += " to be made"
	default:
		last += " made"
	}
	_, err := fmt.Fprintln(env.stdout, last)
	return err
}
