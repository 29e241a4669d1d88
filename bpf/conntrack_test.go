// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// destination sends a request and returns where it went; the zero AddrPort if it was dropped.
func (k *translator) destination(t testing.TB, s scene, request segment) netip.AddrPort {
	t.Helper()
	ret, out := k.run(t, ToBackend, request.frame())
	if ret == dropped {
		return netip.AddrPort{}
	}
	for _, to := range append(s.backends[:], s.frontend) {
		if bytes.Equal(out, request.to(to).frame()) {
			return to
		}
	}
	t.Fatalf("returned %d, %x", int32(ret), out)
	return netip.AddrPort{}
}

const (
	flagFIN, flagSYN, flagRST, flagACK = 0x01, 0x02, 0x04, 0x10
)

// flagged is a packet with flags of TCP.
func (w segment) flagged(flags uint8) segment { w.flags = flags; return w }

// TestFlowsKeepTheirBackend: as long as a flow goes on, it goes to the backend that it was given, which depends on its ends
// alone. When the service gives that backend up, TCP goes on with it and UDP moves on.
func TestFlowsKeepTheirBackend(t *testing.T) {
	eachScene(t, func(t *testing.T, s scene) {
		k := loadTranslator(t)
		service := &testService{}
		k.serve(t, service, s.protocol, s.frontend, s.backends[:]...)
		given := map[uint16]netip.AddrPort{}
		count := map[netip.AddrPort]int{}
		of := func(port uint16) segment {
			w := s.request()
			w.src = netip.AddrPortFrom(s.client.Addr(), port)
			return w
		}
		const first, last = 1000, 1300
		for port := uint16(first); port < last; port++ {
			given[port] = k.destination(t, s, of(port))
			count[given[port]]++
			answer := s.reply().from(given[port]).flagged(flagSYN | flagACK)
			answer.dst = of(port).src
			k.want(t, ToClient, answer.frame(), answer.from(s.frontend).frame())
		}
		for _, b := range s.backends {
			if count[b] < 50 {
				t.Errorf("%v was given %d of 300 flows", b, count[b])
			}
		}
		// A map that is lost, as with another version of weft: each gets on with its own.
		for key := range k.entries(t) {
			if err := k.conntrack.Delete(key); err != nil {
				t.Fatal(err)
			}
		}
		for port := uint16(first); port < last; port++ {
			if got := k.destination(t, s, of(port).flagged(flagACK)); got != given[port] {
				t.Fatalf("port %d: %v after the conntrack was lost, %v before", port, got, given[port])
			}
			answer := s.reply().from(given[port]).flagged(flagACK)
			answer.dst = of(port).src
			k.want(t, ToClient, answer.frame(), answer.from(s.frontend).frame())
		}
		// Only one backend is left, which takes all that is new.
		k.serve(t, service, s.protocol, s.frontend, s.backends[1])
		for port := uint16(first); port < last; port++ {
			want := given[port]
			if s.protocol == ProtocolUDP {
				want = s.backends[1]
			}
			if got := k.destination(t, s, of(port).flagged(flagACK)); got != want {
				t.Fatalf("port %d: %v, want %v", port, got, want)
			}
		}
		if got := k.destination(t, s, of(last)); got != s.backends[1] {
			t.Errorf("a new flow goes to %v", got)
		}
	})
}

