// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// Kinds of the objects that come from an etcd rather than from the agent.
const (
	kindKey       = "KVStoreKey"
	kindKeyEvent  = "KVStoreEvent"
	kindLeaseList = "KVStoreLeaseList"
	kindDeletion  = "KVStoreDeletion"
	kindWriting   = "KVStoreWriting"
)

// commandQPS lets a command go at etcd's own pace: unlike an agent, it is one and soon ends.
const commandQPS = 10_000

// etcdOptions name an etcd, or several.
type etcdOptions struct {
	config  string // file: the own cluster's etcd
	mesh    string // directory: the etcds of remote clusters
	cluster string // one of mesh
	timeout time.Duration
	asked   bool // a running agent was asked for what is not given
}

func newEtcdOptions(flags *pflag.FlagSet) *etcdOptions {
	o := new(etcdOptions)
	o.flags(flags)
	flags.StringVar(&o.mesh, "clustermesh-config", "", "`directory` with an etcd client config for each remote cluster")
	return o
}

// flags adds the options that name the own cluster's etcd.
func (o *etcdOptions) flags(flags *pflag.FlagSet) {
	flags.StringVar(&o.config, "kvstore-config", "", "etcd client config of the own cluster's etcd, a `file`")
	flags.DurationVar(&o.timeout, "timeout", 10*time.Second, "how long etcd may take, a `duration`")
}

// fromAgent takes what names no etcd for the running agent's own.
func (o *etcdOptions) fromAgent(ctx context.Context, c *clientOptions) {
	if o.mesh == "" && (o.config == "" || o.cluster != "") {
		dir, file := agentConfigs(ctx, c.socket)
		o.mesh, o.config, o.asked = dir, cmp.Or(o.config, file), true
	}
}

func (o *etcdOptions) clusterFlag(flags *pflag.FlagSet) {
	flags.StringVar(&o.cluster, "cluster", "", "`name` of a remote cluster in --clustermesh-config, instead of the own one")
}

// file is the config of the one etcd that the options name.
func (o *etcdOptions) file() (string, error) {
	switch {
	case o.timeout <= 0:
		return "", usagef("--timeout %s: want a duration above 0, such as 10s", o.timeout)
	case o.cluster != "" && o.mesh == "" && o.asked:
		return "", usagef("--cluster %s: no agent answers that has its config: say with --clustermesh-config where it is", o.cluster)
	case o.cluster != "" && o.mesh == "":
		return "", usagef("--cluster %s: say with --clustermesh-config where the clusters' configs are", o.cluster)
	case o.cluster != "":
		if err := identity.ValidateClusterName(o.cluster); err != nil {
			return "", usagef("--cluster: %w", err)
		}
		return filepath.Join(o.mesh, o.cluster), nil
	case o.config == "":
		nobody := ""
		if o.asked {
			nobody = ", and no agent answers that has one"
		}
		return "", usagef("no etcd is named%s: give --kvstore-config FILE, or --clustermesh-config DIRECTORY with --cluster NAME", nobody)
	}
	return o.config, nil
}

// dial makes a client of the one etcd that the options name. Whether it answers shows with the first request.
func (o *etcdOptions) dial() (*kvstore.Client, error) {
	file, err := o.file()
	if err != nil {
		return nil, err
	}
	cfg, err := kvstore.LoadConfig(file)
	if err != nil {
		return nil, &usageError{cause: err}
	}
	cfg.QPS = commandQPS
	return kvstore.Dial(cfg, slog.New(slog.DiscardHandler))
}

// do runs one request against the etcd that the options name, within their time.
func (o *etcdOptions) do(ctx context.Context, request func(context.Context, *kvstore.Client) error) error {
	client, err := o.dial()
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	err = request(ctx, client)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("not done within %s (--timeout), `weft troubleshoot kvstore` may tell why: %w", o.timeout, err)
	}
	return err
}

func kvstoreCommand(env environment, c *clientOptions) *cobra.Command {
	cmd := group("kvstore", "Keys of an etcd, read and written directly, whether an agent runs or not")
	o := newEtcdOptions(cmd.PersistentFlags())
	o.clusterFlag(cmd.PersistentFlags())
	someCluster.completesFlag(cmd, env, "cluster")
	cmd.AddCommand(
		kvstoreGet(env, o), kvstoreList(env, o), kvstoreWatch(env, o), kvstoreLeases(env, o),
	)
	for _, reads := range cmd.Commands() {
		run := reads.RunE
		reads.RunE = func(cmd *cobra.Command, args []string) error {
			o.fromAgent(cmd.Context(), c)
			if _, err := o.file(); err != nil {
				return err
			}
			return run(cmd, args)
		}
	}
	cmd.AddCommand(kvstoreSet(env, o), kvstoreDelete(env, o)) // who writes names the etcd
	return cmd
}

