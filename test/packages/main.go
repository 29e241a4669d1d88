// SPDX-License-Identifier: Apache-2.0

// Packages builds the tree's .deb and .rpm, boots Debian with systemd in a virtual machine, emulated in software, and tries there
// what an administrator does with them: installation, start, crash, hang, upgrade, downgrade, removal. The .rpm is installed by
// Debian's rpm, beside dpkg, with no dependencies looked at: a distribution of its own is not needed for what it brings.
//
//	packages [COMMIT]
//
// The version that is upgraded, and downgraded to, is that of a commit; without one it is the tree's own, under another name.
//
// It needs mmdebstrap, mkfs.ext4, qemu-system-x86_64 and root, but no KVM. The machine's disk is kept in .cache/packages.
//
// Exit code 0 means that all checks passed, 1 that one did not, 2 wrong usage. The checks are in the script `guest`.
package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/weftmesh/weft/test/vm"
)

// patience is what the machine gets: on two cores it needs about four minutes, and twelve where others work there, too.
const patience = 30 * time.Minute

//go:embed guest
var guest []byte

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is the program; it returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if len(args) > 1 || len(args) == 1 && strings.HasPrefix(args[0], "-") {
		fmt.Fprintln(stderr, "packages: want at most one argument, the commit that is upgraded from")
		return 2
	}
	ok, err := try(ctx, strings.Join(args, ""), stdout)
	if err != nil {
		fmt.Fprintln(stderr, "packages:", err)
	}
	if err != nil || !ok {
		return 1
	}
	return 0
}

// try runs the checks on packages of the tree, and of a commit if one is named, and says whether all passed.
func try(ctx context.Context, from string, out io.Writer) (ok bool, err error) {
	for _, tool := range []string{"mmdebstrap", "mkfs.ext4", vm.Emulator} {
		if _, err := exec.LookPath(tool); err != nil {
			return false, fmt.Errorf("%w: on Debian, apt-get install mmdebstrap e2fsprogs qemu-system-x86", err)
		}
	}
	mod, err := command(ctx, "go", "env", "GOMOD")
	if err != nil {
		return false, err
	}
	root := filepath.Dir(strings.TrimSpace(mod))
	cache := filepath.Join(root, ".cache", "packages")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return false, err
	}
	work, err := os.MkdirTemp(cache, "run-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(work)

	older := root
	if from != "" {
		older = filepath.Join(work, "from")
		if _, err := command(ctx, "git", "-C", root, "worktree", "add", "--detach", older, from); err != nil {
			return false, err
		}
		defer func() {
			_, removeErr := command(context.WithoutCancel(ctx), "git", "-C", root, "worktree", "remove", "--force", older)
			err = errors.Join(err, removeErr)
		}()
	}
	payload := map[string][]byte{"guest": guest}
	for name, p := range map[string]struct{ tree, version string }{"weft": {older, "v0.1.0"}, "newer": {root, "v0.2.0"}} {
		dir := filepath.Join(work, name)
		if _, err := command(ctx, "env", "VERSION="+p.version, filepath.Join(p.tree, "deploy", "packages", "build"), dir); err != nil {
			return false, err
		}
		for _, kind := range []string{".deb", ".rpm"} {
			found, err := filepath.Glob(filepath.Join(dir, "*"+kind))
			if err != nil || len(found) != 1 {
				return false, fmt.Errorf("%s: %d packages %s, want one", dir, len(found), kind)
			}
			if payload[name+kind], err = os.ReadFile(found[0]); err != nil {
				return false, err
			}
		}
	}
	d, err := makeDisk(ctx, cache, out)
	if err != nil {
		return false, err
	}
	file := filepath.Join(work, "payload.tar")
	if err := writePayload(file, payload); err != nil {
		return false, err
	}
	return boot(ctx, d, file, out)
}

// boot runs the machine and follows its report.
func boot(ctx context.Context, d disk, payload string, out io.Writer) (ok bool, err error) {
	limited, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("the machine was not done after %v", patience))
	defer cancel()
	m := vm.Machine{Image: d.kernel, Root: d.initrd, Disks: []string{d.image, payload}, Append: "root=/dev/vda rw"}
	started, r := time.Now(), new(report)
	console, err := m.Run(limited, func(line string) {
		r.add(line)
		fmt.Fprintf(out, "%6.1fs  %s\n", time.Since(started).Seconds(), line)
	})
	if !r.done {
		fmt.Fprintf(out, "the end of the machine's console:\n%s\n", strings.ReplaceAll(console, "\r", ""))
	}
	fmt.Fprintf(out, "%d checks passed, %d failed; the machine was off after %s\n", r.passed, r.failed, time.Since(started).Round(time.Second))
	return r.ok() && err == nil, err
}

