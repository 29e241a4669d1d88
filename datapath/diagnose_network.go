// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// Bytes that the overlay adds to a packet: outer IP and UDP headers, VXLAN, and the inner Ethernet header.
const (
	overhead4 = 20 + 8 + 8 + 14
	overhead6 = 40 + 8 + 8 + 14
)

// network looks at the devices of the network namespace of the calling thread.
func (e *examiner) network() {
	const advice = "try again; if it stays, look for what forbids netlink to this process"
	h, err := openHost()
	if err != nil {
		e.warn("devices", oneLine(err), advice)
		return
	}
	defer h.Close()
	links, err := h.handle.LinkList()
	if err != nil {
		e.warn("devices", oneLine(err), advice)
		return
	}
	on := e.openHooks(h)
	chosen := e.choose(h, links)
	for _, l := range chosen {
		e.device(l)
		e.advertised(h, l)
		e.attached(on, l, bpf.Programs[:])
	}
	e.overlay(on, links, chosen)
	e.pods(on, links)
}

// choose finds the devices that are to have programs.
func (e *examiner) choose(h *host, links []netlink.Link) []netlink.Link {
	_, defaults, err := h.routes(func(netip.Prefix) bool { return false })
	if err != nil {
		e.warn("devices", oneLine(err), "name those that reach other nodes with --devices")
	}
	var chosen []netlink.Link
	for _, l := range links {
		a := l.Attrs()
		if slices.Contains(e.Devices, a.Name) || len(e.Devices) == 0 && defaults[a.Index] {
			chosen = append(chosen, l)
		}
	}
	for _, name := range e.Devices {
		if !slices.ContainsFunc(chosen, func(l netlink.Link) bool { return l.Attrs().Name == name }) {
			e.warn("device "+name, "does not exist", "it gets its programs when it appears")
		}
	}
	if len(chosen) == 0 && len(e.Devices) == 0 {
		e.warn("devices", "no device has a default route", "name those that reach other nodes with --devices")
	}
	return chosen
}

// device looks at one that is to have programs.
func (e *examiner) device(l netlink.Link) {
	a := l.Attrs()
	name := "device " + a.Name
	switch {
	case a.EncapType != "ether":
		e.fail(name, "its frames have no Ethernet header ("+a.EncapType+")", "leave it out with --devices")
	case a.Flags&net.FlagUp == 0:
		e.warn(name, "it is down", "ip link set "+a.Name+" up")
	default:
		e.fine(name, "index %d, mtu %d", a.Index, a.MTU)
	}
	if a.Xdp != nil && a.Xdp.Attached {
		e.warn(name, fmt.Sprintf("an XDP program (id %d) sees packets before weft", a.Xdp.ProgId),
			"nothing, unless it takes them away: bpftool net show dev "+a.Name)
	}
	e.reversePath(name, a.Name)
}

// reversePath looks at whether the kernel drops packets that come another way than they would go. Of the two settings, the
// greater one counts.
func (e *examiner) reversePath(name, device string) {
	const conf, strict = "net/ipv4/conf", "1"
	if max(e.sysctl(conf, "all", "rp_filter"), e.sysctl(conf, device, "rp_filter")) == strict {
		e.warn(name, "rp_filter is strict: packets of pods that come another way than they go are dropped",
			"sysctl net.ipv4.conf.all.rp_filter=2")
	}
}

// advertised looks at whether a default route that a router advertised is kept: a device that forwards does not listen to
// routers unless it is told to.
func (e *examiner) advertised(h *host, l netlink.Link) {
	device := l.Attrs().Name
	const conf = "net/ipv6/conf"
	if e.sysctl(conf, device, "forwarding") != "1" || e.sysctl(conf, device, "accept_ra") != "1" {
		return
	}
	routes, err := h.handle.RouteList(l, netlink.FAMILY_V6)
	if err != nil {
		e.warn("device "+device, "its IPv6 routes cannot be read: "+oneLine(err), "try again")
		return
	}
	for _, r := range routes {
		if k, ok := fromNetlink(&r); ok && k.Prefix.Bits() == 0 && k.Protocol == unix.RTPROT_RA {
			e.warn("device "+device, "its IPv6 default route is of a router to which it does not listen any more, since it forwards: it will expire",
				"sysctl net.ipv6.conf."+device+".accept_ra=2")
			return
		}
	}
}

// overlay looks at the device of the overlay and its port.
func (e *examiner) overlay(on *hooks, links, underlay []netlink.Link) {
	path := 0
	for _, l := range underlay {
		if mtu := l.Attrs().MTU; path == 0 || mtu < path {
			path = mtu
		}
	}
	for _, l := range links {
		vxlan, ok := l.(*netlink.Vxlan)
		switch {
		case !ok:
		case isOverlay(l):
			e.overlayMTU(vxlan.MTU, path)
			e.reversePath("device "+overlayDevice, overlayDevice)
			e.attached(on, l, bpf.OverlayPrograms[:])
			return
		case vxlan.Name == overlayDevice:
			e.fail("device "+overlayDevice, "it is of somebody else: it does not take its tunnels from programs",
				"ip link del "+overlayDevice+", and weft makes its own, or do without --routing-mode tunnel")
			return
		case vxlan.Port == int(e.TunnelPort):
			e.warn("tunnel port", fmt.Sprintf("device %s of somebody else uses UDP port %d", vxlan.Name, e.TunnelPort),
				"give the overlay another port, on all nodes the same")
			return
		}
	}
	if path > 0 {
		e.fine("overlay mtu", "%d over IPv4 and %d over IPv6 would fit into %d", path-overhead4, path-overhead6, path)
	}
	e.port()
}

func (e *examiner) overlayMTU(inner, path int) {
	switch {
	case path == 0 || inner+overhead6 <= path:
		e.fine("overlay mtu", "%d fits into %d", inner, path)
	case inner+overhead4 <= path:
		e.fine("overlay mtu", "%d fits into %d over IPv4, not over IPv6", inner, path)
	default:
		e.fail("overlay mtu", fmt.Sprintf("packets of %d do not fit into the %d of the way below, with %d bytes of headers", inner, path, overhead4),
			fmt.Sprintf("ip link set %s mtu %d", overlayDevice, path-overhead4))
	}
}

// port tries whether somebody has the port of the overlay.
func (e *examiner) port() {
	conn, err := net.ListenUDP("udp", &net.UDPAddr{Port: int(e.TunnelPort)})
	switch {
	case err == nil:
		_ = conn.Close()
		e.fine("tunnel port", "UDP %d is free", e.TunnelPort)
	case errors.Is(err, unix.EADDRINUSE):
		e.warn("tunnel port", fmt.Sprintf("somebody has UDP port %d", e.TunnelPort), "find out who: ss -lunp; or give the overlay another port, on all nodes the same")
	default:
		e.warn("tunnel port", oneLine(err), "give the overlay another port with --tunnel-port, on all nodes the same")
	}
}
