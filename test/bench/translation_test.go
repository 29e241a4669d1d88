// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/bpf/measure"
)

// loadTranslation loads the programs that translate packets, with one service that leads to backends.
func loadTranslation(b *testing.B, protocol uint8, frontend netip.AddrPort, backends ...netip.AddrPort) *ebpf.Collection {
	b.Helper()
	spec, err := bpf.LoadTranslation()
	if err != nil {
		b.Fatal(err)
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(coll.Close)
	inner, err := bpf.ConntrackSpec(65536)
	if err != nil {
		b.Fatal(err)
	}
	conntrack, err := ebpf.NewMap(inner)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = conntrack.Close() })
	const number, generation = 1, 1
	at := bpf.MakeServiceAddress(frontend.Addr(), frontend.Port(), protocol)
	err = coll.Maps[bpf.MapConntracks].Put(bpf.ConntrackNow, conntrack)
	for i, backend := range backends {
		id := uint32(i + 1)
		err = errors.Join(err, coll.Maps[bpf.MapBackends].Put(id, bpf.Backend{
			At: bpf.MakeServiceAddress(backend.Addr(), backend.Port(), protocol), Generation: generation, Service: number,
		}))
		var pair [2]uint32
		place := uint32(i / 2)
		err = errors.Join(err, coll.Maps[bpf.MapSlots].Lookup(place, &pair))
		pair[i%2] = id
		err = errors.Join(err, coll.Maps[bpf.MapSlots].Put(place, pair))
	}
	err = errors.Join(err,
		coll.Maps[bpf.MapServices].Put(uint32(number), bpf.Service{
			Choice: bpf.MakeChoice(0, uint32(len(backends)), false), Frontend: at, Generation: generation,
		}),
		coll.Maps[bpf.MapFrontends].Put(at, uint32(number)))
	if err != nil {
		b.Fatal(err)
	}
	return coll
}

// translated sums up what the programs did.
func translated(b *testing.B, coll *ebpf.Collection) bpf.Translated {
	b.Helper()
	var perCPU []bpf.Translated
	if err := coll.Maps[bpf.MapTranslated].Lookup(uint32(0), &perCPU); err != nil {
		b.Fatal(err)
	}
	return bpf.SumTranslated(perCPU)
}

// translationBackends are ten addresses.
func translationBackends() (all []netip.AddrPort) {
	for i := range byte(10) {
		all = append(all, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 1, 1 + i}), benchPort))
	}
	return all
}

// BenchmarkTranslationPackets sends small datagrams of 1,000 flows to a service with ten backends over a veth whose other end
// translates, and compares the rate with that of a program that does nothing, in turn: of each window of frames the best of
// many rounds.
//
//	pps      translated
//	x-empty  its rate / that of the program that does nothing
//	x-other  the rate of packets that are to no service / that of the program that does nothing
func BenchmarkTranslationPackets(b *testing.B) {
	const flows = 1000
	addDevice(b)
	n := uint32(0)
	sender := newBlaster(b, device, func() uint32 {
		n++
		return 10<<24 | 1<<16 | n%flows
	})
	const port, client, server, checksum = 80, 34, 36, 40
	for i := range packetFrames {
		frame := sender.frames[i*packetBytes:]
		binary.BigEndian.PutUint16(frame[client:], 40000)
		binary.BigEndian.PutUint16(frame[server:], port)
		binary.BigEndian.PutUint16(frame[checksum:], 1) // there is one to be kept up
	}
	peer, err := netlink.LinkByName(device + "-peer")
	if err != nil {
		b.Fatal(err)
	}
	if err := netlink.LinkSetUp(peer); err != nil {
		b.Fatal(err)
	}
	to := func(last byte) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 99, 0, last}), port)
	}
	ours := loadTranslation(b, bpf.ProtocolUDP, to(1), translationBackends()...) // to(1) is where the frames go
	others := loadTranslation(b, bpf.ProtocolUDP, to(2), translationBackends()...)
	k := newLookupKernel(b)
	name := bpf.TranslationPrograms[bpf.ToBackend].Name
	programs := map[string]*ebpf.Program{
		"empty": k.Programs[measure.LookupProgMeasureEmpty], "ours": ours.Programs[name], "other": others.Programs[name],
	}
	best := map[string]*bestTimes{}
	for name := range programs {
		best[name] = new(bestTimes)
	}
	rounds := 0
	for b.Loop() {
		for range 20 {
			rounds++
			for name, program := range programs {
				l, err := link.AttachTCX(link.TCXOptions{Interface: peer.Attrs().Index, Program: program, Attach: ebpf.AttachTCXIngress})
				if err != nil {
					b.Fatal(err)
				}
				sender.blast(b, best[name])
				l.Close()
			}
		}
	}
	if got, want := translated(b, ours), (bpf.Translated{Requests: uint64(rounds * packetFrames), Begun: flows}); got != want {
		b.Fatalf("the programs did %+v, want %+v", got, want)
	}
	if got := translated(b, others); got != (bpf.Translated{}) {
		b.Fatalf("of packets that are to no service: %+v", got)
	}
	rate := func(name string) float64 { return packetFrames / best[name].sum().Seconds() }
	const what = "packets to a service over a veth, 1,000 flows: "
	measured(b, "pps", rate("ours"), goal{what: what + "rate", unit: "packets/s"})
	measured(b, "x-empty", rate("ours")/rate("empty"), goal{what: what + "rate / empty program"})
	measured(b, "x-other", rate("other")/rate("empty"), goal{what: what + "to none / empty program"})
	b.ReportMetric(0, "ns/op")
}

