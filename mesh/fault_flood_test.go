// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
)

// A cluster that announces many times more than it may have gets its share of the map, and no more. Whatever others announce
// meanwhile is in the table soon, and what they had before stays as it is.
//
// lesson: R10
func TestFaultFlood(t *testing.T) {
	keys, share := figure(3000, 1_000_000), figure(1000, 256_000)
	s := newScene(t, defaultLimits(2*share))
	others := s.others()
	const chunk = 1000
	var slowest time.Duration
	for first := 0; first < keys; first += chunk {
		values := make(map[string]string, chunk)
		for i := range chunk {
			a := netip.MustParseAddr("fd00:10:2:1::").As16()
			binary.BigEndian.PutUint32(a[12:], uint32(first+i))
			addr := netip.AddrFrom16(a).String()
			values[s.west.ipKey(addr)] = announce(addr, 2<<16+257, "172.18.2.1")
		}
		s.west.putAll(values)
		if first%figure(chunk, 50*chunk) == 0 {
			slowest = max(slowest, s.announceMeanwhile(first/chunk))
		}
	}
	r := s.await("west", "its quota", func(r RemoteStatus) bool {
		return r.Quotas.Full && r.Quotas.Entries.Used == int64(share) && r.Rejected["ip/quota"] >= uint64(keys-share)
	})
	t.Logf("%d of %d announcements in use, %d refused; another cluster's were used within %s", r.IPs, keys, r.Rejected["ip/quota"], slowest)
	if got := s.cfg.IPs.ClaimsOf(2); got > share {
		t.Errorf("west has %d entries, more than %d", got, share)
	}
	if got := s.others(); fmt.Sprint(got) != fmt.Sprint(others) {
		t.Errorf("what is not west's: %q, want %q", got, others)
	}
}

// announceMeanwhile lets east announce an address, and take it back, and returns how long that took.
func (s *scene) announceMeanwhile(n int) time.Duration {
	s.t.Helper()
	start, addr := time.Now(), fmt.Sprintf("10.1.1.%d", 100+n%100)
	await := func(want int) {
		s.t.Helper()
		testutil.Eventually(s.t, soon, func() error {
			if got := len(s.cfg.IPs.Claims(netip.MustParsePrefix(addr + "/32"))); got != want {
				return fmt.Errorf("%d claims for %s, want %d", got, addr, want)
			}
			return nil
		})
	}
	s.east.ip(addr, 257, "172.18.1.1")
	await(1)
	s.east.etcd.Delete(s.t, s.east.ipKey(addr))
	await(0)
	return time.Since(start)
}

// A value of 10 MiB, and 100,000 changes in every second, are more than honest clusters have. The first is refused, the others
// are taken as fast as the limits say, the latest of each key.
//
// lesson: R10
func TestFloodOfEvents(t *testing.T) {
	h, start := startHostile(t, floodOfEvents), time.Now()
	w := newWorld(t, defaultLimits(1000), func(c *Config) {
		c.Limits.Default.BurstEvents, c.Limits.Default.MaxEventsPerSecond = 2000, 2000
		c.Tune = func(k *kvstore.Config) { k.LivenessTimeout = 10 * time.Second }
		c.Limits.Default.AnyHost = true
		write(t, c.Dir+"/west", "endpoints:\n- "+h.endpoint+"\n")
	})
	r := w.await("west", "being held back", func(r RemoteStatus) bool { return r.Quotas.HeldBack > 0 && r.Rejected["ip/too-large"] > 0 })
	t.Logf("%d events in %s", 1000*h.replies.Load(), time.Since(start))
	if r.State != Ready || r.Quotas.Entries.Used > 500 {
		t.Errorf("status %+v", r)
	}
	// What is held back is no less true for it: the last change of each key arrives.
	h.replies.Store(-1 << 40)
	w.awaitIP("10.2.7.7/32", "10.2.7.7/32 131329 via 172.18.2.1 by 2 ip")
}

// floodOfEvents changes 400 addresses 100,000 times a second, until replies is below 0.
func floodOfEvents(h *hostileEtcd) {
	const perBatch = 1000
	h.addresses = func(ctx context.Context, send func(*etcdserverpb.WatchResponse) error) {
		revision := int64(100)
		put := func(addr string, id int, more string) *mvccpb.Event {
			revision++
			kv := h.kv(addr)
			kv.Value, kv.ModRevision = []byte(announce(addr, id, "172.18.2.1")+more), revision
			return &mvccpb.Event{Kv: kv}
		}
		reply := func(events ...*mvccpb.Event) bool {
			header := h.header()
			header.Revision = revision
			return send(&etcdserverpb.WatchResponse{Header: header, Events: events}) == nil
		}
		if !reply(put("10.2.6.6", 131329, strings.Repeat(" ", 10<<20))) {
			return
		}
		ticker := time.NewTicker(time.Second * perBatch / 100_000)
		defer ticker.Stop()
		for ctx.Err() == nil && h.replies.Add(1) > 0 {
			var events []*mvccpb.Event
			for i := range perBatch {
				events = append(events, put(fmt.Sprintf("10.2.%d.%d", 8+i%400/200, i%200), 131329+int(revision%7), ""))
			}
			if !reply(events...) {
				return
			}
			select {
			case <-ticker.C:
			case <-ctx.Done():
			}
		}
		if reply(put("10.2.7.7", 131329, "")) {
			<-ctx.Done()
		}
	}
}
