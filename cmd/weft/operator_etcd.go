// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

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
	// Certificates are those that were made, or would be.
	Certificates []operator.CertificateChange `json:"certificates"`
}

// etcdInitOptions are the options of etcd-init.
type etcdInitOptions struct {
	etcd    etcdOptions
	cluster string
	remotes []string
	shared  bool
	certs   operator.CertificatesConfig
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
	flags.StringVar(&o.certs.Dir, "certificates", "",
		"`directory` in which each user and the etcd get a certificate, and which holds their authority; made, and renewed, where that is to be done")
	flags.StringSliceVar(&o.certs.Server, "server-name", nil, "with --certificates, `name` or address by which the etcd is reached, given for each; none: it has a certificate")
	flags.DurationVar(&o.certs.Lifetime, "certificate-lifetime", 365*24*time.Hour,
		"with --certificates, how long one is good, a `duration`: it is renewed in the last third; an authority lasts ten times as long")
	flags.BoolVar(&o.dry, "dry-run", false, "print what would be changed, and change nothing")
	o.out = outputFlags(cmd)
	return cmd
}

// leastLifetime is the shortest of a certificate: less would end while it is handed on.
const leastLifetime = time.Hour

func (o *etcdInitOptions) check() error {
	switch {
	case o.certs.Dir == "" && o.etcd.config == "":
		return usagef("--kvstore-config: name the etcd of the cluster, or with --certificates a directory, or both")
	case o.certs.Dir == "" && len(o.certs.Server) > 0:
		return usagef("--server-name: it is for --certificates: give that, too")
	case o.certs.Lifetime < leastLifetime:
		return usagef("--certificate-lifetime %s: want at least %s", o.certs.Lifetime, leastLifetime)
	}
	return nil
}

func (o *etcdInitOptions) run(ctx context.Context, env environment) error {
	if err := o.check(); err != nil {
		return err
	}
	access := operator.AccessConfig{Cluster: o.cluster, Remotes: o.remotes, SharedUser: o.shared}
	want, err := operator.NewAccess(access)
	if err != nil {
		return &usageError{cause: err}
	}
	did := accessJSON{Meta: api.MetaOf(kindAccess), DryRun: o.dry, Changes: []kvstore.AccessChange{}, Certificates: []operator.CertificateChange{}}
	if o.certs.Dir != "" {
		o.certs.Users, o.certs.Dry = operator.CertificateUsers(want), o.dry
		made, err := operator.MakeCertificates(o.certs, env.now())
		did.Certificates = present(made)
		if err != nil || o.etcd.config == "" {
			return errors.Join(err, o.print(env, did, err == nil))
		}
	}
	planned, err := o.grant(ctx, access, &did)
	if !planned && len(did.Certificates) == 0 {
		return err
	}
	return errors.Join(err, o.print(env, did, err == nil))
}

// grant makes the users and roles. planned: it is known what was to be done.
func (o *etcdInitOptions) grant(ctx context.Context, access operator.AccessConfig, did *accessJSON) (planned bool, err error) {
	file, err := o.etcd.file()
	if err != nil {
		return false, err
	}
	cfg, err := kvstore.LoadConfig(file)
	if err != nil {
		return false, &usageError{cause: err}
	}
	access.Username, access.Password = cfg.Username, string(cfg.Password)
	want, err := operator.NewAccess(access)
	if err != nil {
		return false, &usageError{cause: err}
	}
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
	return planned, err
}

// print tells what was done. Where all went well and nothing was to be done, it says so.
func (o *etcdInitOptions) print(env environment, did accessJSON, well bool) error {
	if o.out.forPrograms() {
		return o.out.object(env.stdout, did)
	}
	if did.Warning != "" {
		complain(env.stderr, errors.New(did.Warning))
	}
	var lines []string
	for _, x := range did.Certificates {
		lines = append(lines, x.String())
	}
	for _, x := range did.Changes {
		lines = append(lines, x.String())
	}
	for _, line := range lines {
		if _, err := fmt.Fprintln(env.stdout, printable(line)); err != nil {
			return err
		}
	}
	if !o.out.forPeople() {
		return nil
	}
	last := count(len(lines), "change")
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
