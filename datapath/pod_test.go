// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// fakePods are pods that a test makes known.
type fakePods struct {
	mu       sync.Mutex
	all      []netip.Addr
	complete bool
	changed  chan struct{}
}

func (p *fakePods) set(complete bool, addrs ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all, p.complete = nil, complete
	for _, a := range addrs {
		p.all = append(p.all, netip.MustParseAddr(a))
	}
	if p.changed != nil {
		close(p.changed)
	}
	p.changed = make(chan struct{})
}

func (p *fakePods) Addresses() ([]netip.Addr, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all, p.complete
}

func (p *fakePods) Changed() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changed
}

// podHost is a host with two pods: a, behind a veth that the route to it leads to, and b, behind a bridge.
type podHost struct {
	*testHost
	pods *fakePods
	a, b *testHost // no agents run there
}

const (
	podA, podA6, podB = "10.1.1.10", "fd00:10:1:1::10", "10.1.1.11"
	idA, idB          = identity.ID(65793), identity.ID(65794)
)

func newPodHost(t *testing.T, withoutTCX bool) *podHost {
	t.Helper()
	h := &podHost{testHost: newTestHost(t), pods: &fakePods{}}
	h.filterMode, h.cfg.withoutTCX = withoutTCX, withoutTCX
	h.ns.Do(t, func() {
		for _, file := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
			if err := os.WriteFile("/proc/sys/net/"+file, []byte("1"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	})
	h.ip("link add br0 type bridge")
	h.ip("addr add 10.1.1.1/32 dev br0")
	h.ip("link set br0 up")
	h.a = h.addPod("lxca", "lxca", podA, podA6)
	h.b = h.addPod("lxcb", "br0", podB)
	h.ip("link set lxcb master br0")
	h.cfg.Pods = h.pods
	h.cfg.IPs.Apply([]ipcache.Op{upsert(podA+"/32", idA), upsert(podA6+"/128", idA), upsert(podB+"/32", idB)})
	return h
}

// addPod makes a pod behind a veth; the routes to its addresses lead to the device via.
func (h *podHost) addPod(device, via string, addrs ...string) *testHost {
	pod := &testHost{t: h.t, ns: testutil.NewNetNS(h.t)}
	h.ip("link add " + device + " type veth peer name eth0 netns " + pod.ns.Path())
	if device == via {
		h.ip("addr add 10.1.1.1/32 dev " + device)
		h.ip("addr add fd00:10:1:1::1/128 nodad dev " + device)
	}
	h.ip("link set " + device + " up")
	for _, addr := range addrs {
		suffix, router := "/32", "10.1.1.1"
		if strings.Contains(addr, ":") {
			suffix, router = "/128", "fd00:10:1:1::1"
		}
		pod.ip("addr add " + addr + suffix + " dev eth0" + map[string]string{"/128": " nodad"}[suffix])
		pod.ip("link set eth0 up")
		pod.ip("route add " + router + suffix + " dev eth0")
		pod.ip("route add default via " + router + map[string]string{"/128": " dev eth0"}[suffix])
		h.ip("route add " + addr + suffix + " dev " + via)
	}
	return pod
}

// podCounts sums the counters of pods' devices, without what the kernels send by themselves: ARP, IPv6 of the link, and
// multicast from addresses of the host.
func (h *podHost) podCounts() map[string]uint64 {
	h.t.Helper()
	c, err := OpenCounters(h.cfg.BPFFS)
	if err != nil {
		h.t.Fatal(err)
	}
	defer c.Close()
	list, err := c.List()
	if err != nil {
		h.t.Fatal(err)
	}
	sums := map[string]uint64{}
	for _, n := range list {
		own := n.Verdict == bpf.NotIP || n.Source == identity.WorldIPv6 || n.Destination == identity.WorldIPv6 ||
			n.Verdict == bpf.World && n.Source == identity.WorldIPv4 && n.Destination == identity.WorldIPv4
		if n.Mode == bpf.Pod && !own {
			sums[fmt.Sprintf("%v %v %d %d", n.Direction, n.Verdict, n.Source, n.Destination)] += n.Packets
		}
	}
	return sums
}

// wantPodCounts waits until counters have grown by at least one since before, and fails if one of the others has grown.
func (h *podHost) wantPodCounts(send func(), grown ...string) {
	h.t.Helper()
	before := h.podCounts()
	send()
	testutil.Eventually(h.t, patience, func() error {
		var got []string
		for name, n := range h.podCounts() {
			if n > before[name] {
				got = append(got, name)
			}
		}
		slices.Sort(got)
		slices.Sort(grown)
		if diff := cmp.Diff(grown, got); diff != "" {
			return fmt.Errorf("counters that have grown (-want +got):\n%s", diff)
		}
		return nil
	})
}

// podDevices are the devices of pods in the status that have both their programs.
func (a *agent) podDevices() (attached []string) {
	if s := a.Status().Pods; s != nil {
		for _, d := range s.Devices {
			if len(d.Programs) == 2 && allAttached([]DeviceStatus{d}) {
				attached = append(attached, d.Name)
			}
		}
	}
	slices.Sort(attached)
	return attached
}

func (a *agent) wantPodDevices(want ...string) {
	a.h.t.Helper()
	testutil.Eventually(a.h.t, patience, func() error {
		if diff := cmp.Diff(want, a.podDevices()); diff != "" {
			return fmt.Errorf("pods' devices with programs (-want +got):\n%s\nstatus %+v", diff, a.Status().Pods)
		}
		return nil
	})
}

// podModes are the ways to attach that the kernel has.
func podModes() map[string]bool {
	if hasTCX() {
		return map[string]bool{"links": false, "filters": true}
	}
	return map[string]bool{"filters": true}
}

// Two pods of one node talk: both ends are known at both devices, whether the route leads to the device or to a bridge.
// What is not a pod's own is told, and dropped if that is wanted. Pods come and go while the agent runs.
func TestPods(t *testing.T) {
	for name, withoutTCX := range podModes() {
		t.Run(name, func(t *testing.T) {
			h := newPodHost(t, withoutTCX)
			h.pods.set(true, podA, podA6, podB, "10.1.1.99", "172.18.2.1", "172.18.1.1")
			h.cfg.MaxEntries = 1000
			a := h.start()
			h.wantEntries(map[string]identity.ID{podA + "/32": idA, podA6 + "/128": idA, podB + "/32": idB})
			a.wantPodDevices("lxca", "lxcb")
			var missing []string
			for _, m := range a.Status().Pods.Missing {
				missing = append(missing, m.Address.String()+": "+m.Reason)
			}
			for i, want := range []string{"10.1.1.99: ", "172.18.1.1: ", "172.18.2.1: the route to it leads to eth0, which is no pod's"} {
				if i >= len(missing) || !strings.HasPrefix(missing[i], want) {
					t.Fatalf("pods without device %q, want %q at %d", missing, want, i)
				}
			}
			if s := a.Status().Pods; s.Addresses != 3 || s.Check != PodCheckCount || len(missing) != 3 {
				t.Errorf("status %+v, want 3 addresses, count, and 3 missing", s)
			}
			if got := a.verify(false); len(got) != 0 {
				t.Errorf("differences where there are none: %v", got)
			}

			between := []string{"ingress identified 65793 65794", "egress identified 65793 65794"}
			h.wantPodCounts(func() { h.a.sendTo(podA, podB+":5678", []byte("hello")) },
				append(between, "ingress identified 65794 65793", "egress identified 65794 65793")...) // with ICMP's answer
			h.a.ip("addr add 10.9.9.9/32 dev lo")
			h.wantPodCounts(func() { h.a.sendTo("10.9.9.9", podB+":5678", []byte("it was not me")) },
				"ingress spoofed 9 65794", "egress identified 9 65794", "ingress identified 65794 9")

			h.pods.set(true, podA, podB)
			testutil.Eventually(t, patience, func() error {
				if n := a.Status().Pods.Addresses; n != 2 {
					return fmt.Errorf("%d addresses, want 2", n)
				}
				return nil
			})
			h.pods.set(true, podB)
			a.wantPodDevices("lxcb")
			if got := a.verify(false); len(got) != 0 {
				t.Errorf("differences after a pod went: %v", got)
			}
			a.stop()
			if found, err := h.cleanup(false); err != nil || len(found) == 0 {
				t.Fatalf("cleanup found %v, %v", found, err)
			}
			if _, err := os.Stat(h.cfg.BPFFS + "/weft"); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("cleanup left the pins: %v", err)
			}
			for _, device := range []string{"lxca", "lxcb"} {
				if left := h.filters(device); len(left) != 0 {
					t.Errorf("cleanup left %v at %s", left, device)
				}
				if withoutTCX {
					continue
				}
				testutil.Eventually(t, patience, func() error { // the kernel detaches links whose last pin went in its own time
					if left, err := h.attached(device); err != nil || len(left) != 0 {
						return fmt.Errorf("cleanup left %v at %s, %v", left, device, err)
					}
					return nil
				})
			}
		})
	}
}

// With drop, a packet that is not the pod's is counted and goes no further.
func TestPodCheckDrops(t *testing.T) {
	h := newPodHost(t, !hasTCX())
	h.pods.set(true, podA, podA6)
	h.cfg.PodCheck = PodCheckDrop
	a := h.start()
	a.wantPodDevices("lxca")
	h.wantEntries(map[string]identity.ID{podA + "/32": idA, podA6 + "/128": idA, podB + "/32": idB})
	h.a.ip("addr add 10.9.9.9/32 dev lo")
	var fd int
	h.ns.Do(t, func() {
		var err error
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			t.Fatal(err)
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: 5678}); err != nil {
			t.Fatal(err)
		}
	})
	defer unix.Close(fd)
	h.wantPodCounts(func() { h.a.sendTo("10.9.9.9", "172.18.1.1:5678", []byte("forged")) }, "ingress spoofed 9 9")
	h.wantPodCounts(func() { h.a.sendTo(podA, "172.18.1.1:5678", []byte("genuine")) }, "ingress identified 65793 9")
	buf := make([]byte, 64)
	n, _, err := unix.Recvfrom(fd, buf, 0) // on a veth, what was sent has arrived
	if err != nil || string(buf[:n]) != "genuine" {
		t.Errorf("the first packet that came is %q, %v: want the genuine one", buf[:max(n, 0)], err)
	}
}

