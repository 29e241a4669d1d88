// SPDX-License-Identifier: Apache-2.0

package bpf

import "fmt"

// Direction says which way a packet went, and by that which of its addresses was looked up.
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

// Verdict says what came of a packet's lookup. No verdict drops the packet.
type Verdict uint8

// The verdicts. The last two give no identity.
const (
	Identified Verdict = 1 // the peer's address has an entry in MapIPCache, and it names an identity
	World      Verdict = 2 // it has none: the identity is that of the world
	NotIP      Verdict = 3 // neither IPv4 nor IPv6 behind at most two VLAN tags
	Malformed  Verdict = 4 // a header is cut short or contradicts itself, so that the IP layer will refuse the packet
)

// String returns "identified", "world", "not-ip", "malformed" or the number.
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
	}
	return fmt.Sprintf("verdict(%d)", uint8(v))
}

// CounterKey is the key of MapCounters: struct counter_key in lib/structs.h. It is comparable.
type CounterKey struct {
	Identity  uint32 // of the peer; 0 for NotIP and Malformed
	Direction Direction
	Verdict   Verdict
	Pad       uint16 // 0
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
