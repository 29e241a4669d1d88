// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
)

func nodeCommand(env environment, c *clientOptions) *cobra.Command {
	var cluster string
	list := listCommand(env, "list", "List the nodes of every cluster", listing[api.Node]{
		kind: api.KindNodeList,
		key:  func(n *api.Node) string { return n.Cluster + "/" + n.Name },
		fetch: func(ctx context.Context, _ []string) ([]api.Node, error) {
			nodes, err := api.NewClient(c.socket).Nodes(ctx)
			return ofCluster(ctx, c, cluster, nodes, err, func(n *api.Node) string { return n.Cluster })
		},
		columns: []column[api.Node]{
			{title: "NAME", cell: nodeText},
			{title: "CLUSTER ID", cell: func(n *api.Node) string { return strconv.FormatUint(uint64(n.ClusterID), 10) }},
			{title: "ADDRESSES", cell: func(n *api.Node) string {
				var addresses []string
				for _, a := range n.Addresses {
					addresses = append(addresses, a.IP.String())
				}
				return orDash(strings.Join(addresses, ","))
			}},
			{title: "POD CIDRS", cell: func(n *api.Node) string { return orDash(strings.Join(texts(n.PodCIDRs), ",")) }},
			{title: "KEY", cell: func(n *api.Node) string { return strconv.Itoa(int(n.EncryptKey)) }},
		},
	})
	list.Aliases = []string{"ls"}
	onlyOfCluster(list, env, &cluster, "nodes")
	return plural("nodes", group("node", "The nodes of every cluster", list))
}

func nodeText(n *api.Node) string {
	name := n.Cluster + "/" + n.Name
	if n.Local {
		name += " (local)"
	}
	return name
}
