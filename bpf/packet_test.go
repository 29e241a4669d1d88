// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"fmt"
	"testing"
)

// packetCase is a frame and what the ingress program must say of it.
type packetCase struct {
	name  string
	frame []byte
	want  string
}

const (
	tcp4 = "identified 65793 type 0800 10.1.1.10 to 10.2.1.10 protocol 6 ports 40000 80 flags 12"
	bare = "identified 65793 type 0800 10.1.1.10 to 10.2.1.10 protocol "
	tcp6 = "identified 65793 type 86dd fd00:10:1:1::10 to fd00:10:2:2::10 protocol 6 ports 40000 80 flags 12"
	udp6 = "identified 65793 type 86dd fd00:10:1:1::10 to fd00:10:2:2::10 protocol 17 ports 5353 53"
	only = "identified 65793 type 86dd fd00:10:1:1::10 to fd00:10:2:2::10 protocol "
	bad4 = "malformed 0 type 0800"
	bad6 = "malformed 0 type 86dd"
	// A chain that breaks leaves the addresses of the header before it.
	badChain = "malformed 0 type 86dd fd00:10:1:1::10 to fd00:10:2:2::10 protocol 0"
)

func ethernetCases() []packetCase {
	ip := ipv4(ProtocolTCP, tcp())
	v6 := ipv6(ProtocolTCP, tcp())
	return []packetCase{
		{"ipv4", ethernet(ethTypeIPv4, ip), tcp4},
		{"ipv6", ethernet(ethTypeIPv6, v6), tcp6},
		{"arp", ethernet(0x0806, make([]byte, 28)), "not-ip 0 type 0806"},
		{"lldp", ethernet(0x88cc, make([]byte, 46)), "not-ip 0 type 88cc"},
		{"mpls", ethernet(0x8847, append(make([]byte, 4), ip...)), "not-ip 0 type 8847"},
		{"pppoe", ethernet(0x8864, ip), "not-ip 0 type 8864"},
		{"802.3 length and LLC", ethernet(46, make([]byte, 46)), "not-ip 0 type 002e"},
		{"old QinQ type 9100", ethernet(0x9100, vlan(7, ethTypeIPv4, ip)), "not-ip 0 type 9100"},
		{"type alone", ethernet(0x0806, nil), "not-ip 0 type 0806"},
		{"802.1Q", ethernet(ethTypeCTag, vlan(0xffff, ethTypeIPv4, ip)), tcp4},
		{"802.1ad", ethernet(ethTypeSTag, vlan(100, ethTypeIPv6, v6)), tcp6},
		{"QinQ", ethernet(ethTypeSTag, vlan(100, ethTypeCTag, vlan(200, ethTypeIPv4, ip))), tcp4},
		{"QinQ of 802.1Q", ethernet(ethTypeCTag, vlan(100, ethTypeCTag, vlan(200, ethTypeIPv6, v6))), tcp6},
		{"three tags", ethernet(ethTypeSTag, vlan(1, ethTypeSTag, vlan(2, ethTypeCTag, vlan(3, ethTypeIPv4, ip)))), "not-ip 0 type 8100"},
		{"tag of arp", ethernet(ethTypeCTag, vlan(1, 0x0806, make([]byte, 28))), "not-ip 0 type 0806"},
		{"tag cut in its TCI", ethernet(ethTypeCTag, []byte{0}), "malformed 0 type 0000"},
		{"tag cut before the type", ethernet(ethTypeCTag, []byte{0, 1, 8}), "malformed 0 type 0000"},
		{"padding to the least frame", append(ethernet(ethTypeIPv4, ip), make([]byte, 26)...), tcp4},
	}
}

