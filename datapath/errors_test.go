// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Each refusal of the kernel becomes one line that says what is missing and how to get it.
//
// lesson: A6
func TestExplain(t *testing.T) {
	for _, tc := range []struct {
		name string
		err  error
		is   error
		says string
	}{
		{"no permission, which the library takes for a lack of memory",
			fmt.Errorf("map create: %w (MEMLOCK may be too low, consider rlimit.RemoveMemlock)", unix.EPERM),
			ErrPrivileges, "seccomp"},
		{"old kernel", fmt.Errorf("tcx not supported (requires >= v6.6): %w", ebpf.ErrNotSupported), ErrKernel, "Linux 6.6 or newer"},
		{"read-only file system", &fs.PathError{Op: "mkdir", Path: "/x", Err: unix.EROFS}, ErrBPFFS, "read-only"},
		{"file of another user", &fs.PathError{Op: "open", Path: "/x", Err: unix.EACCES}, ErrPrivileges, "another user"},
		{"known already", fmt.Errorf("%w: x", ErrIncompatible), ErrIncompatible, "x"},
		{"anything else", unix.ENOMEM, unix.ENOMEM, "cannot allocate memory"},
	} {
		err := explain("create map ipcache", tc.err)
		if !errors.Is(err, tc.is) || !strings.Contains(err.Error(), tc.says) || !strings.HasPrefix(err.Error(), "create map ipcache: ") {
			t.Errorf("%s: %v, want %q that says %q", tc.name, err, tc.is, tc.says)
		}
		if strings.Contains(err.Error(), "MEMLOCK may") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %q, want one line without the library's guess", tc.name, err)
		}
	}
	if explain("x", nil) != nil {
		t.Error("no error became one")
	}
}

// A kernel without tcx is refused in one line, and nothing is left behind; any other one is not.
//
// lesson: K12
func TestOldKernel(t *testing.T) {
	h := newTestHost(t)
	var major, minor int
	if _, err := fmt.Sscanf(kernelRelease(), "%d.%d", &major, &minor); err != nil {
		t.Fatalf("kernel release %q: %v", kernelRelease(), err)
	}
	if major > 6 || major == 6 && minor >= 6 {
		h.start().stop()
		return
	}
	if err := h.refuse(); !errors.Is(err, ErrKernel) || !strings.Contains(err.Error(), "Linux 6.6 or newer") {
		t.Errorf("got %v, want %v", err, ErrKernel)
	}
	if left, err := os.ReadDir(h.cfg.BPFFS); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
