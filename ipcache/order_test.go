// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/weftmesh/weft/identity"
)

// permutations returns the 120 orders of five things.
func permutations() (all [][]int) {
	var extend func(order []int)
	extend = func(order []int) {
		if len(order) == 5 {
			all = append(all, slices.Clone(order))
			return
		}
		for i := range 5 {
			if !slices.Contains(order, i) {
				extend(append(order, i))
			}
		}
	}
	extend(nil)
	return all
}

// fiveClaims are five claims each that get in each other's way, by the way in which they do.
func fiveClaims(t *testing.T) map[string][]Claim {
	claim := func(prefix string, n int, change func(*Claim)) Claim {
		c := claimed(t, prefix, identity.ClusterID(n), identity.ID(1000+n))
		c.Revision = int64(n)
		c.Entry.Host = netip.AddrFrom4([4]byte{172, 18, 0, byte(n)})
		if change != nil {
			change(&c)
		}
		return c
	}
	source := func(s Source) func(*Claim) { return func(c *Claim) { c.Owner.Source = s } }
	// A prefix as somebody wrote it who did not mask it.
	raw := func(prefix string) func(*Claim) {
		return func(c *Claim) { c.Prefix = netip.MustParsePrefix(prefix) }
	}
	return map[string][]Claim{
		"one address, five clusters": {
			claim("10.0.0.1", 5, nil), claim("10.0.0.1", 4, nil), claim("10.0.0.1", 3, nil), claim("10.0.0.1", 2, nil),
			claim("10.0.0.1", 1, source(Generated)),
		},
		"a host and the CIDR of one address": {
			claim("10.0.0.1", 3, nil), claim("10.0.0.1", 4, source(Restored)), claim("10.0.0.1/32", 1, source(KubeAPIServer)),
			claim("10.0.0.1/32", 2, source(Generated)), claim("10.0.0.0/31", 5, nil),
		},
		"one in another, IPv6": {
			claim("::/0", 1, nil), claim("fd00::/8", 2, nil), claim("fd00::/64", 3, nil), claim("fd00::1/128", 4, nil), claim("fd00::1", 5, nil),
		},
		"not masked": {
			claim("10.0.0.0/8", 2, raw("10.0.0.1/8")), claim("10.0.0.0/8", 3, raw("10.255.0.0/8")), claim("10.0.0.0/8", 4, nil),
			claim("10.0.0.0/24", 5, raw("10.0.0.9/24")), claim("0.0.0.0/0", 1, raw("10.0.0.1/0")),
		},
		"objects of one cluster": {
			claim("10.0.0.1", 2, func(c *Claim) { c.Owner.Cluster, c.Owner.Object = 2, "node/a" }),
			claim("10.0.0.1", 3, func(c *Claim) { c.Owner.Cluster, c.Owner.Object = 2, "node/b" }),
			claim("10.0.0.1", 3, func(c *Claim) { c.Owner.Cluster, c.Owner.Object = 2, "node/c" }),
			claim("10.0.0.1", 1, func(c *Claim) { c.Owner.Cluster, c.Owner.Source = 2, Local }),
			claim("10.0.0.1/32", 9, func(c *Claim) { c.Owner.Cluster = 2 }),
		},
	}
}