func ipv4Cases() []packetCase {
	h := func(change func(*v4)) []byte {
		head := v4{src: east4, dst: west4, protocol: ProtocolTCP, ihl: -1}
		change(&head)
		return ethernet(ethTypeIPv4, head.with(tcp()))
	}
	padded := append(ethernet(ethTypeIPv4, ipv4(ProtocolUDP, nil)), bytes.Repeat([]byte{0xab}, 26)...)
	return []packetCase{
		{"udp", ethernet(ethTypeIPv4, ipv4(ProtocolUDP, udp())), bare + "17 ports 5353 53"},
		{"sctp", ethernet(ethTypeIPv4, ipv4(ProtocolSCTP, udp())), bare + "132 ports 5353 53"},
		{"icmp", ethernet(ethTypeIPv4, ipv4(ProtocolICMP, icmp(3, 4))), bare + "1 icmp 3/4"},
		{"icmpv6 over ipv4 is not icmp", ethernet(ethTypeIPv4, ipv4(ProtocolICMPv6, icmp(3, 4))), bare + "58"},
		{"gre", ethernet(ethTypeIPv4, ipv4(47, udp())), bare + "47"},
		{"esp", ethernet(ethTypeIPv4, ipv4(50, udp())), bare + "50"},
		{"unknown protocol", ethernet(ethTypeIPv4, ipv4(253, udp())), bare + "253"},
		{"no transport header", ethernet(ethTypeIPv4, ipv4(ProtocolTCP, nil)), bare + "6"},
		{"half of the ports", ethernet(ethTypeIPv4, ipv4(ProtocolUDP, udp()[:3])), bare + "17"},
		{"ports without flags", ethernet(ethTypeIPv4, ipv4(ProtocolTCP, tcp()[:13])), bare + "6 ports 40000 80"},
		{"half of an icmp header", ethernet(ethTypeIPv4, ipv4(ProtocolICMP, []byte{8})), bare + "1 icmp 0/0"},
		{"padding is not a header", padded, bare + "17"},
		{"first fragment", h(func(h *v4) { h.fragment = 0x2000 }), tcp4},
		{"do not fragment", h(func(h *v4) { h.fragment = 0x4000 }), tcp4},
		{"middle fragment", h(func(h *v4) { h.fragment = 0x2001 }), bare + "6"},
		{"last fragment", h(func(h *v4) { h.fragment = 0x1fff }), bare + "6"},
		{"unknown source", h(func(h *v4) { h.src = other4 }), "world 2 type 0800 198.51.100.7 to 10.2.1.10 protocol 6 ports 40000 80 flags 12"},
		{"by prefix", h(func(h *v4) { h.src = east4.Next() }), "identified 65800 type 0800 10.1.1.11 to 10.2.1.10 protocol 6 ports 40000 80 flags 12"},
		{"world by entry", h(func(h *v4) { h.src = west4.Next() }), "identified 2 type 0800 10.2.1.11 to 10.2.1.10 protocol 6 ports 40000 80 flags 12"},
		{"version 6", h(func(h *v4) { h.version = 6 }), bad4},
		{"shorter than it says", h(func(h *v4) { h.totalBias = 1 }), bad4},
		{"total length 0", h(func(h *v4) { h.totalBias = -40 }), bad4},
		{"total length within the header", h(func(h *v4) { h.totalBias = -21 }), bad4},
		{"total length ends in the ports", h(func(h *v4) { h.totalBias = -17 }), bare + "6"},
		{"nothing behind the type", ethernet(ethTypeCTag, vlan(1, ethTypeIPv4, nil)), bad4},
	}
}

