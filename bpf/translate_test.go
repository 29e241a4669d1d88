// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil"
)

var translationMirrors = []mirror{
	{"conntrack_key", reflect.TypeFor[ConntrackKey](), map[string][]string{
		"SrcIP": {"src"}, "DstIP": {"dst"}, "SrcPort": {"src_port"}, "DstPort": {"dst_port"}, "Protocol": {"protocol"},
		"Family": {"family"}, "Kind": {"kind"}, "Pad": {"pad"},
	}},
	{"conntrack", reflect.TypeFor[Conntrack](), map[string][]string{
		"Addr": {"addr"}, "Port": {"port"}, "Client": {"client"}, "Server": {"server"}, "Service": {"service"},
		"Backend": {"backend"}, "Generation": {"generation"}, "UsedNS": {"used_ns"}, "SinceNS": {"since_ns"},
	}},
	{"fragment_key", reflect.TypeFor[FragmentKey](), map[string][]string{
		"SrcIP": {"src"}, "DstIP": {"dst"}, "ID": {"id"}, "Protocol": {"protocol"}, "Family": {"family"}, "Kind": {"kind"}, "Pad": {"pad"},
	}},
	{"fragment", reflect.TypeFor[Fragment](), map[string][]string{"Addr": {"addr"}, "SinceNS": {"since_ns"}}},
	{"translated", reflect.TypeFor[Translated](), map[string][]string{
		"Requests": {"requests"}, "Replies": {"replies"}, "Errors": {"errors"}, "Fragments": {"fragments"}, "Begun": {"begun"},
		"Refused": {"refused"}, "Hairpin": {"hairpin"}, "Clashes": {"clashes"}, "Failed": {"failed"}, "Answered": {"answered"},
	}},
}

func TestTranslationMirrors(t *testing.T) {
	spec, err := LoadTranslation()
	if err != nil {
		t.Fatal(err)
	}
	types := typesOf(t, spec)
	for _, m := range translationMirrors {
		c := types[m.c]
		if c == nil {
			t.Errorf("struct %s is not in the BTF", m.c)
			continue
		}
		if uintptr(c.Size) != m.goType.Size() {
			t.Errorf("struct %s has %d bytes, %v has %d", m.c, c.Size, m.goType, m.goType.Size())
		}
		m.compare(t, "to_backend", c)
	}
}

// TestTranslationSpecs: the programs are those of TranslationPrograms; their maps are those of services, or have the sizes
// that user space counts on.
func TestTranslationSpecs(t *testing.T) {
	spec, err := LoadTranslation()
	if err != nil {
		t.Fatal(err)
	}
	services, err := LoadServices(true)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range TranslationPrograms {
		if s := spec.Programs[p.Name]; s == nil || s.Type != ebpf.SchedCLS {
			t.Errorf("%s: %+v, want a program of tc", p.Name, s)
		}
	}
	if len(spec.Programs) != len(TranslationPrograms) {
		t.Errorf("%d programs, want %d", len(spec.Programs), len(TranslationPrograms))
	}
	type shape struct {
		Type                          ebpf.MapType
		Key, Value, MaxEntries, Flags uint32
	}
	got, want := map[string]shape{}, map[string]shape{
		MapConntracks:  {ebpf.ArrayOfMaps, 4, 4, 2, 0},
		MapConntrack:   {ebpf.LRUHash, 40, 48, 131072, 0},
		MapFragments:   {ebpf.LRUHash, 40, 24, 4096, 0},
		MapTranslated:  {ebpf.PerCPUArray, 4, 80, 1, 0},
		MapTranslation: {ebpf.PerCPUArray, 4, got0(spec), 1, 0},
	}
	if spec.Maps[MapConntrack], err = ConntrackSpec(65536); err != nil {
		t.Fatal(err)
	}
	for name, m := range spec.Maps {
		got[name] = shape{m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags}
		if of := services.Maps[name]; of != nil {
			want[name] = shape{of.Type, of.KeySize, of.ValueSize, of.MaxEntries, of.Flags}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("maps (-want +got):\n%s", diff)
	}
}

// got0 is the size of what programs alone use, whatever it is.
func got0(spec *ebpf.CollectionSpec) uint32 { return spec.Maps[MapTranslation].ValueSize }

// translator is the programs, loaded, and services in their maps.
type translator struct {
	*ebpf.Collection
	conntrack                 *ebpf.Map
	services, backends, slots uint32 // how many there are
}

func loadTranslator(t testing.TB, edit ...func(*ebpf.CollectionSpec)) *translator {
	t.Helper()
	testutil.RequireRoot(t)
	spec, err := LoadTranslation()
	if err != nil {
		t.Fatal(err)
	}
	for name, size := range map[string]uint32{MapServices: 64, MapBackends: 1024, MapSlots: 1024} {
		spec.Maps[name].MaxEntries = size
	}
	for _, e := range edit {
		e(spec)
	}
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("load the programs: %+v", err)
	}
	t.Cleanup(coll.Close)
	k := &translator{Collection: coll}
	k.conntrack = k.newConntrack(t, 32768)
	mustPut(t, coll.Maps[MapConntracks], ConntrackNow, k.conntrack)
	return k
}

