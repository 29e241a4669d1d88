// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/weftmesh/weft/internal/testutil"
)

// diagnose runs one in the host's namespace, with settings of the test's own.
func (h *testHost) diagnose(d Diagnosis) (found []Finding) {
	h.t.Helper()
	h.ns.Do(h.t, func() { found = Diagnose(d) })
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
