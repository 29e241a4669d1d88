// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// host reads and writes links and routes of one network namespace, the one in which it was opened. It is for one
// goroutine.
type host struct {
	handle *netlink.Handle
}

// hostTimeout bounds a netlink exchange; without it a lost answer would be waited for for ever.
const hostTimeout = 10 * time.Second

// dumpAttempts is how often a list is asked for again that the kernel marks as interrupted by a change.
const dumpAttempts = 5

// openHost opens the network namespace of the calling thread.
func openHost() (*host, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, explain("open netlink socket", err)
	}
	if err := handle.SetSocketTimeout(hostTimeout); err != nil {
		handle.Close()
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	return &host{handle: handle}, nil
}

func (h *host) Close() { h.handle.Close() }

// device is a network device.
type device struct {
	Name  string
	Index int
	// Ethernet: its frames begin with an Ethernet header, as the programs expect.
	Ethernet bool
	Role     role
	MTU      int
	Kind     string // of the kernel: "veth", "bridge"; "" or "device" for hardware
	Master   int    // the index of the device that it is a port of; 0: none
}

// devices lists all devices except loopback.
func (h *host) devices() ([]device, error) {
	var all []device
	err := dump("list devices", func() error {
		links, err := h.handle.LinkList()
		all = all[:0]
		for _, l := range links {
			if a := l.Attrs(); a.Flags&net.FlagLoopback == 0 {
				dev := device{Name: a.Name, Index: a.Index, Ethernet: a.EncapType == "ether", MTU: a.MTU, Kind: l.Type(), Master: a.MasterIndex}
				if isOverlay(l) {
					dev.Role = roleOverlay
				}
				all = append(all, dev)
			}
		}
		return err
	})
	return all, err
}

// addresses maps each address of the host to the index of its device.
func (h *host) addresses() (map[netip.Addr]int, error) {
	all := map[netip.Addr]int{}
	err := dump("list addresses", func() error {
		addrs, err := h.handle.AddrList(nil, netlink.FAMILY_ALL)
		clear(all)
		for _, a := range addrs {
			if ip, ok := netip.AddrFromSlice(a.IP); ok {
				all[ip.Unmap()] = a.LinkIndex
			}
		}
		return err
	})
	return all, err
}

// routes lists the routes of the main table that pick selects by their prefix or that are ours, and the devices of the
// default routes.
func (h *host) routes(pick func(netip.Prefix) bool) (selected []kernelRoute, defaults map[int]bool, err error) {
	filter := &netlink.Route{Table: unix.RT_TABLE_MAIN}
	defaults = map[int]bool{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		before := len(selected)
		err := dump("list routes", func() error {
			selected = selected[:before]
			return h.handle.RouteListFilteredIter(family, filter, netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
				k, ok := fromNetlink(&r)
				if !ok {
					return true
				}
				if k.Prefix.Bits() == 0 && r.Type == unix.RTN_UNICAST {
					addDevices(defaults, &r)
				}
				if k.ours() || pick(k.Prefix) {
					selected = append(selected, k)
				}
				return true
			})
		})
		if err != nil {
			return nil, nil, err
		}
	}
	return selected, defaults, nil
}

func addDevices(indexes map[int]bool, r *netlink.Route) {
	if r.LinkIndex != 0 {
		indexes[r.LinkIndex] = true
	}
	for _, hop := range r.MultiPath {
		indexes[hop.LinkIndex] = true
	}
}

func fromNetlink(r *netlink.Route) (kernelRoute, bool) {
	if r.Dst == nil {
		return kernelRoute{}, false
	}
	addr, ok := netip.AddrFromSlice(r.Dst.IP)
	if !ok {
		return kernelRoute{}, false
	}
	bits, _ := r.Dst.Mask.Size()
	k := kernelRoute{
		route:    route{Prefix: netip.PrefixFrom(addr, bits), IfIndex: r.LinkIndex, Metric: r.Priority},
		Protocol: int(r.Protocol),
		Plain:    r.Type == unix.RTN_UNICAST && len(r.MultiPath) == 0 && r.Via == nil && r.Encap == nil && r.Tos == 0,
	}
	if gw, ok := netip.AddrFromSlice(r.Gw); ok {
		k.Gateway = gw
	}
	return k, true
}

// errNotReachable indicates that a lookup gave an answer, and the answer is no: the gateway is not on a directly
// connected network.
var errNotReachable = errors.New("not directly reachable")

