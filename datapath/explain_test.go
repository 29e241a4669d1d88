// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// What the kernel says of an address is read off the kernel: the entry off the map, whoever wrote it, the way off its routes.
func TestExplainAddress(t *testing.T) {
	testutil.RequireRoot(t)
	h := newTestHost(t)
	h.cfg.RoutingMode = RoutingNative
	a := h.start()
	pod := ipcache.Entry{Identity: 131329, Host: netip.MustParseAddr("172.18.2.1")}
	h.cfg.IPs.Apply([]ipcache.Op{{Claim: ipcache.Claim{
		Prefix: netip.MustParsePrefix("10.2.1.10/32"), Owner: ipcache.Owner{Cluster: 2, Object: "ip"}, Entry: pod,
	}}})
	h.ip("route add 10.2.1.0/24 via 172.18.2.1 dev eth0 proto 119")
	h.ip("route add blackhole 10.66.0.0/16")
	explain := func(addr string) (e Explanation) {
		h.ns.Do(t, func() { e = Explain(h.cfg.BPFFS, netip.MustParseAddr(addr)) })
		return e
	}
	var e Explanation
	testutil.Eventually(t, patience, func() error {
		if e = explain("10.2.1.10"); !e.Found {
			return errors.New("no entry")
		}
		return nil
	})
	want := a.Wanted(netip.MustParsePrefix("10.2.1.10/32"), pod)
	if e.EntryErr != nil || !e.Entry.Says(want) || want.TunnelEndpoint != pod.Host || want.String() != e.Entry.String() {
		t.Errorf("entry %v, %v; want %v", e.Entry, e.EntryErr, want)
	}
	if other := a.Wanted(want.Prefix, ipcache.Entry{Identity: identity.ID(131330), Host: pod.Host}); e.Entry.Says(other) {
		t.Errorf("%v says the same as %v", e.Entry, other)
	}
	wantRoute := Route{
		Type: "unicast", Device: "eth0", Gateway: netip.MustParseAddr("172.18.2.1"), Source: netip.MustParseAddr("172.18.1.1"),
		Table: unix.RT_TABLE_MAIN, Protocol: "weft",
	}
	if e.RouteErr != nil || e.Route != wantRoute {
		t.Errorf("route %+v, %v; want %+v", e.Route, e.RouteErr, wantRoute)
	}
	if e := explain("172.18.1.1"); e.Route.Type != "local" || e.RouteErr != nil {
		t.Errorf("our own address: %+v, %v", e.Route, e.RouteErr)
	}
	if e := explain("fd00:18:2::1"); e.Route.Type != "unicast" || e.Route.Device != "eth0" || e.Route.Protocol != "kernel" {
		t.Errorf("IPv6 neighbour: %+v, %v", e.Route, e.RouteErr)
	}
	for addr, want := range map[string]string{"192.0.2.1": "no route to 192.0.2.1", "10.66.0.1": "10.66.0.1"} {
		if e := explain(addr); e.Found || e.EntryErr != nil || e.RouteErr == nil || !strings.Contains(e.RouteErr.Error(), want) {
			t.Errorf("%s: %+v", addr, e)
		}
	}
	a.stop()
	if e := explain("10.2.1.10"); !e.Found || !e.Entry.Says(want) {
		t.Errorf("without an agent: %+v", e)
	}
	if e := Explain("/nonexistent", netip.MustParseAddr("10.2.1.10")); e.EntryErr == nil || e.Found {
		t.Errorf("without pins: %+v", e)
	}
}
