// SPDX-License-Identifier: Apache-2.0

// Init is the first process of a virtual machine: it makes the machine ready for weft's kernel tests, runs the job in its
// root, writes what comes of it to the second serial port, and powers the machine off.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/test/kernels/job"
)

// resultPort carries the tests' output and the marks. The kernel's console is the first port: what the kernel says can
// not tear a line of the tests.
const resultPort = "/dev/ttyS1"

// runner is the argument of the second process.
const runner = "run-job"

func main() {
	if len(os.Args) > 1 && os.Args[1] == runner {
		if err := work(); err != nil {
			fmt.Println("init:", err)
			os.Exit(1)
		}
		return
	}
	if err := supervise(); err != nil {
		fmt.Println("init:", err)
	}
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Println("init: power off:", err)
	}
	os.Exit(1) // the end of process 1 is a panic of the kernel, which ends the machine too
}

// supervise does what process 1 alone can do: it mounts, starts a second process for the job, and buries every orphan
// until that process ends. Two processes, because who waits for any child takes the exit codes of those that os/exec
// waits for.
func supervise() error {
	if err := mountAll(); err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe", runner)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the job: %w", err)
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("wait for the job: %w", err)
		case pid == cmd.Process.Pid:
			return nil
		}
	}
}

// mount is a file system of the machine.
type mount struct{ kind, dir, options string }

var mounts = []mount{
	{kind: "proc", dir: "/proc"},
	{kind: "sysfs", dir: "/sys"},
	{kind: "devtmpfs", dir: "/dev"},
	{kind: "devpts", dir: "/dev/pts"},
	{kind: "bpf", dir: "/sys/fs/bpf", options: "mode=0700"},
	{kind: "cgroup2", dir: "/sys/fs/cgroup"},
	{kind: "tmpfs", dir: "/tmp", options: "mode=1777"},
	{kind: "tmpfs", dir: "/run", options: "mode=0755"},
}

func mountAll() error {
	for _, m := range mounts {
		if err := os.MkdirAll(m.dir, 0o755); err != nil {
			return fmt.Errorf("mount %s: %w", m.dir, err)
		}
		if err := unix.Mount(m.kind, m.dir, m.kind, 0, m.options); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.kind, m.dir, err)
		}
	}
	return nil
}

// work does the job and tells of it on the result port.
func work() error {
	j, err := job.Read(job.File)
	if err != nil {
		return err
	}
	port, err := openPort()
	if err != nil {
		return err
	}
	defer port.Close()
	tell := func(m job.Mark) {
		// A test that died may have left a line without its end.
		fmt.Fprintf(port, "\n%s\n", m.Line(j.ID))
	}
	if err := prepare(j.Modules); err != nil {
		tell(job.Mark{Event: job.Failed, Text: err.Error()})
		return drain(port)
	}
	tell(job.Mark{Event: job.Booted, Text: release()})
	for _, run := range j.Runs {
		tell(job.Mark{Event: job.Started, Package: run.Package})
		tell(test(run, port))
	}
	tell(job.Mark{Event: job.Done})
	return drain(port)
}

// test runs one binary, its output straight to the port.
func test(run job.Run, port *os.File) job.Mark {
	cmd := exec.Command(run.Binary, run.Args...)
	cmd.Dir = run.Dir
	cmd.Stdout, cmd.Stderr = port, port
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "TMPDIR=/tmp"}
	started := time.Now()
	err := cmd.Run()
	m := job.Mark{Event: job.Ended, Package: run.Package, Took: time.Since(started)}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() {
		m.Exit = exit.ExitCode()
	} else if err != nil { // killed by a signal, or never started
		m.Exit, m.Text = -1, err.Error()
	}
	return m
}

// openPort opens the result port and keeps the terminal from changing what goes through it.
func openPort() (*os.File, error) {
	port, err := os.OpenFile(resultPort, os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, fmt.Errorf("result port: %w", err)
	}
	mode, err := unix.IoctlGetTermios(int(port.Fd()), unix.TCGETS)
	if err == nil {
		mode.Oflag &^= unix.OPOST
		err = unix.IoctlSetTermios(int(port.Fd()), unix.TCSETS, mode)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("result port: set to raw: %w", err), port.Close())
	}
	return port, nil
}

// drain waits until the port has sent everything: what it still holds when the machine is off is lost.
func drain(port *os.File) error {
	if err := unix.IoctlSetInt(int(port.Fd()), unix.TCSBRK, 1); err != nil {
		return fmt.Errorf("result port: drain: %w", err)
	}
	return nil
}

// prepare loads the modules and brings the loopback device up.
func prepare(modules []string) error {
	for _, module := range modules {
		if err := load(module); err != nil {
			return fmt.Errorf("load %s: %w", module, err)
		}
	}
	if err := loopbackUp(); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

func load(module string) error {
	file, err := os.Open(module)
	if err != nil {
		return err
	}
	defer file.Close()
	flags := 0
	if !strings.HasSuffix(module, ".ko") { // .ko.xz, .ko.zst: the kernel decompresses what it was itself packed with
		flags = unix.MODULE_INIT_COMPRESSED_FILE
	}
	return unix.FinitModule(int(file.Fd()), "", flags)
}

func loopbackUp() error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, lo)
}

// release is what uname -r prints.
func release() string {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return err.Error()
	}
	return unix.ByteSliceToString(uts.Release[:])
}
