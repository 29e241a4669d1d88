// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/internal/testutil"
)

// wantLinks waits until exactly these devices have their links: each pinned, alive, and at the device that has the name
// now.
func (h *testHost) wantLinks(devices ...string) {
	h.t.Helper()
	if h.filterMode {
		for _, dev := range devices {
			h.wantFilters(dev, h.ourFilters())
		}
		return
	}
	testutil.Eventually(h.t, patience, func() error {
		var want []string
		for _, dev := range devices {
			for _, p := range bpf.Programs {
				want = append(want, linkPinName(dev, p.Name))
			}
		}
		slices.Sort(want)
		pinned := h.links()
		var got []string
		for name := range pinned {
			got = append(got, name)
		}
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("pinned links (-want +got):\n%s", diff)
		}
		for _, dev := range devices {
			attached, err := h.attached(dev)
			if err != nil {
				return err
			}
			for _, p := range bpf.Programs {
				name := linkPinName(dev, p.Name)
				if !slices.Contains(attached[p.Name], pinned[name].ID) {
					return fmt.Errorf("%s runs links %v, and not %d, which is pinned for it", dev, attached[p.Name], pinned[name].ID)
				}
			}
		}
		return nil
	})
}

// device returns the status of one device.
func (a *agent) device(name string) DeviceStatus {
	for _, d := range a.Status().Devices {
		if d.Name == name {
			return d
		}
	}
	return DeviceStatus{}
}

// lesson: K3
func TestDeviceComesAndGoes(t *testing.T) {
	h := newTestHost(t)
	h.cfg.Devices = []string{"eth0", "eth1.100"}
	a := h.start()
	h.wantLinks("eth0")
	if d := a.device("eth1.100"); d.Error == "" || d.IfIndex != 0 {
		t.Errorf("status of a device that does not exist: %+v, want an error", d)
	}
	times := 3
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		times = 100
	}
	for range times {
		h.ip("link add eth1.100 type veth peer name x1")
		h.wantLinks("eth0", "eth1.100")
		h.ip("link del eth1.100")
		h.wantLinks("eth0")
	}
	// The same name is another device at once, of another index or of the same.
	h.ip("link add eth1.100 index 77 type veth peer name x1")
	h.wantLinks("eth0", "eth1.100")
	before := h.links()["eth1-100-weft_from_netdev"].ID
	h.ip("link del eth1.100")
	h.ip("link add eth1.100 index 77 type veth peer name x1")
	testutil.Eventually(t, patience, func() error {
		l, ok := h.links()["eth1-100-weft_from_netdev"]
		if !ok || l.ID == before {
			return errors.New("the new device has not got its programs")
		}
		return nil
	})
	h.wantLinks("eth0", "eth1.100")
	testutil.Eventually(t, patience, func() error {
		d := a.device("eth1.100")
		if d.Error != "" || d.IfIndex != 77 || len(d.Programs) != len(bpf.Programs) ||
			d.Programs[0].LinkID == 0 || d.Programs[0].Error != "" {
			return fmt.Errorf("status %+v, want both programs at index 77", d)
		}
		return nil
	})
}

// A device in another namespace has no index here, and its index may be that of another device here.
//
// lesson: K3
func TestDeviceMovesAway(t *testing.T) {
	h := newTestHost(t)
	h.cfg.Devices = []string{"eth0", "eth1"}
	h.ip("link add eth1 index 88 type veth peer name x1")
	a := h.start()
	h.wantLinks("eth0", "eth1")
	before := h.links()["eth1-weft_from_netdev"].ID
	a.stop()
	h.ip("link set eth1 netns " + h.peer.Path())
	h.ip("link add eth1 index 88 type veth peer name x2")
	foreign := h.attachForeign("eth1", ebpf.AttachTCXIngress)
	h.start()
	h.wantLinks("eth0", "eth1")
	if now := h.links()["eth1-weft_from_netdev"].ID; now == before {
		t.Errorf("link %d, which is with the device that went away, is taken for that of the one that came", now)
	}
	if attached, err := h.attached("eth1"); err != nil || !slices.Contains(attached["weft_from_netdev"], foreign) {
		t.Errorf("links at eth1 %v, err %v, want %d among them", attached, err, foreign)
	}
}

