// SPDX-License-Identifier: Apache-2.0

package service

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// mechanism: H7
func TestCount(t *testing.T) {
	table := NewTable()
	table.PutLocal(webLocal(Settings{Global: true}, "10.1.1.10"))
	db := webLocal(Settings{Global: true})
	db.Service.Name, db.Addrs = "db", addrs("10.96.1.11")
	table.PutLocal(db)
	other := webLocal(Settings{})
	other.Service.Name = "zzz"
	table.PutLocal(other)
	table.Put(webOffer("west", 2, "10.2.1.10", "10.2.1.11"))
	table.SetLost("west", true)
	table.DeleteLocal(Kubernetes, Name{"shop", "nobody"})
	want := Counts{
		Local: 3, Global: 2, Frontends: 2, Empty: 1, Contested: 1, Left: 1,
		Clusters: []ClusterCount{{Cluster: "west", Services: 1, Ready: 2, Lost: true}}, Services: []ServiceCount{{Name: db.Service}},
	}
	if diff := cmp.Diff(want, table.Count(1)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	want.Left, want.Services = 0, append(want.Services, ServiceCount{Name: web, Used: 1, Offered: 2})
	if diff := cmp.Diff(want, table.Count(2)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
