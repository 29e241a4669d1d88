// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// defaultMeshDir is where the package has the configs of remote clusters.
const defaultMeshDir = "/etc/weft/clustermesh"

// defaultKVStoreFile is where the units have the config of the own cluster's etcd.
const defaultKVStoreFile = "/etc/weft/kvstore.yaml"

const kindClusterChange = "ClusterChange"

// clusterChange says what has become of the config of a cluster.
type clusterChange struct {
	api.Meta
	Change  string         `json:"change"` // added, changed or removed; tried, if nothing was written
	Cluster string         `json:"cluster"`
	File    string         `json:"file"`
	Steps   []kvstore.Step `json:"steps,omitempty"` // of the trial
}

// clusterConfig is what `weft clusters add` writes: the YAML of etcd's own client.
type clusterConfig struct {
	Endpoints             []string `yaml:"endpoints"`
	TrustedCAFile         string   `yaml:"trusted-ca-file,omitempty"`
	CertFile              string   `yaml:"cert-file,omitempty"`
	KeyFile               string   `yaml:"key-file,omitempty"`
	Username              string   `yaml:"username,omitempty"`
	Password              string   `yaml:"password,omitempty"`
	InsecureSkipTLSVerify bool     `yaml:"insecure-skip-tls-verify,omitempty"`
}

// clusterAdd is a `weft clusters add` under way.
type clusterAdd struct {
	etcdOptions
	client       *clientOptions
	config       clusterConfig
	passwordFile string
	force        bool
	dryRun       bool
}

func clustersAdd(env environment, c *clientOptions) *cobra.Command {
	a := &clusterAdd{client: c}
	var out *output
	cmd := newCommand("add NAME", "Try to reach a cluster, and write its config file if that goes well", func(cmd *cobra.Command, args []string) error {
		return a.run(cmd, env, args[0], out)
	})
	flags := cmd.Flags()
	meshDirFlag(flags, &a.mesh)
	flags.DurationVar(&a.timeout, "timeout", 10*time.Second, "how long each step of the trial may take, a `duration`")
	flags.StringSliceVar(&a.config.Endpoints, "endpoint", nil, "`URLs` of the cluster's etcd, such as https://west.example.net:2379")
	flags.StringVar(&a.config.TrustedCAFile, "ca-file", "", "`file` with the certificates that the etcd's is to be signed by")
	flags.StringVar(&a.config.CertFile, "cert-file", "", "`file` with the certificate that we show")
	flags.StringVar(&a.config.KeyFile, "key-file", "", "`file` with its key")
	flags.StringVar(&a.config.Username, "username", "", "`name` of the user of the etcd")
	flags.StringVar(&a.passwordFile, "password-file", "", "`file` with the user's password in its first line; -: standard input")
	flags.BoolVar(&a.config.InsecureSkipTLSVerify, "insecure-skip-tls-verify", false, "accept any certificate of the etcd: for tests alone")
	flags.BoolVar(&a.force, "force", false, "write the config even if the cluster cannot be reached now, or has one already")
	flags.BoolVar(&a.dryRun, "dry-run", false, "try, and write nothing")
	out = outputFlags(cmd)
	return cmd
}

func (a *clusterAdd) run(cmd *cobra.Command, env environment, name string, out *output) error {
	content, err := a.compose(env, name)
	if err != nil {
		return err
	}
	a.mesh = meshDir(cmd.Context(), a.client, a.mesh)
	file := filepath.Join(a.mesh, name)
	change := clusterChange{Meta: api.MetaOf(kindClusterChange), Change: "added", Cluster: name, File: file}
	switch _, err := os.Lstat(file); {
	case err == nil && !a.force && !a.dryRun:
		return fmt.Errorf("%s exists: replace it with --force, or remove it with `weft clusters remove %s`", file, name)
	case err == nil:
		change.Change = "changed"
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	// What is tried is the file as it will be, where no agent looks yet.
	tried, err := os.MkdirTemp("", "weft-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tried)
	trial := diagnosis{Name: name, File: filepath.Join(tried, name)}
	if err := os.WriteFile(trial.File, content, 0o600); err != nil {
		return err
	}
	p := startProgress(env)
	show := func(kvstore.Step) {}
	if out.forPeople() {
		show = stepPrinter(p.above(env.stdout), env.ink(), trial)
	}
	a.diagnose(cmd.Context(), &trial, env, a.ids(cmd.Context(), env), p.steps(name, show))
	p.end()
	change.Steps = trial.Steps
	switch {
	case a.dryRun:
		change.Change = "tried"
	case !trial.Healthy && !a.force:
		change.Change = "refused"
	default:
		if err := writeLike(a.mesh, file, content); err != nil {
			return err
		}
	}
	if err := printClusterChange(env, out, change); err != nil {
		return err
	}
	if !trial.Healthy && (a.dryRun || !a.force) {
		return errUnhealthy
	}
	return nil
}

// ids is what the running agent knows of the ids of clusters: the new one must have one of its own.
func (a *clusterAdd) ids(ctx context.Context, env environment) *testimony {
	heard := hear(ctx, env, a.client.socket)
	heard.silent = true
	return &heard
}

// compose makes the file's content of the options, and checks it.
func (a *clusterAdd) compose(env environment, name string) ([]byte, error) {
	if err := identity.ValidateClusterName(name); err != nil {
		return nil, &usageError{cause: err}
	}
	if a.timeout <= 0 {
		return nil, usagef("--timeout %s: want a duration above 0, such as 10s", a.timeout)
	}
	config := a.config
	for _, file := range []*string{&config.TrustedCAFile, &config.CertFile, &config.KeyFile} {
		if *file == "" {
			continue
		}
		path, err := filepath.Abs(*file) // the agent's working directory is another
		if err != nil {
			return nil, err
		}
		*file = path
	}
	if a.passwordFile != "" {
		password, err := readFirstLine(env, a.passwordFile)
		if err != nil {
			return nil, usagef("--password-file: %w", err)
		}
		config.Password = password
	}
	content, err := yaml.Marshal(config)
	if err != nil {
		return nil, err
	}
	parsed, err := kvstore.ParseConfig(content)
	if err == nil {
		err = parsed.Validate()
	}
	if err != nil {
		return nil, &usageError{cause: err}
	}
	return content, nil
}

// maxPassword bounds what is read of a password's file.
const maxPassword = 4 << 10

func readFirstLine(env environment, file string) (string, error) {
	r := env.stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return "", err
		}
		defer f.Close()
		r = f
	}
	b := make([]byte, maxPassword)
	n, err := r.Read(b)
	line, _, _ := strings.Cut(string(b[:n]), "\n")
	if line = strings.TrimSuffix(line, "\r"); line == "" {
		return "", errors.Join(fmt.Errorf("%s: its first line is empty", file), err)
	}
	return line, nil
}