// lesson: K3
func TestRenamedDeviceKeepsItsLinks(t *testing.T) {
	h := newTestHost(t)
	h.cfg.Devices = []string{"eth0", "wan0", "wan1"}
	h.ip("link add wan0 type veth peer name wan1")
	a := h.start()
	h.wantLinks("eth0", "wan0", "wan1")
	before := h.links()
	// While no agent looks, two devices swap names: each link is to go with its device.
	a.stop()
	h.ip("link set wan0 name tmp")
	h.ip("link set wan1 name wan0")
	h.ip("link set tmp name wan1")
	h.start()
	h.wantLinks("eth0", "wan0", "wan1")
	after := h.links()
	for _, p := range bpf.Programs {
		for from, to := range map[string]string{"eth0": "eth0", "wan0": "wan1", "wan1": "wan0"} {
			if b, a := before[linkPinName(from, p.Name)].ID, after[linkPinName(to, p.Name)].ID; a != b {
				t.Errorf("%s on %s, now %s: link %d became %d", p.Name, from, to, b, a)
			}
		}
	}
}

// Links that nobody wants any more are removed, and with them nothing of others.
//
// lesson: K9
func TestDeselectedDevice(t *testing.T) {
	h := newTestHost(t)
	h.ip("link add eth1 type veth peer name x1")
	foreign := h.attachForeign("eth1", ebpf.AttachTCXIngress)
	h.cfg.Devices = []string{"eth0", "eth1"}
	h.start().stop()
	h.wantLinks("eth0", "eth1")
	h.cfg.Devices = []string{"eth0"}
	h.start()
	h.wantLinks("eth0")
	attached, err := h.attached("eth1")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string][]link.ID{"weft_from_netdev": {foreign}}, attached); diff != "" {
		t.Errorf("links at eth1 (-want +got):\n%s", diff)
	}
}

// attachForeign attaches somebody else's program to a device until the test ends.
func (h *testHost) attachForeign(device string, at ebpf.AttachType) link.ID {
	h.t.Helper()
	l := h.attachProgram(device, at)
	info, err := l.Info()
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { l.Close() })
	return info.ID
}

