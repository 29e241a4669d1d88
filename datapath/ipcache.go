// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
)

// IPCache reads the pinned map that identifies addresses, whether an agent runs or not. It is safe for concurrent use.
type IPCache struct {
	m *ebpf.Map
}

// MapEntry is one entry of the kernel's map.
type MapEntry struct {
	Prefix    netip.Prefix
	ClusterID uint16 // 0 in all that weft writes
	Identity  identity.ID
	// TunnelEndpoint is the node behind which the prefix lives; the zero Addr if the entry has none.
	TunnelEndpoint netip.Addr
	EncryptKey     uint8 // 0 for none, 255 for WireGuard
	// Flags are the kernel's, named by their String method.
	Flags bpf.IPCacheFlags
}

func makeMapEntry(key bpf.IPCacheKey, value bpf.IPCacheValue) (MapEntry, error) {
	prefix, err := key.Prefix()
	return MapEntry{
		Prefix: prefix, ClusterID: key.ClusterID, Identity: identity.ID(value.Identity), TunnelEndpoint: value.Tunnel(),
		EncryptKey: value.EncryptKey, Flags: value.Flags,
	}, err
}

// OpenIPCache opens the map below a BPF file system, read-only. Close it after use.
func OpenIPCache(bpffs string) (*IPCache, error) {
	m, err := openPinReadOnly(bpffs, pinIPCache, bpf.MapIPCache)
	if err != nil {
		return nil, err
	}
	return &IPCache{m: m}, nil
}

// Close closes the map; the pin stays.
func (c *IPCache) Close() error { return c.m.Close() }

// MaxEntries is how many entries the map can hold.
func (c *IPCache) MaxEntries() uint32 { return c.m.MaxEntries() }

// All yields every entry, in the kernel's order, until yield returns false. While an agent writes, an entry may be seen
// twice or be missed; a key that is no prefix is an error.
func (c *IPCache) All(yield func(MapEntry) bool) error {
	var bad error
	err := dumpIPCache(c.m, func(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) bool {
		for i := range keys {
			entry, err := makeMapEntry(keys[i], values[i])
			if err != nil {
				bad = err
				return false
			}
			if !yield(entry) {
				return false
			}
		}
		return true
	})
	return errors.Join(err, bad)
}

// Lookup returns what the programs find for addr. ok is false if no entry contains it. The kernel tells the value, not
// the prefix that matched, so the entry's Prefix is addr at full length.
func (c *IPCache) Lookup(addr netip.Addr) (entry MapEntry, ok bool, err error) {
	addr = addr.Unmap().WithZone("")
	key := bpf.MakeIPCacheKey(netip.PrefixFrom(addr, addr.BitLen()))
	var value bpf.IPCacheValue
	err = c.m.Lookup(&key, &value)
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return MapEntry{}, false, nil
	case err != nil:
		return MapEntry{}, false, fmt.Errorf("look up %v in map ipcache: %w", addr, err)
	}
	entry, err = makeMapEntry(key, value)
	return entry, err == nil, err
}
