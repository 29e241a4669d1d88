// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
)

func nodeCommand(env environment, c *clientOptions) *cobra.Command {
	var output *format
	list := newCommand("list", "List the nodes of every cluster", func(cmd *cobra.Command, _ []string) error {
		nodes, err := api.NewClient(c.socket).Nodes(cmd.Context())
		if err != nil {
			return err
		}
		if *output == formatJSON {
			return printJSON(env.stdout, api.List[api.Node]{Meta: api.MetaOf(api.KindNodeList), Items: nodes})
		}
		t := newTable(env.stdout, "NAME", "CLUSTER", "ADDRESSES", "POD CIDRS", "KEY")
		for _, n := range nodes {
			name := n.Cluster + "/" + n.Name
			if n.Local {
				name += " (local)"
			}
			var addresses []string
			for _, a := range n.Addresses {
				addresses = append(addresses, a.IP.String())
			}
			t.row(name, strconv.FormatUint(uint64(n.ClusterID), 10), orDash(strings.Join(addresses, ",")),
				orDash(strings.Join(texts(n.PodCIDRs), ",")), strconv.Itoa(int(n.EncryptKey)))
		}
		return t.flush()
	})
	output = outputFlag(list)
	return group("node", "The nodes of every cluster", list)
}
