// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// An arrival is told when the reader has been given what it brought, and only if it brought anything that can be seen.
func TestArrivals(t *testing.T) {
	table := New()
	op := func(last byte, revision int64) Op {
		return Op{Claim: Claim{
			Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, last}), 32), Owner: Owner{Cluster: 2, Source: ClusterMesh},
			Revision: revision, Entry: Entry{Identity: 300},
		}}
	}
	table.Apply([]Op{op(1, 1)})
	table.ApplyArrived([]Op{op(2, 2)}, Arrival{Cluster: 2, At: 100})
	table.ApplyArrived([]Op{op(3, 3), op(4, 3)}, Arrival{Cluster: 3, At: 200})
	table.ApplyArrived([]Op{op(4, 4)}, Arrival{Cluster: 3, At: 300}) // nothing that the kernel holds
	table.ApplyArrived([]Op{op(5, 5)}, Arrival{Cluster: 4})          // not timed

	var at Revision
	buf := make([]Change, 0, 1)
	for i, want := range [][]Arrival{nil, {{2, 100}}, nil, {{3, 200}}, nil, nil} {
		_, next, _ := table.Changes(at, buf)
		at = next
		if diff := cmp.Diff(want, table.Arrived(at, nil)); diff != "" {
			t.Errorf("after change %d (-want +got):\n%s", i, diff)
		}
	}
}

// What waits for a reader that does not come is bounded, and the reader goes on with what came first.
func TestArrivalsAreBounded(t *testing.T) {
	table := New()
	p := netip.MustParsePrefix("10.0.0.1/32")
	for round := range 2 {
		for i := range maxArrivals + 100 {
			claim := Claim{Prefix: p, Owner: Owner{Source: Local}, Entry: Entry{EncryptKey: uint8(i)}}
			table.ApplyArrived([]Op{{Claim: claim}}, Arrival{Cluster: 2, At: int64(i + 1)})
		}
		_, at, _ := table.Changes(Revision{}, make([]Change, 0, 10))
		got := table.Arrived(at, nil)
		if len(got) != maxArrivals || got[0].At != 1 || got[maxArrivals-1].At != maxArrivals {
			t.Fatalf("round %d: %d arrivals from %v to %v, want the first %d", round, len(got), got[0], got[len(got)-1], maxArrivals)
		}
		if again := table.Arrived(at, nil); len(again) != 0 {
			t.Fatalf("round %d: %d arrivals are told twice", round, len(again))
		}
	}
}