// newConntrack is a conntrack with room for so many flows, which nothing uses yet.
func (k *translator) newConntrack(t testing.TB, flows uint32) *ebpf.Map {
	t.Helper()
	spec, err := ConntrackSpec(flows)
	if err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMap(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return m
}

// testService is a service in the maps.
type testService struct {
	number   uint32
	frontend ServiceAddress
	affinity uint32
	backends []uint32 // their numbers
}

// serve makes a frontend lead to backends.
func (k *translator) serve(t testing.TB, s *testService, protocol uint8, frontend netip.AddrPort, backends ...netip.AddrPort) {
	t.Helper()
	if s.number == 0 {
		k.services++
		s.number, s.frontend = k.services, MakeServiceAddress(frontend.Addr(), frontend.Port(), protocol)
	}
	for _, b := range s.backends { // given up
		var was Backend
		if err := k.Maps[MapBackends].Lookup(b, &was); err != nil {
			t.Fatal(err)
		}
		was.Generation++
		mustPut(t, k.Maps[MapBackends], b, was)
	}
	s.backends = nil
	k.slots += k.slots & 1
	place := k.slots
	for _, b := range backends {
		k.backends++
		mustPut(t, k.Maps[MapBackends], k.backends, Backend{At: MakeServiceAddress(b.Addr(), b.Port(), protocol), Generation: 7, Service: s.number})
		s.backends = append(s.backends, k.backends)
		var pair [2]uint32
		if err := k.Maps[MapSlots].Lookup(k.slots/2, &pair); err != nil {
			t.Fatal(err)
		}
		pair[k.slots&1] = k.backends
		mustPut(t, k.Maps[MapSlots], k.slots/2, pair)
		k.slots++
	}
	mustPut(t, k.Maps[MapServices], s.number, Service{
		Choice: MakeChoice(place, uint32(len(backends)), false), Frontend: s.frontend, Affinity: s.affinity, Generation: 1,
	})
	mustPut(t, k.Maps[MapFrontends], s.frontend, s.number)
}

const (
	passed  = math.MaxUint32 // TC_ACT_UNSPEC
	dropped = 2              // TC_ACT_SHOT
)

// answerGrows is how much longer an answer can be than what it is to.
const answerGrows = 48

// run sends a frame through a program, and returns what came of it.
func (k *translator) run(t testing.TB, kind ConntrackKind, frame []byte) (uint32, []byte) {
	t.Helper()
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+answerGrows)}
	ret, err := k.Programs[TranslationPrograms[kind].Name].Run(&opts)
	if err != nil {
		t.Fatalf("%v: run on %x: %v", TranslationPrograms[kind].Name, frame, err)
	}
	return ret, opts.DataOut
}

// want sends a frame through a program and wants another to come out, byte for byte.
func (k *translator) want(t testing.TB, kind ConntrackKind, frame, want []byte) {
	t.Helper()
	if ret, got := k.run(t, kind, frame); ret != passed || !bytes.Equal(got, want) {
		t.Errorf("%s: returned %d\n of %x\n got %x\nwant %x", TranslationPrograms[kind].Name, int32(ret), frame, got, want)
	}
}