// What an agent finds at pods' devices when it starts stays until all pods are known; what somebody takes away is put
// back, and told of.
//
// invariant 2
// lesson: K2
func TestPodsOutliveTheAgent(t *testing.T) {
	for name, withoutTCX := range podModes() {
		t.Run(name, func(t *testing.T) {
			h := newPodHost(t, withoutTCX)
			h.pods.set(true, podA, podA6)
			a := h.start()
			a.wantPodDevices("lxca")
			a.stop()
			h.pods.set(false)
			h.cfg.Devices = nil // so that every device could keep programs
			a = h.start()
			a.wantPodDevices("lxca")
			m, err := ebpf.LoadPinnedMap(h.cfg.BPFFS+"/weft/pods", nil)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			index := 0
			h.ns.Do(t, func() { index, err = interfaceIndex("lxca") })
			if err != nil {
				t.Fatal(err)
			}
			key := bpf.MakePodKey(index, netip.MustParseAddr(podA))
			var value uint32
			if err := m.Lookup(key, &value); err != nil {
				t.Errorf("%+v is not allowed any more: %v", key, err)
			}
			h.pods.set(true, podA, podA6)
			testutil.Eventually(t, patience, func() error {
				if n := a.Status().Pods.Addresses; n != 2 {
					return fmt.Errorf("%d addresses, want 2", n)
				}
				return nil
			})
			stray := bpf.MakePodKey(index, netip.MustParseAddr("10.1.1.77"))
			if err := errors.Join(m.Delete(key), m.Put(stray, bpf.PodValue)); err != nil {
				t.Fatal(err)
			}
			want := []string{"pod 10.1.1.10 at lxca: want allowed as a source, have absent", "pod 10.1.1.77 at lxca: want absent, have allowed as a source"}
			if got := a.verify(true); len(got) != 0 && !slices.Equal(got, want) { // the agent may have been faster
				t.Errorf("differences %q, want %q", got, want)
			}
			if got := a.verify(false); len(got) != 0 {
				t.Errorf("differences after repair: %v", got)
			}
			if err := errors.Join(m.Lookup(key, &value)); err != nil || !errors.Is(m.Lookup(stray, &value), ebpf.ErrKeyNotExist) {
				t.Errorf("after repair: %v for what was deleted, %v for what was added", err, m.Lookup(stray, &value))
			}
			if drift := a.Status().Drift; drift[KindPod] != 2 {
				t.Errorf("drift %v, want 2 of pods", drift)
			}
			h.pods.set(true)
			a.wantPodDevices()
			if err := m.Lookup(key, &value); !errors.Is(err, ebpf.ErrKeyNotExist) {
				t.Errorf("%+v of a pod that is gone: %v", key, err)
			}
		})
	}
}
