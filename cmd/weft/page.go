// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
)

func pageCommand(env environment, c *clientOptions) *cobra.Command {
	var out *output
	cmd := newCommand("page", "Print the address of the agent's page, with its token", func(cmd *cobra.Command, _ []string) error {
		page, err := api.NewClient(c.socket).Page(cmd.Context())
		if err != nil {
			return err
		}
		return out.show(env.stdout, page, func(t *table) { t.row(page.URL) })
	})
	out = outputFlags(cmd)
	return cmd
}
