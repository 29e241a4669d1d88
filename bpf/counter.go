// SPDX-License-Identifier: Apache-2.0

package bpf

import "fmt"

// Direction says which way a packet went, and by that which of its ends is the peer.
type Direction uint8

// The directions.
const (
	Ingress Direction = 0 // came in from the device; the peer is the source
	Egress  Direction = 1 // went out to the device; the peer is the destination
)

// String returns "ingress", "egress" or the number.
func (d Direction) String() string {
	switch d {
	case Ingress:
		return "ingress"
	case Egress:
		return "egress"
	}
	return fmt.Sprintf("direction(%d)", uint8(d))
}

// Verdict says what came of a packet's lookup. On a native device no verdict drops the packet; in the overlay, all but
// Identified do; on a pod's device Spoofed does, if that is configured.
type Verdict uint8

// The verdicts. NotIP and Malformed give no identity; those behind them are of the overlay alone.
const (
	Identified    Verdict = 1 // the peer's address has an entry in MapIPCache, and it names an identity
	World         Verdict = 2 // it has none: the identity is that of the world
	NotIP         Verdict = 3 // neither IPv4 nor IPv6 behind at most two VLAN tags
	Malformed     Verdict = 4 // a header is cut short or contradicts itself, so that the IP layer will refuse the packet
	NoEndpoint    Verdict = 5 // the destination is behind no node that is known
	WrongNode     Verdict = 6 // the outer source is not the node behind which the inner source is
	WrongIdentity Verdict = 7 // the VNI is not the identity of the inner source
	NoBackend     Verdict = 8 // the destination is a service that has no backend: a socket was refused, and there is no packet
	Spoofed       Verdict = 9 // of pods' devices alone: the source is no address of the device's pod
)

// Addressless reports whether a verdict gives no identities.
func (v Verdict) Addressless() bool { return v == NotIP || v == Malformed }

// String returns a name such as "identified", "world" or "not-ip", or the number.
func (v Verdict) String() string {
	switch v {
	case Identified:
		return "identified"
	case World:
		return "world"
	case NotIP:
		return "not-ip"
	case Malformed:
		return "malformed"
	case NoEndpoint:
		return "no-endpoint"
	case WrongNode:
		return "wrong-node"
	case WrongIdentity:
		return "wrong-identity"
	case NoBackend:
		return "no-backend"
	case Spoofed:
		return "spoofed"
	}
	return fmt.Sprintf("verdict(%d)", uint8(v))
}

// Mode says how a packet travels between nodes.
type Mode uint8

// The modes.
const (
	Native  Mode = 0 // as it is on the wire; the outer packets of an overlay, too
	Overlay Mode = 1 // inside the overlay
	Pod     Mode = 2 // between the node and a pod of its own
)

// String returns "native", "overlay" or the number.
func (m Mode) String() string {
	switch m {
	case Native:
		return "native"
	case Overlay:
		return "overlay"
	case Pod:
		return "pod"
	}
	return fmt.Sprintf("mode(%d)", uint8(m))
}

// CounterKey is the key of MapCounters: struct counter_key in lib/structs.h. It is comparable.
type CounterKey struct {
	SrcIdentity uint32 // 0 for NotIP and Malformed
	DstIdentity uint32 // the same
	Direction   Direction
	Verdict     Verdict
	Mode        Mode
	Pad         uint8 // 0
}

// CounterValue is what one CPU counted: struct counter_value in lib/structs.h. A packet is one socket buffer: a GSO or
// GRO super-packet counts once, with all its bytes. Bytes include the Ethernet header.
type CounterValue struct {
	Packets uint64
	Bytes   uint64
}

// Missed is what one CPU had to leave out of the other maps: struct missed in lib/structs.h. The indices are
// Directions. The sum of MapCounters and of Counts is every packet.
type Missed struct {
	Counts [2]CounterValue // packets whose key did not fit into MapCounters
	Events [2]CounterValue // sampled packets whose event did not fit into MapEvents
}

// Sum adds up the values of all CPUs.
func Sum(perCPU []CounterValue) CounterValue {
	var sum CounterValue
	for _, v := range perCPU {
		sum.Packets += v.Packets
		sum.Bytes += v.Bytes
	}
	return sum
}

// SumMissed adds up the values of all CPUs.
func SumMissed(perCPU []Missed) Missed {
	var sum Missed
	for _, m := range perCPU {
		for d := range sum.Counts {
			sum.Counts[d] = Sum([]CounterValue{sum.Counts[d], m.Counts[d]})
			sum.Events[d] = Sum([]CounterValue{sum.Events[d], m.Events[d]})
		}
	}
	return sum
}
