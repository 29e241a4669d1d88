// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Cgroup is a cgroup of the unified hierarchy, of one test. A socket belongs for good to the cgroup that its process was in
// when it was opened.
type Cgroup struct{ path string }

// NewCgroup makes an empty cgroup below the root, which is removed when the test ends. The hierarchy is mounted for the
// test, wherever else it may be mounted.
func NewCgroup(t testing.TB) *Cgroup {
	t.Helper()
	RequireRoot(t)
	root := t.TempDir()
	if err := mountCgroups(root); err != nil {
		t.Fatalf("mount cgroup2: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(root, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount cgroup2 %s: %v", root, err)
		}
	})
	path, err := os.MkdirTemp(root, "weft-test-")
	if err == nil {
		err = os.Chmod(path, 0o755) // as the system's own are
	}
	if err != nil {
		t.Fatalf("make a cgroup: %v", err)
	}
	t.Cleanup(func() {
		if err := os.Remove(path); err != nil {
			t.Errorf("remove cgroup: %v", err)
		}
	})
	return &Cgroup{path: path}
}

// mountCgroups mounts the hierarchy at dir. Where the machine has it, its mount is bound: a new one would change the options of
// the whole hierarchy, such as nsdelegate.
func mountCgroups(dir string) error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		mount, source, _ := strings.Cut(line, " - ")
		fields := strings.Fields(mount)
		if !strings.HasPrefix(source, "cgroup2 ") || fields[3] != "/" {
			continue
		}
		if err := unix.Mount(fields[4], dir, "", unix.MS_BIND, ""); !errors.Is(err, unix.ENOENT) { // another test's, which has ended
			return err
		}
	}
	return unix.Mount("cgroup2", dir, "cgroup2", 0, "")
}

// Path is the directory of the cgroup.
func (c *Cgroup) Path() string { return c.path }

// Do runs f while this process is in the cgroup. Whatever sockets the process opens meanwhile, on whatever goroutine, belong
// to the cgroup. One Do at a time, in a process.
func (c *Cgroup) Do(t testing.TB, f func()) {
	t.Helper()
	home, err := cgroupOfSelf()
	if err != nil {
		t.Fatal(err)
	}
	if err := enterCgroup(c.path); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := enterCgroup(filepath.Join(filepath.Dir(c.path), home)); err != nil {
			t.Error(err)
		}
	}()
	f()
}

func enterCgroup(path string) error {
	if err := os.WriteFile(filepath.Join(path, "cgroup.procs"), []byte("0"), 0); err != nil {
		return fmt.Errorf("enter cgroup: %w", err)
	}
	return nil
}

// cgroupOfSelf is this process's cgroup of the unified hierarchy, from its root.
func cgroupOfSelf() (string, error) {
	content, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(content)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			return path, nil
		}
	}
	return "", fmt.Errorf("this process is in no cgroup of the unified hierarchy: %q", content)
}