func (k *translator) wantDropped(t testing.TB, kind ConntrackKind, frame []byte) {
	t.Helper()
	if ret, _ := k.run(t, kind, frame); ret != dropped {
		t.Errorf("%s: returned %d for %x, want it dropped", TranslationPrograms[kind].Name, int32(ret), frame)
	}
}

func (k *translator) counts(t testing.TB) Translated {
	t.Helper()
	var perCPU []Translated
	if err := k.Maps[MapTranslated].Lookup(uint32(0), &perCPU); err != nil {
		t.Fatal(err)
	}
	return SumTranslated(perCPU)
}

// entries are all of the conntrack.
func (k *translator) entries(t testing.TB) map[ConntrackKey]Conntrack {
	t.Helper()
	all := map[ConntrackKey]Conntrack{}
	var key ConntrackKey
	var value Conntrack
	it := k.conntrack.Iterate()
	for it.Next(&key, &value) {
		all[key] = value
	}
	if err := it.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

// age makes all entries seem to have been used last so long ago.
func (k *translator) age(t testing.TB, by uint64) {
	t.Helper()
	for key, value := range k.entries(t) {
		value.UsedNS -= by
		mustPut(t, k.conntrack, key, value)
	}
}

// scene is a client, a service and its backends, of one family and protocol.
type scene struct {
	name                    string
	protocol                uint8
	client, frontend, other netip.AddrPort
	backends                [3]netip.AddrPort
	router                  netip.Addr
}

func scenes() (all []scene) {
	at := netip.MustParseAddrPort
	for _, protocol := range []uint8{ProtocolTCP, ProtocolUDP} {
		all = append(all,
			scene{
				fmt.Sprint("ipv4 ", protocol), protocol, at("10.1.1.10:40000"), at("10.96.0.10:80"), at("10.96.0.10:81"),
				[3]netip.AddrPort{at("10.2.1.10:8080"), at("10.2.1.11:8081"), at("172.18.255.254:80")}, netip.MustParseAddr("192.0.2.1"),
			},
			scene{
				fmt.Sprint("ipv6 ", protocol), protocol, at("[fd00:10:1:1::10]:40000"), at("[fd00:96::10]:80"), at("[fd00:96::10]:81"),
				[3]netip.AddrPort{at("[fd00:10:2:2::10]:8080"), at("[fd00:10:2:2:ffff:1234::1]:8081"), at("[2001:db8::7]:80")}, netip.MustParseAddr("fe80::1"),
			})
	}
	return all
}

// request is a packet of the client, and reply one of the service.
func (s scene) request() segment {
	return segment{src: s.client, dst: s.frontend, protocol: s.protocol, flags: 0x02, data: []byte("ping!")}
}

func (s scene) reply() segment {
	return segment{src: s.frontend, dst: s.client, protocol: s.protocol, flags: 0x12, data: []byte("pong")}
}

// eachScene runs a test for each family and protocol.
func eachScene(t *testing.T, f func(t *testing.T, s scene)) {
	for _, s := range scenes() {
		t.Run(s.name, func(t *testing.T) { f(t, s) })
	}
}

// TestTranslate: packets of each form get to a backend, and back, with every byte and checksum as if they had been sent so.
func TestTranslate(t *testing.T) {
	eachScene(t, func(t *testing.T, s scene) {
		k := loadTranslator(t)
		backend := s.backends[0]
		k.serve(t, &testService{}, s.protocol, s.frontend, backend)
		packets := uint64(0)
		for _, change := range []func(*segment){
			func(*segment) {},
			func(w *segment) { w.data = nil },
			func(w *segment) { w.data = bytes.Repeat([]byte{0xa5, 0x5a, 1}, 400) },
			func(w *segment) { w.unsummed = w.protocol == ProtocolUDP },
			func(w *segment) { w.options = make([]byte, 12) },
			func(w *segment) { w.options = make([]byte, 40); w.tags = 2 },
			func(w *segment) { w.tags = 1 },
			func(w *segment) { w.routed = true },
		} {
			request, reply := s.request(), s.reply()
			change(&request)
			change(&reply)
			k.want(t, ToBackend, request.frame(), request.to(backend).frame())
			k.want(t, ToClient, reply.from(backend).frame(), reply.frame())
			packets++
		}
		// All sums that there are: as the data counts up, so does the checksum, through what stands for 0.
		for n := range uint16(300) {
			request := s.request()
			request.data = binary.BigEndian.AppendUint16(nil, 0)
			base := request.transport()
			at := map[uint8]int{ProtocolTCP: 16, ProtocolUDP: 6}[s.protocol]
			sum := binary.BigEndian.Uint16(base[at:])
			binary.BigEndian.PutUint16(request.data, sum-150+n)
			k.want(t, ToBackend, request.frame(), request.to(backend).frame())
			packets++
		}
		want := Translated{Requests: packets, Replies: 8, Begun: 1}
		if got := k.counts(t); got != want {
			t.Errorf("counts %+v, want %+v", got, want)
		}
		if n := len(k.entries(t)); n != 2 {
			t.Errorf("%d entries, want 2", n)
		}
	})
}

// TestTranslateLeavesAlone: what is not for a service, cut short, or the answer to nothing, is not changed.
func TestTranslateLeavesAlone(t *testing.T) {
	eachScene(t, func(t *testing.T, s scene) {
		k := loadTranslator(t)
		k.serve(t, &testService{}, s.protocol, s.frontend, s.backends[0])
		same := func(kind ConntrackKind, frame []byte) {
			t.Helper()
			k.want(t, kind, frame, frame)
		}
		same(ToBackend, s.request().to(s.other).frame())
		same(ToBackend, s.request().to(s.backends[0]).frame())
		same(ToClient, s.reply().from(s.backends[0]).frame())
		stray := s.request()
		if s.protocol == ProtocolTCP {
			stray.flags = 0x04 // a reset begins nothing
			same(ToBackend, stray.frame())
		}
		for _, cases := range allCases() {
			for _, c := range cases {
				if runnable(c.frame) {
					same(ToBackend, c.frame)
					same(ToClient, c.frame)
				}
			}
		}
		// Headers of the transport that are cut, in packets that are whole.
		for n := range map[uint8]int{ProtocolTCP: 20, ProtocolUDP: 8}[s.protocol] {
			w := s.request()
			same(ToBackend, w.ethernet(w.around(w.transport()[:n])))
		}
		if n := len(k.entries(t)); n != 0 {
			t.Errorf("%d entries of nothing", n)
		}
		// Cut at every byte: changed as a whole, or not at all.
		request, reply := s.request(), s.reply()
		k.want(t, ToBackend, request.frame(), request.to(s.backends[0]).frame())
		for _, tags := range []int{0, 2} {
			request.tags, reply.tags = tags, tags
			full, answer := request.frame(), reply.from(s.backends[0]).frame()
			quote := request.to(s.backends[0]).about(s.router, 3, 4, 0)
			for n := range len(quote) {
				for kind, frame := range map[ConntrackKind][]byte{ToBackend: full, ToClient: answer, 2: quote} {
					if n < len(frame) && runnable(frame[:n]) {
						same(kind&1^kind>>1, frame[:n])
					}
				}
			}
		}
	})
}

// TestTranslateErrors: ICMP errors about packets of a flow say what their receiver has sent.
func TestTranslateErrors(t *testing.T) {
	eachScene(t, func(t *testing.T, s scene) {
		k := loadTranslator(t)
		backend := s.backends[0]
		k.serve(t, &testService{}, s.protocol, s.frontend, backend)
		request, reply := s.request(), s.reply()
		kinds := [][2]uint8{{3, 4}, {3, 3}, {11, 0}, {12, 0}}
		header := 20
		if s.client.Addr().Is6() {
			kinds = [][2]uint8{{2, 0}, {1, 4}, {3, 0}, {4, 0}}
			header = 40
		}
		same := request.to(backend).about(s.router, kinds[0][0], kinds[0][1], 0)
		k.want(t, ToClient, same, same) // there is no flow yet
		k.want(t, ToBackend, request.frame(), request.to(backend).frame())
		errors := uint64(0)
		for _, kind := range kinds {
			for _, quote := range []int{0, header + 8, header + 4} {
				for _, tags := range []int{0, 1} {
					request.tags, reply.tags = tags, tags
					// From a router, and from the backend itself.
					k.want(t, ToClient, request.to(backend).about(s.router, kind[0], kind[1], quote), request.about(s.router, kind[0], kind[1], quote))
					k.want(t, ToClient, request.to(backend).about(backend.Addr(), kind[0], kind[1], quote), request.about(s.frontend.Addr(), kind[0], kind[1], quote))
					// From behind the client's device, about an answer: it was sent by the service, as it seems, and goes there.
					k.want(t, ToBackend, reply.about(s.router, kind[0], kind[1], quote), reply.from(backend).about(s.router, kind[0], kind[1], quote))
					errors += 3
				}
			}
		}
		request.tags, reply.tags = 0, 0
		for _, left := range [][]byte{
			request.to(s.other).about(s.router, kinds[0][0], kinds[0][1], 0),        // another flow
			request.to(backend).about(s.router, 128, 0, 0),                          // no error
			request.to(backend).about(s.router, kinds[0][0], kinds[0][1], header+3), // without ports
			request.to(backend).about(s.router, kinds[0][0], kinds[0][1], header-1), // without a header
		} {
			k.want(t, ToClient, left, left)
		}
		// What is to another than the service only quotes it.
		elsewhere := reply.about(s.router, kinds[0][0], kinds[0][1], 0)
		if s.client.Addr().Is4() {
			copy(elsewhere[14+16:], s.router.AsSlice())
		} else {
			copy(elsewhere[14+24:], s.router.AsSlice())
		}
		k.want(t, ToBackend, elsewhere, elsewhere)
		if got := k.counts(t).Errors; got != errors {
			t.Errorf("%d errors counted, want %d", got, errors)
		}
	})
}

// TestTranslateFragments: the fragments of a datagram go where the first went. What comes before the first is left alone.
func TestTranslateFragments(t *testing.T) {
	eachScene(t, func(t *testing.T, s scene) {
		k := loadTranslator(t)
		backend := s.backends[0]
		k.serve(t, &testService{}, s.protocol, s.frontend, backend)
		for id := uint16(1); id < 4; id++ {
			request, reply := s.request(), s.reply()
			for _, w := range []*segment{&request, &reply} {
				w.data, w.id, w.size, w.fragment = bytes.Repeat([]byte{byte(id), 2, 3}, 1000), id, 1200, 1201
			}
			early := request.frame()
			k.want(t, ToBackend, early, early)
			for _, offset := range []uint16{0, 1200, 2400} {
				request.fragment, reply.fragment = offset+1, offset+1
				k.want(t, ToBackend, request.frame(), request.to(backend).frame())
				k.want(t, ToClient, reply.from(backend).frame(), reply.frame())
			}
		}
		want := Translated{Requests: 9, Replies: 9, Fragments: 12, Begun: 1}
		if got := k.counts(t); got != want {
			t.Errorf("counts %+v, want %+v", got, want)
		}
	})
}

// BenchmarkTranslate measures the programs alone, per packet, with PROG_RUN: what is to no service, and what is translated,
// to the same address, so that a packet can be sent again and again.
func BenchmarkTranslate(b *testing.B) {
	for _, s := range scenes() {
		k := loadTranslator(b)
		k.serve(b, &testService{}, s.protocol, s.frontend, s.frontend)
		request, reply := s.request().flagged(flagACK), s.reply().flagged(flagACK)
		k.want(b, ToBackend, request.frame(), request.frame())
		for _, c := range []struct {
			name  string
			kind  ConntrackKind
			frame []byte
		}{
			{"request", ToBackend, request.frame()}, {"reply", ToClient, reply.frame()},
			{"request-of-others", ToBackend, request.to(s.other).frame()}, {"reply-of-others", ToClient, reply.from(s.other).frame()},
		} {
			b.Run(s.name+"/"+c.name, func(b *testing.B) {
				const repeat = 10_000
				var spent time.Duration
				for b.Loop() {
					_, each, err := k.Programs[TranslationPrograms[c.kind].Name].Benchmark(c.frame, repeat, nil)
					if err != nil {
						b.Fatal(err)
					}
					spent += each
				}
				b.ReportMetric(float64(spent.Nanoseconds())/float64(b.N), "ns/packet")
			})
		}
	}
}
