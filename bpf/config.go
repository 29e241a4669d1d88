// SPDX-License-Identifier: Apache-2.0

package bpf

// Mark says how the programs write the identity of a packet's source into its mark.
type Mark uint8

// The marks.
const (
	MarkNone    Mark = 0 // not at all: the mark is left alone
	MarkShifted Mark = 1 // shifted up, and only into a mask
	MarkCilium  Mark = 2 // as Cilium's programs do; identities of clusters whose number has bit 7 are left out
)

// CiliumMarkMask are the bits that MarkCilium writes.
const CiliumMarkMask = 0xffff0fff

// PodCheck says what becomes of a packet from a pod's device whose source is no address of that pod.
type PodCheck uint8

// The checks.
const (
	PodCheckOff   PodCheck = 0 // nobody looks
	PodCheckCount PodCheck = 1 // it is counted as Spoofed, and passed on
	PodCheckDrop  PodCheck = 2 // it is counted as Spoofed, and dropped
)

// Config is the one value of MapConfig, read for each packet: struct config in lib/structs.h. While it is zero, nothing
// is sampled or marked, the world is one, the overlay is strict and over IPv4, and pods are not checked.
type Config struct {
	FlowSample uint32 // one event in so many packets, at random; 0: none
	MarkMask   uint32 // of MarkShifted: no other bits are written
	Mark       Mark
	MarkShift  uint8 // of MarkShifted: where bit 0 of the identity goes
	DualStack  uint8 // 1: the world of addresses without entry is told apart by family (9, 10), not 2
	Underlay6  uint8 // 1: the outer headers of the overlay are IPv6
	OverlayLax uint8 // 1: what the overlay's checks refuse is counted, and passed on
	PodCheck   PodCheck
	FastLayout uint8 // FastLayout: MapFast is kept right, and programs use it; every other number, they do not
	Pad        uint8
}

// MakeConfig returns the Config of the two settings that every node has, and that MapFast is kept right.
func MakeConfig(flowSample uint32, dualStack bool) Config {
	c := Config{FlowSample: flowSample, FastLayout: FastLayout}
	if dualStack {
		c.DualStack = 1
	}
	return c
}
