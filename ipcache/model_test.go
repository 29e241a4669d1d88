// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/weftmesh/weft/identity"
)

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

// conflicts lists as the table does.
func (o oracle) conflicts() (all [][]Claim) {
	for _, p := range slices.SortedFunc(maps.Keys(o), netip.Prefix.Compare) {
		claims := o.claims(p)
		if slices.ContainsFunc(claims, func(c Claim) bool {
			return (c.Owner.Cluster != claims[0].Owner.Cluster || c.Owner.Source != claims[0].Owner.Source) &&
				visible(c.Entry) != visible(claims[0].Entry)
		}) {
			all = append(all, claims)
		}
	}
	return all
}

// visible is what the kernel holds of an entry, and readers are told.
func visible(e Entry) Entry {
	return Entry{Identity: e.Identity, Host: e.Host, EncryptKey: e.EncryptKey, Flags: e.Flags}
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

// objectKey is what a cluster keeps a claim under.
type objectKey struct {
	prefix netip.Prefix
	cidr   bool
	owner  Owner
}

func keyOfObject(c Claim) objectKey { return objectKey{c.Prefix, c.CIDR, c.Owner} }

// remote is a cluster: what it says now, and what it had said when it was last heard.
type remote struct {
	says, heard map[objectKey]Claim
	connected   bool
}

// world is a table between clusters that come and go and readers with a pace of their own, beside a naive twin.
type world struct {
	t       *rapid.T
	table   *Table
	model   oracle
	remotes [5]remote
	readers []*follower
}

func newWorld(t *rapid.T) *world {
	w := &world{t: t, table: New(), model: make(oracle)}
	w.table.floor, w.table.unreadLimit = 3, 20 // so that readers are late at times
	for i := range w.remotes {
		w.remotes[i] = remote{says: make(map[objectKey]Claim), heard: make(map[objectKey]Claim), connected: true}
	}
	for _, batch := range []int{1, 7, 64} {
		w.readers = append(w.readers, newFollower(w.table, batch))
	}
	return w
}

func (w *world) apply(ops []Op) {
	for _, op := range ops {
		w.model.apply(op)
	}
	if refused := w.table.Apply(ops); refused != 0 {
		w.t.Fatalf("%d of %v refused", refused, ops)
	}
}

// write lets clusters say or take back a few things; those that are connected are heard.
func (w *world) write() {
	var ops []Op
	for range rapid.IntRange(1, 5).Draw(w.t, "batch") {
		c := genClaim.Draw(w.t, "claim")
		r, op := &w.remotes[c.Owner.Cluster], Op{Delete: rapid.Bool().Draw(w.t, "delete"), Claim: c}
		views := []map[objectKey]Claim{r.says, r.heard}
		if !r.connected {
			views = views[:1]
		}
		for _, v := range views {
			if v[keyOfObject(c)] = c; op.Delete {
				delete(v, keyOfObject(c))
			}
		}
		if r.connected {
			ops = append(ops, op)
		}
	}
	w.apply(ops)
}

func (w *world) remote() *remote { return &w.remotes[rapid.IntRange(0, 4).Draw(w.t, "cluster")] }

// reconnect lists a cluster anew: everything it says is heard, then what it no longer says is swept.
func (w *world) reconnect(r *remote) {
	var ops []Op
	for _, c := range sorted(r.says) {
		ops = append(ops, Op{Claim: c})
	}
	for _, c := range sorted(r.heard) {
		if _, ok := r.says[keyOfObject(c)]; !ok {
			ops = append(ops, Op{Delete: true, Claim: c})
		}
	}
	size := rapid.IntRange(1, 20).Draw(w.t, "size")
	for batch := range slices.Chunk(ops, size) {
		w.apply(batch)
	}
	r.heard, r.connected = maps.Clone(r.says), true
}

// sorted makes a step depend on nothing but what was drawn.
func sorted(m map[objectKey]Claim) []Claim {
	return slices.SortedFunc(maps.Values(m), func(a, b Claim) int {
		if c := a.Prefix.Compare(b.Prefix); c != 0 {
			return c
		}
		return a.Compare(b)
	})
}

// step does one thing.
func (w *world) step() {
	switch n := rapid.IntRange(0, 99).Draw(w.t, "action"); {
	case n < 70:
		w.write()
	case n < 85:
		w.readers[n%len(w.readers)].step()
	case n < 88:
		w.remote().connected = false
	case n < 92:
		w.reconnect(w.remote())
	case n < 94: // a drain
		r := w.remote()
		clear(r.says)
		w.reconnect(r)
	case n < 96: // the agent restarts: its kernel keeps what it had
		f := w.readers[n%len(w.readers)]
		f.at, f.fresh = Revision{}, make(map[netip.Prefix]bool)
	case n < 97:
		f := w.readers[n%len(w.readers)]
		f.catchUp()
	default:
		w.checkSome()
	}
}

// checkSome compares what can be asked of one prefix.
func (w *world) checkSome() {
	p := genPrefix.Draw(w.t, "prefix")
	if diff := cmp.Diff(w.model.claims(p), w.table.Claims(p), netipEqual); diff != "" {
		w.t.Fatalf("claims for %s (-want +got):\n%s", p, diff)
	}
	want, wantOK := w.model.lookup(p.Addr())
	if got, ok := w.table.Lookup(p.Addr()); got != want || ok != wantOK {
		w.t.Fatalf("lookup of %s: got %v, want %v", p.Addr(), got, want)
	}
	if got, want := w.table.Conflicted(), len(w.model.conflicts()); got != want {
		w.t.Fatalf("%d prefixes in conflict, want %d", got, want)
	}
}

// checkAll compares everything, once the readers have come to rest.
func (w *world) checkAll() {
	want, byIdentity := make(map[netip.Prefix]Claim), make(map[netip.Prefix]Claim)
	shown := make(map[netip.Prefix]Entry)
	for p := range w.model {
		c := w.model.claims(p)[0]
		want[p], shown[p] = c, visible(c.Entry)
		if c.Entry.Identity == 1 {
			byIdentity[p] = c
		}
	}
	collect := func(m map[netip.Prefix]Claim) []Claim {
		return slices.SortedFunc(maps.Values(m), func(a, b Claim) int { return a.Prefix.Compare(b.Prefix) })
	}
	got := make(map[netip.Prefix]Claim)
	for c := range w.table.All() {
		got[c.Prefix] = c
	}
	for _, v := range []struct {
		name      string
		want, got any
	}{
		{"number of prefixes", len(w.model), w.table.Len()},
		{"winners", want, got},
		{"prefixes of identity 1", collect(byIdentity), slices.Collect(w.table.ByIdentity(1))},
		{"conflicts", w.model.conflicts(), slices.Collect(w.table.Conflicts(netip.Prefix{}))},
	} {
		if diff := cmp.Diff(v.want, v.got, netipEqual); diff != "" {
			w.t.Fatalf("%s (-want +got):\n%s", v.name, diff)
		}
	}
	for _, r := range w.readers {
		r.catchUp()
		if diff := cmp.Diff(shown, r.seen, netipEqual); diff != "" {
			w.t.Fatalf("a reader in steps of %d saw (-want +got):\n%s", cap(r.buf), diff)
		}
	}
}

// checkEmpty drains all clusters: nothing is left, of claims as of memory.
func (w *world) checkEmpty() {
	for i := range w.remotes {
		clear(w.remotes[i].says)
		w.reconnect(&w.remotes[i])
	}
	w.checkAll()
	w.table.floor = 0
	w.table.Apply(nil)
	t := w.table
	if held := t.slots.chunks[0].used - 1; held != 0 || t.index.live != 0 || len(t.others) != 0 || t.torn != 0 ||
		t.origins.used != 0 || t.names.groups.used != 0 || t.slots.uppers.used != 0 || t.names.dead != t.names.size {
		w.t.Fatalf("an empty table holds %d slots, %d cells, %d chains, %d conflicts, %d origins, %d groups, %d upper halves, %d of %d bytes of names",
			held, t.index.live, len(t.others), t.torn, t.origins.used, t.names.groups.used, t.slots.uppers.used,
			t.names.size-t.names.dead, t.names.size)
	}
}

// TestModel lets five clusters speak, fall silent, be listed anew and be drained, and readers read with small buffers,
// fall behind and start again, and holds the table to the twin: some 10,000 steps, in the long form a million.
//
// mechanism: G1, G3, G6
// lesson: C5, C6, C9
func TestModel(t *testing.T) {
	steps := 100 // times rapid's 100 runs
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		steps = 10_000
	}
	resets := 0
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(rt)
		for i := range steps {
			w.step()
			if i%(steps/10) == 5 {
				w.checkAll()
			}
		}
		w.checkAll()
		w.checkEmpty()
		for _, r := range w.readers {
			resets += r.reset
		}
	})
	if resets == 0 {
		t.Error("no reader was ever late enough for a reset")
	}
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
