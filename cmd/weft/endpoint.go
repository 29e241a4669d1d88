// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/identity"
)

func endpointCommand(env environment, c *clientOptions) *cobra.Command {
	return plural("endpoints", group("endpoint", "Workloads of this node", endpointList(env, c), endpointGet(env, c), endpointAdd(env, c), endpointRemove(env, c)))
}

// endpointName is how an endpoint is called: its namespace and its name.
func endpointName(e *api.Endpoint) string { return e.Namespace + "/" + e.Name }

func endpointList(env environment, c *clientOptions) *cobra.Command {
	cmd := listCommand(env, "list", "List the workloads of this node", listing[api.Endpoint]{
		kind: api.KindEndpointList,
		key:  endpointName,
		fetch: func(ctx context.Context, _ []string) ([]api.Endpoint, error) {
			status, err := api.NewClient(c.socket).Status(ctx)
			return status.Endpoints.Items, err
		},
		columns: []column[api.Endpoint]{
			{title: "ENDPOINT", cell: endpointName},
			{title: "IPS", cell: func(e *api.Endpoint) string { return joinAddrs(e.IPs) }},
			{title: "IDENTITY", cell: func(e *api.Endpoint) string { return identity.ID(e.Identity).String() }},
			{title: "SOURCE", cell: func(e *api.Endpoint) string { return e.Source }},
			{title: "STATE", cell: func(e *api.Endpoint) string { return e.State }},
			{title: "SINCE", cell: func(e *api.Endpoint) string { return e.Since.Format(time.RFC3339) }, wide: true},
			{title: "LABELS", cell: func(e *api.Endpoint) string { return strings.Join(e.Labels, ";") }},
		},
	})
	cmd.Aliases = []string{"ls"}
	return cmd
}

func endpointGet(env environment, c *clientOptions) *cobra.Command {
	var out *output
	cmd := newCommand("get NAME|ADDRESS", "Show a workload of this node, by NAMESPACE/NAME or by an address of it", func(cmd *cobra.Command, args []string) error {
		status, err := api.NewClient(c.socket).Status(cmd.Context())
		if err != nil {
			return err
		}
		e, err := findEndpoint(status.Endpoints.Items, args[0])
		if err != nil {
			return err
		}
		return out.show(env.stdout, api.EndpointDetail{Meta: api.MetaOf(api.KindEndpoint), Endpoint: *e}, func(t *table) {
			t.row("Name:", endpointName(e))
			t.row("IPs:", joinAddrs(e.IPs))
			t.row("Identity:", strconv.FormatUint(uint64(e.Identity), 10))
			t.row("Source:", strings.TrimSpace(e.Source+" "+e.Origin))
			t.row("State:", e.State)
			if e.Reason != "" {
				t.row("Reason:", e.Reason)
			}
			t.row("Since:", e.Since.Format(time.RFC3339))
			t.rows("Labels:", e.Labels)
		})
	})
	someEndpoint.completes(cmd, env, false)
	out = outputFlags(cmd)
	return cmd
}

// findEndpoint finds an endpoint by its name, with or without the namespace "default", or by an address.
func findEndpoint(all []api.Endpoint, text string) (*api.Endpoint, error) {
	addr, _ := netip.ParseAddr(text)
	name := text
	if !strings.Contains(name, "/") {
		name = "default/" + name
	}
	for i := range all {
		if e := &all[i]; endpointName(e) == name || addr.IsValid() && slices.Contains(e.IPs, addr.Unmap()) {
			return e, nil
		}
	}
	return nil, fmt.Errorf("no workload of this node is called %q or has that address: `weft endpoint list` shows all", text)
}

func joinAddrs(addrs []netip.Addr) string { return strings.Join(texts(addrs), ",") }
