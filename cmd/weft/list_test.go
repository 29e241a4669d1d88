// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"iter"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
)

// watchList runs a command with --watch until the test has seen enough.
func watchList(t *testing.T, socket, args string) (out *buffer, stop func() int) {
	t.Helper()
	out = new(buffer)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan int, 1)
	go func() {
		done <- run(environment{
			ctx: ctx, stdout: out, stderr: out, lookup: lookupIn(map[string]string{"WEFT_API_SOCKET": socket}),
			now: func() time.Time { return testNow },
		}, append(strings.Fields(args), "--watch", "--interval", "100ms"))
	}()
	return out, func() int {
		cancel()
		return <-done
	}
}

// A watched list is shown once, and then what becomes of it: in a table, and as lines of JSON.
func TestWatch(t *testing.T) {
	var ips atomic.Pointer[[]api.IP]
	agent := lab(true)
	agent.IPs = func() iter.Seq[api.IP] { return slices.Values(*ips.Load()) }
	ips.Store(&[]api.IP{westNode, westPod})
	socket := serveAgent(t, agent)
	table, stopTable := watchList(t, socket, "ip list")
	lines, stopLines := watchList(t, socket, "ip list -o json")
	// Both have seen a state before it changes.
	seen := func(wants ...string) {
		t.Helper()
		testutil.Eventually(t, 20*time.Second, func() error {
			if err := contains(table.String(), wants...); err != nil {
				return err
			}
			for _, want := range wants {
				event, prefix, _ := strings.Cut(want, " ")
				if err := contains(lines.String(), `"kind":"WatchEvent","event":"`+event+`","object":{"prefix":"`+prefix+`"`); err != nil {
					return err
				}
			}
			return nil
		})
	}
	seen("added 10.2.1.10/32", "added 172.18.2.1/32")
	moved := westPod
	moved.Host = addr("172.18.2.2")
	ips.Store(&[]api.IP{moved, evilPod})
	seen("changed 10.2.1.10/32", "added 10.2.1.11/32", "removed 172.18.2.1/32")
	if code := stopTable(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	if code := stopLines(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	var got []string
	for line := range strings.Lines(table.String()) {
		got = append(got, strings.Join(strings.Fields(line)[:2], " "))
	}
	want := []string{"EVENT PREFIX", "added 10.2.1.10/32", "added 172.18.2.1/32", "changed 10.2.1.10/32", "added 10.2.1.11/32", "removed 172.18.2.1/32"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got)\n%s", diff)
	}
	checkHarmless(t, table.String()+lines.String())
}

// What an etcd answers all the time is no change of its cluster.
func TestWatchClusters(t *testing.T) {
	var contact atomic.Int64
	agent := lab(true)
	agent.Status = func() api.Status {
		s := labStatus(contact.Load() < 5)
		s.Clusters[1].LastSuccess = testNow.Add(time.Duration(contact.Add(1)) * time.Second)
		return s
	}
	out, stop := watchList(t, serveAgent(t, agent), "clusters list --no-headers")
	testutil.Eventually(t, 20*time.Second, func() error { return contains(out.String(), "added south") })
	stop()
	if lines, added := strings.Count(out.String(), "\n"), strings.Count(out.String(), "added "); lines != added || added < 3 {
		t.Errorf("%d lines of which %d tell of a new cluster, want no others:\n%s", lines, added, out)
	}
}

// A watch ends when the agent does, and says so.
func TestWatchEndsWithTheAgent(t *testing.T) {
	agent := lab(true)
	var out *buffer
	var stop func() int
	t.Run("agent", func(inner *testing.T) {
		out, stop = watchList(t, serveAgent(inner, agent), "node list")
		testutil.Eventually(inner, 20*time.Second, func() error { return contains(out.String(), "added west/west-n1") })
	})
	testutil.Eventually(t, 20*time.Second, func() error { return contains(out.String(), "weft: agent unreachable at ") })
	if code := stop(); code != exitUnreachable {
		t.Errorf("exit code %d, want %d", code, exitUnreachable)
	}
}
