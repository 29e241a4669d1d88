// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
)

// overlayPair is two nodes with a pod each, in one overlay. The pods are addresses of a dummy veth of their node.
type overlayPair struct {
	t          *testing.T
	east, west *testHost
}

// podsOf are the pod network and one pod of a node, by family.
var podsOf = map[string][2]string{"east": {"10.1.1.", "fd00:10:1:1::"}, "west": {"10.2.1.", "fd00:10:2:1::"}}

func newOverlayPair(t *testing.T, underlay6 bool) *overlayPair {
	t.Helper()
	east := newTestHost(t)
	west := &testHost{t: t, ns: east.peer, peer: east.ns, filterMode: east.filterMode, heard: map[identity.ClusterID]bool{0: true}}
	west.cfg = east.cfg
	west.cfg.BPFFS = testutil.MountBPFFS(t)
	west.cfg.ClusterName, west.cfg.NodeName = "west", "west-1"
	west.cfg.NodeIPs = []netip.Addr{netip.MustParseAddr("172.18.2.1"), netip.MustParseAddr("fd00:18:2::1")}
	west.cfg.LocalPodCIDRs = nil
	west.cfg.IPs, west.cfg.Nodes = ipcache.New(), node.NewTable()
	west.cfg.Listed = func(identity.ClusterID) bool { return true }
	east.hear(0)
	for name, h := range map[string]*testHost{"east": east, "west": west} {
		h.cfg.RoutingMode, h.cfg.Underlay6, h.cfg.FlowSample = RoutingTunnel, underlay6, 1
		h.ip("link add pod0 type veth peer name pod1")
		h.ip("link set pod0 up")
		h.ip("link set pod1 up")
		h.ip("addr add " + podsOf[name][0] + "10/32 dev pod0")
		h.ip("addr add " + podsOf[name][0] + "11/32 dev pod0")
		h.ip("addr add " + podsOf[name][1] + "10/128 dev pod0 nodad")
	}
	p := &overlayPair{t: t, east: east, west: west}
	p.tell(east)
	p.tell(west)
	return p
}

// tell puts both nodes and both pods into the tables of a host, as the mesh does.
func (p *overlayPair) tell(h *testHost) {
	p.t.Helper()
	for _, of := range []struct {
		name string
		id   identity.ClusterID
		h    *testHost
		pod  identity.ID
	}{{"east", 1, p.east, 65793}, {"west", 2, p.west, 131329}} {
		n := node.Node{Name: of.name + "-1", Cluster: of.name, ClusterID: uint32(of.id),
			IPv4PodCIDR: netip.MustParsePrefix(podsOf[of.name][0] + "0/24"), IPv6PodCIDR: netip.MustParsePrefix(podsOf[of.name][1] + "/112")}
		host := of.h.cfg.NodeIPs[0]
		if h.cfg.Underlay6 {
			host = of.h.cfg.NodeIPs[1]
		}
		var ops []ipcache.Op
		for _, ip := range of.h.cfg.NodeIPs {
			n.Addresses = append(n.Addresses, node.Address{Type: node.InternalIP, IP: ip})
			id := identity.RemoteNode
			if of.h == h {
				id = identity.Host
			}
			ops = append(ops, upsert(netip.PrefixFrom(ip, ip.BitLen()).String(), id))
		}
		for prefix, id := range map[string]identity.ID{
			podsOf[of.name][0] + "10/32": of.pod, podsOf[of.name][0] + "11/32": of.pod + 1, podsOf[of.name][1] + "10/128": of.pod,
			n.IPv4PodCIDR.String(): identity.World, n.IPv6PodCIDR.String(): identity.World,
		} {
			op := upsert(prefix, id)
			op.Claim.Entry.Host = host
			ops = append(ops, op)
		}
		h.cfg.IPs.Apply(ops)
		h.cfg.Nodes.Upsert(n)
	}
}

