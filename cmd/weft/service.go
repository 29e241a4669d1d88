// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
)

func serviceCommand(env environment, c *clientOptions) *cobra.Command {
	list := listCommand(env, "list", "List the services that the clusters share", listing[api.Service]{
		kind: api.KindServiceList,
		key:  func(s *api.Service) string { return s.Cluster + "/" + s.Namespace + "/" + s.Name },
		fetch: func(ctx context.Context, _ []string) ([]api.Service, error) {
			return api.NewClient(c.socket).Services(ctx)
		},
		columns: []column[api.Service]{
			{title: "NAME", cell: func(s *api.Service) string { return s.Namespace + "/" + s.Name }},
			{title: "CLUSTER", cell: func(s *api.Service) string { return s.Cluster }},
			{title: "FRONTENDS", cell: func(s *api.Service) string { return frontends(s.Frontends) }},
			{title: "BACKENDS", cell: func(s *api.Service) string { return strconv.Itoa(len(s.Backends)) }},
			{title: "SHARED", cell: func(s *api.Service) string { return strconv.FormatBool(s.Shared) }},
		},
	})
	list.Aliases = []string{"ls"}
	return group("service", "The services that the clusters share", list)
}

// frontends shows each address with its ports.
func frontends(addresses []api.ServiceAddress) string {
	var texts []string
	for _, a := range addresses {
		for _, p := range a.Ports {
			texts = append(texts, fmt.Sprintf("%s/%s", addressText(a.IP, p.Port), p.Protocol))
		}
		if len(a.Ports) == 0 {
			texts = append(texts, a.IP.String())
		}
	}
	return orDash(strings.Join(texts, ","))
}
