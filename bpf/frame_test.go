// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/binary"
	"net/netip"
)

// Frames are put together from their headers, outermost first: each function takes the bytes behind its header.

var (
	east4  = netip.MustParseAddr("10.1.1.10")
	west4  = netip.MustParseAddr("10.2.1.10")
	other4 = netip.MustParseAddr("198.51.100.7")
	east6  = netip.MustParseAddr("fd00:10:1:1::10")
	west6  = netip.MustParseAddr("fd00:10:2:2::10")
	other6 = netip.MustParseAddr("2001:db8::7")

	// identityless has an entry in identities that names none.
	identityless = netip.MustParseAddr("192.0.2.66")
)

// ethernet is a frame from one locally administered address to another.
func ethernet(typ uint16, payload []byte) []byte {
	return append(binary.BigEndian.AppendUint16([]byte{2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1}, typ), payload...)
}

// vlan is what stands behind a tag's type: its TCI, then the type of what it tags.
func vlan(id, typ uint16, payload []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, id)
	return append(binary.BigEndian.AppendUint16(b, typ), payload...)
}

// v4 is an IPv4 header whose fields a test may make wrong.
type v4 struct {
	src, dst  netip.Addr
	protocol  uint8
	options   []byte // a multiple of 4 bytes
	fragment  uint16 // flags and offset as on the wire
	version   uint8  // 0: 4
	ihl       int    // -1: as the options have it
	totalBias int    // added to the true total length
}

// ipv4 is a plain packet from east to west.
func ipv4(protocol uint8, payload []byte) []byte {
	return v4{src: east4, dst: west4, protocol: protocol, ihl: -1}.with(payload)
}

func (h v4) with(payload []byte) []byte {
	if h.version == 0 {
		h.version = 4
	}
	if h.ihl < 0 {
		h.ihl = 5 + len(h.options)/4
	}
	b := make([]byte, 20, 20+len(h.options)+len(payload))
	b[0] = h.version<<4 | uint8(h.ihl)
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)+len(h.options)+len(payload)+h.totalBias))
	binary.BigEndian.PutUint16(b[6:], h.fragment)
	b[8], b[9] = 64, h.protocol
	copy(b[12:], h.src.AsSlice())
	copy(b[16:], h.dst.AsSlice())
	return append(append(b, h.options...), payload...)
}

// v6 is an IPv6 header whose fields a test may make wrong.
type v6 struct {
	src, dst    netip.Addr
	next        uint8
	version     uint8 // 0: 6
	payloadBias int   // added to the true payload length
	noLength    bool  // payload length 0
}

// ipv6 is a plain packet from east to west.
func ipv6(next uint8, payload []byte) []byte {
	return v6{src: east6, dst: west6, next: next}.with(payload)
}

func (h v6) with(payload []byte) []byte {
	if h.version == 0 {
		h.version = 6
	}
	b := make([]byte, 40, 40+len(payload))
	b[0] = h.version << 4
	if !h.noLength {
		binary.BigEndian.PutUint16(b[4:], uint16(len(payload)+h.payloadBias))
	}
	b[6], b[7] = h.next, 64
	copy(b[8:], h.src.AsSlice())
	copy(b[24:], h.dst.AsSlice())
	return append(b, payload...)
}

// extension is a hop-by-hop, routing or destination options header of 8*(1+units) bytes.
func extension(next uint8, units int, payload []byte) []byte {
	b := bytes.Repeat([]byte{0xee}, 8*(1+units))
	b[0], b[1] = next, uint8(units)
	return append(b, payload...)
}

// auth is an authentication header of 4*(2+units) bytes.
func auth(next uint8, units int, payload []byte) []byte {
	b := bytes.Repeat([]byte{0xee}, 4*(2+units))
	b[0], b[1] = next, uint8(units)
	return append(b, payload...)
}

// fragment is a fragment header; offset is in units of 8 bytes.
func fragment(next uint8, offset uint16, more bool, payload []byte) []byte {
	b := []byte{next, 0xff, 0, 0, 0, 0, 0, 1} // the second byte is reserved: it is not a length
	offset <<= 3
	if more {
		offset |= 1
	}
	binary.BigEndian.PutUint16(b[2:], offset)
	return append(b, payload...)
}

// tcp is a header with SYN and ACK, from port 40000 to port 80.
func tcp() []byte {
	b := make([]byte, 20)
	binary.BigEndian.PutUint16(b, 40000)
	binary.BigEndian.PutUint16(b[2:], 80)
	b[12], b[13] = 5<<4, 0x12
	return b
}

// udp is a header from port 5353 to port 53, with 4 bytes of data.
func udp() []byte {
	b := make([]byte, 12)
	binary.BigEndian.PutUint16(b, 5353)
	binary.BigEndian.PutUint16(b[2:], 53)
	binary.BigEndian.PutUint16(b[4:], 12)
	return b
}

// icmp is a message of a type and code.
func icmp(typ, code uint8) []byte { return []byte{typ, code, 0, 0, 0, 1, 0, 2} }

// longChain is an IPv6 packet behind two tags whose TCP header stands behind every kind of extension header.
func longChain() []byte {
	b := fragment(headerAuth, 0, true, auth(ProtocolTCP, 4, tcp()))
	b = extension(headerDestOption, 2, extension(headerRouting, 0, extension(headerFragment, 1, b)))
	return ethernet(ethTypeSTag, vlan(100, ethTypeCTag, vlan(200, ethTypeIPv6, ipv6(headerHopByHop, b))))
}

// longOptions is an IPv4 packet behind two tags with all the options that fit.
func longOptions() []byte {
	p := v4{src: east4, dst: west4, protocol: ProtocolTCP, options: make([]byte, 40), ihl: -1}.with(tcp())
	return ethernet(ethTypeSTag, vlan(100, ethTypeCTag, vlan(200, ethTypeIPv4, p)))
}
