// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// newFilterHost is a host whose agents attach by filters, as on a kernel without tcx.
func newFilterHost(t *testing.T) *testHost {
	h := newTestHost(t)
	h.filterMode, h.cfg.withoutTCX = true, true
	return h
}

// tc lists the filters of a device, each in one line; without numbers that differ between two of the same.
func (h *testHost) filters(device string) []string {
	h.t.Helper()
	var all []string
	h.ns.Do(h.t, func() {
		link, err := netlink.LinkByName(device)
		if err != nil {
			h.t.Fatal(err)
		}
		for name, parent := range map[string]uint32{"ingress": netlink.HANDLE_MIN_INGRESS, "egress": netlink.HANDLE_MIN_EGRESS} {
			list, err := netlink.FilterList(link, parent)
			if err != nil {
				h.t.Fatal(err)
			}
			for _, f := range list {
				text := fmt.Sprintf("%s prio %d handle %d %s", name, f.Attrs().Priority, f.Attrs().Handle, f.Type())
				if b, ok := f.(*netlink.BpfFilter); ok {
					text += fmt.Sprintf(" %s id %d direct %t", b.Name, b.Id, b.DirectAction)
				}
				all = append(all, text)
			}
		}
	})
	slices.Sort(all)
	return all
}

// ours are the filters that a device is to have, with the programs that are pinned.
func (h *testHost) ourFilters() []string {
	ids := h.kernelIDs()
	var all []string
	for i, p := range bpf.Programs {
		all = append(all, fmt.Sprintf("%s prio 119 handle 119 bpf %s id %s direct true", []string{"ingress", "egress"}[i], p.Name,
			strings.TrimPrefix(ids[p.Name], "program ")))
	}
	slices.Sort(all)
	return all
}

func (h *testHost) wantFilters(device string, want []string) {
	h.t.Helper()
	slices.Sort(want)
	testutil.Eventually(h.t, patience, func() error {
		if diff := cmp.Diff(want, h.filters(device)); diff != "" {
			return fmt.Errorf("filters of %s (-want +got):\n%s", device, diff)
		}
		return nil
	})
}

// qdiscs lists those of a device that somebody added.
func (h *testHost) qdiscs(device string) string {
	h.t.Helper()
	var out []byte
	var err error
	h.ns.Do(h.t, func() { out, err = exec.Command("tc", "qdisc", "show", "dev", device, "clsact").CombinedOutput() })
	if err != nil {
		h.t.Fatalf("%v: %s", err, out)
	}
	return strings.TrimSpace(string(out))
}

// addForeignFilter attaches somebody else's program, which passes everything on.
func (h *testHost) addForeignFilter(device string, attrs netlink.FilterAttrs, name string) {
	h.t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		h.t.Fatal(err)
	}
	defer prog.Close()
	h.ns.Do(h.t, func() {
		link, lookup := netlink.LinkByName(device)
		if err = lookup; err != nil {
			return
		}
		attrs.LinkIndex, attrs.Protocol = link.Attrs().Index, unix.ETH_P_ALL
		_ = netlink.QdiscAdd(clsactOf(attrs.LinkIndex)) // it may be there
		err = netlink.FilterAdd(&netlink.BpfFilter{FilterAttrs: attrs, Fd: prog.FD(), Name: name, DirectAction: true})
	})
	if err != nil {
		h.t.Fatal(err)
	}
}

// On kernels without tcx the programs are filters: adopted at a restart, restored, and gone with their device.
//
// lesson: K12, K2, A2
func TestFilters(t *testing.T) {
	h := newFilterHost(t)
	h.ip("link add eth1 type veth peer name x1")
	h.cfg.Devices = []string{"eth0", "eth1"}
	a := h.start()
	want := h.ourFilters()
	h.wantFilters("eth0", want)
	h.wantFilters("eth1", want)
	for _, d := range a.Status().Devices {
		if d.Error != "" || len(d.Programs) != 2 || !d.Programs[0].Attached || d.Programs[0].ProgramID == 0 {
			t.Errorf("status %+v, want both programs attached", d)
		}
	}
	before := h.kernelIDs()
	a.stop()
	h.wantFilters("eth0", want)
	a = h.start()
	if diff := cmp.Diff(before, h.kernelIDs()); diff != "" {
		t.Errorf("restart changed objects (-before +after):\n%s", diff)
	}
	h.wantFilters("eth0", want)

	// What somebody removes comes back: one filter, all of them with the qdisc, the device itself.
	for _, spoil := range []string{"filter del dev eth0 ingress prio 119", "qdisc del dev eth0 clsact", "filter del dev eth0 egress"} {
		h.tc(spoil)
		h.wantFilters("eth0", want)
	}
	h.ip("link del eth1")
	h.ip("link add eth1 type veth peer name x1")
	h.wantFilters("eth1", want)

	// A device that is not wanted any more is left as it was found.
	a.stop()
	h.cfg.Devices = []string{"eth0"}
	h.start()
	h.wantFilters("eth1", nil)
	testutil.Eventually(t, patience, func() error {
		if q := h.qdiscs("eth1"); q != "" {
			return fmt.Errorf("qdisc of eth1: %s", q)
		}
		return nil
	})
	h.wantFilters("eth0", want)
}