// writeLike puts a file into a directory in one step. Its group is the directory's, and can read it: in /etc/weft, that is the
// agent's.
func writeLike(dir, file string, content []byte) error {
	info, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s is not there: make it, or name another with --clustermesh-config", dir)
	}
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".new-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // after the rename there is nothing
	_, err = f.Write(content)
	if stat, ok := info.Sys().(*syscall.Stat_t); ok && stat.Gid != uint32(os.Getgid()) {
		err = errors.Join(err, f.Chown(-1, int(stat.Gid)))
	}
	if err := errors.Join(err, f.Chmod(0o640), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), file)
}

func printClusterChange(env environment, out *output, change clusterChange) error {
	text := map[string]string{
		"added": "is in %s: a running agent follows it by itself", "changed": "is changed in %s: a running agent takes it by itself",
		"tried": "is not written: %s would be its file", "refused": "is not written to %s: mend what failed, or give --force",
		"removed": "is removed from %s: a running agent withdraws what it claimed",
	}[change.Change]
	sentence := fmt.Sprintf("cluster %s "+text, change.Cluster, change.File)
	return out.result(env.stdout, change, sentence, change.Cluster, change.Change, change.File)
}

// meshDirFlag adds the option for the directory that meshDir finds.
func meshDirFlag(flags *pflag.FlagSet, dir *string) {
	flags.StringVar(dir, "clustermesh-config", "", "`directory` with an etcd client config for each remote cluster (default: the running agent's, else "+
		defaultMeshDir+")")
}

// meshDir is the directory with the configs of clusters: the one that is given, else the running agent's, else the usual one.
func meshDir(ctx context.Context, c *clientOptions, given string) string {
	if given == "" {
		given, _ = agentConfigs(ctx, c.socket)
	}
	return cmp.Or(given, defaultMeshDir)
}

func clustersRemove(env environment, c *clientOptions) *cobra.Command {
	var (
		out *output
		dir string
	)
	cmd := newCommand("remove NAME", "Remove the config file of a cluster", func(cmd *cobra.Command, args []string) error {
		if err := identity.ValidateClusterName(args[0]); err != nil {
			return &usageError{cause: err}
		}
		dir := meshDir(cmd.Context(), c, dir)
		file := filepath.Join(dir, args[0])
		content, err := os.ReadFile(file)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return fmt.Errorf("cluster %s has no config in %s: `weft clusters list` shows which are followed, --clustermesh-config names another directory", args[0], dir)
		case err != nil:
			return err
		case !kvstore.IsConfig(content):
			return fmt.Errorf("%s is no config of a cluster: remove it by hand if you mean it", file)
		}
		if err := os.Remove(file); err != nil {
			return err
		}
		return printClusterChange(env, out, clusterChange{Meta: api.MetaOf(kindClusterChange), Change: "removed", Cluster: args[0], File: file})
	})
	cmd.Aliases = []string{"rm"}
	someCluster.completes(cmd, env, false)
	meshDirFlag(cmd.Flags(), &dir)
	out = outputFlags(cmd)
	return cmd
}

// clustersWatch is `clusters list --watch`, by the name that people look for.
func clustersWatch(env environment, c *clientOptions) *cobra.Command {
	cmd := clustersList(env, c)
	cmd.Use, cmd.Short, cmd.Aliases = "watch", "List the clusters, and go on with what changes", nil
	if err := cmd.Flags().Set("watch", "true"); err != nil {
		panic(err) // the flag is a truth value
	}
	return cmd
}
