// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/kvstore"
)

// maxKeyLine bounds a line of a dump; etcd takes values of 1.5 MiB by default.
const maxKeyLine = 64 << 20

func kvstoreSet(env environment, o *etcdOptions) *cobra.Command {
	var (
		out  *output
		from string
	)
	cmd := newCommand("set", "Write a key, or all keys of a dump, without a lease", func(cmd *cobra.Command, args []string) error {
		if from == "" {
			if err := checkKey(args[0]); err != nil {
				return err
			}
			err := o.do(cmd.Context(), func(ctx context.Context, client *kvstore.Client) error {
				return client.Put(ctx, args[0], []byte(args[1]))
			})
			if err != nil {
				return err
			}
			return out.result(env.stdout, writing{api.MetaOf(kindWriting), 1}, "", "1") // people need not be told what they said
		}
		dump, name := env.stdin, "standard input"
		if from != "-" {
			f, err := os.Open(from)
			if err != nil {
				return usagef("--from: %w", err)
			}
			defer f.Close()
			dump, name = f, from
		}
		written := 0
		p := startProgress(env)
		err := o.do(cmd.Context(), func(ctx context.Context, client *kvstore.Client) (err error) {
			written, err = load(ctx, client, dump, name, p)
			return err
		})
		p.end()
		if err != nil {
			return fmt.Errorf("%s written, then: %w", count(written, "key"), err)
		}
		return out.result(env.stdout, writing{api.MetaOf(kindWriting), written}, count(written, "key")+" written", strconv.Itoa(written))
	})
	cmd.Use = "set KEY VALUE | set --from FILE"
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if from != "" {
			return cobra.NoArgs(cmd, args)
		}
		return cobra.ExactArgs(2)(cmd, args)
	}
	out = outputFlags(cmd)
	cmd.Flags().StringVar(&from, "from", "", "`file` of JSON lines as `weft kvstore get --recursive -o json` prints them; - is the standard input")
	return cmd
}

// writing is what came of a write, as JSON.
type writing struct {
	api.Meta
	Written int `json:"written"`
}

// load writes the keys of a dump, in its order, and returns how many were written.
func load(ctx context.Context, client *kvstore.Client, dump io.Reader, name string, p *progress) (written int, err error) {
	p.did(0, "key")
	lines := bufio.NewScanner(dump)
	lines.Buffer(nil, maxKeyLine)
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		key, value, err := parseKeyLine(lines.Bytes())
		if err != nil {
			return written, fmt.Errorf("%s:%d: %w", name, n, err)
		}
		if err := client.Put(ctx, key, value); err != nil {
			return written, err
		}
		written++
		p.did(written, "key")
	}
	if err := lines.Err(); err != nil {
		return written, fmt.Errorf("read %s: %w", name, err)
	}
	return written, nil
}

// parseKeyLine reads one key of a dump.
func parseKeyLine(line []byte) (key string, value []byte, err error) {
	var k keyJSON
	if err := json.Unmarshal(line, &k); err != nil {
		return "", nil, err
	}
	key = k.Key
	if key == "" {
		key = string(k.KeyBase64)
	}
	switch {
	case key == "":
		return "", nil, errors.New("it has no key")
	case k.Value == nil && k.Base64 == nil:
		return "", nil, fmt.Errorf("key %s has neither value nor value_base64", key)
	}
	return key, k.bytes(), nil
}

// deletion is what came of a deletion, as JSON.
type deletion struct {
	api.Meta
	Deleted int64 `json:"deleted"`
}

func kvstoreDelete(env environment, o *etcdOptions) *cobra.Command {
	var (
		out       *output
		recursive bool
	)
	const short = "Delete a key, or all keys that begin with it, and print how many went"
	cmd := newCommand("delete KEY", short, func(cmd *cobra.Command, args []string) error {
		if err := checkKey(args[0]); err != nil {
			return err
		}
		result := deletion{Meta: api.MetaOf(kindDeletion)}
		err := o.do(cmd.Context(), func(ctx context.Context, client *kvstore.Client) (err error) {
			if recursive {
				result.Deleted, err = client.DeletePrefix(ctx, args[0])
				return err
			}
			existed, err := client.Delete(ctx, args[0])
			if existed {
				result.Deleted = 1
			}
			if err == nil && !existed {
				return fmt.Errorf("key %s: not found (--recursive deletes the keys that begin with it)", args[0])
			}
			return err
		})
		if err != nil && result.Deleted > 0 {
			return fmt.Errorf("%s deleted, then: %w", count(int(result.Deleted), "key"), err)
		}
		if err != nil {
			return err
		}
		return out.result(env.stdout, result, count(int(result.Deleted), "key")+" deleted", strconv.FormatInt(result.Deleted, 10))
	})
	out = outputFlags(cmd)
	cmd.Flags().BoolVar(&recursive, "recursive", false, "all keys that begin with KEY")
	return cmd
}
