// SPDX-License-Identifier: Apache-2.0

// Package vm boots virtual machines, emulated in software, for tests of what needs a machine of its own; it hands on what they
// print.
package vm

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

const (
	// Emulator is the program that must be there: Debian's package qemu-system-x86.
	Emulator = "qemu-system-x86_64"

	// consoleTail is how much of the kernel's console is kept for the case that the machine dies, in bytes.
	consoleTail = 8 << 10
	// longestLine is far above what a test prints at once, in bytes.
	longestLine = 4 << 20
)

// Machine is a virtual machine without network, emulated in software: it needs no privileges and no KVM.
type Machine struct {
	Image, Root string   // files: the kernel and its first root
	Disks       []string // files: raw images, /dev/vda and so on. What the machine writes is forgotten
	Append      string   // more for the kernel's command line
}

// Run boots the machine and delivers each line of its second serial port, without its end, until the machine is off or
// ctx ends, which kills it. It returns the end of what the kernel wrote to its console.
func (m Machine) Run(ctx context.Context, deliver func(line string)) (console string, err error) {
	// The port is a pipe, not the emulator's output: its own messages and the console cannot get between the lines.
	port, portEnd, err := os.Pipe()
	if err != nil {
		return "", err
	}
	defer port.Close()
	args := []string{
		"-accel", "tcg", "-cpu", "max", "-smp", "2", "-m", "2048",
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none",
		"-serial", "stdio", "-serial", "file:/dev/fd/3",
		"-kernel", m.Image, "-initrd", m.Root,
		"-append", strings.TrimSpace("console=ttyS0 quiet panic=-1 oops=panic " + m.Append),
	}
	for _, disk := range m.Disks {
		args = append(args, "-drive", "file="+disk+",format=raw,if=virtio,snapshot=on")
	}
	cmd := exec.CommandContext(ctx, Emulator, args...)
	out, complaints := &tail{max: consoleTail}, &tail{max: consoleTail}
	cmd.Stdout, cmd.Stderr = out, complaints
	cmd.ExtraFiles = []*os.File{portEnd} // descriptor 3
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := errors.Join(cmd.Start(), portEnd.Close()); err != nil {
		return "", err
	}
	err = deliverLines(port, deliver) // until the emulator is gone
	err = errors.Join(err, cmd.Wait())
	if ctx.Err() != nil {
		return out.String(), context.Cause(ctx)
	}
	if err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", Emulator, err, strings.TrimSpace(complaints.String()))
	}
	return out.String(), nil
}

func deliverLines(r io.Reader, deliver func(line string)) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, longestLine)
	for lines.Scan() {
		deliver(strings.TrimSuffix(lines.Text(), "\r"))
	}
	if err := lines.Err(); err != nil {
		_, drained := io.Copy(io.Discard, r) // the writer must not block
		return errors.Join(fmt.Errorf("serial port: %w", err), drained)
	}
	return nil
}

// tail is a writer that keeps the last max bytes.
type tail struct {
	max int
	buf bytes.Buffer
}

func (t *tail) Write(p []byte) (int, error) {
	t.buf.Write(p)
	if over := t.buf.Len() - t.max; over > 0 {
		t.buf.Next(over)
	}
	return len(p), nil
}

func (t *tail) String() string { return t.buf.String() }
