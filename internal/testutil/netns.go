// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// NetNS is a network namespace of one test, with its loopback device up. Its methods are safe for concurrent use.
type NetNS struct {
	path string
	file *os.File
}

// NewNetNS makes an empty network namespace, which is removed when the test ends.
func NewNetNS(t testing.TB) *NetNS {
	t.Helper()
	RequireRoot(t)
	// A directory of the test's own, not /run/netns: whoever first uses `ip netns` on a machine mounts something over
	// that one, which hides the names that are there.
	ns := &NetNS{path: filepath.Join(t.TempDir(), "netns")}
	if err := os.WriteFile(ns.path, nil, 0o600); err != nil {
		t.Fatalf("network namespace: %v", err)
	}
	if err := ns.create(); err != nil {
		t.Fatalf("network namespace %s: %v", ns.path, err)
	}
	t.Cleanup(func() {
		_ = ns.file.Close()
		if err := unix.Unmount(ns.path, unix.MNT_DETACH); err != nil {
			t.Errorf("network namespace %s: unmount: %v", ns.path, err)
		}
	})
	ns.Do(t, func() {
		if err := upLoopback(); err != nil {
			t.Errorf("network namespace %s: loopback up: %v", ns.path, err)
		}
	})
	return ns
}

// create makes the namespace, and takes the thread back home: were it to end instead, the kernel would kill the processes
// that it has started, at any time before, to end with their parent (PR_SET_PDEATHSIG means the thread).
func (ns *NetNS) create() error {
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer home.Close()
	err = ns.unshare()
	if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
		// The thread stays locked and dies with this goroutine: nobody else is to run in the wrong namespace.
		return errors.Join(err, fmt.Errorf("leave: %w", back))
	}
	runtime.UnlockOSThread()
	return err
}

// unshare puts the calling thread into a new namespace, and keeps that by a file.
func (ns *NetNS) unshare() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("/proc/thread-self/ns/net", ns.path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", ns.path, err)
	}
	file, err := os.Open(ns.path)
	if err != nil {
		_ = unix.Unmount(ns.path, unix.MNT_DETACH)
	}
	ns.file = file
	return err
}

// Path is the file that stands for the namespace, for `ip link set … netns PATH` and `nsenter --net=PATH`.
func (ns *NetNS) Path() string { return ns.path }

// Do runs f inside the namespace, on the caller's goroutine, which is locked to its thread meanwhile. Goroutines that f
// starts are not in the namespace; the sockets that f opens, and the processes that it starts, stay in it.
func (ns *NetNS) Do(t testing.TB, f func()) {
	t.Helper()
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		t.Fatalf("network namespace %s: %v", ns.path, err)
	}
	defer home.Close()
	if err := unix.Setns(int(ns.file.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		t.Fatalf("network namespace %s: enter: %v", ns.path, err)
	}
	defer func() {
		if err := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); err != nil {
			// The thread stays locked and dies with this goroutine: nobody else is to run in the wrong namespace.
			t.Errorf("network namespace %s: leave: %v", ns.path, err)
			return
		}
		runtime.UnlockOSThread()
	}()
	f()
}

// upLoopback brings the loopback device of the current namespace up.
func upLoopback() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo)
}
