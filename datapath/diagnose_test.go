// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/weftmesh/weft/internal/testutil"
)

// diagnose runs one in the host's namespace, with settings of the test's own.
func (h *testHost) diagnose(d Diagnosis) (found []Finding) {
	h.t.Helper()
	h.ns.Do(h.t, func() { found = Diagnose(d) })
	for _, f := range found {
		if f.Level != Fine && f.Advice == "" || strings.Contains(f.Detail+f.Advice, "\n") {
			h.t.Errorf("no one line that says what to do: %+v", f)
		}
	}
	return found
}

// wantFinding looks for one of a level and a name whose text contains something.
func wantFinding(t *testing.T, found []Finding, level Level, name, text string) {
	t.Helper()
	for _, f := range found {
		if f.Level == level && f.Name == name && strings.Contains(f.Detail+": "+f.Advice, text) {
			return
		}
	}
	t.Errorf("no %s about %q with %q in:\n%+v", level, name, text, found)
}

func (h *testHost) settings(values map[string]string) string {
	h.t.Helper()
	dir := h.t.TempDir()
	for name, value := range values {
		file := filepath.Join(dir, "sys", name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			h.t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			h.t.Fatal(err)
		}
	}
	return dir
}

// lesson: K12, K6
func TestDiagnose(t *testing.T) {
	h := newTestHost(t)
	h.ip("link set eth0 mtu 1400")
	h.ip("route add default via 172.18.2.1")
	proc := h.settings(map[string]string{
		"net/core/bpf_jit_enable": "0", "net/core/bpf_jit_harden": "2", "kernel/unprivileged_bpf_disabled": "0",
		"net/ipv4/ip_forward": "0", "net/ipv4/conf/eth0/rp_filter": "1",
	})
	d := Diagnosis{BPFFS: h.cfg.BPFFS, TunnelPort: 8472, proc: proc, sys: t.TempDir()}
	found := h.diagnose(d)
	for _, f := range found {
		if f.Level == Failure {
			t.Errorf("a failure where there is none: %+v", f)
		}
	}
	for _, name := range []string{"kernel", "privileges", "lpm trie", "ring buffer", "per-cpu hash", "tc programs"} {
		wantFinding(t, found, Fine, name, "")
	}
	wantFinding(t, found, Fine, "bpffs", "no agent has run")
	wantFinding(t, found, Warning, "jit", "bpf_jit_enable=1")
	wantFinding(t, found, Warning, "jit hardening", "bpf_jit_harden=1")
	wantFinding(t, found, Warning, "unprivileged bpf", "every user")
	wantFinding(t, found, Warning, "forwarding IPv4", "ip_forward=1")
	wantFinding(t, found, Warning, "device eth0", "rp_filter is strict")
	wantFinding(t, found, Fine, "device eth0", "mtu 1400")
	wantFinding(t, found, Fine, "overlay mtu", "1350 over IPv4")
	wantFinding(t, found, Fine, "tunnel port", "free")

	a := h.start()
	wantFinding(t, h.diagnose(d), Fine, "bpffs", "an agent runs")
	h.ip("link add weft_vxlan type vxlan external dstport 8472")
	h.ip("link set weft_vxlan mtu 1450")
	wantFinding(t, h.diagnose(d), Failure, "overlay mtu", "mtu 1350")
	h.ip("link set weft_vxlan mtu 1350")
	wantFinding(t, h.diagnose(d), Fine, "overlay mtu", "1350 fits into 1400")
	a.stop()
	for _, f := range h.diagnose(d) {
		if strings.Contains(f.Detail, "somebody else") {
			t.Errorf("weft's own are taken for somebody else's: %+v", f)
		}
	}
}

