// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

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

// The bytes on the wire, as other implementations of the same overlay have them: port, no checksum, TTL, VNI.
func TestOverlayBytes(t *testing.T) {
	p := newOverlayPair(t, false)
	p.east.start()
	var fd int
	var err error
	p.west.ns.Do(t, func() {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_IP)))
	})
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		src, dst string
		vni      uint32
	}{
		{"10.1.1.10", "10.2.1.10", 65793},
		{"172.18.1.1", "10.2.1.10", 6}, // the node's own
		{"10.1.1.10", "10.2.1.77", 65793},
	} {
		testutil.Eventually(t, patience, func() error {
			p.east.sendTo(tc.src, tc.dst+":5678", []byte("weft"))
			buf := make([]byte, 2000)
			for range 50 {
				n, _, err := unix.Recvfrom(fd, buf, 0)
				if err != nil {
					return err
				}
				if f := buf[:n]; n > 78 && f[23] == 17 && binary.BigEndian.Uint16(f[36:]) == DefaultTunnelPort && f[50+14+9-8+8] == 17 {
					return wantOuter(f, tc.vni, tc.src, tc.dst)
				}
			}
			return errors.New("no packet of the overlay")
		})
	}
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

func wantOuter(f []byte, vni uint32, src, dst string) error {
	const ip, udp, header, inner = 14, 34, 42, 50 + 14
	got := fmt.Sprintf("%v to %v ttl %d checksum %d flags %#x vni %d reserved %d: %v to %v",
		netip.AddrFrom4([4]byte(f[ip+12:])), netip.AddrFrom4([4]byte(f[ip+16:])), f[ip+8], binary.BigEndian.Uint16(f[udp+6:]),
		f[header], binary.BigEndian.Uint32(f[header+4:])>>8, f[header+7],
		netip.AddrFrom4([4]byte(f[inner+12:])), netip.AddrFrom4([4]byte(f[inner+16:])))
	want := fmt.Sprintf("172.18.1.1 to 172.18.2.1 ttl 64 checksum 0 flags 0x8 vni %d reserved 0: %s to %s", vni, src, dst)
	if got != want {
		return fmt.Errorf("outer packet\n got %s\nwant %s", got, want)
	}
	return nil
}
