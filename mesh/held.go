// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"net/netip"

	"github.com/weftmesh/weft/ipcache"
)

// held are the announcements that wait for the node that they are behind, by its address. They count as entries of their
// cluster, so that there are never more than it may have.
type held struct {
	host   map[claimKey]netip.Addr
	claims map[netip.Addr]map[claimKey]ipcache.Claim
}

func newHeld() held {
	return held{host: make(map[claimKey]netip.Addr), claims: make(map[netip.Addr]map[claimKey]ipcache.Claim)}
}

func (h *held) len() int { return len(h.host) }

func (h *held) put(c ipcache.Claim) {
	k, host := keyOf(c), c.Entry.Host
	h.drop(k)
	h.host[k] = host
	if h.claims[host] == nil {
		h.claims[host] = make(map[claimKey]ipcache.Claim)
	}
	h.claims[host][k] = c
}

func (h *held) drop(k claimKey) {
	host, ok := h.host[k]
	if !ok {
		return
	}
	delete(h.host, k)
	if delete(h.claims[host], k); len(h.claims[host]) == 0 {
		delete(h.claims, host)
	}
	if len(h.host) == 0 {
		// Maps do not become smaller, and these hold most of a cluster when its addresses are listed before its nodes.
		*h = newHeld()
	}
}
