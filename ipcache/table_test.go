// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil/golden"
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

// TestScenarios replays what Cilium's own table was seen to do. Where the two differ on purpose, the difference is here.
//
// mechanism: G1 G2 G4 G5 G6 G8
func TestScenarios(t *testing.T) {
	type event struct {
		Op, Prefix string
		Identity   identity.ID
		Source     string
	}
	type step struct {
		Do, IP, Source, Scenario, Error string
		Host                            string `json:"host_ip"`
		Identity                        identity.ID
		Events                          []event
		Step                            int
	}
	different := map[string][]event{
		// A claim that lost is kept, so that no hole remains when the winner goes: deleting the strongest claim brings
		// back the next one (k8s), which Cilium has forgotten.
		"source-precedence/5": {{"Upsert", "10.2.1.10/32", 65793, "k8s"}},
	}
	var (
		table    *Table
		f        *follower
		scenario string
	)
	steps := golden.Lines[step](t, "ipcache-scenarios.jsonl")
	if len(steps) < 20 {
		t.Fatalf("only %d steps", len(steps))
	}
	for _, s := range steps {
		// Two clusters that claim one address are a test of their own, TestClustersDisagree: Cilium knows no owners.
		if s.Scenario == "same-source-overwrite-two-clusters" {
			continue
		}
		if s.Scenario != scenario {
			table, scenario = New(), s.Scenario
			f = newFollower(table, 16)
		}
		name := fmt.Sprintf("%s/%d", s.Scenario, s.Step)
		p, isCIDR, ok := parse(t, s.IP)
		if !ok {
			if s.Error == "" {
				t.Errorf("%s: %q is no prefix, but Cilium takes it", name, s.IP)
			}
			continue // what is no prefix has no type to reach the table in
		}
		var source Source
		if err := source.UnmarshalText([]byte(s.Source)); err != nil {
			t.Fatal(err)
		}
		table.Apply([]Op{{Delete: s.Do == "delete", Claim: Claim{
			Prefix: p, CIDR: isCIDR, Owner: Owner{Source: source}, Entry: Entry{Identity: s.Identity, Host: host(s.Host)},
		}}})
		f.log = nil
		f.catchUp()
		var got []event
		for _, c := range f.log {
			if c.Deleted {
				got = append(got, event{Op: "Delete", Prefix: c.Prefix.String()})
			} else {
				got = append(got, event{"Upsert", c.Prefix.String(), c.Entry.Identity, c.Owner.Source.String()})
			}
		}
		want := s.Events
		if d, ok := different[name]; ok {
			want = d
		}
		for i := range want {
			if want[i].Op == "Delete" { // what was deleted is the reader's to know
				want[i] = event{Op: "Delete", Prefix: want[i].Prefix}
			}
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s: events (-want +got):\n%s", name, diff)
		}
	}
}