func ipv6Cases() []packetCase {
	frame := func(next uint8, payload []byte) []byte { return ethernet(ethTypeIPv6, ipv6(next, payload)) }
	h := func(change func(*v6)) []byte {
		head := v6{src: east6, dst: west6, next: ProtocolUDP}
		change(&head)
		return ethernet(ethTypeIPv6, head.with(udp()))
	}
	chain := func(headers int) []byte {
		payload := extension(ProtocolUDP, 0, udp())
		for range headers - 1 {
			payload = extension(headerDestOption, 0, payload)
		}
		return frame(headerDestOption, payload)
	}
	jumbo := v6{src: east6, dst: west6, next: headerHopByHop, noLength: true}.with(extension(ProtocolUDP, 0, udp()))
	return []packetCase{
		{"udp", frame(ProtocolUDP, udp()), udp6},
		{"sctp", frame(ProtocolSCTP, udp()), only + "132 ports 5353 53"},
		{"icmpv6", frame(ProtocolICMPv6, icmp(135, 0)), only + "58 icmp 135/0"},
		{"icmp over ipv6 is not icmp", frame(ProtocolICMP, icmp(8, 0)), only + "1"},
		{"no next header", frame(headerNone, udp()), only + "59"},
		{"esp", frame(50, udp()), only + "50"},
		{"hop-by-hop", frame(headerHopByHop, extension(ProtocolUDP, 0, udp())), udp6},
		{"routing", frame(headerRouting, extension(ProtocolUDP, 2, udp())), udp6},
		{"destination options", frame(headerDestOption, extension(ProtocolUDP, 31, udp())), udp6},
		{"authentication", frame(headerAuth, auth(ProtocolUDP, 4, udp())), udp6},
		{"shortest authentication", frame(headerAuth, auth(ProtocolUDP, 0, udp())), udp6},
		{"every kind, tagged twice", longChain(), tcp6},
		{"eight headers", chain(8), udp6},
		{"nine headers", chain(9), only + "60"},
		{"atomic fragment", frame(headerFragment, fragment(ProtocolUDP, 0, false, udp())), udp6},
		{"first fragment", frame(headerFragment, fragment(ProtocolUDP, 0, true, udp())), udp6},
		{"later fragment", frame(headerFragment, fragment(ProtocolUDP, 1, true, udp())), only + "17"},
		{"last fragment", frame(headerFragment, fragment(headerDestOption, 0x1fff, false, udp())), only + "60"},
		{"header longer than the packet", frame(headerHopByHop, extension(ProtocolUDP, 0, nil)[:4]), badChain},
		{"header says more than there is", frame(headerRouting, append([]byte{ProtocolUDP, 9}, make([]byte, 30)...)), badChain},
		{"fragment header cut", frame(headerFragment, fragment(ProtocolUDP, 0, true, nil)[:7]), badChain},
		{"chain ends with a header announced", frame(headerHopByHop, extension(headerRouting, 0, nil)), badChain},
		{"unknown source", h(func(h *v6) { h.src = other6 }), "world 2 type 86dd 2001:db8::7 to fd00:10:2:2::10 protocol 17 ports 5353 53"},
		{"by prefix", h(func(h *v6) { h.src = east6.Next() }), "identified 65800 type 86dd fd00:10:1:1::11 to fd00:10:2:2::10 protocol 17 ports 5353 53"},
		{"version 4", h(func(h *v6) { h.version = 4 }), bad6},
		{"shorter than it says", h(func(h *v6) { h.payloadBias = 1 }), bad6},
		{"payload length ends in the ports", h(func(h *v6) { h.payloadBias = -9 }), only + "17"},
		{"payload length 0", h(func(h *v6) { h.noLength = true }), only + "17"},
		{"jumbogram", ethernet(ethTypeIPv6, jumbo), udp6},
		{"nothing behind the type", ethernet(ethTypeCTag, vlan(1, ethTypeIPv6, nil)), bad6},
	}
}

// ihlCases says for each header length where the ports are: behind 16 words of which word n holds the ports 1000+n.
func ihlCases() []packetCase {
	var cases []packetCase
	words := make([]byte, 0, 44)
	for n := 5; n < 16; n++ {
		words = append(words, byte((1000+n)>>8), byte((1000+n)&0xff), byte((2000+n)>>8), byte((2000+n)&0xff))
	}
	for ihl := range 16 {
		c := packetCase{
			name:  fmt.Sprintf("ihl %d", ihl),
			frame: ethernet(ethTypeIPv4, v4{src: east4, dst: west4, protocol: ProtocolUDP, ihl: ihl}.with(words)),
			want:  bad4,
		}
		if ihl >= 5 {
			c.want = fmt.Sprintf("%s17 ports %d %d", bare, 1000+ihl, 2000+ihl)
		}
		cases = append(cases, c)
		short := v4{src: east4, dst: west4, protocol: ProtocolUDP, ihl: ihl}.with(nil)
		c = packetCase{name: fmt.Sprintf("ihl %d of 20 bytes", ihl), frame: ethernet(ethTypeIPv4, short), want: bad4}
		if ihl == 5 {
			c.want = bare + "17"
		}
		cases = append(cases, c)
	}
	return cases
}

// allCases are the frames of every table.
func allCases() map[string][]packetCase {
	return map[string][]packetCase{
		"ethernet": ethernetCases(), "ipv4": ipv4Cases(), "ipv6": ipv6Cases(), "ihl": ihlCases(),
	}
}

// lesson: K8
func TestPackets(t *testing.T) {
	k := loadKernel(t)
	for group, cases := range allCases() {
		for _, c := range cases {
			t.Run(group+"/"+c.name, func(t *testing.T) {
				if got := line(k.check(t, Ingress, c.frame)); got != c.want {
					t.Errorf("frame %x:\n got %s\nwant %s", c.frame, got, c.want)
				}
				k.check(t, Egress, c.frame)
			})
		}
	}
}

