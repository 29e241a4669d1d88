// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

const (
	// mostNamespaces bounds how many network namespaces are looked at; a node has some hundred pods.
	mostNamespaces = 4096
	// nsfsMagic is the type of the file system that files of namespaces are of; a name that stands for none is of another.
	nsfsMagic = 0x6e736673
)

// endedSockets is what came of looking for sockets.
type endedSockets struct {
	sockets    int
	namespaces int // that were looked at
	err        error
}

// socketEnder ends connected UDP sockets whose backend is gone, beside the reconciler, which may have more to do meanwhile: those
// of the network namespace in which it was made, and of the namespaces that have a name in a directory. What is added while it
// is at work is looked for in one go.
type socketEnder struct {
	own     *socketDestroyer
	ownNet  uint64 // the number of its namespace
	reverse *ebpf.Map
	dir     string // of names of network namespaces, as of `ip netns`; "": none

	mu    sync.Mutex
	gone  []abandoned
	woken chan struct{}
}

// newSocketEnder opens the network namespace of the calling thread. reverse tells which sockets are ours to end.
func newSocketEnder(reverse *ebpf.Map, dir string) (*socketEnder, error) {
	net, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("network namespace: %w", err)
	}
	defer net.Close()
	inode, _ := inodeOf(net)
	own, err := newSocketDestroyer(reverse)
	if err != nil {
		return nil, err
	}
	return &socketEnder{own: own, ownNet: inode, reverse: reverse, dir: dir, woken: make(chan struct{}, 1)}, nil
}

func (e *socketEnder) Close() { e.own.Close() }

// add hands over backends that services gave up.
func (e *socketEnder) add(gone []abandoned) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.gone = append(e.gone, gone...)
	select {
	case e.woken <- struct{}{}:
	default:
	}
}

func (e *socketEnder) take() (gone []abandoned) {
	e.mu.Lock()
	defer e.mu.Unlock()
	gone, e.gone = e.gone, nil
	return gone
}

// run works until ctx ends, and what was added until then is done. It reports what came of it, and in the beginning, where it
// can look.
func (e *socketEnder) run(ctx context.Context, report func(endedSockets)) {
	report(e.end(nil))
	for {
		select {
		case <-e.woken:
			report(e.end(e.take()))
		case <-ctx.Done():
			if gone := e.take(); len(gone) > 0 {
				report(e.end(gone))
			}
			return
		}
	}
}

// end looks for sockets everywhere. That it is not possible in one place keeps it from no other.
func (e *socketEnder) end(gone []abandoned) endedSockets {
	n, err := e.own.destroy(gone)
	ended := endedSockets{sockets: n, namespaces: 1, err: err}
	if e.dir == "" {
		return ended
	}
	more := e.elsewhere(gone)
	return endedSockets{n + more.sockets, 1 + more.namespaces, errors.Join(err, more.err)}
}

// elsewhere looks into the namespaces that have a name, one after the other. No directory is none of them.
func (e *socketEnder) elsewhere(gone []abandoned) (ended endedSockets) {
	names, err := os.ReadDir(e.dir)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			ended.err = fmt.Errorf("--service-netns-dir: %w", err)
		}
		return ended
	}
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return endedSockets{err: fmt.Errorf("network namespace: %w", err)}
	}
	defer home.Close()
	defer func() {
		if err := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); err != nil && ended.namespaces > 0 {
			// The thread stays locked and ends with its goroutine: nothing else is to run in the wrong namespace.
			ended.err = errors.Join(ended.err, fmt.Errorf("leave a network namespace: %w", err))
			return
		}
		runtime.UnlockOSThread()
	}()
	seen := map[uint64]bool{e.ownNet: true}
	var errs []error
	for _, name := range names {
		if ended.namespaces == mostNamespaces {
			errs = append(errs, fmt.Errorf("--service-netns-dir %s: UDP sockets are ended in %d network namespaces, and there are more", e.dir, mostNamespaces))
			break
		}
		n, entered, err := e.within(filepath.Join(e.dir, name.Name()), seen, gone)
		if errors.Is(err, unix.EPERM) {
			errs = append(errs, fmt.Errorf("--service-netns-dir %s: enter a network namespace: %w: the agent needs CAP_SYS_ADMIN for it; "+
				"without it, connected UDP sockets of pods stay with backends that are gone", e.dir, err))
			break
		}
		if entered {
			ended.namespaces++
		}
		ended.sockets += n
		errs = append(errs, err)
	}
	ended.err = errors.Join(errs...)
	return ended
}

// within looks into the namespace of a name, unless that is none, or one that was seen. It leaves the thread there.
func (e *socketEnder) within(path string, seen map[uint64]bool, gone []abandoned) (n int, entered bool, err error) {
	file, err := os.Open(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) { // its pod has ended
			return 0, false, nil
		}
		return 0, false, fmt.Errorf("network namespace: %w", err)
	}
	defer file.Close()
	inode, is := inodeOf(file)
	if !is || seen[inode] {
		return 0, false, nil
	}
	seen[inode] = true
	if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
		return 0, false, fmt.Errorf("%s: %w", path, err)
	}
	if len(gone) == 0 {
		return 0, true, nil
	}
	d, err := newSocketDestroyer(e.reverse)
	if err != nil {
		return 0, true, fmt.Errorf("network namespace %s: %w", path, err)
	}
	defer d.Close()
	if n, err = d.destroy(gone); err != nil {
		err = fmt.Errorf("network namespace %s: %w", path, err)
	}
	return n, true, err
}

// inodeOf is the number by which namespaces are told apart; false of what is none.
func inodeOf(file *os.File) (inode uint64, ok bool) {
	var fsStat unix.Statfs_t
	var stat unix.Stat_t
	if errors.Join(unix.Fstatfs(int(file.Fd()), &fsStat), unix.Fstat(int(file.Fd()), &stat)) != nil {
		return 0, false
	}
	return stat.Ino, fsStat.Type == nsfsMagic
}