// TestArrivalAndDeletionOrders makes five claims in every order and takes them back in every order: after each step the
// table answers as a linear scan over the claims does, with each claim's own attributes, and readers have been told.
//
// lesson: C5, C6
func TestArrivalAndDeletionOrders(t *testing.T) {
	addrs := []netip.Addr{
		netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.0"), netip.MustParseAddr("10.9.9.9"),
		netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2"), netip.MustParseAddr("2001:db8::1"),
	}
	orders := permutations()
	for name, claims := range fiveClaims(t) {
		run := func(arrive, leave []int) {
			table, model := New(), make(oracle)
			f := newFollower(table, 3)
			for n, i := range slices.Concat(arrive, leave) {
				op := Op{Delete: n >= len(arrive), Claim: claims[i]}
				table.Apply([]Op{op})
				op.Claim.Prefix = op.Claim.Prefix.Masked()
				model.apply(op)
				f.catchUp()
				for _, addr := range addrs {
					want, wantOK := model.lookup(addr)
					if got, ok := table.Lookup(addr); got != want || ok != wantOK {
						t.Fatalf("%s: made %v, taken back %v, step %d: %s is %v, want %v", name, arrive, leave, n, addr, got, want)
					}
				}
				want := make(map[netip.Prefix]Entry)
				for p := range model {
					want[p] = visible(model.claims(p)[0].Entry)
				}
				if !maps.Equal(f.seen, want) {
					t.Fatalf("%s: made %v, taken back %v, step %d: the reader has %v, want %v", name, arrive, leave, n, f.seen, want)
				}
			}
		}
		for _, order := range orders {
			backwards := slices.Clone(order)
			slices.Reverse(backwards)
			run(order, order)
			run(order, backwards)
			run(orders[0], order)
			run(orders[len(orders)-1], order)
		}
	}
}

// A CIDR comes back from behind an address with what it says by then, not with what it said when it was hidden.
//
// lesson: C6
func TestRestoredFresh(t *testing.T) {
	pod, cidr := claimed(t, "10.0.0.1", 2, 300), claimed(t, "10.0.0.1/32", 3, 16777217)
	pod.Entry.Host, pod.Entry.EncryptKey = host("172.18.2.1"), 3
	table := New()
	f := newFollower(table, 8)
	table.Apply(made(cidr, pod))
	f.catchUp()
	cidr.Entry.Identity, cidr.Entry.Host, cidr.Entry.Flags, cidr.Revision = 16777218, host("172.18.3.1"), FlagSkipTunnel, 7
	f.log = nil
	table.Apply(made(cidr))
	if f.catchUp(); len(f.log) != 0 {
		t.Errorf("a change of what is hidden was announced: %v", f.log)
	}
	table.Apply([]Op{{Delete: true, Claim: pod}})
	if got, _ := table.Get(cidr.Prefix); got != cidr {
		t.Errorf("the CIDR came back as %v, want %v", got, cidr)
	}
	want := Change{Prefix: cidr.Prefix, Entry: cidr.Entry, Owner: cidr.Owner}
	if f.catchUp(); len(f.log) != 1 || f.log[0] != want {
		t.Errorf("readers were told %v, want %v", f.log, want)
	}
}

// An address is reused while the deletion of its former owner is on its way: whatever order the two arrive in, the live
// owner keeps it.
//
// lesson: X8
func TestReusedAddress(t *testing.T) {
	node := claimed(t, "10.2.1.1", 2, identity.RemoteNode)
	node.Owner.Object, node.Revision = "node/old", 10
	next := node
	next.Owner.Object, next.Revision, next.Entry.Host = "node/new", 12, host("172.18.2.2")
	pod, elsewhere := claimed(t, "10.2.1.1", 2, 131329), claimed(t, "10.2.1.1", 3, 196865)
	pod.Revision, elsewhere.Revision = 12, 3
	local := claimed(t, "10.2.1.1", 1, 65793)
	local.Owner.Source = Local
	for name, live := range map[string]Claim{"node": next, "pod": pod, "pod of another cluster": elsewhere, "pod of this node": local} {
		for _, ops := range [][]Op{
			{{Claim: node}, {Delete: true, Claim: node}, {Claim: live}},
			{{Claim: node}, {Claim: live}, {Delete: true, Claim: node}},
			{{Claim: live}, {Claim: node}, {Delete: true, Claim: node}},
			{{Claim: live}, {Delete: true, Claim: node}},
		} {
			for _, together := range []bool{true, false} {
				table := New()
				f := newFollower(table, 1)
				if together {
					table.Apply(ops)
				} else {
					for i := range ops {
						table.Apply(ops[i : i+1])
						f.catchUp()
					}
				}
				if got, ok := table.Get(live.Prefix); !ok || got != live {
					t.Errorf("%s, %v: got %v, %v", name, ops, got, ok)
				}
				if f.catchUp(); f.seen[live.Prefix] != live.Entry {
					t.Errorf("%s, %v: the reader has %v", name, ops, f.seen)
				}
			}
		}
	}
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
