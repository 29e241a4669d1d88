// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
)

// marker runs frames that have a mark: at is where it stands in a struct __sk_buff.
type marker struct {
	*kernel
	size, at int
}

func newMarker(t *testing.T) marker {
	t.Helper()
	m := marker{kernel: loadKernel(t)}
	skb := typesOf(t, specs(t)["from_netdev"])["__sk_buff"]
	for _, member := range skb.Members {
		if member.Name == "mark" {
			m.size, m.at = int(skb.Size), int(member.Offset.Bytes())
			return m
		}
	}
	t.Fatal("struct __sk_buff has no mark")
	return m
}

// marked runs a frame with a mark and returns the mark that it has then.
func (m marker) marked(t *testing.T, d Direction, frame []byte, mark uint32) uint32 {
	t.Helper()
	context, out := make([]byte, m.size), make([]byte, m.size)
	binary.NativeEndian.PutUint32(context[m.at:], mark)
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)), Context: context, ContextOut: out}
	if ret, err := m.program(d).Run(&opts); err != nil || ret != math.MaxUint32 {
		t.Fatalf("run: %d, %v", int32(ret), err)
	}
	return binary.NativeEndian.Uint32(out[m.at:])
}

// TestMark has the bytes of the mark in each layout; Cilium's as in format.md §D.3.
//
// spec: D.3
func TestMark(t *testing.T) {
	k := newMarker(t)
	mustPut(t, k.Maps[MapIPCache], MakeIPCacheKey(netip.MustParsePrefix("10.128.0.1/32")), MakeIPCacheValue(128<<16|5, netip.Addr{}, 0, 0))
	mustPut(t, k.Maps[MapIPCache], MakeIPCacheKey(netip.MustParsePrefix("10.129.0.1/32")), MakeIPCacheValue(257<<15|1<<24, netip.Addr{}, 0, 0))
	from := func(src string) []byte { return plain(src) }
	for _, tc := range []struct {
		config       Config
		direction    Direction
		frame        []byte
		before, want uint32
	}{
		{Config{}, Ingress, from("10.2.1.10"), 0xabcdef01, 0xabcdef01},
		{Config{Mark: MarkCilium}, Ingress, from("10.2.1.10"), 0, 0x01010f02},
		{Config{Mark: MarkCilium}, Ingress, from("10.2.1.10"), 0xffffffff, 0x0101ff02},
		{Config{Mark: MarkCilium}, Ingress, from("10.1.1.10"), 0x0000f000, 0x0101ff01},
		{Config{Mark: MarkCilium}, Ingress, from("198.51.100.7"), 0, 0x00020f00},
		{Config{Mark: MarkCilium, DualStack: 1}, Ingress, from("198.51.100.7"), 0, 0x00090f00},
		{Config{Mark: MarkCilium}, Ingress, from("10.128.0.1"), 0x1234, 0x1234}, // it would collide
		{Config{Mark: MarkCilium}, Egress, from("10.2.1.10"), 0x1234, 0x1234},
		{Config{Mark: MarkCilium}, Ingress, ethernet(0x0806, make([]byte, 28)), 0x1234, 0x1234},
		{Config{Mark: MarkShifted, MarkMask: 0x00ffffff}, Ingress, from("10.2.1.10"), 0xff000000, 0xff020101},
		{Config{Mark: MarkShifted, MarkMask: 0xffff0000, MarkShift: 16}, Ingress, from("10.2.1.10"), 0x1234, 0x01011234},
		{Config{Mark: MarkShifted, MarkMask: 0x0ff00000, MarkShift: 20}, Ingress, from("10.2.1.10"), 0xf00fffff, 0xf01fffff},
		{Config{Mark: MarkShifted, MarkMask: 0}, Ingress, from("10.2.1.10"), 0x1234, 0x1234},
	} {
		k.configure(t, tc.config)
		if got := k.marked(t, tc.direction, tc.frame, tc.before); got != tc.want {
			t.Errorf("%+v, %v: mark %#08x of %#08x, want %#08x", tc.config, tc.direction, got, tc.before, tc.want)
		}
	}
}

// TestMarkKeepsOtherBits tries masks, shifts and marks at random.
func TestMarkKeepsOtherBits(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 3))
	k := newMarker(t)
	for range 500 {
		c := Config{Mark: Mark(rng.IntN(4)), MarkMask: rng.Uint32(), MarkShift: uint8(rng.IntN(32))}
		k.configure(t, c)
		before := rng.Uint32()
		got := k.marked(t, Ingress, plain("10.2.1.10"), before)
		mask := map[Mark]uint32{MarkShifted: c.MarkMask, MarkCilium: CiliumMarkMask}[c.Mark]
		if (got^before)&^mask != 0 {
			t.Fatalf("%+v: mark %#x became %#x: bits outside of %#x", c, before, got, mask)
		}
		if want := uint32(131329) << c.MarkShift & mask; c.Mark == MarkShifted && got&mask != want {
			t.Fatalf("%+v: mark %#x became %#x, want %#x in the mask", c, before, got, want)
		}
	}
}

// TestOverlayFrames runs every frame, cut at every byte, through the programs of the overlay. Without a tunnel they may
// pass none: what comes in is from nowhere, and what goes out is passed if there is an endpoint alone.
//
// lesson: K8
func TestOverlayFrames(t *testing.T) {
	for name, endpoint := range map[string]netip.Addr{
		"none": {}, "IPv4": netip.MustParseAddr("172.18.2.1"), "IPv6": netip.MustParseAddr("fd00:18:2::1"),
	} {
		for _, underlay6 := range []uint8{0, 1} {
			t.Run(fmt.Sprintf("endpoint %s, IPv6 below %d", name, underlay6), func(t *testing.T) {
				k := loadKernel(t)
				for prefix, id := range identities {
					mustPut(t, k.Maps[MapIPCache], MakeIPCacheKey(prefix), MakeIPCacheValue(id, endpoint, 0, 0))
				}
				k.configure(t, Config{FlowSample: 1, Underlay6: underlay6})
				reachable := endpoint.IsValid() && endpoint.Is6() == (underlay6 == 1)
				for _, cases := range allCases() {
					for _, c := range cases {
						for n := range len(c.frame) + 1 {
							if runnable(c.frame[:n]) {
								k.checkOverlay(t, c.frame[:n], reachable)
							}
						}
					}
				}
			})
		}
	}
}

// checkOverlay wants of both programs what the model says.
func (k *kernel) checkOverlay(t *testing.T, frame []byte, reachable bool) {
	t.Helper()
	const shot = 2
	for d, p := range OverlayPrograms {
		want := k.model.event(Direction(d), frame, false)
		known := want.Verdict == Identified || want.Verdict == World && want.Destination() == identityless
		ret := uint32(shot)
		switch {
		case want.Verdict.Addressless():
		case Direction(d) == Ingress:
			want.Verdict = WrongNode
		case known && reachable:
			want.Verdict, ret = Identified, math.MaxUint32
		default:
			want.Verdict = NoEndpoint
		}
		got, err := k.Programs[p.Name].Run(&ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame))})
		if err != nil {
			t.Fatalf("%s on %x: %v", p.Name, frame, err)
		}
		event := k.next(t)
		want.Mode, want.KtimeNS, want.IfIndex = Overlay, event.KtimeNS, event.IfIndex
		if got != ret || event != want {
			t.Fatalf("%s on %x: returned %d, want %d\n got %+v\nwant %+v", p.Name, frame, int32(got), int32(ret), event, want)
		}
	}
}
