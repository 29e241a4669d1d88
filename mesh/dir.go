// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

// dir follows the directory of config files. Notifications only say that it is time to look: what counts is the scan.
type dir struct {
	path string
	own  string // the name of our own cluster, whose config is nobody's business here
	log  *slog.Logger

	quiet  time.Duration // from the first notification to the scan, so that one sees the end of a burst
	settle time.Duration // see configs.update
	rescan time.Duration // in case that notifications get lost
	poll   time.Duration // instead of rescan where there are no notifications

	mu     sync.Mutex
	status DirStatus
}

// run calls publish after every scan, until ctx ends. What publish is given is valid during the call.
func (d *dir) run(ctx context.Context, publish func(*configs)) {
	var (
		known   = newConfigs(d.settle)
		watches = d.newWatches()
		due     = time.NewTimer(0)
		at      = time.Now() // when due fires
	)
	defer watches.close()
	defer due.Stop()
	within := func(wait time.Duration) {
		if soon := time.Now().Add(wait); soon.Before(at) {
			at = soon
			due.Reset(wait)
		}
	}
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-watches.events:
			if watches.concerns(e.Name) {
				within(d.quiet)
			}
		case err := <-watches.errs:
			d.log.Warn("notifications about cluster configs were lost, reading the directory again", "dir", d.path, "err", err)
			within(d.quiet)
		case <-due.C:
			next := d.look(known, watches)
			at = time.Now().Add(next)
			due.Reset(next)
			publish(known)
		}
	}
}

// look scans once, and returns when to scan again if no notification comes first.
func (d *dir) look(known *configs, w *watches) time.Duration {
	w.begin()
	w.follow(d.path)
	if real, err := filepath.EvalSymlinks(d.path); err == nil {
		w.add(real, "")
	}
	s := scanDir(d.path, d.own, w.follow)
	err := errors.Join(s.err, w.end())
	if s.missing {
		err = errors.Join(errDirMissing, err)
	}
	d.report(err, w)

	next := d.rescan
	if w.broken() {
		next = d.poll
	}
	if known.update(s, time.Now()) {
		next = min(next, d.settle)
	}
	return next
}

func (d *dir) report(err error, w *watches) {
	d.mu.Lock()
	defer d.mu.Unlock()
	was := d.status.Error
	d.status = DirStatus{Path: d.path, Watched: !w.broken(), ScannedAt: time.Now()}
	if err != nil {
		d.status.Error = err.Error()
	}
	if d.status.Error != was && err != nil {
		d.log.Warn("directory of cluster configs", "dir", d.path, "err", err)
	}
}

// watches is the set of directories in which something can change the result of a scan, kept equal to what the last scan
// has touched.
type watches struct {
	fs     *fsnotify.Watcher // nil if the system has none for us
	events chan fsnotify.Event
	errs   chan error
	err    error // of making fs, or the first of this scan
	// names holds, for each directory, the names in it that matter. The empty name stands for all of them.
	names map[string]map[string]bool
}

func (d *dir) newWatches() *watches {
	w := &watches{names: make(map[string]map[string]bool)}
	if w.open(); w.err != nil {
		d.log.Warn("no notifications about cluster configs, reading the directory at intervals", "dir", d.path, "err", w.err)
	}
	return w
}

func (w *watches) open() {
	if w.fs, w.err = fsnotify.NewWatcher(); w.err != nil {
		w.fs, w.err = nil, fmt.Errorf("read at intervals, since there are no notifications: %w: raise fs.inotify.max_user_instances", w.err)
		return
	}
	w.events, w.errs = w.fs.Events, w.fs.Errors
}

func (w *watches) close() {
	if w.fs != nil {
		w.fs.Close()
	}
}

// broken: changes may go unnoticed.
func (w *watches) broken() bool { return w.fs == nil || w.err != nil }

func (w *watches) begin() {
	if w.fs == nil {
		w.open() // by now there may be some for us
	}
	if w.fs == nil {
		return
	}
	w.err = nil
	w.names = make(map[string]map[string]bool)
}

// end stops watching what the scan did not touch.
func (w *watches) end() error {
	if w.fs == nil {
		return w.err
	}
	for _, path := range w.fs.WatchList() {
		if _, ok := w.names[path]; !ok {
			// The watch of a directory that is gone is gone with it.
			_ = w.fs.Remove(path)
		}
	}
	return w.err
}

// add watches one directory for changes of name, or of anything if that is empty.
func (w *watches) add(directory, name string) {
	if w.names[directory] == nil {
		w.names[directory] = make(map[string]bool)
	}
	w.names[directory][name] = true
	if w.fs == nil {
		return
	}
	// Adding again costs a system call, and matters: another directory may stand under the same path by now.
	if err := w.fs.Add(directory); err != nil && !errors.Is(err, fs.ErrNotExist) && w.err == nil {
		w.err = err
	}
}

// follow watches every directory that decides where path leads. It goes twice: what changes after the first time, when all
// is watched, is notified.
func (w *watches) follow(path string) {
	for range 2 {
		walk(path, w.add)
	}
}

// concerns reports whether a change of path matters.
func (w *watches) concerns(path string) bool {
	if _, ok := w.names[path]; ok {
		return true
	}
	names := w.names[filepath.Dir(path)]
	return names[""] || names[filepath.Base(path)]
}

// maxLinks bounds the symbolic links on one path, as the kernel does.
const maxLinks = 40

// walk resolves path, and calls visit for each directory entry on which the result depends: the links on the way, the last
// element, and, if there is none, the first that is missing.
func walk(path string, visit func(directory, name string)) {
	path, err := filepath.Abs(path)
	if err != nil {
		return
	}
	at, rest, links := "/", strings.Split(path, "/"), 0
	for len(rest) > 0 {
		name := rest[0]
		rest = rest[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at)
			continue
		}
		next := filepath.Join(at, name)
		info, err := os.Lstat(next)
		if err != nil {
			visit(at, name)
			return
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			if len(rest) == 0 {
				visit(at, name)
			}
			at = next
			continue
		}
		visit(at, name)
		target, err := os.Readlink(next)
		if links++; err != nil || links > maxLinks {
			return
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
}
