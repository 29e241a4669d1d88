// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"runtime"

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
	o := owner{int(st.Uid), int(st.Gid)}
	if uid := os.Geteuid(); uid != o.uid && uid != 0 {
		return owner{}, fmt.Errorf("%w: %s belongs to uid %d: run weft as that user, or as root", ErrBPFFS, path, o.uid)
	}
	return o, nil
}

// run calls do with the owner's rights to files, on the calling thread: what root does in a directory of another user is
// then nothing that this user could not do, whatever links he puts there meanwhile.
func (o owner) run(do func() error) error {
	if o.uid == os.Geteuid() {
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
	const ask = -1 // no id that the kernel would take: it only tells
	gid, _ := unix.SetfsgidRetGid(ask)
	uid, _ := unix.SetfsuidRetUid(ask)
	if (owner{uid, gid}) != o {
		return before, fmt.Errorf("%w: the files of uid %d cannot be reached as that user: run weft as uid %d, or as root with "+
			"CAP_SETUID and CAP_SETGID", ErrPrivileges, o.uid, o.uid)
	}
	return before, nil
}
