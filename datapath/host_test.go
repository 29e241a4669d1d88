// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/node"
)

// routes prints the routes of one protocol, both families, without what does not matter here.
func (h *testHost) routes(protocol string) []string {
	h.t.Helper()
	var all []string
	for _, family := range []string{"-4", "-6"} {
		for line := range strings.Lines(h.ip(family + " route show proto " + protocol)) {
			line, _, _ = strings.Cut(strings.TrimSpace(line), " pref ")
			all = append(all, strings.ReplaceAll(line, " metric 1024", ""))
		}
	}
	slices.Sort(all)
	return all
}

func (h *testHost) wantRoutes(protocol string, want ...string) {
	h.t.Helper()
	slices.Sort(want)
	testutil.Eventually(h.t, patience, func() error {
		if diff := cmp.Diff(want, h.routes(protocol)); diff != "" {
			return fmt.Errorf("routes of protocol %s (-want +got):\n%s", protocol, diff)
		}
		return nil
	})
}

// wantRouteError waits for an error at a prefix in the status.
func (a *agent) wantRouteError(prefix, text string) {
	a.h.t.Helper()
	testutil.Eventually(a.h.t, patience, func() error {
		for _, r := range a.Status().Routes {
			if r.Prefix.String() == prefix && strings.Contains(r.Error, text) && !r.Installed {
				return nil
			}
		}
		return fmt.Errorf("routes %+v, want one for %s with an error about %q", a.Status().Routes, prefix, text)
	})
}

// native makes h one with native routing, the nodes of the mesh in its table.
func (h *testHost) native(nodes ...node.Node) {
	h.cfg.RoutingMode = RoutingNative
	for _, n := range nodes {
		h.cfg.Nodes.Upsert(n)
	}
}

// lesson: X9
// mechanism: F4
func TestRoutesFollowNodes(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	h.native(
		testNode("east", 1, "east-1", []string{"172.18.1.1"}, "10.1.1.0/24"), // ourselves
		testNode("east", 1, "east-2", []string{"172.18.1.2"}, "10.1.2.0/24"),
		testNode("west", 2, "west-1", []string{"172.18.2.1", "fd00:18:2::1"}, "10.2.1.0/24", "fd00:10:2:1::/64"),
	)
	a := h.start()
	east2 := "10.1.2.0/24 via 172.18.1.2 dev eth0"
	h.wantRoutes("119", east2, "10.2.1.0/24 via 172.18.2.1 dev eth0", "fd00:10:2:1::/64 via fd00:18:2::1 dev eth0")

	// A node is replaced by one of the same name with other addresses.
	h.cfg.Nodes.Upsert(testNode("west", 2, "west-1", []string{"172.18.2.9", "fd00:18:2::9"}, "10.2.1.0/24", "fd00:10:2:9::/64"))
	h.wantRoutes("119", east2, "10.2.1.0/24 via 172.18.2.9 dev eth0", "fd00:10:2:9::/64 via fd00:18:2::9 dev eth0")
	h.cfg.Nodes.Delete("west", "west-1")
	h.wantRoutes("119", east2)
	testutil.Eventually(t, patience, func() error {
		want := []RouteStatus{{Prefix: netip.MustParsePrefix("10.1.2.0/24"), Gateway: netip.MustParseAddr("172.18.1.2"),
			Device: "eth0", Node: "east/east-2", Installed: true}}
		if got := a.Status().Routes; !slices.Equal(want, got) {
			return fmt.Errorf("status %+v, want %+v", got, want)
		}
		return nil
	})
	a.stop()
	h.wantRoutes("119", east2)
}

// lesson: K5
func TestRoutesAreRestored(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	h.native(testNode("west", 2, "west-1", []string{"172.18.2.1", "fd00:18:2::1"}, "10.2.1.0/24", "fd00:10:2:1::/64"))
	h.start()
	want := []string{"10.2.1.0/24 via 172.18.2.1 dev eth0", "fd00:10:2:1::/64 via fd00:18:2::1 dev eth0"}
	h.wantRoutes("119", want...)
	for _, spoil := range []string{
		"route del 10.2.1.0/24",
		"route del fd00:10:2:1::/64",
		"route replace 10.2.1.0/24 via 172.18.7.7 dev eth0 proto 119",
		"route replace fd00:10:2:1::/64 via fd00:18:7::7 dev eth0 proto 119",
		"route add 10.2.1.0/24 via 172.18.7.7 dev eth0 proto 119 metric 5",
		"route add 10.77.0.0/16 via 172.18.7.7 dev eth0 proto 119",
		"route add blackhole 10.78.0.0/16 proto 119",
		"route replace 10.2.1.0/24 proto 119 nexthop via 172.18.7.7 dev eth0 nexthop via 172.18.7.8 dev eth0",
	} {
		h.ip(spoil)
		h.wantRoutes("119", want...)
	}
	// The kernel takes the routes of a device that goes down, and its IPv6 addresses too.
	h.ip("link set eth0 down")
	h.ip("link set eth0 up")
	h.ip("addr replace fd00:18:1::1/32 dev eth0 nodad")
	h.wantRoutes("119", want...)
}

