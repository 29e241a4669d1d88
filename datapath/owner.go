// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// owner is the user and the group that a directory of pins belongs to.
type owner struct{ uid, gid int }

// ownerOf returns the owner of a directory of pins: this user, or for root any. Links are not followed. The error wraps
// [ErrBPFFS].
func ownerOf(path string) (owner, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return owner{}, explain("look at "+path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return owner{}, fmt.Errorf("%w: %s is not a directory: remove it", ErrBPFFS, path)
	}
	switch uid := os.Geteuid(); {
	case uid == int(st.Uid):
		return fileUser(), nil
	case uid != 0:
		return owner{}, fmt.Errorf("%w: %s belongs to uid %d: run weft as that user, or as root", ErrBPFFS, path, st.Uid)
	}
	return owner{int(st.Uid), int(st.Gid)}, nil
}

// run calls do with the owner's rights to files, on the calling thread: what root does in a directory of another user is
// then nothing that this user could not do, whatever links he puts there meanwhile.
func (o owner) run(do func() error) error {
	if o == fileUser() {
		return do()
	}
	runtime.LockOSThread()
	before, err := o.become()
	if err != nil {
		_, _ = before.become()
		runtime.UnlockOSThread()
		return err
	}
	err = do()
	if _, restored := before.become(); restored != nil {
		return errors.Join(err, restored) // the thread stays locked, and ends with its goroutine
	}
	runtime.UnlockOSThread()
	return err
}

// become gives the calling thread the owner's rights to files, and returns whose it had. To other files than his, root has
// none then.
func (o owner) become() (before owner, err error) {
	before.gid, _ = unix.SetfsgidRetGid(o.gid)
	before.uid, _ = unix.SetfsuidRetUid(o.uid)
	if fileUser() != o {
		return before, fmt.Errorf("%w: the files of uid %d cannot be reached as that user: run weft as uid %d, or as root with "+
			"CAP_SETUID and CAP_SETGID", ErrPrivileges, o.uid, o.uid)
	}
	return before, nil
}

// programInfo is [ebpf.Program.Info], with this process's own rights to files: the library reads what /proc has of the
// descriptor, too, and before Linux 5.14 that is for the process's user alone.
func programInfo(p *ebpf.Program) (*ebpf.ProgramInfo, error) {
	var info *ebpf.ProgramInfo
	err := owner{os.Geteuid(), os.Getegid()}.run(func() (err error) {
		info, err = p.Info()
		return err
	})
	return info, err
}

// fileUser is whose rights to files the calling thread has.
func fileUser() owner {
	const ask = -1 // no id that the kernel would take: it only tells
	uid, errUID := unix.SetfsuidRetUid(ask)
	gid, errGID := unix.SetfsgidRetGid(ask)
	if errUID != nil || errGID != nil {
		// A filter of system calls refuses even the question, as that of the package's unit does: so nothing was ever changed.
		return owner{os.Geteuid(), os.Getegid()}
	}
	return owner{uid, gid}
}
