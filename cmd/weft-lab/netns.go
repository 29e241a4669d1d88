// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// netNSDir is where `ip netns` keeps the names of network namespaces.
const netNSDir = "/run/netns"

// onOwnThread runs f on an operating-system thread of its own whose network namespace f may change. The thread ends
// with f, so no other goroutine can ever run in a changed namespace.
func onOwnThread(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		result <- f()
	}()
	return <-result
}

// inNetNS runs f on a thread of its own inside the named network namespace; only the network namespace differs there.
// Sockets that f opens and processes that it starts stay in it.
func inNetNS(name string, f func() error) error {
	return onOwnThread(func() error {
		ns, err := netns.GetFromName(name)
		if err != nil {
			return fmt.Errorf("open network namespace %s: %w", name, err)
		}
		defer ns.Close()
		if err := netns.Set(ns); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", name, err)
		}
		return f()
	})
}

// shareNetNSDir makes the directory of names a shared mount, as `ip netns add` does when it is first used. Were that
// to come after names of ours, its mount would hide them, and nothing could remove them any more.
func shareNetNSDir() error {
	if err := os.MkdirAll(netNSDir, 0o755); err != nil {
		return err
	}
	err := unix.Mount("", netNSDir, "", unix.MS_SHARED|unix.MS_REC, "")
	if errors.Is(err, unix.EINVAL) { // no mount point yet
		if err = unix.Mount(netNSDir, netNSDir, "", unix.MS_BIND|unix.MS_REC, ""); err == nil {
			err = unix.Mount("", netNSDir, "", unix.MS_SHARED|unix.MS_REC, "")
		}
	}
	if err != nil {
		return fmt.Errorf("make %s a shared mount: %w", netNSDir, err)
	}
	return nil
}

// createNetNS makes a named network namespace with its loopback device down.
func createNetNS(name string) error {
	if err := shareNetNSDir(); err != nil {
		return err
	}
	return onOwnThread(func() error {
		ns, err := netns.NewNamed(name)
		if err != nil {
			return fmt.Errorf("create network namespace %s: %w", name, err)
		}
		return ns.Close()
	})
}

// deleteNetNS removes the name of a network namespace; the namespace goes with its last process. An absent one is fine.
func deleteNetNS(name string) error {
	path := filepath.Join(netNSDir, name)
	if err := unmountAll(path); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove network namespace %s: %w", name, err)
	}
	return nil
}

// netNSNames returns the names of the machine's network namespaces that belong to t.
func netNSNames(t topology) ([]string, error) {
	entries, err := os.ReadDir(netNSDir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	var names []string
	for _, e := range entries {
		if t.owns(e.Name()) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// netNSAlive reports whether the name leads to a network namespace, and not to the empty file that a crash leaves.
func netNSAlive(name string) bool {
	var st unix.Statfs_t
	err := unix.Statfs(filepath.Join(netNSDir, name), &st)
	return err == nil && st.Type == unix.NSFS_MAGIC
}

// unmountAll lazily unmounts whatever is mounted on path, layer by layer; nothing mounted, or no such path, is fine.
func unmountAll(path string) error {
	for {
		switch err := unix.Unmount(path, unix.MNT_DETACH); {
		case err == nil:
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil
		default:
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
}

// mountBPFFS mounts a BPF file system of its own on dir.
func mountBPFFS(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("mount a BPF file system on %s: %w", dir, err)
	}
	return nil
}

// bpffsMounted reports whether dir is a BPF file system.
func bpffsMounted(dir string) bool {
	var st unix.Statfs_t
	err := unix.Statfs(dir, &st)
	return err == nil && st.Type == unix.BPF_FS_MAGIC
}

// writeSysctls sets network sysctls, "net.ipv4.ip_forward=1", inside a network namespace.
func writeSysctls(netNS string, settings []string) error {
	return inNetNS(netNS, func() error {
		for _, s := range settings {
			name, value, _ := strings.Cut(s, "=")
			file := "/proc/sys/" + strings.ReplaceAll(name, ".", "/")
			if err := os.WriteFile(file, []byte(value), 0); err != nil {
				return fmt.Errorf("set %s in network namespace %s: %w", s, netNS, err)
			}
		}
		return nil
	})
}

// dialIn connects from inside a network namespace to an address given in numbers.
func dialIn(ctx context.Context, netNS, network, address string) (net.Conn, error) {
	var conn net.Conn
	err := inNetNS(netNS, func() error {
		var err error
		conn, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}
