// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"net/netip"
	"testing"

	"github.com/weftmesh/weft/identity"
)

// The counts of a cluster's claims follow every way in which claims come, change owner's content, and go; Select and Holds
// see losers too.
func TestSelectAndCounts(t *testing.T) {
	table := New()
	owner := func(c identity.ClusterID) Owner { return Owner{Cluster: c, Source: ClusterMesh, Object: "ip"} }
	claim := func(c identity.ClusterID, p string) Claim {
		return Claim{Prefix: netip.MustParsePrefix(p), Owner: owner(c), Entry: Entry{Identity: identity.ID(c)<<16 + 1, Namespace: "shop"}}
	}
	counts := func(want1, want2 int) {
		t.Helper()
		for c, want := range map[identity.ClusterID]int{1: want1, 2: want2, 3: 0, 500: 0} {
			if got := table.ClaimsOf(c); got != want {
				t.Errorf("%d claims of cluster %d, want %d", got, c, want)
			}
			if got := table.ClaimsBy(owner(c)); got != want {
				t.Errorf("%d claims by the owner of cluster %d, want %d", got, c, want)
			}
		}
		for c, want := range map[identity.ClusterID]int{1: want1, 2: want2} {
			got := table.Select(func(claim *Claim) bool { return claim.Owner.Cluster == c })
			if len(got) != want {
				t.Errorf("%d claims of cluster %d selected, want %d", len(got), c, want)
			}
			for _, claim := range got {
				if claim.Entry.Namespace != "shop" || claim.Owner != owner(c) {
					t.Errorf("selected %+v", claim)
				}
			}
		}
	}
	counts(0, 0)
	table.Apply([]Op{{Claim: claim(2, "10.0.0.1/32")}, {Claim: claim(1, "10.0.0.1/32")}, {Claim: claim(1, "10.0.0.2/32")}})
	counts(2, 1)
	table.Apply([]Op{{Claim: claim(1, "10.0.0.2/32")}, {Claim: claim(2, "10.0.0.2/32")}})
	counts(2, 2)
	if p := netip.MustParsePrefix("10.0.0.1/32"); !table.Holds(p, false, owner(2)) || table.Holds(p, true, owner(2)) || table.Holds(p, false, owner(3)) {
		t.Error("Holds sees another claim than the owner's own")
	}
	table.Apply([]Op{{Delete: true, Claim: claim(1, "10.0.0.1/32")}, {Delete: true, Claim: claim(1, "10.0.0.2/32")}})
	counts(0, 2)
	table.Apply([]Op{{Delete: true, Claim: claim(2, "10.0.0.1/32")}, {Claim: claim(1, "10.0.0.1/32")}})
	counts(1, 1)
	// More slots than one step looks at.
	var ops []Op
	for i := range 2*slabChunk + 5 {
		c := claim(1, "10.0.0.1/32")
		c.Prefix = netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)}), 32)
		ops = append(ops, Op{Claim: c})
	}
	table.Apply(ops)
	counts(1+2*slabChunk+5, 1)
}