// directDevice returns the device by which addr is reached without a gateway. An error that wraps errNotReachable is the
// kernel's verdict; another one says that there is no verdict.
func (h *host) directDevice(addr netip.Addr) (int, error) {
	routes, err := h.handle.RouteGet(addr.AsSlice())
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return 0, fmt.Errorf("address %v: no route: %w: add a route to the node, or see whether its address is right", addr, err)
	case err != nil:
		return 0, fmt.Errorf("look up route to address %v: %w", addr, err)
	case len(routes) == 0:
		return 0, fmt.Errorf("look up route to address %v: no answer", addr)
	}
	r := routes[0]
	switch {
	case r.Type == unix.RTN_LOCAL:
		return 0, fmt.Errorf("address %v is %w: it is an address of this node", addr, errNotReachable)
	case r.Type != unix.RTN_UNICAST:
		return 0, fmt.Errorf("address %v is %w: the route to it has type %d", addr, errNotReachable, r.Type)
	case len(r.Gw) != 0 || r.Via != nil:
		return 0, fmt.Errorf("address %v is %w: it is behind gateway %v, and native routing needs a common network",
			addr, errNotReachable, r.Gw)
	}
	return r.LinkIndex, nil
}

// set makes the route. Without replace it fails where any route with its prefix and metric exists.
func (h *host) set(c routeChange) error {
	if c.Replace {
		return h.handle.RouteReplace(toNetlink(c.route))
	}
	return h.handle.RouteAdd(toNetlink(c.route))
}

// remove deletes a route of ours; the kernel checks the protocol. An absent one is fine.
func (h *host) remove(r kernelRoute) error {
	del := toNetlink(r.route)
	if !r.Plain {
		del.Gw, del.LinkIndex, del.Type, del.Scope = nil, 0, 0, netlink.SCOPE_NOWHERE
	}
	if err := h.handle.RouteDel(del); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

func toNetlink(r route) *netlink.Route {
	return &netlink.Route{
		Dst:       &net.IPNet{IP: r.Prefix.Addr().AsSlice(), Mask: net.CIDRMask(r.Prefix.Bits(), r.Prefix.Addr().BitLen())},
		Gw:        r.Gateway.AsSlice(),
		LinkIndex: r.IfIndex,
		Priority:  r.Metric,
		Protocol:  routeProtocol,
		Table:     unix.RT_TABLE_MAIN,
		Type:      unix.RTN_UNICAST,
	}
}

// dump repeats a list that was interrupted by a change and so may lack entries.
func dump(doing string, list func() error) error {
	var err error
	for range dumpAttempts {
		if err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return nil
}

// watchBuffer is the receive buffer of the watch, in bytes. What overruns it is not lost: an overrun is a change.
const watchBuffer = 1 << 20

// watch is a netlink socket that hears of changes of links, addresses, routes, qdiscs and filters, and of neighbours that
// matter.
type watch struct {
	socket     *nl.NetlinkSocket
	neighbours *neighbourNews
}

// openWatch opens the network namespace of the calling thread. Without neighbours, it does not hear of those.
func openWatch(neighbours *neighbourNews) (*watch, error) {
	groups := []uint{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_TC}
	if neighbours != nil {
		groups = append(groups, unix.RTNLGRP_NEIGH)
	}
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, groups...)
	if err != nil {
		return nil, explain("subscribe to netlink events", err)
	}
	if err := socket.SetReceiveBufferSize(watchBuffer, true); err != nil {
		_ = socket.SetReceiveBufferSize(watchBuffer, false)
	}
	return &watch{socket: socket, neighbours: neighbours}, nil
}

// run marks changed, a channel of capacity one, at every message that matters, and at every overrun of the socket: what was
// missed is found by reading everything. It returns nil after ctx ended and Close was called, and an error when the socket
// broke.
func (w *watch) run(ctx context.Context, changed chan<- struct{}) error {
	for {
		messages, _, err := w.socket.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EINTR):
			return fmt.Errorf("netlink events: %w", err)
		}
		if err != nil || slices.ContainsFunc(messages, w.matters) {
			mark(changed)
		}
	}
}

// matters reports whether there may be something to do. That a neighbour is forgotten says nothing of where it is.
func (w *watch) matters(m syscall.NetlinkMessage) bool {
	switch m.Header.Type {
	case unix.RTM_NEWNEIGH:
		return w.neighbours.hear(m.Data)
	case unix.RTM_DELNEIGH:
		return false
	}
	return true
}

func (w *watch) Close() { w.socket.Close() }

// mark notes on a channel of capacity one that there is something to do.
func mark(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
