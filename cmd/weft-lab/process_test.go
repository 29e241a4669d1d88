// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
)

func TestParseStat(t *testing.T) {
	line := "77 (a) b (c)) S 1 77 77 0 -1 4194560 1 0 0 0 5 6 0 0 20 0 9 0 123456 1 2 3 4 5 6 7\n"
	got, err := parseStat([]byte(line))
	if err != nil || got != (stat{state: 'S', start: 123456}) {
		t.Errorf("parseStat = %+v, %v, want state S, start 123456", got, err)
	}
	for _, bad := range []string{"", "77", "77 (x)", "77 (x) S 1 2", strings.Replace(line, "123456", "x", 1)} {
		if got, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("parseStat(%q) = %+v, want an error", bad, got)
		}
	}
}

// startSleep starts a process that ends with the test and has the marker among its arguments.
func startSleep(t *testing.T, marker string) process {
	t.Helper()
	cmd := exec.Command("sleep", marker)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	stat, err := readStat(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return process{PID: cmd.Process.Pid, Start: stat.start}
}

// A pid file outlives its process; the number may then be another program's, which must not be touched.
func TestDaemonRunning(t *testing.T) {
	p := startSleep(t, "1000.25")
	file := filepath.Join(t.TempDir(), "pid")
	for name, test := range map[string]struct {
		content string
		marker  string
		want    bool
	}{
		"ours":              {fmt.Sprintf("%d %d\n", p.PID, p.Start), "1000.25", true},
		"another start":     {fmt.Sprintf("%d %d\n", p.PID, p.Start+1), "1000.25", false},
		"another program":   {fmt.Sprintf("%d %d\n", p.PID, p.Start), "other", false},
		"part of an option": {fmt.Sprintf("%d %d\n", p.PID, p.Start), "1000", false},
		"no such process":   {fmt.Sprintf("%d %d\n", 1<<22+1, p.Start), "1000.25", false},
		"cut short":         {fmt.Sprintf("%d", p.PID), "1000.25", false},
		"empty":             {"", "1000.25", false},
	} {
		if err := os.WriteFile(file, []byte(test.content), 0o600); err != nil {
			t.Fatal(err)
		}
		d := daemon{name: "test", marker: test.marker, pidFile: file}
		if _, got := d.running(); got != test.want {
			t.Errorf("%s: running = %t, want %t", name, got, test.want)
		}
		if !test.want {
			if err := d.stop(context.Background(), time.Second); err != nil {
				t.Errorf("%s: stop: %v", name, err)
			}
			if !p.alive() {
				t.Fatalf("%s: stop ended a process that is not the daemon", name)
			}
		}
	}
}

// A process is known by its arguments from the moment that it counts as started, however busy the machine is.
func TestStartedProcessIsKnown(t *testing.T) {
	var group errgroup.Group
	for range 8 {
		group.Go(func() error {
			for range 25 {
				cmd := exec.Command("sleep", "1000.75")
				if err := cmd.Start(); err != nil {
					return err
				}
				stat, err := readStat(cmd.Process.Pid)
				if err == nil {
					process{PID: cmd.Process.Pid, Start: stat.start}.awaitArguments()
				}
				args := commandLine(cmd.Process.Pid)
				if err := errors.Join(err, cmd.Process.Kill()); err != nil {
					return err
				}
				_ = cmd.Wait() // it was killed
				if !slices.Contains(args, "1000.75") {
					return fmt.Errorf("process %d has just been started and has the arguments %q", cmd.Process.Pid, args)
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
}

func TestDaemonStop(t *testing.T) {
	p := startSleep(t, "1000.25")
	file := filepath.Join(t.TempDir(), "pid")
	if err := os.WriteFile(file, fmt.Appendf(nil, "%d %d\n", p.PID, p.Start), 0o600); err != nil {
		t.Fatal(err)
	}
	d := daemon{name: "test", marker: "1000.25", pidFile: file}
	if err := d.stop(context.Background(), 2*time.Second); err != nil {
		t.Fatal(err)
	}
	if p.alive() {
		t.Error("the process is still alive")
	}
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("the pid file is still there: %v", err)
	}
	if err := d.stop(context.Background(), time.Second); err != nil {
		t.Errorf("stop once more: %v", err)
	}
}
