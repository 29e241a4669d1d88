// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// snapshot lists all that an agent could leave on a host.
func (h *testHost) snapshot() []string {
	h.t.Helper()
	var all []string
	for _, args := range []string{"-4 route show table all", "-6 route show table all", "-o link show"} {
		for line := range strings.Lines(h.ip(args)) {
			// What a packet left behind is no object, and what the kernel adds by itself comes when it is ready: link-local
			// addresses, routes for multicast, the state of a device.
			if strings.Contains(line, "cache") || strings.Contains(line, "fe80") || strings.Contains(line, "ff00") {
				continue
			}
			if name, _, ok := strings.Cut(line, ": <"); ok {
				line = name
			}
			all = append(all, args+": "+strings.TrimSpace(strings.ReplaceAll(line, " linkdown", "")))
		}
	}
	err := filepath.WalkDir(h.cfg.BPFFS, func(path string, d fs.DirEntry, err error) error {
		all = append(all, "file "+path)
		return err
	})
	if err != nil {
		h.t.Fatal(err)
	}
	h.ns.Do(h.t, func() {
		links, err := netlink.LinkList()
		if err != nil {
			h.t.Error(err)
		}
		for _, l := range links {
			qdiscs, err := netlink.QdiscList(l)
			if err != nil {
				h.t.Error(err)
			}
			for _, q := range qdiscs {
				all = append(all, fmt.Sprintf("qdisc %s %s", l.Attrs().Name, q))
			}
		}
	})
	for _, device := range []string{"eth0", "eth1"} {
		for _, f := range h.filters(device) {
			all = append(all, device+" "+f)
		}
		if hasTCX() {
			attached, err := h.attached(device)
			if err != nil {
				h.t.Fatal(err)
			}
			all = append(all, fmt.Sprintf("%s links %v", device, attached))
		}
	}
	slices.Sort(all)
	return all
}

// cleanup runs one in the host's namespace.
func (h *testHost) cleanup(dryRun bool) (found []Remnant, err error) {
	h.t.Helper()
	h.ns.Do(h.t, func() { found, err = Cleanup(h.t.Context(), h.cfg.BPFFS, dryRun, func(int) {}) })
	return found, err
}

// After a cleanup nothing is left but what was there before, whether by links or by filters, and whatever belongs to
// others.
//
// lesson: A8, K9
func TestCleanup(t *testing.T) {
	for name, withoutTCX := range map[string]bool{"links": false, "filters": true} {
		t.Run(name, func(t *testing.T) {
			if !withoutTCX && !hasTCX() {
				return // the other one is for this kernel
			}
			h := newTestHost(t)
			h.filterMode, h.cfg.withoutTCX = withoutTCX, withoutTCX
			h.ip("link add eth1 type veth peer name x1")
			h.ip("link set eth1 up")
			h.ip("link set x1 up")
			h.ip("route add 10.9.0.0/16 via 172.18.7.7 dev eth0 proto static")
			h.addForeignFilter("eth1", netlink.FilterAttrs{Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1}, "weft_from_netdev")
			if hasTCX() {
				h.attachForeign("eth0", ebpf.AttachTCXIngress)
			}
			if err := os.Mkdir(h.cfg.BPFFS+"/other", 0o700); err != nil {
				t.Fatal(err)
			}
			before := h.snapshot()

			h.hear(0)
			h.native(testNode("west", 2, "west-1", []string{"172.18.2.1", "fd00:18:2::1"}, "10.2.1.0/24", "10.2.0.0/16", "fd00:10:2:1::/64"))
			h.cfg.Devices = []string{"eth0", "eth1"}
			h.cfg.IPs.Apply([]ipcache.Op{upsert("10.2.1.10/32", 131329)})
			a := h.start()
			h.wantEntries(map[string]identity.ID{"10.2.1.10/32": 131329})
			if withoutTCX {
				h.wantLinks("eth0") // eth1 has a filter more
			} else {
				h.wantLinks("eth0", "eth1")
			}
			h.wantRoutes("119", "10.2.0.0/16 via 172.18.2.1 dev eth0", "10.2.1.0/24 via 172.18.2.1 dev eth0", "fd00:10:2:1::/64 via fd00:18:2::1 dev eth0")
			if _, err := h.cleanup(false); !errors.Is(err, ErrInUse) {
				t.Errorf("while an agent runs: %v, want ErrInUse", err)
			}
			h.ip("link add weft_vxlan type vxlan external dstport 8472")
			a.stop()

			during := h.snapshot()
			shown, err := h.cleanup(true)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(during, h.snapshot()); diff != "" {
				t.Errorf("a dry run changed (-before +after):\n%s", diff)
			}
			removed, err := h.cleanup(false)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(shown, removed); diff != "" {
				t.Errorf("shown and removed (-shown +removed):\n%s", diff)
			}
			want := len(pins) + len(bpf.Programs) + 2*len(bpf.Programs) + 3 + 1 + 4 // hooks, routes, the device, directories
			if withoutTCX {
				want++ // the qdisc of eth0; that of eth1 was there
			}
			if len(removed) != want {
				t.Errorf("removed %d things, want %d: %+v", len(removed), want, removed)
			}
			if diff := cmp.Diff(before, h.snapshot()); diff != "" {
				t.Errorf("left or lost (-before +after):\n%s", diff)
			}
			if again, err := h.cleanup(false); err != nil || len(again) != 0 {
				t.Errorf("a second cleanup: %+v, %v, want nothing", again, err)
			}
		})
	}
}

