// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/internal/testutil"
)

const (
	entryA = `{"name": "a", "namespace": "shop", "ips": ["10.1.1.1", "fd00::1"], "identity": "65793", "labels": {"app": "1.0"}}`
	entryB = `{"name": "b", "ip": "10.1.1.2", "identity": "65793"}`
)

// newManual makes a source that keeps its endpoints in dir and is not running.
func newManual(t *testing.T, dir string) *Manual {
	t.Helper()
	m, err := NewManual(ManualConfig{
		Dir: dir, ClusterName: "east", ClusterID: 1, Layout: mustLayout(t), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// openManual is what an agent has of a state directory when it has started.
func openManual(t *testing.T, dir string) *Manual {
	t.Helper()
	m := newManual(t, dir)
	runSource(t, m)
	awaitReady(t, m)
	return m
}

func mustPut(t *testing.T, m *Manual, entry string) {
	t.Helper()
	if _, err := m.Put([]byte(entry)); err != nil {
		t.Fatal(err)
	}
}

// files lists what is in a directory.
func files(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestManualOutlivesTheAgent(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "weft")
	m := openManual(t, dir)
	wantWorkloads(t, m)
	if _, err := os.Stat(dir); err == nil {
		t.Error("a state directory is made though there is nothing to keep")
	}
	changed := m.Changed()
	for _, step := range []struct {
		entry string
		added bool
	}{{entryA, true}, {entryB, true}, {entryB, false}} {
		if added, err := m.Put([]byte(step.entry)); err != nil || added != step.added {
			t.Errorf("put %s: added %t, error %v", step.entry, added, err)
		}
	}
	select {
	case <-changed:
	default:
		t.Error("nobody was told")
	}
	a := m.Workloads()[1]
	if a.Source != "api" || a.Labels["app"] != "1.0" || a.Identity != 65793 || a.ServiceAccount != "default" {
		t.Errorf("workload %+v", a)
	}
	again := openManual(t, dir)
	wantWorkloads(t, again, "default/b [10.1.1.2]", "shop/a [10.1.1.1 fd00::1]")
	if diff := cmp.Diff(m.Workloads(), again.Workloads(), cmp.Comparer(func(a, b Workload) bool { return fmt.Sprint(a) == fmt.Sprint(b) })); diff != "" {
		t.Errorf("after a restart (-before +after)\n%s", diff)
	}
	if err := again.Remove("shop", "a"); err != nil {
		t.Fatal(err)
	}
	if err := again.Remove("shop", "a"); !errors.Is(err, ErrUnknown) {
		t.Errorf("removed twice: %v", err)
	}
	wantWorkloads(t, again, "default/b [10.1.1.2]")
	wantWorkloads(t, openManual(t, dir), "default/b [10.1.1.2]")
	if diff := cmp.Diff([]string{"endpoints.json"}, files(t, dir)); diff != "" {
		t.Errorf("files (-want +got)\n%s", diff)
	}
}

// What is refused changes nothing, and says what is wrong.
func TestManualRefuses(t *testing.T) {
	m := openManual(t, t.TempDir())
	mustPut(t, m, entryB)
	for entry, want := range map[string]string{
		"":                                "it is not JSON",
		"name: a":                         "it is not JSON",
		"[]":                              "it holds 0 endpoints, want one",
		"[" + entryA + "," + entryB + "]": "it holds 2 endpoints, want one",
		`"a"`:                             "an endpoint is a mapping",
		`{"name": "x/y", "ip": "10.1.1.1", "identity": "65793"}`:            `name "x/y": want`,
		`{"name": "x", "ip": "10.1.1.256", "identity": "65793"}`:            `ip "10.1.1.256" is not an IP address`,
		`{"name": "x", "ip": "10.1.1.1", "identity": "65793", "nmae": "y"}`: `unknown field "nmae"`,
		`{"name": "x", "ip": "10.1.1.1", "identity": "1"}`:                  "outside the range",
	} {
		if _, err := m.Put([]byte(entry)); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), want) {
			t.Errorf("put %q: %v\nwant %q", entry, err, want)
		}
	}
	wantWorkloads(t, m, "default/b [10.1.1.2]")
}

// An entry that is refused now, of another agent's time, rejects itself alone and is not lost.
func TestManualKeepsWhatItRefuses(t *testing.T) {
	dir := t.TempDir()
	const foreign = `{"name":"west","ip":"10.2.1.1","identity":"131329"}`
	write := func(content string) { testutil.MustWriteFile(t, filepath.Join(dir, "endpoints.json"), []byte(content)) }
	write("[" + foreign + ",\n" + entryB + ", 7]")
	m := openManual(t, dir)
	wantWorkloads(t, m, "default/b [10.1.1.2]")
	wantProblems(t, m, "an endpoint is a mapping", "identity 131329 is outside the range")
	mustPut(t, m, entryA)
	again := openManual(t, dir)
	wantProblems(t, again, "an endpoint is a mapping", "identity 131329 is outside the range")
	if err := again.Remove("default", "west"); err != nil {
		t.Fatal(err)
	}
	wantProblems(t, again, "an endpoint is a mapping")
	wantWorkloads(t, again, "default/b [10.1.1.2]", "shop/a [10.1.1.1 fd00::1]")
}

// A file cut off anywhere is never taken for a shorter one: it is kept aside, told of, and what is added later is safe.
func TestManualCorruptFile(t *testing.T) {
	whole := t.TempDir()
	m := openManual(t, whole)
	mustPut(t, m, entryA)
	mustPut(t, m, entryB)
	content, err := os.ReadFile(filepath.Join(whole, "endpoints.json"))
	if err != nil {
		t.Fatal(err)
	}
	for length := range len(content) - 2 { // the last two bytes are "]\n"
		f := stateFile{filepath.Join(t.TempDir(), "endpoints.json")}
		if err := os.WriteFile(f.path, content[:length], 0o600); err != nil {
			t.Fatal(err)
		}
		m := newManual(t, filepath.Dir(f.path))
		if !m.load() {
			t.Fatalf("cut off after %d bytes: not loaded: %v", length, m.Problems())
		}
		if len(m.Workloads()) > 0 || len(f.aside()) != 1 {
			t.Fatalf("cut off after %d bytes: workloads %v, set aside %v", length, m.Workloads(), f.aside())
		}
	}

	dir := t.TempDir()
	state := filepath.Join(dir, "endpoints.json")
	for range 2 {
		testutil.MustWriteFile(t, state, []byte("\x00\x00\x00\x00"))
		m = openManual(t, dir)
	}
	wantProblems(t, m, "endpoints.json.corrupt1: it was kept here", "endpoints.json.corrupt2: it was kept here")
	mustPut(t, m, entryB)
	for _, name := range []string{"endpoints.json.corrupt1", "endpoints.json.corrupt2"} {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != "\x00\x00\x00\x00" {
			t.Errorf("%s holds %q, error %v", name, got, err)
		}
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	wantProblems(t, m)
	wantWorkloads(t, openManual(t, dir), "default/b [10.1.1.2]")
}

// Nothing is written over a file that could not be read, and its source is not taken for one that has been heard.
func TestManualUnreadableFile(t *testing.T) {
	dir := t.TempDir()
	state := filepath.Join(dir, "endpoints.json")
	if err := os.Symlink("endpoints.json", state); err != nil { // a loop of links: no permission of root helps
		t.Fatal(err)
	}
	m := newManual(t, dir)
	if m.load() {
		t.Fatal("loaded")
	}
	wantProblems(t, m, "endpoints that were added are not known: open "+state+": too many levels of symbolic links")
	if _, err := m.Put([]byte(entryA)); !errors.Is(err, errNotRead) {
		t.Errorf("put: %v", err)
	}
	if err := m.Remove("shop", "a"); !errors.Is(err, errNotRead) {
		t.Errorf("remove: %v", err)
	}
	if err := os.Remove(state); err != nil {
		t.Fatal(err)
	}
	if !m.load() {
		t.Error("not loaded though the file is well")
	}
	wantProblems(t, m)
	mustPut(t, m, entryA)
}

// On a full disk, one without inodes, or one that is read-only, adding fails with the cause, and what was there stays, in
// force and on disk; when there is room again, nothing needs to be restarted.
func TestManualFullDisk(t *testing.T) {
	// lesson: K11
	testutil.RequireRoot(t)
	for name, tc := range map[string]struct {
		options string
		want    error
		fill    func(t *testing.T, dir string) (undo func())
	}{
		"space": {"size=16k", syscall.ENOSPC, func(t *testing.T, dir string) func() {
			filler := filepath.Join(dir, "filler")
			_ = os.WriteFile(filler, make([]byte, 64<<10), 0o600) // as much as there is room for
			return func() { os.Remove(filler) }
		}},
		"inodes": {"nr_inodes=3", syscall.ENOSPC, func(t *testing.T, dir string) func() {
			filler := filepath.Join(dir, "filler")
			if err := os.WriteFile(filler, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			return func() { os.Remove(filler) }
		}},
		"read-only": {"", syscall.EROFS, func(t *testing.T, dir string) func() {
			remount := func(flags uintptr) {
				if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_REMOUNT|flags, ""); err != nil {
					t.Fatal(err)
				}
			}
			remount(unix.MS_RDONLY)
			return func() { remount(0) }
		}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, tc.options); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
					t.Errorf("unmount %s: %v", dir, err)
				}
			})
			m := openManual(t, dir)
			mustPut(t, m, entryB)
			undo := tc.fill(t, dir)
			if _, err := m.Put([]byte(entryA)); !errors.Is(err, tc.want) || !strings.Contains(err.Error(), "nothing was changed: ") {
				t.Errorf("put: %v, want %v", err, tc.want)
			}
			if err := m.Remove("default", "b"); !errors.Is(err, tc.want) {
				t.Errorf("remove: %v, want %v", err, tc.want)
			}
			wantWorkloads(t, m, "default/b [10.1.1.2]")
			wantWorkloads(t, openManual(t, dir), "default/b [10.1.1.2]")
			undo()
			mustPut(t, m, entryA)
			wantWorkloads(t, openManual(t, dir), "default/b [10.1.1.2]", "shop/a [10.1.1.1 fd00::1]")
			if got := files(t, dir); len(got) != 1 {
				t.Errorf("left over: %v", got)
			}
		})
	}
}
