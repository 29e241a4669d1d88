// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
)

// redirected is TC_ACT_REDIRECT.
const redirected = 7

// answered is the IP packet from the service of w to its client, around a transport of which the two bytes at sumAt are yet
// to be summed up.
func (w segment) answered(protocol uint8, b []byte, sumAt int, pseudo bool) []byte {
	back := segment{src: w.dst, dst: w.src, protocol: protocol}
	if pseudo {
		binary.BigEndian.PutUint16(b[sumAt:], sum16(back.pseudo(len(b)), b))
	} else {
		binary.BigEndian.PutUint16(b[sumAt:], sum16(b))
	}
	if w.src.Addr().Is4() {
		const dontFragment = 0x4000
		p := v4{src: back.src.Addr(), dst: back.dst.Addr(), protocol: protocol, fragment: dontFragment, ihl: -1}.with(b)
		binary.BigEndian.PutUint16(p[10:], sum16(p[:20]))
		return p
	}
	return v6{src: back.src.Addr(), dst: back.dst.Addr(), next: protocol}.with(b)
}

// back is a frame around an IP packet, to where the client's came from.
func (w segment) back(packet []byte) []byte {
	frame := w.ethernet(packet)
	copy(frame, []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2})
	return frame
}

// reset is what a segment of w is answered with: RFC 9293, 3.5.2.
func (w segment) reset(sequence, acknowledged uint32) []byte {
	b := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, w.dst.Port()), w.src.Port())
	flags := uint8(flagRST)
	seq, ack := acknowledged, uint32(0)
	if w.flags&flagACK == 0 {
		flags, seq, ack = flagRST|flagACK, 0, sequence+uint32(len(w.data))
		for _, f := range []uint8{flagSYN, flagFIN} {
			if w.flags&f != 0 {
				ack++
			}
		}
	}
	b = binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(b, seq), ack)
	b = append(b, 5<<4, flags, 0, 0, 0, 0, 0, 0)
	return w.back(w.answered(ProtocolTCP, b, 16, true))
}

// unreachable is the ICMP error that a datagram is answered with: RFC 792, 4443, and 1812 for how much it quotes.
func (w segment) unreachable() []byte { return w.back(w.unreachableAbout(w.packet())) }

func (w segment) unreachableAbout(quoted []byte) []byte {
	if w.src.Addr().Is4() {
		quoted = quoted[:min(len(quoted), 576-28)]
		return w.answered(ProtocolICMP, append([]byte{3, 3, 0, 0, 0, 0, 0, 0}, quoted...), 2, false)
	}
	quoted = quoted[:min(len(quoted), 1280-48)]
	return w.answered(ProtocolICMPv6, append([]byte{1, 4, 0, 0, 0, 0, 0, 0}, quoted...), 2, true)
}

// numbered is a frame of TCP with these numbers instead of those that it has.
func numbered(w segment, sequence, acknowledged uint32) []byte {
	b := w.transport()
	binary.BigEndian.PutUint32(b[4:], sequence)
	binary.BigEndian.PutUint32(b[8:], acknowledged)
	b[16], b[17] = 0, 0
	binary.BigEndian.PutUint16(b[16:], sum16(w.pseudo(len(b)), b))
	return w.ethernet(w.around(b))
}

// wantAnswer sends a frame to a service without backends, and wants a frame back.
func (k *translator) wantAnswer(t testing.TB, frame, want []byte) {
	t.Helper()
	if ret, got := k.run(t, ToBackend, frame); ret != redirected || !bytes.Equal(got, want) {
		t.Errorf("returned %d\n of %x\n got %x\nwant %x", int32(ret), frame, got, want)
	}
}

// rested lets each CPU send ICMP errors again at once.
func (k *translator) rested(t testing.TB) {
	t.Helper()
	m := k.Maps[MapTranslation]
	var perCPU [][]byte
	if err := m.Lookup(uint32(0), &perCPU); err != nil {
		t.Fatal(err)
	}
	for i := range perCPU {
		clear(perCPU[i])
	}
	mustPut(t, m, uint32(0), perCPU)
}

// TestRefusedAtOnce: who sends a segment to a service without backends gets a reset, and who sends a datagram the message
// that the port is unreachable, both with every byte and checksum as the service itself would have sent them.
func TestRefusedAtOnce(t *testing.T) {
	eachScene(t, func(t *testing.T, s scene) {
		k := loadTranslator(t)
		service := &testService{}
		k.serve(t, service, s.protocol, s.frontend)
		answers := uint64(0)
		for _, size := range []int{0, 1, 2, 3, 4, 5, 7, 100, 400, 511, 512, 513, 519, 520, 521, 600, 1000, 1183, 1184, 1185, 1300, 1400} {
			for _, tags := range []int{0, 1, 2} {
				w := s.request()
				w.tags, w.data = tags, bytes.Repeat([]byte{0xa5, 0x5a, 1, 0xff, 0}, 400)[:size]
				if s.protocol == ProtocolUDP {
					if tags > 0 { // tags in the packet; the outermost never is where packets come in
						k.wantDropped(t, ToBackend, w.frame())
						continue
					}
					k.rested(t)
					k.wantAnswer(t, w.frame(), w.unreachable())
					w.unsummed = true
					k.wantAnswer(t, w.frame(), w.unreachable())
					answers += 2
					continue
				}
				for _, flags := range []uint8{flagSYN, flagACK, flagSYN | flagACK, flagFIN | flagACK, flagFIN, flagSYN | flagFIN, 0} {
					for _, numbers := range [][2]uint32{{0, 0}, {1, 2}, {0xffffffff, 0x80000000}, {0xfffffff0, 0xffffffff}} {
						w.flags = flags
						k.wantAnswer(t, numbered(w, numbers[0], numbers[1]), w.reset(numbers[0], numbers[1]))
						answers++
					}
				}
			}
		}
		got := k.counts(t)
		if got.Answered != answers || got.Refused < answers || got.Requests+got.Begun+got.Failed != 0 || len(k.entries(t)) != 0 {
			t.Errorf("counts %+v, want %d answered; entries %v", got, answers, k.entries(t))
		}
	})
}

