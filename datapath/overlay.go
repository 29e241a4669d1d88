// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// overlayDevice is the name of the device of the overlay.
	overlayDevice = "weft_vxlan"
	// DefaultTunnelPort is the UDP port of the overlay, as Cilium has it.
	DefaultTunnelPort = 8472
	// genModeNone: the kernel gives the device no link-local address, and so nothing to say by itself.
	genModeNone = 1
)

// isOverlay reports whether a device is the overlay's: it has the name, and takes its tunnels from programs.
func isOverlay(l netlink.Link) bool {
	vxlan, ok := l.(*netlink.Vxlan)
	return ok && vxlan.FlowBased && l.Attrs().Name == overlayDevice
}

// overlay returns the device of the overlay's name, whatever it is; nil if there is none.
func (h *host) overlay() (netlink.Link, error) {
	l, err := h.handle.LinkByName(overlayDevice)
	var missing netlink.LinkNotFoundError
	switch {
	case errors.As(err, &missing):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look for device %s: %w", overlayDevice, err)
	}
	return l, nil
}

// overlayPlan is how the overlay's device is to be.
type overlayPlan struct {
	Port uint16
	MTU  int
}

// checkOverlay makes the overlay's device what it should be, and removes one that nothing needs any more.
func (k *keeper) checkOverlay() error {
	cfg := &k.datapath.cfg
	if !cfg.uses(RoutingTunnel) {
		return k.removeOverlay()
	}
	index, mtu, err := k.makeOverlay()
	k.overlay = index
	k.datapath.note(func(s *Status) {
		s.Overlay = &OverlayStatus{Device: overlayDevice, Port: cfg.TunnelPort, MTU: mtu, Error: errorText(err)}
	})
	if err != nil {
		return fmt.Errorf("overlay device %s: %w", overlayDevice, err)
	}
	return nil
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// removeOverlay removes what an earlier life in another mode left. That its programs are pinned here proves whose it is.
func (k *keeper) removeOverlay() error {
	if k.swept {
		return nil
	}
	l, err := k.host.overlay()
	if err != nil || l == nil || !isOverlay(l) {
		return err
	}
	if err := k.host.handle.LinkDel(l); err != nil {
		return fmt.Errorf("remove device %s: %w", overlayDevice, err)
	}
	return nil
}

// makeOverlay returns the index and the MTU of the device. One that is there goes on with its programs whatever the error.
func (k *keeper) makeOverlay() (index, mtu int, err error) {
	l, err := k.host.overlay()
	if err != nil {
		return k.overlay, 0, err
	}
	if l != nil && isOverlay(l) {
		index = l.Attrs().Index
	}
	plan, err := k.planOverlay()
	if err != nil {
		return index, 0, err
	}
	if l != nil && index == 0 {
		return 0, 0, fmt.Errorf("there is a device of type %s with this name that is not weft's: remove or rename it", l.Type())
	}
	if vxlan, ok := l.(*netlink.Vxlan); ok && vxlan.Port != int(plan.Port) {
		if err := k.host.handle.LinkDel(l); err != nil {
			return index, 0, fmt.Errorf("remove the one of port %d: %w", vxlan.Port, err)
		}
		l = nil
	}
	if l == nil {
		if k.overlay != 0 {
			k.drifted(KindDevice, 1)
		}
		if l, err = k.host.addOverlay(plan); err != nil {
			return 0, 0, err
		}
	}
	return l.Attrs().Index, plan.MTU, k.host.setOverlay(l, plan)
}

// planOverlay finds the MTU that the underlay leaves: that of the device with this node's address.
func (k *keeper) planOverlay() (overlayPlan, error) {
	cfg := &k.datapath.cfg
	plan := overlayPlan{Port: cfg.TunnelPort}
	addresses, err := k.host.addresses()
	if err != nil {
		return plan, err
	}
	existing, err := k.host.devices()
	if err != nil {
		return plan, err
	}
	family, overhead := "IPv4", overhead4
	if cfg.Underlay6 {
		family, overhead = "IPv6", overhead6
	}
	for _, ip := range cfg.NodeIPs {
		if ip.Is6() != cfg.Underlay6 {
			continue
		}
		i := slices.IndexFunc(existing, func(d device) bool { return d.Index == addresses[ip] })
		if i < 0 {
			return plan, fmt.Errorf("no device has this node's address %v: is --node-ip right?", ip)
		}
		plan.MTU = existing[i].MTU - overhead
		return plan, nil
	}
	return plan, fmt.Errorf("this node has no %s address for the outer headers: give one with --node-ip", family)
}

// addOverlay makes the device. Before it is up it opens no port.
func (h *host) addOverlay(plan overlayPlan) (netlink.Link, error) {
	err := h.handle.LinkAdd(&netlink.Vxlan{
		LinkAttrs: netlink.LinkAttrs{Name: overlayDevice, MTU: plan.MTU},
		FlowBased: true, Port: int(plan.Port), Learning: false,
	})
	switch {
	case errors.Is(err, unix.EEXIST):
		return nil, fmt.Errorf("another VXLAN device takes all that comes to UDP port %d: choose another port with --tunnel-port on "+
			"all nodes, or remove that device: %w", plan.Port, err)
	case err != nil:
		return nil, explain("make the device", err)
	}
	l, err := h.overlay()
	if err == nil && l == nil {
		err = errors.New("it is gone again")
	}
	return l, err
}

// setOverlay sets what differs: no neighbours are asked for, since every packet's way is in its metadata.
func (h *host) setOverlay(l netlink.Link, plan overlayPlan) error {
	attrs := l.Attrs()
	if attrs.MTU != plan.MTU {
		if err := h.handle.LinkSetMTU(l, plan.MTU); err != nil {
			return fmt.Errorf("set MTU %d: %w", plan.MTU, err)
		}
	}
	if attrs.RawFlags&unix.IFF_NOARP == 0 {
		if err := h.handle.LinkSetARPOff(l); err != nil {
			return fmt.Errorf("turn ARP off: %w", err)
		}
	}
	if attrs.Flags&net.FlagUp != 0 {
		return nil
	}
	if err := h.handle.LinkSetIP6AddrGenMode(l, genModeNone); err != nil && !errors.Is(err, unix.EAFNOSUPPORT) {
		return fmt.Errorf("turn link-local addresses off: %w", err)
	}
	err := h.handle.LinkSetUp(l)
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return fmt.Errorf("something else has UDP port %d: choose another with --tunnel-port on all nodes, or end it: %w", plan.Port, err)
	case err != nil:
		return fmt.Errorf("set up: %w", err)
	}
	return nil
}

