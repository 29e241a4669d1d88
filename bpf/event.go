// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// EventBytes is the size of a record in MapEvents.
const EventBytes = 72

// Protocol numbers (IANA) whose header the programs read for an Event.
const (
	ProtocolICMP   = 1
	ProtocolTCP    = 6
	ProtocolUDP    = 17
	ProtocolICMPv6 = 58
	ProtocolSCTP   = 132
)

// Event tells of one sampled packet: struct event in lib/structs.h. Fields that the packet does not have are 0, as are
// ports in a later fragment, and whatever stands behind a header that is not understood.
type Event struct {
	KtimeNS     uint64 // nanoseconds of CLOCK_MONOTONIC
	IfIndex     uint32 // the device that the program is attached to
	Length      uint32 // bytes, as in CounterValue
	SrcIdentity uint32 // as in CounterKey
	DstIdentity uint32
	EthType     uint16 // behind the VLAN tags
	SrcPort     uint16 // TCP, UDP, SCTP; see ICMP for that
	DstPort     uint16
	Family      Family // FamilyNone: there are no addresses
	Protocol    uint8  // IANA number, behind IPv6 extension headers
	TCPFlags    uint8  // FIN is bit 0, CWR bit 7
	Direction   Direction
	Verdict     Verdict
	Mode        Mode
	Pad         uint32
	SrcIP       [16]byte // see Source
	DstIP       [16]byte // see Destination
}

// ParseEvent decodes a record of MapEvents. It is an error if record is shorter than EventBytes; what follows them is
// ignored.
func ParseEvent(record []byte) (Event, error) {
	if len(record) < EventBytes {
		return Event{}, fmt.Errorf("flow event of %d bytes: want %d", len(record), EventBytes)
	}
	native := binary.NativeEndian
	return Event{
		KtimeNS:     native.Uint64(record[0:]),
		IfIndex:     native.Uint32(record[8:]),
		Length:      native.Uint32(record[12:]),
		SrcIdentity: native.Uint32(record[16:]),
		DstIdentity: native.Uint32(record[20:]),
		EthType:     native.Uint16(record[24:]),
		SrcPort:     native.Uint16(record[26:]),
		DstPort:     native.Uint16(record[28:]),
		Family:      Family(record[30]),
		Protocol:    record[31],
		TCPFlags:    record[32],
		Direction:   Direction(record[33]),
		Verdict:     Verdict(record[34]),
		Mode:        Mode(record[35]),
		Pad:         native.Uint32(record[36:]),
		SrcIP:       [16]byte(record[40:56]),
		DstIP:       [16]byte(record[56:72]),
	}, nil
}

// Source returns the source address, or the zero Addr if the event has none.
func (e Event) Source() netip.Addr { return e.Family.addr(e.SrcIP) }

// Destination returns the destination address, or the zero Addr if the event has none.
func (e Event) Destination() netip.Addr { return e.Family.addr(e.DstIP) }

// ICMP returns type and code of an ICMP or ICMPv6 message, which stand in the fields of the ports; false if the packet
// is neither.
func (e Event) ICMP() (typ, code uint8, ok bool) {
	switch {
	case e.Family == FamilyIPv4 && e.Protocol == ProtocolICMP, e.Family == FamilyIPv6 && e.Protocol == ProtocolICMPv6:
		return uint8(e.SrcPort), uint8(e.DstPort), true
	}
	return 0, 0, false
}
