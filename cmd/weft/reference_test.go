// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// manDate stands in the manual pages: they change when the commands do, not when they are made.
var manDate = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

// The command reference and the manual pages are made of the commands themselves, by this test with -update.
func TestReference(t *testing.T) {
	root, _ := newRoot(environment{})
	root.DisableAutoGenTag = true
	for dir, generate := range map[string]func(*cobra.Command, string) error{
		"../../docs/reference": doc.GenMarkdownTree,
		"../../docs/man": func(cmd *cobra.Command, dir string) error {
			return doc.GenManTree(cmd, &doc.GenManHeader{Section: "1", Source: "weft", Manual: "weft manual", Date: &manDate}, dir)
		},
	} {
		if *update {
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := generate(root, dir); err != nil {
				t.Fatal(err)
			}
			continue
		}
		made := t.TempDir()
		if err := generate(root, made); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(readAll(t, dir), readAll(t, made)); diff != "" {
			t.Errorf("%s is not what the commands say: run `make docs` (-committed +made)\n%.2000s", dir, diff)
		}
	}
}

// readAll returns the files of a directory.
func readAll(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	files := make(map[string]string)
	for _, e := range entries {
		content, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		files[e.Name()] = string(content)
	}
	return files
}
