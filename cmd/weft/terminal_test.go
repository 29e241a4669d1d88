// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// onTerminal runs a command line on a terminal until the test ends it or it ends by itself.
func onTerminal(t *testing.T, env map[string]string, args ...string) (p *testutil.Terminal, stop func() int) {
	t.Helper()
	p = testutil.OpenTerminal(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan int, 1)
	go func() {
		done <- run(environment{
			ctx: ctx, stdin: p.Slave, stdout: p.Slave, stderr: p.Slave, lookup: lookupIn(env), now: func() time.Time { return testNow },
		}, args)
	}()
	return p, func() int {
		cancel()
		return <-done
	}
}

// A watched status is painted anew in its place on a terminal, with colours unless NO_COLOR forbids them, and below itself
// elsewhere.
func TestStatusWatch(t *testing.T) {
	well, unwell := serveAgent(t, lab(true)), serveAgent(t, lab(false))
	const watch = "status --brief --watch --interval 100ms"
	for _, tc := range []struct {
		name, socket, setting, want string
		code                        int
	}{
		{"well", well, "", clearScreen + "Health:        " + string(good) + "ok" + resetColor + "\r\n", exitOK},
		{"unwell", unwell, "", clearScreen + "Health:        " + string(bad) + "5 problems" + resetColor + "\r\n", exitNot},
		{"no color", well, "NO_COLOR=1", clearScreen + "Health:        ok\r\n", exitOK},
		{"dumb", well, "TERM=dumb", clearScreen + "Health:        ok\r\n", exitOK},
	} {
		t.Run(tc.name, func(t *testing.T) {
			name, value, _ := strings.Cut(tc.setting, "=")
			p, stop := onTerminal(t, map[string]string{"WEFT_API_SOCKET": tc.socket, name: value}, strings.Fields(watch)...)
			testutil.Eventually(t, 30*time.Second, func() error {
				if n := strings.Count(p.Screen(), tc.want); n < 2 {
					return fmt.Errorf("%d times %q in %q", n, tc.want, p.Screen())
				}
				return nil
			})
			if code := stop(); code != tc.code {
				t.Errorf("exit code %d, want %d", code, tc.code)
			}
		})
	}
	out, stop := watchList(t, well, "status --brief")
	testutil.Eventually(t, 30*time.Second, func() error { return contains(out.String(), "Health:        ok\n\nHealth:        ok\n\n") })
	stop()
	lines, stop := watchList(t, well, "status -o json")
	const line = `{"apiVersion":"weft/v1","kind":"Status",`
	testutil.Eventually(t, 30*time.Second, func() error { return contains(lines.String(), "}\n"+line) })
	stop()
}

// Every command that prints a result prints it in every form, and every list goes on with --watch.
func TestEveryCommandPrintsEveryForm(t *testing.T) {
	root, _ := newRoot(environment{})
	others := map[string]string{
		"agent": "it runs until it is ended", "operator": "it runs until it is ended",
		"completion bash": "a script", "completion zsh": "a script", "completion fish": "a script", "completion powershell": "a script",
	}
	for _, cmd := range leaves(root) {
		path := strings.TrimPrefix(cmd.CommandPath(), "weft ")
		if others[path] != "" {
			continue
		}
		flag := cmd.Flags().Lookup("output")
		if flag == nil {
			t.Errorf("weft %s has no -o", path)
			continue
		}
		if _, ok := flag.Value.(*output); !ok {
			t.Errorf("weft %s has an -o of its own", path)
		}
		if cmd.Name() == "list" && path != "kvstore list" && cmd.Flags().Lookup("watch") == nil {
			t.Errorf("weft %s cannot be watched", path)
		}
	}
}
