// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

var (
	// ErrBPFFS indicates that the configured directory is no BPF file system, or one that cannot be written.
	ErrBPFFS = errors.New("no usable BPF file system")
	// ErrInUse indicates that another agent works on the same pins.
	ErrInUse = errors.New("pins are in use")
	// ErrIncompatible indicates a pin whose object is not of the wanted kind, type, size or flags.
	ErrIncompatible = errors.New("incompatible pin")
	// ErrPrivileges indicates that the process lacks a capability.
	ErrPrivileges = errors.New("missing privileges")
	// ErrKernel indicates that the kernel is too old or was built without a feature.
	ErrKernel = errors.New("kernel feature missing")
)

// minKernel is the first Linux with all that the datapath needs. Where tcx is missing, before 6.6, filters of tc serve.
const minKernel = "5.10"

// howToGetPrivileges ends the sentences about missing capabilities.
const howToGetPrivileges = "run weft as root, or with AmbientCapabilities=CAP_BPF CAP_NET_ADMIN"

// checkPrivileges returns an [ErrPrivileges] that names the capabilities that the calling thread lacks. CAP_SYS_ADMIN
// stands for CAP_BPF, as in the kernel.
func checkPrivileges() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	return missingCapabilities(uint64(data[0].Effective) | uint64(data[1].Effective)<<32)
}

// raiseMemlock lifts the bound on the memory of maps, which before Linux 5.11 counts as locked memory of the process. Where
// that is not allowed, making a map may fail, and says why.
func raiseMemlock() {
	if olderThan(kernelRelease(), "5.11") {
		_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
	}
}

// olderThan compares the first two numbers of releases; what cannot be read is not older.
func olderThan(release, than string) bool {
	var a, b [2]int
	if _, err := fmt.Sscanf(release, "%d.%d", &a[0], &a[1]); err != nil {
		return false
	}
	if _, err := fmt.Sscanf(than, "%d.%d", &b[0], &b[1]); err != nil {
		return false
	}
	return a[0] < b[0] || a[0] == b[0] && a[1] < b[1]
}

// missingCapabilities judges a set of effective capabilities, bit n for capability n.
func missingCapabilities(effective uint64) error {
	has := func(capability int) bool { return effective&(1<<capability) != 0 }
	var missing []string
	if !has(unix.CAP_BPF) && !has(unix.CAP_SYS_ADMIN) {
		missing = append(missing, "CAP_BPF")
	}
	if !has(unix.CAP_NET_ADMIN) {
		missing = append(missing, "CAP_NET_ADMIN")
	}
	if missing == nil {
		return nil
	}
	return fmt.Errorf("%w: %s: %s", ErrPrivileges, strings.Join(missing, " and "), howToGetPrivileges)
}

// explain turns what the kernel and the BPF library say about doing into one line that names what is missing and how to
// get it. The library blames a lack of memory for every lack of permission, which is hardly ever right.
func explain(doing string, err error) error {
	var verifier *ebpf.VerifierError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrPrivileges), errors.Is(err, ErrKernel), errors.Is(err, ErrBPFFS), errors.Is(err, ErrIncompatible):
		return fmt.Errorf("%s: %w", doing, err)
	case errors.As(err, &verifier) && olderThan(kernelRelease(), "5.11") && errors.Is(err, unix.EACCES):
		return fmt.Errorf("%s: the kernel's verifier refuses the program, as before Linux 5.11 without CAP_PERFMON: %w", doing, err)
	case errors.As(err, &verifier):
		return fmt.Errorf("%s: the kernel's verifier refuses the program: %w", doing, err)
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%s: %w: it is mounted read-only: remount it with rw, under systemd without ProtectKernelTunables=yes",
			doing, ErrBPFFS)
	case errors.Is(err, unix.EPERM):
		if missing := checkPrivileges(); missing != nil {
			return fmt.Errorf("%s: %w", doing, missing)
		}
		return fmt.Errorf("%s: %w: the kernel refuses although the capabilities are there: look for a user namespace, "+
			"a seccomp filter or lockdown around this process, and before Linux 5.11 for a low RLIMIT_MEMLOCK",
			doing, ErrPrivileges)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s: %w: the file belongs to another user: run weft as its owner: %w", doing, ErrPrivileges, err)
	case errors.Is(err, ebpf.ErrNotSupported):
		return fmt.Errorf("%s: %w: %s: weft needs Linux %s or newer, this is %s", doing, ErrKernel,
			strings.TrimSpace(err.Error()), minKernel, kernelRelease())
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// kernelRelease is what uname -r prints.
func kernelRelease() string {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return "an unknown release"
	}
	return unix.ByteSliceToString(uts.Release[:])
}