// lesson: K5
func TestForeignRoutesAreUntouched(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	for _, foreign := range []string{
		"route add 10.2.1.0/24 via 172.18.7.7 dev eth0 proto static",
		"route add 10.2.2.0/24 via 172.18.7.7 dev eth0 proto static metric 500",
		"route add fd00:10:2:1::/64 via fd00:18:7::7 dev eth0 proto static",
		"route add blackhole 10.2.3.0/24 proto static",
		"route add 10.9.0.0/16 via 172.18.7.7 dev eth0 proto static",
	} {
		h.ip(foreign)
	}
	before := h.routes("static")
	h.native(
		testNode("west", 2, "west-1", []string{"172.18.2.1", "fd00:18:2::1"}, "10.2.1.0/24", "10.2.2.0/24", "10.2.3.0/24",
			"10.2.4.0/24", "fd00:10:2:1::/64"),
		testNode("west", 2, "evil", []string{"172.18.2.6", "fd00:18:2::6"}, "0.0.0.0/0", "::/0", "172.18.0.0/16", "169.254.0.0/16"),
	)
	a := h.start()
	ours := "10.2.4.0/24 via 172.18.2.1 dev eth0"
	h.wantRoutes("119", ours)
	for _, prefix := range []string{"10.2.1.0/24", "10.2.2.0/24", "10.2.3.0/24", "fd00:10:2:1::/64"} {
		a.wantRouteError(prefix, "left alone")
	}
	a.wantRouteError("0.0.0.0/0", "default route")
	a.wantRouteError("172.18.0.0/16", "node address")
	if diff := cmp.Diff(before, h.routes("static")); diff != "" {
		t.Errorf("foreign routes (-before +after):\n%s", diff)
	}
	// The way is free.
	h.ip("route del 10.2.1.0/24 proto static")
	h.wantRoutes("119", ours, "10.2.1.0/24 via 172.18.2.1 dev eth0")
	h.cfg.Nodes.Delete("west", "west-1")
	h.wantRoutes("119")
	h.wantRoutes("static", slices.DeleteFunc(before, func(r string) bool { return strings.HasPrefix(r, "10.2.1.0/24") })...)
}

// While the link to a node is down, so is the route to its pods, and the status names it; nothing else suffers.
//
// lesson: K5
func TestRouteToADownLink(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	h.ip("link add eth1 type veth peer name far1")
	h.ip("link set far1 up")
	h.ip("addr add 172.19.1.1/16 dev eth1")
	h.native(
		testNode("west", 2, "west-1", []string{"172.18.2.1"}, "10.2.1.0/24"),
		testNode("west", 2, "west-2", []string{"172.19.2.1"}, "10.2.2.0/24"),
	)
	a := h.start()
	other, behind := "10.2.1.0/24 via 172.18.2.1 dev eth0", "10.2.2.0/24 via 172.19.2.1 dev eth1"
	for range 2 {
		h.wantRoutes("119", other)
		a.wantRouteError("10.2.2.0/24", "172.19.2.1")
		h.ip("link set eth1 up")
		h.wantRoutes("119", other, behind)
		h.ip("link set eth1 down") // of which the kernel takes the routes
	}
	h.wantRoutes("119", other)
}

// A route that the kernel has no room for is tried again, and the status says so; the others are there meanwhile.
//
// invariant 7
// lesson: K5
func TestRouteTableFull(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	var full atomic.Bool
	full.Store(true)
	h.cfg.refuseRoute = func(p netip.Prefix) error {
		if p == netip.MustParsePrefix("10.2.2.0/24") && full.Load() {
			return unix.ENOSPC
		}
		return nil
	}
	h.native(testNode("west", 2, "west-1", []string{"172.18.2.1"}, "10.2.1.0/24", "10.2.2.0/24", "10.2.3.0/24"))
	a := h.start()
	some := []string{"10.2.1.0/24 via 172.18.2.1 dev eth0", "10.2.3.0/24 via 172.18.2.1 dev eth0"}
	h.wantRoutes("119", some...)
	a.wantRouteError("10.2.2.0/24", "no space left")
	full.Store(false)
	h.cfg.Nodes.Upsert(testNode("west", 2, "west-2", []string{"172.18.2.2"}, "10.2.4.0/24")) // so that it does not take 5 s
	h.wantRoutes("119", append(some, "10.2.2.0/24 via 172.18.2.1 dev eth0", "10.2.4.0/24 via 172.18.2.2 dev eth0")...)
	testutil.Eventually(t, patience, func() error {
		if slices.ContainsFunc(a.Status().Routes, func(r RouteStatus) bool { return r.Error != "" || !r.Installed }) {
			return fmt.Errorf("routes %+v, want no error", a.Status().Routes)
		}
		return nil
	})
}

