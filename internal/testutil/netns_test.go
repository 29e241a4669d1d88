// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestNetNSIsItsOwn(t *testing.T) {
	ns := NewNetNS(t)
	inode := func() uint64 {
		var st unix.Stat_t
		if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
			t.Fatal(err)
		}
		return st.Ino
	}
	before := inode()
	var inside uint64
	var links []net.Interface
	ns.Do(t, func() {
		inside = inode()
		links, _ = net.Interfaces()
	})
	if after := inode(); after != before {
		t.Errorf("after Do the thread is in namespace %d, want %d", after, before)
	}
	if inside == before {
		t.Error("inside Do the thread is in the namespace of the process")
	}
	if len(links) != 1 || links[0].Name != "lo" || links[0].Flags&net.FlagUp == 0 {
		t.Errorf("links of a fresh namespace: %+v, want lo alone, up", links)
	}
	var child string
	ns.Do(t, func() {
		out, err := exec.Command("stat", "-L", "-c", "%i", "/proc/self/ns/net").Output()
		if err != nil {
			t.Error(err)
		}
		child = strings.TrimSpace(string(out))
	})
	if want := strconv.FormatUint(inside, 10); child != want {
		t.Errorf("a process started inside is in namespace %s, want %s", child, want)
	}
}

func TestNetNSIsRemoved(t *testing.T) {
	var path string
	t.Run("inner", func(t *testing.T) { path = NewNetNS(t).Path() })
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("lstat %s after the test: %v, want that it does not exist", path, err)
	}
}

func TestMountBPFFS(t *testing.T) {
	var dir string
	t.Run("inner", func(t *testing.T) {
		dir = MountBPFFS(t)
		var fs unix.Statfs_t
		if err := unix.Statfs(dir, &fs); err != nil {
			t.Fatal(err)
		}
		if fs.Type != unix.BPF_FS_MAGIC {
			t.Errorf("%s has file system type %#x, want bpf", dir, fs.Type)
		}
	})
	if _, err := os.Lstat(dir); !os.IsNotExist(err) {
		t.Errorf("lstat %s after the test: %v, want that it does not exist", dir, err)
	}
}

// A process that is to end with its parent outlives the making and the use of namespaces: they end no thread.
func TestNetNSEndsNoThread(t *testing.T) {
	RequireRoot(t)
	const children = 8
	var all []*exec.Cmd
	for range children {
		cmd := exec.Command("sleep", "600")
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		all = append(all, cmd)
		NewNetNS(t).Do(t, func() {})
	}
	for _, cmd := range all {
		// Only who still runs can be told to end.
		var info unix.Siginfo
		if err := unix.Waitid(unix.P_PID, cmd.Process.Pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil); err != nil || info.Signo != 0 {
			t.Errorf("process %d has ended: %+v, %v", cmd.Process.Pid, info, err)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}
