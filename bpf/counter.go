// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"

	"github.com/cilium/ebpf"
)

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

// CounterKey is what packets are counted by: struct counter_key in lib/structs.h. It is comparable.
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

// FrontCounter is a counter in MapFront: struct front_counter in lib/structs.h. Once it has a key it keeps it.
type FrontCounter struct {
	Key   CounterKey
	Check uint32 // a hash of the key
	Value CounterValue
}

// FrontLine is what MapFront consists of: struct front_line in lib/structs.h.
type FrontLine struct {
	Counters [2]FrontCounter
}

// counts reports whether the counter has a key, and all of it: while it is given one, it can be read with a part.
func (c *FrontCounter) counts() bool { return c.Key.Verdict != 0 && c.Check == c.Key.check() }

// check is the hash of the key that the programs make, too.
func (k *CounterKey) check() uint32 {
	identities := uint64(k.SrcIdentity) | uint64(k.DstIdentity)<<32
	summary := uint64(k.Direction) | uint64(k.Verdict)<<8 | uint64(k.Mode)<<16
	return uint32((identities ^ summary*hostsMultiplier) * hostsMultiplier >> 32)
}

// ReadCounters returns what all CPUs counted together, by reading MapCounters and, unless it is nil, MapFront. It is safe
// for concurrent use, and nothing of what it returns is ever less the next time.
func ReadCounters(counters, front *ebpf.Map) (map[CounterKey]CounterValue, error) {
	sums := map[CounterKey]CounterValue{}
	var key CounterKey
	var values []CounterValue
	all := counters.Iterate()
	for all.Next(&key, &values) {
		sums[key] = Sum(values)
	}
	if err := all.Err(); err != nil {
		return nil, fmt.Errorf("read map %s: %w", MapCounters, err)
	}
	if front == nil {
		return sums, nil
	}
	var perCPU []FrontLine
	for i := range front.MaxEntries() {
		if err := front.Lookup(i, &perCPU); err != nil {
			return nil, fmt.Errorf("read line %d of map %s: %w", i, MapFront, err)
		}
		for cpu := range perCPU {
			for c := range perCPU[cpu].Counters {
				if c := &perCPU[cpu].Counters[c]; c.counts() {
					sums[c.Key] = Sum([]CounterValue{sums[c.Key], c.Value})
				}
			}
		}
	}
	return sums, nil
}

// Missed is what one CPU had to leave out of the other maps: struct missed in lib/structs.h. The indices are
// Directions. The sum of what ReadCounters returns and of Counts is every packet.
type Missed struct {
	Counts [2]CounterValue // packets whose key fitted neither into MapFront nor into MapCounters
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
