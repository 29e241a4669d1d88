// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"slices"
	"testing"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// Once the datapath says that all is carried that there was at a moment, addresses are in the map and routes are in the kernel.
func TestCarried(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	h.native()
	a := h.start()
	await := func(then Moment) {
		testutil.Eventually(t, patience, func() error {
			if !a.Carried(then) {
				return fmt.Errorf("%+v is not carried", then)
			}
			return nil
		})
	}
	for round := range 10 {
		cidr, address := fmt.Sprintf("10.2.%d.0/24", round), fmt.Sprintf("10.2.%d.1/32", round)
		h.cfg.Nodes.Upsert(testNode("west", 2, fmt.Sprint("west-", round), []string{"172.18.2.1"}, cidr))
		h.cfg.IPs.Apply([]ipcache.Op{upsert(address, 131329)})
		then := a.Now()
		await(then)
		if want := cidr + " via 172.18.2.1 dev eth0"; !slices.Contains(h.routes("119"), want) {
			t.Fatalf("round %d is carried, and the routes are %v", round, h.routes("119"))
		}
		if got := h.entries()[address]; got != identity.ID(131329) {
			t.Fatalf("round %d is carried, and %s is %d", round, address, got)
		}
		h.cfg.IPs.Apply([]ipcache.Op{remove(address)})
		then = a.Now()
		await(then)
		if got, there := h.entries()[address]; there {
			t.Fatalf("round %d: the removal is carried, and %s is %d", round, address, got)
		}
	}
}