// TestRefusedInSilence: what no answer may be sent to, or none can be made for, is dropped, and nothing comes of a reset.
func TestRefusedInSilence(t *testing.T) {
	eachScene(t, func(t *testing.T, s scene) {
		k := loadTranslator(t)
		k.serve(t, &testService{}, s.protocol, s.frontend)
		refused := uint64(0)
		silent := func(frame []byte) {
			t.Helper()
			k.wantDropped(t, ToBackend, frame)
			refused++
		}
		group := s.request().frame()
		group[0] |= 1
		silent(group)
		bad := []string{"0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255"}
		if s.client.Addr().Is6() {
			bad = []string{"::", "ff02::1"}
		}
		for _, from := range bad {
			silent(s.request().from(netip.AddrPortFrom(netip.MustParseAddr(from), 4000)).frame())
		}
		behind := s.request()
		behind.options, behind.routed = make([]byte, 4), true
		silent(behind.frame())
		if s.protocol == ProtocolTCP {
			for _, words := range []byte{0, 4, 15} { // a header that is shorter or longer than it can be
				b := s.request().transport()
				b[12] = words << 4
				silent(s.request().ethernet(s.request().around(b)))
			}
			reset := s.request().flagged(flagRST).frame()
			k.want(t, ToBackend, reset, reset)
		}
		if want := (Translated{Refused: refused}); k.counts(t) != want {
			t.Errorf("counts %+v, want %+v", k.counts(t), want)
		}
	})
}

// TestUnreachableIsBounded: from one CPU, not more ICMP errors come at once than the kernel itself would send.
func TestUnreachableIsBounded(t *testing.T) {
	for _, s := range scenes() {
		if s.protocol != ProtocolUDP {
			continue
		}
		k := loadTranslator(t)
		k.serve(t, &testService{}, s.protocol, s.frontend)
		const some = 1000
		began := time.Now()
		answers := uint64(0)
		for range some {
			if ret, _ := k.run(t, ToBackend, s.request().frame()); ret == redirected {
				answers++
			}
		}
		// Fifty of each CPU that this ran on, in each twentieth of a second that it took.
		cpus, err := ebpf.PossibleCPU()
		if err != nil {
			t.Fatal(err)
		}
		most := uint64(50*cpus) * uint64(1+time.Since(began)/(50*time.Millisecond))
		if answers < 50 || answers > most {
			t.Errorf("%s: %d answers, want at least 50 and at most %d", s.name, answers, most)
		}
		if got, want := k.counts(t), (Translated{Refused: some, Answered: answers}); got != want {
			t.Errorf("%s: counts %+v, want %+v", s.name, got, want)
		}
	}
}

// TestTranslateRefusals: a packet to a service without backends is counted and told of.
func TestTranslateRefusals(t *testing.T) {
	eachScene(t, func(t *testing.T, s scene) {
		k := loadTranslator(t)
		service := &testService{}
		k.serve(t, service, s.protocol, s.frontend)
		events, err := ringbuf.NewReader(k.Maps[MapRefusals])
		if err != nil {
			t.Fatal(err)
		}
		defer events.Close()
		const times = 5
		for range times {
			if ret, _ := k.run(t, ToBackend, s.request().frame()); ret != redirected {
				t.Errorf("returned %d", int32(ret))
			}
		}
		var record Service
		if err := k.Maps[MapServices].Lookup(service.number, &record); err != nil {
			t.Fatal(err)
		}
		if want := (Translated{Refused: times, Answered: times}); k.counts(t) != want || record.Refused != times || len(k.entries(t)) != 0 {
			t.Errorf("counts %+v, %d of the service, want %d; entries %v", k.counts(t), record.Refused, times, k.entries(t))
		}
		events.SetDeadline(time.Now().Add(30 * time.Second))
		read, err := events.Read()
		if err != nil {
			t.Fatal(err)
		}
		event, err := ParseEvent(read.RawSample)
		if err != nil || event.Verdict != NoBackend || event.Destination() != s.frontend.Addr() || event.DstPort != s.frontend.Port() {
			t.Errorf("event %+v, %v", event, err)
		}
		// With a backend, it goes there.
		k.serve(t, service, s.protocol, s.frontend, s.backends[0])
		if got := k.destination(t, s, s.request()); got != s.backends[0] {
			t.Errorf("goes to %v", got)
		}
	})
}
