// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

const (
	kindDirectory = 0o040000
	kindFile      = 0o100000

	archiveTrailer = "TRAILER!!!"
)

// archive writes a cpio archive in the format "newc" (Linux Documentation/driver-api/early-userspace/buffer-format.rst),
// from which the kernel fills its first root. Everything in it belongs to root and dates from 1970, so that equal
// content makes equal archives. The first error sticks and is returned by close. Not safe for concurrent use.
type archive struct {
	w    io.Writer
	size int64 // bytes written
	last uint32
	dirs map[string]bool
	err  error
}

func newArchive(w io.Writer) *archive {
	return &archive{w: w, dirs: map[string]bool{".": true}}
}

// dir adds a directory and those above it, each once. Names are paths from the root, slashes in front do not matter.
func (a *archive) dir(name string) {
	name = clean(name)
	if a.dirs[name] {
		return
	}
	a.dir(path.Dir(name))
	a.dirs[name] = true
	a.entry(name, kindDirectory|0o755, nil)
}

// file adds a file and the directories above it.
func (a *archive) file(name string, perm fs.FileMode, content []byte) {
	name = clean(name)
	a.dir(path.Dir(name))
	a.entry(name, kindFile|uint32(perm.Perm()), content)
}

// copy adds a file of the host.
func (a *archive) copy(name, from string) {
	info, err := os.Stat(from)
	if err != nil {
		a.err = errors.Join(a.err, err)
		return
	}
	content, err := os.ReadFile(from)
	if err != nil {
		a.err = errors.Join(a.err, err)
		return
	}
	a.file(name, info.Mode(), content)
}

// tree adds a directory of the host with its regular files.
func (a *archive) tree(name, from string) {
	err := filepath.WalkDir(from, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		below, err := filepath.Rel(from, file)
		switch {
		case err != nil:
			return err
		case d.IsDir():
			a.dir(path.Join(name, below))
		case d.Type().IsRegular():
			a.copy(path.Join(name, below), file)
		}
		return a.err
	})
	if a.err == nil {
		a.err = err
	}
}

// close ends the archive; the writer below stays open.
func (a *archive) close() error {
	a.entry(archiveTrailer, 0, nil)
	return a.err
}

func (a *archive) entry(name string, mode uint32, content []byte) {
	ino := uint32(0)
	if name != archiveTrailer {
		a.last++
		ino = a.last
	}
	if uint64(len(content)) > 0xffffffff {
		a.err = errors.Join(a.err, fmt.Errorf("archive: %s: %d bytes are more than the format holds", name, len(content)))
	}
	head := "070701"
	for _, field := range []uint32{
		ino, mode, 0, 0, 1, 0, // inode, mode, uid, gid, links, time of change
		uint32(len(content)), 0, 0, 0, 0, // size, device, device of a special file
		uint32(len(name) + 1), 0, // length of the name with its NUL, checksum (unused)
	} {
		head += fmt.Sprintf("%08X", field)
	}
	a.write([]byte(head + name + "\x00"))
	a.write(content)
}

// write appends b and zeros up to the next multiple of 4 bytes.
func (a *archive) write(b []byte) {
	if a.err != nil {
		return
	}
	var n int
	n, a.err = a.w.Write(b)
	a.size += int64(n)
	if gap := -a.size & 3; gap != 0 && a.err == nil {
		n, a.err = a.w.Write(make([]byte, gap))
		a.size += int64(n)
	}
}

// clean makes a name relative to the archive's root.
func clean(name string) string {
	return path.Clean(strings.TrimLeft(name, "/"))
}
