// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// While packets pass, the program of a hook is replaced again and again, by its link or its filter: every packet is seen
// by exactly one of them.
//
// lesson: A4, X10
func TestManyUpdates(t *testing.T) {
	times := 1000
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		times = 10000
	}
	for name, withoutTCX := range map[string]bool{"links": false, "filters": true} {
		t.Run(name, func(t *testing.T) {
			if !withoutTCX && !hasTCX() {
				return // the other one is for this kernel
			}
			h := newTestHost(t)
			h.filterMode, h.cfg.withoutTCX = withoutTCX, withoutTCX
			h.cfg.IPs.Apply([]ipcache.Op{upsert("172.18.2.1/32", 131329)})
			a := h.start()
			h.wantEntries(map[string]identity.ID{"172.18.2.1/32": 131329})
			a.stop()
			update := h.updater(withoutTCX)
			before, p := h.seen(t), h.startProbe()
			for i := 0; i < times || p.received.Load() < 500; i++ {
				if err := update(i % 2); err != nil {
					t.Fatal(err)
				}
			}
			p.check(before, 131329)
		})
	}
}

// updater returns a function that puts one of two programs, which are alike, at the ingress hook of eth0.
func (h *testHost) updater(withoutTCX bool) func(which int) error {
	h.t.Helper()
	dir := &pinDir{path: h.cfg.BPFFS + "/weft"}
	maps := mapSet{}
	h.t.Cleanup(func() { maps.Close() })
	for name, pin := range pins {
		m, err := ebpf.LoadPinnedMap(dir.file(pin), nil)
		if err != nil {
			h.t.Fatal(err)
		}
		maps[name] = m
	}
	var programs []*ebpf.Program
	for range 2 {
		spec, err := bpf.Load()
		if err != nil {
			h.t.Fatal(err)
		}
		spec.Maps[bpf.MapIPCache].MaxEntries = h.cfg.MaxEntries
		loaded, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: maps})
		if err != nil {
			h.t.Fatal(err)
		}
		h.t.Cleanup(loaded.Close)
		programs = append(programs, loaded.Programs[bpf.Programs[0].Name])
	}
	if !withoutTCX {
		l, err := link.LoadPinnedLink(dir.file(pinLinksDir, linkPinName("eth0", bpf.Programs[0].Name)), nil)
		if err != nil {
			h.t.Fatal(err)
		}
		h.t.Cleanup(func() { l.Close() })
		return func(which int) error { return l.Update(programs[which]) }
	}
	var (
		host  *host
		err   error
		index int
	)
	h.ns.Do(h.t, func() {
		if host, err = openHost(); err == nil {
			index, err = interfaceIndex("eth0")
		}
	})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(host.Close)
	return func(which int) error {
		return host.setFilter(attachment{
			hook: hook{IfIndex: index, Attach: bpf.Programs[0].Attach}, program: program{Program: bpf.Programs[0], handle: programs[which]},
		})
	}
}
