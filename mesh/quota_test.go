// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

// putAll writes many keys in few transactions.
func (c *cluster) putAll(keys map[string]string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var ops []clientv3.Op
	commit := func() {
		if _, err := c.etcd.Client().Txn(ctx).Then(ops...).Commit(); err != nil {
			c.t.Fatal(err)
		}
		ops = nil
	}
	for key, value := range keys {
		if ops = append(ops, clientv3.OpPut(key, value)); len(ops) == 100 {
			commit()
		}
	}
	commit()
}

// flood is n announcements of west.
func flood(n int) map[string]string {
	keys := make(map[string]string, n)
	for i := range n {
		addr := netip.AddrFrom4([4]byte{10, 2, byte(100 + i>>8), byte(i)}).String()
		keys["cilium/state/ip/v1/default/"+addr] = announce(addr, 2<<16+257, "172.18.2.1")
	}
	return keys
}

// A cluster that publishes more than its share gets its share, may change and delete what it has, and gets more when there
// is room again. Nobody else is affected.
//
// lesson: R10
func TestEntriesQuota(t *testing.T) {
	t.Parallel()
	s := newScene(t, func(c *Config) { defaultLimits(200)(c) })
	others := s.others()
	keys := flood(180) // of which 97 fit, beside 3 of before
	s.west.putAll(keys)
	full := s.await("west", "its quota", func(r RemoteStatus) bool {
		return r.Rejected["ip/quota"] >= 83 && r.Quotas.Full && r.Quotas.Entries == Quota{100, 100}
	})
	if n := s.cfg.IPs.ClaimsOf(2); n != 100 || full.IPs != 98 {
		t.Errorf("%d claims, status %+v, want 100, 98 of them addresses", n, full)
	}
	if last := full.LastRejections[len(full.LastRejections)-1].Reason; !strings.Contains(last, "max-entries") {
		t.Errorf("the refusal %q does not say what to do", last)
	}
	s.west.ip("10.2.1.10", 258, "172.18.2.1")
	s.awaitIP("10.2.1.10/32", "10.2.1.10/32 131330 via 172.18.2.1 by 2 ip")
	s.west.node("west-n7", "172.18.2.7", "10.2.7.0")
	s.await("west", "a node over the quota", func(r RemoteStatus) bool { return r.Rejected["node/quota"] > 0 })
	s.east.ip("10.1.1.77", 257, "172.18.1.1")
	s.awaitIP("10.1.1.77/32", "10.1.1.77/32 65793 via 172.18.1.1 by 1 ip")
	s.east.etcd.Delete(t, s.east.ipKey("10.1.1.77"))
	s.awaitIP("10.1.1.77/32", "")
	if got := s.others(); fmt.Sprint(got) != fmt.Sprint(others) {
		t.Errorf("what is not west's: %q, want %q", got, others)
	}

	// With room for all that is left, all of it is taken, without being written again.
	n := 0
	for key := range keys {
		if n++; n <= 90 {
			s.west.etcd.Delete(t, key)
		}
	}
	s.await("west", "the rest", func(r RemoteStatus) bool { return r.IPs == 91 && r.Nodes == 2 && !r.Quotas.Full })
}

