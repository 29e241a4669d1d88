// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// unpacked is one entry of an archive.
type unpacked struct {
	Name    string
	Mode    uint64
	Content string
}

// unpack reads an archive as the format is written down, not as the writer writes it.
func unpack(t *testing.T, b []byte) []unpacked {
	t.Helper()
	var entries []unpacked
	inodes := make(map[uint64]bool)
	at := 0
	take := func(n int) []byte {
		if at+n > len(b) {
			t.Fatalf("archive of %d bytes ends within %d bytes at %d", len(b), n, at)
		}
		at += n
		return b[at-n : at]
	}
	align := func() {
		for at%4 != 0 {
			if take(1)[0] != 0 {
				t.Fatalf("filling at %d is not 0", at-1)
			}
		}
	}
	for {
		if magic := string(take(6)); magic != "070701" {
			t.Fatalf("magic %q at %d", magic, at-6)
		}
		var fields [13]uint64
		for i := range fields {
			v, err := strconv.ParseUint(string(take(8)), 16, 32)
			if err != nil {
				t.Fatal(err)
			}
			fields[i] = v
		}
		name := take(int(fields[11]))
		align()
		content := take(int(fields[6]))
		align()
		if name[len(name)-1] != 0 {
			t.Fatalf("name %q without NUL", name)
		}
		e := unpacked{string(name[:len(name)-1]), fields[1], string(content)}
		if e.Name == "TRAILER!!!" {
			if at != len(b) {
				t.Errorf("%d bytes behind the trailer", len(b)-at)
			}
			return entries
		}
		if inodes[fields[0]] {
			t.Errorf("%s: inode %d twice", e.Name, fields[0])
		}
		inodes[fields[0]] = true
		entries = append(entries, e)
	}
}

func TestArchive(t *testing.T) {
	host := t.TempDir()
	for file, content := range map[string]string{"x.go": "package x", "testdata/a.json": "{}", "testdata/deep/b": "12345"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(host, file)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(host, file), []byte(content), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	a := newArchive(&out)
	a.file("/init", 0o755, []byte("machine code"))
	a.file("etc/empty", 0o600, nil)
	a.tree("/weft/x", host)
	a.dir("/etc/")
	if err := a.close(); err != nil {
		t.Fatal(err)
	}
	want := []unpacked{
		{"init", 0o100755, "machine code"},
		{"etc", 0o040755, ""},
		{"etc/empty", 0o100600, ""},
		{"weft", 0o040755, ""},
		{"weft/x", 0o040755, ""},
		{"weft/x/testdata", 0o040755, ""},
		{"weft/x/testdata/a.json", 0o100640, "{}"},
		{"weft/x/testdata/deep", 0o040755, ""},
		{"weft/x/testdata/deep/b", 0o100640, "12345"},
		{"weft/x/x.go", 0o100640, "package x"},
	}
	if diff := cmp.Diff(want, unpack(t, out.Bytes())); diff != "" {
		t.Errorf("archive (-want +got):\n%s", diff)
	}
}

// TestArchiveAlignment writes names and contents of every length modulo 4.
func TestArchiveAlignment(t *testing.T) {
	for n := range 9 {
		for m := range 9 {
			var out bytes.Buffer
			a := newArchive(&out)
			name, content := string(bytes.Repeat([]byte("n"), n+1)), string(bytes.Repeat([]byte("c"), m))
			a.file(name, 0o644, []byte(content))
			a.file("z", 0o644, nil)
			if err := a.close(); err != nil {
				t.Fatal(err)
			}
			want := []unpacked{{name, 0o100644, content}, {"z", 0o100644, ""}}
			if diff := cmp.Diff(want, unpack(t, out.Bytes())); diff != "" {
				t.Errorf("name of %d, content of %d bytes (-want +got):\n%s", n+1, m, diff)
			}
		}
	}
}

// full is a writer that takes n bytes.
type full struct{ n int }

var errFull = errors.New("no space")

func (f *full) Write(p []byte) (int, error) {
	if len(p) > f.n {
		return 0, errFull
	}
	f.n -= len(p)
	return len(p), nil
}

var _ io.Writer = (*full)(nil)

func TestArchiveErrors(t *testing.T) {
	a := newArchive(&full{n: 200})
	a.file("a", 0o644, []byte("fits"))
	a.file("b", 0o644, []byte("does not"))
	if err := a.close(); !errors.Is(err, errFull) {
		t.Errorf("disk full: %v", err)
	}
	a = newArchive(io.Discard)
	a.copy("a", filepath.Join(t.TempDir(), "absent"))
	if err := a.close(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent file: %v", err)
	}
	a = newArchive(io.Discard)
	a.tree("a", filepath.Join(t.TempDir(), "absent"))
	if err := a.close(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent directory: %v", err)
	}
}