// exchange sends UDP packets of a size and a TCP stream from one pod to another, which sends them back.
func (p *overlayPair) exchange(from, to *testHost, family, size int) error {
	src, dst := podsOf[from.cfg.ClusterName][family]+"10", podsOf[to.cfg.ClusterName][family]+"10"
	var packets net.PacketConn
	var streams net.Listener
	var err error
	to.ns.Do(p.t, func() {
		var errs [2]error
		packets, errs[0] = net.ListenPacket("udp", net.JoinHostPort(dst, "7"))
		streams, errs[1] = net.Listen("tcp", net.JoinHostPort(dst, "7"))
		err = errors.Join(errs[:]...)
	})
	if err != nil {
		p.t.Fatal(err)
	}
	defer packets.Close()
	defer streams.Close()
	go func() {
		buf := make([]byte, 1<<16)
		for {
			n, peer, err := packets.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = packets.WriteTo(buf[:n], peer)
		}
	}()
	go func() {
		for {
			conn, err := streams.Accept()
			if err != nil {
				return
			}
			_, _ = io.Copy(conn, conn)
			_ = conn.Close()
		}
	}()
	from.ns.Do(p.t, func() {
		err = errors.Join(echo("udp", src, dst, bytes.Repeat([]byte("weft"), size/4), 3), echo("tcp", src, dst, bytes.Repeat([]byte("weft"), 1<<16), 1))
	})
	return err
}

// echo sends a payload some times and wants it back each time.
func echo(network, src, dst string, payload []byte, times int) error {
	local := net.Addr(&net.UDPAddr{IP: net.ParseIP(src)})
	if network == "tcp" {
		local = &net.TCPAddr{IP: net.ParseIP(src)}
	}
	d := net.Dialer{LocalAddr: local, Timeout: 2 * time.Second}
	conn, err := d.Dial(network, net.JoinHostPort(dst, "7"))
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	for range times {
		got := make([]byte, len(payload))
		sent := make(chan error, 1)
		go func() { _, err := conn.Write(payload); sent <- err }()
		if _, err := io.ReadFull(conn, got); err != nil {
			return errors.Join(fmt.Errorf("%s from %s to %s, %d bytes: %w", network, src, dst, len(payload), err), conn.Close(), <-sent)
		}
		if err := <-sent; err != nil || !bytes.Equal(got, payload) {
			return fmt.Errorf("%s from %s to %s: other bytes came back; %w", network, src, dst, err)
		}
	}
	return nil
}

// counts sums a host's counters of the overlay by direction and verdict, and the identities of the last with each.
func (h *testHost) overlayCounts() map[string]uint64 {
	h.t.Helper()
	c, err := OpenCounters(h.cfg.BPFFS)
	if err != nil {
		h.t.Fatal(err)
	}
	defer c.Close()
	list, err := c.List()
	if err != nil {
		h.t.Fatal(err)
	}
	sums := map[string]uint64{}
	for _, n := range list {
		if n.Mode == bpf.Overlay {
			sums[fmt.Sprintf("%v %v %d %d", n.Direction, n.Verdict, n.Source, n.Destination)] += n.Packets
		}
	}
	return sums
}

// Two nodes, one overlay: small and large packets of both families inside, of each family outside; identified on both
// ends, by both identities; the same kernel objects before and after a restart; nothing left behind.
func TestOverlay(t *testing.T) {
	for name, underlay6 := range map[string]bool{"IPv4": false, "IPv6": true} {
		t.Run("over "+name, func(t *testing.T) {
			p := newOverlayPair(t, underlay6)
			east, west := p.east.start(), p.west.start()
			for _, family := range []int{0, 1} {
				testutil.Eventually(t, patience, func() error { return p.exchange(p.east, p.west, family, 56) })
				if err := p.exchange(p.west, p.east, family, 5000); err != nil {
					t.Errorf("large packets: %v", err)
				}
			}
			for h, want := range map[*testHost]string{
				p.east: "egress identified 65793 131329", p.west: "ingress identified 65793 131329",
			} {
				if counts := h.overlayCounts(); counts[want] < 12 {
					t.Errorf("%s: counters %v, want at least 12 of %q", h.cfg.ClusterName, counts, want)
				}
			}
			overhead := 50
			if underlay6 {
				overhead = 70
			}
			if s := east.Status(); s.Overlay == nil || s.Overlay.MTU != 1500-overhead || s.Overlay.Error != "" || len(s.Errors) != 0 {
				t.Errorf("status %+v, errors %v", s.Overlay, s.Errors)
			}
			if report, err := west.Verify(t.Context(), false); err != nil || len(report.Differences) != 0 {
				t.Errorf("verify: %+v, %v", report.Differences, err)
			}

			before := p.east.kernelIDs()
			index := p.east.ip("-o link show weft_vxlan")
			east.stop()
			if err := p.exchange(p.east, p.west, 0, 56); err != nil {
				t.Errorf("while the agent is down: %v", err)
			}
			p.east.start().stop()
			if after := p.east.kernelIDs(); fmt.Sprint(after) != fmt.Sprint(before) {
				t.Errorf("after a restart %v, before %v", after, before)
			}
			if after := p.east.ip("-o link show weft_vxlan"); after != index {
				t.Errorf("device after a restart %s, before %s", after, index)
			}
			p.wantNothingLeft()
		})
	}
}

