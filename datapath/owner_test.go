// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"os"
	"runtime"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/internal/testutil"
)

// refuseFileUsers has the kernel refuse this whole process the calls that change whose rights to files a thread has, as the
// SystemCallFilter of the package's units does (seccomp(2)).
func refuseFileUsers(t *testing.T) {
	t.Helper()
	const setModeFilter, tsync, numberOffset = 1, 1, 0
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: numberOffset},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_SETFSUID, Jt: 2},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_SETFSGID, Jt: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0x7fff0000},                      // SECCOMP_RET_ALLOW
		{Code: unix.BPF_RET | unix.BPF_K, K: 0x00050000 | uint32(unix.EPERM)}, // SECCOMP_RET_ERRNO
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, err := unix.Syscall(unix.SYS_SECCOMP, setModeFilter, tsync, uintptr(unsafe.Pointer(&program)))
	runtime.KeepAlive(filter)
	if err != 0 {
		t.Fatalf("seccomp: %v", err)
	}
}

// An agent that may not even ask whose rights to files it has goes on with its own, and with nobody else's.
func TestOwnerUnderAFilterOfSystemCalls(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	refuseFileUsers(t)
	own := owner{os.Geteuid(), os.Getegid()}
	if got := fileUser(); got != own {
		t.Errorf("files are reached as %+v, want %+v", got, own)
	}
	ran := false
	if err := own.run(func() error { ran = true; return nil }); err != nil || !ran {
		t.Errorf("as oneself: %v", err)
	}
	other := owner{own.uid + 65534, own.gid + 65534}
	if err := other.run(func() error { t.Error("it ran as somebody else"); return nil }); err == nil {
		t.Error("another user's rights were had although the kernel refuses them")
	}
}
