// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// daemon describes one long-lived process of the lab. Its marker is an argument that no other process has; together
// with the start time in the pid file it tells our process from another one that was given the same number.
type daemon struct {
	name    string
	path    string
	args    []string
	marker  string
	netNS   string
	logFile string
	pidFile string
}

// process is a process by its number and its start time, in clock ticks since boot.
type process struct {
	PID   int
	Start uint64
}

// start starts the daemon in its network namespace, in a session of its own, and writes its pid file.
func (d daemon) start() (process, error) {
	log, err := os.OpenFile(d.logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return process{}, err
	}
	defer log.Close()
	cmd := exec.Command(d.path, d.args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = "/"
	cmd.Env = withoutWeft(os.Environ())
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := inNetNS(d.netNS, cmd.Start); err != nil {
		return process{}, fmt.Errorf("start %s: %w", d.name, err)
	}
	p := process{PID: cmd.Process.Pid}
	stat, err := readStat(p.PID)
	if err != nil {
		return process{}, fmt.Errorf("start %s: it ended at once: %w", d.name, err)
	}
	p.Start = stat.start
	p.awaitArguments()
	if err := writeFile(d.pidFile, fmt.Appendf(nil, "%d %d\n", p.PID, p.Start)); err != nil {
		return process{}, errors.Join(err, cmd.Process.Kill())
	}
	return p, cmd.Process.Release()
}

// awaitArguments waits until a process that was just started can be known by its arguments. Who starts it may go on a little
// earlier than that: the kernel has closed what exec closes, and not yet laid out the new program's memory.
func (p process) awaitArguments() {
	for len(commandLine(p.PID)) == 0 && p.alive() {
		time.Sleep(time.Millisecond)
	}
}

// ensure starts the daemon where it is not running, and reports whether it did.
func (d daemon) ensure() (started bool, err error) {
	if _, ok := d.running(); ok {
		return false, nil
	}
	_, err = d.start()
	return err == nil, err
}

// waitDaemon polls check while the daemon runs, for as long as patience lasts. Its error ends with the end of the daemon's log.
func waitDaemon(ctx context.Context, d daemon, otherwise string, patience time.Duration, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := poll(ctx, 20*time.Millisecond, func() error {
		if _, ok := d.running(); !ok {
			cancel()
			return errors.New("its process has ended")
		}
		return check(ctx)
	}); err != nil {
		return fmt.Errorf("%s %s: %w; %s", d.name, otherwise, err, d.tail())
	}
	return nil
}

// withoutWeft drops from an environment the settings that would come before those in an agent's config file.
func withoutWeft(environ []string) []string {
	return slices.DeleteFunc(slices.Clone(environ), func(v string) bool { return strings.HasPrefix(v, "WEFT_") })
}

// running returns the daemon's process, if its pid file names one that is alive and is the daemon.
func (d daemon) running() (process, bool) {
	content, err := os.ReadFile(d.pidFile)
	if err != nil {
		return process{}, false
	}
	var p process
	if _, err := fmt.Sscanf(string(content), "%d %d", &p.PID, &p.Start); err != nil {
		return process{}, false
	}
	return p, p.alive() && slices.Contains(commandLine(p.PID), d.marker)
}

// stop ends the daemon: SIGTERM first, SIGKILL when it has not ended in the given time. One that is not running is fine.
func (d daemon) stop(ctx context.Context, patience time.Duration) error {
	p, ok := d.running()
	if !ok {
		return removeFile(d.pidFile)
	}
	if err := p.end(ctx, patience); err != nil {
		return fmt.Errorf("stop %s: %w", d.name, err)
	}
	return removeFile(d.pidFile)
}

func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// alive reports whether the process exists, is the one that was started, and is no zombie.
func (p process) alive() bool {
	stat, err := readStat(p.PID)
	return err == nil && stat.start == p.Start && stat.state != 'Z' && stat.state != 'X'
}

// signal sends a signal to the process, and never to another one with the same number.
func (p process) signal(sig syscall.Signal) error {
	found, err := os.FindProcess(p.PID) // holds the process by a pidfd
	if err != nil {
		return err
	}
	defer found.Release()
	if !p.alive() {
		return nil
	}
	if err := found.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send %s to process %d: %w", unix.SignalName(sig), p.PID, err)
	}
	return nil
}

// end makes the process end, by SIGTERM or after the given time by SIGKILL, and returns when it is gone.
func (p process) end(ctx context.Context, patience time.Duration) error {
	if err := p.signal(syscall.SIGTERM); err != nil {
		return err
	}
	soft, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if p.waitGone(soft) == nil {
		return nil
	}
	return p.kill(ctx)
}

// kill sends SIGKILL and returns when the process is gone.
func (p process) kill(ctx context.Context) error {
	if err := p.signal(syscall.SIGKILL); err != nil {
		return err
	}
	hard, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return p.waitGone(hard)
}

func (p process) waitGone(ctx context.Context) error {
	err := poll(ctx, 5*time.Millisecond, func() error {
		if p.alive() {
			return fmt.Errorf("process %d is still alive", p.PID)
		}
		return nil
	})
	if err == nil {
		// Where it was a child of ours, nobody else can clear the zombie away; where not, this is a no-op.
		_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil)
	}
	return err
}

// stat is what the lab needs of /proc/<pid>/stat.
type stat struct {
	state byte
	start uint64
}

func readStat(pid int) (stat, error) {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, err
	}
	return parseStat(content)
}

// parseStat reads the state (field 3) and the start time (field 22) of a process, as proc(5) numbers them. The second
// field, the program's name in parentheses, may itself hold spaces and parentheses.
func parseStat(content []byte) (stat, error) {
	fields := bytes.Fields(content[bytes.LastIndexByte(content, ')')+1:])
	if len(fields) < 20 || len(fields[0]) != 1 {
		return stat{}, fmt.Errorf("process status %q has too few fields", content)
	}
	start, err := strconv.ParseUint(string(fields[19]), 10, 64)
	if err != nil {
		return stat{}, fmt.Errorf("start time of process: %w", err)
	}
	return stat{state: fields[0][0], start: start}, nil
}

// commandLine returns the arguments of a process; none if it is gone, or the kernel is still making it.
func commandLine(pid int) []string {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || len(content) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(content), "\x00"), "\x00")
}

// poll calls check until it returns nil, at once and then at the given interval. When ctx ends first it returns the
// last error that tells more than that ctx has ended.
func poll(ctx context.Context, every time.Duration, check func() error) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	var last error
	for {
		err := check()
		switch {
		case err == nil:
			return nil
		case last == nil || ctx.Err() == nil:
			last = err
		}
		select {
		case <-ctx.Done():
			return last
		case <-tick.C:
		}
	}
}

// tail returns the last lines of a daemon's log, under a line that says where they are from.
func (d daemon) tail() string {
	const lines = 15
	content, err := os.ReadFile(d.logFile)
	if err != nil {
		return err.Error()
	}
	text := strings.TrimRight(string(content), "\n")
	if text == "" {
		return d.logFile + " is empty"
	}
	all := strings.Split(text, "\n")
	return fmt.Sprintf("the end of %s:\n%s", d.logFile, strings.Join(all[max(0, len(all)-lines):], "\n"))
}
