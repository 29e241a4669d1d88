// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A config without an etcd behind it is an error of that cluster, and of no other.
//
// mechanism: C4 C6
// lesson: E15
func TestUnreachable(t *testing.T) {
	t.Parallel()
	const over = 2 * time.Second
	west, start := newWest(t, 1), time.Now()
	w := newWorld(t, withConfig(west), func(c *Config) {
		c.SyncTimeout = over
		write(t, filepath.Join(c.Dir, "east"), "endpoints:\n- http://127.0.0.1:1\n")
	})
	w.awaitState("west", Ready)
	s := w.awaitState("east", Failed)
	if isClosed(w.Ready()) && time.Since(start) < over {
		t.Error("ready before the time is over")
	}
	if !strings.Contains(s.LastError, "127.0.0.1:1") || s.ClusterID != 0 {
		t.Errorf("status %+v", s)
	}
	// East may have any id but west's; what it does not list is not known to be gone.
	if w.Listed(1) || w.Listed(0) || !w.Listed(2) {
		t.Error("listed: 1 or 0, or not 2")
	}
	<-w.Ready() // in spite of east, in time
	w.await("east", "failures", func(s RemoteStatus) bool { return s.State == Failed && s.Failures > 1 })
	if err := os.Remove(w.file("east")); err != nil {
		t.Fatal(err)
	}
	w.awaitGone("east")
	if !w.Listed(1) || !w.Listed(0) {
		t.Error("without east, ids 1 and 0 are not listed")
	}
}

// A server that takes the connection and then says nothing holds up nobody, and another config gets rid of it.
//
// lesson: E5 E15
func TestHungServer(t *testing.T) {
	t.Parallel()
	hung, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer hung.Close()
	south, west := newCluster(t, "south", 3), newWest(t, 1)
	w := newWorld(t, withConfig(south), func(c *Config) {
		write(t, filepath.Join(c.Dir, "west"), fmt.Sprintf("endpoints:\n- http://%s\n", hung.Addr()))
	})
	w.awaitState("south", Ready)
	w.awaitState("west", Failed)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitState("west", Ready)
	w.awaitIPs(westIP(1))
}
