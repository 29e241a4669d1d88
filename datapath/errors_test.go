// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
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
		{"old kernel", fmt.Errorf("tcx not supported (requires >= v6.6): %w", ebpf.ErrNotSupported), ErrKernel, "Linux 5.10 or newer"},
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
