// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/identity"
)

func identityCommand(env environment, c *clientOptions) *cobra.Command {
	return plural("identities", group("identity", "Identities: numbers and the labels that they stand for", identityList(env, c), identityGet(env, c)))
}

func identityList(env environment, c *clientOptions) *cobra.Command {
	var cluster string
	cmd := listCommand(env, "list", "List the identities of every cluster", listing[api.Identity]{
		kind: api.KindIdentityList,
		key:  func(id *api.Identity) string { return strconv.FormatUint(uint64(id.ID), 10) },
		fetch: func(ctx context.Context, _ []string) ([]api.Identity, error) {
			all, err := api.NewClient(c.socket).Identities(ctx)
			return ofCluster(ctx, c, cluster, all, err, func(id *api.Identity) string { return clusterText(id.Cluster, id.ClusterName) })
		},
		columns: []column[api.Identity]{
			{title: "ID", cell: func(id *api.Identity) string { return strconv.FormatUint(uint64(id.ID), 10) }},
			{title: "CLUSTER", cell: func(id *api.Identity) string { return clusterText(id.Cluster, id.ClusterName) }},
			{title: "REFS", cell: referencesText},
			{title: "LABELS", cell: func(id *api.Identity) string { return strings.Join(id.Labels, ";") }},
		},
	})
	cmd.Aliases = []string{"ls"}
	onlyOfCluster(cmd, env, &cluster, "identities")
	return cmd
}

func identityGet(env environment, c *clientOptions) *cobra.Command {
	var out *output
	const short = "Show what an identity stands for, by its number or reserved name"
	cmd := newCommand("get ID", short, func(cmd *cobra.Command, args []string) error {
		id, err := identity.ParseID(args[0])
		if err != nil {
			return &usageError{cause: err}
		}
		found, err := api.NewClient(c.socket).Identity(cmd.Context(), uint32(id))
		if err != nil {
			return err
		}
		return out.show(env.stdout, api.IdentityDetail{Meta: api.MetaOf(api.KindIdentity), Identity: found}, func(t *table) {
			t.row("ID:", strconv.FormatUint(uint64(found.ID), 10))
			if found.Name != "" {
				t.row("Name:", found.Name)
			}
			t.row("Cluster:", clusterText(found.Cluster, found.ClusterName))
			t.row("References:", referencesText(&found))
			t.rows("Labels:", found.Labels)
		})
	})
	someIdentity.completes(cmd, env, false)
	out = outputFlags(cmd)
	return cmd
}

// referencesText is how many workloads of this node have an identity, if that is known.
func referencesText(id *api.Identity) string {
	if id.References == nil {
		return "-"
	}
	return strconv.Itoa(*id.References)
}

// clusterText names a cluster: by name if it is known, else by number.
func clusterText(id uint16, name string) string {
	switch {
	case name != "":
		return name
	case id == 0:
		return "-"
	}
	return strconv.Itoa(int(id))
}