// report is what the guest says: a line "ok WHAT" or "not ok WHAT" for each check, "done" at the end, all else in between.
type report struct {
	passed, failed int
	done           bool
}

func (r *report) add(line string) {
	switch {
	case strings.HasPrefix(line, "ok "):
		r.passed++
	case strings.HasPrefix(line, "not ok "):
		r.failed++
	case line == "done":
		r.done = true
	}
}

// ok: a machine that died early must not look green.
func (r *report) ok() bool { return r.done && r.failed == 0 && r.passed > 0 }

// writePayload makes the second disk: a tar of files that can be run.
func writePayload(file string, files map[string][]byte) error {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, content := range files {
		header := &tar.Header{Name: name, Mode: 0o755, Size: int64(len(content)), Format: tar.FormatUSTAR}
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		if _, err := w.Write(content); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	const sector = 512
	b.Write(make([]byte, -b.Len()&(sector-1)))
	return os.WriteFile(file, b.Bytes(), 0o644)
}

// disk is Debian, as files.
type disk struct{ image, kernel, initrd string }

// What is on the disk beyond the least that has apt and systemd.
var debianPackages = []string{"systemd", "systemd-sysv", "udev", "dbus", "iproute2", "kmod", "linux-image-cloud-amd64", "initramfs-tools", "procps", "rpm"}

// startGuest is the unit that runs the payload, its output on the second serial port, and powers off.
const startGuest = `[Unit]
Description=what is to be tried
After=basic.target
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'mkdir /run/payload && cd /run/payload && tar -xf /dev/vdb && exec bash ./guest >/dev/ttyS1 2>&1'
`

// makeDisk returns the disk of the cache, and makes it where there is none that is made in this way. It appears there
// complete or not at all.
func makeDisk(ctx context.Context, cache string, out io.Writer) (disk, error) {
	include := strings.Join(debianPackages, ",")
	dir := filepath.Join(cache, fmt.Sprintf("debian-%x", sha256.Sum256([]byte(include+startGuest)))[:20+len("debian-")])
	d := disk{filepath.Join(dir, "disk"), filepath.Join(dir, "vmlinuz"), filepath.Join(dir, "initrd.img")}
	if _, err := os.Stat(dir); err == nil {
		return d, nil
	}
	fmt.Fprintln(out, "making Debian's disk: some minutes, once")
	tmp, err := os.MkdirTemp(cache, "disk-")
	if err != nil {
		return disk{}, err
	}
	defer os.RemoveAll(tmp)
	tree, files := filepath.Join(tmp, "tree"), filepath.Join(tmp, "files")
	if _, err := command(ctx, "mmdebstrap", "--quiet", "--variant=apt", "--include="+include, `--aptopt=APT::Install-Recommends "false"`,
		"--dpkgopt=path-exclude=/usr/share/locale/*", "bookworm", tree); err != nil {
		return disk{}, err
	}
	units := filepath.Join(tree, "etc/systemd/system")
	err = errors.Join(
		os.Mkdir(files, 0o755),
		os.WriteFile(filepath.Join(units, "guest.service"), []byte(startGuest), 0o644),
		os.MkdirAll(filepath.Join(units, "multi-user.target.wants"), 0o755),
		os.Symlink("../guest.service", filepath.Join(units, "multi-user.target.wants/guest.service")),
		os.WriteFile(filepath.Join(tree, "etc/fstab"), []byte("/dev/vda / ext4 defaults 0 1\n"), 0o644),
	)
	if err != nil {
		return disk{}, err
	}
	for to, from := range map[string]string{"vmlinuz": "vmlinuz", "initrd.img": "initrd.img"} { // links to the newest
		if _, err := command(ctx, "cp", "--dereference", filepath.Join(tree, from), filepath.Join(files, to)); err != nil {
			return disk{}, err
		}
	}
	if _, err := command(ctx, "mkfs.ext4", "-q", "-d", tree, filepath.Join(files, "disk"), "2G"); err != nil {
		return disk{}, err
	}
	return d, os.Rename(files, dir)
}

// command runs a program and returns what it printed; what it complained about is in the error.
func command(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", name, err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
