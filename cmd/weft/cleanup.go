// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"

	"github.com/spf13/cobra"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/datapath"
)

// kindCleanup is the kind of what cleanup prints.
const kindCleanup = "Cleanup"

// remnant is something that weft left, as JSON.
type remnant struct {
	Kind    string `json:"kind"`
	Object  string `json:"object"`
	Removed bool   `json:"removed"`
	Kept    string `json:"kept,omitempty"` // why it is not removed
}

func cleanupCommand(env environment, c *clientOptions) *cobra.Command {
	var (
		out    *output
		dryRun bool
	)
	cmd := newCommand("cleanup", "Remove everything that weft left on this node", func(cmd *cobra.Command, _ []string) error {
		p := startProgress(env)
		p.say("looking for what weft left")
		found, err := datapath.Cleanup(cmd.Context(), c.bpffs, dryRun, func(n int) { p.did(n, "object") })
		p.end()
		if err != nil {
			return err
		}
		if socket, ok := cleanSocket(c.socket, dryRun); ok {
			found = append(found, socket)
		}
		if out.forPrograms() {
			err = out.object(env.stdout, api.List[remnant]{Meta: api.MetaOf(kindCleanup), Items: remnants(found, dryRun)})
		} else {
			err = printRemnants(env, out, found, dryRun)
		}
		for _, r := range found {
			if err == nil && r.Kept != "" {
				err = errUnhealthy
			}
		}
		return err
	})
	out = outputFlags(cmd)
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only show what there is to remove")
	return cmd
}

func remnants(found []datapath.Remnant, dryRun bool) []remnant {
	all := []remnant{}
	for _, r := range found {
		all = append(all, remnant{Kind: r.Kind, Object: r.Object, Removed: r.Kept == "" && !dryRun, Kept: r.Kept})
	}
	return all
}

func printRemnants(env environment, out *output, found []datapath.Remnant, dryRun bool) error {
	if len(found) == 0 && out.forPeople() {
		_, err := fmt.Fprintln(env.stdout, "nothing of weft's is here")
		return err
	}
	t := out.table(env.stdout, "KIND", "OBJECT", "WHAT")
	for _, r := range found {
		what := "removed"
		switch {
		case r.Kept != "":
			what = "kept: " + r.Kept
		case dryRun:
			what = "to be removed"
		}
		t.row(r.Kind, r.Object, what)
	}
	return t.flush()
}

// cleanSocket removes the socket of an agent that was killed. The pins' lock has told that none runs; one on another BPF
// file system would answer.
func cleanSocket(path string, dryRun bool) (datapath.Remnant, bool) {
	info, err := os.Lstat(path)
	if err != nil || info.Mode()&fs.ModeSocket == 0 {
		return datapath.Remnant{}, false
	}
	r := datapath.Remnant{Kind: "socket", Object: path}
	if conn, err := net.Dial("unix", path); err == nil {
		_ = conn.Close()
		r.Kept = "an agent answers on it"
		return r, true
	}
	if !dryRun {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			r.Kept = err.Error()
		}
	}
	return r, true
}
