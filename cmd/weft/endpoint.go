// SPDX-License-Identifier: Apache-2.0

package main

import "github.com/spf13/cobra"

func endpointCommand(env environment, c *clientOptions) *cobra.Command {
	return group("endpoint", "Workloads of this node", endpointAdd(env, c), endpointRemove(env, c))
}