// The bytes of nodes, services and identities are bounded together, and what is too large for one value is not even read.
//
// lesson: R10
func TestBytesQuota(t *testing.T) {
	t.Parallel()
	s := newScene(t, func(c *Config) { c.Limits.Default.MaxBytes = 8_000 })
	others := s.others()
	big := func(name string, n int) string {
		return fmt.Sprintf(`{"cluster":"west","namespace":"shop","name":%q,"clusterID":2,"labels":{"a":%q}}`, name, strings.Repeat("x", n))
	}
	s.west.etcd.Put(t, "cilium/state/services/v1/west/shop/a", big("a", 6_000))
	s.await("west", "one of two services", func(r RemoteStatus) bool { return r.Services == 2 && !r.Quotas.Full })
	s.west.etcd.Put(t, "cilium/state/services/v1/west/shop/b", big("b", 3_000))
	s.await("west", "its quota", func(r RemoteStatus) bool {
		return r.Rejected["service/quota"] > 0 && r.Services == 2 && r.Quotas.Full && r.Quotas.Bytes.Used <= 8_000
	})
	s.west.etcd.Put(t, "cilium/state/services/v1/west/shop/a", big("a", 10))
	s.await("west", "room for both", func(r RemoteStatus) bool { return r.Services == 3 && !r.Quotas.Full })
	s.west.etcd.DeletePrefix(t, "cilium/state/services/v1/west/")
	s.west.etcd.DeletePrefix(t, "cilium/state/nodes/v1/west/")
	s.west.etcd.DeletePrefix(t, "cilium/state/identities/v1/id/")
	s.await("west", "nothing", func(r RemoteStatus) bool { return r.Quotas.Bytes.Used == 0 && r.Services+r.Nodes+r.Identities == 0 })

	s.west.etcd.Put(t, s.west.ipKey("10.2.1.11"), announce("10.2.1.11", 2<<16+257, "")+strings.Repeat(" ", 100_000))
	s.await("west", "the refusal", func(r RemoteStatus) bool { return r.Rejected["ip/too-large"] == 1 })
	if got := s.others(); fmt.Sprint(got) != fmt.Sprint(others) {
		t.Errorf("what is not west's: %q, want %q", got, others)
	}
}

// A storm of changes is held back, joined by key, and all there in the end; another cluster's changes pass meanwhile.
//
// lesson: R10 E15
func TestEventsQuota(t *testing.T) {
	t.Parallel()
	s := newScene(t, func(c *Config) {
		c.Limits.Default.MaxEventsPerSecond, c.Limits.Default.BurstEvents, c.Limits.Default.MaxEntries = 2_000, 500, 0
	})
	keys := flood(1_000)
	for range 4 {
		s.west.putAll(keys)
	}
	s.west.ip("10.2.1.10", 258, "172.18.2.1")
	s.await("west", "held back", func(r RemoteStatus) bool { return r.Quotas.HeldBack > 0 })
	s.east.ip("10.1.1.77", 257, "172.18.1.1")
	s.awaitIP("10.1.1.77/32", "10.1.1.77/32 65793 via 172.18.1.1 by 1 ip")
	s.awaitIP("10.2.1.10/32", "10.2.1.10/32 131330 via 172.18.2.1 by 2 ip")
	s.await("west", "all", func(r RemoteStatus) bool { return r.IPs == 1001 && r.State == Ready })
}

// So many changes as a busy cluster makes at once pass unhindered; beyond that, so many a second.
func TestPace(t *testing.T) {
	limits := DefaultLimits(0).Default
	var p pace
	now := time.Now()
	for range 100_000 / 4_000 {
		if wait := p.take(4_000, &limits, now); wait != 0 {
			t.Fatalf("a burst of 100,000 is held back for %s", wait)
		}
	}
	if wait := p.take(150_000, &limits, now); wait != 2500*time.Millisecond {
		t.Errorf("50,000 too many are held back for %s, want 2.5s at 20,000 a second", wait)
	}
	if wait := p.take(1, &limits, now.Add(3*time.Second)); wait != 0 {
		t.Errorf("afterwards one is held back for %s", wait)
	}
	limits.MaxEventsPerSecond = 0
	if wait := p.take(1<<30, &limits, now); wait != 0 {
		t.Errorf("without a bound, held back for %s", wait)
	}
}

// More keys than are worth to be remembered end the connection, with a reason; what is in use stays.
//
// lesson: R10
func TestTooManyKeys(t *testing.T) {
	t.Parallel()
	s := newScene(t, func(c *Config) { defaultLimits(40)(c) })
	s.west.putAll(flood(200))
	r := s.await("west", "the end", func(r RemoteStatus) bool { return r.State != Ready && strings.Contains(r.LastError, "too many keys") })
	if !strings.Contains(r.LastError, "max-entries") {
		t.Errorf("the error %q does not say what to do", r.LastError)
	}
	if got := len(s.westIPs()); got < 3 || got > 20 {
		t.Errorf("%d entries of west, want 3 to 20", got)
	}
	s.west.etcd.DeletePrefix(t, "cilium/state/ip/v1/default/10.2.10")
	s.awaitState("west", Ready)
}

