// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// leaves are the commands of a tree that do something, those of cobra's own aside.
func leaves(root *cobra.Command) []*cobra.Command {
	var all []*cobra.Command
	if strings.Contains(root.CommandPath(), " completion") || root.Name() == "help" {
		return nil
	}
	for _, cmd := range root.Commands() {
		all = append(all, leaves(cmd)...)
	}
	if len(all) == 0 || root.HasExample() {
		all = append(all, root)
	}
	return all
}

// Every command says in a line what it does, in a paragraph what for, and shows at least one way to call it, which the
// command line would take.
func TestHelp(t *testing.T) {
	root, _ := newRoot(environment{})
	for _, cmd := range leaves(root) {
		path := cmd.CommandPath()
		if n := len(cmd.Short); n < 10 || n > 100 || strings.HasSuffix(cmd.Short, ".") {
			t.Errorf("%s: short text %q", path, cmd.Short)
		}
		if len(cmd.Long) < len(cmd.Short)+20 || !strings.HasSuffix(cmd.Long, ".") {
			t.Errorf("%s: long text %q: want a paragraph", path, cmd.Long)
		}
		if cmd.Example == "" {
			t.Errorf("%s: no example", path)
		}
		for line := range strings.Lines(cmd.Example) {
			line, _, _ = strings.Cut(strings.TrimSpace(line), "  #")
			checkExample(t, cmd, line)
		}
	}
	for path := range helpTexts {
		if cmd, _, err := root.Find(strings.Fields(path)); err != nil || cmd.CommandPath() != "weft "+path {
			t.Errorf("help for %q, which is no command", path)
		}
	}
}

// checkExample parses a line of an example without running it. What comes after a pipe is the shell's.
func checkExample(t *testing.T, cmd *cobra.Command, line string) {
	t.Helper()
	line, _, _ = strings.Cut(line, " | ")
	words := strings.Fields(strings.ReplaceAll(line, "'", ""))
	if len(words) == 0 || words[0] != "weft" {
		t.Errorf("%s: example %q", cmd.CommandPath(), line)
		return
	}
	root, _ := newRoot(environment{})
	found, args, err := root.Find(words[1:])
	if err == nil && found.CommandPath() != cmd.CommandPath() {
		t.Errorf("example of %s: %q calls %s", cmd.CommandPath(), line, found.CommandPath())
		return
	}
	if err == nil {
		err = found.ParseFlags(args)
	}
	if err == nil {
		err = found.ValidateArgs(found.Flags().Args())
	}
	if err != nil {
		t.Errorf("example of %s: %q: %v", cmd.CommandPath(), line, err)
	}
}
