// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/internal/testutil"
)

// An agent that starts with another number of flows keeps those that there are, whatever an earlier one came to before it died.
func TestConntrackChangesItsSize(t *testing.T) {
	h := newRouterHost(t, !hasTCX())
	h.services.put("tcp 10.96.0.10:80", []string{far4, farther4, near4})
	h.services.put("udp [fd00:96::10]:80", []string{far6, farther6, near6})
	h.cfg.ServiceTCFlows = 2048
	a := h.startRouter()
	h.services.wantKernel("tcp 10.96.0.10:80", near4, far4, farther4)
	h.services.wantKernel("udp [fd00:96::10]:80", near6, far6, farther6)
	answered := map[net.Conn]string{}
	for range 10 {
		for network, to := range map[string]string{"tcp": "10.96.0.10:80", "udp": "[fd00:96::10]:80"} {
			conn, err := h.a.dialIn(network, to)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
			if answered[conn], err = ask(conn); err != nil {
				t.Fatal(err)
			}
		}
	}
	goOn := func(when string, flows int) {
		t.Helper()
		for conn, was := range answered {
			if conn.RemoteAddr().Network() == "tcp" {
				if err := exchange(conn, 4096); err != nil {
					t.Errorf("%s: %v", when, err)
				}
			} else if is, err := ask(conn); err != nil || is != was {
				t.Errorf("%s: a datagram is answered by %s, %v, and was by %s", when, is, err, was)
			}
		}
		s := a.Status().Services.Translation
		if s.MaxFlows != flows || s.Begun != uint64(len(answered)) {
			t.Errorf("%s: room for %d flows, %d begun, want %d and %d", when, s.MaxFlows, s.Begun, flows, len(answered))
		}
		if names := listDir(t, h.cfg.BPFFS+"/weft/services"); slices.Contains(names, "conntrack-new") {
			t.Errorf("%s: pins %v", when, names)
		}
	}
	goOn("at first", 2048)
	for _, flows := range []uint32{4096, 1024} {
		a.stop()
		h.cfg.ServiceTCFlows = flows
		a = h.startRouter()
		goOn(fmt.Sprintf("with %d", flows), int(flows))
	}

	// An agent died before its new conntrack was used, and one died while its entries were copied, for yet another size.
	for _, used := range []bool{false, true} {
		a.stop()
		h.leaveHalfAConntrack(used)
		h.cfg.ServiceTCFlows = 2048
		if used {
			h.cfg.ServiceTCFlows = 1500
		}
		a = h.startRouter()
		goOn(fmt.Sprintf("after half of it, used %v", used), int(h.cfg.ServiceTCFlows))
	}
}

// leaveHalfAConntrack leaves a conntrack of another size as an agent does that dies before or after programs use it.
func (h *routerHost) leaveHalfAConntrack(used bool) {
	h.t.Helper()
	dir := h.cfg.BPFFS + "/weft/services/"
	next := newConntrack(h.t, 1100)
	if err := next.Pin(dir + "conntrack-new"); err != nil {
		h.t.Fatal(err)
	}
	if !used {
		return
	}
	places, err := ebpf.LoadPinnedMap(dir+"conntracks", nil)
	if err != nil {
		h.t.Fatal(err)
	}
	defer places.Close()
	now, err := ebpf.LoadPinnedMap(dir+"conntrack", nil)
	if err != nil {
		h.t.Fatal(err)
	}
	defer now.Close()
	if err := errors.Join(places.Put(bpf.ConntrackBefore, now), places.Put(bpf.ConntrackNow, next)); err != nil {
		h.t.Fatal(err)
	}
}

// Where there is no room, those that were silent for longest are given up, and the status says so.
func TestConntrackIsFull(t *testing.T) {
	s := ServiceStatus{Translation: &TranslationStatus{Flows: 921, MaxFlows: 1024}}
	if got := s.Problems(); len(got) != 0 {
		t.Errorf("problems %q, and there is room", got)
	}
	s.Translation.Flows = 922
	want := []string{"services: there is room for 1024 flows of packets, and there are 922: those that were silent for longest are forgotten: " +
		"restart with a larger --service-tc-flows"}
	if diff := cmp.Diff(want, s.Problems()); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
	from, to := newConntrack(t, 1024), newConntrack(t, 100)
	now, err := monotonic()
	if err != nil {
		t.Fatal(err)
	}
	key := func(i int) bpf.ConntrackKey {
		return bpf.ConntrackKey{SrcPort: [2]byte{byte(i >> 8), byte(i)}, Protocol: bpf.ProtocolUDP, Family: bpf.FamilyIPv4}
	}
	for i := range 500 {
		if err := from.Put(key(i), bpf.Conntrack{Client: bpf.SeenPacket, UsedNS: now - uint64(i)*uint64(time.Millisecond)}); err != nil {
			t.Fatal(err)
		}
	}
	if err := from.Put(key(2000), bpf.Conntrack{UsedNS: now - uint64(time.Hour)}); err != nil { // it is over
		t.Fatal(err)
	}
	copied, err := copyConntrack(to, from)
	if err != nil || copied != 200 {
		t.Errorf("copied %d entries, %v, want the 200 that there is room for", copied, err)
	}
	kept := 0
	if err := dumpConntrack(to, func(k *bpf.ConntrackKey, _ *bpf.Conntrack) bool {
		if i := int(k.SrcPort[0])<<8 | int(k.SrcPort[1]); i >= 200 {
			t.Errorf("entry %d is kept, and was not among the 200 that were used last", i)
		}
		kept++
		return true
	}); err != nil || kept == 0 {
		t.Errorf("%d entries, %v", kept, err)
	}
}

func newConntrack(t *testing.T, flows uint32) *ebpf.Map {
	t.Helper()
	testutil.RequireRoot(t)
	raiseMemlock()
	spec, err := bpf.ConntrackSpec(flows)
	if err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMap(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return m
}

// forgetFlows removes all flows from the pinned conntrack.
func (h *routerHost) forgetFlows() {
	h.t.Helper()
	m, err := ebpf.LoadPinnedMap(h.cfg.BPFFS+"/weft/services/conntrack", nil)
	if err != nil {
		h.t.Fatal(err)
	}
	defer m.Close()
	var keys []bpf.ConntrackKey
	err = dumpConntrack(m, func(key *bpf.ConntrackKey, _ *bpf.Conntrack) bool {
		keys = append(keys, *key)
		return true
	})
	for i := range keys {
		err = errors.Join(err, m.Delete(&keys[i]))
	}
	if err != nil {
		h.t.Fatal(err)
	}
}
