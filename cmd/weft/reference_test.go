// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
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
		"../../docs/man":       manualPages,
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

// everyManual is what holds for every command, and stands in every manual page.
const everyManual = `.SH EXIT STATUS
0 all is well, 1 it is not, 2 the command line or the configuration is wrong, 3 no agent answers.

.SH ENVIRONMENT
Every option can be given as a variable: WEFT_ and its name in capitals, such as WEFT_API_SOCKET for --api-socket. What the command line says
counts more. NO_COLOR, if it is not empty, keeps colours out.

.SH FILES
.TP
/etc/weft/agent.yaml, /etc/weft/operator.yaml
options of the agent and the operator
.TP
/etc/weft/clustermesh/
one etcd client config for each remote cluster
.TP
/run/weft/weft.sock, /run/weft/operator.sock
where they are asked
.TP
/sys/fs/bpf/weft/
maps, programs and links in the kernel
.TP
/var/lib/weft/
what the agent is to know after a restart

`

// manualPages writes the manual pages.
func manualPages(cmd *cobra.Command, dir string) error {
	if err := doc.GenManTree(cmd, &doc.GenManHeader{Section: "1", Source: "weft", Manual: "weft manual", Date: &manDate}, dir); err != nil {
		return err
	}
	pages, err := filepath.Glob(filepath.Join(dir, "*.1"))
	if err != nil {
		return err
	}
	for _, page := range pages {
		content, err := os.ReadFile(page)
		if err != nil {
			return err
		}
		before, also, found := strings.Cut(string(content), ".SH SEE ALSO")
		if !found {
			return fmt.Errorf("%s has no section SEE ALSO", page)
		}
		if err := os.WriteFile(page, []byte(before+everyManual+".SH SEE ALSO"+also), 0o644); err != nil {
			return err
		}
	}
	return nil
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
