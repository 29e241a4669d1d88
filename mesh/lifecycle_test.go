// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// Touching, rewriting and renaming a config without changing it is nothing; changing it connects anew and deletes nothing.
//
// mechanism: A5 A6 B2
// lesson: C10
func TestConfigChanges(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	w := newWorld(t, withConfig(west))
	first := w.awaitState("west", Ready)
	path := w.file("west")
	content, err := os.ReadFile(path)
	must(t, err)

	must(t, os.Chmod(path, 0o600))
	must(t, os.Chtimes(path, time.Now(), time.Now()))
	must(t, os.WriteFile(path, content, 0o600))
	west.etcd.WriteConfig(t, path)
	must(t, os.WriteFile(filepath.Join(w.dir, "common-etcd-client.crt"), []byte("-----BEGIN"), 0o600))
	w.never("connected again", func() bool {
		s, _ := w.remote("west")
		return s.State != Ready || s.Reconnects != 0 || s.Since != first.Since
	})

	write(t, path, string(content)+"# a comment makes it another one\n")
	w.await("west", "a new connection", func(s RemoteStatus) bool { return s.State == Ready && s.Reconnects == 1 })
	w.awaitIPs(westIP(1))
}

// A file that is half written, or broken, changes nothing but what the status says; repaired, it changes nothing at all.
//
// lesson: C10
func TestConfigBroken(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	w := newWorld(t, withConfig(west))
	w.awaitState("west", Ready)
	path := w.file("west")
	content, err := os.ReadFile(path)
	must(t, err)
	for _, broken := range []string{
		"endpoints:\n- http://127", "endpoints: [\n", "endpoints:\n", "endpoints:\n- ftp://x:1\n",
		string(content) + "cilium-host-aliases:\n- hostname: a\n", "endpoi", "",
	} {
		write(t, path, broken)
		s := w.await("west", fmt.Sprintf("an error of %q", broken), func(s RemoteStatus) bool { return s.ConfigError != "" })
		if !strings.HasPrefix(s.ConfigError, path+": ") || s.State != Ready || s.Reconnects != 0 {
			t.Errorf("with %q: status %+v", broken, s)
		}
		write(t, path, string(content))
		s = w.await("west", "no error", func(s RemoteStatus) bool { return s.ConfigError == "" })
		if s.State != Ready || s.Reconnects != 0 {
			t.Errorf("after %q: status %+v", broken, s)
		}
	}
	w.awaitIPs(westIP(1))

	// What stays without endpoints is no config any more.
	write(t, path, "nothing\n")
	w.awaitGone("west")
	w.awaitIPs()
}

// A file that is broken from the start is a cluster that cannot be reached, whose id may be any.
func TestConfigBrokenFromTheStart(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *Config) { write(t, filepath.Join(c.Dir, "west"), "endpoints: [\n") })
	s := w.await("west", "an error", func(s RemoteStatus) bool { return s.ConfigError != "" })
	if s.State != Connecting && s.State != Failed || s.LastError == "" {
		t.Errorf("status %+v", s)
	}
	if w.Listed(2) {
		t.Error("cluster 2 is listed")
	}
	west := newWest(t, 1)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	w.awaitIPs(westIP(1))
}

// A name that no cluster can have is seen; our own is nobody's business.
//
// mechanism: A4
// lesson: R7
func TestConfigNames(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	w := newWorld(t, withConfig(west))
	write(t, w.file("here"), "endpoints:\n- http://127.0.0.1:1\n")
	for _, name := range []string{"West", "a_b", "..hidden", strings.Repeat("x", 33), "w\x1b[31m"} {
		write(t, w.file(name), "endpoints:\n- http://127.0.0.1:1\n")
		s := w.await(printable(name), "an error", func(s RemoteStatus) bool { return s.State == Failed })
		if !strings.Contains(s.ConfigError, "rename the file") || strings.Contains(s.ConfigError, "\x1b") {
			t.Errorf("%q: error %q", name, s.ConfigError)
		}
		w.remove(name)
		w.awaitGone(printable(name))
	}
	w.awaitState("west", Ready)
	if s, ok := w.remote("here"); ok {
		t.Errorf("our own cluster is a remote one: %+v", s)
	}
	if !w.Listed(0) {
		t.Error("names that are no clusters keep clusters from being listed")
	}
}

