// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

const aptSearch = `linux-image-6.1.0-9-cloud-amd64 - Linux 6.1 for x86-64 cloud (signed)
linux-image-6.1.0-56-cloud-amd64-unsigned - Linux 6.1 for x86-64 cloud
linux-image-6.1.0-55-cloud-amd64 - Linux 6.1 for x86-64 cloud (signed)
linux-image-6.1.0-54-cloud-amd64-dbg - Debug symbols for linux-image-6.1.0-54-cloud-amd64
linux-image-6.12-cloud-amd64 - Linux for x86-64 cloud (meta-package)
linux-image-6.12.100+deb12-cloud-amd64 - Linux 6.12 for x86-64 cloud (signed)
linux-image-6.12.99+deb12-cloud-amd64 - Linux 6.12 for x86-64 cloud (signed)
linux-image-6.12.117+deb12-rt-amd64 - Linux 6.12 for x86-64, real-time (signed)
`

func TestNewestPackage(t *testing.T) {
	for series, want := range map[string]string{
		"6.1":  "linux-image-6.1.0-55-cloud-amd64",
		"6.12": "linux-image-6.12.100+deb12-cloud-amd64",
		"6.6":  "",
		"5.10": "",
	} {
		if got, ok := newestPackage(aptSearch, series); got != want || ok != (want != "") {
			t.Errorf("%s: %q %v, want %q", series, got, ok, want)
		}
	}
}

func TestCompareVersions(t *testing.T) {
	ordered := []string{"5.10", "6.1", "6.1.0-9", "6.1.0-9-cloud", "6.1.0-10", "6.1.1-1", "6.6", "6.12", "6.12.99+deb12", "6.12.100+deb12", "10.0"}
	for i, a := range ordered {
		for j, b := range ordered {
			if got, want := compareVersions(a, b), cmp.Compare(i, j); got != want {
				t.Errorf("compareVersions(%q, %q) = %d, want %d", a, b, got, want)
			}
		}
	}
}

// aptStub is an archive of one kernel whose lists are empty until the first update.
type aptStub struct {
	t        *testing.T
	lists    bool
	stale    bool // the first download is refused, as of a package that the archive has no more
	commands []string
}

func (s *aptStub) run(_ context.Context, dir, name string, args ...string) ([]byte, error) {
	command := name + " " + args[len(args)-1]
	s.commands = append(s.commands, command)
	switch {
	case name == "apt-cache" && s.lists:
		return []byte(aptSearch), nil
	case command == "apt-get update":
		s.lists, s.stale = true, false
	case name == "apt-get" && s.stale:
		return nil, errors.New("404 Not Found")
	case name == "apt-get":
		s.write(filepath.Join(dir, "x.deb"))
	case name == "dpkg-deb":
		s.write(filepath.Join(dir, args[len(args)-1], "boot", "vmlinuz-6.1.0-55-cloud-amd64"))
	}
	return nil, nil
}

func (s *aptStub) write(file string) {
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, nil, 0o600)); err != nil {
		s.t.Fatal(err)
	}
}

func TestKernelIsFetchedOnce(t *testing.T) {
	const search = `apt-cache ^linux-image-6\.1\..*-cloud-amd64$`
	const pkg, release = "linux-image-6.1.0-55-cloud-amd64", "6.1.0-55-cloud-amd64"
	for name, tc := range map[string]struct {
		stub aptStub
		want []string
	}{
		"empty lists": {aptStub{t: t}, []string{search, "apt-get update", search, "apt-get " + pkg, "dpkg-deb root", "depmod " + release}},
		"lists":       {aptStub{t: t, lists: true}, []string{search, "apt-get " + pkg, "dpkg-deb root", "depmod " + release}},
		"stale lists": {aptStub{t: t, lists: true, stale: true},
			[]string{search, "apt-get " + pkg, "apt-get update", "apt-get " + pkg, "dpkg-deb root", "depmod " + release}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			d := &debian{dir: dir, log: io.Discard, run: tc.stub.run}
			for range 2 {
				k, err := d.kernel(t.Context(), "6.1")
				if err != nil {
					t.Fatal(err)
				}
				if _, err := os.Stat(k.image); err != nil || k.release != release {
					t.Errorf("kernel %+v: %v", k, err)
				}
			}
			if diff := gocmp.Diff(append(slices.Clone(tc.want), search), tc.stub.commands); diff != "" {
				t.Errorf("commands (-want +got):\n%s", diff)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "fetch-*")); left != nil {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

func TestKernelThatAptDoesNotKnow(t *testing.T) {
	stub := aptStub{t: t}
	d := &debian{dir: t.TempDir(), log: io.Discard, run: stub.run}
	_, err := d.kernel(t.Context(), "4.19")
	if err == nil || !strings.Contains(err.Error(), "linux-image-4.19.*-cloud-amd64") {
		t.Errorf("%v, want an error that names the packages looked for", err)
	}
	if n := len(stub.commands); n != 3 {
		t.Errorf("commands %v, want a search, an update and a search", stub.commands)
	}
}

// A series that the machine's suite does not have is looked for in an older one, on the machine's own archive, with lists
// apart from the machine's.
func TestOlderSuite(t *testing.T) {
	dir := t.TempDir()
	updates := 0
	d := &debian{dir: dir, log: io.Discard, run: func(_ context.Context, _, name string, args ...string) ([]byte, error) {
		switch {
		case args[0] == "-qq":
			updates++
			return nil, nil
		case name != "apt-get" || args[0] != "indextargets":
			t.Errorf("unexpected: %s %v", name, args)
		case updates == 0:
			return nil, nil // no lists yet
		}
		return []byte("Other http://other.example/x\nDebian-Security http://security.example/debian\nDebian http://mirror.example/debian\n"), nil
	}}
	older, err := d.of(t.Context(), "5.10")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile(filepath.Join(dir, "apt-bullseye", "sources.list"))
	if err != nil || !strings.Contains(string(source), " http://mirror.example/debian bullseye main\n") || updates != 1 ||
		!strings.Contains(string(source), " http://security.example/debian bullseye-security main\n") {
		t.Errorf("source %q, %v, %d updates", source, err, updates)
	}
	args := strings.Join(older.apt("update"), " ")
	for _, want := range []string{"Dir::Etc::sourcelist=", "Dir::State::lists=" + filepath.Join(dir, "apt-bullseye", "lists"), " update"} {
		if !strings.Contains(args, want) {
			t.Errorf("arguments %q, want %q in them", args, want)
		}
	}
	if same, err := d.of(t.Context(), "6.1"); same != d || err != nil {
		t.Errorf("6.1: %v, want the machine's own suite", err)
	}
}
