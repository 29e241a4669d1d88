// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/internal/testutil"
)

// Of all that the kernel tells of neighbours, news is what is looked for and is not known so, also if it is told while the
// kernel is being read.
func TestNeighbourNews(t *testing.T) {
	const bridge, port, otherPort = 7, 8, 9
	podMAC, otherMAC := net.HardwareAddr{2, 0, 0, 0, 0, 1}, net.HardwareAddr{2, 0, 0, 0, 0, 2}
	known := newNeighbourhood()
	known.hardware[netip.MustParseAddr(podA)] = podMAC.String()
	known.hardware[netip.MustParseAddr(podB)] = ""
	known.ports[behindBridge{bridge, podMAC.String()}] = port
	neighbour := func(ip string, mac net.HardwareAddr) netlink.Neigh {
		return netlink.Neigh{Family: unix.AF_INET, IP: netip.MustParseAddr(ip).AsSlice(), HardwareAddr: mac, State: unix.NUD_REACHABLE}
	}
	behind := func(bridge, port int, mac net.HardwareAddr, state int) netlink.Neigh {
		return netlink.Neigh{Family: unix.AF_BRIDGE, MasterIndex: bridge, LinkIndex: port, HardwareAddr: mac, State: state}
	}
	for name, tc := range map[string]struct {
		told netlink.Neigh
		news bool
	}{
		"as known":                  {neighbour(podA, podMAC), false},
		"another hardware":          {neighbour(podA, otherMAC), true},
		"one who was silent":        {neighbour(podB, otherMAC), true},
		"one who does not answer":   {neighbour(podB, nil), false},
		"nobody's":                  {neighbour("10.9.9.9", otherMAC), false},
		"the port that is known":    {behind(bridge, port, podMAC, unix.NUD_REACHABLE), false},
		"another port":              {behind(bridge, otherPort, podMAC, unix.NUD_REACHABLE), true},
		"another bridge":            {behind(bridge+1, otherPort, podMAC, unix.NUD_REACHABLE), false},
		"somebody else's port":      {behind(bridge, otherPort, otherMAC, unix.NUD_REACHABLE), false},
		"a port's own":              {behind(bridge, otherPort, podMAC, unix.NUD_PERMANENT), false},
		"an address of no bridge's": {behind(0, otherPort, podMAC, unix.NUD_REACHABLE), false},
	} {
		if got := known.contradictedBy(&tc.told); got != tc.news {
			t.Errorf("%s: news %t, want %t", name, got, tc.news)
		}
		news := &neighbourNews{}
		done := news.read()
		news.heard = append(news.heard, &tc.told)
		if got := done(known); got != tc.news {
			t.Errorf("%s, while the kernel was read: news %t, want %t", name, got, tc.news)
		}
	}
	news := &neighbourNews{}
	done := news.read()
	message := make([]byte, unix.SizeofNdMsg)
	for i := range maxHeard + 1 {
		if got := news.hear(message); got != (i == maxHeard) {
			t.Fatalf("message %d while the kernel was read: %t", i, got)
		}
	}
	if done(known) || news.hear(message) || news.hear(nil) || (*neighbourNews)(nil).hear(message) {
		t.Error("empty messages are news")
	}
}