// TestConnectionsEnd: a port that is used again gets a backend anew, once its last connection is closed or forgotten. One
// that nobody has answered leaves a backend that is gone.
func TestConnectionsEnd(t *testing.T) {
	for _, s := range scenes() {
		if s.protocol != ProtocolTCP {
			continue
		}
		for _, c := range []struct {
			name  string
			flags [][2]uint8 // of the client and the backend
			moves bool
			age   time.Duration
		}{
			{"asked", [][2]uint8{{flagSYN, 0}}, true, 0},
			{"open", [][2]uint8{{flagSYN, flagSYN | flagACK}, {flagACK, flagACK}}, false, 0},
			{"open, for long", [][2]uint8{{flagSYN, flagSYN | flagACK}, {flagACK, flagACK}}, false, ConntrackTCP - time.Minute},
			{"open, for too long", [][2]uint8{{flagSYN, flagSYN | flagACK}, {flagACK, flagACK}}, true, ConntrackTCP + time.Minute},
			{"half closed", [][2]uint8{{flagSYN, flagSYN | flagACK}, {flagFIN | flagACK, flagACK}}, false, time.Hour},
			{"closed", [][2]uint8{{flagSYN, flagSYN | flagACK}, {flagFIN | flagACK, flagFIN | flagACK}}, true, 0},
			{"reset by the client", [][2]uint8{{flagSYN, flagSYN | flagACK}, {flagRST, 0}}, true, 0},
			{"refused", [][2]uint8{{flagSYN, flagRST | flagACK}}, true, 0},
		} {
			t.Run(s.name+" "+c.name, func(t *testing.T) {
				k := loadTranslator(t)
				service := &testService{}
				k.serve(t, service, s.protocol, s.frontend, s.backends[0])
				for _, flags := range c.flags {
					request := s.request().flagged(flags[0])
					k.want(t, ToBackend, request.frame(), request.to(s.backends[0]).frame())
					if flags[1] != 0 {
						reply := s.reply().flagged(flags[1])
						k.want(t, ToClient, reply.from(s.backends[0]).frame(), reply.frame())
					}
				}
				// The end of a connection is still translated, both ways.
				late, lateReply := s.request().flagged(flagACK), s.reply().flagged(flagACK)
				k.want(t, ToBackend, late.frame(), late.to(s.backends[0]).frame())
				k.want(t, ToClient, lateReply.from(s.backends[0]).frame(), lateReply.frame())
				if c.name == "asked" { // and late answers are not for it
					k = loadTranslator(t)
					service = &testService{}
					k.serve(t, service, s.protocol, s.frontend, s.backends[0])
					k.destination(t, s, s.request())
				}
				k.age(t, uint64(c.age))
				k.serve(t, service, s.protocol, s.frontend, s.backends[1])
				want := s.backends[0]
				if c.moves {
					want = s.backends[1]
				}
				if got := k.destination(t, s, s.request()); got != want {
					t.Errorf("a SYN goes to %v, want %v", got, want)
				}
			})
		}
	}
}

// TestClientTalksToBackendItself: after its connection to the service, from the same port.
func TestClientTalksToBackendItself(t *testing.T) {
	s := scenes()[0]
	k := loadTranslator(t)
	k.serve(t, &testService{}, s.protocol, s.frontend, s.backends[0])
	for _, flags := range [][2]uint8{{flagSYN, flagSYN | flagACK}, {flagFIN | flagACK, flagFIN | flagACK}} {
		k.destination(t, s, s.request().flagged(flags[0]))
		k.run(t, ToClient, s.reply().from(s.backends[0]).flagged(flags[1]).frame())
	}
	for _, flags := range []uint8{flagSYN | flagACK, flagACK, flagFIN | flagACK} {
		direct := s.reply().from(s.backends[0]).flagged(flags).frame()
		k.want(t, ToClient, direct, direct)
	}
}

// TestClientTalksToBoth: a client that asks a service and, from the same port, the backend that it was given, has each answer from
// where it asked last: also if it goes back and forth, or if its connection to the service has ended without a word to the other
// end. While a connection to the service is open, none to the backend takes its place.
func TestClientTalksToBoth(t *testing.T) {
	eachScene(t, func(t *testing.T, s scene) {
		k := loadTranslator(t)
		k.serve(t, &testService{}, s.protocol, s.frontend, s.backends[0])
		direct, answer := s.request().to(s.backends[0]), s.reply().from(s.backends[0])
		for range 3 {
			k.want(t, ToBackend, s.request().frame(), direct.frame())
			k.want(t, ToClient, answer.frame(), s.reply().frame())
			k.want(t, ToBackend, direct.frame(), direct.frame())
			if s.protocol == ProtocolUDP {
				k.want(t, ToClient, answer.frame(), answer.frame())
				if n := len(k.entries(t)); n != 0 {
					t.Errorf("%d entries are left of a flow that made way", n)
				}
				continue
			}
			k.want(t, ToClient, answer.frame(), s.reply().frame()) // it is open
			reset := s.request().flagged(flagRST)
			k.want(t, ToBackend, reset.frame(), reset.to(s.backends[0]).frame())
			k.want(t, ToBackend, direct.frame(), direct.frame())
			k.want(t, ToClient, answer.frame(), answer.frame())
		}
	})
}

// TestTranslateAffinity: a client of which that is wanted keeps its backend, whatever its port.
func TestTranslateAffinity(t *testing.T) {
	eachScene(t, func(t *testing.T, s scene) {
		k := loadTranslator(t)
		k.serve(t, &testService{affinity: 60}, s.protocol, s.frontend, s.backends[:]...)
		given := map[netip.Addr]netip.AddrPort{}
		different := map[netip.AddrPort]bool{}
		client := s.client.Addr()
		for range 40 {
			for port := uint16(1000); port < 1010; port++ {
				w := s.request()
				w.src = netip.AddrPortFrom(client, port)
				got := k.destination(t, s, w)
				if was, ok := given[client]; ok && was != got {
					t.Fatalf("%v was given %v, then %v", client, was, got)
				}
				given[client], different[got] = got, true
			}
			client = client.Next()
		}
		if len(different) < 2 {
			t.Errorf("40 clients were given %v", different)
		}
	})
}

