// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
)

// Ctrl-C at a terminal ends long work: its progress is gone, the cursor is at the beginning of a line, and the exit code is that
// of a process that SIGINT has ended.
func TestCtrlC(t *testing.T) {
	agent, given := lab(true), make(chan struct{})
	agent.Verify = func(ctx context.Context, _ bool, tell func(done, total int)) (api.Verification, error) {
		tell(1000, 4000)
		<-ctx.Done() // who asked has gone
		close(given)
		return api.Verification{}, ctx.Err()
	}
	socket, p := serveAgent(t, agent), testutil.OpenTerminal(t)
	shell := exec.Command("sh", "-c", `trap : INT; "$0" verify; echo "exit code $?"; cat`, os.Args[0])
	shell.Stdin, shell.Stdout, shell.Stderr = p.Slave, p.Slave, p.Slave
	shell.Env = append(os.Environ(), asProcess+"=1", "WEFT_API_SOCKET="+socket, "TERM=xterm")
	shell.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := shell.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Type(t, "\x04") // cat ends, and so the shell
		if err := shell.Wait(); err != nil {
			t.Error(err)
		}
	})
	told := regexp.MustCompile(regexp.QuoteMeta(wipeLine) + `comparing .*: 1000 of 4000 entries \(25%\), \d+ a second, \d+s`)
	testutil.Eventually(t, 30*time.Second, func() error {
		if !told.MatchString(p.Screen()) {
			return contains(p.Screen(), told.String())
		}
		return nil
	})
	p.Type(t, "\x03")
	testutil.Eventually(t, 30*time.Second, func() error { return contains(p.Screen(), "exit code") })
	testutil.Eventually(t, 30*time.Second, func() error {
		if left := leftOn(p.Screen()); left != "exit code 130\n" {
			return contains(left, "nothing but the exit code, 130")
		}
		return nil
	})
	select {
	case <-given:
	case <-time.After(30 * time.Second):
		t.Error("the agent goes on with work that nobody waits for")
	}
}

// A signal ends what takes long, with its number in the exit code, without a word, and without leaving a file behind: the config
// that `weft clusters add` tries holds a password.
func TestInterrupt(t *testing.T) {
	silent := testutil.StartProxy(t, testutil.StartEtcd(t).Addr())
	silent.Pause()
	t.Setenv("TMPDIR", t.TempDir())
	dir := t.TempDir()
	socket := serveAgent(t, lab(false))
	for _, tc := range []struct {
		args   string
		signal syscall.Signal
		code   int
	}{
		{"clusters add west --endpoint " + silent.Endpoint() + " --clustermesh-config " + dir + " --timeout 5m", syscall.SIGINT, 130},
		{"status --wait --brief", syscall.SIGTERM, 143},
		{"clusters watch", syscall.SIGHUP, 129},
		{"top --once --interval 1h", syscall.SIGINT, 130},
	} {
		t.Run(tc.args, func(t *testing.T) {
			var stdout, stderr buffer
			signals, done := make(chan os.Signal, 1), make(chan int, 1)
			go func() {
				done <- run(environment{
					ctx: t.Context(), stdin: strings.NewReader(""), stdout: &stdout, stderr: &stderr, now: func() time.Time { return testNow },
					lookup:  lookupIn(map[string]string{"WEFT_API_SOCKET": socket, "WEFT_BPFFS": "/nonexistent"}),
					signals: func() <-chan os.Signal { return signals },
				}, strings.Fields(tc.args))
			}()
			signals <- tc.signal
			select {
			case code := <-done:
				if code != tc.code {
					t.Errorf("exit code %d, want %d: %s", code, tc.code, &stderr)
				}
			case <-time.After(30 * time.Second):
				t.Fatal("it does not end")
			}
			if said := stderr.String(); said != "" {
				t.Errorf("it says %q", said)
			}
			for _, dir := range []string{os.TempDir(), dir} {
				if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
					t.Errorf("%s has %v, %v", dir, left, err)
				}
			}
		})
	}
}