// The watch hears when an address is answered for, and when the bridge learns its port.
func TestWatchHearsOfNeighbours(t *testing.T) {
	h := newPodHost(t, !hasTCX())
	news := &neighbourNews{}
	var w *watch
	var host *host
	var bridge int
	var err error
	h.ns.Do(t, func() {
		var watchErr, hostErr, linkErr error
		w, watchErr = openWatch(news)
		host, hostErr = openHost()
		bridge, linkErr = interfaceIndex("br0")
		err = errors.Join(watchErr, hostErr, linkErr)
	})
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	ctx, cancel := context.WithCancel(t.Context())
	changed := make(chan struct{}, 1)
	result := make(chan error, 1)
	go func() { result <- w.run(ctx, changed) }()
	defer func() {
		cancel()
		w.Close()
		if err := <-result; err != nil {
			t.Errorf("watch ended with %v", err)
		}
	}()
	addr := netip.MustParseAddr(podB)
	hears := func(known neighbourhood, provoke func() error) {
		t.Helper()
		news.read()(known)
		select {
		case <-changed: // of other things
		default:
		}
		deadline := time.After(patience)
		for {
			if err := provoke(); err != nil {
				t.Fatal(err)
			}
			select {
			case <-changed:
				return
			case <-deadline:
				t.Fatal("the watch heard nothing")
			case <-time.After(time.Second): // the port may not have been up
			}
		}
	}
	known := newNeighbourhood()
	known.hardware[addr] = ""
	hears(known, func() error { return host.callNeighbour(bridge, addr) })
	hardware, err := host.hardwareAddresses(bridge)
	if err != nil || hardware[addr] == "" {
		t.Fatalf("neighbours %v, %v, want one of %v", hardware, err, addr)
	}
	known = newNeighbourhood()
	known.ports[behindBridge{bridge, hardware[addr]}] = 0
	hears(known, func() error {
		ports, err := host.learntPorts(bridge)
		if err != nil {
			return err
		}
		if port, ok := ports[hardware[addr]]; ok { // of which the kernel says less than of a flush
			mac, err := net.ParseMAC(hardware[addr])
			forget := &netlink.Neigh{Family: unix.AF_BRIDGE, LinkIndex: port, HardwareAddr: mac, Flags: netlink.NTF_MASTER}
			if err = errors.Join(err, host.handle.NeighDel(forget)); err != nil {
				return err
			}
		}
		h.ip("neigh flush dev br0")
		return host.callNeighbour(bridge, addr)
	})
}

// A pod behind a bridge is found without its doing, kept while it is silent, whoever forgets it, and followed to another
// port.
func TestPodBehindBridgeIsFollowed(t *testing.T) {
	h := newPodHost(t, !hasTCX())
	h.pods.set(true, podB)
	a := h.start()
	a.wantPodDevices("lxcb")
	forget := func() {
		h.ip("link set lxcb type bridge_slave fdb_flush")
		h.ip("neigh flush dev br0")
	}
	mac := h.b.mac()
	h.b.ip("link set eth0 down") // it could not answer
	forget()
	check := func() {
		t.Helper()
		if report, err := a.Verify(t.Context(), true); err != nil || len(report.Differences) != 0 {
			t.Errorf("of a silent pod: %+v, %v, want no difference", report, err)
		}
		if diff := cmp.Diff([]string{"lxcb"}, a.podDevices()); diff != "" {
			t.Errorf("devices (-want +got):\n%s", diff)
		}
	}
	check()
	a.stop()
	forget()
	a = h.start()
	check()

	c := &testHost{t: t, ns: testutil.NewNetNS(t)}
	h.ip("link add lxcc type veth peer name eth0 address " + mac + " netns " + c.ns.Path())
	h.ip("link set lxcc master br0 up")
	c.ip("addr add " + podB + "/32 dev eth0")
	c.ip("link set eth0 up")
	c.ip("route add 10.1.1.1/32 dev eth0")
	testutil.Eventually(t, patience, func() error {
		c.sendTo(podB, "10.1.1.1:5678", []byte("here I am"))
		if diff := cmp.Diff([]string{"lxcc"}, a.podDevices()); diff != "" {
			return fmt.Errorf("devices (-want +got):\n%s", diff)
		}
		return nil
	})
}

// mac is the hardware address of eth0.
func (h *testHost) mac() (mac string) {
	h.t.Helper()
	h.ns.Do(h.t, func() {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			h.t.Fatal(err)
		}
		mac = l.Attrs().HardwareAddr.String()
	})
	return mac
}
