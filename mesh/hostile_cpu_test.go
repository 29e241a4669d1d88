// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/kvstore"
)

// hostileEnv tells a process of the test binary which hostile server to be.
const hostileEnv = "WEFT_TEST_HOSTILE"

// everyHostileServer is all that a hostile server is tried with, floods of honest events included.
func everyHostileServer() map[string]func(*hostileEtcd) {
	all := map[string]func(*hostileEtcd){"100,000 events a second": floodOfEvents}
	for _, c := range hostileServers {
		all[c.name] = c.set
	}
	return all
}

// TestHostileProcess is the process of a hostile server. It ends with its standard input.
func TestHostileProcess(t *testing.T) {
	set := everyHostileServer()[os.Getenv(hostileEnv)]
	if set == nil {
		return
	}
	fmt.Printf("%s\n", startHostile(t, set).endpoint)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// startHostileProcess starts a hostile server whose CPU time and memory are its own, and returns its endpoint.
func startHostileProcess(t *testing.T, name string) string {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run", "^TestHostileProcess$", "-test.count=1")
	cmd.Env = append(os.Environ(), hostileEnv+"="+name)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stdin, err := cmd.StdinPipe()
	must(t, err)
	stdout, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	endpoint, err := bufio.NewReader(stdout).ReadString('\n')
	must(t, err)
	return strings.TrimSpace(endpoint)
}

// A hostile server that runs elsewhere costs this process a bounded share of one core, whatever it sends.
//
// lesson: R10 R12
func TestFaultHostileCPU(t *testing.T) {
	names := figure([]string{"endless progress notifications"}, nil)
	if fullFaults {
		for name := range everyHostileServer() {
			names = append(names, name)
		}
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			endpoint := startHostileProcess(t, name)
			w := newWorldAt(t, defaultTiming, defaultLimits(512_000), func(c *Config) {
				c.Tune = func(k *kvstore.Config) { k.LivenessTimeout = 5 * time.Second }
				write(t, filepath.Join(c.Dir, "west"), "endpoints:\n- "+endpoint+"\n")
			})
			w.await("west", "its server", func(s RemoteStatus) bool { return s.State != Connecting })
			cpu, began := ownCPU(t), time.Now()
			time.Sleep(figure(500*time.Millisecond, 15*time.Second))
			share := (ownCPU(t) - cpu).Seconds() / time.Since(began).Seconds()
			s, _ := w.remote("west")
			t.Logf("%.1f %% of a core; state %s, %d addresses, held back %d times: %s", 100*share, s.State, s.IPs, s.Quotas.HeldBack, s.LastError)
			if fullFaults && share > 0.75 {
				t.Errorf("%.1f %% of a core, want at most 75 %%", 100*share)
			}
		})
	}
}

// ownCPU is what this process has used.
func ownCPU(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	must(t, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
