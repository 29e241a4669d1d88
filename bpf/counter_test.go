// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"math"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
)

// plain is a TCP packet from an address to west.
func plain(src string) []byte {
	return ethernet(ethTypeIPv4, v4{src: netip.MustParseAddr(src), dst: west4, protocol: ProtocolTCP, ihl: -1}.with(tcp()))
}

// TestCounters sends packets of every verdict and both directions and wants exactly their counts and bytes.
func TestCounters(t *testing.T) {
	k := loadKernel(t)
	k.configure(t, MakeConfig(0, true))
	arp, bad := ethernet(0x0806, make([]byte, 28)), ethernet(ethTypeCTag, vlan(1, ethTypeIPv6, nil))
	east, large := plain("10.1.1.10"), append(plain("10.1.1.10"), make([]byte, 1000)...)
	for _, step := range []struct {
		direction Direction
		times     int
		frame     []byte
	}{
		{Ingress, 3, east}, {Ingress, 2, large}, {Ingress, 5, plain("198.51.100.7")}, {Ingress, 1, longChain()},
		{Ingress, 4, arp}, {Ingress, 6, bad}, {Egress, 7, east}, {Egress, 8, arp}, {Egress, 9, bad},
	} {
		k.repeat(t, step.direction, step.times, step.frame)
	}
	n := func(b []byte) uint64 { return uint64(len(b)) }
	want := map[CounterKey]CounterValue{
		{SrcIdentity: 65793, DstIdentity: 131329, Direction: Ingress, Verdict: Identified}: {6, 3*n(east) + 2*n(large) + n(longChain())},
		{SrcIdentity: 9, DstIdentity: 131329, Direction: Ingress, Verdict: World}:          {5, 5 * n(east)},
		{Direction: Ingress, Verdict: NotIP}:                                               {4, 4 * n(arp)},
		{Direction: Ingress, Verdict: Malformed}:                                           {6, 6 * n(bad)},
		{SrcIdentity: 65793, DstIdentity: 131329, Direction: Egress, Verdict: Identified}:  {7, 7 * n(east)},
		{Direction: Egress, Verdict: NotIP}:                                                {8, 8 * n(arp)},
		{Direction: Egress, Verdict: Malformed}:                                            {9, 9 * n(bad)},
	}
	if diff := cmp.Diff(want, k.counters(t)); diff != "" {
		t.Errorf("counters (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(Missed{}, k.missed(t)); diff != "" {
		t.Errorf("missed (-want +got):\n%s", diff)
	}
}

// TestCountersFull: a full map goes on counting the keys that it has; packets with other keys are counted in MapMissed,
// until there is room again.
//
// lesson: K1
func TestCountersFull(t *testing.T) {
	k := loadKernel(t, func(spec *ebpf.CollectionSpec) {
		spec.Maps[MapCounters].MaxEntries = 2
		spec.Maps[MapFront].MaxEntries = 1 // whose line no key of this test has
	})
	k.configure(t, MakeConfig(0, false))
	known, world, third := plain("10.1.1.10"), plain("198.51.100.7"), plain("10.1.1.11")
	k.repeat(t, Ingress, 2, known)
	k.repeat(t, Ingress, 3, world)
	k.repeat(t, Ingress, 4, third)
	k.repeat(t, Egress, 5, third)
	k.repeat(t, Ingress, 6, known)
	size := uint64(len(known))
	want := map[CounterKey]CounterValue{
		{SrcIdentity: 65793, DstIdentity: 131329, Direction: Ingress, Verdict: Identified}: {8, 8 * size},
		{SrcIdentity: 2, DstIdentity: 131329, Direction: Ingress, Verdict: World}:          {3, 3 * size},
	}
	if diff := cmp.Diff(want, k.counters(t)); diff != "" {
		t.Errorf("counters (-want +got):\n%s", diff)
	}
	missed := Missed{Counts: [2]CounterValue{{4, 4 * size}, {5, 5 * size}}}
	if diff := cmp.Diff(missed, k.missed(t)); diff != "" {
		t.Errorf("missed (-want +got):\n%s", diff)
	}

	k.clear(t)
	k.repeat(t, Ingress, 7, third)
	want = map[CounterKey]CounterValue{
		{SrcIdentity: 65800, DstIdentity: 131329, Direction: Ingress, Verdict: Identified}: {7, 7 * size},
	}
	if diff := cmp.Diff(want, k.counters(t)); diff != "" {
		t.Errorf("counters after there was room (-want +got):\n%s", diff)
	}
}

// TestSampling: none at 0, every packet at 1, about one in N at random otherwise; the setting counts from the next packet.
// TestCountersInFront: of more keys than MapFront has room for, every packet is counted once, wherever, and what readers see
// meanwhile never goes back and never has a key that no packet had.
func TestCountersInFront(t *testing.T) {
	const keys, rounds = 3000, 3
	k := loadKernel(t)
	k.configure(t, MakeConfig(0, false))
	want := map[CounterKey]CounterValue{}
	frames := make([][]byte, keys)
	for i := range frames {
		src := netip.AddrFrom4([4]byte{10, 77, byte(i >> 8), byte(i)})
		identity := uint32(1<<20 + i*i)
		mustPut(t, k.Maps[MapIPCache], MakeIPCacheKey(netip.PrefixFrom(src, 32)), IPCacheValue{Identity: identity})
		frames[i] = plain(src.String())
		key := CounterKey{SrcIdentity: identity, DstIdentity: 131329, Direction: Ingress, Verdict: Identified}
		want[key] = CounterValue{rounds, uint64(rounds * len(frames[i]))}
	}
	done, reader := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(reader)
		for last, ended := map[CounterKey]CounterValue{}, false; !ended; {
			select {
			case <-done:
				ended = true
			default:
			}
			now, err := ReadCounters(k.Maps[MapCounters], k.Maps[MapFront])
			if err != nil {
				t.Error(err)
				return
			}
			for key, value := range now {
				if most := want[key]; value.Packets > most.Packets || value.Bytes > most.Bytes {
					t.Errorf("%+v was counted %+v, of %+v", key, value, most)
				}
			}
			for key, value := range last {
				if v := now[key]; v.Packets < value.Packets || v.Bytes < value.Bytes {
					t.Errorf("%+v was counted %+v and then %+v", key, value, v)
				}
			}
			last = now
		}
	}()
	defer func() { <-reader }()
	defer close(done)
	for range rounds {
		for _, frame := range frames {
			k.repeat(t, Ingress, 1, frame)
		}
	}
	if diff := cmp.Diff(want, k.counters(t)); diff != "" {
		t.Errorf("counters (-want +got):\n%s", diff)
	}
	behind, err := ReadCounters(k.Maps[MapCounters], nil)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(behind); n == 0 || n == keys {
		t.Errorf("%d of %d keys are counted in %s: the front has room for %d", n, keys, MapCounters, 2*k.Maps[MapFront].MaxEntries())
	}
	if diff := cmp.Diff(Missed{}, k.missed(t)); diff != "" {
		t.Errorf("missed (-want +got):\n%s", diff)
	}
}

