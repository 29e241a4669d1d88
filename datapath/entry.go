// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"slices"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/ipcache"
)

// underlay says how entries name the nodes behind which they live.
type underlay struct {
	// NodeIPs are this node's own addresses: what is behind them needs no tunnel.
	NodeIPs []netip.Addr
	// V6: nodes reach each other over IPv6, else over IPv4.
	V6 bool
}

// tunnel returns the tunnel endpoint for what lives behind host: host itself, if it is known, of the underlay's family and
// not this node; else the zero Addr.
func (u underlay) tunnel(host netip.Addr) netip.Addr {
	if !host.IsValid() || host.Is6() != u.V6 || slices.Contains(u.NodeIPs, host) {
		return netip.Addr{}
	}
	return host
}

// encode returns the kernel's form of an entry.
func (u underlay) encode(prefix netip.Prefix, e ipcache.Entry) (bpf.IPCacheKey, bpf.IPCacheValue) {
	return bpf.MakeIPCacheKey(prefix),
		bpf.MakeIPCacheValue(uint32(e.Identity), u.tunnel(e.Host), e.EncryptKey, bpf.IPCacheFlags(e.Flags))
}
