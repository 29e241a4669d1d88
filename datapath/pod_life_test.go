// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/internal/testutil"
)

// betweenPods are the counters of packets from one pod to the other: at the device of the one, and at that of the other.
var betweenPods = []string{"ingress identified 65793 65794", "egress identified 65793 65794"}

// checkPods ends a probe from the one pod to the other: each packet came, and was identified at both devices, and there was
// no other.
func (h *podHost) checkPods(p *probe, before map[string]uint64) {
	h.t.Helper()
	p.stop()
	sent, received := p.sent.Load(), p.received.Load()
	want, got := map[string]uint64{}, map[string]uint64{}
	for _, name := range betweenPods {
		want[name] = sent
	}
	for name, n := range h.podCounts() {
		if n -= before[name]; n != 0 {
			got[name] = n
		}
	}
	h.t.Logf("%d packets sent, %d received", sent, received)
	if diff := cmp.Diff(want, got); diff != "" || sent == 0 || received != sent {
		h.t.Errorf("%d packets sent, %d received; counters (-want +got):\n%s", sent, received, diff)
	}
}

// checkPodsWithStream is checkPods where there was a stream the other way, too: nothing but what both programs of the way have
// identified, and each the same.
func (h *podHost) checkPodsWithStream(p *probe, before map[string]uint64) {
	h.t.Helper()
	p.stop()
	sent, received := p.sent.Load(), p.received.Load()
	h.t.Logf("%d packets sent, %d received", sent, received)
	if sent == 0 || received != sent {
		h.t.Errorf("%d packets sent, %d received", sent, received)
	}
	testutil.Eventually(h.t, patience, func() error { // the stream's last packets may be on their way
		got := map[string]uint64{}
		for name, n := range h.podCounts() {
			if n -= before[name]; n != 0 {
				got[name] = n
			}
		}
		there, back := got[betweenPods[0]], got["ingress identified 65794 65793"]
		want := map[string]uint64{
			"ingress identified 65793 65794": there, "egress identified 65793 65794": there,
			"ingress identified 65794 65793": back, "egress identified 65794 65793": back,
		}
		if diff := cmp.Diff(want, got); diff != "" || there < sent || back == 0 {
			return fmt.Errorf("of %d packets and a stream (-want +got):\n%s", sent, diff)
		}
		return nil
	})
}

// wantPodLinks waits until the devices have both programs, and returns what proves that they stay the same.
func (h *podHost) wantPodLinks(devices ...string) (ids []string) {
	h.t.Helper()
	testutil.Eventually(h.t, patience, func() error {
		ids = nil
		links := h.links()
		for _, device := range devices {
			for _, p := range bpf.PodPrograms {
				if l := links[linkPinName(device, p.Name)]; l != nil {
					ids = append(ids, fmt.Sprintf("%s link %d runs %d", linkPinName(device, p.Name), l.ID, l.Program))
				}
			}
			if h.filterMode {
				ids = append(ids, h.filters(device)...)
			}
		}
		if len(ids) != 2*len(devices) {
			return fmt.Errorf("programs of %v: %q", devices, ids)
		}
		return nil
	})
	slices.Sort(ids)
	return ids
}