// A directory that is not there yet has not been read; one that goes takes its clusters with it, after a moment.
//
// mechanism: A1 A3
func TestDirectoryAppears(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	w := newWorld(t, func(c *Config) { must(t, os.Remove(c.Dir)) })
	<-w.Ready() // there is nothing to wait for
	if w.Listed(2) || w.Listed(0) {
		t.Error("listed, though nobody knows what is configured")
	}
	testutil.Eventually(t, soon, func() error {
		if d := w.Directory(); !strings.Contains(d.Error, "missing") || !d.Watched || d.Path != w.dir {
			return fmt.Errorf("directory %+v", d)
		}
		return nil
	})
	must(t, os.Mkdir(w.dir, 0o755))
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	w.awaitIPs(westIP(1))
	if d := w.Directory(); d.Error != "" {
		t.Errorf("directory %+v", d)
	}

	// Gone for less than a moment.
	must(t, os.Rename(w.dir, w.dir+".bak"))
	s := w.await("west", "an error", func(s RemoteStatus) bool { return s.ConfigError != "" })
	must(t, os.Rename(w.dir+".bak", w.dir))
	s = w.await("west", "no error", func(s RemoteStatus) bool { return s.ConfigError == "" })
	if s.State != Ready || s.Reconnects != 0 {
		t.Errorf("status %+v", s)
	}
	w.awaitIPs(westIP(1))

	must(t, os.RemoveAll(w.dir))
	w.awaitGone("west")
	w.awaitIPs()
	must(t, os.Mkdir(w.dir, 0o755))
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
}

// The kubelet's way of changing configs, with a live cluster behind them.
//
// mechanism: A5 A7
func TestConfigOfKubernetes(t *testing.T) {
	t.Parallel()
	west, south := newWest(t, 1), newCluster(t, "south", 3)
	south.ip("10.3.1.1", 257, "172.18.3.1")
	southIP := fmt.Sprintf("10.3.1.1/32 %d via 172.18.3.1 by 3 ip", 3<<16+257)
	config := func(c *cluster) string { return "endpoints:\n- " + c.etcd.Endpoint() + "\n" }
	w := newWorld(t)
	a := &atomicWriter{t: t, path: w.dir}
	a.write(map[string]string{"west": config(west)})
	w.awaitState("west", Ready)
	a.write(map[string]string{"west": config(west), "south": config(south)})
	w.awaitState("south", Ready)
	w.awaitIPs(westIP(1), southIP)
	if s, _ := w.remote("west"); s.Reconnects != 0 {
		t.Errorf("a swap that changes nothing has connected west again: %+v", s)
	}
	a.write(map[string]string{"south": config(south)})
	w.awaitGone("west")
	w.awaitIPs(southIP)
	if s, _ := w.remote("south"); s.Reconnects != 0 {
		t.Errorf("status %+v", s)
	}
}