// bytesJSON is a value as the recordings of test/testdata have it: as text, or in base64 if it is none.
type bytesJSON struct {
	Value  *string `json:"value,omitempty"`
	Base64 []byte  `json:"value_base64,omitempty"`
}

func makeBytes(value []byte) bytesJSON {
	if utf8.Valid(value) {
		text := string(value)
		return bytesJSON{Value: &text}
	}
	return bytesJSON{Base64: value}
}

func (b bytesJSON) bytes() []byte {
	if b.Value != nil {
		return []byte(*b.Value)
	}
	return b.Base64
}

// keyJSON is a key of etcd as JSON.
type keyJSON struct {
	api.Meta
	Key string `json:"key,omitempty"`
	// KeyBase64 stands instead of Key where that is not valid UTF-8.
	KeyBase64 []byte `json:"key_base64,omitempty"`
	bytesJSON
	Leased   bool   `json:"leased"`
	Lease    string `json:"lease,omitempty"` // id, hexadecimal
	Version  int64  `json:"version"`
	Revision int64  `json:"revision"`
}

func makeKey(kv kvstore.KV) keyJSON {
	k := keyJSON{
		Meta: api.MetaOf(kindKey), bytesJSON: makeBytes(kv.Value), Leased: kv.Lease != 0, Lease: hex(uint64(kv.Lease)),
		Version: kv.Version, Revision: kv.Revision,
	}
	k.Key, k.KeyBase64 = makeKeyName(kv.Key)
	return k
}

func makeKeyName(key string) (text string, raw []byte) {
	if utf8.ValidString(key) {
		return key, nil
	}
	return "", []byte(key)
}

func kvstoreGet(env environment, o *etcdOptions) *cobra.Command {
	var (
		out       *output
		recursive bool
	)
	cmd := newCommand("get KEY", "Print the value of a key, or of all keys that begin with it", func(cmd *cobra.Command, args []string) error {
		if err := checkKey(args[0]); err != nil {
			return err
		}
		p := startProgress(env)
		defer p.end()
		w := bufio.NewWriter(p.above(env.stdout))
		t := out.table(w)
		if out.full() {
			t = out.table(w, "REVISION", "VERSION", "LEASE", "KEY", "VALUE")
		}
		show := func(kv kvstore.KV) error {
			switch {
			case out.forPrograms():
				return out.line(w, makeKey(kv))
			case out.full():
				t.row(strconv.FormatInt(kv.Revision, 10), strconv.FormatInt(kv.Version, 10), orDash(hex(uint64(kv.Lease))), kv.Key, string(kv.Value))
				return nil
			}
			_, err := fmt.Fprintf(w, "%s => %s\n", printable(kv.Key), printable(string(kv.Value)))
			return err
		}
		err := o.do(cmd.Context(), func(ctx context.Context, client *kvstore.Client) error {
			if recursive {
				return eachKey(ctx, client, args[0], p, show)
			}
			kv, ok, err := client.Get(ctx, args[0])
			switch {
			case err != nil:
				return err
			case !ok:
				return fmt.Errorf("key %s: not found (--recursive reads the keys that begin with it)", args[0])
			}
			return show(kv)
		})
		return errors.Join(err, t.flush(), w.Flush())
	})
	out = outputFlags(cmd)
	cmd.Flags().BoolVar(&recursive, "recursive", false, "all keys that begin with KEY")
	return cmd
}

// checkKey refuses the key that etcd refuses, and the prefix of all keys.
func checkKey(key string) error {
	if key == "" {
		return usagef("the empty key: name one, or a prefix such as cilium/")
	}
	return nil
}

func eachKey(ctx context.Context, client *kvstore.Client, prefix string, p *progress, show func(kvstore.KV) error) error {
	n := 0
	p.did(n, "key")
	for kv, err := range client.All(ctx, prefix) {
		if err != nil {
			return err
		}
		if err := show(kv); err != nil {
			return err
		}
		n++
		p.did(n, "key")
	}
	return nil
}