// Restarts of both agents lose no packet of the overlay, and leave none unidentified.
func TestOverlayRestartUnderTraffic(t *testing.T) {
	p := newOverlayPair(t, false)
	east, west := p.east.start(), p.west.start()
	testutil.Eventually(t, patience, func() error { return p.exchange(p.west, p.east, 0, 56) })
	before := p.east.seen(t)
	probe := p.east.probeBetween("10.2.1.11", "10.1.1.10") // of another identity than what the exchange leaves behind
	for range 3 {
		probe.wait(50)
		east.stop()
		probe.wait(50)
		east = p.east.start()
		west.stop()
		west = p.west.start()
	}
	probe.check(before, 131330)
}

// Packets through the overlay, and a stream, come and are identified, all of them, while the agent of the node that they go to is
// killed at random instants and started again.
//
// invariant 1
// lesson: A1
func TestOverlaySurvivesKills(t *testing.T) {
	kills := 4
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		kills = 200
	}
	for mode, withoutTCX := range podModes() {
		t.Run(mode, func(t *testing.T) {
			p := newOverlayPair(t, false)
			p.west.start()
			start := func() *nobody { return p.east.startNobody(t, withoutTCX, overlayEnv+"=yes") }
			n := start()
			testutil.Eventually(t, patience, func() error {
				if len(p.east.routes("119")) == 0 { // which come last
					return errors.New("no routes")
				}
				return nil
			})
			testutil.Eventually(t, patience, func() error { return p.exchange(p.west, p.east, 0, 56) })
			programs := p.east.kernelIDs()
			before := p.east.seen(t)
			probe := p.east.probeBetween("10.2.1.11", "10.1.1.10")
			finish := p.east.startStream(p.west.ns, "10.2.1.10", p.east.ns, "10.1.1.10")
			for range kills {
				if err := n.cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				_ = n.cmd.Wait() // it was killed
				probe.wait(20)
				n = start()
				time.Sleep(rand.N(300 * time.Millisecond)) // whatever it is about then
			}
			probe.wait(100)
			finish()
			probe.check(before, 131330)
			if diff := cmp.Diff(programs, p.east.kernelIDs()); diff != "" {
				t.Errorf("maps, programs and links (-before +after):\n%s", diff)
			}
		})
	}
}

