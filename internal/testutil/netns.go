// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// NetNS is a network namespace of one test. It has a name under /run/netns, so that `ip netns exec` finds it, and its
// loopback device is up. Its methods are safe for concurrent use.
type NetNS struct {
	name string
	path string
	file *os.File
}

var netnsCount atomic.Uint32

// netnsDir is where iproute2 keeps the names of network namespaces.
const netnsDir = "/run/netns"

// NewNetNS makes an empty network namespace, which is removed when the test ends.
func NewNetNS(t testing.TB) *NetNS {
	t.Helper()
	RequireRoot(t)
	ns := &NetNS{name: fmt.Sprintf("weft-test-%d-%d", os.Getpid(), netnsCount.Add(1))}
	ns.path = filepath.Join(netnsDir, ns.name)
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		t.Fatalf("network namespace: %v", err)
	}
	// A name is a bind mount on an empty file, which need not lie on a shared mount: nobody else looks for it.
	if err := os.WriteFile(ns.path, nil, 0o600); err != nil {
		t.Fatalf("network namespace: %v", err)
	}
	t.Cleanup(func() { _ = os.Remove(ns.path) })
	if err := ns.create(); err != nil {
		t.Fatalf("network namespace %s: %v", ns.name, err)
	}
	t.Cleanup(func() {
		_ = ns.file.Close()
		if err := unix.Unmount(ns.path, unix.MNT_DETACH); err != nil {
			t.Errorf("network namespace %s: unmount: %v", ns.name, err)
		}
	})
	ns.Do(t, func() {
		if err := upLoopback(); err != nil {
			t.Errorf("network namespace %s: loopback up: %v", ns.name, err)
		}
	})
	return ns
}

// create makes the namespace on a thread of its own, which ends with it, so that no other code ever runs on that thread.
func (ns *NetNS) create() error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- func() error {
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
		}()
	}()
	return <-done
}

// Name is the namespace's name for `ip netns exec`.
func (ns *NetNS) Name() string { return ns.name }

// Path is the file that stands for the namespace.
func (ns *NetNS) Path() string { return ns.path }

// Do runs f inside the namespace, on the caller's goroutine, which is locked to its thread meanwhile. Goroutines that f
// starts are not in the namespace; the sockets that f opens stay in it.
func (ns *NetNS) Do(t testing.TB, f func()) {
	t.Helper()
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		t.Fatalf("network namespace %s: %v", ns.name, err)
	}
	defer home.Close()
	if err := unix.Setns(int(ns.file.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		t.Fatalf("network namespace %s: enter: %v", ns.name, err)
	}
	defer func() {
		if err := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); err != nil {
			// The thread stays locked and dies with this goroutine: nobody else is to run in the wrong namespace.
			t.Errorf("network namespace %s: leave: %v", ns.name, err)
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
