// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/datapath"
)

// The lab has a mount of the unified hierarchy for itself, wherever else the machine may have it. In it each node has a cgroup, named
// as its network namespace: what `weft-lab exec` runs on the node or in its pods is there, and reaches services as the
// node's agent knows them.

func (l *lab) cgroupRoot() string         { return filepath.Join(l.dir, "cgroup") }
func (l *lab) cgroup(n nodePlan) string   { return filepath.Join(l.cgroupRoot(), n.NetNS) }
func cgroupProcesses(group string) string { return filepath.Join(group, "cgroup.procs") }

// mountCgroups mounts the unified hierarchy for the lab, once. Where the machine has it, its mount is bound: another one of its own
// would change the options of the whole hierarchy, such as nsdelegate, to its own.
func (l *lab) mountCgroups() error {
	if cgroupsMounted(l.cgroupRoot()) {
		return nil
	}
	if err := os.MkdirAll(l.cgroupRoot(), 0o755); err != nil {
		return err
	}
	root, err := datapath.DefaultCgroup()
	if err == nil {
		err = unix.Mount(root, l.cgroupRoot(), "", unix.MS_BIND, "")
	} else {
		err = unix.Mount("cgroup2", l.cgroupRoot(), "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	}
	if err != nil {
		return fmt.Errorf("mount the unified hierarchy of cgroups on %s: %w", l.cgroupRoot(), err)
	}
	return nil
}

// cgroupsMounted reports whether dir is a directory of the unified hierarchy.
func cgroupsMounted(dir string) bool {
	var st unix.Statfs_t
	err := unix.Statfs(dir, &st)
	return err == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

// buildCgroup makes the cgroup of a node; one that is there already is fine.
func (l *lab) buildCgroup(n nodePlan) error {
	if err := os.Mkdir(l.cgroup(n), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make the cgroup of %s: %w", n.Name, err)
	}
	return nil
}

// joinCgroup makes this process, and what it becomes or starts, one of a node.
func (l *lab) joinCgroup(n nodePlan) error {
	if err := os.WriteFile(cgroupProcesses(l.cgroup(n)), []byte("0"), 0); err != nil {
		return fmt.Errorf("enter the cgroup of %s: %w", n.Name, err)
	}
	return nil
}

// leaveCgroups makes this process, and what it becomes or starts, one of no node.
func (l *lab) leaveCgroups() error {
	if err := os.WriteFile(cgroupProcesses(l.cgroupRoot()), []byte("0"), 0); err != nil {
		return fmt.Errorf("leave the cgroups of the lab: %w", err)
	}
	return nil
}

// removeCgroups removes the cgroups of all nodes, and the mount. Processes that are still in one, such as a shell that was
// left open, go to the root.
func (l *lab) removeCgroups() error {
	if err := l.mountCgroups(); err != nil { // a crash may have left cgroups without the mount
		return err
	}
	var errs []error
	for _, n := range l.nodes() {
		errs = append(errs, l.evacuate(n))
		if err := os.Remove(l.cgroup(n)); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove the cgroup of %s: %w", n.Name, err))
		}
	}
	errs = append(errs, unmountAll(l.cgroupRoot()))
	return errors.Join(errs...)
}

// evacuate moves the processes of a node's cgroup to the root.
func (l *lab) evacuate(n nodePlan) error {
	content, err := os.ReadFile(cgroupProcesses(l.cgroup(n)))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, pid := range strings.Fields(string(content)) {
		err := os.WriteFile(cgroupProcesses(l.cgroupRoot()), []byte(pid), 0)
		if err != nil && !errors.Is(err, unix.ESRCH) { // it may have ended meanwhile
			return fmt.Errorf("move process %s out of the cgroup of %s: %w", pid, n.Name, err)
		}
	}
	return nil
}