// TestHairpinAndClashes: a client is never sent to itself, nor to a backend to which its port talks already by another
// service; if there is no other, the packet is refused or dropped, and counted.
func TestHairpinAndClashes(t *testing.T) {
	eachScene(t, func(t *testing.T, s scene) {
		k := loadTranslator(t)
		itself := netip.AddrPortFrom(s.client.Addr(), 8080)
		one, other := &testService{}, &testService{}
		k.serve(t, one, s.protocol, s.frontend, itself)
		if ret, _ := k.run(t, ToBackend, s.request().frame()); ret != redirected {
			t.Errorf("to the client itself: returned %d, want an answer", int32(ret))
		}
		k.serve(t, one, s.protocol, s.frontend, itself, s.backends[0])
		for port := uint16(1000); port < 1030; port++ {
			w := s.request()
			w.src = netip.AddrPortFrom(s.client.Addr(), port)
			if got := k.destination(t, s, w); got != s.backends[0] {
				t.Fatalf("port %d goes to %v", port, got)
			}
		}
		if want := (Translated{Hairpin: 1, Answered: 1, Begun: 30, Requests: 30}); k.counts(t) != want {
			t.Errorf("counts %+v, want %+v", k.counts(t), want)
		}
		second := s.request().to(s.other)
		second.src = netip.AddrPortFrom(s.client.Addr(), 1000)
		k.serve(t, other, s.protocol, s.other, s.backends[0])
		k.wantDropped(t, ToBackend, second.frame())
		if got := k.counts(t).Clashes; got != 1 {
			t.Errorf("%d clashes, want 1", got)
		}
		k.serve(t, other, s.protocol, s.other, s.backends[0], s.backends[1])
		k.want(t, ToBackend, second.frame(), second.to(s.backends[1]).frame())
		// What the first service's flow has is free when that is over.
		k.age(t, uint64(ConntrackUnanswered+time.Second))
		k.serve(t, other, s.protocol, s.other, s.backends[0])
		k.want(t, ToBackend, second.frame(), second.to(s.backends[0]).frame())
		answer := s.reply().from(s.backends[0])
		answer.dst = second.src
		k.want(t, ToClient, answer.frame(), answer.from(s.other).frame())
	})
}

// TestConntrackFull: when it is, it gives up what was used least, never the flow at hand, and what it gives up of one
// direction is put back by the other.
//
// lesson: K1
func TestConntrackFull(t *testing.T) {
	s := scenes()[0]
	const size = 4096
	k := loadTranslator(t)
	k.conntrack = k.newConntrack(t, size/2)
	mustPut(t, k.Maps[MapConntracks], ConntrackNow, k.conntrack)
	k.serve(t, &testService{}, s.protocol, s.frontend, s.backends[:]...)
	for n := range 5 * size {
		w := s.request()
		w.src = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, 1, byte(n >> 14)}), uint16(1024+n&0x3fff))
		to := k.destination(t, s, w)
		answer := s.reply().from(to)
		answer.dst = w.src
		k.want(t, ToClient, answer.frame(), answer.from(s.frontend).frame())
	}
	if n := len(k.entries(t)); n > size || n < size/2 {
		t.Errorf("%d entries, of at most %d", n, size)
	}
	if c := k.counts(t); c.Failed != 0 || c.Begun != 5*size {
		t.Errorf("counts %+v, want %d begun and none failed", c, 5*size)
	}

	for _, lost := range []ConntrackKind{ToBackend, ToClient} {
		k := loadTranslator(t)
		k.serve(t, &testService{}, s.protocol, s.frontend, s.backends[0])
		exchange := func() {
			k.want(t, ToBackend, s.request().flagged(flagACK).frame(), s.request().flagged(flagACK).to(s.backends[0]).frame())
			k.want(t, ToClient, s.reply().from(s.backends[0]).frame(), s.reply().frame())
		}
		exchange()
		before := k.entries(t)
		for key := range before {
			if key.Kind == lost {
				if err := k.conntrack.Delete(key); err != nil {
					t.Fatal(err)
				}
			}
		}
		k.age(t, uint64(2*time.Second)) // the next packet touches the other direction
		if lost == ToBackend {
			k.want(t, ToClient, s.reply().from(s.backends[0]).frame(), s.reply().frame())
		}
		exchange()
		after := k.entries(t)
		for key, was := range before {
			is := after[key]
			if is.UsedNS, was.UsedNS = 0, 0; is != was {
				t.Errorf("direction %d: %+v is %+v, was %+v", lost, key, is, was)
			}
		}
		if got := k.counts(t).Begun; got != 1 {
			t.Errorf("direction %d: %d flows begun, want 1", lost, got)
		}
	}
}

