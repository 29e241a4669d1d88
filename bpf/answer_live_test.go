// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"syscall"
	"testing"

	"github.com/cilium/ebpf/link"

	"github.com/weftmesh/weft/internal/testutil"
)

// client is a device behind which a client of services is, and its socket for frames: each begins with a virtio_net_hdr, as
// between a virtual machine and its host.
type client struct {
	*translator
	index, socket int
}

func newClient(t *testing.T) *client {
	t.Helper()
	c := &client{translator: loadTranslator(t)}
	ns := testutil.NewNetNS(t)
	ns.Do(t, func() {
		for _, which := range []string{"all", "default"} {
			mustWrite(t, "/proc/sys/net/ipv6/conf/"+which+"/disable_ipv6", "1")
		}
		mustIP(t, "link", "add", "client", "mtu", "9000", "type", "veth", "peer", "name", "node", "mtu", "9000")
		mustUp(t, "client", "node")
		c.index = mustDevice(t, "client").Index
		for _, p := range TranslationPrograms {
			l, err := link.AttachTCX(link.TCXOptions{Interface: mustDevice(t, "node").Index, Program: c.Programs[p.Name], Attach: p.Attach})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Close() })
		}
		const solPacket, packetVNetHeader, packetIgnoreOutgoing, all = 263, 15, 23, 0x0300 // ETH_P_ALL, in network order
		fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, all)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = syscall.Close(fd) })
		patience := syscall.Timeval{Sec: 30}
		if err := errors.Join(syscall.SetsockoptInt(fd, solPacket, packetVNetHeader, 1), syscall.SetsockoptInt(fd, solPacket, packetIgnoreOutgoing, 1),
			syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &patience),
			syscall.Bind(fd, &syscall.SockaddrLinklayer{Protocol: all, Ifindex: c.index})); err != nil {
			t.Fatal(err)
		}
		c.socket = fd
	})
	return c
}

// virtioNeedsSum says of a frame that one checksum is yet to be filled in.
const virtioNeedsSum = 1

// send sends a frame.
func (c *client) send(t *testing.T, h virtioNetHeader, frame []byte) {
	t.Helper()
	b := []byte{h.flags, h.gsoType}
	for _, n := range []uint16{h.linear, h.gsoSize, h.sumStart, h.sumPosition} {
		b = binary.NativeEndian.AppendUint16(b, n)
	}
	if err := syscall.Sendto(c.socket, append(b, frame...), 0, &syscall.SockaddrLinklayer{Ifindex: c.index}); err != nil {
		t.Fatal(err)
	}
}

// next is the next frame that comes back, as a device would send it that fills in the checksum, and whether one was missing.
func (c *client) next(t *testing.T) (frame []byte, completed bool) {
	t.Helper()
	buf := make([]byte, 1<<17)
	n, _, err := syscall.Recvfrom(c.socket, buf, 0)
	if err != nil {
		t.Fatalf("no answer: %v", err)
	}
	const header = 10
	frame = buf[header:n]
	if buf[0]&virtioNeedsSum == 0 {
		return frame, false
	}
	start := int(binary.NativeEndian.Uint16(buf[6:]))
	at := start + int(binary.NativeEndian.Uint16(buf[8:]))
	if at+2 > len(frame) {
		t.Fatalf("the checksum to be filled in is at %d of %x", at, frame)
	}
	binary.BigEndian.PutUint16(frame[at:], sum16(frame[start:]))
	return frame, true
}

// unfinished is a frame of w whose checksum is yet to be filled in, as it comes from a socket of this machine or of a virtual one
// on it; large ones are to be cut into segments, too.
func unfinished(w segment) (virtioNetHeader, []byte) {
	b := w.transport()
	at := map[uint8]int{ProtocolTCP: 16, ProtocolUDP: 6}[w.protocol]
	binary.BigEndian.PutUint16(b[at:], ^sum16(w.pseudo(len(b))))
	frame := w.ethernet(w.around(b))
	h := virtioNetHeader{flags: virtioNeedsSum, sumStart: uint16(len(frame) - len(b)), sumPosition: uint16(at)}
	if w.protocol == ProtocolTCP && len(w.data) > 1400 {
		h.gsoType, h.gsoSize = 1, 1400
		if w.src.Addr().Is6() {
			h.gsoType = 4
		}
		h.linear = h.sumStart + 20
	}
	return h, frame
}

// TestLiveRefusedAtOnce: an answer leaves by the device that the packet came in by, and is right in every byte once the kernel
// has filled in what it fills in: for packets with and without a checksum, and for those that are to be cut into segments.
func TestLiveRefusedAtOnce(t *testing.T) {
	eachScene(t, func(t *testing.T, s scene) {
		c := newClient(t)
		c.serve(t, &testService{}, s.protocol, s.frontend)
		sizes := []int{0, 1, 5, 512, 1300, 5000}
		if s.protocol == ProtocolTCP {
			sizes = append(sizes, 40000)
		}
		for _, size := range sizes {
			w := s.request()
			w.data = bytes.Repeat([]byte{0xa5, 0x5a, 1, 0xff, 0}, 8000)[:size]
			for _, complete := range []bool{true, false} {
				h, frame := unfinished(w)
				if complete {
					if size > 8900 {
						continue
					}
					h, frame = virtioNetHeader{}, w.frame()
				}
				c.send(t, h, frame)
				got, completed := c.next(t)
				want := w.reset(0x77000000, 0)
				if s.protocol == ProtocolUDP {
					want = w.unreachableTo(complete)
				}
				if completed == complete || !bytes.Equal(got, want) {
					t.Errorf("%d bytes, with a checksum %v: one was missing %v\n got %x\nwant %x", size, complete, completed, got, want)
				}
			}
		}
		if got := c.counts(t); got.Answered != got.Refused || got.Failed != 0 {
			t.Errorf("counts %+v", got)
		}
	})
}

// unreachableTo is the answer to w; what it quotes of a datagram without a checksum gets the one that is right for the part
// that is quoted.
func (w segment) unreachableTo(complete bool) []byte {
	quoted := w.packet()
	if !complete {
		most := 576 - 28
		if w.src.Addr().Is6() {
			most = 1280 - 48
		}
		_, frame := unfinished(w)
		quoted = frame[14:][:min(len(quoted), most)]
		start := len(frame) - 14 - len(w.transport())
		binary.BigEndian.PutUint16(quoted[start+6:], sum16(quoted[start:]))
	}
	return w.back(w.unreachableAbout(quoted))
}