// TestEgressLooksUpTheDestination has a known source and an unknown destination, and the reverse.
func TestEgressLooksUpTheDestination(t *testing.T) {
	k := loadKernel(t)
	out := ethernet(ethTypeIPv4, v4{src: east4, dst: other4, protocol: ProtocolUDP, ihl: -1}.with(udp()))
	back := ethernet(ethTypeIPv6, v6{src: other6, dst: west6, next: ProtocolUDP}.with(udp()))
	for _, c := range []struct {
		direction Direction
		frame     []byte
		verdict   Verdict
		identity  uint32
	}{
		{Ingress, out, Identified, 65793},
		{Egress, out, World, 2},
		{Ingress, back, World, 2},
		{Egress, back, Identified, 131329},
	} {
		if e := k.check(t, c.direction, c.frame); e.Verdict != c.verdict || peerIdentity(e) != c.identity {
			t.Errorf("%v: %s, want %v %d", c.direction, line(e), c.verdict, c.identity)
		}
	}
}

// TestWorld covers the identity of addresses without an entry, and of one whose entry names none.
func TestWorld(t *testing.T) {
	k := loadKernel(t)
	unnamed := v4{src: identityless, dst: west4, protocol: ProtocolUDP, ihl: -1}.with(udp())
	frames := map[string][]byte{
		"ipv4":    ethernet(ethTypeIPv4, v4{src: other4, dst: west4, protocol: ProtocolUDP, ihl: -1}.with(udp())),
		"unnamed": ethernet(ethTypeIPv4, unnamed),
		"ipv6":    ethernet(ethTypeIPv6, v6{src: other6, dst: west6, next: ProtocolUDP}.with(udp())),
	}
	for dualStack, want := range map[bool]map[string]uint32{
		false: {"ipv4": 2, "unnamed": 2, "ipv6": 2},
		true:  {"ipv4": 9, "unnamed": 9, "ipv6": 10},
	} {
		k.configure(t, MakeConfig(1, dualStack))
		for name, frame := range frames {
			if e := k.check(t, Ingress, frame); e.Verdict != World || peerIdentity(e) != want[name] {
				t.Errorf("%s, dual stack %t: %s, want world %d", name, dualStack, line(e), want[name])
			}
		}
	}
}

// TestTruncated cuts frames at every byte: once as a snapped capture is cut, once with the IP length made to fit.
// TestLiveTruncated does so with what PROG_RUN does not take.
//
// lesson: K8
func TestTruncated(t *testing.T) {
	k := loadKernel(t)
	frames := [][]byte{longChain(), longOptions()}
	for _, cases := range allCases() {
		for _, c := range cases {
			frames = append(frames, c.frame)
		}
	}
	for _, frame := range frames {
		for n := range len(frame) + 1 {
			if !runnable(frame[:n]) {
				continue
			}
			for _, d := range []Direction{Ingress, Egress} {
				k.check(t, d, frame[:n])
				k.check(t, d, fitted(frame[:n]))
			}
		}
	}
}

// fitted returns frame with the length of an IP header at its place behind 0, 1 or 2 tags made to fit the frame.
func fitted(frame []byte) []byte {
	frame = bytes.Clone(frame)
	for at := 12; at+2 <= len(frame) && at <= 20; at += 4 {
		ip := frame[at+2:]
		switch typ := uint16(frame[at])<<8 | uint16(frame[at+1]); {
		case typ == ethTypeIPv4 && len(ip) >= 20:
			ip[2], ip[3] = byte(len(ip)>>8), byte(len(ip))
			return frame
		case typ == ethTypeIPv6 && len(ip) >= 40:
			ip[4], ip[5] = byte((len(ip)-40)>>8), byte(len(ip)-40)
			return frame
		case typ != ethTypeCTag && typ != ethTypeSTag:
			return frame
		}
	}
	return frame
}

// superPackets are those whose IP length is 0 because they are longer than it can say (BIG TCP), which only a GSO packet
// may be.
func superPackets() map[string][]byte {
	return map[string][]byte{
		"ipv4": ethernet(ethTypeIPv4, v4{src: east4, dst: west4, protocol: ProtocolTCP, ihl: -1, totalBias: -40}.with(tcp())),
		"ipv6": ethernet(ethTypeIPv6, v6{src: east6, dst: west6, next: ProtocolTCP, noLength: true}.with(tcp())),
	}
}

func TestSuperPacket(t *testing.T) {
	k := loadKernel(t)
	for name, frame := range superPackets() {
		k.run(t, Ingress, frame, gsoContext(t, 1400))
		got, want := k.next(t), k.model.event(Ingress, frame, true)
		if line(got) != line(want) || got.SrcPort != 40000 {
			t.Errorf("%s:\n got %s\nwant %s", name, line(got), line(want))
		}
	}
}