// TestConntrackIsReplaced: a conntrack can be changed for another under its flows. As long as the one before is there, too, each
// goes on from either end, with all that is known of it, and takes nothing that another has.
func TestConntrackIsReplaced(t *testing.T) {
	eachScene(t, func(t *testing.T, s scene) {
		for _, first := range []ConntrackKind{ToBackend, ToClient} {
			k := loadTranslator(t)
			service := &testService{}
			k.serve(t, service, s.protocol, s.frontend, s.backends[0])
			request, reply := s.request().flagged(flagACK), s.reply().flagged(flagACK)
			exchange := func(first ConntrackKind) {
				t.Helper()
				for _, kind := range []ConntrackKind{first, first ^ 1} {
					if kind == ToBackend {
						k.want(t, kind, request.frame(), request.to(s.backends[0]).frame())
					} else {
						k.want(t, kind, reply.from(s.backends[0]).frame(), reply.frame())
					}
				}
			}
			exchange(ToBackend)
			before := k.entries(t)
			mustPut(t, k.Maps[MapConntracks], ConntrackBefore, k.conntrack)
			k.conntrack = k.newConntrack(t, 1000)
			mustPut(t, k.Maps[MapConntracks], ConntrackNow, k.conntrack)
			// A second service's flow from the same port does not get the first one's place.
			second := request.to(s.other)
			k.serve(t, &testService{}, s.protocol, s.other, s.backends[0])
			k.wantDropped(t, ToBackend, second.frame())
			quote := request.to(s.backends[0])
			if s.client.Addr().Is4() {
				k.want(t, ToClient, quote.about(s.router, 3, 4, 0), request.about(s.router, 3, 4, 0))
			} else {
				k.want(t, ToClient, quote.about(s.router, 2, 0, 0), request.about(s.router, 2, 0, 0))
			}
			exchange(first)
			if err := k.Maps[MapConntracks].Delete(ConntrackBefore); err != nil {
				t.Fatal(err)
			}
			exchange(first)
			if diff := cmp.Diff(before, k.entries(t), cmpopts.IgnoreFields(Conntrack{}, "UsedNS")); diff != "" {
				t.Errorf("entries (-before +after):\n%s", diff)
			}
			if c := k.counts(t); c.Begun != 1 || c.Clashes != 1 {
				t.Errorf("counts %+v, want one flow begun and one clash", c)
			}
		}
	})
}

// FuzzTranslate: whatever the frame, its length and its fate stay, and nothing is changed but addresses, ports and
// checksums; and a packet that is right stays right.
func FuzzTranslate(f *testing.F) {
	k := loadTranslator(f)
	for _, s := range scenes() {
		k.serve(f, &testService{}, s.protocol, s.frontend, s.backends[:]...)
		request, reply := s.request(), s.reply()
		big := request
		big.data, big.size, big.fragment = make([]byte, 100), 40, 1
		for _, w := range []segment{request, big, reply.from(s.backends[0])} {
			for _, tags := range []int{0, 1, 2} {
				w.tags = tags
				f.Add(w.frame())
			}
		}
		f.Add(request.to(s.backends[0]).about(s.router, 3, 4, 0))
		f.Add(reply.about(s.router, 3, 4, 0))
		k.run(f, ToBackend, request.frame())
	}
	for _, cases := range allCases() {
		for _, c := range cases {
			f.Add(c.frame)
		}
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		if !runnable(frame) || len(frame) > 4000 {
			return
		}
		for _, kind := range []ConntrackKind{ToBackend, ToClient} {
			ret, out := k.run(t, kind, frame)
			if ret != passed && ret != dropped {
				t.Fatalf("returned %d", ret)
			}
			changed := 0
			for i := range frame {
				if frame[i] != out[i] {
					changed++
				}
			}
			// Outer and quoted: two addresses, a port, and three checksums.
			if changed > 2*16+2+3*2 || !bytes.Equal(frame[:14], out[:14]) {
				t.Fatalf("%d bytes changed of\n%x to\n%x", changed, frame, out)
			}
			if binary.BigEndian.Uint16(frame[12:]) == ethTypeIPv4 && frame[14]>>4 == 4 {
				header := 14 + 4*int(frame[14]&0xf)
				if header <= len(frame) && header >= 34 && sum16(frame[14:header]) == 0 && sum16(out[14:header]) != 0 {
					t.Fatalf("the header's checksum broke:\n%x\n%x", frame, out)
				}
			}
		}
	})
}
