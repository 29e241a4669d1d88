// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// Explanation is what the kernel does with one address, whether an agent runs or not.
type Explanation struct {
	// Entry is what the programs find in the map, if Found.
	Entry    MapEntry
	Found    bool
	EntryErr error // why the map cannot be read
	Route    Route
	RouteErr error // why there is no way to the address, or why that cannot be told
}

// Route is the way of a packet, as the kernel chooses it.
type Route struct {
	Type     string // unicast, local, broadcast, multicast, blackhole, unreachable, prohibit
	Device   string
	Gateway  netip.Addr // the zero Addr if there is none
	Source   netip.Addr // the address that the packet would come from
	Table    int
	Protocol string // who made the route: "weft", "kernel", "static"…
}

// Explain asks the kernel about an address: the map pinned below bpffs, and, with RTM_GETROUTE, the routes of the network
// namespace of the calling thread.
func Explain(bpffs string, addr netip.Addr) Explanation {
	var e Explanation
	if m, err := OpenIPCache(bpffs); err != nil {
		e.EntryErr = err
	} else {
		e.Entry, e.Found, e.EntryErr = m.Lookup(addr)
		_ = m.Close()
	}
	e.Route, e.RouteErr = routeTo(addr)
	return e
}

// Wanted is what the map of this node should say of a prefix with this entry.
func (d *Datapath) Wanted(prefix netip.Prefix, entry ipcache.Entry) MapEntry {
	u := underlay{NodeIPs: d.cfg.NodeIPs, V6: d.cfg.Underlay6}
	_, value := u.encode(prefix, entry)
	return MapEntry{
		Prefix: prefix, Identity: identity.ID(value.Identity), TunnelEndpoint: value.Tunnel(), EncryptKey: value.EncryptKey,
		Flags: value.Flags,
	}
}

// Says reports whether two entries tell the programs the same, whatever their prefixes are.
func (e MapEntry) Says(o MapEntry) bool {
	e.Prefix, o.Prefix = netip.Prefix{}, netip.Prefix{}
	return e == o
}

// String is the entry as Cilium's users know it.
func (e MapEntry) String() string {
	return bpf.MakeIPCacheValue(uint32(e.Identity), e.TunnelEndpoint, e.EncryptKey, e.Flags).String()
}

func routeTo(addr netip.Addr) (Route, error) {
	h, err := openHost()
	if err != nil {
		return Route{}, err
	}
	defer h.Close()
	routes, err := h.handle.RouteGet(addr.AsSlice())
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return Route{}, fmt.Errorf("no route to %v: %w", addr, err)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EACCES): // a blackhole, a prohibit route
		return Route{}, fmt.Errorf("the routes refuse packets to %v: %w", addr, err)
	case err != nil:
		return Route{}, fmt.Errorf("look up route to %v: %w", addr, err)
	case len(routes) == 0:
		return Route{}, fmt.Errorf("look up route to %v: no answer", addr)
	}
	r := routes[0]
	route := Route{Type: routeType(r.Type), Table: r.Table, Protocol: protocolName(r.Protocol), Device: fmt.Sprintf("index %d", r.LinkIndex)}
	if link, err := h.handle.LinkByIndex(r.LinkIndex); err == nil {
		route.Device = link.Attrs().Name
	}
	// The kernel's answer does not name who made the route, unless it is asked for the entry of its table.
	if full, ok := h.tableEntry(addr); ok {
		route.Protocol, route.Table = protocolName(full.Protocol), full.Table
	}
	gateway := r.Gw
	if via, ok := r.Via.(*netlink.Via); ok && len(gateway) == 0 {
		gateway = via.Addr
	}
	if gw, ok := netip.AddrFromSlice(gateway); ok {
		route.Gateway = gw.Unmap()
	}
	if src, ok := netip.AddrFromSlice(r.Src); ok {
		route.Source = src.Unmap()
	}
	return route, nil
}

// tableEntry asks for the entry of the routing table that the route to addr comes from.
func (h *host) tableEntry(addr netip.Addr) (netlink.Route, bool) {
	routes, err := h.handle.RouteGetWithOptions(addr.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	if err != nil || len(routes) == 0 {
		return netlink.Route{}, false
	}
	return routes[0], true
}

func protocolName(p netlink.RouteProtocol) string {
	if p == routeProtocol {
		return "weft"
	}
	return p.String()
}

// routeOwner names who made a route of the kernel's table.
func routeOwner(protocol int) string { return protocolName(netlink.RouteProtocol(protocol)) }

func routeType(t int) string {
	names := map[int]string{
		unix.RTN_UNICAST: "unicast", unix.RTN_LOCAL: "local", unix.RTN_BROADCAST: "broadcast", unix.RTN_ANYCAST: "anycast",
		unix.RTN_MULTICAST: "multicast", unix.RTN_BLACKHOLE: "blackhole", unix.RTN_UNREACHABLE: "unreachable", unix.RTN_PROHIBIT: "prohibit",
	}
	if name, ok := names[t]; ok {
		return name
	}
	return fmt.Sprintf("type %d", t)
}
