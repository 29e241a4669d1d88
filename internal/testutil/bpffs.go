// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"testing"

	"golang.org/x/sys/unix"
)

// MountBPFFS mounts a fresh BPF file system, mode 0700, on a temporary directory and returns that directory. It is
// unmounted when the test ends, which also frees the objects that only its pins kept alive.
func MountBPFFS(t testing.TB) string {
	t.Helper()
	RequireRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
		t.Fatalf("mount bpffs on %s: %v", dir, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount bpffs %s: %v", dir, err)
		}
	})
	return dir
}
