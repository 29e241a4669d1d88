// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weftmesh/weft/internal/testutil"
)

// wireHeader is the linear part that splitCounter asks for: Ethernet and an IPv4 header.
const wireHeader = 14 + 20

// pair is a veth pair in a namespace of its own: what is sent on out passes weft_to_netdev there, or weft_to_pod, then
// weft_from_netdev, or weft_from_pod, where it comes in. Behind each program stands a counter of packets whose headers are not in the linear part.
type pair struct {
	*kernel
	programs [2]Program // by direction
	mode     Mode       // that they count under
	out, in  *net.Interface
	socket   int
	split    *ebpf.Map
}

// pairModes are the programs that do with packets the same, but for the mode that they count under.
var pairModes = map[Mode][2]Program{Native: Programs, Pod: PodPrograms}

func newPair(t *testing.T, mode Mode) *pair {
	t.Helper()
	p := &pair{kernel: loadKernel(t), programs: pairModes[mode], mode: mode}
	ns := testutil.NewNetNS(t)
	ns.Do(t, func() {
		// A kernel that spoke IPv6 would send packets of its own.
		for _, which := range []string{"all", "default"} {
			mustWrite(t, "/proc/sys/net/ipv6/conf/"+which+"/disable_ipv6", "1")
		}
		mustIP(t, "link", "add", "out", "mtu", "9000", "type", "veth", "peer", "name", "in", "mtu", "9000")
		mustUp(t, "out", "in")
		p.out, p.in = mustDevice(t, "out"), mustDevice(t, "in")
		p.attach(t)
		p.open(t)
	})
	return p
}

func mustWrite(t *testing.T, file, content string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func mustIP(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %v: %v: %s", args, err, out)
	}
}

// mustUp makes the two ends of a wire ready. The first gets its queue in the background, once the second is up, and drops what
// is sent before; its state changes in the same step.
func mustUp(t *testing.T, devices ...string) {
	t.Helper()
	for _, device := range devices {
		mustIP(t, "link", "set", device, "arp", "off", "up")
	}
	for _, device := range devices {
		testutil.Eventually(t, 30*time.Second, func() error {
			out, err := exec.Command("ip", "-o", "link", "show", "dev", device).CombinedOutput()
			if err == nil && !bytes.Contains(out, []byte(" state UP ")) {
				err = errors.New("it is not up")
			}
			if err != nil {
				return fmt.Errorf("device %s: %w: %s", device, err, out)
			}
			return nil
		})
	}
}

func mustDevice(t *testing.T, name string) *net.Interface {
	t.Helper()
	device, err := net.InterfaceByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return device
}

// attach puts the programs on the devices and the counter behind each.
func (p *pair) attach(t *testing.T) {
	t.Helper()
	var err error
	p.split, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.split.Close() })
	counter, err := ebpf.NewProgram(splitCounter(p.split))
	if err != nil {
		t.Fatalf("load the counter: %+v", err)
	}
	t.Cleanup(func() { _ = counter.Close() })
	devices := map[Direction]*net.Interface{Ingress: p.in, Egress: p.out}
	for d, device := range devices {
		for _, program := range []*ebpf.Program{p.Programs[p.programs[d].Name], counter} {
			l, err := link.AttachTCX(link.TCXOptions{Interface: device.Index, Program: program, Attach: p.programs[d].Attach})
			if err != nil {
				t.Fatalf("attach %v to %s: %v", program, device.Name, err)
			}
			t.Cleanup(func() { _ = l.Close() })
		}
	}
}