func (h *testHost) tc(args string) {
	h.t.Helper()
	var out []byte
	var err error
	h.ns.Do(h.t, func() { out, err = exec.Command("tc", strings.Fields(args)...).CombinedOutput() })
	if err != nil {
		h.t.Fatalf("tc %s: %v: %s", args, err, out)
	}
}

// Filters of others before and behind ours, and with our name, are left alone; so is a qdisc that was there before, or
// that somebody else uses.
//
// lesson: K9
func TestForeignFilters(t *testing.T) {
	h := newFilterHost(t)
	for _, prio := range []uint16{1, 200} {
		for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
			h.addForeignFilter("eth0", netlink.FilterAttrs{Parent: parent, Handle: 1, Priority: prio}, "cil_from_netdev")
		}
	}
	h.addForeignFilter("eth0", netlink.FilterAttrs{Parent: netlink.HANDLE_MIN_INGRESS, Handle: 2, Priority: 1}, "weft_from_netdev")
	foreign := h.filters("eth0")
	h.ip("link add eth1 type veth peer name x1")
	h.ip("link add eth2 type veth peer name x2")
	h.cfg.Devices = []string{"eth0", "eth1", "eth2"}
	h.addForeignFilter("eth2", netlink.FilterAttrs{Parent: netlink.HANDLE_MIN_INGRESS, Handle: filterHandle, Priority: filterPriority}, "weft_from_netdev")
	a := h.start()
	ours := h.ourFilters()
	h.wantFilters("eth0", slices.Concat(foreign, ours))
	if d := a.device("eth2"); len(d.Programs) != 2 || !strings.Contains(d.Programs[0].Error, "another owner") || !d.Programs[1].Attached {
		t.Errorf("status of eth2 %+v, want that its place is taken on ingress", d)
	}
	h.addForeignFilter("eth1", netlink.FilterAttrs{Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1}, "other")
	a.stop()
	h.cfg.Devices = []string{"x1"}
	h.start()
	h.wantFilters("eth0", foreign)
	h.wantFilters("x1", ours)
	if got := h.filters("eth1"); len(got) != 1 || !strings.Contains(got[0], "other") {
		t.Errorf("filters of eth1: %v, want that of the other one", got)
	}
	if got := h.filters("eth2"); len(got) != 1 || !strings.Contains(got[0], "weft_from_netdev") {
		t.Errorf("filters of eth2: %v, want that which only looks like ours", got)
	}
	for _, device := range []string{"eth0", "eth1", "eth2"} {
		if h.qdiscs(device) == "" {
			t.Errorf("the qdisc of %s is gone, which others use", device)
		}
	}
}

// A device with an ingress qdisc cannot have both programs; the error says so, and the others have theirs.
func TestIngressQdiscInTheWay(t *testing.T) {
	h := newFilterHost(t)
	h.ip("link add eth1 type veth peer name x1")
	h.tc("qdisc add dev eth1 ingress")
	h.cfg.Devices = []string{"eth0", "eth1"}
	a := h.start()
	h.wantFilters("eth0", h.ourFilters())
	if d := a.device("eth1"); len(d.Programs) != 2 || !strings.Contains(d.Programs[0].Error, "qdisc ingress") {
		t.Errorf("status of eth1 %+v, want an error about its qdisc", d)
	}
}

// Another version's program is replaced in place while packets pass: each is seen by one of the two. An agent that dies
// between the change of the pin and that of the filter leaves a filter that is still known as ours.
//
// lesson: A4, X10
func TestFilterIsReplacedInPlace(t *testing.T) {
	h := newFilterHost(t)
	a := h.start()
	h.cfg.IPs.Apply([]ipcache.Op{upsert("172.18.2.1/32", 131329)})
	h.wantEntries(map[string]identity.ID{"172.18.2.1/32": 131329})
	before, p := h.seen(t), h.startProbe()
	for range 5 {
		p.wait(20)
		a.stop()
		h.replacePinnedPrograms()
		old := h.filters("eth0")
		a = h.start()
		h.wantFilters("eth0", h.ourFilters())
		if slices.Equal(old, h.filters("eth0")) {
			t.Error("the filters still run the old programs")
		}
		if names := listDir(t, h.cfg.BPFFS+"/weft/programs"); len(names) != len(bpf.Programs) {
			t.Errorf("pinned programs %v, want the present ones only", names)
		}
		p.wait(20)
	}
	p.check(before, 131329)
}

// replacePinnedPrograms leaves the pins as an agent of another version that died before it updated any hook.
func (h *testHost) replacePinnedPrograms() {
	h.t.Helper()
	for _, p := range bpf.Programs {
		path := h.cfg.BPFFS + "/weft/programs/" + p.Name
		old, err := ebpf.LoadPinnedProgram(path, nil)
		if err != nil {
			h.t.Fatal(err)
		}
		other, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: ebpf.SchedCLS, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
		})
		if err == nil {
			err = errors.Join(keepReplaced(path, old), os.Remove(path), other.Pin(path), other.Close())
		}
		if err = errors.Join(err, old.Close()); err != nil {
			h.t.Fatal(err)
		}
	}
}