// lesson: K12, K9, X11
func TestDiagnoseTrouble(t *testing.T) {
	h := newTestHost(t)
	d := Diagnosis{BPFFS: h.cfg.BPFFS, TunnelPort: 8472, Devices: []string{"eth0", "eth7", "tun0"}}
	h.ip("tuntap add tun0 mode tun")
	h.addForeignFilter("eth0", netlink.FilterAttrs{Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1}, "cil_from_netdev")
	h.addForeignFilter("eth0", netlink.FilterAttrs{Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Priority: filterPriority}, "other")
	if hasTCX() {
		h.attachForeign("eth0", ebpf.AttachTCXIngress)
		h.start().stop()
	}
	h.ip("link add vx0 type vxlan id 7 dstport 8472 remote 172.18.2.1 dev eth0")
	found := h.diagnose(d)
	wantFinding(t, found, Warning, "device eth7", "does not exist")
	wantFinding(t, found, Failure, "device tun0", "no Ethernet header")
	wantFinding(t, found, Warning, "device eth0", "priority 1) is on the hook of weft_from_netdev")
	wantFinding(t, found, Failure, "device eth0", "has priority 119")
	wantFinding(t, found, Warning, "tunnel port", "vx0")
	if hasTCX() {
		wantFinding(t, found, Warning, "device eth0", "at place 1 of the hook of weft_from_netdev")
	} else {
		wantFinding(t, found, Warning, "hooks", "filters of tc")
	}

	d.TunnelPort = 8473
	var conn *net.UDPConn
	var err error
	h.ns.Do(t, func() { conn, err = net.ListenUDP("udp", &net.UDPAddr{Port: 8473}) })
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	d.BPFFS = t.TempDir()
	found = h.diagnose(d)
	wantFinding(t, found, Warning, "tunnel port", "somebody has UDP port 8473")
	wantFinding(t, found, Failure, "bpffs", "mount -t bpf")

	d.sys = t.TempDir()
	d.proc = "/proc"
	lockdown := filepath.Join(d.sys, "kernel/security/lockdown")
	testutil.MustWriteFile(t, mkdirFor(t, lockdown), []byte("none integrity [confidentiality]\n"))
	wantFinding(t, h.diagnose(d), Warning, "lockdown", "confidentiality")
}