// splitCounter counts into m[0] the packets of which less than wireHeader bytes are linear, and passes on every packet.
func splitCounter(m *ebpf.Map) *ebpf.ProgramSpec {
	const data, dataEnd = 76, 80 // in struct __sk_buff
	return &ebpf.ProgramSpec{Name: "split_counter", Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, data, asm.Word),
		asm.LoadMem(asm.R3, asm.R1, dataEnd, asm.Word),
		asm.Add.Imm(asm.R2, wireHeader),
		asm.JLE.Reg(asm.R2, asm.R3, "pass"),
		asm.StoreImm(asm.R10, -4, 0, asm.Word),
		asm.Mov.Reg(asm.R2, asm.R10),
		asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "pass"),
		asm.Mov.Imm(asm.R1, 1),
		asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, 0),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("pass"),
		asm.Return(),
	}}
}

// open makes the packet socket, which takes a virtio_net_hdr before each frame.
func (p *pair) open(t *testing.T) {
	t.Helper()
	const solPacket, packetVNetHeader = 263, 15
	fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	if err := syscall.SetsockoptInt(fd, solPacket, packetVNetHeader, 1); err != nil {
		t.Fatal(err)
	}
	p.socket = fd
}

// send sends a frame of which the kernel is told to keep the Ethernet header alone in the linear part. It does so with
// frames of more than a page.
func (p *pair) send(t *testing.T, frame []byte) {
	t.Helper()
	p.sendAs(t, virtioNetHeader{linear: 14}, frame)
}

// virtioNetHeader is a struct virtio_net_hdr.
type virtioNetHeader struct {
	flags, gsoType                         uint8
	linear, gsoSize, sumStart, sumPosition uint16
}

func (p *pair) sendAs(t *testing.T, header virtioNetHeader, frame []byte) {
	t.Helper()
	b := []byte{header.flags, header.gsoType}
	for _, n := range []uint16{header.linear, header.gsoSize, header.sumStart, header.sumPosition} {
		b = binary.NativeEndian.AppendUint16(b, n)
	}
	to := &syscall.SockaddrLinklayer{Ifindex: p.out.Index}
	if err := syscall.Sendto(p.socket, append(b, frame...), 0, to); err != nil {
		t.Fatalf("send %d bytes: %v", len(frame), err)
	}
}

// expect wants the two events that a frame makes on its way; received is how the frame looks to the ingress hook.
func (p *pair) expect(t *testing.T, frame, received []byte) {
	t.Helper()
	left, came := p.model.event(Egress, frame, false), p.model.event(Ingress, received, false)
	left.IfIndex, came.IfIndex = uint32(p.out.Index), uint32(p.in.Index)
	left.Mode, came.Mode = p.mode, p.mode
	got := []Event{p.next(t), p.next(t)}
	if diff := cmp.Diff([]Event{left, came}, got, cmpopts.IgnoreFields(Event{}, "KtimeNS")); diff != "" {
		t.Errorf("events of frame %x… (-model +kernel):\n%s", frame[:min(len(frame), 80)], diff)
	}
}

