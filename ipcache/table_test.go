// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"github.com/weftmesh/weft/identity"
)

// parse reads the store's key of a scenario: an address is a host, a prefix a CIDR.
func parse(t testing.TB, s string) (p netip.Prefix, isCIDR, ok bool) {
	t.Helper()
	if addr, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(addr, addr.BitLen()), false, true
	}
	p, err := netip.ParsePrefix(s)
	return p.Masked(), true, err == nil
}

func host(s string) netip.Addr {
	if s == "" {
		return netip.Addr{}
	}
	return netip.MustParseAddr(s)
}

// follower applies a table's changes to a copy, as the datapath does to the kernel's map.
type follower struct {
	table *Table
	at    Revision
	seen  map[netip.Prefix]Entry
	fresh map[netip.Prefix]bool // given since the last reset; nil if there was none
	buf   []Change
	log   []Change
	reset int
}

func newFollower(t *Table, batch int) *follower {
	return &follower{table: t, seen: make(map[netip.Prefix]Entry), buf: make([]Change, 0, batch)}
}

// step takes one batch and reports whether there was any.
func (f *follower) step() bool {
	batch, next, reset := f.table.Changes(f.at, f.buf)
	f.at = next
	if reset {
		f.reset++
		f.fresh = make(map[netip.Prefix]bool)
	}
	for _, c := range batch {
		f.log = append(f.log, c)
		if c.Deleted {
			delete(f.seen, c.Prefix)
		} else {
			f.seen[c.Prefix] = c.Entry
		}
		if f.fresh != nil {
			f.fresh[c.Prefix] = true
		}
	}
	if len(batch) == 0 && f.fresh != nil {
		for p := range f.seen {
			if !f.fresh[p] {
				delete(f.seen, p)
			}
		}
		f.fresh = nil
	}
	return len(batch) > 0
}

func (f *follower) catchUp() {
	for f.step() {
	}
}

// Two clusters that claim one address: the lowest cluster id wins whoever came first, and a deletion takes back only
// what its own cluster claimed. (In Cilium the last writer wins, and a deletion by either removes both.)
//
// lesson: C5
func TestClustersDisagree(t *testing.T) {
	p := netip.MustParsePrefix("10.9.9.9/32")
	claim := func(cluster identity.ClusterID, id identity.ID) Claim {
		return Claim{Prefix: p, Owner: Owner{Cluster: cluster, Source: ClusterMesh, Object: "ip"}, Entry: Entry{Identity: id}}
	}
	west, north := claim(2, 131329), claim(3, 196865)
	for name, ops := range map[string][]Op{
		"west first":  {{Claim: west}, {Claim: north}},
		"north first": {{Claim: north}, {Claim: west}},
	} {
		table := New()
		table.Apply(ops)
		if got := table.Claims(p); len(got) != 2 || got[0] != west || got[1] != north {
			t.Errorf("%s: got %v", name, got)
		}
		table.Apply([]Op{{Delete: true, Claim: north}})
		if got, _ := table.Get(p); got != west {
			t.Errorf("%s: after the loser went: %v", name, got)
		}
		table.Apply([]Op{{Claim: north}, {Delete: true, Claim: west}})
		if got, _ := table.Get(p); got != north {
			t.Errorf("%s: after the winner went: %v", name, got)
		}
	}
}

// An address that moves to a new node before the old one is deleted stays with the new one.
//
// lesson: X8, X9
func TestLateDeletion(t *testing.T) {
	p := netip.MustParsePrefix("10.2.1.1/32")
	claim := func(object string, rev int64) Claim {
		return Claim{
			Prefix: p, Owner: Owner{Cluster: 2, Source: ClusterMesh, Object: object}, Revision: rev,
			Entry: Entry{Identity: identity.RemoteNode, Host: host("172.18.2.1")},
		}
	}
	table := New()
	table.Apply([]Op{{Claim: claim("node/old", 10)}, {Claim: claim("node/new", 11)}})
	if got, _ := table.Get(p); got.Owner.Object != "node/new" {
		t.Errorf("the later statement of one cluster did not win: %v", got)
	}
	table.Apply([]Op{{Delete: true, Claim: claim("node/old", 12)}})
	if got, ok := table.Get(p); !ok || got.Owner.Object != "node/new" {
		t.Errorf("after the old node's deletion: %v, %v", got, ok)
	}
}