// mechanism: G2
func TestPrecedence(t *testing.T) {
	seen := 0
	for _, v := range golden.Lines[struct {
		Allowed       *bool
		Existing, New Source
	}](t, "source-precedence.jsonl") {
		if v.Allowed == nil || v.Existing == v.New {
			continue
		}
		seen++
		table := New()
		p := netip.MustParsePrefix("10.0.0.1/32")
		table.Apply([]Op{
			{Claim: Claim{Prefix: p, Owner: Owner{Source: v.Existing}, Entry: Entry{Identity: 1}}},
			{Claim: Claim{Prefix: p, Owner: Owner{Source: v.New}, Entry: Entry{Identity: 2}}},
		})
		winner, _ := table.Get(p)
		if won := winner.Owner.Source == v.New; won != *v.Allowed {
			t.Errorf("%s over %s: got %v, want %v", v.New, v.Existing, won, *v.Allowed)
		}
	}
	if seen != 110 {
		t.Errorf("%d pairs were tried, want 110", seen)
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
// lesson: X8 X9
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

// oracle is the plainest table: a list of claims.
type oracle map[netip.Prefix][]Claim

func (o oracle) apply(op Op) {
	c := op.Claim
	claims := slices.DeleteFunc(o[c.Prefix], func(d Claim) bool { return d.CIDR == c.CIDR && d.Owner == c.Owner })
	if !op.Delete {
		claims = append(claims, c)
	}
	if o[c.Prefix] = claims; len(claims) == 0 {
		delete(o, c.Prefix)
	}
}

func (o oracle) claims(p netip.Prefix) []Claim {
	claims := slices.Clone(o[p])
	slices.SortFunc(claims, Claim.Compare)
	return claims
}

func (o oracle) lookup(addr netip.Addr) (Claim, bool) {
	best := netip.Prefix{}
	for p := range o {
		if p.Contains(addr) && (!best.IsValid() || p.Bits() > best.Bits()) {
			best = p
		}
	}
	if !best.IsValid() {
		return Claim{}, false
	}
	return o.claims(best)[0], true
}

var (
	genPrefix = rapid.Custom(func(t *rapid.T) netip.Prefix {
		length := rapid.SampledFrom([]int{0, 8, 24, 30, 32, 32, 32}).Draw(t, "length")
		addr := netip.AddrFrom4([4]byte{10, 0, 0, rapid.ByteRange(0, 7).Draw(t, "byte")})
		if rapid.Bool().Draw(t, "v6") {
			b := addr.As16()
			b[0] = 0xfd
			addr, length = netip.AddrFrom16(b), length*4
		}
		p, _ := addr.Prefix(length)
		return p
	})
	genClaim = rapid.Custom(func(t *rapid.T) Claim {
		return Claim{
			Prefix: genPrefix.Draw(t, "prefix"),
			CIDR:   rapid.Bool().Draw(t, "cidr"),
			Owner: Owner{
				Cluster: identity.ClusterID(rapid.IntRange(0, 4).Draw(t, "cluster")),
				Source:  rapid.SampledFrom([]Source{Local, KVStore, ClusterMesh, Generated}).Draw(t, "source"),
				Object:  rapid.SampledFrom([]string{"ip", "node/a", "node/b"}).Draw(t, "object"),
			},
			Revision: rapid.Int64Range(0, 3).Draw(t, "revision"),
			Entry: Entry{
				Identity:   identity.ID(rapid.IntRange(1, 4).Draw(t, "identity")),
				Host:       host(rapid.SampledFrom([]string{"", "172.18.2.1", "172.18.2.2", "fd00::1"}).Draw(t, "host")),
				Namespace:  rapid.SampledFrom([]string{"", "shop"}).Draw(t, "namespace"),
				Pod:        rapid.SampledFrom([]string{"", "web-0", "web-1"}).Draw(t, "pod"),
				NamedPorts: rapid.SampledFrom([]NamedPorts{"", `[{"Name":"http","Port":80,"Protocol":"TCP"}]`}).Draw(t, "ports"),
			},
		}
	})
)

// TestModel holds the table, and a reader that follows it at its own pace, to the oracle.
//
// mechanism: G1 G3 G6
// lesson: C5 C6 C9
func TestModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		table, model := New(), make(oracle)
		readers := []*follower{newFollower(table, 1), newFollower(table, 7)}
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			var ops []Op
			for range rapid.IntRange(1, 5).Draw(rt, "batch") {
				op := Op{Delete: rapid.Bool().Draw(rt, "delete"), Claim: genClaim.Draw(rt, "claim")}
				ops = append(ops, op)
				model.apply(op)
			}
			table.Apply(ops)
			for _, r := range readers {
				if rapid.Bool().Draw(rt, "read") {
					r.step()
				}
			}
		}
		if table.Len() != len(model) {
			rt.Fatalf("%d prefixes, want %d", table.Len(), len(model))
		}
		for p := range model {
			if diff := cmp.Diff(model.claims(p), table.Claims(p), netipEqual); diff != "" {
				rt.Fatalf("claims for %s (-want +got):\n%s", p, diff)
			}
			want, wantOK := model.lookup(p.Addr())
			if got, ok := table.Lookup(p.Addr()); got != want || ok != wantOK {
				rt.Fatalf("lookup of %s: got %v, want %v", p.Addr(), got, want)
			}
		}
		for claim := range table.All() {
			if claim != model.claims(claim.Prefix)[0] {
				rt.Fatalf("All yields %v, want %v", claim, model.claims(claim.Prefix)[0])
			}
		}
		for _, r := range readers {
			r.catchUp()
			want := make(map[netip.Prefix]Entry)
			for p := range model {
				e := model.claims(p)[0].Entry
				e.Namespace, e.Pod, e.NamedPorts = "", "", ""
				want[p] = e
			}
			if diff := cmp.Diff(want, r.seen, netipEqual); diff != "" {
				rt.Fatalf("a reader in steps of %d saw (-want +got):\n%s", cap(r.buf), diff)
			}
		}
	})
}

// TestOrderDoesNotMatter applies the same claims in random orders: the winners are the same.
func TestOrderDoesNotMatter(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		claims := rapid.SliceOfN(genClaim, 1, 20).Draw(rt, "claims")
		type key struct {
			p     netip.Prefix
			cidr  bool
			owner Owner
		}
		unique := make(map[key]bool)
		var ops []Op
		for _, c := range claims {
			if k := (key{c.Prefix, c.CIDR, c.Owner}); !unique[k] {
				unique[k] = true
				ops = append(ops, Op{Claim: c})
			}
		}
		first, second := New(), New()
		first.Apply(ops)
		second.Apply(rapid.Permutation(ops).Draw(rt, "order"))
		for _, op := range ops {
			a, _ := first.Get(op.Claim.Prefix)
			b, _ := second.Get(op.Claim.Prefix)
			if a != b {
				rt.Fatalf("winner for %s: %v in one order, %v in another", op.Claim.Prefix, a, b)
			}
		}
	})
}

// TestChurn grows and shrinks a large table, so that slots, names and index cells are reused and compacted.
func TestChurn(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	table, model := New(), make(map[netip.Prefix]Claim)
	f := newFollower(table, 512)
	for round := range 60 {
		var ops []Op
		for range 2000 {
			n := rnd.IntN(20_000)
			addr := netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
			c := Claim{Prefix: netip.PrefixFrom(addr, 32), Owner: Owner{Cluster: 2, Source: ClusterMesh, Object: "ip"}, Revision: int64(round)}
			c.Entry = Entry{Identity: identity.ID(rnd.IntN(1000)), Namespace: "shop", Pod: fmt.Sprintf("pod-%d-%d", n, round)}
			op := Op{Delete: rnd.IntN(100) < 30+40*(round/15%2), Claim: c}
			if ops = append(ops, op); op.Delete {
				delete(model, c.Prefix)
			} else {
				model[c.Prefix] = c
			}
		}
		table.Apply(ops)
		if rnd.IntN(3) > 0 {
			f.catchUp()
		}
	}
	f.catchUp()
	if table.Len() != len(model) || len(f.seen) != len(model) {
		t.Fatalf("table has %d, reader %d, want %d", table.Len(), len(f.seen), len(model))
	}
	for p, want := range model {
		if got, ok := table.Get(p); !ok || got != want {
			t.Fatalf("%s: got %v, want %v", p, got, want)
		}
		if got := f.seen[p]; got.Identity != want.Entry.Identity {
			t.Fatalf("%s: the reader has %v, want %v", p, got, want.Entry)
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