func kvstoreList(env environment, o *etcdOptions) *cobra.Command {
	var out *output
	const short = "List the keys that begin with a prefix, without their values"
	cmd := newCommand("list PREFIX", short, func(cmd *cobra.Command, args []string) error {
		if err := checkKey(args[0]); err != nil {
			return err
		}
		p := startProgress(env)
		defer p.end()
		w := bufio.NewWriter(p.above(env.stdout))
		t := out.table(w, "REVISION", "VERSION", "LEASE", "BYTES", "KEY")
		err := o.do(cmd.Context(), func(ctx context.Context, client *kvstore.Client) error {
			return eachKey(ctx, client, args[0], p, func(kv kvstore.KV) error {
				if out.forPrograms() {
					k := makeKey(kv)
					k.bytesJSON = bytesJSON{}
					return out.line(w, k)
				}
				t.row(strconv.FormatInt(kv.Revision, 10), strconv.FormatInt(kv.Version, 10), orDash(hex(uint64(kv.Lease))),
					strconv.Itoa(len(kv.Value)), kv.Key)
				return nil
			})
		})
		return errors.Join(err, t.flush(), w.Flush())
	})
	cmd.Aliases = []string{"ls"}
	out = outputFlags(cmd)
	return cmd
}

// eventJSON is what happened to a key, as JSON.
type eventJSON struct {
	api.Meta
	Event     string `json:"event"` // created, modified, deleted; synced: all that was there at the start is told
	Key       string `json:"key,omitempty"`
	KeyBase64 []byte `json:"key_base64,omitempty"`
	bytesJSON
	Revision int64 `json:"revision"`
}

func kvstoreWatch(env environment, o *etcdOptions) *cobra.Command {
	var (
		out     *output
		changes bool
	)
	const short = "Print what is below a prefix, and then what happens to it, until interrupted"
	cmd := newCommand("watch PREFIX", short, func(cmd *cobra.Command, args []string) error {
		if err := checkKey(args[0]); err != nil {
			return err
		}
		prefix := strings.TrimRight(args[0], "/") + "/"
		// What etcd refuses it is not asked for again and again.
		err := o.do(cmd.Context(), func(ctx context.Context, client *kvstore.Client) error {
			_, _, err := client.First(ctx, prefix)
			return err
		})
		if err != nil {
			return err
		}
		client, err := o.dial()
		if err != nil {
			return err
		}
		defer client.Close()
		return follow(cmd.Context(), env, client, prefix, func(e kvstore.Event, synced bool) error {
			switch {
			case changes && !synced:
				return nil
			case out.forPrograms():
				return out.line(env.stdout, makeEvent(prefix, e))
			}
			return out.result(env.stdout, nil, eventText(prefix, e), e.Kind.String(), strconv.FormatInt(e.Revision, 10), prefix+string(e.Key), string(e.Value))
		})
	})
	out = outputFlags(cmd)
	cmd.Flags().BoolVar(&changes, "changes-only", false, "leave out what is there at the start")
	return cmd
}

func makeEvent(prefix string, e kvstore.Event) eventJSON {
	shown := eventJSON{Meta: api.MetaOf(kindKeyEvent), Event: e.Kind.String(), Revision: e.Revision}
	if e.Kind != kvstore.Synced {
		shown.Key, shown.KeyBase64 = makeKeyName(prefix + string(e.Key))
	}
	if e.Kind == kvstore.Created || e.Kind == kvstore.Modified {
		shown.bytesJSON = makeBytes(e.Value)
	}
	return shown
}

func eventText(prefix string, e kvstore.Event) string {
	switch e.Kind {
	case kvstore.Synced:
		return fmt.Sprintf("%-8s %s at revision %d", e.Kind, printable(prefix), e.Revision)
	case kvstore.Deleted:
		return fmt.Sprintf("%-8s %s", e.Kind, printable(prefix+string(e.Key)))
	}
	return fmt.Sprintf("%-8s %s => %s", e.Kind, printable(prefix+string(e.Key)), printable(string(e.Value)))
}

// follow shows the events of a prefix until ctx ends, or they cannot be shown any more. What keeps them away meanwhile is
// said on stderr.
func follow(ctx context.Context, env environment, client *kvstore.Client, prefix string, show func(e kvstore.Event, synced bool) error) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	synced := false
	watcher := kvstore.NewWatcher(prefix, func(events []kvstore.Event) {
		for _, e := range events {
			if err := show(e, synced || e.Kind == kvstore.Synced); err != nil {
				stop(err)
				return
			}
			synced = synced || e.Kind == kvstore.Synced
		}
	})
	ended := make(chan error, 1)
	go func() { ended <- watcher.Run(ctx, client) }()
	check := time.NewTicker(time.Second)
	defer check.Stop()
	var told time.Time
	for {
		select {
		case err := <-ended:
			if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
				return cause
			}
			return err
		case <-check.C:
			status := client.Status()
			if status.LastError != nil && status.LastErrorAt.After(told) {
				told = status.LastErrorAt
				complain(env.stderr, fmt.Errorf("watch %s: %w", prefix, status.LastError))
			}
		}
	}
}
