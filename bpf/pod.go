// SPDX-License-Identifier: Apache-2.0

package bpf

import "net/netip"

// PodKey is the key of MapPods: struct pod_key in lib/structs.h. It is comparable.
type PodKey struct {
	IfIndex uint32 // of the host's side of the pod's device
	Family  uint32 // a Family
	IP      [16]byte
}

// PodValue is the value of each.
const PodValue uint32 = 1

// Addr returns the address.
func (k PodKey) Addr() netip.Addr { return Family(k.Family).addr(k.IP) }

// MakePodKey says that packets from the device may have addr as their source.
func MakePodKey(ifIndex int, addr netip.Addr) PodKey {
	k := PodKey{IfIndex: uint32(ifIndex), Family: uint32(FamilyIPv6)}
	if addr.Is4() {
		k.Family = uint32(FamilyIPv4)
	}
	copy(k.IP[:], addr.AsSlice())
	return k
}