// attachProgram attaches a program that passes everything on.
func (h *testHost) attachProgram(device string, at ebpf.AttachType) link.Link {
	h.t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		h.t.Fatal(err)
	}
	defer prog.Close()
	var l link.Link
	h.ns.Do(h.t, func() {
		var index int
		if index, err = interfaceIndex(device); err == nil {
			l, err = link.AttachTCX(link.TCXOptions{Interface: index, Program: prog, Attach: at})
		}
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return l
}

// A link of an older version runs another program: it is updated in place, so that no packet passes unseen.
//
// lesson: X10
func TestOlderProgramIsUpdatedInPlace(t *testing.T) {
	h := newTestHost(t)
	h.start().stop()
	pin := h.cfg.BPFFS + "/weft/links/eth0-weft_from_netdev"
	program := h.cfg.BPFFS + "/weft/programs/weft_from_netdev"
	before := h.kernelIDs()
	if err := errors.Join(os.Remove(pin), os.Remove(program)); err != nil {
		t.Fatal(err)
	}
	old := h.attachProgram("eth0", ebpf.AttachTCXIngress)
	defer old.Close()
	info, err := old.Info()
	if err == nil {
		err = old.Pin(pin)
	}
	if err != nil {
		t.Fatal(err)
	}
	h.start()
	h.wantLinks("eth0")
	now := h.links()["eth0-weft_from_netdev"]
	if now.ID != info.ID {
		t.Errorf("link %d became %d, want that it is updated", info.ID, now.ID)
	}
	if now.Program == info.Program {
		t.Error("the link still runs the old program")
	}
	after := h.kernelIDs()
	if want := fmt.Sprint("program ", now.Program); after["weft_from_netdev"] != want {
		t.Errorf("pinned is %s, the link runs %s", after["weft_from_netdev"], want)
	}
	for _, name := range []string{"weft_to_netdev", "eth0-weft_to_netdev", pinIPCache} {
		if before[name] != after[name] {
			t.Errorf("%s changed from %s to %s", name, before[name], after[name])
		}
	}
}

// Junk among the pinned links is cleared away; a detached link is replaced.
//
// lesson: K2
func TestDeadLinksAreReplaced(t *testing.T) {
	h := newTestHost(t)
	h.start().stop()
	dir := h.cfg.BPFFS + "/weft/links/"
	l, err := link.LoadPinnedLink(dir+"eth0-weft_to_netdev", nil)
	if err != nil {
		t.Fatal(err)
	}
	err = l.Detach()
	l.Close()
	if err != nil {
		t.Fatal(err)
	}
	p, err := ebpf.LoadPinnedProgram(h.cfg.BPFFS+"/weft/programs/weft_from_netdev", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	junk, err := p.Clone()
	if err != nil {
		t.Fatal(err)
	}
	defer junk.Close()
	if err := junk.Pin(dir + "eth9-weft_from_netdev"); err != nil {
		t.Fatal(err)
	}
	h.start()
	h.wantLinks("eth0")
}

func TestDevicesAreChosen(t *testing.T) {
	h := newTestHost(t)
	h.cfg.Devices = nil
	h.ip("link add eth1 type veth peer name x1")
	h.ip("link add eth2 type veth peer name x2")
	h.ip("addr add 192.0.2.1/24 dev eth1")
	h.ip("link set eth1 up")
	h.ip("link set x1 up")
	h.ip("tuntap add tun0 mode tun")
	h.ip("link set tun0 up")
	h.ip("route add default dev tun0 metric 9") // no Ethernet header, and nobody asked for it
	a := h.start()
	h.wantLinks("eth0") // it has the node's addresses
	h.ip("route add default via 192.0.2.254")
	h.wantLinks("eth0", "eth1")
	// What was chosen once stays: a default route may go and come.
	h.ip("route del default via 192.0.2.254")
	h.ip("link set eth2 up") // any event; the check that it causes comes after that of the route
	testutil.Eventually(t, patience, func() error {
		if s := a.Status(); len(s.Devices) != 2 || len(s.Errors) != 0 {
			return fmt.Errorf("status %+v, want two devices and no errors", s)
		}
		return nil
	})
	a.stop()
	h.start()
	h.wantLinks("eth0", "eth1")
	h.ip("link del eth1")
	h.wantLinks("eth0")
}

func TestNamedDevices(t *testing.T) {
	existing := []device{
		{Name: "eth0", Index: 2, Ethernet: true}, {Name: "wg0", Index: 3}, {Name: "eth0.1", Index: 4, Ethernet: true},
		{Name: "eth0-1", Index: 5, Ethernet: true},
	}
	states, jobs := plan(&pinDir{path: "/x"}, []program{{Program: bpf.Programs[0]}}, namedDevices([]string{"eth0.1", "eth0-1", "wg0", "eth0", "eth7", "eth0"}, existing))
	var got []string
	for _, s := range states {
		got = append(got, fmt.Sprintf("%s %d %t", s.Name, s.IfIndex, s.Error == ""))
	}
	want := []string{"eth0.1 4 true", "eth0-1 5 false", "wg0 3 false", "eth0 2 true", "eth7 0 false"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices: name, index, well (-want +got):\n%s", diff)
	}
	if len(jobs) != 2 || !strings.HasSuffix(jobs[0].path, "/links/eth0-1-weft_from_netdev") ||
		jobs[0].status != &states[0].Programs[0] {
		t.Errorf("attachments %+v, want those of eth0.1 and eth0, with their places in the status", jobs)
	}
}
