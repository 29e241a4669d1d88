// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const bridgeName = "weft-br"

// podGateway6 is the address of every pod's first hop: link-local, on the node's end of the pod's veth.
var podGateway6 = netip.MustParsePrefix("fe80::1/64")

var (
	// routerSysctls turn a namespace into a router whose addresses are usable at once and stay when a link goes down: no
	// duplicate address detection, no reverse path filter in the way of asymmetric routes.
	routerSysctls = []string{
		"net.ipv4.ip_forward=1",
		"net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0",
		"net.ipv4.conf.all.send_redirects=0", "net.ipv4.conf.default.send_redirects=0",
		"net.ipv6.conf.default.disable_ipv6=0",
		"net.ipv6.conf.all.forwarding=1", "net.ipv6.conf.default.forwarding=1",
		"net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0",
		"net.ipv6.conf.all.keep_addr_on_down=1", "net.ipv6.conf.default.keep_addr_on_down=1",
		"net.ipv6.conf.default.accept_ra=0",
	}
	hostSysctls = []string{
		"net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0",
		"net.ipv6.conf.default.disable_ipv6=0",
		"net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0",
		"net.ipv6.conf.all.keep_addr_on_down=1", "net.ipv6.conf.default.keep_addr_on_down=1",
		"net.ipv6.conf.default.accept_ra=0",
	}
	// switchSysctls keep the bridge's namespace from taking part in what it forwards.
	switchSysctls = []string{"net.ipv6.conf.default.disable_ipv6=1"}
)

// netNamespace is a network namespace with a netlink socket inside it.
type netNamespace struct {
	name string
	fd   netns.NsHandle
	nl   *netlink.Handle
}

// openNetNS opens the named network namespace. The caller closes it.
func openNetNS(name string) (*netNamespace, error) {
	fd, err := netns.GetFromName(name)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", name, err)
	}
	nl, err := netlink.NewHandleAt(fd, unix.NETLINK_ROUTE)
	if err != nil {
		fd.Close()
		return nil, fmt.Errorf("open netlink in network namespace %s: %w", name, err)
	}
	return &netNamespace{name: name, fd: fd, nl: nl}, nil
}

func (ns *netNamespace) close() {
	ns.nl.Close()
	ns.fd.Close()
}

// newNetNS creates a network namespace with those sysctls and its loopback device up. The caller closes it.
func newNetNS(name string, sysctls []string) (*netNamespace, error) {
	if err := createNetNS(name); err != nil {
		return nil, err
	}
	if err := writeSysctls(name, sysctls); err != nil {
		return nil, err
	}
	ns, err := openNetNS(name)
	if err != nil {
		return nil, err
	}
	if err := ns.up("lo"); err != nil {
		ns.close()
		return nil, err
	}
	return ns, nil
}

func (ns *netNamespace) link(device string) (netlink.Link, error) {
	link, err := ns.nl.LinkByName(device)
	if err != nil {
		return nil, fmt.Errorf("device %s in %s: %w", device, ns.name, err)
	}
	return link, nil
}

func (ns *netNamespace) up(device string) error {
	link, err := ns.link(device)
	if err != nil {
		return err
	}
	if err := ns.nl.LinkSetUp(link); err != nil {
		return fmt.Errorf("set device %s in %s up: %w", device, ns.name, err)
	}
	return nil
}

// address adds addresses to a device, usable at once.
func (ns *netNamespace) address(device string, prefixes ...netip.Prefix) error {
	link, err := ns.link(device)
	if err != nil {
		return err
	}
	for _, p := range prefixes {
		addr := &netlink.Addr{IPNet: ipNet(p)}
		if p.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := ns.nl.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("add address %s to %s in %s: %w", p, device, ns.name, err)
		}
	}
	return nil
}

// hop is a route of the lab itself; weft's own have another protocol.
type hop struct {
	to     netip.Prefix
	device string
	via    netip.Addr // zero: on the link
	source netip.Addr // zero: the kernel's choice
}

func (ns *netNamespace) route(hops ...hop) error {
	for _, h := range hops {
		link, err := ns.link(h.device)
		if err != nil {
			return err
		}
		r := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(h.to), Protocol: unix.RTPROT_STATIC}
		if h.via.IsValid() {
			r.Gw = h.via.AsSlice()
		} else {
			r.Scope = netlink.SCOPE_LINK
		}
		if h.source.IsValid() {
			r.Src = h.source.AsSlice()
		}
		if err := ns.nl.RouteAdd(r); err != nil {
			return fmt.Errorf("add route to %s by %s in %s: %w", h.to, h.device, ns.name, err)
		}
	}
	return nil
}

// veth makes a pair of devices, one here and one in peer, both up.
func (ns *netNamespace) veth(device string, peer *netNamespace, peerDevice string) error {
	veth := netlink.NewVeth(netlink.LinkAttrs{Name: device})
	veth.PeerName, veth.PeerNamespace = peerDevice, netlink.NsFd(peer.fd)
	if err := ns.nl.LinkAdd(veth); err != nil {
		return fmt.Errorf("create veth %s in %s to %s in %s: %w", device, ns.name, peerDevice, peer.name, err)
	}
	if err := ns.up(device); err != nil {
		return err
	}
	return peer.up(peerDevice)
}

