// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// send sends one UDP packet from the peer to the host.
func (h *testHost) send(to string) {
	h.t.Helper()
	var conn net.Conn
	var err error
	h.peer.Do(h.t, func() { conn, err = net.Dial("udp", to) })
	if err == nil {
		_, err = conn.Write([]byte("hello"))
		conn.Close()
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

func TestFlowsAndCounters(t *testing.T) {
	h := newTestHost(t)
	h.cfg.FlowSample, h.cfg.DualStack = 1, true
	a := h.start()
	h.cfg.IPs.Apply([]ipcache.Op{upsert("172.18.2.1/32", 131329)})
	h.wantEntries(map[string]identity.ID{"172.18.2.1/32": 131329})

	ctx, cancel := context.WithCancel(context.Background())
	var (
		mu    sync.Mutex
		heard []Flow
	)
	sofar := func() []Flow {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(heard)
	}
	done := make(chan error, 1)
	go func() {
		done <- a.Flows(ctx, func(batch []Flow) {
			mu.Lock()
			defer mu.Unlock()
			heard = append(heard, batch...)
		})
	}()
	began := time.Now()
	testutil.Eventually(t, patience, func() error { // until the subscription is there
		h.send("172.18.1.1:4242")
		if len(sofar()) == 0 {
			return errors.New("no flow yet")
		}
		return nil
	})
	h.send("[fd00:18:1::1]:4243")

	for _, want := range []struct {
		src, dst string
		port     uint16
		identity identity.ID
		verdict  bpf.Verdict
	}{
		{"172.18.2.1", "172.18.1.1", 4242, 131329, bpf.Identified},
		{"fd00:18:2::1", "fd00:18:1::1", 4243, identity.WorldIPv6, bpf.World},
	} {
		testutil.Eventually(t, patience, func() error {
			for _, f := range sofar() {
				if f.DstPort == want.port && f.SrcIP == netip.MustParseAddr(want.src) && f.DstIP == netip.MustParseAddr(want.dst) &&
					f.Peer() == want.identity && f.Verdict == want.verdict && f.Direction == bpf.Ingress && f.Device == "eth0" &&
					f.Proto == bpf.ProtocolUDP && f.Length == uint32(14+20+8+5)+20*uint32(boolInt(f.SrcIP.Is6())) &&
					f.Time.After(began.Add(-time.Second)) && f.Time.Before(time.Now().Add(time.Second)) {
					return nil
				}
			}
			return fmt.Errorf("no flow like %+v in %+v", want, sofar())
		})
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("flows: %v", err)
	}
	if s := a.Status().Flows; s.Received == 0 || s.Invalid != 0 || s.LastError != "" {
		t.Errorf("status %+v, want flows and no errors", s)
	}
	a.stop()

	c, err := OpenCounters(h.cfg.BPFFS)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	list, err := c.List()
	if err != nil {
		t.Fatal(err)
	}
	found := map[identity.ID]Counter{}
	for _, n := range list {
		if n.Direction == bpf.Ingress && n.Verdict != bpf.NotIP {
			found[n.Peer()] = n
		}
	}
	if n := found[131329]; n.Packets == 0 || n.Bytes < 47*n.Packets || n.Verdict != bpf.Identified {
		t.Errorf("counter of the identified peer %+v in %+v", n, list)
	}
	if n := found[identity.WorldIPv6]; n.Packets == 0 || n.Verdict != bpf.World {
		t.Errorf("counter of the unknown peer %+v in %+v", n, list)
	}
	missed, err := c.Missed()
	if err != nil || len(missed) != 2 || missed[0].Packets != 0 || missed[1].Direction != bpf.Egress {
		t.Errorf("missed %+v, err %v, want none, by direction", missed, err)
	}
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestSlowSubscriber(t *testing.T) {
	f := newFlows()
	f.name(map[uint32]string{2: "eth0"})
	slow := make(chan []Flow, 2)
	f.subscribe(slow)
	const n = 10
	for i := range n {
		f.publish([]Flow{{IfIndex: 2, Length: uint32(i)}}, 0)
	}
	if s := f.status(); s.Received != n || s.Dropped != n-2 {
		t.Errorf("status %+v, want %d received and %d dropped", s, n, n-2)
	}
	if first := <-slow; first[0].Length != 0 || first[0].Device != "eth0" {
		t.Errorf("the slow subscriber's first flow is %+v, want the oldest, of eth0", first[0])
	}
	f.unsubscribe(slow)
	f.publish([]Flow{{}}, 1)
	if s := f.status(); s.Dropped != n-2 || s.Invalid != 1 {
		t.Errorf("status %+v, want nothing dropped for a subscriber that left, and 1 invalid", s)
	}
}
