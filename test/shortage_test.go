// SPDX-License-Identifier: Apache-2.0

package test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
)

// exhaustInotify takes all notifications that the kernel has for a user, until release. Those it has for others stay.
func exhaustInotify(t *testing.T, uid int) (release func()) {
	t.Helper()
	var taken []int
	var failed error
	done := make(chan struct{})
	go func() { // whose thread is that user's, and ends with it
		defer close(done)
		runtime.LockOSThread()
		const same = ^uintptr(0)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, same, uintptr(uid), same); errno != 0 {
			failed = errno
			return
		}
		for {
			fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
			if err != nil {
				if !errors.Is(err, unix.EMFILE) {
					failed = err
				}
				return
			}
			taken = append(taken, fd)
		}
	}()
	<-done
	release = func() {
		for _, fd := range taken {
			_ = unix.Close(fd)
		}
		taken = nil
	}
	t.Cleanup(release)
	if failed != nil {
		t.Fatal(failed)
	}
	if fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		t.Fatalf("it was this process that had no descriptors left: %v", err)
	} else {
		_ = unix.Close(fd)
	}
	return release
}

// Without notifications the agent reads its configs at intervals, and says so; once there are some again, it has them.
//
// lesson: K11
func TestNoInotify(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	const uid = 54321 // nobody else's
	west := testutil.StartEtcd(t)
	west.Load(t, golden.Path(t, "kvstore-state-west.jsonl"))
	h := newHost(t)
	h.giveTo(t, uid)
	release := exhaustInotify(t, uid)
	h.start(t, "east", 1)
	complains := func(want bool) {
		t.Helper()
		testutil.Eventually(t, 30*time.Second, func() error {
			s, err := api.NewClient(h.socket).Status(t.Context())
			if err != nil {
				return err // it has just begun
			}
			problems := strings.Join(s.Problems, "\n")
			if strings.Contains(problems, "fs.inotify.max_user_instances") != want {
				return fmt.Errorf("problems %q, want a word about inotify: %t", problems, want)
			}
			return nil
		})
	}
	complains(true)
	config := filepath.Join(h.clustermesh, "west")
	west.WriteConfig(t, config)
	if err := os.Chown(config, uid, uid); err != nil {
		t.Fatal(err)
	}
	h.awaitEntry(t, "10.2.1.10")
	complains(true)
	release()
	complains(false)
	h.awaitVerified(t)
}
