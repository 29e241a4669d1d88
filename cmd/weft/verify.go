// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/mesh"
)

// verifyTimeout bounds how long a comparison is waited for. A million entries take a few seconds.
const verifyTimeout = 2 * time.Minute

func verifyCommand(env environment, c *clientOptions) *cobra.Command {
	var (
		out    *output
		repair bool
	)
	cmd := newCommand("verify", "Compare what the clusters say, what is known and what is in the kernel", func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), verifyTimeout)
		defer cancel()
		p := startProgress(env)
		p.say("comparing the clusters, the tables and the kernel")
		v, err := api.NewClient(c.socket).Verify(ctx, repair, func(at api.VerificationProgress) {
			if at.Total > 0 {
				p.didOf(at.Done, at.Total, "entry")
			}
		})
		p.end()
		if err != nil {
			return err
		}
		if out.forPrograms() {
			err = out.object(env.stdout, v)
		} else {
			err = printVerification(env, out, &v)
		}
		if err == nil && !v.Clean() {
			return errUnhealthy
		}
		return err
	})
	out = outputFlags(cmd)
	cmd.Flags().BoolVar(&repair, "repair", false, "make right what differs")
	return cmd
}

func printVerification(env environment, out *output, v *api.Verification) error {
	if len(v.Differences) > 0 {
		t := out.table(env.stdout, "KIND", "OBJECT", "WANT", "HAVE", "REPAIRED")
		for _, d := range v.Differences {
			repaired := "no"
			if d.Repaired {
				repaired = "yes"
			}
			t.row(d.Kind, d.Object, d.Want, d.Have, repaired)
		}
		if err := t.flush(); err != nil {
			return err
		}
	}
	if !out.forPeople() {
		return nil
	}
	next := ""
	if !v.Clean() {
		next = ": `weft verify --repair` makes right what this node can"
	}
	for _, d := range v.Differences {
		if d.Kind == kindOfEtcd {
			next += "; see `weft troubleshoot kvstore " + printable(d.Object) + "`"
		}
	}
	_, err := fmt.Fprintf(env.stdout, "%s compared, %s%s\n", count(v.Compared, "object"), count(len(v.Differences)+v.More, "difference"), next)
	return err
}

// verify compares everything from the clusters to the kernel, and tells meanwhile how far it is.
func (a *agent) verify(ctx context.Context, repair bool, tell func(done, total int)) (api.Verification, error) {
	report, err := a.datapath.VerifyTelling(ctx, repair, tell)
	if err != nil {
		return api.Verification{}, fmt.Errorf("compare with the kernel: %w", err)
	}
	v := api.Verification{Meta: api.MetaOf(api.KindVerification), Compared: report.Compared, More: report.More, Differences: []api.Difference{}}
	for _, r := range a.mesh.Status() {
		v.Compared++
		if d, differs := clusterDifference(&r); differs {
			v.Differences = append(v.Differences, d)
		}
	}
	for _, d := range report.Differences {
		v.Differences = append(v.Differences, api.Difference{Kind: d.Kind, Object: d.Object, Want: d.Want, Have: d.Have, Repaired: d.Repaired})
	}
	return v, nil
}

// kindOfEtcd is the kind of what differs at the etcd of a cluster.
const kindOfEtcd = "etcd"

// clusterDifference tells of a cluster of which it is not known whether the table has all that it says. That the table
// equals what was listed is compared by each connection itself, at its own interval.
func clusterDifference(r *mesh.RemoteStatus) (api.Difference, bool) {
	d := api.Difference{Kind: kindOfEtcd, Object: r.Name, Want: "listed and followed", Have: string(r.State)}
	if r.LastError != "" {
		d.Have += ": " + r.LastError
	}
	return d, r.State != mesh.Ready
}
