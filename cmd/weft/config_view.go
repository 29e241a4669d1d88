// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/weftmesh/weft/api"
)

// listOptions lists the options of a command with their values and where these come from, by name.
func listOptions(flags *pflag.FlagSet) []api.ConfigOption {
	var options []api.ConfigOption
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" {
			options = append(options, api.ConfigOption{Name: f.Name, Value: f.Value.String(), Origin: originOf(f), Default: f.DefValue})
		}
	})
	return options
}

// options are those that the agent runs with, and what it found where nothing was said.
func (a *agent) options() api.Config {
	c := api.Config{Meta: api.MetaOf(api.KindConfig), File: a.cfg.config, Items: []api.ConfigOption{}}
	for _, o := range a.cfg.options {
		switch {
		case o.Name == "log-level" && a.level.Level() != a.cfg.logLevel:
			o.Value, o.Origin = a.level.Level().String(), "weft log-level"
		case o.Name == "node-ip" && o.Value == "":
			ips := &list[netip.Addr]{values: &a.cfg.nodeIPs, format: netip.Addr.String}
			o.Value, o.Origin = ips.String(), "found on the devices"
		case o.Name == "node-name" && o.Origin == "default":
			o.Origin = "the host's name"
		}
		c.Items = append(c.Items, o)
	}
	return c
}

func configCommand(env environment, c *clientOptions) *cobra.Command {
	origin := false
	view := listCommand(env, "view", "List the options that the running agent goes by", listing[api.ConfigOption]{
		kind: api.KindConfig,
		key:  func(o *api.ConfigOption) string { return o.Name },
		fetch: func(ctx context.Context, _ []string) ([]api.ConfigOption, error) {
			answer, err := api.NewClient(c.socket).Config(ctx)
			return answer.Items, err
		},
		columns: []column[api.ConfigOption]{
			{title: "OPTION", cell: func(o *api.ConfigOption) string { return o.Name }},
			{title: "VALUE", cell: func(o *api.ConfigOption) string { return orDash(o.Value) }},
			{title: "ORIGIN", when: &origin, cell: func(o *api.ConfigOption) string { return o.Origin }},
			{title: "DEFAULT", wide: true, cell: func(o *api.ConfigOption) string { return orDash(o.Default) }},
		},
	})
	view.Flags().BoolVar(&origin, "origin", false, "say of each where its value comes from: flag, environment, file and line, or default")
	return group("config", "How the agent is configured", view)
}

func logLevelCommand(env environment, c *clientOptions) *cobra.Command {
	var out *output
	cmd := newCommand("log-level", "Show or change the least level of what the running agent logs", func(cmd *cobra.Command, args []string) error {
		client := api.NewClient(c.socket)
		answer, err := client.LogLevel(cmd.Context())
		if len(args) > 0 {
			var level slog.Level
			if err := level.UnmarshalText([]byte(args[0])); err != nil {
				return usagef("log-level %s: want debug, info, warn or error", args[0])
			}
			answer, err = client.SetLogLevel(cmd.Context(), level)
		}
		if err != nil {
			return err
		}
		return out.show(env.stdout, answer, func(t *table) { t.row(fmt.Sprint(answer.Level)) })
	})
	cmd.Use = "log-level [LEVEL]"
	cmd.ValidArgsFunction = cobra.FixedCompletions([]cobra.Completion{"debug", "info", "warn", "error"}, cobra.ShellCompDirectiveNoFileComp)
	out = outputFlags(cmd)
	return cmd
}
