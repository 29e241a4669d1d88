// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/weftmesh/weft/internal/testutil"
)

// batch runs many ip commands in one process.
func (h *testHost) batch(lines []string) {
	h.t.Helper()
	file := filepath.Join(h.t.TempDir(), "batch")
	testutil.MustWriteFile(h.t, file, []byte(strings.Join(lines, "\n")+"\n"))
	var out []byte
	var err error
	h.ns.Do(h.t, func() { out, err = exec.Command("ip", "-batch", file).CombinedOutput() })
	if err != nil {
		h.t.Errorf("ip -batch: %v: %s", err, out)
	}
}

// storm lists n routes to come and to go again.
func storm(n int) []string {
	var lines []string
	for _, verb := range []string{"add", "del"} {
		for i := range n {
			lines = append(lines, fmt.Sprintf("route %s 10.77.%d.%d/32 dev eth0", verb, i/250, i%250))
		}
	}
	return lines
}

// A list that the kernel marks as interrupted is asked for again; one that is never whole is an error, not half a list.
//
// lesson: K4
func TestInterruptedDump(t *testing.T) {
	for _, tc := range []struct {
		interruptions int
		ok            bool
	}{{0, true}, {1, true}, {dumpAttempts - 1, true}, {dumpAttempts, false}} {
		calls := 0
		err := dump("list things", func() error {
			if calls++; calls <= tc.interruptions {
				return fmt.Errorf("half of it: %w", netlink.ErrDumpInterrupted)
			}
			return nil
		})
		if (err == nil) != tc.ok || !tc.ok && (!errors.Is(err, netlink.ErrDumpInterrupted) || !strings.Contains(err.Error(), "list things")) {
			t.Errorf("%d interruptions: %v, want success %t", tc.interruptions, err, tc.ok)
		}
	}
}

// While devices, addresses and routes come and go, every list is whole or an error.
//
// lesson: K4
func TestDumpsUnderStorm(t *testing.T) {
	h := newTestHost(t)
	const fixed = 300
	var lines []string
	for i := range fixed {
		lines = append(lines, fmt.Sprintf("route add 10.88.%d.%d/32 dev eth0 proto 119", i/250, i%250))
	}
	h.batch(lines)
	var churn sync.WaitGroup
	churn.Go(func() { h.batch(storm(2000)) })
	churn.Go(func() {
		var lines []string
		for i := range 200 {
			lines = append(lines, fmt.Sprintf("addr add 10.99.0.%d/32 dev eth0", i), fmt.Sprintf("addr del 10.99.0.%d/32 dev eth0", i))
		}
		h.batch(lines)
	})
	churn.Go(func() {
		var lines []string
		for range 20 {
			lines = append(lines, "link add y0 type veth peer name y1", "link del y0")
		}
		h.batch(lines)
	})
	var host *host
	var err error
	h.ns.Do(t, func() { host, err = openHost() })
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	interrupted := 0
	list := func(what string, act func() (whole bool, err error)) {
		whole, err := act()
		switch {
		case errors.Is(err, netlink.ErrDumpInterrupted):
			interrupted++
		case err != nil || !whole:
			t.Errorf("%s: whole %t, err %v", what, whole, err)
		}
	}
	for range 100 {
		list("routes", func() (bool, error) {
			routes, _, err := host.routes(func(netip.Prefix) bool { return false })
			return len(routes) == fixed, err
		})
		list("devices", func() (bool, error) {
			devices, err := host.devices()
			return len(devices) >= 1, err
		})
		list("addresses", func() (bool, error) {
			addresses, err := host.addresses()
			_, ok := addresses[netip.MustParseAddr("172.18.1.1")]
			return ok, err
		})
	}
	churn.Wait()
	t.Logf("%d lists could not be had whole", interrupted)
}

// A storm of events that no buffer holds, amid which somebody removes what is ours: in the end all of it is there, and
// nothing else was touched.
//
// lesson: K4, K5
func TestStorm(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	h.ip("route add 10.9.0.0/16 via 172.18.7.7 dev eth0 proto static")
	h.native(testNode("west", 2, "west-1", []string{"172.18.2.1"}, "10.2.1.0/24"))
	h.start()
	ours := "10.2.1.0/24 via 172.18.2.1 dev eth0"
	h.wantRoutes("119", ours)
	events := 1000
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		events = 10000
	}
	lines := storm(events)
	lines = append(lines[:events], append([]string{"route del 10.2.1.0/24 proto 119"}, lines[events:]...)...)
	// The route may be restored before it is removed: then the batch goes on.
	h.batch(lines)
	h.wantRoutes("119", ours)
	h.wantRoutes("static", "10.9.0.0/16 via 172.18.7.7 dev eth0")
	h.wantLinks("eth0")
}

// A device gets another MTU and another name, goes down and up, and to another namespace and back: its programs follow.
//
// lesson: K3
func TestDeviceIsMovedAbout(t *testing.T) {
	h := newTestHost(t)
	h.cfg.Devices = []string{"eth0", "wan0"}
	h.ip("link add wan0 type veth peer name x1")
	h.start()
	h.wantLinks("eth0", "wan0")
	h.ip("link set wan0 mtu 1300")
	h.ip("link set wan0 up")
	h.wantLinks("eth0", "wan0")
	h.ip("link set wan0 down")
	h.ip("link set wan0 name other")
	h.wantLinks("eth0")
	h.ip("link set other name wan0")
	h.wantLinks("eth0", "wan0")
	h.ip("link set wan0 netns " + h.peer.Path())
	h.wantLinks("eth0")
	h.ipIn(h.peer, "link set wan0 name back")
	var err error
	h.peer.Do(t, func() {
		var l netlink.Link
		if l, err = netlink.LinkByName("back"); err == nil {
			var f *os.File
			if f, err = os.Open(h.ns.Path()); err == nil {
				defer f.Close()
				err = errors.Join(netlink.LinkSetName(l, "wan0"), netlink.LinkSetNsFd(l, int(f.Fd())))
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	h.wantLinks("eth0", "wan0")
}
