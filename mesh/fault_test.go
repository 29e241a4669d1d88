// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

// The tests of faults have two forms: a short one, which is part of every run, and the full one with the figures that are
// wanted of weft, for which WEFT_TEST_FAULTS is set ("make test-faults").
var fullFaults = os.Getenv("WEFT_TEST_FAULTS") != ""

// figure is a number of either form.
func figure[T any](short, full T) T {
	if fullFaults {
		return full
	}
	return short
}

// seeded returns randomness that can be had again.
func seeded(t *testing.T) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// fill stores n keys, some at a time.
func (c *cluster) fill(n int, key func(int) (key, value string)) {
	c.t.Helper()
	const atOnce = 128 // etcd's own limit
	for at := 0; at < n; at += atOnce {
		var puts []clientv3.Op
		for i := at; i < min(n, at+atOnce); i++ {
			k, v := key(i)
			puts = append(puts, clientv3.OpPut(k, v))
		}
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		_, err := c.etcd.Client().Txn(ctx).Then(puts...).Commit()
		cancel()
		must(c.t, err)
	}
}

// fillIPs announces n addresses from 10.128.0.0 on.
func (c *cluster) fillIPs(n int) {
	c.t.Helper()
	c.fill(n, func(i int) (string, string) {
		addr := fmt.Sprintf("10.%d.%d.%d", 128+i>>16, i>>8&255, i&255)
		return c.ipKey(addr), ipValue(addr, c.id<<16+257, "172.18.2.1")
	})
}

// site is a cluster behind a network that fails, with what its addresses should be.
type site struct {
	*cluster
	proxy *testutil.Proxy
	model map[int]bool // of 10.id.0.n
}

func newSite(t *testing.T, name string, id int) *site {
	t.Helper()
	s := &site{cluster: newCluster(t, name, id), model: make(map[int]bool)}
	s.proxy = testutil.StartProxy(t, s.etcd.Addr())
	s.put(1)
	return s
}

func (s *site) config() string { return "endpoints:\n- " + s.proxy.Endpoint() + "\n" }

func (s *site) addr(n int) string { return fmt.Sprintf("10.%d.0.%d", s.id, n) }

func (s *site) put(n int) {
	s.ip(s.addr(n), 257, "172.18.2.1")
	s.model[n] = true
}

func (s *site) del(n int) {
	s.etcd.Delete(s.t, s.ipKey(s.addr(n)))
	delete(s.model, n)
}

// want lists what the ipcache should hold of the site, as claimText.
func (s *site) want() (all []string) {
	for n := range s.model {
		all = append(all, fmt.Sprintf("%s/32 %d via 172.18.2.1 by %d ip", s.addr(n), s.id<<16+257, s.id))
	}
	return all
}

// outages are the ways in which a cluster goes away. Each returns what brings it back.
var outages = []struct {
	name  string
	begin func(*site) (end func())
}{
	{"cut", func(s *site) func() { s.proxy.Cut(); return func() {} }},
	{"refuse", func(s *site) func() { s.proxy.Refuse(); return s.proxy.Forward }},
	{"reset", func(s *site) func() { s.proxy.Reset(); return s.proxy.Forward }},
	{"pause", func(s *site) func() { s.proxy.Pause(); return s.proxy.Forward }},
	{"black hole", func(s *site) func() { s.proxy.BlackHole(); return s.proxy.Forward }},
	{"restart", func(s *site) func() { s.etcd.Stop(s.t); return func() { s.etcd.Restart(s.t) } }},
	{"compaction", func(s *site) func() { s.proxy.Refuse(); return func() { s.etcd.Compact(s.t); s.proxy.Forward() } }},
	{"config away", func(s *site) func() {
		key := "cilium/cluster-config/" + s.name
		value, _ := s.etcd.Get(s.t, key)
		s.etcd.Delete(s.t, key)
		return func() { s.etcd.Put(s.t, key, value) }
	}},
	{"replaced", func(s *site) func() {
		s.etcd.Stop(s.t)
		return func() {
			s.etcd.Replace(s.t)
			s.cluster.config(fmt.Sprintf(`{"id":%d,"capabilities":{"syncedCanaries":true}}`, s.id))
			for n := range s.model {
				s.put(n)
			}
			s.canaries("state")
		}
	}},
}

// Whatever happens to any of five clusters, and to how many at once, all are ready soon after, with exactly what they have;
// and nothing that they have is missing in the meantime.
//
// lesson: E13, X5
func TestFaultOutages(t *testing.T) {
	random := seeded(t)
	w := newWorld(t)
	var sites []*site
	for i, name := range []string{"alpha", "beta", "gamma", "delta", "epsilon"} {
		s := newSite(t, name, i+1)
		sites = append(sites, s)
		write(t, w.file(name), s.config())
	}
	awaitAll := func() {
		var want []string
		for _, s := range sites {
			w.awaitWithin(time.Minute, s.name, "ready", ready)
			want = append(want, s.want()...)
		}
		w.awaitIPs(want...)
	}
	awaitAll()
	var worst time.Duration
	for loop := range figure(4, 200) {
		var ends []func()
		var what []string
		for _, s := range sites {
			if random.IntN(2) == 0 {
				continue
			}
			o := outages[random.IntN(len(outages))]
			what = append(what, s.name+": "+o.name)
			ends = append(ends, o.begin(s))
			if s.etcd.Client() != nil {
				s.put(2 + random.IntN(20))
				s.del(2 + random.IntN(20))
			}
		}
		for end := time.Now().Add(time.Duration(random.IntN(300)) * time.Millisecond); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			have := w.ips()
			for _, s := range sites {
				keeper := fmt.Sprintf("%s/32 %d via 172.18.2.1 by %d ip", s.addr(1), s.id<<16+257, s.id)
				if !slices.Contains(have, keeper) {
					t.Fatalf("loop %d, %v: %s is gone", loop, what, keeper)
				}
			}
		}
		began := time.Now()
		for _, end := range ends {
			end()
		}
		awaitAll()
		took := time.Since(began)
		if worst = max(worst, took); took > 10*time.Second {
			t.Logf("loop %d took %v: %v", loop, took, what)
		}
	}
	t.Logf("the longest return took %v", worst)
}
