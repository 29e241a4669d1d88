// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/identity"
)

func identityCommand(env environment, c *clientOptions) *cobra.Command {
	return group("identity", "Identities: numbers and the labels that they stand for", identityList(env, c), identityGet(env, c))
}

func identityList(env environment, c *clientOptions) *cobra.Command {
	var output *format
	cmd := newCommand("list", "List the identities of every cluster", func(cmd *cobra.Command, _ []string) error {
		ids, err := api.NewClient(c.socket).Identities(cmd.Context())
		if err != nil {
			return err
		}
		if *output == formatJSON {
			return printJSON(env.stdout, api.List[api.Identity]{Meta: api.MetaOf(api.KindIdentityList), Items: ids})
		}
		t := newTable(env.stdout, "ID", "CLUSTER", "LABELS")
		for _, id := range ids {
			t.row(strconv.FormatUint(uint64(id.ID), 10), clusterText(id.Cluster, id.ClusterName), strings.Join(id.Labels, ";"))
		}
		return t.flush()
	})
	output = outputFlag(cmd)
	return cmd
}

func identityGet(env environment, c *clientOptions) *cobra.Command {
	var output *format
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
		if *output == formatJSON {
			return printJSON(env.stdout, api.IdentityDetail{Meta: api.MetaOf(api.KindIdentity), Identity: found})
		}
		t := newTable(env.stdout)
		t.row("ID:", strconv.FormatUint(uint64(found.ID), 10))
		if found.Name != "" {
			t.row("Name:", found.Name)
		}
		t.row("Cluster:", clusterText(found.Cluster, found.ClusterName))
		title := "Labels:"
		for _, label := range found.Labels {
			t.row(title, label)
			title = ""
		}
		return t.flush()
	})
	output = outputFlag(cmd)
	return cmd
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
