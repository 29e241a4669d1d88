// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"fmt"
	"math"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
)

// podDevice is the loopback device, which PROG_RUN gives its packets where it is not told another.
const podDevice = 1

// checkPod wants of both programs of pods' devices what the model says. With a context, the frame is a GSO packet.
func (k *kernel) checkPod(t *testing.T, frame []byte, own map[netip.Addr]bool, context any) {
	t.Helper()
	const shot = 2
	for d, p := range PodPrograms {
		want := k.model.event(Direction(d), frame, context != nil)
		want.Mode, want.IfIndex = Pod, podDevice
		ret := uint32(math.MaxUint32)
		src := want.Source()
		free := src.IsUnspecified() || src.Is6() && src.IsLinkLocalUnicast()
		if Direction(d) == Ingress && !want.Verdict.Addressless() && !own[src] && !free && k.model.config.PodCheck != PodCheckOff {
			want.Verdict = Spoofed
			if k.model.config.PodCheck == PodCheckDrop {
				ret = shot
			}
		}
		out := make([]byte, len(frame))
		got, err := k.Programs[p.Name].Run(&ebpf.RunOptions{Data: frame, DataOut: out, Context: context})
		if err != nil {
			t.Fatalf("%s on %x: %v", p.Name, frame, err)
		}
		event := k.next(t)
		want.KtimeNS = event.KtimeNS
		if got != ret || event != want || !bytes.Equal(out, frame) {
			t.Fatalf("%s on %x: returned %d and %x, want %d\n got %+v\nwant %+v", p.Name, frame, int32(got), out, int32(ret), event, want)
		}
	}
}

// TestPodFrames runs every frame, cut at every byte, through the programs of pods' devices, with each way to treat packets
// of others: what is not the pod's is told, counted and, if that is wanted, dropped, and nothing else is.
//
// lesson: C7
func TestPodFrames(t *testing.T) {
	own := map[netip.Addr]bool{netip.MustParseAddr("10.1.1.10"): true, netip.MustParseAddr("fd00:10:1:1::10"): true}
	for _, check := range []PodCheck{PodCheckOff, PodCheckCount, PodCheckDrop} {
		t.Run(fmt.Sprint("check ", check), func(t *testing.T) {
			k := loadKernel(t)
			k.configure(t, Config{FlowSample: 1, PodCheck: check})
			for ip := range own {
				mustPut(t, k.Maps[MapPods], MakePodKey(podDevice, ip), PodValue)
			}
			// The same address at another device says nothing of this one.
			mustPut(t, k.Maps[MapPods], MakePodKey(podDevice+1, netip.MustParseAddr("10.2.1.10")), PodValue)
			for _, cases := range allCases() {
				for _, c := range cases {
					for n := range len(c.frame) + 1 {
						if runnable(c.frame[:n]) {
							k.checkPod(t, c.frame[:n], own, nil)
						}
					}
				}
			}
			for _, source := range []string{"0.0.0.0", "10.1.1.10", "10.1.1.11", "10.2.1.10", "169.254.1.1"} {
				k.checkPod(t, plain(source), own, nil)
			}
			for _, source := range []string{"::", "fe80::1", "febf::1", "fec0::1", "fd00:10:1:1::10", "fd00:10:1:1::11", "::ffff:10.1.1.10"} {
				head := v6{src: netip.MustParseAddr(source), dst: west6, next: ProtocolUDP}
				k.checkPod(t, ethernet(ethTypeIPv6, head.with(udp())), own, nil)
			}
			for _, frame := range superPackets() {
				k.checkPod(t, frame, own, gsoContext(t, 1400))
			}
		})
	}
}
