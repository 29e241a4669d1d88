// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
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
	h, err := openHost()
	if err != nil {
		e.warn("devices", oneLine(err), "")
		return
	}
	defer h.Close()
	links, err := h.handle.LinkList()
	if err != nil {
		e.warn("devices", oneLine(err), "")
		return
	}
	chosen := e.choose(h, links)
	for _, l := range chosen {
		e.device(h, l)
	}
	e.overlay(links, chosen)
}

// choose finds the devices that are to have programs.
func (e *examiner) choose(h *host, links []netlink.Link) []netlink.Link {
	_, defaults, err := h.routes(func(netip.Prefix) bool { return false })
	if err != nil {
		e.warn("devices", oneLine(err), "")
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
func (e *examiner) device(h *host, l netlink.Link) {
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
		e.warn(name, fmt.Sprintf("an XDP program (id %d) sees packets before weft and may take them away", a.Xdp.ProgId), "")
	}
	const conf = "net/ipv4/conf"
	if e.sysctl(conf, "all", "rp_filter") == "1" || e.sysctl(conf, a.Name, "rp_filter") == "1" {
		e.warn(name, "rp_filter is strict: packets of pods that come another way than they go are dropped",
			"sysctl net.ipv4.conf.all.rp_filter=2, and the same for the device")
	}
	e.neighbours(h, a.Name, a.Index)
}

// neighbours looks at programs of others on a device of ours.
func (e *examiner) neighbours(h *host, device string, index int) {
	name := "device " + device
	for _, p := range bpf.Programs {
		result, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: p.Attach})
		if err == nil {
			e.others(name, p, result.Programs)
		}
		list, err := h.filters(index, parentOf(p.Attach))
		if err != nil {
			continue // without the privilege
		}
		for _, f := range list {
			b, isBPF := f.(*netlink.BpfFilter)
			switch {
			case isBPF && b.Name == p.Name && b.Priority == filterPriority:
			case f.Attrs().Priority == filterPriority:
				e.fail(name, fmt.Sprintf("a filter of somebody else (%s) has priority %d, which is weft's", f.Type(), filterPriority),
					"remove it: tc filter del dev "+device+" prio 119")
			default:
				e.warn(name, fmt.Sprintf("a filter of somebody else (%s, priority %d) is on the hook of %s", f.Type(), f.Attrs().Priority, p.Name),
					"nothing, unless it takes packets away before weft sees them")
			}
		}
	}
}

// others tells of programs at a tcx hook that are not weft's, as far as their names can be read.
func (e *examiner) others(name string, p bpf.Program, attached []link.AttachedProgram) {
	for i, a := range attached {
		title := programName(a.ID)
		const shown = 15 // characters of a name in the kernel, where it is not known from types
		if title == p.Name || title == p.Name[:min(len(p.Name), shown)] {
			continue
		}
		if len(attached) > 1 || title != "" {
			e.warn(name, fmt.Sprintf("a program of somebody else (%d %s) is at place %d of the hook of %s", a.ID, title, i+1, p.Name),
				"nothing, unless it ends the way of packets before weft sees them")
		}
	}
}

// programName is a program's name in the kernel; "" if this process may not ask.
func programName(id ebpf.ProgramID) string {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return ""
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return ""
	}
	return info.Name
}

// overlay looks at the device of the overlay and its port.
func (e *examiner) overlay(links, underlay []netlink.Link) {
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
		case vxlan.Name == overlayDevice:
			e.overlayMTU(vxlan.MTU, path)
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
		e.warn("tunnel port", oneLine(err), "")
	}
}
