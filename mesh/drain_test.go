// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// propagation measures how long n changes of a cluster take from etcd to the ipcache.
func (w *world) propagation(c *cluster, n int) (took []time.Duration) {
	w.t.Helper()
	addr := netip.MustParseAddr(fmt.Sprintf("10.%d.77.1", c.id))
	for i := range n {
		w.changes++
		want := c.id<<16 + 300 + w.changes%60_000
		began := time.Now()
		c.etcd.Put(w.t, c.ipKey(addr.String()), ipValue(addr.String(), want, "172.18.7.1"))
		for {
			if claim, ok := w.cfg.IPs.Lookup(addr); ok && int(claim.Entry.Identity) == want {
				break
			}
			if time.Since(began) > soon {
				w.t.Fatalf("change %d of cluster %s has not come", i, c.name)
			}
			time.Sleep(50 * time.Microsecond)
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took
}

// percentile is of sorted durations.
func percentile(sorted []time.Duration, percent int) time.Duration {
	return sorted[min(len(sorted)-1, len(sorted)*percent/100)]
}

// A cluster with very many addresses drains in batches: in sight, fast, and without holding up another cluster, or whoever
// reads the tables.
//
// mechanism: B4, B5
// lesson: L5
func TestFaultDrain(t *testing.T) {
	n := figure(20_000, 1_000_000)
	south, west := newCluster(t, "south", 3), newWest(t)
	west.fillIPs(n)
	w := newWorld(t, withConfig(south))
	w.awaitState("south", Ready)
	idle := w.propagation(south, 200)
	write(t, w.file("west"), "endpoints:\n- "+west.etcd.Endpoint()+"\n")
	w.awaitWithin(figure(time.Minute, 10*time.Minute), "west", "all addresses", func(s RemoteStatus) bool { return s.State == Ready && s.IPs == n })

	stop, watched := make(chan struct{}), make(chan struct{})
	var left []int
	var longest time.Duration // that a reader waits
	go func() {
		defer close(watched)
		for {
			select {
			case <-stop:
				return
			default:
			}
			began := time.Now()
			w.cfg.IPs.Lookup(netip.MustParseAddr("10.128.0.1"))
			longest = max(longest, time.Since(began))
			if s, ok := w.remote("west"); ok && s.State == Draining && (len(left) == 0 || s.IPs != left[len(left)-1]) {
				left = append(left, s.IPs)
			}
		}
	}()
	began := time.Now()
	w.remove("west")
	var draining []time.Duration
	for {
		if _, there := w.remote("west"); !there {
			break
		}
		draining = append(draining, w.propagation(south, 1)...)
	}
	took := time.Since(began)
	close(stop)
	<-watched
	slices.Sort(draining)

	t.Logf("%d addresses drained in %v; propagation of another cluster: idle p50 %v, p99 %v; meanwhile p50 %v, p99 %v; a reader waits %v at most",
		n, took, percentile(idle, 50), percentile(idle, 99), percentile(draining, 50), percentile(draining, 99), longest)
	t.Logf("left, as seen: %d times, %v", len(left), left[:min(len(left), 8)])
	if !strings.Contains(w.log.String(), "cluster=west state=draining") {
		t.Error("the drain has no state")
	}
	// How often the counts are seen depends on the machine.
	if len(left) < figure(0, 3) || len(left) > 0 && left[len(left)-1] >= n || !slices.IsSortedFunc(left, func(a, b int) int { return b - a }) {
		t.Errorf("the drain has not been seen as it goes: %v", left)
	}
	if fullFaults && took > 10*time.Second {
		t.Errorf("the drain took %v", took)
	}
	if p50 := percentile(draining, 50); fullFaults && p50 > 10*percentile(idle, 99)+100*time.Millisecond {
		t.Errorf("meanwhile, another cluster's changes took %v", p50)
	}
	w.awaitIPs(fmt.Sprintf("10.3.77.1/32 %d via 172.18.7.1 by 3 ip", 3<<16+300+w.changes%60_000))
}

// A drain ends when the agent does. The next agent finds no config, has nothing of the cluster, and knows that: what is
// left of it in the kernel is pruned.
//
// mechanism: B5
func TestDrainStopped(t *testing.T) {
	t.Parallel()
	const n = 8000
	west := newWest(t)
	west.fillIPs(n)
	w := newWorld(t, withConfig(west))
	w.await("west", "all addresses", func(s RemoteStatus) bool { return s.State == Ready && s.IPs == n })

	// With its stop closed, a drain removes nothing more, but comes to its end.
	r := w.remotes["west"]
	w.stop()
	closed := make(chan struct{})
	close(closed)
	if r.feeds.drain(closed) || w.cfg.IPs.Len() != n {
		t.Errorf("a drain that is stopped has left %d of %d addresses", w.cfg.IPs.Len(), n)
	}

	for i := range 2 {
		w.run(w.cfg)
		west.etcd.WriteConfig(t, w.file("west"))
		w.await("west", "all addresses", func(s RemoteStatus) bool { return s.State == Ready && s.IPs == n })
		w.remove("west")
		testutil.Eventually(t, soon, func() error {
			if s, ok := w.remote("west"); ok && s.State != Draining && i > 0 {
				return fmt.Errorf("not draining: %+v", s)
			}
			return nil
		})
		w.stop()
		w.run(w.cfg)
		testutil.Eventually(t, soon, func() error {
			if !w.Listed(2) || !w.Listed(0) {
				return fmt.Errorf("cluster 2 is not known to be gone: %+v", w.Status())
			}
			return nil
		})
		w.stop()
	}
}

// What happens to a cluster is told in the words that users know.
//
// mechanism: B3, B5, R2
func TestLogLines(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	w := newWorld(t, withConfig(west))
	w.awaitState("west", Ready)
	w.remove("west")
	w.awaitGone("west")
	for _, want := range []string{
		`level=INFO msg="connection to remote cluster established" cluster=west clusterID=2`,
		`level=INFO msg="state of remote cluster" cluster=west state=draining was=`,
		`level=INFO msg="all resources of remote cluster cleaned up" cluster=west`,
	} {
		if !strings.Contains(w.log.String(), want) {
			t.Errorf("the log lacks %s", want)
		}
	}
}