func mkdirFor(t *testing.T, file string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestOlderThan(t *testing.T) {
	for _, tc := range []struct {
		release, than string
		want          bool
	}{
		{"5.10.0-34-cloud-amd64", "5.11", true}, {"5.11.0", "5.11", false}, {"6.1.0", "5.11", false}, {"4.19.0", "5.10", true},
		{"6.18.44-fc", "6.6", false}, {"an unknown release", "5.10", false},
	} {
		if got := olderThan(tc.release, tc.than); got != tc.want {
			t.Errorf("%s older than %s: %t, want %t", tc.release, tc.than, got, tc.want)
		}
	}
}

// The devices of pods and the overlay: which have their programs, which are gone, and who else is there.
//
// lesson: K9, K12
func TestDiagnosePods(t *testing.T) {
	for mode, withoutTCX := range podModes() {
		t.Run(mode, func(t *testing.T) {
			h := newPodHost(t, withoutTCX)
			h.pods.set(true, podA, podB)
			h.cfg.RoutingMode = RoutingTunnel
			proc := h.settings(map[string]string{
				"net/ipv4/conf/all/rp_filter": "0", "net/ipv4/conf/lxca/rp_filter": "1", "net/ipv4/conf/lxcb/rp_filter": "2",
				"net/ipv6/conf/eth0/forwarding": "1", "net/ipv6/conf/eth0/accept_ra": "1",
			})
			h.ip("route add ::/0 via fd00:18:2::1 dev eth0 proto ra")
			d := Diagnosis{BPFFS: h.cfg.BPFFS, TunnelPort: 8472, Devices: []string{"eth0"}, proc: proc, sys: t.TempDir()}
			a := h.start()
			a.wantPodDevices("lxca", "lxcb")
			found := h.diagnose(d)
			wantFinding(t, found, Fine, "pods", "2 devices, and their programs are attached")
			wantFinding(t, found, Fine, "device eth0", "its programs are attached")
			wantFinding(t, found, Fine, "device weft_vxlan", "its programs are attached")
			wantFinding(t, found, Warning, "pods", "larger than the 1450 of the overlay")
			wantFinding(t, found, Warning, "device lxca", "rp_filter is strict")
			wantFinding(t, found, Warning, "device eth0", "accept_ra=2")
			for _, f := range found {
				if strings.Contains(f.Detail, "somebody else") || f.Name == "device lxcb" || f.Level == Failure {
					t.Errorf("wrong where nothing is: %+v", f)
				}
			}
			d.Devices = []string{"eth0", "lxcb"} // which has programs, and not those of other devices
			wantFinding(t, h.diagnose(d), Warning, "device lxcb", "see in `weft status` whether it is one of the agent's devices")
			d.Devices = []string{"eth0"}

			a.stop()
			if withoutTCX {
				h.removeFilters("lxca")
			} else if err := os.Remove(h.cfg.BPFFS + "/weft/links/lxca-weft_from_pod"); err != nil {
				t.Fatal(err)
			}
			testutil.Eventually(t, patience, func() error { // the kernel detaches links whose last pin went in its own time
				for _, f := range h.diagnose(d) {
					if f.Level == Warning && f.Name == "device lxca" && strings.Contains(f.Detail, "weft_from_pod") && f.Advice == "start the agent" {
						return nil
					}
				}
				return errors.New("that lxca lacks its program is not told")
			})
			h.ip("link del lxcb")
			h.addForeignFilter("lxca", netlink.FilterAttrs{Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Priority: 1}, "cil_to_container")
			found = h.diagnose(d)
			wantFinding(t, found, Warning, "pods", "of pod "+podB+", is gone")
			wantFinding(t, found, Warning, "device lxca", "priority 1) is on the hook of weft_to_pod")
			h.ip("link del weft_vxlan")
			h.ip("link add weft_vxlan type vxlan id 7 dstport 8473 remote 172.18.2.1 dev eth0")
			wantFinding(t, h.diagnose(d), Failure, "device weft_vxlan", "ip link del weft_vxlan")
		})
	}
}

// removeFilters removes the filters of what comes in at a device.
func (h *testHost) removeFilters(device string) {
	h.t.Helper()
	h.ns.Do(h.t, func() {
		l, err := netlink.LinkByName(device)
		if err != nil {
			h.t.Fatal(err)
		}
		list, err := netlink.FilterList(l, netlink.HANDLE_MIN_INGRESS)
		if err != nil || len(list) == 0 {
			h.t.Fatalf("filters of %s: %v, %v", device, list, err)
		}
		for _, f := range list {
			if err := netlink.FilterDel(f); err != nil {
				h.t.Fatal(err)
			}
		}
	})
}

// The cgroup of services: whether it is one, whether the programs are there, and who is there before them or keeps them out.
//
// lesson: K9, K12
func TestDiagnoseServices(t *testing.T) {
	h := newServiceHost(t)
	d := Diagnosis{BPFFS: h.cfg.BPFFS, ServiceCgroup: h.cgroup.Path()}
	found := h.diagnose(d)
	for _, name := range []string{"service cgroup", "cgroup programs", "socket storage", "lru hash"} {
		wantFinding(t, found, Fine, name, "")
	}
	for dir, text := range map[string]string{t.TempDir(): "none of the unified hierarchy", "/nonexistent": "no such file"} {
		wantFinding(t, h.diagnose(Diagnosis{BPFFS: h.cfg.BPFFS, ServiceCgroup: dir}), Failure, "service cgroup", text)
	}
	foreign := func(attach ebpf.AttachType) *ebpf.Program {
		t.Helper()
		prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "other", Type: ebpf.CGroupSockAddr, AttachType: attach, License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { prog.Close() })
		return prog
	}
	cgroup, _, err := openCgroup(h.cgroup.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer cgroup.Close()
	first, err := link.AttachRawLink(link.RawLinkOptions{
		Target: int(cgroup.Fd()), Program: foreign(ebpf.AttachCGroupInet4Connect), Attach: ebpf.AttachCGroupInet4Connect,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()

	a := h.start()
	found = h.diagnose(d)
	wantFinding(t, found, Fine, "service programs", "all are attached")
	wantFinding(t, found, Warning, "service cgroup", "other) is before weft at the hook of weft_connect4")
	if n := countFindings(found, "is before weft"); n != 1 {
		t.Errorf("%d programs are before weft, want one: %+v", n, found)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	a.stop()
	detachServiceLink(h.cfg.BPFFS + "/weft/services/weft_sendmsg4-link")
	wantFinding(t, h.diagnose(d), Warning, "service programs", "weft_sendmsg4: not attached")

	exclusive := foreign(ebpf.AttachCGroupUDP4Sendmsg)
	if err := link.RawAttachProgram(link.RawAttachProgramOptions{
		Target: int(cgroup.Fd()), Program: exclusive, Attach: ebpf.AttachCGroupUDP4Sendmsg,
	}); err != nil {
		t.Fatal(err)
	}
	wantFinding(t, h.diagnose(d), Failure, "service cgroup", "BPF_F_ALLOW_MULTI")
	below := filepath.Join(h.cgroup.Path(), "below")
	if err := os.Mkdir(below, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(below)
	d.ServiceCgroup = below
	wantFinding(t, h.diagnose(d), Failure, "service cgroup", "on the hook of weft_sendmsg4, lets no other be attached")
	if err := link.RawDetachProgram(link.RawDetachProgramOptions{
		Target: int(cgroup.Fd()), Program: exclusive, Attach: ebpf.AttachCGroupUDP4Sendmsg,
	}); err != nil {
		t.Fatal(err)
	}
	if n := countFindings(h.diagnose(d), "lets no other"); n != 0 {
		t.Errorf("%d programs keep weft out where none is", n)
	}
}

// countFindings counts those whose detail contains something.
func countFindings(found []Finding, text string) (n int) {
	for _, f := range found {
		if strings.Contains(f.Detail, text) {
			n++
		}
	}
	return n
}
