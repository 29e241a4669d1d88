// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/internal/testutil"
)

// vxlan is the payload of an outer packet: a header with a VNI, and a frame whose MAC addresses mean nothing to the
// receiver, as those of other implementations do not.
func vxlan(vni uint32, src, dst string) []byte {
	b := make([]byte, 8)
	b[0] = 8
	binary.BigEndian.PutUint32(b[4:], vni<<8)
	b = append(b, 0x0a, 1, 2, 3, 4, 5, 0x0a, 5, 4, 3, 2, 1, 8, 0)
	udp := []byte{0x14, 0xe9, 0x16, 0x2e, 0, 12, 0, 0, 'w', 'e', 'f', 't'} // to port 5678, without checksum
	ip := make([]byte, 20)
	ip[0], ip[8], ip[9] = 0x45, 64, 17
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+len(udp)))
	copy(ip[12:], netip.MustParseAddr(src).AsSlice())
	copy(ip[16:], netip.MustParseAddr(dst).AsSlice())
	sum := uint32(0)
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum+sum>>16))
	return append(append(b, ip...), udp...)
}

// sendTo sends a payload from an address of a namespace.
func (h *testHost) sendTo(from, to string, payload []byte) {
	h.t.Helper()
	var err error
	h.ns.Do(h.t, func() {
		var conn net.Conn
		d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(from)}}
		if conn, err = d.Dial("udp", to); err == nil {
			_, err = conn.Write(payload)
			conn.Close()
		}
	})
	if err != nil {
		h.t.Fatal(err)
	}
}

// What a node claims inside the overlay is held against what is known of it; what does not hold is dropped and counted
// under a verdict of its own, or counted alone.
//
// lesson: R14
func TestOverlayChecks(t *testing.T) {
	for _, lax := range []bool{false, true} {
		t.Run(fmt.Sprintf("lax %t", lax), func(t *testing.T) {
			p := newOverlayPair(t, false)
			p.east.cfg.OverlayLax = lax
			p.west.ip("addr add 172.18.2.9/16 dev eth0")
			p.east.start()
			var server net.PacketConn
			var err error
			p.east.ns.Do(t, func() { server, err = net.ListenPacket("udp", "10.1.1.10:5678") })
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			for _, tc := range []struct {
				outer string
				vni   uint32
				inner string
				want  string
			}{
				{"172.18.2.1", 131329, "10.2.1.10", "identified 131329"},
				{"172.18.2.1", 2, "10.2.1.77", "identified 2"},
				{"172.18.2.1", 131400, "10.2.1.77", "identified 2"}, // a pod whose own entry is on its way
				{"172.18.2.1", 6, "172.18.2.1", "identified 6"},     // the node itself
				{"172.18.2.9", 131329, "10.2.1.10", "wrong-node 131329"},
				{"172.18.2.9", 2, "10.2.1.77", "wrong-node 2"},
				{"172.18.2.9", 6, "172.18.2.1", "wrong-node 6"},
				{"172.18.2.1", 65793, "10.1.1.10", "wrong-node 65793"}, // an address of the receiver's own
				{"172.18.2.1", 2, "198.51.100.7", "wrong-node 9"},      // nobody's
				{"172.18.2.1", 131330, "10.2.1.10", "wrong-identity 131329"},
				{"172.18.2.1", 1, "10.2.1.10", "wrong-identity 131329"},
				{"172.18.2.1", 1, "10.2.1.77", "wrong-identity 2"},
				{"172.18.2.1", 0, "10.2.1.10", "wrong-identity 131329"},
			} {
				key := "ingress " + tc.want + " 65793"
				before := p.east.overlayCounts()[key]
				p.west.sendTo(tc.outer, "172.18.1.1:8472", vxlan(tc.vni, tc.inner, "10.1.1.10"))
				testutil.Eventually(t, patience, func() error {
					if counts := p.east.overlayCounts(); counts[key] != before+1 {
						return fmt.Errorf("%+v: counters %v, want one more of %q", tc, counts, key)
					}
					return nil
				})
				passes := strings.HasPrefix(tc.want, "identified") || lax && tc.inner != "10.1.1.10"
				wait := 100 * time.Millisecond
				if passes {
					wait = patience
				}
				_ = server.SetReadDeadline(time.Now().Add(wait))
				buf := make([]byte, 100)
				n, _, err := server.ReadFrom(buf)
				if got := err == nil && bytes.Equal(buf[:n], []byte("weft")); got != passes {
					t.Errorf("%+v: delivered %t (%v), want %t", tc, got, err, passes)
				}
			}
		})
	}
}

// goldenFrame is a packet of the overlay as it is on the wire, in hexadecimal; a dot is a digit that may be any: hardware
// addresses, numbers of packets, ephemeral ports, and the sums over those. Plus signs are digits not all of which are 0.
type goldenFrame struct {
	name     string
	src, dst string // of the packet within, from port whatever to 5678: four bytes of UDP
	frame    string
}