func TestNames(t *testing.T) {
	table := New()
	p := netip.MustParsePrefix("10.0.0.1/32")
	ports := NewNamedPorts([]NamedPort{{"http", 8080, "TCP"}, {"dns", 53, "UDP"}})
	claim := Claim{Prefix: p, Owner: Owner{Source: Local}, Entry: Entry{
		Identity: 300, Namespace: "shop", Pod: "web-0", ServiceAccount: "web", NamedPorts: ports,
	}}
	table.Apply([]Op{{Claim: claim}})
	f := newFollower(table, 8)
	f.catchUp()
	f.log = nil
	for _, change := range []func(e *Entry){
		func(e *Entry) { e.Pod = "web-1" },
		func(e *Entry) { e.Namespace = "" },
		func(e *Entry) { e.ServiceAccount = "" },
		func(e *Entry) { e.NamedPorts = "" },
		func(e *Entry) { e.Pod = "" }, // has none at all
		func(e *Entry) { e.NamedPorts = ports },
	} {
		change(&claim.Entry)
		table.Apply([]Op{{Claim: claim}})
		if got, _ := table.Get(p); got != claim {
			t.Errorf("got %v, want %v", got, claim)
		}
	}
	if f.catchUp(); len(f.log) != 0 {
		t.Errorf("the kernel does not hold names, yet new ones are a change: %v", f.log)
	}
	long := string(slices.Repeat([]byte("x"), 300))
	var many []NamedPort
	for i := range 1000 {
		many = append(many, NamedPort{fmt.Sprintf("port-%d", i), uint16(i), "TCP"})
	}
	claim.Entry = Entry{Pod: long, Namespace: long, ServiceAccount: long, NamedPorts: NewNamedPorts(many)}
	table.Apply([]Op{{Claim: claim}})
	got, _ := table.Get(p)
	if e := got.Entry; e.Pod != long[:255] || e.Namespace != long[:255] || e.ServiceAccount != long[:255] {
		t.Errorf("names of 300 bytes are kept as %d, %d and %d", len(e.Pod), len(e.Namespace), len(e.ServiceAccount))
	}
	kept := slices.Collect(got.Entry.NamedPorts.All())
	if n := len(kept); n < 40 || n > 60 || !slices.Equal(kept, many[:n]) {
		t.Errorf("of 1000 ports %d are kept: %v", n, kept)
	}
}