// withOverlay adds the overlay's device, where it is in use, to those that are to have programs.
func (k *keeper) withOverlay(wanted, existing []device) []device {
	for _, dev := range existing {
		if k.overlay != 0 && dev.Role == roleOverlay && !slices.Contains(wanted, dev) {
			wanted = append(wanted, dev)
		}
	}
	return wanted
}

// overlayIndex is where routes into the overlay lead.
func (k *keeper) overlayIndex() (int, error) {
	if k.overlay == 0 {
		return 0, fmt.Errorf("there is no device %s", overlayDevice)
	}
	return k.overlay, nil
}

// compareOverlay notes what checkOverlay would change.
func (k *keeper) compareOverlay(report *Report) {
	if !k.datapath.cfg.uses(RoutingTunnel) {
		return
	}
	report.Compared++
	d := Difference{Kind: KindDevice, Object: overlayDevice}
	plan, err := k.planOverlay()
	if err != nil {
		d.Want, d.Have = "an underlay", err.Error()
		report.add(d)
		return
	}
	d.Want = fmt.Sprintf("port %d mtu %d up", plan.Port, plan.MTU)
	l, err := k.host.overlay()
	switch {
	case err != nil:
		d.Have = err.Error()
	case l == nil:
		d.Have = "absent"
	case !isOverlay(l):
		d.Have = fmt.Sprintf("a device of type %s of another owner", l.Type())
	default:
		a := l.Attrs()
		state := "down"
		if a.Flags&net.FlagUp != 0 {
			state = "up"
		}
		d.Have = fmt.Sprintf("port %d mtu %d %s", l.(*netlink.Vxlan).Port, a.MTU, state)
	}
	if d.Have != d.Want {
		report.add(d)
	}
}
