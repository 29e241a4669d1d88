// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/identity"
)

// claimed returns one cluster's claim for a prefix; an address is a host.
func claimed(t testing.TB, prefix string, cluster identity.ClusterID, id identity.ID) Claim {
	t.Helper()
	p, isCIDR, ok := parse(t, prefix)
	if !ok {
		t.Fatalf("%q is no prefix", prefix)
	}
	return Claim{Prefix: p, CIDR: isCIDR, Owner: Owner{Cluster: cluster, Source: ClusterMesh, Object: "ip"}, Entry: Entry{Identity: id}}
}

func made(claims ...Claim) (ops []Op) {
	for _, c := range claims {
		ops = append(ops, Op{Claim: c})
	}
	return ops
}

// mechanism: G3
func TestByIdentity(t *testing.T) {
	table := New()
	a, b, c := claimed(t, "10.0.0.2", 2, 300), claimed(t, "10.0.0.1", 2, 300), claimed(t, "fd00::/64", 3, 300)
	other, loser, gone := claimed(t, "10.0.0.3", 2, 301), claimed(t, "10.0.0.3", 3, 300), claimed(t, "10.0.0.4", 2, 300)
	table.Apply(made(a, b, c, other, loser, gone))
	table.Apply([]Op{{Delete: true, Claim: gone}})
	if diff := cmp.Diff([]Claim{b, a, c}, slices.Collect(table.ByIdentity(300)), netipEqual); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for range table.ByIdentity(300) {
		break // must not go on
	}
	table.Apply([]Op{{Delete: true, Claim: a}, {Delete: true, Claim: b}, {Delete: true, Claim: c}})
	if left := slices.Collect(table.ByIdentity(300)); len(left) != 0 {
		t.Errorf("the last prefix went, and the identity still has %v", left)
	}
}

// A conflict is two clusters or sources that say different things of one prefix, and nothing else.
//
// lesson: C5
func TestConflicts(t *testing.T) {
	with := func(c Claim, change func(*Claim)) Claim { change(&c); return c }
	west, north := claimed(t, "10.0.0.9", 2, 300), claimed(t, "10.0.0.9", 3, 301)
	local := with(west, func(c *Claim) { c.Owner.Source, c.Entry.Identity = Local, 1 })
	for _, v := range []struct {
		name   string
		claims []Claim
		want   []Claim
	}{
		{"one claim", []Claim{west}, nil},
		{"two clusters", []Claim{north, west}, []Claim{west, north}},
		{"two clusters that agree", []Claim{west, with(north, func(c *Claim) { c.Entry.Identity = 300 })}, nil},
		{"two sources", []Claim{west, local}, []Claim{local, west}},
		{"two objects of one cluster", []Claim{west, with(west, func(c *Claim) { c.Owner.Object, c.Entry.Identity = "node/a", 6 })}, nil},
		{"a CIDR behind another's host", []Claim{west, with(north, func(c *Claim) { c.CIDR = true })},
			[]Claim{west, with(north, func(c *Claim) { c.CIDR = true })}},
		{"names alone", []Claim{west, with(north, func(c *Claim) { c.Entry.Identity, c.Entry.Pod = 300, "web-0" })}, nil},
	} {
		table := New()
		table.Apply(made(v.claims...))
		var got []Claim
		for claims := range table.Conflicts(netip.Prefix{}) {
			got = append(got, claims...)
		}
		if diff := cmp.Diff(v.want, got, netipEqual); diff != "" {
			t.Errorf("%s (-want +got):\n%s", v.name, diff)
		}
		if want := min(len(v.want), 1); table.Conflicted() != want {
			t.Errorf("%s: %d prefixes in conflict, want %d", v.name, table.Conflicted(), want)
		}
		for _, c := range v.claims {
			table.Apply([]Op{{Delete: true, Claim: c}})
		}
		if n := table.Conflicted(); n != 0 {
			t.Errorf("%s: %d prefixes in conflict in an empty table", v.name, n)
		}
	}
}

// Conflicts are read in pages, in one order whatever order they arose in.
func TestConflictPages(t *testing.T) {
	table := New()
	prefixes := []string{"fd00::1", "10.0.0.3", "10.0.0.1", "10.0.0.0/24", "10.0.0.2", "0.0.0.0/0"}
	for _, p := range prefixes {
		table.Apply(made(claimed(t, p, 2, 300), claimed(t, p, 3, 301)))
	}
	var got []string
	for after, full := (netip.Prefix{}), true; full; {
		page := 0
		for claims := range table.Conflicts(after) {
			after = claims[0].Prefix
			got = append(got, after.String())
			if page++; page == 2 {
				break
			}
		}
		full = page == 2
	}
	want := []string{"0.0.0.0/0", "10.0.0.0/24", "10.0.0.1/32", "10.0.0.2/32", "10.0.0.3/32", "fd00::1/128"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
