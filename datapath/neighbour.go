// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// behindBridge is a hardware address behind a bridge.
type behindBridge struct {
	bridge   int
	hardware string
}

// neighbourhood is what is known of neighbours that are looked for.
type neighbourhood struct {
	hardware map[netip.Addr]string // of addresses behind bridges; "": nobody has answered yet
	ports    map[behindBridge]int  // of those hardware addresses; 0: the bridge does not know
}

func newNeighbourhood() neighbourhood {
	return neighbourhood{hardware: map[netip.Addr]string{}, ports: map[behindBridge]int{}}
}

// learnt: a bridge has learnt by itself where an address is. The permanent ones are its ports' own.
func learnt(n *netlink.Neigh) bool {
	return n.Family == unix.AF_BRIDGE && n.MasterIndex != 0 && n.State&unix.NUD_PERMANENT == 0
}

// contradictedBy reports whether a neighbour is looked for, and is another one than known.
func (h *neighbourhood) contradictedBy(n *netlink.Neigh) bool {
	if n.Family == unix.AF_BRIDGE {
		port, wanted := h.ports[behindBridge{n.MasterIndex, n.HardwareAddr.String()}]
		return wanted && learnt(n) && port != n.LinkIndex
	}
	addr, ok := netip.AddrFromSlice(n.IP)
	hardware, wanted := h.hardware[addr]
	return ok && wanted && len(n.HardwareAddr) > 0 && hardware != n.HardwareAddr.String()
}

// neighbourNews picks from what the kernel tells of neighbours, which on some nodes is much, what matters. It is safe for
// concurrent use. A nil one picks nothing.
type neighbourNews struct {
	mu      sync.Mutex
	known   neighbourhood
	reading bool // the neighbourhood is read anew, and what is heard meanwhile is kept
	heard   []*netlink.Neigh
}

// maxHeard bounds what is kept while the neighbourhood is read. What is more is taken for news.
const maxHeard = 1024

// hear reports whether a neighbour that the kernel tells of is news.
func (w *neighbourNews) hear(message []byte) bool {
	if w == nil || len(message) < unix.SizeofNdMsg {
		return false
	}
	n, err := netlink.NeighDeserialize(message)
	if err != nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.reading {
		w.heard = append(w.heard, n)
		return len(w.heard) > maxHeard
	}
	return w.known.contradictedBy(n)
}

// read is called before the neighbourhood is read anew, and what it returns after that, with what was found. That reports
// whether something was heard in between which is news already.
func (w *neighbourNews) read() (done func(neighbourhood) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reading, w.heard = true, nil
	return func(found neighbourhood) bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		heard := w.heard
		w.known, w.reading, w.heard = found, false, nil
		return slices.ContainsFunc(heard, found.contradictedBy)
	}
}

// hardwareAddresses returns those of the neighbours at a device.
func (h *host) hardwareAddresses(device int) (map[netip.Addr]string, error) {
	hardware := map[netip.Addr]string{}
	err := dump("list neighbours", func() error {
		clear(hardware)
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			list, err := h.handle.NeighList(device, family)
			if err != nil {
				return err
			}
			for _, n := range list {
				if ip, ok := netip.AddrFromSlice(n.IP); ok && len(n.HardwareAddr) > 0 {
					hardware[ip] = n.HardwareAddr.String()
				}
			}
		}
		return nil
	})
	return hardware, err
}

// callNeighbour makes the kernel ask for the hardware address of a neighbour, as if there were a packet for it.
func (h *host) callNeighbour(device int, addr netip.Addr) error {
	err := h.handle.NeighSet(&netlink.Neigh{LinkIndex: device, IP: addr.AsSlice(), Flags: netlink.NTF_USE})
	if err != nil {
		return fmt.Errorf("ask for the neighbour %v: %w", addr, err)
	}
	return nil
}

// learntPorts returns the ports of a bridge by the hardware addresses behind them.
func (h *host) learntPorts(bridge int) (map[string]int, error) {
	ports := map[string]int{}
	err := dump("list the addresses behind a bridge", func() error {
		list, err := h.handle.NeighList(0, unix.AF_BRIDGE)
		clear(ports)
		for _, n := range list {
			if n.MasterIndex == bridge && learnt(&n) {
				ports[n.HardwareAddr.String()] = n.LinkIndex
			}
		}
		return err
	})
	return ports, err
}
