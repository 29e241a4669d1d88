// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

const kindTroubleshooting = "Troubleshooting"

// troubleshooting is all that was tried, as JSON.
type troubleshooting struct {
	api.Meta
	Healthy bool        `json:"healthy"`
	Items   []diagnosis `json:"items"`
}

// diagnosis is what was tried with one config.
type diagnosis struct {
	Name    string         `json:"name"` // of the cluster; of the file, if it is the own cluster's
	Own     bool           `json:"own"`
	File    string         `json:"file"`
	Healthy bool           `json:"healthy"` // no step failed
	Steps   []kvstore.Step `json:"steps"`
}

// rows has each step that was tried in a row.
func (r *troubleshooting) rows(t *table) {
	for i := range r.Items {
		d := &r.Items[i]
		for _, s := range d.Steps {
			t.row(d.Name, s.Endpoint, string(s.Outcome), s.Name, s.Message, s.Advice)
		}
	}
}

func troubleshootCommand(env environment, c *clientOptions) *cobra.Command {
	return group("troubleshoot", "Try what does not work, step by step", troubleshootKVStore(env, c))
}

func troubleshootKVStore(env environment, c *clientOptions) *cobra.Command {
	var (
		out *output
		o   *etcdOptions
	)
	cmd := newCommand("kvstore", "Try to reach and read the etcds of the mesh, from the config to the keys", func(cmd *cobra.Command, args []string) error {
		heard := hear(cmd.Context(), env, c.socket)
		if o.mesh == "" && o.config == "" {
			o.mesh, o.config = heard.dir, heard.file
		}
		targets, err := o.targets(args)
		if err != nil {
			return err
		}
		result := troubleshooting{Meta: api.MetaOf(kindTroubleshooting), Healthy: true, Items: []diagnosis{}}
		p := startProgress(env)
		defer p.end()
		stdout := p.above(env.stdout)
		for i, d := range targets {
			show := func(kvstore.Step) {}
			if out.forPeople() {
				show = stepPrinter(stdout, env.ink(), d)
			}
			show = p.steps(fmt.Sprintf("%s, %d of %s", d.Name, i+1, count(len(targets), "config")), show)
			o.diagnose(cmd.Context(), &d, env, &heard, show)
			result.Healthy = result.Healthy && d.Healthy
			result.Items = append(result.Items, d)
		}
		if out.forPeople() {
			err = printVerdict(stdout, result.Items)
		} else {
			err = out.show(stdout, result, result.rows)
		}
		if err == nil && !result.Healthy {
			err = errUnhealthy
		}
		return err
	})
	cmd.Use, cmd.Aliases = "kvstore [CLUSTER|FILE]...", []string{"clustermesh"}
	cmd.Long = "Try to reach and read the etcds named by --clustermesh-config and --kvstore-config, by default those of the running agent, or\n" +
		"those of some clusters or config files only, one step at a time: config, name, TCP, TLS and certificates, authentication,\n" +
		"authorisation, server; and tell what the running agent says of the cluster. Without an agent all but that is tried, too."
	someCluster.completes(cmd, env, true)
	o = newEtcdOptions(cmd.Flags())
	cmd.Flags().Lookup("timeout").Usage = "how long each step may take, a `duration`"
	out = outputFlags(cmd)
	return cmd
}

// targets are the configs that the arguments name, by default all.
func (o *etcdOptions) targets(args []string) ([]diagnosis, error) {
	if o.timeout <= 0 {
		return nil, usagef("--timeout %s: want a duration above 0, such as 10s", o.timeout)
	}
	var targets []diagnosis
	for _, arg := range args {
		target := diagnosis{Name: filepath.Base(arg), File: arg}
		if o.mesh != "" && identity.ValidateClusterName(arg) == nil {
			target.File = filepath.Join(o.mesh, arg)
		}
		target.Own = target.File == o.config || identity.ValidateClusterName(target.Name) != nil
		targets = append(targets, target)
	}
	if len(args) > 0 {
		return targets, nil
	}
	if o.config != "" {
		targets = append(targets, diagnosis{Name: filepath.Base(o.config), File: o.config, Own: true})
	}
	if o.mesh != "" {
		remotes, err := configsIn(o.mesh)
		if err != nil {
			return nil, err
		}
		targets = append(targets, remotes...)
	}
	if len(targets) == 0 && o.mesh != "" {
		return nil, fmt.Errorf("no etcd client config in %s: a cluster's config is a file of its name that holds the text \"endpoints:\"", o.mesh)
	}
	if len(targets) == 0 {
		return nil, usagef("no etcd is named, and no agent answers that has some: give --clustermesh-config DIRECTORY, --kvstore-config FILE, or a file")
	}
	return targets, nil
}