// What Cilium's nodes send and take: UDP to 8472 without checksum over IPv4 and with one over IPv6, TTL 64, and the identity
// of the source as VNI: 65793 is 010101. The node itself is remote-node, 6; an unknown source is world, 2, whatever its
// family.
var goldenFrames = map[string][]goldenFrame{
	"ipv4": {
		{"pod", "10.1.1.10", "10.2.1.10", golden4(0x52, "00010101") + inner4 + "0a01010a 0a02010a" + innerUDP},
		{"host", "172.18.1.1", "10.2.1.10", golden4(0x52, "00000006") + inner4 + "ac120101 0a02010a" + innerUDP},
		{"world", "198.51.100.7", "10.2.1.10", golden4(0x52, "00000002") + inner4 + "c6336407 0a02010a" + innerUDP},
		{"to a pod that is not known", "10.1.1.10", "10.2.1.77", golden4(0x52, "00010101") + inner4 + "0a01010a 0a02014d" + innerUDP},
		{"pod, IPv6", "fd00:10:1:1::10", "fd00:10:2:1::10", golden4(0x66, "00010101") + inner6 +
			"fd000010000100010000000000000010 fd000010000200010000000000000010" + innerUDP},
		{"world, IPv6", "2001:db8::7", "fd00:10:2:1::10", golden4(0x66, "00000002") + inner6 +
			"20010db8000000000000000000000007 fd000010000200010000000000000010" + innerUDP},
	},
	"ipv6": {
		{"pod", "10.1.1.10", "10.2.1.10", golden6(0x3e, "00010101") + inner4 + "0a01010a 0a02010a" + innerUDP},
		{"host, IPv6", "fd00:18:1::1", "fd00:10:2:1::10", golden6(0x52, "00000006") + inner6 +
			"fd000018000100000000000000000001 fd000010000200010000000000000010" + innerUDP},
	},
}

const (
	goldenMACs = "............ ............ "
	inner4     = goldenMACs + "0800 4500 0020 .... .... 4011 .... "
	inner6     = goldenMACs + "86dd 60...... 000c 1140 "
	innerUDP   = " .... 162e 000c .... 77656674"
)

// golden4 and golden6 are the headers around a frame: Ethernet, IP, UDP, and VXLAN with a VNI and what is reserved around it.
func golden4(total int, vni string) string {
	return goldenMACs + fmt.Sprintf("0800 4500 %04x .... 0000 4011 .... ac120101 ac120201 .... 2118 %04x 0000 ", total, total-20) + goldenVXLAN(vni)
}

func golden6(payload int, vni string) string {
	return goldenMACs + fmt.Sprintf("86dd 600..... %04x 1140 fd000018000100000000000000000001 fd000018000200000000000000000001 .... 2118 %04x ++++ ",
		payload, payload) + goldenVXLAN(vni)
}

func goldenVXLAN(vni string) string { return "08000000 " + vni[2:] + "00 " }

// difference says how a frame differs from what is wanted; "" if it does not.
func (g goldenFrame) difference(frame []byte) string {
	want, got := strings.ReplaceAll(g.frame, " ", ""), hex.EncodeToString(frame)
	if len(want) != len(got) {
		return fmt.Sprintf("%d bytes, want %d:\n%s", len(got)/2, len(want)/2, got)
	}
	const sum = "++++"
	masked := []byte(got)
	for i := range masked {
		if want[i] == '.' || want[i] == '+' {
			masked[i] = want[i]
		}
	}
	if at := strings.Index(want, sum); at >= 0 && got[at:at+len(sum)] == "0000" {
		return fmt.Sprintf("no checksum over IPv6:\n%s", got)
	}
	return cmp.Diff(want, string(masked))
}

// The overlay cannot be tried beside Cilium here: what goes into it is held against frames written down by the description of
// Cilium's (format.md §D.3), byte by byte. What comes out of it is TestOverlayChecks'; marks are TestMark's in package bpf.
//
// spec: D.3
func TestOverlayGoldenFrames(t *testing.T) {
	for underlay, frames := range goldenFrames {
		t.Run(underlay, func(t *testing.T) {
			p := newOverlayPair(t, underlay == "ipv6")
			p.east.ip("addr add 198.51.100.7/32 dev lo")
			p.east.ip("addr add 2001:db8::7/128 dev lo nodad")
			p.east.start()
			fd := p.west.capture(map[string]int{"ipv4": unix.ETH_P_IP, "ipv6": unix.ETH_P_IPV6}[underlay])
			for _, g := range frames {
				testutil.Eventually(t, patience, func() error {
					p.east.sendTo(g.src, net.JoinHostPort(g.dst, "5678"), []byte("weft"))
					closest := "nothing was sent"
					buf := make([]byte, 2000)
					for range 50 {
						n, _, err := unix.Recvfrom(fd, buf, 0)
						if err != nil {
							break
						}
						if !bytes.HasSuffix(buf[:n], []byte("weft")) {
							continue // what the kernels say by themselves
						}
						if closest = g.difference(buf[:n]); closest == "" {
							return nil
						}
					}
					return fmt.Errorf("%s (-want +got):\n%s", g.name, closest)
				})
			}
		})
	}
}

// capture opens a packet socket for all that comes to a namespace. A receive waits for a second.
func (h *testHost) capture(protocol int) (fd int) {
	h.t.Helper()
	var err error
	h.ns.Do(h.t, func() {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(uint16(protocol))))
	})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}); err != nil {
		h.t.Fatal(err)
	}
	return fd
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }
