// SPDX-License-Identifier: Apache-2.0

// Package yamldir keeps what the YAML files of a directory declare, for whoever declares what: files are taken whole and at
// rest, what is wrong with one leaves the others and its own last good version in force.
package yamldir

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// MaxFileSize bounds what is read of one file: far above any node's workloads, far below what would hurt.
const MaxFileSize = 4 << 20

// Dir is a level-triggered view of the files of a directory. It compares what it sees with what it saw, by file
// attributes on every scan and by content on thorough ones, rather than following events: that works on every file
// system, through symlinks and bind mounts, loses nothing, and costs one stat per file. Files are taken only once they
// have looked the same in two scans, so that a writer that truncates and then writes is not caught in between.
//
// A Dir is not safe for concurrent use. T is what a file declares any number of.
type Dir[T any] struct {
	Path  string
	what  string // the directory is of, in errors
	files map[string]*file[T]
	first bool  // nothing has been scanned yet
	err   error // why the directory cannot be read at present
}

// file is what is known of one file.
type file[T any] struct {
	seen, taken attributes // of the last scan; of the content that was parsed
	missing     bool       // absent at the last scan
	hash        [sha256.Size]byte

	declarations []T
	problems     []Problem
}

// attributes tell, short of reading it, whether a file is the one that was read.
type attributes struct {
	inode, device uint64
	size          int64
	mtime, ctime  time.Time
}

// New returns a view of a directory that holds what, such as endpoints; nothing is read before the first scan.
func New[T any](path, what string) *Dir[T] {
	return &Dir[T]{Path: path, what: what, files: make(map[string]*file[T]), first: true}
}

// Scan looks at every file and has parse read those that changed, thoroughly: those that seem not to have changed too.
// It reports whether the declarations or the errors are others than before. Files that cannot be read or parsed keep the
// declarations that they last had; so do all files of a directory that cannot be read.
func (d *Dir[T]) Scan(thorough bool, parse func(file string, content []byte) ([]T, []Problem, error)) (changed bool) {
	settled := d.first // at the beginning, what is there has been there for long
	changed, d.first = d.first, false
	names, err := d.list()
	if fmt.Sprint(err) != fmt.Sprint(d.err) {
		changed = true
	}
	if d.err = err; err != nil {
		return changed
	}
	for name := range d.files {
		if !slices.Contains(names, name) && d.drop(name) {
			changed = true
		}
	}
	for _, name := range names {
		if d.look(name, settled, thorough, parse) {
			changed = true
		}
	}
	return changed
}

// How often Follow looks at a directory: by file attributes, and by content for what attributes do not show. A change is taken at
// the second look that sees it, so it is known after at most twice often. Events of the kernel would tell sooner that something
// has happened, and no sooner that a file is whole: who writes in place is waited for either way. They are not there on every file
// system, and of a file behind a symlink, as in mounts of Kubernetes, they tell nothing; so they could come beside the looks, not
// in their place, and a workload that a file declares has half a second.
const (
	often  = 200 * time.Millisecond
	seldom = 30 * time.Second
)

// Follow scans until ctx ends, beginning at once. scanned is called after each scan, and told whether the declarations or the
// problems are others than before.
func (d *Dir[T]) Follow(ctx context.Context, parse func(file string, content []byte) ([]T, []Problem, error), scanned func(changed bool)) {
	quick, thorough := time.NewTicker(often), time.NewTicker(seldom)
	defer quick.Stop()
	defer thorough.Stop()
	for whole := true; ; {
		scanned(d.Scan(whole, parse))
		select {
		case <-ctx.Done():
			return
		case <-quick.C:
			whole = false
		case <-thorough.C:
			whole = true
		}
	}
}

// list returns the names of the files that may declare something. Hidden files are not: editors and mounts use them.
func (d *Dir[T]) list() ([]string, error) {
	entries, err := os.ReadDir(d.Path)
	if err != nil {
		return nil, fmt.Errorf("%s directory: %w", d.what, err)
	}
	var names []string
	for _, e := range entries {
		name := e.Name()
		if ext := filepath.Ext(name); !strings.HasPrefix(name, ".") && (ext == ".yaml" || ext == ".yml") {
			names = append(names, name)
		}
	}
	return names, nil
}

// drop forgets a file that has been absent twice in a row, and reports whether it did.
func (d *Dir[T]) drop(name string) bool {
	f := d.files[name]
	if !f.missing {
		f.missing = true
		return false
	}
	delete(d.files, name)
	return true
}

// look takes note of one file and reports whether what it declares changed.
func (d *Dir[T]) look(name string, settled, thorough bool, parse func(string, []byte) ([]T, []Problem, error)) bool {
	path := filepath.Join(d.Path, name)
	now, err := attributesOf(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errDirectory) {
		if _, known := d.files[name]; !known {
			return false
		}
		return d.drop(name)
	}
	f, known := d.files[name]
	if !known {
		f = new(file[T])
		d.files[name] = f
	}
	f.missing = false
	settled = settled || (known && now == f.seen)
	f.seen = now
	if err != nil {
		return f.fail(name, err)
	}
	if !settled || (now == f.taken && !thorough) {
		return false
	}
	content, err := readFile(path)
	if err != nil {
		return f.fail(name, err)
	}
	hash := sha256.Sum256(content)
	if hash == f.hash && f.taken != (attributes{}) {
		f.taken = now
		return false
	}
	f.taken, f.hash = now, hash
	good, rejected, err := parse(name, content)
	if err != nil {
		return f.fail(name, err)
	}
	f.declarations, f.problems = good, rejected
	return true
}

// fail notes why a file could not be taken, and reports whether that is news. Its last good declarations stay.
func (f *file[T]) fail(name string, err error) bool {
	message := Sentence(err)
	if len(f.declarations) > 0 {
		message += "; its last good version stays in force"
	}
	failure := []Problem{{File: name, Message: message}}
	if slices.Equal(f.problems, failure) {
		return false
	}
	f.problems = failure
	return true
}

// All returns what every file declares, in the order of file names and of entries within a file, and what is wrong.
func (d *Dir[T]) All() (declarations []T, problems []Problem) {
	if d.err != nil {
		problems = append(problems, Problem{Message: d.err.Error()})
	}
	names := make([]string, 0, len(d.files))
	for name := range d.files {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		declarations = append(declarations, d.files[name].declarations...)
		problems = append(problems, d.files[name].problems...)
	}
	return declarations, problems
}

// Err is why the directory could not be read at the last scan.
func (d *Dir[T]) Err() error { return d.err }

var errDirectory = errors.New("is a directory")

// attributesOf follows symlinks: what counts is the file that would be read.
func attributesOf(path string) (attributes, error) {
	info, err := os.Stat(path)
	if err != nil {
		return attributes{}, err
	}
	if info.IsDir() {
		return attributes{}, errDirectory
	}
	a := attributes{size: info.Size(), mtime: info.ModTime()}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		a.inode, a.device = stat.Ino, stat.Dev
		a.ctime = time.Unix(stat.Ctim.Unix())
	}
	return a, nil
}

func readFile(path string) ([]byte, error) {
	// Not to be held up by a named pipe that nobody writes to.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, MaxFileSize+1))
	if err != nil {
		return nil, err
	}
	if len(content) > MaxFileSize {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, MaxFileSize)
	}
	return content, nil
}
