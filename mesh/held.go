// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"net/netip"
	"slices"

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

// around returns what waits of the prefixes that contain an address, the longest first.
func (h *held) around(addr netip.Addr) []ipcache.Claim {
	var found []ipcache.Claim
	for bits := addr.BitLen(); bits >= 0 && len(h.host) > 0; bits-- {
		p, _ := addr.Prefix(bits)
		for _, k := range []claimKey{{p, false}, {p, true}} {
			if host, ok := h.host[k]; ok {
				found = append(found, h.claims[host][k])
			}
		}
	}
	return found
}

// Waiting returns the announcements for an address, or for prefixes around it, that are not used because the node that they
// are behind is not known.
func (m *Mesh) Waiting(addr netip.Addr) []ipcache.Claim {
	var found []ipcache.Claim
	for _, r := range m.all() {
		r.mu.Lock()
		fs := r.feeds
		r.mu.Unlock()
		if fs != nil {
			found = append(found, fs.ips.waitingAround(addr)...)
		}
	}
	slices.SortFunc(found, func(a, b ipcache.Claim) int { return cmp.Compare(a.Owner.Cluster, b.Owner.Cluster) })
	return found
}

// waitingAround is for the feed of addresses.
func (f *feed) waitingAround(addr netip.Addr) []ipcache.Claim {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.decode.(*ips).held.around(addr)
}
