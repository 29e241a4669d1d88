// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
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
