// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/kvstore"
)

const kindBundle = "Bundle"

// gathered are the commands whose output makes a bundle, by the name of the file that it becomes. What is not here is not in
// a bundle: no config of an etcd, no certificate, no key, no environment, and, unless asked for, no address of a workload.
var gathered = []struct{ file, args string }{
	{"version.json", "version -o json"},
	{"version-agent.json", "version --agent -o json"},
	{"status.txt", "status --all-controllers"},
	{"status.json", "status -o json"},
	{"config.json", "config view -o json"},
	{"clusters-rejected.json", "clusters rejected -o json"},
	{"nodes.json", "node list -o json"},
	{"identities.json", "identity list -o json"},
	{"services.json", "service list -o json"},
	{"conflicts.json", "ip conflicts -o json"},
	{"metrics.json", "metrics list -o json"},
	{"counters.json", "bpf counters list -o json"},
	{"verify.json", "verify -o json"},
	{"diagnose.json", "diagnose -o json"},
	{"operator-status.json", "operator status -o json"},
}

// gatheredAddresses is what a bundle has if the addresses of workloads are asked for, too.
var gatheredAddresses = []struct{ file, args string }{
	{"ips.json", "ip list -o json"},
	{"ipcache.json", "bpf ipcache list -o json"},
	{"flows.json", "flows -o json"},
}

// gatheredProfiles are profiles of the agent's process: where its goroutines are, and where its memory was asked for.
var gatheredProfiles = []struct {
	file, name string
	debug      int
}{{"goroutines.txt", "goroutine", 2}, {"heap.pb.gz", "heap", 0}}

// gatheredFiles are files of the machine.
var gatheredFiles = []struct{ file, path string }{{"os-release", "/etc/os-release"}, {"kernel", "/proc/version"}}

// bundleEntry says where a file of a bundle comes from.
type bundleEntry struct {
	File   string `json:"file"`
	Source string `json:"source"`
	Exit   int    `json:"exit"`
	Bytes  int    `json:"bytes"`
	Error  string `json:"error,omitempty"`
}

// bundle is what is gathered.
type bundle struct {
	api.Meta
	Path  string        `json:"path"`
	At    time.Time     `json:"at"`
	Items []bundleEntry `json:"items"`

	files   [][]byte // of the items
	secrets []string // that must be in none
}

func gatherCommand(env environment, c *clientOptions) *cobra.Command {
	var (
		out       *output
		file      string
		addresses bool
	)
	cmd := newCommand("gather", "Write what others need to help into one file, without secrets", func(cmd *cobra.Command, _ []string) error {
		b := &bundle{Meta: api.MetaOf(kindBundle), At: env.now().UTC()}
		b.Path = cmp.Or(file, "weft-"+b.At.Format("20060102-150405")+".tar.gz")
		p := startProgress(env)
		b.gather(cmd.Context(), env, c, addresses, p)
		p.end()
		if err := cmd.Context().Err(); err != nil {
			return err // what is gathered has holes
		}
		if err := b.write(); err != nil {
			return err
		}
		if out.forPrograms() {
			return out.object(env.stdout, b)
		}
		return b.print(env.stdout, out)
	})
	cmd.Flags().StringVar(&file, "file", "", "`file` to write (default: weft-TIME.tar.gz in this directory)")
	cmd.Flags().BoolVar(&addresses, "addresses", false, "with the addresses of workloads, and the flows that the agent remembers")
	out = outputFlags(cmd)
	return cmd
}

// gather asks for everything. What cannot be had is an entry with an error.
func (b *bundle) gather(ctx context.Context, env environment, c *clientOptions, addresses bool, p *progress) {
	client := api.NewClient(c.socket)
	config, _ := client.Config(ctx) // without an agent there are those of the files that are where they usually are
	b.secrets = knownSecrets(append(config.Items, usualConfigs(env)...))
	commands := gathered
	if addresses {
		commands = slices.Concat(commands, gatheredAddresses)
	}
	all := len(commands) + len(gatheredProfiles) + len(gatheredFiles)
	next := func(source string) {
		p.say("%s", source)
		p.didOf(len(b.Items), all, "file")
	}
	for _, g := range commands {
		next("weft " + g.args)
		var stdout, stderr bytes.Buffer
		quiet := env
		quiet.ctx, quiet.stdout, quiet.stderr, quiet.signals = ctx, &stdout, &stderr, nil
		args := append(strings.Fields(g.args), "--api-socket", c.socket, "--bpffs", c.bpffs)
		code := run(quiet, args)
		b.add(bundleEntry{File: g.file, Source: "weft " + g.args, Exit: code, Error: strings.TrimSpace(stderr.String())}, stdout.Bytes())
	}
	for _, g := range gatheredProfiles {
		next("profile " + g.name)
		content, err := readProfile(ctx, client, g.name, g.debug)
		b.add(bundleEntry{File: g.file, Source: "profile " + g.name, Error: errorText(err)}, content)
	}
	for _, f := range gatheredFiles {
		content, err := os.ReadFile(f.path)
		b.add(bundleEntry{File: f.file, Source: f.path, Error: errorText(err)}, content)
	}
}