// A cluster whose id changes ten times a second brings nobody else out of step, and ends up where it ends.
//
// lesson: R11 C3
func TestFlippingID(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	others := s.others()
	for i := range 30 {
		// Among the ids are that of another cluster, and ours.
		id := []int{2, 1, 9, 3, 0, 256, 7}[i%7]
		s.west.config(fmt.Sprintf(`{"id":%d,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255}}`, id))
		if got := s.others(); fmt.Sprint(got) != fmt.Sprint(others) {
			t.Fatalf("id %d: what is not west's: %q, want %q", id, got, others)
		}
		time.Sleep(100 * time.Millisecond)
	}
	s.west.config(`{"id":2,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255}}`)
	s.awaitState("west", Ready)
	testutil.Eventually(t, soon, func() error {
		if got := s.westIPs(); len(got) != 3 {
			return fmt.Errorf("entries of west: %q", got)
		}
		return nil
	})
	if got := s.others(); fmt.Sprint(got) != fmt.Sprint(others) {
		t.Errorf("what is not west's: %q, want %q", got, others)
	}
	for _, name := range []string{"east", "north"} {
		if r, _ := s.remote(name); r.State != Ready || r.Reconnects != 0 {
			t.Errorf("cluster %s: %+v", name, r)
		}
	}
}

// BenchmarkGate is the decoding of announcements with and without the checks that remote clusters go through, of a table of
// 500 nodes per cluster in ten clusters; the difference is what the checks cost.
func BenchmarkGate(b *testing.B) {
	for _, checked := range []bool{false, true} {
		b.Run(fmt.Sprintf("checked=%v", checked), func(b *testing.B) { benchmarkGate(b, checked) })
	}
}

func benchmarkGate(b *testing.B, checked bool) {
	const batch, perNode = 1000, 100
	layout, err := identity.NewLayout(255)
	if err != nil {
		b.Fatal(err)
	}
	cfg := Config{
		ClusterID: 9, Layout: layout, MaxEntries: 1 << 30,
		IPs: ipcache.New(), Nodes: node.NewTable(), Identities: identity.NewTable(), Services: service.NewTable(), Log: newTextLog(&logBuffer{}),
	}
	if err := cfg.complete(); err != nil {
		b.Fatal(err)
	}
	policy, err := newPolicy(&cfg, testTiming)
	if err != nil {
		b.Fatal(err)
	}
	m := &Mesh{cfg: cfg, policy: policy, ground: newGround(9)}
	host := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{172, 18, byte(n >> 8), byte(n)}) }
	fs := newRemote(m, "west").newFeeds(2, false)
	for c := range 10 {
		for n := range 500 {
			m.ground.declare(identity.ClusterID(c), fmt.Sprint(n), []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{11 + byte(c), byte(n >> 8), byte(n), 0}), 24)})
			fs.gate.hosts.replace(nil, []netip.Addr{host(n)}, true)
		}
	}
	m.ground.publish()
	d := fs.ips.decode.(*ips)
	if !checked {
		d.judge = nil
	}
	var keys, values [batch][]byte
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		if i := n % batch; i == 0 {
			b.StopTimer()
			d.flush(time.Time{})
			for j := range batch {
				k := (n + j) % 1_000_000
				addr := netip.AddrFrom4([4]byte{10, byte(k >> 16), byte(k >> 8), byte(k)})
				keys[j] = []byte(addr.String())
				values[j] = fmt.Appendf(nil, `{"IP":%q,"Mask":null,"HostIP":%q,"ID":131329,"Key":0,"Metadata":"",`+
					`"K8sNamespace":"shop","K8sPodName":"pod-%d-7d9c8f6b5-x2k4q"}`, addr, host(k/perNode%500), k)
			}
			b.StartTimer()
		}
		if err := d.upsert(keys[n%batch], values[n%batch], int64(n)); err != nil {
			b.Fatal(err)
		}
	}
}

// The checks allocate nothing.
func TestChecksDoNotAllocate(t *testing.T) {
	_, _, _, d, _ := decoders(t)
	a, err := ipcache.ParseAnnouncement([]byte("10.2.1.10"), []byte(announce("10.2.1.10", 2<<16+257, "")))
	if err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(1000, func() {
		if id, err := d.judge.identity(a.Identity); err != nil || id != a.Identity {
			t.Fatal(err)
		}
		if _, err := d.judge.announcement(a.Prefix, a.Identity, a.Host); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations per check, want none", n)
	}
}