// configsIn finds the files of a directory that the agent takes for configs, and those that it cannot read.
func configsIn(dir string) ([]diagnosis, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, usagef("--clustermesh-config: %w", err)
	}
	var targets []diagnosis
	for _, entry := range entries {
		file := filepath.Join(dir, entry.Name())
		info, err := os.Stat(file)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !info.Mode().IsRegular() {
			continue
		}
		if content, err := os.ReadFile(file); err == nil && !kvstore.IsConfig(content) {
			continue
		}
		targets = append(targets, diagnosis{Name: entry.Name(), File: file})
	}
	return targets, nil
}

// diagnose tries one config, and keeps and shows each step.
func (o *etcdOptions) diagnose(ctx context.Context, d *diagnosis, env environment, heard *testimony, show func(kvstore.Step)) {
	d.Healthy, d.Steps = true, []kvstore.Step{}
	report := func(s kvstore.Step) {
		d.Healthy = d.Healthy && s.Outcome != kvstore.StepFailed
		d.Steps = append(d.Steps, s)
		show(s)
	}
	defer heard.about(d, report)
	cfg, ok := checkConfig(d, report)
	if !ok {
		return
	}
	client := kvstore.Diagnose(ctx, kvstore.Diagnosis{Config: cfg, Key: identity.HeartbeatKey, Timeout: o.timeout, Report: report})
	if client == nil {
		return
	}
	defer client.Close()
	r := reading{client: client, timeout: o.timeout, now: env.now, heard: heard, report: report}
	r.read(ctx, d)
}

// checkConfig reads the config.
func checkConfig(d *diagnosis, report func(kvstore.Step)) (kvstore.Config, bool) {
	step := kvstore.Step{Name: "config", Outcome: kvstore.StepFailed}
	cfg, err := kvstore.LoadConfig(d.File)
	invalid := identity.ValidateClusterName(d.Name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		step.Message, step.Advice = err.Error(), "name a cluster of --clustermesh-config, or an existing file"
	case err != nil:
		step.Message, step.Advice = err.Error(), "correct the file: it is the YAML of etcd's own client, see docs/kvstore.md"
	case invalid != nil && !d.Own:
		step.Message, step.Advice = invalid.Error(), "rename the file to the cluster's name: the agent passes it over"
	default:
		step.Outcome, step.Message = kvstore.StepPassed, fmt.Sprintf("%s: %s", d.File, strings.Join(cfg.Endpoints, ", "))
	}
	report(step)
	return cfg, step.Outcome == kvstore.StepPassed
}

var marks = map[kvstore.Outcome]mark{kvstore.StepPassed: passed, kvstore.StepWarning: warned, kvstore.StepFailed: failed}

// steps tells how many steps of something have been tried, and shows each.
func (p *progress) steps(of string, show func(kvstore.Step)) func(kvstore.Step) {
	n := 0
	tell := func() { p.say("%s: %s tried", of, count(n, "step")) }
	tell()
	return func(s kvstore.Step) {
		n++
		tell()
		show(s)
	}
}

// stepPrinter prints each step as it ends, below a line for the config and one for each endpoint if there are several.
func stepPrinter(w io.Writer, ink ink, d diagnosis) func(kvstore.Step) {
	title := "cluster " + printable(d.Name)
	if d.Own {
		title = "own cluster"
	}
	fmt.Fprintf(w, "%s (%s)\n", title, printable(d.File))
	endpoint := ""
	return func(s kvstore.Step) {
		if s.Endpoint != "" && s.Endpoint != endpoint {
			endpoint = s.Endpoint
			fmt.Fprintf(w, "  %s\n", printable(endpoint))
		}
		fmt.Fprintf(w, "  %s %s: %s\n", ink.mark(marks[s.Outcome]), s.Name, printable(s.Message))
		for _, detail := range s.Details {
			fmt.Fprintf(w, "      %s\n", printable(detail))
		}
		if s.Advice != "" {
			fmt.Fprintf(w, "    → %s\n", printable(s.Advice))
		}
	}
}

// printVerdict sums up.
func printVerdict(w io.Writer, items []diagnosis) error {
	var bad []string
	for _, d := range items {
		if !d.Healthy {
			bad = append(bad, printable(d.Name))
		}
	}
	verdict := "all can be read"
	if len(bad) > 0 {
		verdict = "not well: " + strings.Join(bad, ", ")
	}
	_, err := fmt.Fprintf(w, "%s, %s\n", count(len(items), "config"), verdict)
	return err
}