func TestSampling(t *testing.T) {
	k := loadKernel(t)
	frame := plain("10.1.1.10")
	for _, c := range []struct{ n, least uint32 }{
		{0, 5_000}, {1, 5_000}, {2, 10_000}, {100, 200_000}, {1 << 31, 10_000}, {0, 5_000},
	} {
		n := c.n
		k.clear(t)
		k.configure(t, MakeConfig(n, false))
		if _, err := k.program(Ingress).Run(&ebpf.RunOptions{Data: frame, Repeat: c.least}); err != nil {
			t.Fatal(err)
		}
		packets := k.counters(t)[CounterKey{SrcIdentity: 65793, DstIdentity: 131329, Direction: Ingress, Verdict: Identified}].Packets
		mean, off := 0.0, 0.0
		if n > 0 {
			p := 1 / float64(n)
			mean = float64(packets) * p
			off = 10 * math.Sqrt(mean*(1-p)) // standard deviations
		}
		if got := float64(k.drain(t)); math.Abs(got-mean) > off {
			t.Errorf("1 in %d: %v events of %d packets, want %v, give or take %v", n, got, packets, mean, off)
		}
	}
	if diff := cmp.Diff(Missed{}, k.missed(t)); diff != "" {
		t.Errorf("missed (-want +got):\n%s", diff)
	}
}

// TestSamplingDoesNotChangeCounters: what is counted does not depend on what is sampled.
func TestSamplingDoesNotChangeCounters(t *testing.T) {
	k := loadKernel(t)
	var counts []map[CounterKey]CounterValue
	for _, sample := range []uint32{0, 1} {
		k.configure(t, MakeConfig(sample, false))
		for _, cases := range allCases() {
			for _, c := range cases {
				k.run(t, Ingress, c.frame, nil)
				k.run(t, Egress, c.frame, nil)
			}
		}
		counts = append(counts, k.counters(t))
		k.clear(t)
	}
	if diff := cmp.Diff(counts[0], counts[1]); diff != "" {
		t.Errorf("counters (-not sampled +sampled):\n%s", diff)
	}
}

// TestEventsFull: what the ring buffer has no room for is counted, by direction, and comes again once it was read.
func TestEventsFull(t *testing.T) {
	k := loadKernel(t, func(spec *ebpf.CollectionSpec) { spec.Maps[MapEvents].MaxEntries = 4096 })
	frame := plain("10.1.1.10")
	k.repeat(t, Ingress, 1000, frame)
	read := k.drain(t)
	if read == 0 || read >= 1000 {
		t.Fatalf("read %d events of 1000 from a ring of 4096 bytes", read)
	}
	var want Missed
	want.Events[Ingress] = CounterValue{1000 - read, (1000 - read) * uint64(len(frame))}
	if diff := cmp.Diff(want, k.missed(t)); diff != "" {
		t.Errorf("missed (-want +got):\n%s", diff)
	}
	k.run(t, Egress, frame, nil)
	if got := k.drain(t); got != 1 {
		t.Errorf("read %d events after there was room, want 1", got)
	}
	k.repeat(t, Egress, 1000, frame)
	want.Events[Egress] = CounterValue{1000 - read, (1000 - read) * uint64(len(frame))}
	if got := k.drain(t); got != read {
		t.Errorf("read %d events, want as many as before: %d", got, read)
	}
	if diff := cmp.Diff(want, k.missed(t)); diff != "" {
		t.Errorf("missed (-want +got):\n%s", diff)
	}
}

// TestEventFields checks what the model does not know: time, device and length.
func TestEventFields(t *testing.T) {
	k := loadKernel(t)
	frame := append(plain("10.1.1.10"), bytes.Repeat([]byte{0}, 100)...)
	first, second := k.check(t, Ingress, frame), k.check(t, Ingress, frame)
	if second.KtimeNS <= first.KtimeNS {
		t.Errorf("the second event is of %d ns, the first of %d", second.KtimeNS, first.KtimeNS)
	}
	if first.IfIndex != 1 {
		t.Errorf("the device is %d, want 1, the loopback", first.IfIndex)
	}
	if first.Length != uint32(len(frame)) {
		t.Errorf("the length is %d, want %d", first.Length, len(frame))
	}
}