// What a claim says may stand in a buffer that is reused.
func TestNoAliases(t *testing.T) {
	buffer := []byte("node/ashopweb-0web" + `[{"Name":"http","Port":80,"Protocol":"TCP"}]`)
	text := func(from, to int) string { return unsafe.String(&buffer[from], to-from) }
	claim := Claim{
		Prefix: netip.MustParsePrefix("10.0.0.1/32"), Owner: Owner{Source: Local, Object: text(0, 6)},
		Entry: Entry{Namespace: text(6, 10), Pod: text(10, 15), ServiceAccount: text(15, 18), NamedPorts: NamedPorts(text(18, len(buffer)))},
	}
	table := New()
	table.Apply([]Op{{Claim: claim}})
	clear(buffer)
	got, _ := table.Get(claim.Prefix)
	want := Claim{
		Prefix: claim.Prefix, Owner: Owner{Source: Local, Object: "node/a"},
		Entry: Entry{Namespace: "shop", Pod: "web-0", ServiceAccount: "web", NamedPorts: NewNamedPorts([]NamedPort{{"http", 80, "TCP"}})},
	}
	if got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestChanged(t *testing.T) {
	table := New()
	claim := Claim{Prefix: netip.MustParsePrefix("10.0.0.1/32"), Owner: Owner{Source: Local}, Entry: Entry{Identity: 300}}
	for i, v := range []struct {
		op   Op
		want bool
	}{{Op{Claim: claim}, true}, {Op{Claim: claim}, false}, {Op{Delete: true, Claim: claim}, true}, {Op{Delete: true, Claim: claim}, false}} {
		changed := table.Changed()
		table.Apply([]Op{v.op})
		select {
		case <-changed:
			if !v.want {
				t.Errorf("step %d: a change was announced where there was none", i)
			}
		default:
			if v.want {
				t.Errorf("step %d: a change was not announced", i)
			}
		}
	}
}

// A reader that is too late for deletions that were forgotten starts again and ends with the table's content. They are
// forgotten once another reader has read them, or when there are too many.
func TestReset(t *testing.T) {
	const n = 40_000
	claim := func(i int) Claim {
		addr := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		return Claim{Prefix: netip.PrefixFrom(addr, 32), Owner: Owner{Source: Local}, Entry: Entry{Identity: 300}}
	}
	for _, v := range []struct {
		name   string
		limit  int
		prompt bool
		resets int
	}{
		{"read by nobody", unreadLimit, false, 0},
		{"read by another", unreadLimit, true, 1},
		{"too many", n / 2, false, 1},
	} {
		table := New()
		table.unreadLimit = v.limit
		late, prompt := newFollower(table, 1000), newFollower(table, 1000)
		var ops []Op
		for i := range n {
			ops = append(ops, Op{Claim: claim(i)})
		}
		table.Apply(ops)
		for range 10 {
			late.step() // has seen a quarter
		}
		for i := range ops {
			ops[i].Delete = true
		}
		for batch := range slices.Chunk(ops[:n-10], 1000) {
			if table.Apply(batch); v.prompt {
				prompt.catchUp()
			}
		}
		if table.Len() != 10 {
			t.Fatalf("%s: %d prefixes are left, want 10", v.name, table.Len())
		}
		late.catchUp()
		if late.reset != v.resets || len(late.seen) != 10 {
			t.Errorf("%s: late reader: %d resets, %d entries, want %d and 10", v.name, late.reset, len(late.seen), v.resets)
		}
		prompt.catchUp()
		for range 2 * n / 64 { // what memory is left is worked off with the next batches
			table.Apply(nil)
		}
		if held := table.tombstones; held > tombstoneFloor+5 {
			t.Errorf("%s: %d tombstones are kept", v.name, held)
		}
		if c := table.slots.capacity(); c > 2*tombstoneFloor {
			t.Errorf("%s: memory is held for %d slots", v.name, c)
		}
		if c := len(table.index.cells); c > 8*tombstoneFloor {
			t.Errorf("%s: memory is held for %d cells of the index", v.name, c)
		}
	}
}

// BenchmarkTable prints what an entry costs: nanoseconds to claim, and bytes of heap with namespace and pod name kept.
func BenchmarkTable(b *testing.B) {
	const n = 500_000
	ops := make([]Op, 0, 1024)
	for b.Loop() {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		table := New()
		for i := range n {
			addr := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
			ops = append(ops, Op{Claim: Claim{
				Prefix: netip.PrefixFrom(addr, 32), Owner: Owner{Cluster: 2, Source: ClusterMesh, Object: "ip"}, Revision: int64(i),
				Entry: Entry{
					Identity: identity.ID(131072 + i%1000), Host: netip.AddrFrom4([4]byte{172, 18, byte(i >> 16), byte(i >> 8)}),
					Namespace: "namespace-7", Pod: "frontend-7d9f8b6c5-x2x4z",
				},
			}})
			if len(ops) == cap(ops) {
				table.Apply(ops)
				ops = ops[:0]
			}
		}
		table.Apply(ops)
		ops = ops[:0]
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "B/entry")
		runtime.KeepAlive(table)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/entry")
}
