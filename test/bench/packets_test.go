// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/binary"
	"math/rand/v2"
	"net"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/bpf/measure"
)

const (
	packetFrames = 1 << 16
	packetBytes  = 64
	// packetWindow is how many frames are timed together: few enough that, once in some rounds, nobody else on the machine
	// comes in between.
	packetWindow = 1024
)

// mmsghdr is struct mmsghdr.
type mmsghdr struct {
	unix.Msghdr
	sent uint32
	_    uint32
}

// blaster sends prepared frames on a device, many in one system call.
type blaster struct {
	socket   int
	messages []mmsghdr
	vectors  []unix.Iovec
	frames   []byte
}

func newBlaster(b *testing.B, device string, source func() uint32) *blaster {
	b.Helper()
	nic, err := net.InterfaceByName(device)
	if err != nil {
		b.Fatal(err)
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: nic.Index}); err != nil {
		b.Fatal(err)
	}
	s := &blaster{
		socket:   fd,
		messages: make([]mmsghdr, packetFrames),
		vectors:  make([]unix.Iovec, packetFrames),
		frames:   make([]byte, packetFrames*packetBytes),
	}
	for i := range s.messages {
		frame := s.frames[i*packetBytes:][:packetBytes]
		copy(frame, []byte{2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8, 8, 0, 0x45, 0, 0, packetBytes - 14})
		frame[22], frame[23] = 64, unix.IPPROTO_UDP
		binary.BigEndian.PutUint32(frame[26:], source())
		binary.BigEndian.PutUint32(frame[30:], 10<<24|99<<16|1)
		binary.BigEndian.PutUint16(frame[38:], packetBytes-34)
		s.vectors[i] = unix.Iovec{Base: &frame[0], Len: packetBytes}
		s.messages[i].Iov, s.messages[i].Iovlen = &s.vectors[i], 1
	}
	return s
}

// bestTimes are the least that each window of frames took, of all rounds.
type bestTimes [packetFrames / packetWindow]time.Duration

func (t *bestTimes) sum() (all time.Duration) {
	for _, d := range t {
		all += d
	}
	return all
}

// blast sends every frame once and notes the times that it took, which include the programs on the other end: on a veth
// they run in the sender's system call.
func (s *blaster) blast(b *testing.B, best *bestTimes) {
	b.Helper()
	for w := range best {
		start := time.Now()
		for left := s.messages[w*packetWindow:][:packetWindow]; len(left) > 0; {
			n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(s.socket), uintptr(unsafe.Pointer(&left[0])), uintptr(len(left)), 0, 0, 0)
			if errno != 0 && errno != unix.EINTR {
				b.Fatal(errno)
			}
			if errno == 0 {
				left = left[n:]
			}
		}
		if took := time.Since(start); best[w] == 0 || took < best[w] {
			best[w] = took
		}
	}
}

// BenchmarkPackets sends small packets from random ones of 100,000 hosts over a veth whose other end has a program, and
// compares the rates with that of a program that does nothing, in turn: of each window of frames the best of many rounds.
//
//	pps        with what ships
//	x-empty    its rate / that of the program that does nothing
//	x-trie     the rate of what ships without its fast path / that of the program that does nothing
func BenchmarkPackets(b *testing.B) {
	const hosts = 100_000
	addDevice(b)
	k := newLookupKernel(b)
	k.fill(b, addresses{bpf.FamilyIPv4, hosts})
	rng := rand.New(rand.NewPCG(3, 4))
	a := addresses{bpf.FamilyIPv4, hosts}
	sender := newBlaster(b, device, func() uint32 {
		ip := a.host(rng.IntN(hosts)).As4()
		return binary.BigEndian.Uint32(ip[:])
	})
	peer, err := netlink.LinkByName(device + "-peer")
	if err != nil {
		b.Fatal(err)
	}
	if err := netlink.LinkSetUp(peer); err != nil {
		b.Fatal(err)
	}
	fast, trie := shipping(b, k, true), shipping(b, k, false)
	programs := map[string]*ebpf.Program{
		"empty": k.Programs[measure.LookupProgMeasureEmpty],
		"fast":  fast.Programs[bpf.Programs[bpf.Ingress].Name],
		"trie":  trie.Programs[bpf.Programs[bpf.Ingress].Name],
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
	for name, coll := range map[string]*ebpf.Collection{"fast": fast, "trie": trie} {
		if seen := identified(b, coll); seen != uint64(rounds*packetFrames) {
			b.Fatalf("%s: %d packets were identified of %d", name, seen, rounds*packetFrames)
		}
	}
	rate := func(name string) float64 { return packetFrames / best[name].sum().Seconds() }
	const what = "packets over a veth, 100k hosts: "
	measured(b, "pps", rate("fast"), goal{what: what + "rate", unit: "packets/s"})
	measured(b, "x-empty", rate("fast")/rate("empty"), goal{what: what + "rate / empty program", atLeast: 0.93})
	measured(b, "x-trie", rate("trie")/rate("empty"), goal{what: what + "trie alone / empty program"})
	b.ReportMetric(0, "ns/op")
}

// shipping loads the programs that ship on the filled maps, with the fast path or without.
func shipping(b *testing.B, k *lookupKernel, fast bool) *ebpf.Collection {
	b.Helper()
	spec, err := bpf.Load()
	if err != nil {
		b.Fatal(err)
	}
	maps := map[string]*ebpf.Map{bpf.MapIPCache: k.Maps[bpf.MapIPCache]}
	if fast {
		for _, name := range []string{bpf.MapHosts, bpf.MapFast, bpf.MapNetworks} {
			maps[name] = k.Maps[name]
		}
	}
	spec.Maps[bpf.MapIPCache].MaxEntries = k.Maps[bpf.MapIPCache].MaxEntries()
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: maps})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(coll.Close)
	if err := coll.Maps[bpf.MapConfig].Put(uint32(0), bpf.MakeConfig(0, false)); err != nil {
		b.Fatal(err)
	}
	return coll
}

// identified is how many packets the programs gave an identity, or had no room to say which.
func identified(b *testing.B, coll *ebpf.Collection) (n uint64) {
	b.Helper()
	counters, err := bpf.ReadCounters(coll.Maps[bpf.MapCounters], coll.Maps[bpf.MapFront])
	if err != nil {
		b.Fatal(err)
	}
	for key, value := range counters {
		if key.Verdict == bpf.Identified {
			n += value.Packets
		}
	}
	var missed []bpf.Missed
	if err := coll.Maps[bpf.MapMissed].Lookup(uint32(0), &missed); err != nil {
		b.Fatal(err)
	}
	return n + bpf.SumMissed(missed).Counts[bpf.Ingress].Packets
}