func readProfile(ctx context.Context, client *api.Client, name string, debug int) ([]byte, error) {
	r, err := client.Profile(ctx, name, debug)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// add takes an entry, without what must not be in it.
func (b *bundle) add(e bundleEntry, content []byte) {
	if !strings.HasSuffix(e.File, ".gz") { // a profile has names of functions alone
		content = b.clean(content)
	}
	e.Error, e.Bytes = string(b.clean([]byte(e.Error))), len(content)
	b.Items, b.files = append(b.Items, e), append(b.files, content)
}

var (
	pemBlock = regexp.MustCompile(`-----BEGIN [A-Z0-9 ]*-----[^-]*(-----END [A-Z0-9 ]*-----)?`)
	userInfo = regexp.MustCompile(`://[^/\s"@]+@`)
)

// clean takes out what may be a secret, in case that an error quotes one: nothing that is gathered has any by itself.
func (b *bundle) clean(content []byte) []byte {
	for _, secret := range b.secrets {
		content = bytes.ReplaceAll(content, []byte(secret), []byte("<redacted>"))
	}
	content = pemBlock.ReplaceAll(content, []byte("<redacted>"))
	return userInfo.ReplaceAll(content, []byte("://<redacted>@"))
}

// usualConfigs are the configs of etcds that an operator or an agent that does not answer most likely goes by.
func usualConfigs(env environment) []api.ConfigOption {
	options := []api.ConfigOption{{Name: "kvstore-config", Value: defaultKVStoreFile}, {Name: "clustermesh-config", Value: defaultMeshDir}}
	for _, o := range options[:2] {
		if value, ok := env.lookup(environmentName(o.Name)); ok {
			options = append(options, api.ConfigOption{Name: o.Name, Value: value})
		}
	}
	return options
}

// knownSecrets are the passwords in the configs of etcds that these options name, as they are and as JSON has them.
func knownSecrets(options []api.ConfigOption) (secrets []string) {
	var files []string
	for _, o := range options {
		switch {
		case o.Value == "":
		case o.Name == "kvstore-config":
			files = append(files, o.Value)
		case o.Name == "clustermesh-config":
			found, _ := filepath.Glob(filepath.Join(o.Value, "*")) // the pattern is a path
			files = append(files, found...)
		}
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil || !kvstore.IsConfig(content) {
			continue
		}
		var config struct {
			Password string `yaml:"password"`
		}
		if yaml.Unmarshal(content, &config) != nil || config.Password == "" {
			continue
		}
		secrets = append(secrets, config.Password)
		if quoted, err := json.Marshal(config.Password); err == nil {
			secrets = append(secrets, string(quoted[1:len(quoted)-1]))
		}
	}
	slices.SortFunc(secrets, func(a, b string) int { return len(b) - len(a) }) // one may be a part of another
	return slices.Compact(secrets)
}

// write makes the file, which only its owner can read.
func (b *bundle) write() (err error) {
	manifest, err := json.MarshalIndent(b, "", "  ")
	if err != nil {
		return err
	}
	f, err := os.OpenFile(b.Path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			os.Remove(b.Path)
		}
	}()
	compressed := gzip.NewWriter(f)
	archive := tar.NewWriter(compressed)
	put := func(name string, content []byte) error {
		header := &tar.Header{Name: "weft/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: b.At}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		_, err := archive.Write(content)
		return err
	}
	err = put("manifest.json", manifest)
	for i, item := range b.Items {
		err = errors.Join(err, put(item.File, b.files[i]))
	}
	return errors.Join(err, archive.Close(), compressed.Close())
}

// print says what is in the bundle, so that who hands it on knows.
func (b *bundle) print(w io.Writer, out *output) error {
	t := out.table(w)
	for _, item := range b.Items {
		note := item.Error
		if note == "" {
			note = fmt.Sprintf("%d bytes", item.Bytes)
		}
		t.row(item.File, item.Source, note)
	}
	if err := t.flush(); err != nil || !out.forPeople() {
		return err
	}
	_, err := fmt.Fprintf(w, "\nAll of it is in %s. Look into it before you hand it on: it has the names of clusters, nodes and labels.\n", printable(b.Path))
	return err
}
