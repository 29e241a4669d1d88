// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"net/netip"
)

// segment is a packet of a flow. Its bytes have all checksums right.
type segment struct {
	src, dst netip.AddrPort
	protocol uint8
	flags    uint8  // of TCP
	data     []byte // behind the transport's header
	unsummed bool   // UDP without a checksum
	options  []byte // of IPv4
	routed   bool   // IPv6 with an extension header
	tags     int    // of VLANs
	id       uint16 // of a fragmented datagram
	fragment uint16 // 0: it is whole; else where this fragment begins, plus 1
	size     uint16 // of this fragment
}

// sum16 is the one's complement sum of RFC 1071.
func sum16(parts ...[]byte) uint16 {
	var all []byte
	for _, p := range parts {
		all = append(all, p...)
	}
	if len(all)%2 == 1 {
		all = append(all, 0)
	}
	sum := uint32(0)
	for i := 0; i < len(all); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(all[i:]))
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

func (w segment) pseudo(length int) []byte {
	b := append(w.src.Addr().AsSlice(), w.dst.Addr().AsSlice()...)
	b = binary.BigEndian.AppendUint32(b, uint32(length))
	return binary.BigEndian.AppendUint32(b, uint32(w.protocol))
}

// transport is the transport's header and the data.
func (w segment) transport() []byte {
	b := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, w.src.Port()), w.dst.Port())
	sumAt := 6
	switch w.protocol {
	case ProtocolTCP:
		b = append(b, make([]byte, 16)...)
		b[4], b[12], b[13], b[14] = 0x77, 5<<4, w.flags, 0x10
		sumAt = 16
	case ProtocolUDP:
		b = binary.BigEndian.AppendUint16(b, uint16(8+len(w.data)))
		b = append(b, 0, 0)
	}
	b = append(b, w.data...)
	if !w.unsummed {
		sum := sum16(w.pseudo(len(b)), b)
		if sum == 0 && w.protocol == ProtocolUDP {
			sum = 0xffff
		}
		binary.BigEndian.PutUint16(b[sumAt:], sum)
	}
	return b
}

// packet is the IP packet.
func (w segment) packet() []byte { return w.around(w.transport()) }

// around is an IP header and what is behind it.
func (w segment) around(b []byte) []byte {
	offset, more := uint16(0), false
	if w.fragment != 0 {
		offset = w.fragment - 1
		end := min(int(offset+w.size), len(b))
		more = end < len(b)
		b = b[offset:end]
	}
	if w.src.Addr().Is4() {
		flags := offset / 8
		if more {
			flags |= 0x2000
		}
		p := v4{src: w.src.Addr(), dst: w.dst.Addr(), protocol: w.protocol, options: w.options, fragment: flags, ihl: -1}.with(b)
		binary.BigEndian.PutUint16(p[4:], w.id)
		binary.BigEndian.PutUint16(p[10:], sum16(p[:20+len(w.options)]))
		return p
	}
	next := w.protocol
	if w.fragment != 0 {
		b = fragment(next, offset/8, more, b)
		binary.BigEndian.PutUint16(b[6:], w.id)
		next = headerFragment
	}
	if w.routed {
		b = extension(next, 1, b)
		next = headerDestOption
	}
	return v6{src: w.src.Addr(), dst: w.dst.Addr(), next: next}.with(b)
}

// ethernet is the frame around an IP packet.
func (w segment) ethernet(packet []byte) []byte {
	typ := uint16(ethTypeIPv4)
	if w.src.Addr().Is6() {
		typ = ethTypeIPv6
	}
	for range w.tags {
		packet, typ = vlan(7, typ, packet), ethTypeCTag
	}
	return ethernet(typ, packet)
}

func (w segment) frame() []byte { return w.ethernet(w.packet()) }

// from and to are the packet with another end.
func (w segment) from(src netip.AddrPort) segment { w.src = src; return w }
func (w segment) to(dst netip.AddrPort) segment   { w.dst = dst; return w }

// about is an ICMP error from an address to the source of a packet, of which it quotes so many bytes; 0: all.
func (w segment) about(from netip.Addr, typ, code uint8, quote int) []byte {
	quoted := w.packet()
	if quote != 0 {
		quoted = quoted[:quote]
	}
	e := segment{src: netip.AddrPortFrom(from, 0), dst: w.src, protocol: ProtocolICMP, tags: w.tags}
	b := append([]byte{typ, code, 0, 0, 0, 0, 5, 0}, quoted...)
	if from.Is6() {
		e.protocol = ProtocolICMPv6
		binary.BigEndian.PutUint16(b[2:], sum16(e.pseudo(len(b)), b))
	} else {
		binary.BigEndian.PutUint16(b[2:], sum16(b))
	}
	return e.ethernet(e.around(b))
}