// Packets between pods, and a stream, come and are identified, all of them, while an agent of two capabilities is killed at random instants and
// started again. Its programs stay the same.
//
// invariant 1
// lesson: A1, K2
func TestPodsSurviveKills(t *testing.T) {
	kills := 4
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		kills = 200
	}
	for mode, withoutTCX := range podModes() {
		t.Run(mode, func(t *testing.T) {
			h := newPodHost(t, withoutTCX)
			start := func() *nobody { return h.startNobody(t, withoutTCX, podsEnv+"=yes") }
			n := start()
			n.await(3)
			before := h.wantPodLinks("lxca", "lxcb")
			counts := h.podCounts()
			p := h.probeFrom(h.a.ns, podA, h.b.ns, podB)
			finish := h.startStream(h.b.ns, podB, h.a.ns, podA)
			p.wait(100)
			for range kills {
				if err := n.cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				_ = n.cmd.Wait() // it was killed
				p.wait(20)
				n = start()
				time.Sleep(rand.N(300 * time.Millisecond)) // whatever it is about then
			}
			testutil.Eventually(t, patience, func() error { // the last one has the lock
				if dir, err := lockPinDir(h.cfg.BPFFS + "/weft"); !errors.Is(err, ErrInUse) {
					if err == nil {
						dir.Close()
					}
					return fmt.Errorf("no agent runs: %w", err)
				}
				return nil
			})
			n.await(3)
			p.wait(100)
			finish()
			h.checkPodsWithStream(p, counts)
			if diff := cmp.Diff(before, h.wantPodLinks("lxca", "lxcb")); diff != "" {
				t.Errorf("programs at the devices (-before +after):\n%s", diff)
			}
			n.in.Close()
			if err := n.cmd.Wait(); err != nil {
				t.Errorf("the last agent: %v", err)
			}
		})
	}
}

// Pods come and go by the dozen, some with their devices and some without. Two that stay talk all the while. In the end
// exactly those devices have programs that are to have them.
func TestPodChurn(t *testing.T) {
	const steps = 6
	pods := 120
	if !hasTCX() {
		pods = 40 // filters are many times slower to come and go, and such kernels run in slow machines
	}
	seed := rand.Uint64()
	t.Log("seed", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	h := newPodHost(t, !hasTCX())
	far := testutil.NewNetNS(t)
	addr := func(n int) string { return fmt.Sprintf("10.1.2.%d", n) }
	device := func(n int) string { return fmt.Sprintf("pod%d", n) }
	add := func(n int) []string {
		return []string{
			fmt.Sprintf("link add %s type veth peer name %s netns %s", device(n), device(n), far.Path()),
			fmt.Sprintf("link set %s up", device(n)), fmt.Sprintf("route add %s/32 dev %s", addr(n), device(n)),
		}
	}
	var lines []string
	for n := range pods {
		lines = append(lines, add(n)...)
	}
	h.batch(lines)
	h.pods.set(true, podA, podB)
	a := h.start()
	a.wantPodDevices("lxca", "lxcb")
	counts, p := h.podCounts(), h.probeFrom(h.a.ns, podA, h.b.ns, podB)
	var want []string
	for range steps {
		want = []string{"lxca", "lxcb"}
		known := []string{podA, podB}
		var lines []string
		for n := range pods {
			if random.IntN(60) == 0 {
				lines = append(append(lines, "link del "+device(n)), add(n)...)
			}
			if random.IntN(3) > 0 {
				want, known = append(want, device(n)), append(known, addr(n))
			}
		}
		h.pods.set(true, known...)
		h.batch(lines)
		p.wait(20)
	}
	slices.Sort(want)
	a.wantPodDevices(want...)
	h.wantPodLinks(want...)
	report, err := a.Verify(t.Context(), false)
	if err != nil || len(report.Differences) != 0 {
		t.Errorf("in the end: %+v, %v", report, err)
	}
	if s := a.Status().Pods; s.Addresses != len(want) || len(s.Missing) != 0 {
		t.Errorf("status %d addresses, missing %v, want %d and none", s.Addresses, s.Missing, len(want))
	}
	if n := len(listDir(t, h.cfg.BPFFS+"/weft/links")); !h.filterMode && n != 2*len(want)+2 {
		t.Errorf("%d pinned links, want those of %d pods and of eth0", n, len(want))
	}
	for n := range pods {
		if slices.Contains(want, device(n)) {
			continue
		}
		if left := h.filters(device(n)); len(left) != 0 {
			t.Errorf("%s has %v", device(n), left)
		}
	}
	h.checkPods(p, counts)
	h.pods.set(true)
	a.wantPodDevices()
	allowed, err := (&examiner{pinned: &pinDir{path: h.cfg.BPFFS + "/weft"}}).podAddresses()
	if err != nil || len(allowed) != 0 {
		t.Errorf("without pods, %v may send, %v", allowed, err)
	}
}