// deleteLink removes a device; an absent one is fine.
func (ns *netNamespace) deleteLink(device string) error {
	link, err := ns.nl.LinkByName(device)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("device %s in %s: %w", device, ns.name, err)
	}
	if err := ns.nl.LinkDel(link); err != nil {
		return fmt.Errorf("delete device %s in %s: %w", device, ns.name, err)
	}
	return nil
}

// buildSwitch makes the namespace of the bridge, whose alias tells whose lab it is. The caller closes it.
func buildSwitch(name, owner string) (_ *netNamespace, err error) {
	ns, err := newNetNS(name, switchSysctls)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			ns.close()
		}
	}()
	noSnooping := false // without a querier, snooping only delays neighbour discovery
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridgeName}, MulticastSnooping: &noSnooping}
	if err := ns.nl.LinkAdd(bridge); err != nil {
		return nil, fmt.Errorf("create bridge %s in %s: %w", bridgeName, name, err)
	}
	if err := ns.nl.LinkSetAlias(bridge, owner); err != nil {
		return nil, fmt.Errorf("set the alias of bridge %s in %s: %w", bridgeName, name, err)
	}
	return ns, ns.up(bridgeName)
}

// switchOwner returns the state directory of the lab that made the bridge in a namespace of that name; "" if there is none.
func switchOwner(name string) (string, error) {
	if !netNSAlive(name) {
		return "", nil
	}
	ns, err := openNetNS(name)
	if err != nil {
		return "", err
	}
	defer ns.close()
	link, err := ns.nl.LinkByName(bridgeName)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("device %s in %s: %w", bridgeName, name, err)
	}
	return link.Attrs().Alias, nil
}

// plug connects ns by its device eth0 to a port of the bridge.
func plug(bridge, ns *netNamespace, port string) error {
	if err := bridge.veth(port, ns, "eth0"); err != nil {
		return err
	}
	master, err := bridge.link(bridgeName)
	if err != nil {
		return err
	}
	link, err := bridge.link(port)
	if err != nil {
		return err
	}
	if err := bridge.nl.LinkSetMaster(link, master); err != nil {
		return fmt.Errorf("add port %s to bridge %s: %w", port, bridgeName, err)
	}
	return nil
}

// buildEtcdNetwork makes the namespace of a cluster's etcd.
func buildEtcdNetwork(bridge *netNamespace, e etcdPlan) error {
	ns, err := newNetNS(e.NetNS, hostSysctls)
	if err != nil {
		return err
	}
	defer ns.close()
	if err := plug(bridge, ns, e.Port); err != nil {
		return err
	}
	return ns.address("eth0", e.Address)
}

// buildNodeNetwork makes the namespace of a node, without its pods.
func buildNodeNetwork(bridge *netNamespace, n nodePlan) error {
	ns, err := newNetNS(n.NetNS, routerSysctls)
	if err != nil {
		return err
	}
	defer ns.close()
	if err := plug(bridge, ns, n.Name); err != nil {
		return err
	}
	if err := ns.address("eth0", n.IPv4, n.IPv6); err != nil {
		return err
	}
	return ns.address("lo", host(n.Gateway4), host(n.Gateway6))
}

// buildPodNetwork makes the namespace of a pod and its veth to the node.
func buildPodNetwork(n nodePlan, p podPlan) error {
	node, err := openNetNS(n.NetNS)
	if err != nil {
		return err
	}
	defer node.close()
	pod, err := newNetNS(p.NetNS, hostSysctls)
	if err != nil {
		return err
	}
	defer pod.close()
	if err := node.veth(p.Device, pod, "eth0"); err != nil {
		return err
	}
	if err := node.address(p.Device, podGateway6); err != nil {
		return err
	}
	if err := pod.address("eth0", host(p.IPv4), host(p.IPv6)); err != nil {
		return err
	}
	if err := pod.route(
		hop{to: host(n.Gateway4), device: "eth0"},
		hop{to: netip.MustParsePrefix("0.0.0.0/0"), device: "eth0", via: n.Gateway4},
		hop{to: netip.MustParsePrefix("::/0"), device: "eth0", via: podGateway6.Addr()},
	); err != nil {
		return err
	}
	return node.route(
		hop{to: host(p.IPv4), device: p.Device, source: n.Gateway4},
		hop{to: host(p.IPv6), device: p.Device, source: n.Gateway6},
	)
}

// removePodNetwork undoes buildPodNetwork; what is absent is fine.
func removePodNetwork(n nodePlan, p podPlan) error {
	node, err := openNetNS(n.NetNS)
	if err != nil {
		return err
	}
	defer node.close()
	if err := node.deleteLink(p.Device); err != nil {
		return err
	}
	return deleteNetNS(p.NetNS)
}

// weftRoutes returns the destinations of the routes that weft installed in a network namespace.
func weftRoutes(netNS string) ([]netip.Prefix, error) {
	ns, err := openNetNS(netNS)
	if err != nil {
		return nil, err
	}
	defer ns.close()
	ours := &netlink.Route{Protocol: routeProtocol}
	routes, err := ns.nl.RouteListFiltered(netlink.FAMILY_ALL, ours, netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		return nil, fmt.Errorf("list routes in %s: %w", netNS, err)
	}
	var found []netip.Prefix
	for _, r := range routes {
		if r.Dst == nil {
			continue
		}
		addr, _ := netip.AddrFromSlice(r.Dst.IP)
		ones, _ := r.Dst.Mask.Size()
		found = append(found, netip.PrefixFrom(addr.Unmap(), ones))
	}
	return found, nil
}

// host returns the prefix of one address.
func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
