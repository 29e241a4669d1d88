// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// watched is a directory that is being followed.
type watched struct {
	t    *testing.T
	path string

	mu    sync.Mutex
	last  []string // "cluster=content", sorted
	scans int
}

// watch follows a directory with the timing given, until the test ends.
func watch(t *testing.T, path string, timing timing) *watched {
	t.Helper()
	w := &watched{t: t, path: path}
	d := &dir{
		path: path, own: "here", log: newTextLog(io.Discard),
		quiet: timing.quiet, settle: timing.settle, rescan: timing.rescan, poll: timing.poll,
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		d.run(ctx, w.publish)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return w
}

func (w *watched) publish(c *configs) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.last = w.last[:0]
	for name, f := range c.files {
		w.last = append(w.last, name+"="+strings.TrimSpace(strings.TrimPrefix(string(f.content), "endpoints:")))
	}
	slices.Sort(w.last)
	w.scans++
}

func (w *watched) await(want string) {
	w.t.Helper()
	testutil.Eventually(w.t, soon, func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if got := strings.Join(w.last, " "); got != want || w.scans == 0 {
			return fmt.Errorf("configs %q after %d scans, want %q", got, w.scans, want)
		}
		return nil
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// mechanism: A3 A5 A7
func TestDirFollowsFiles(t *testing.T) {
	t.Parallel()
	path := t.TempDir()
	write(t, filepath.Join(path, "west"), "endpoints: 1")
	w := watch(t, path, testTiming)
	w.await("west=1")
	write(t, filepath.Join(path, "west"), "endpoints: 2")
	w.await("west=2")
	write(t, filepath.Join(path, "tmp.1"), "endpoints: 3")
	must(t, os.Rename(filepath.Join(path, "tmp.1"), filepath.Join(path, "west")))
	w.await("west=3")
	must(t, os.Rename(filepath.Join(path, "west"), filepath.Join(path, "south")))
	w.await("south=3")
	must(t, os.Remove(filepath.Join(path, "south")))
	w.await("")
}

// mechanism: A5
func TestDirAppearsAndComesBack(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	path := filepath.Join(root, "etc", "weft", "clustermesh")
	w := watch(t, path, testTiming)
	w.await("")
	for round := range 3 {
		must(t, os.MkdirAll(path, 0o755))
		write(t, filepath.Join(path, "west"), fmt.Sprintf("endpoints: %d", round))
		w.await(fmt.Sprintf("west=%d", round))
		must(t, os.RemoveAll(filepath.Join(root, "etc")))
		w.await("")
	}
	// Replaced as a whole, in one step: it is another directory under the same path.
	next := filepath.Join(root, "next")
	must(t, os.MkdirAll(path, 0o755))
	must(t, os.Mkdir(next, 0o755))
	write(t, filepath.Join(path, "west"), "endpoints: old")
	w.await("west=old")
	write(t, filepath.Join(next, "west"), "endpoints: new")
	must(t, os.Rename(path, path+".old"))
	must(t, os.Rename(next, path))
	w.await("west=new")
	write(t, filepath.Join(path, "west"), "endpoints: newer")
	w.await("west=newer")
}

// atomicWriter updates a directory as the kubelet does: the files are links into ..data, and that is a link to a directory
// which is replaced as a whole.
type atomicWriter struct {
	t    *testing.T
	path string
	n    int
}

func (a *atomicWriter) write(files map[string]string) {
	a.t.Helper()
	a.n++
	version := fmt.Sprintf("..2026_%d", a.n)
	must(a.t, os.MkdirAll(filepath.Join(a.path, version), 0o755))
	for name, content := range files {
		write(a.t, filepath.Join(a.path, version, name), content)
	}
	must(a.t, os.Symlink(version, filepath.Join(a.path, "..data_tmp")))
	old, _ := os.Readlink(filepath.Join(a.path, "..data"))
	must(a.t, os.Rename(filepath.Join(a.path, "..data_tmp"), filepath.Join(a.path, "..data")))
	for name := range files {
		if _, err := os.Lstat(filepath.Join(a.path, name)); err != nil {
			must(a.t, os.Symlink(filepath.Join("..data", name), filepath.Join(a.path, name)))
		}
	}
	if old == "" {
		return
	}
	entries, err := os.ReadDir(filepath.Join(a.path, old))
	must(a.t, err)
	for _, e := range entries {
		if _, ok := files[e.Name()]; !ok {
			must(a.t, os.Remove(filepath.Join(a.path, e.Name())))
		}
	}
	must(a.t, os.RemoveAll(filepath.Join(a.path, old)))
}

// mechanism: A5
// lesson: C10
func TestDirKubernetesSwap(t *testing.T) {
	t.Parallel()
	path := t.TempDir()
	a := &atomicWriter{t: t, path: path}
	a.write(map[string]string{"west": "endpoints: 1", "common-etcd-client.crt": "-----BEGIN CERTIFICATE-----"})
	w := watch(t, path, testTiming)
	w.await("west=1")
	a.write(map[string]string{"west": "endpoints: 2", "south": "endpoints: 1"})
	w.await("south=1 west=2")
	a.write(map[string]string{"south": "endpoints: 1"})
	w.await("south=1")
	a.write(map[string]string{})
	w.await("")
}

// A link may lead out of the directory, to a file that others replace in their own ways.
func TestDirFollowsLinksElsewhere(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	path, secret := filepath.Join(root, "clustermesh"), filepath.Join(root, "secret")
	must(t, os.Mkdir(path, 0o755))
	must(t, os.Mkdir(secret, 0o755))
	a := &atomicWriter{t: t, path: secret}
	a.write(map[string]string{"west": "endpoints: 1"})
	must(t, os.Symlink(filepath.Join(secret, "west"), filepath.Join(path, "west")))
	must(t, os.Symlink("clustermesh", filepath.Join(root, "link")))
	w := watch(t, filepath.Join(root, "link"), testTiming)
	w.await("west=1")
	a.write(map[string]string{"west": "endpoints: 2"})
	w.await("west=2")
	write(t, filepath.Join(secret, "..data", "west"), "endpoints: 3")
	w.await("west=3")
	other := filepath.Join(root, "other")
	must(t, os.Mkdir(other, 0o755))
	write(t, filepath.Join(other, "south"), "endpoints: 4")
	must(t, os.Symlink("other", filepath.Join(root, "link.new")))
	must(t, os.Rename(filepath.Join(root, "link.new"), filepath.Join(root, "link")))
	w.await("south=4")
	must(t, os.Remove(filepath.Join(other, "south")))
	w.await("")
}

// Where notifications are lost, time finds what has changed.
func TestDirRescans(t *testing.T) {
	t.Parallel()
	path := t.TempDir()
	slow := testTiming
	slow.quiet, slow.rescan = time.Hour, 10*time.Millisecond // no notification is ever acted on
	w := watch(t, path, slow)
	w.await("")
	write(t, filepath.Join(path, "west"), "endpoints: 1")
	w.await("west=1")
}

// Whatever happens to the directory, and however fast, the last state is the one that counts.
//
// lesson: C10
func TestDirChurn(t *testing.T) {
	t.Parallel()
	path := t.TempDir()
	file := filepath.Join(path, "west")
	w := watch(t, path, testTiming)
	for i := range 300 {
		switch i % 5 {
		case 0:
			write(t, file, fmt.Sprintf("endpoints: %d", i))
		case 1:
			must(t, os.Chmod(file, 0o600))
		case 2:
			must(t, os.Rename(file, file+"-2"))
		case 3:
			must(t, os.Rename(file+"-2", file))
		case 4:
			must(t, os.Remove(file))
		}
	}
	write(t, file, "endpoints: last")
	w.await("west=last")
}
