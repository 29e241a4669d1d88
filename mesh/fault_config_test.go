// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// openFiles counts what this process has open.
func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(entries)
}

// churn is a directory of configs under permanent change.
type churn struct {
	*world
	random *rand.Rand
	sites  []*site
	there  map[string]bool // the configs that there are, by name
}

func newChurn(t *testing.T) *churn {
	c := &churn{world: newWorld(t), random: seeded(t), there: make(map[string]bool)}
	for i, name := range []string{"alpha", "beta", "gamma"} {
		c.sites = append(c.sites, newSite(t, name, i+1))
	}
	return c
}

// settle waits until exactly the clusters whose configs are there are followed, over one connection each.
func (c *churn) settle() {
	c.t.Helper()
	var want []string
	for _, s := range c.sites {
		if !c.there[s.name] {
			c.awaitGone(s.name)
		} else {
			c.await(s.name, "ready", func(s RemoteStatus) bool { return s.State == Ready && s.ConfigError == "" })
			want = append(want, s.want()...)
		}
	}
	c.awaitIPs(want...)
	testutil.Eventually(c.t, soon, func() error {
		for _, s := range c.sites {
			n := s.proxy.Open()
			if c.there[s.name] && n != 1 || !c.there[s.name] && n != 0 {
				return fmt.Errorf("%s: %d connections, config there: %t", s.name, n, c.there[s.name])
			}
		}
		return nil
	})
}

// file changes the config of one cluster as people and tools do.
func (c *churn) file() {
	s := c.sites[c.random.IntN(len(c.sites))]
	path := c.world.file(s.name)
	content := s.config()
	replace := func(text string) {
		write(c.t, filepath.Join(c.dir, "."+s.name+".tmp"), text)
		must(c.t, os.Rename(filepath.Join(c.dir, "."+s.name+".tmp"), path))
		c.there[s.name] = true
	}
	switch kind := c.random.IntN(9); {
	case kind == 0:
		replace(content)
	case kind == 1:
		replace(fmt.Sprintf("%s# %d\n", content, c.random.Int()))
	case kind == 2: // half of it first
		write(c.t, path, content[:c.random.IntN(len(content))])
		write(c.t, path, content)
		c.there[s.name] = true
	case kind == 3: // through a link that changes its target
		target := filepath.Join(c.t.TempDir(), s.name)
		write(c.t, target, content)
		_ = os.Remove(path + ".link")
		must(c.t, os.Symlink(target, path+".link"))
		must(c.t, os.Rename(path+".link", path))
		c.there[s.name] = true
	case kind == 4: // the directory goes, and comes back
		must(c.t, os.Rename(c.dir, c.dir+".away"))
		must(c.t, os.Rename(c.dir+".away", c.dir))
	case !c.there[s.name]:
		replace(content)
	case kind == 5:
		must(c.t, os.Chmod(path, os.FileMode(0o600+c.random.IntN(2)*0o44)))
	case kind == 6:
		must(c.t, os.Rename(path, path+".bak.txt"))
		must(c.t, os.Rename(path+".bak.txt", path))
	default:
		must(c.t, os.Remove(path))
		delete(c.there, s.name)
	}
}

// secret changes the configs of all clusters at once, as the kubelet does.
func (c *churn) secret(a *atomicWriter) {
	files := make(map[string]string)
	clear(c.there)
	for _, s := range c.sites {
		if c.random.IntN(3) > 0 {
			files[s.name] = fmt.Sprintf("%s# %d\n", s.config(), c.random.IntN(2))
			c.there[s.name] = true
		}
	}
	a.write(files)
}

// However the configs come, change and go, there is one connection for each that is there, what they lead to is what is
// known, and nothing is left of all the others.
//
// mechanism: A5, A6, A7
// lesson: X13, C10
func TestFaultConfigs(t *testing.T) {
	t.Parallel()
	for name, style := range map[string]func(c *churn) (step, empty func()){
		"files": func(c *churn) (step, empty func()) { return c.file, c.removeAll },
		"secret": func(c *churn) (step, empty func()) {
			a := &atomicWriter{t: c.t, path: c.dir}
			return func() { c.secret(a) }, func() { clear(c.there); a.write(nil) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newChurn(t)
			step, empty := style(c)
			var goroutines, files int
			const burst = 25
			for i := range figure(8, 200) {
				for range burst {
					step()
					if c.random.IntN(4) == 0 {
						time.Sleep(time.Duration(c.random.IntN(8)) * time.Millisecond)
					}
				}
				c.settle()
				if i%10 != 1 {
					continue
				}
				empty()
				c.settle()
				if i == 1 {
					goroutines, files = runtime.NumGoroutine(), openFiles(t)
				}
				testutil.Eventually(t, soon, func() error {
					if g, f := runtime.NumGoroutine(), openFiles(t); g > goroutines+10 || f > files+5 {
						return fmt.Errorf("%d goroutines and %d files, %d and %d before", g, f, goroutines, files)
					}
					return nil
				})
			}
		})
	}
}

// removeAll leaves no config.
func (c *churn) removeAll() {
	for name := range c.there {
		c.remove(name)
	}
	clear(c.there)
}

// A cluster that is connected anew a thousand times costs what it cost the first time, and each relist changes nothing.
//
// mechanism: I2, I3
// lesson: X6
func TestFaultReconnects(t *testing.T) { // not beside others, whose memory would count
	identities := figure(3000, 500)
	west := newWest(t)
	west.fill(identities, func(i int) (string, string) {
		return fmt.Sprintf("cilium/state/identities/v1/id/%d", 2<<16+i), fmt.Sprintf("k8s:app=app-%d;k8s:io.cilium.k8s.policy.cluster=west;", i)
	})
	west.fillIPs(identities)
	w := newWorld(t, withConfig(west))
	filled := func(s RemoteStatus) bool {
		return s.State == Ready && s.Identities == identities && s.IPs == identities
	}
	w.await("west", "everything", filled)
	_, revision, _ := w.cfg.IPs.Changes(ipcache.Revision{}, make([]ipcache.Change, 0, 1<<20))
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	reconnects := figure(20, 1000)
	var before uint64
	for i := range reconnects {
		write(t, filepath.Join(w.dir, ".west"), fmt.Sprintf("endpoints:\n- %s\n# %d\n", west.etcd.Endpoint(), i))
		must(t, os.Rename(filepath.Join(w.dir, ".west"), w.file("west")))
		w.await("west", "another connection", func(s RemoteStatus) bool { return s.Reconnects > uint64(i) && filled(s) })
		if i == reconnects/5 {
			before = heap()
		}
	}
	if changes, _, reset := w.cfg.IPs.Changes(revision, make([]ipcache.Change, 0, 16)); len(changes) != 0 || reset {
		t.Errorf("the relists have changed %d addresses", len(changes))
	}
	// What a connection knows of them takes some 100 bytes of memory each.
	const more = 8 << 20
	testutil.Eventually(t, soon, func() error { // what the last connections needed goes with their goroutines
		after := heap()
		if after > before+more {
			return fmt.Errorf("heap %d KiB, before %d KiB", after>>10, before>>10)
		}
		t.Logf("heap %d KiB, after %d more connections %d KiB", before>>10, reconnects-reconnects/5, after>>10)
		return nil
	})
}