func TestUnreachableNode(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	h.native(
		testNode("west", 2, "nowhere", []string{"192.0.2.1"}, "10.2.1.0/24"),
		testNode("west", 2, "own", []string{"172.18.1.9"}, "10.2.2.0/24"),
		testNode("west", 2, "good", []string{"172.18.2.1"}, "10.2.3.0/24"),
	)
	h.ip("addr add 172.18.1.9/32 dev lo")
	a := h.start()
	good := "10.2.3.0/24 via 172.18.2.1 dev eth0"
	h.wantRoutes("119", good)
	a.wantRouteError("10.2.1.0/24", "no route")
	a.wantRouteError("10.2.2.0/24", "an address of this node")
	h.ip("route add default via 172.18.2.1")
	a.wantRouteError("10.2.1.0/24", "behind gateway 172.18.2.1")
	h.wantRoutes("119", good)
	// Once it is on a common network the route comes.
	h.ip("route add 192.0.2.0/24 dev eth0")
	h.wantRoutes("119", good, "10.2.1.0/24 via 192.0.2.1 dev eth0")
	// Where the kernel has no verdict, what there is stays.
	h.ip("route del default")
	h.ip("route add unreachable 172.18.2.1")
	a.wantRouteError("10.2.3.0/24", "no route")
	h.wantRoutes("119", good, "10.2.1.0/24 via 192.0.2.1 dev eth0")
}

// invariant 2
// mechanism: F4
func TestRoutesWaitForTheirSources(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	west := testNode("west", 2, "west-1", []string{"172.18.2.1"}, "10.2.1.0/24")
	north := testNode("north", 3, "north-1", []string{"172.18.3.1"}, "10.3.1.0/24")
	h.native(west, north)
	h.start().stop()
	both := []string{"10.2.1.0/24 via 172.18.2.1 dev eth0", "10.3.1.0/24 via 172.18.3.1 dev eth0"}
	h.wantRoutes("119", both...)

	// An agent that has heard of nobody yet leaves what it finds.
	h.cfg.Nodes = node.NewTable()
	h.mu.Lock()
	h.heard[0] = false
	h.mu.Unlock()
	a := h.start()
	h.cfg.Nodes.Upsert(west)
	testutil.Eventually(t, patience, func() error {
		if r := a.Status().Routes; len(r) != 1 || !r[0].Installed {
			return fmt.Errorf("routes %+v, want that of west-1", r)
		}
		return nil
	})
	h.wantRoutes("119", both...)
	h.hear(0)
	h.wantRoutes("119", both[0])
	a.stop()

	// Without routing by us, our leftovers go.
	h.cfg.RoutingMode = RoutingNone
	h.ip("route add 10.9.0.0/16 via 172.18.7.7 dev eth0 proto static")
	h.start()
	h.wantRoutes("119")
	h.wantRoutes("static", "10.9.0.0/16 via 172.18.7.7 dev eth0")
}

// More events than the socket holds are a change like any other.
//
// lesson: K4
func TestWatchSurvivesOverrun(t *testing.T) {
	h := newTestHost(t)
	var w *watch
	var err error
	h.ns.Do(t, func() { w, err = openWatch(nil) })
	if err != nil {
		t.Fatal(err)
	}
	if err := w.socket.SetReceiveBufferSize(1, true); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		h.ip(fmt.Sprintf("route add 10.77.%d.0/24 dev eth0", i))
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer w.Close()
	defer cancel()
	changed := make(chan struct{}, 1)
	result := make(chan error, 1)
	go func() { result <- w.run(ctx, changed) }()
	for range 3 {
		select {
		case <-changed:
		case err := <-result:
			t.Fatalf("watch ended with %v", err)
		case <-time.After(patience):
			t.Fatal("the watch heard nothing")
		}
		h.ip("route add 10.78.0.0/24 dev eth0")
		h.ip("route del 10.78.0.0/24 dev eth0")
	}
	cancel()
	w.Close()
	if err := <-result; err != nil {
		t.Errorf("watch ended with %v", err)
	}
}