// BenchmarkTranslationConnect measures how many connections a second one thread makes over a veth to ten backends, by their own
// addresses and without programs, and by that of a service whose packets are translated at the other end, both ways.
//
//	x-direct  connections/s through the service / connections/s without programs, of the median of many short rounds
func BenchmarkTranslationConnect(b *testing.B) {
	const connections, rounds = 300, 101
	ends := tcpEnds(b, addresses{bpf.FamilyIPv4, 100_000})
	backends := translationBackends()
	var err error
	ends[0].ns.Do(b, func() { err = netlink.RouteAdd(&netlink.Route{Gw: ends[1].addr.AsSlice()}) })
	ends[1].ns.Do(b, func() {
		var lo netlink.Link
		if lo, err = netlink.LinkByName("lo"); err != nil {
			return
		}
		err = errors.Join(err, netlink.LinkSetUp(lo))
		for _, at := range backends {
			err = errors.Join(err, netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: at.Addr().AsSlice(), Mask: net.CIDRMask(32, 32)}}))
		}
	})
	if err != nil {
		b.Fatal(err)
	}
	frontend := netip.MustParseAddrPort("10.96.0.1:80")
	coll := loadTranslation(b, bpf.ProtocolTCP, frontend, backends...)
	client, server := &serviceBench{ns: ends[0].ns}, &serviceBench{ns: ends[1].ns}
	server.listen(b)
	through := func() time.Duration {
		defer ends[1].attach(b, coll, bpf.TranslationPrograms[:])()
		return client.connect(b, connections, func(int) unix.Sockaddr { return &unix.SockaddrInet4{Addr: frontend.Addr().As4(), Port: 80} })
	}
	direct := func() time.Duration {
		return client.connect(b, connections, func(i int) unix.Sockaddr {
			return &unix.SockaddrInet4{Addr: backends[i%len(backends)].Addr().As4(), Port: benchPort}
		})
	}
	done := 0
	for b.Loop() {
		var with, without []time.Duration
		for range rounds { // taken in turn, against the machine's moods
			without, with = append(without, direct()), append(with, through())
		}
		done += rounds * connections
		slices.Sort(with)
		slices.Sort(without)
		measured(b, "x-direct", without[rounds/2].Seconds()/with[rounds/2].Seconds(), goal{what: "connections by translated packets: rate / without"})
		measured(b, "conns/s", connections/with[rounds/2].Seconds(), goal{what: "connections by translated packets", unit: "connections/s"})
	}
	if got := translated(b, coll); got.Begun != uint64(done) || got.Refused+got.Hairpin+got.Clashes+got.Failed != 0 {
		b.Fatalf("the programs did %+v, want %d flows begun and nothing dropped", got, done)
	}
	b.ReportMetric(0, "ns/op")
}
