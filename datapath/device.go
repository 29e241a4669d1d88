// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"net/netip"
	"slices"
)

// role is what a device is to weft, and so which programs are made for it.
type role uint8

const (
	roleUplink  role = iota // what leads to other nodes, as far as it has programs
	roleOverlay             // the overlay's device
	rolePod                 // the host's side of the device of a pod of this node
	roleService             // what leads to clients of services; a device may have another role, too
)

func (r role) String() string {
	return [...]string{"uplink", "overlay", "pod", "service"}[r]
}

// namedDevices returns the devices with the given names, in that order and each once; one that does not exist has no
// index.
func namedDevices(names []string, existing []device) []device {
	var all []device
	for _, name := range names {
		dev := device{Name: name}
		if i := slices.IndexFunc(existing, func(d device) bool { return d.Name == name }); i >= 0 {
			dev = existing[i]
		}
		if !slices.Contains(all, dev) {
			all = append(all, dev)
		}
	}
	return all
}

// uplinks returns the devices by which the node talks to others, ordered by name: those of the default routes and those
// that have one of the node's addresses. Devices without Ethernet header are left out, since nobody asked for them.
func uplinks(existing []device, defaults map[int]bool, addresses map[netip.Addr]int, nodeIPs []netip.Addr) []device {
	chosen := map[int]bool{}
	for index := range defaults {
		chosen[index] = true
	}
	for _, ip := range nodeIPs {
		if index, ok := addresses[ip]; ok {
			chosen[index] = true
		}
	}
	var all []device
	for _, dev := range existing {
		if chosen[dev.Index] && dev.Ethernet {
			all = append(all, dev)
		}
	}
	slices.SortFunc(all, func(a, b device) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
