// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"net/netip"
	"strings"
)

// Family says how the 16 bytes of an address are to be read.
type Family uint8

// The families; FamilyNone only where there is no address.
const (
	FamilyNone Family = 0
	FamilyIPv4 Family = 1
	FamilyIPv6 Family = 2
)

// String returns "ipv4", "ipv6", "none" or the number.
func (f Family) String() string {
	switch f {
	case FamilyNone:
		return "none"
	case FamilyIPv4:
		return "ipv4"
	case FamilyIPv6:
		return "ipv6"
	}
	return fmt.Sprintf("family(%d)", uint8(f))
}

// addr reads the address that b holds: IPv4 in the first four bytes, IPv6 in all. The zero Addr for other families.
func (f Family) addr(b [16]byte) netip.Addr {
	switch f {
	case FamilyIPv4:
		return netip.AddrFrom4([4]byte(b[:4]))
	case FamilyIPv6:
		return netip.AddrFrom16(b)
	}
	return netip.Addr{}
}

// split is the inverse of Family.addr. An IPv4-mapped address is an IPv6 one, as it is in a packet.
func split(addr netip.Addr) (Family, [16]byte) {
	var b [16]byte
	switch {
	case addr.Is4():
		v4 := addr.As4()
		copy(b[:], v4[:])
		return FamilyIPv4, b
	case addr.Is6():
		return FamilyIPv6, addr.As16()
	}
	return FamilyNone, b
}

// ipcacheStaticBits is the part of IPCacheKey.PrefixLen that ClusterID, Pad and Family take.
const ipcacheStaticBits = 32

// IPCacheKey is the key of MapIPCache: struct ipcache_key in lib/structs.h, byte for byte Cilium's. It is comparable.
type IPCacheKey struct {
	PrefixLen uint32   // ipcacheStaticBits and the bits of the prefix; host order
	ClusterID uint16   // 0 for all that weft writes
	Pad       uint8    // 0
	Family    Family   // FamilyIPv4 or FamilyIPv6
	IP        [16]byte // network order; IPv4 in the first four bytes, the rest 0
}

// MakeIPCacheKey returns the key of p. Host bits of p are cleared. The key of the zero Prefix is the zero key, which
// the programs never look up.
func MakeIPCacheKey(p netip.Prefix) IPCacheKey {
	p = p.Masked()
	if !p.IsValid() {
		return IPCacheKey{}
	}
	family, ip := split(p.Addr())
	return IPCacheKey{PrefixLen: ipcacheStaticBits + uint32(p.Bits()), Family: family, IP: ip}
}

// Prefix returns the masked prefix that k stands for, whatever its cluster. It is an error if the family is unknown or
// the length not one of that family.
func (k IPCacheKey) Prefix() (netip.Prefix, error) {
	addr := k.Family.addr(k.IP)
	if !addr.IsValid() {
		return netip.Prefix{}, fmt.Errorf("ipcache key: family %d is neither 1 (IPv4) nor 2 (IPv6)", uint8(k.Family))
	}
	if k.PrefixLen < ipcacheStaticBits || k.PrefixLen-ipcacheStaticBits > uint32(addr.BitLen()) {
		return netip.Prefix{}, fmt.Errorf("ipcache key: prefix length %d is not in %d to %d, the range of %v",
			k.PrefixLen, ipcacheStaticBits, ipcacheStaticBits+addr.BitLen(), k.Family)
	}
	return addr.Prefix(int(k.PrefixLen - ipcacheStaticBits))
}

// String returns the prefix, followed by "@" and the cluster where it is not 0: "10.2.1.10/32", "10.2.1.10/32@2". A key
// that is none is described by its error.
func (k IPCacheKey) String() string {
	p, err := k.Prefix()
	switch {
	case err != nil:
		return err.Error()
	case k.ClusterID != 0:
		return fmt.Sprintf("%v@%d", p, k.ClusterID)
	}
	return p.String()
}

// IPCacheFlags are bits of an IPCacheValue.
type IPCacheFlags uint8

// The flags.
const (
	FlagSkipTunnel         IPCacheFlags = 1 << iota // never encapsulate
	FlagHasTunnelEndpoint                           // TunnelEndpoint is set
	FlagIPv6TunnelEndpoint                          // and holds an IPv6 address
	FlagRemoteCluster                               // a node of another cluster
)

var ipcacheFlagNames = [...]string{"skiptunnel", "hastunnel", "ipv6tunnel", "remotecluster"}

// String returns the names of the flags that are set, lowest first, separated by commas; "<none>" if none is. Bits
// without a name are not shown.
func (f IPCacheFlags) String() string {
	var names []string
	for bit, name := range ipcacheFlagNames {
		if f&(1<<bit) != 0 {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return "<none>"
	}
	return strings.Join(names, ",")
}

// IPCacheValue is the value of MapIPCache: struct ipcache_value in lib/structs.h, byte for byte Cilium's. It is
// comparable.
type IPCacheValue struct {
	Identity       uint32   // host order
	TunnelEndpoint [16]byte // see Tunnel
	Pad            uint16   // 0
	EncryptKey     uint8    // 0: not encrypted; 255: WireGuard
	Flags          IPCacheFlags
}

// MakeIPCacheValue returns the value of an identity behind the node tunnel, which may be the zero Addr. The two flags
// that tell of the tunnel endpoint follow from tunnel; whatever flags says of them is ignored.
func MakeIPCacheValue(identity uint32, tunnel netip.Addr, encryptKey uint8, flags IPCacheFlags) IPCacheValue {
	family, ip := split(tunnel)
	flags &^= FlagHasTunnelEndpoint | FlagIPv6TunnelEndpoint
	switch family {
	case FamilyIPv4:
		flags |= FlagHasTunnelEndpoint
	case FamilyIPv6:
		flags |= FlagHasTunnelEndpoint | FlagIPv6TunnelEndpoint
	}
	return IPCacheValue{Identity: identity, TunnelEndpoint: ip, EncryptKey: encryptKey, Flags: flags}
}

// Tunnel returns the tunnel endpoint, or the zero Addr if v has none.
func (v IPCacheValue) Tunnel() netip.Addr {
	switch v.Flags & (FlagHasTunnelEndpoint | FlagIPv6TunnelEndpoint) {
	case FlagHasTunnelEndpoint:
		return FamilyIPv4.addr(v.TunnelEndpoint)
	case FlagHasTunnelEndpoint | FlagIPv6TunnelEndpoint:
		return FamilyIPv6.addr(v.TunnelEndpoint)
	}
	return netip.Addr{}
}

// String returns v as users know it from Cilium:
// "identity=131329 encryptkey=0 tunnelendpoint=172.18.2.1 flags=hastunnel"; without an endpoint it shows 0.0.0.0.
func (v IPCacheValue) String() string {
	tunnel := v.Tunnel()
	if !tunnel.IsValid() {
		tunnel = netip.IPv4Unspecified()
	}
	return fmt.Sprintf("identity=%d encryptkey=%d tunnelendpoint=%v flags=%v", v.Identity, v.EncryptKey, tunnel, v.Flags)
}
