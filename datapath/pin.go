// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// The names below <bpffs>. None holds a dot: bpffs refuses those.
const (
	pinDirName     = "weft"
	pinIPCache     = "ipcache"
	pinCounters    = "counters"
	pinNear        = "near"
	pinFront       = "front"
	pinMissed      = "missed"
	pinEvents      = "events"
	pinConfig      = "config"
	pinFast        = "fast"
	pinNetworks    = "networks"
	pinHosts       = "hosts"
	pinPods        = "pods"
	pinProgramsDir = "programs"
	pinLinksDir    = "links"
	pinQdiscsDir   = "qdiscs" // directories named by the index of a device whose clsact qdisc weft made
)

// pinDir is the locked directory of this agent's pins. Close releases the lock and leaves the pins.
type pinDir struct {
	path string
	lock *os.File
}

// openPinDir makes <bpffs>/weft what it should be - on a BPF file system, ours, mode 0700 - and locks it. The lock lies on
// the directory itself, so it goes with the process, however that ends. Errors wrap [ErrBPFFS] or [ErrInUse].
func openPinDir(bpffs string) (_ *pinDir, err error) {
	if err := checkBPFFS(bpffs); err != nil {
		return nil, err
	}
	path := filepath.Join(bpffs, pinDirName)
	if err := ownDirectory(path); err != nil {
		return nil, err
	}
	p, err := lockPinDir(path)
	if err != nil {
		return nil, err
	}
	for _, sub := range []string{pinProgramsDir, pinLinksDir, pinQdiscsDir} {
		if err := ownDirectory(filepath.Join(p.path, sub)); err != nil {
			_ = p.Close()
			return nil, err
		}
	}
	return p, nil
}

// lockPinDir locks a directory of pins that exists.
func lockPinDir(path string) (*pinDir, error) {
	lock, err := os.Open(path)
	if err != nil {
		return nil, explain("open pin directory", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: another agent holds the lock on %s: stop it, or give this one a BPF file system "+
				"of its own with --bpffs", ErrInUse, path)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return &pinDir{path: path, lock: lock}, nil
}

// Close releases the lock.
func (p *pinDir) Close() error { return p.lock.Close() }

// file is the path of one pin.
func (p *pinDir) file(elem ...string) string {
	return filepath.Join(append([]string{p.path}, elem...)...)
}

// checkBPFFS returns an [ErrBPFFS] that says what to do unless dir lies on a mounted BPF file system. Without one every
// map would end with the agent.
func checkBPFFS(dir string) error {
	var st unix.Statfs_t
	switch err := unix.Statfs(dir, &st); {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %s does not exist: make it and mount one there with `mount -t bpf bpf %s`", ErrBPFFS, dir, dir)
	case err != nil:
		return fmt.Errorf("%w: %s: %w", ErrBPFFS, dir, err)
	case st.Type != unix.BPF_FS_MAGIC:
		return fmt.Errorf("%w: nothing of the kind is mounted on %s: mount one with `mount -t bpf bpf %s`", ErrBPFFS, dir, dir)
	}
	return nil
}

// ownDirectory makes path a directory of this user that nobody else can enter. One of another user is an error: whoever
// owns it can replace every pin in it.
func ownDirectory(path string) error {
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return explain("make "+path, err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return explain("look at "+path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return fmt.Errorf("%w: %s is not a directory: remove it", ErrBPFFS, path)
	}
	if uid := os.Geteuid(); int(st.Uid) != uid {
		return fmt.Errorf("%w: %s belongs to uid %d, and weft runs as %d: run it as its owner, or take it away with `weft cleanup` as root",
			ErrBPFFS, path, st.Uid, uid)
	}
	if st.Mode&0o777 != 0o700 {
		if err := os.Chmod(path, 0o700); err != nil {
			return explain("close "+path+" to others", err)
		}
	}
	return nil
}

// linkPinName is the name of the pin of a program's link on a device. Dots, which VLAN devices have in their names,
// become hyphens.
func linkPinName(device, program string) string {
	return strings.ReplaceAll(device, ".", "-") + "-" + program
}
