// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"net/netip"
)

// The oracle: what the programs must make of a frame, written over slices and without regard to speed. It knows the
// rules of lib/parse.h from their comments, not from their code.

// verdictNone stands for "has addresses to look up" until the lookup has decided.
const verdictNone Verdict = 0

// Numbers of the wire formats.
const (
	ethTypeIPv4 = 0x0800
	ethTypeIPv6 = 0x86dd
	ethTypeCTag = 0x8100
	ethTypeSTag = 0x88a8

	headerHopByHop   = 0
	headerRouting    = 43
	headerFragment   = 44
	headerAuth       = 51
	headerNone       = 59
	headerDestOption = 60
)

// model is the state of the maps that the programs read.
type model struct {
	identities map[netip.Prefix]uint32
	config     Config
}

// event returns the event of a frame; KtimeNS and IfIndex are left 0. gso says that the frame is a GSO super-packet.
func (m model) event(direction Direction, frame []byte, gso bool) Event {
	e := Event{Length: uint32(len(frame)), Direction: direction}
	var transport []byte
	e.Verdict, transport = modelEthernet(&e, frame, gso)
	modelTransport(&e, transport)
	if e.Verdict != verdictNone {
		return e
	}
	src, dst := Verdict(0), Verdict(0)
	e.SrcIdentity, src = m.lookup(e.Source())
	e.DstIdentity, dst = m.lookup(e.Destination())
	if e.Verdict = src; direction == Egress {
		e.Verdict = dst
	}
	return e
}

// lookup scans for the longest prefix.
func (m model) lookup(peer netip.Addr) (uint32, Verdict) {
	best, identity := -1, uint32(0)
	for p, id := range m.identities {
		if p.Contains(peer) && p.Bits() > best {
			best, identity = p.Bits(), id
		}
	}
	switch {
	case identity != 0:
		return identity, Identified
	case m.config.DualStack == 0:
		return 2, World
	case peer.Is4():
		return 9, World
	}
	return 10, World
}

// cut takes n bytes off the front of *b; nil if there are not as many.
func cut(b *[]byte, n int) []byte {
	if len(*b) < n {
		return nil
	}
	head := (*b)[:n]
	*b = (*b)[n:]
	return head
}

func modelEthernet(e *Event, rest []byte, gso bool) (Verdict, []byte) {
	cut(&rest, 12)
	for tags := 0; ; tags++ {
		typ := cut(&rest, 2)
		if typ == nil {
			e.EthType = 0
			return Malformed, nil
		}
		e.EthType = binary.BigEndian.Uint16(typ)
		if e.EthType != ethTypeCTag && e.EthType != ethTypeSTag || tags == 2 {
			break
		}
		if cut(&rest, 2) == nil {
			e.EthType = 0 // the inner type is not reached
			return Malformed, nil
		}
	}
	switch e.EthType {
	case ethTypeIPv4:
		return modelIPv4(e, rest, gso)
	case ethTypeIPv6:
		return modelIPv6(e, rest, gso)
	}
	return NotIP, nil
}

func modelIPv4(e *Event, packet []byte, gso bool) (Verdict, []byte) {
	if len(packet) < 20 || packet[0]>>4 != 4 {
		return Malformed, nil
	}
	header := int(packet[0]&0xf) * 4
	total := int(binary.BigEndian.Uint16(packet[2:]))
	if total == 0 && gso {
		total = len(packet)
	}
	if header < 20 || total < header || len(packet) < total {
		return Malformed, nil
	}
	e.Family = FamilyIPv4
	e.Protocol = packet[9]
	copy(e.SrcIP[:], packet[12:16])
	copy(e.DstIP[:], packet[16:20])
	if offset := binary.BigEndian.Uint16(packet[6:]) & 0x1fff; offset != 0 {
		return verdictNone, nil
	}
	return verdictNone, packet[header:total]
}

func modelIPv6(e *Event, packet []byte, gso bool) (Verdict, []byte) {
	header := cut(&packet, 40)
	if header == nil || header[0]>>4 != 6 {
		return Malformed, nil
	}
	payload := int(binary.BigEndian.Uint16(header[4:]))
	if payload == 0 && (header[6] == headerHopByHop || gso) {
		payload = len(packet)
	}
	if len(packet) < payload {
		return Malformed, nil
	}
	e.Family = FamilyIPv6
	copy(e.SrcIP[:], header[8:24])
	copy(e.DstIP[:], header[24:40])
	return modelExtensions(e, header[6], packet[:payload])
}

func modelExtensions(e *Event, next uint8, rest []byte) (Verdict, []byte) {
	for range 8 {
		if !modelExtension(next) {
			e.Protocol = next
			return verdictNone, rest
		}
		if len(rest) < 8 {
			return Malformed, nil
		}
		size := 8 * (int(rest[1]) + 1)
		switch next {
		case headerFragment:
			size = 8
		case headerAuth:
			size = 4 * (int(rest[1]) + 2)
		}
		header := cut(&rest, size)
		if header == nil {
			return Malformed, nil
		}
		if next == headerFragment && binary.BigEndian.Uint16(header[2:])>>3 != 0 {
			e.Protocol = header[0]
			return verdictNone, nil
		}
		next = header[0]
	}
	e.Protocol = next
	if modelExtension(next) {
		return verdictNone, nil
	}
	return verdictNone, rest
}

func modelExtension(header uint8) bool {
	switch header {
	case headerHopByHop, headerRouting, headerFragment, headerAuth, headerDestOption:
		return true
	}
	return false
}

func modelTransport(e *Event, b []byte) {
	if _, _, icmp := e.ICMP(); icmp {
		if len(b) >= 2 {
			e.SrcPort, e.DstPort = uint16(b[0]), uint16(b[1])
		}
		return
	}
	switch e.Protocol {
	case ProtocolTCP, ProtocolUDP, ProtocolSCTP:
		if len(b) >= 4 {
			e.SrcPort, e.DstPort = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
		}
	}
	if e.Protocol == ProtocolTCP && len(b) >= 14 {
		e.TCPFlags = b[13]
	}
}