func (p *pair) splitPackets(t *testing.T) uint64 {
	t.Helper()
	var n uint64
	if err := p.split.Lookup(uint32(0), &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestLiveSplit sends frames whose IP header is not in the linear part, on both hooks; the counter behind the programs
// proves it, and that packets are passed on.
//
// lesson: K8
func TestLiveSplit(t *testing.T) {
	data := bytes.Repeat([]byte{0x5a}, 5000)
	chain := extension(headerRouting, 3, auth(ProtocolUDP, 4, append(udp(), data...)))
	frames := map[string][]byte{
		"ipv4":       ethernet(ethTypeIPv4, ipv4(ProtocolTCP, append(tcp(), data...))),
		"options":    ethernet(ethTypeIPv4, v4{src: other4, dst: west4, protocol: ProtocolUDP, options: make([]byte, 40), ihl: -1}.with(append(udp(), data...))),
		"ipv6":       ethernet(ethTypeIPv6, ipv6(ProtocolICMPv6, append(icmp(128, 0), data...))),
		"extensions": ethernet(ethTypeIPv6, ipv6(headerHopByHop, extension(headerRouting, 1, chain))),
		"fragment":   ethernet(ethTypeIPv6, ipv6(headerFragment, fragment(ProtocolUDP, 5, true, data))),
		"malformed":  ethernet(ethTypeIPv4, v4{src: east4, dst: west4, protocol: ProtocolTCP, ihl: 3}.with(data)),
		"arp":        ethernet(0x0806, data),
	}
	for mode := range pairModes {
		p := newPair(t, mode)
		for name, frame := range frames {
			before := p.splitPackets(t)
			p.send(t, frame)
			p.expect(t, frame, frame)
			if got := p.splitPackets(t) - before; got != 2 {
				t.Errorf("%v, %s: %d of the 2 hooks passed on a packet that is split", mode, name, got)
			}
		}
	}
}

// TestLiveGSO sends packets that the kernel is to cut into segments later, larger than any device could carry: each is one
// packet to the programs, and passed on whole.
//
// lesson: K8
func TestLiveGSO(t *testing.T) {
	const needsSum, segment = 1, 1400
	data := bytes.Repeat([]byte{0x5a}, 40000)
	for mode := range pairModes {
		p := newPair(t, mode)
		for name, tc := range map[string]struct {
			gsoType uint8
			network int // bytes of headers before the transport's
			frame   []byte
		}{
			"ipv4": {1, 14 + 20, ethernet(ethTypeIPv4, ipv4(ProtocolTCP, append(tcp(), data...)))},
			"ipv6": {4, 14 + 40, ethernet(ethTypeIPv6, ipv6(ProtocolTCP, append(tcp(), data...)))},
		} {
			before := p.splitPackets(t)
			const tcpHeader, sumInTCP = 20, 16
			p.sendAs(t, virtioNetHeader{
				flags: needsSum, gsoType: tc.gsoType, linear: uint16(tc.network + tcpHeader), gsoSize: segment,
				sumStart: uint16(tc.network), sumPosition: sumInTCP,
			}, tc.frame)
			p.expect(t, tc.frame, tc.frame)
			if got := p.splitPackets(t) - before; got != 0 {
				t.Errorf("%v, %s: %d packets have their headers elsewhere, want none", mode, name, got)
			}
		}
	}
}

// TestLiveVLAN sends tagged frames: where they come in, the kernel has moved the outermost tag into the metadata, so
// that two more may be in the packet.
func TestLiveVLAN(t *testing.T) {
	p := newPair(t, Native)
	ip := ipv4(ProtocolUDP, udp())
	for tags := 1; tags <= 4; tags++ {
		inner, typ := ip, uint16(ethTypeIPv4)
		for n := range tags - 1 {
			inner, typ = vlan(uint16(100+n), typ, inner), ethTypeCTag
		}
		frame := ethernet(ethTypeSTag, vlan(200, typ, inner))
		p.send(t, frame)
		p.expect(t, frame, ethernet(typ, inner))
		want := map[int]string{1: "identified identified", 2: "identified identified", 3: "not-ip identified", 4: "not-ip not-ip"}[tags]
		verdicts := fmt.Sprint(p.model.event(Egress, frame, false).Verdict, p.model.event(Ingress, ethernet(typ, inner), false).Verdict)
		if verdicts != want {
			t.Errorf("%d tags: %s, want %s", tags, verdicts, want)
		}
	}
}

// TestLiveTruncated cuts untagged frames at every byte, also within the IP header, which PROG_RUN does not take.
//
// lesson: K8
func TestLiveTruncated(t *testing.T) {
	p := newPair(t, Native)
	for _, frame := range [][]byte{
		ethernet(ethTypeIPv4, v4{src: east4, dst: west4, protocol: ProtocolTCP, options: make([]byte, 40), ihl: -1}.with(tcp())),
		ethernet(ethTypeIPv6, ipv6(headerHopByHop, extension(headerAuth, 0, auth(ProtocolTCP, 4, tcp())))),
	} {
		for n := 14; n <= len(frame); n++ {
			p.send(t, frame[:n])
			p.expect(t, frame[:n], frame[:n])
		}
	}
}