// What is not provably weft's stays, and is told of.
//
// lesson: K9, A6
func TestCleanupKeepsWhatIsNotOurs(t *testing.T) {
	h := newTestHost(t)
	h.start().stop()
	dir := h.cfg.BPFFS + "/weft/"
	foreign, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	var second *ebpf.Map
	if second, err = foreign.Clone(); err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if err := errors.Join(os.Remove(dir+"counters"), foreign.Pin(dir+"counters"), second.Pin(dir+"programs/other")); err != nil {
		t.Fatal(err)
	}
	h.ip("link add weft_vxlan type vxlan id 7 dstport 8472 remote 172.18.2.1 dev eth0")
	kept := map[string]bool{dir + "counters": true, dir + "programs/other": true, "weft_vxlan": true, filepath.Clean(dir): true, dir + "programs": true}
	found, err := h.cleanup(false)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range found {
		if (r.Kept != "") != kept[r.Object] {
			t.Errorf("%+v: kept, want %t", r, kept[r.Object])
		}
		delete(kept, r.Object)
	}
	if len(kept) != 0 {
		t.Errorf("not told of: %v", kept)
	}
	for _, path := range []string{dir + "counters", dir + "programs/other"} {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("gone: %v", err)
		}
	}
	if out := h.ip("link show weft_vxlan"); !strings.Contains(out, "weft_vxlan") {
		t.Errorf("the foreign device is gone: %s", out)
	}
}

// What another version of weft pinned goes too, though this one does not know it: after a downgrade nobody else would remove it.
func TestCleanupOfAnotherVersion(t *testing.T) {
	for _, names := range []map[string]string{pins, servicePins} {
		for inSpec, pin := range names {
			if inSpec != bpf.MapIPCache && !strings.HasPrefix(inSpec, kernelNameOf(pin)) {
				t.Errorf("map %s is pinned as %s: another version would not take it for weft's", inSpec, pin)
			}
		}
	}
	h := newTestHost(t)
	h.start().stop()
	dir := h.cfg.BPFFS + "/weft/"
	if err := os.MkdirAll(dir+pinServicesDir, 0o700); err != nil {
		t.Fatal(err)
	}
	for path, name := range map[string]string{
		dir + "later": "weft_later", dir + "of_a_long_name": "weft_of_a_long_", dir + pinServicesDir + "/later": "weft_later",
		dir + "foreign": "weft_later", dir + pinServicesDir + "/foreign": "foreign",
	} {
		m, err := ebpf.NewMap(&ebpf.MapSpec{Name: name, Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 1})
		if err != nil {
			t.Fatal(err)
		}
		err = m.Pin(path)
		m.Close()
		if err != nil {
			t.Fatal(err)
		}
	}
	found, err := h.cleanup(false)
	if err != nil {
		t.Fatal(err)
	}
	var kept []string
	for _, r := range found {
		if r.Kind == "map" && r.Kept != "" {
			kept = append(kept, strings.TrimPrefix(r.Object, dir))
		}
	}
	slices.Sort(kept)
	if diff := cmp.Diff([]string{"foreign", pinServicesDir + "/foreign"}, kept); diff != "" {
		t.Errorf("kept (-want +got):\n%s", diff)
	}
}