// However fast a config comes and goes, the last state is the one that counts, exactly, and nothing is left of the others.
//
// mechanism: A6 A7 B4
// lesson: X13 C10
func TestConfigChurn(t *testing.T) { // not beside others, whose goroutines would count
	west, south := newWest(t, 1, 2), newCluster(t, "south", 3)
	south.ip("10.3.1.1", 257, "172.18.3.1")
	southIP := fmt.Sprintf("10.3.1.1/32 %d via 172.18.3.1 by 3 ip", 3<<16+257)
	w := newWorld(t, withConfig(south))
	w.awaitState("south", Ready)
	for i := range 400 {
		west.etcd.WriteConfig(t, w.file("west"))
		switch i % 4 {
		case 0: // gone before anything has come of it
		case 1:
			time.Sleep(testTiming.quiet)
		case 2:
			time.Sleep(3 * testTiming.quiet)
		case 3:
			if i%16 == 3 {
				w.awaitState("west", Ready)
			}
			write(t, w.file("west"), fmt.Sprintf("endpoints:\n- %s\n# %d\n", west.etcd.Endpoint(), i))
		}
		w.remove("west")
		if i%10 == 0 {
			w.awaitGone("west")
			w.awaitIPs(southIP)
		}
	}
	w.awaitGone("west")
	w.awaitIPs(southIP)
	idle := runtime.NumGoroutine()
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	w.awaitIPs(southIP, westIP(1), westIP(2))
	w.remove("west")
	w.awaitGone("west")
	testutil.Eventually(t, soon, func() error {
		if n := runtime.NumGoroutine(); n > idle+5 {
			return fmt.Errorf("%d goroutines, %d before", n, idle)
		}
		return nil
	})
	if s, _ := w.remote("south"); s.State != Ready || s.Reconnects != 0 {
		t.Errorf("the other cluster: %+v", s)
	}
}

// A config that comes back while the removal before it still drains waits for its turn.
//
// mechanism: A6
func TestReaddWhileDraining(t *testing.T) {
	t.Parallel()
	west := newWest(t)
	for i := range 2000 {
		west.ip(fmt.Sprintf("10.2.%d.%d", i/200, i%200+1), 257, "172.18.2.1")
	}
	w := newWorld(t, withConfig(west))
	w.awaitState("west", Ready)
	for range 20 {
		w.remove("west")
		time.Sleep(testTiming.quiet)
		west.etcd.WriteConfig(t, w.file("west"))
		w.await("west", "all addresses", func(s RemoteStatus) bool { return s.State == Ready && s.IPs == 2000 })
	}
	testutil.Eventually(t, soon, func() error {
		if n := w.cfg.IPs.Len(); n != 2000 {
			return fmt.Errorf("%d entries, want 2000", n)
		}
		return nil
	})
}

// A mesh that is stopped at any moment stops, whatever it was doing.
func TestStopAnyTime(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	cfg := testConfig(t)
	cfg.Dir = t.TempDir()
	west.etcd.WriteConfig(t, filepath.Join(cfg.Dir, "west"))
	write(t, filepath.Join(cfg.Dir, "east"), "endpoints:\n- http://127.0.0.1:1\n")
	for i := range 30 {
		w := &world{t: t, dir: cfg.Dir, log: &logBuffer{}, timing: testTiming}
		w.run(cfg)
		time.Sleep(time.Duration(i) * time.Millisecond)
		w.stop()
	}
}

func TestConfigChecked(t *testing.T) {
	good := testConfig(t)
	good.Dir = "/nowhere"
	for name, c := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"good":            {func(*Config) {}, ""},
		"no table":        {func(c *Config) { c.IPs = nil }, "mesh: a table or the log is missing"},
		"no cluster name": {func(c *Config) { c.ClusterName = "" }, "our own cluster"},
		"no cluster id":   {func(c *Config) { c.ClusterID = 0 }, "cluster id 0"},
		"large id":        {func(c *Config) { c.ClusterID = 256 }, "cluster id 256"},
		"no mesh":         {func(c *Config) { c.Dir, c.ClusterID = "", 0 }, ""},
	} {
		cfg := good
		c.change(&cfg)
		m, err := New(cfg)
		if got := fmt.Sprint(err); (err == nil) != (c.want == "") || !strings.Contains(got, c.want) && err != nil {
			t.Errorf("%s: error %v, want %q", name, err, c.want)
		}
		if err == nil && m.String() != "mesh" {
			t.Errorf("String() = %q", m)
		}
	}
}
