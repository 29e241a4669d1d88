// SPDX-License-Identifier: Apache-2.0

// Package docs does what the documents say, as they stand: each fenced block of each page is run, on machines that are made of
// namespaces, or in the lab, and what a page shows of a terminal is compared with what was printed. A page is a story: what one block
// makes, the next ones use.
package docs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// updateEnv has what was printed written into the pages where they show something else.
const updateEnv = "WEFT_TEST_UPDATE"

// binariesEnv names the directory of the binaries, for the tests and the processes that they isolate themselves in.
const binariesEnv = "WEFT_TEST_BINARIES"

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Getenv(binariesEnv) == "" {
		dir, err := os.MkdirTemp("", "weft-docs-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		build := exec.Command("go", "build", "-ldflags", "-X main.version=v0.1.0", "-o", dir+"/", "../../cmd/weft", "../../cmd/weft-lab")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build weft and weft-lab: %v\n%s", err, out)
			return 1
		}
		// Agents of other users run what is in it.
		for _, file := range []string{".", "weft", "weft-lab"} {
			if err := os.Chmod(filepath.Join(dir, file), 0o755); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
		}
		if err := os.Setenv(binariesEnv, dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return m.Run()
}