// Neighbours and forwarding entries that somebody puts at the overlay's device lead no packet astray, and stay.
//
// lesson: K5
func TestOverlayForeignNeighbours(t *testing.T) {
	p := newOverlayPair(t, false)
	a := p.east.start()
	p.west.start()
	testutil.Eventually(t, patience, func() error { return p.exchange(p.east, p.west, 0, 56) })
	p.east.ip("-4 neighbour replace 10.2.1.10 lladdr 02:00:00:00:00:99 nud permanent dev weft_vxlan")
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 0x99}
	var err error
	p.east.ns.Do(t, func() {
		var l netlink.Link
		if l, err = netlink.LinkByName(overlayDevice); err == nil {
			err = netlink.NeighAppend(&netlink.Neigh{LinkIndex: l.Attrs().Index, Family: unix.AF_BRIDGE, State: netlink.NUD_PERMANENT,
				Flags: netlink.NTF_SELF, IP: net.IPv4(192, 0, 2, 1), HardwareAddr: mac, VNI: 4711})
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	foreign := func() (entries []string) {
		p.east.ns.Do(t, func() {
			l, err := netlink.LinkByName(overlayDevice)
			if err != nil {
				t.Fatal(err)
			}
			for _, family := range []int{unix.AF_INET, unix.AF_BRIDGE} {
				list, err := netlink.NeighList(l.Attrs().Index, family)
				if err != nil {
					t.Fatal(err)
				}
				for _, n := range list {
					if n.HardwareAddr.String() == mac.String() {
						entries = append(entries, fmt.Sprintf("%d %v %v", family, n.IP, n.HardwareAddr))
					}
				}
			}
		})
		return entries
	}
	before := foreign()
	if len(before) != 2 {
		t.Fatalf("foreign entries %q, want two", before)
	}
	for _, family := range []int{0, 1} {
		if err := p.exchange(p.east, p.west, family, 56); err != nil {
			t.Errorf("with entries of somebody else: %v", err)
		}
	}
	if report, err := a.Verify(t.Context(), true); err != nil || len(report.Differences) != 0 {
		t.Errorf("verify: %+v, %v", report.Differences, err)
	}
	if diff := cmp.Diff(before, foreign()); diff != "" {
		t.Errorf("entries of somebody else (-before +after):\n%s", diff)
	}
}

// wantNothingLeft cleans east up.
func (p *overlayPair) wantNothingLeft() {
	p.t.Helper()
	var left []Remnant
	var err error
	p.east.ns.Do(p.t, func() { left, err = Cleanup(p.t.Context(), p.east.cfg.BPFFS, false, func(int) {}) })
	if err != nil {
		p.t.Fatal(err)
	}
	device := false
	for _, r := range left {
		device = device || r.Kind == "device" && r.Object == overlayDevice && r.Kept == ""
		if r.Kept != "" {
			p.t.Errorf("cleanup keeps %+v", r)
		}
	}
	if !device || strings.Contains(p.east.ip("link show"), overlayDevice) {
		p.t.Errorf("cleanup left the device: %+v", left)
	}
	if routes := p.east.ip("route show proto 119"); routes != "" {
		p.t.Errorf("cleanup left routes: %s", routes)
	}
}

// A packet to an address behind no node is dropped and counted, never sent anywhere.
func TestOverlayWithoutEndpoint(t *testing.T) {
	p := newOverlayPair(t, false)
	p.east.start()
	p.east.ip("route add 10.99.0.0/16 dev weft_vxlan")
	p.east.sendTo("10.1.1.10", "10.99.0.1:5678", []byte("weft"))
	const key = "egress no-endpoint 65793 9"
	testutil.Eventually(t, patience, func() error {
		if counts := p.east.overlayCounts(); counts[key] != 1 {
			return fmt.Errorf("counters %v, want one of %q", counts, key)
		}
		return nil
	})
}

// The device follows what the world does to it.
//
// lesson: K6
func TestOverlayDevice(t *testing.T) {
	p := newOverlayPair(t, false)
	h := p.east
	a := h.start()
	want := func(why string, parts ...string) {
		t.Helper()
		testutil.Eventually(t, patience, func() error {
			var out []byte
			h.ns.Do(t, func() { out, _ = exec.Command("ip", "-d", "link", "show", "weft_vxlan").CombinedOutput() })
			for _, part := range append(parts, "external", "NOARP", "UP") {
				if !strings.Contains(string(out), part) {
					return fmt.Errorf("%s: want %q in %s", why, part, out)
				}
			}
			if routes := h.ip("route show proto 119"); !strings.Contains(routes, "10.2.1.0/24 dev weft_vxlan") {
				return fmt.Errorf("%s: routes %s", why, routes)
			}
			s := a.Status()
			for _, d := range s.Devices {
				if d.Name == overlayDevice && allAttached([]DeviceStatus{d}) && len(d.Programs) == 2 && s.Overlay.Error == "" {
					return nil
				}
			}
			return fmt.Errorf("%s: devices %+v, overlay %+v", why, s.Devices, s.Overlay)
		})
	}
	want("at first", "mtu 1450", "dstport 8472")
	h.ip("link set eth0 mtu 1400")
	want("the underlay's MTU fell", "mtu 1350")
	h.ip("link del weft_vxlan")
	want("it was removed", "mtu 1350")
	h.ip("link set weft_vxlan down")
	want("it was set down")
	a.stop()

	h.cfg.TunnelPort = 8473
	a = h.start()
	want("another port", "dstport 8473")
	a.stop()

	h.cfg.RoutingMode = RoutingNone
	h.start().stop()
	if links := h.ip("link show"); strings.Contains(links, overlayDevice) {
		t.Errorf("after another mode: %s", links)
	}
}

// What stands in the way is named, and what to do.
//
// lesson: K6
func TestOverlayInTheWay(t *testing.T) {
	for name, tc := range map[string]struct{ obstacle, clear, want string }{
		"a program with the port": {"", "", "something else has UDP port 8472"},
		"a device of the name": {
			"link add weft_vxlan type vxlan id 7 dstport 4789", "link del weft_vxlan", "not weft's: remove or rename it",
		},
		"a device of the port": {
			"link add cilium_vxlan type vxlan external dstport 8472", "link del cilium_vxlan", "UDP port 8472: choose another port with --tunnel-port",
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newOverlayPair(t, false)
			h := p.east
			clearAway := func() { h.ip(tc.clear) }
			if tc.obstacle == "" {
				var socket net.PacketConn
				var err error
				h.ns.Do(t, func() { socket, err = net.ListenPacket("udp4", ":8472") })
				if err != nil {
					t.Fatal(err)
				}
				clearAway = func() { _ = socket.Close() }
			} else {
				h.ip(tc.obstacle)
			}
			a := h.startUnready()
			testutil.Eventually(t, patience, func() error {
				if s := a.Status(); s.Overlay == nil || !strings.Contains(s.Overlay.Error, tc.want) {
					return fmt.Errorf("status %+v, want %q", s.Overlay, tc.want)
				}
				return nil
			})
			clearAway()
			testutil.Eventually(t, patience, func() error {
				if s := a.Status(); s.Overlay.Error != "" || !s.Ready {
					return fmt.Errorf("after the obstacle went: %+v", s.Overlay)
				}
				return nil
			})
		})
	}
}

// A device whose underlay is gone for the time being keeps its programs and routes.
func TestOverlayWithoutUnderlay(t *testing.T) {
	p := newOverlayPair(t, false)
	h := p.east
	a := h.start()
	p.west.start()
	testutil.Eventually(t, patience, func() error { return p.exchange(p.east, p.west, 0, 56) })
	h.ip("addr del 172.18.1.1/16 dev eth0")
	testutil.Eventually(t, patience, func() error {
		s := a.Status()
		if s.Overlay == nil || !strings.Contains(s.Overlay.Error, "no device has this node's address 172.18.1.1") {
			return fmt.Errorf("overlay %+v", s.Overlay)
		}
		if i := slices.IndexFunc(s.Devices, func(d DeviceStatus) bool { return d.Name == overlayDevice }); i < 0 || !allAttached(s.Devices[i:i+1]) {
			return fmt.Errorf("devices %+v", s.Devices)
		}
		return nil
	})
	if routes := h.ip("route show proto 119"); !strings.Contains(routes, "10.2.1.0/24 dev weft_vxlan") {
		t.Errorf("routes: %s", routes)
	}
	h.ip("addr add 172.18.1.1/16 dev eth0")
	testutil.Eventually(t, patience, func() error { return p.exchange(p.east, p.west, 0, 56) })
}

// Each cluster may be reached in a mode of its own.
func TestClusterRouting(t *testing.T) {
	p := newOverlayPair(t, false)
	h := p.east
	h.cfg.RoutingMode = RoutingTunnel
	h.cfg.ClusterRouting = map[string]RoutingMode{"west": RoutingNative}
	north := node.Node{Name: "north-1", Cluster: "north", ClusterID: 3, IPv4PodCIDR: netip.MustParsePrefix("10.3.1.0/24"),
		Addresses: []node.Address{{Type: node.InternalIP, IP: netip.MustParseAddr("172.18.3.1")}, {Type: node.CiliumInternalIP, IP: netip.MustParseAddr("10.3.2.1")}}}
	h.cfg.Nodes.Upsert(north)
	h.start()
	testutil.Eventually(t, patience, func() error {
		routes := h.ip("route show proto 119")
		for _, want := range []string{"10.2.1.0/24 via 172.18.2.1 dev eth0", "10.3.1.0/24 dev weft_vxlan", "10.3.2.1 dev weft_vxlan"} {
			if !strings.Contains(routes, want) {
				return fmt.Errorf("routes %s, want %q", routes, want)
			}
		}
		return nil
	})
}
