// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/weftmesh/weft/internal/testutil/golden"
)

// vector is a line of bpf-ipcache-v2.jsonl: an entry as Cilium writes and prints it.
type vector struct {
	Prefix         string `json:"prefix"`
	ClusterID      uint16 `json:"cluster_id"`
	Identity       uint32 `json:"identity"`
	TunnelEndpoint string `json:"tunnel_endpoint"`
	EncryptKey     uint8  `json:"encrypt_key"`
	Flags          uint8  `json:"endpoint_flags_in"`
	KeyHex         string `json:"key_hex"`
	ValueHex       string `json:"value_hex"`
	KeyString      string `json:"cilium_key_string"`
	ValueString    string `json:"cilium_value_string"`
}

func vectors(t testing.TB) []vector {
	t.Helper()
	return golden.Lines[vector](t, "bpf-ipcache-v2.jsonl")
}

// key returns the key of v as this package makes it.
func (v vector) key() IPCacheKey {
	key := MakeIPCacheKey(netip.MustParsePrefix(v.Prefix))
	key.ClusterID = v.ClusterID
	return key
}

// value returns the value of v as this package makes it.
func (v vector) value() IPCacheValue {
	var tunnel netip.Addr
	if v.TunnelEndpoint != "" {
		tunnel = netip.MustParseAddr(v.TunnelEndpoint)
	}
	return MakeIPCacheValue(v.Identity, tunnel, v.EncryptKey, IPCacheFlags(v.Flags))
}

func wire(t *testing.T, v any) string {
	t.Helper()
	b, err := binary.Append(nil, binary.NativeEndian, v)
	if err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(b)
}

func TestVectors(t *testing.T) {
	all := vectors(t)
	if len(all) != 13 {
		t.Fatalf("%d vectors, want 13", len(all))
	}
	for _, v := range all {
		t.Run(v.KeyString, func(t *testing.T) {
			key, value := v.key(), v.value()
			if got := wire(t, key); got != v.KeyHex {
				t.Errorf("key is %s, want %s", got, v.KeyHex)
			}
			if got := wire(t, value); got != v.ValueHex {
				t.Errorf("value is %s, want %s", got, v.ValueHex)
			}
			if got, err := key.Prefix(); err != nil || got.String() != v.Prefix {
				t.Errorf("prefix is %v, %v, want %s", got, err, v.Prefix)
			}
			if got := value.Tunnel(); v.TunnelEndpoint == "" && got.IsValid() || v.TunnelEndpoint != "" && got.String() != v.TunnelEndpoint {
				t.Errorf("tunnel endpoint is %v, want %q", got, v.TunnelEndpoint)
			}
			if key.String() != v.KeyString {
				t.Errorf("key prints as %s, want %s", key, v.KeyString)
			}
			if value.String() != v.ValueString {
				t.Errorf("value prints as %s, want %s", value, v.ValueString)
			}
		})
	}
}

// TestKeyRoundTrip makes keys of random prefixes of every length, with host bits.
func TestKeyRoundTrip(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for bits := range 129 {
		var raw [16]byte
		binary.NativeEndian.PutUint64(raw[:], rng.Uint64())
		binary.NativeEndian.PutUint64(raw[8:], rng.Uint64())
		prefixes := []netip.Prefix{netip.PrefixFrom(netip.AddrFrom16(raw), bits)}
		if bits <= 32 {
			prefixes = append(prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte(raw[:4])), bits))
		}
		for _, p := range prefixes {
			key := MakeIPCacheKey(p)
			if got, err := key.Prefix(); err != nil || got != p.Masked() {
				t.Errorf("key of %v is that of %v, %v", p, got, err)
			}
			if key != MakeIPCacheKey(p.Masked()) {
				t.Errorf("key of %v keeps host bits: %+v", p, key)
			}
		}
	}
}

func TestMappedPrefixIsIPv6(t *testing.T) {
	p := netip.MustParsePrefix("::ffff:10.0.0.0/104")
	key := MakeIPCacheKey(p)
	if got, err := key.Prefix(); key.Family != FamilyIPv6 || err != nil || got != p {
		t.Errorf("key of %v is %+v of %v, %v", p, key, got, err)
	}
}

func TestKeyErrors(t *testing.T) {
	for _, c := range []struct {
		key  IPCacheKey
		want string
	}{
		{MakeIPCacheKey(netip.Prefix{}), "ipcache key: family 0 is neither 1 (IPv4) nor 2 (IPv6)"},
		{IPCacheKey{PrefixLen: 64, Family: 3}, "ipcache key: family 3 is neither 1 (IPv4) nor 2 (IPv6)"},
		{IPCacheKey{PrefixLen: 31, Family: FamilyIPv4}, "ipcache key: prefix length 31 is not in 32 to 64, the range of ipv4"},
		{IPCacheKey{PrefixLen: 65, Family: FamilyIPv4}, "ipcache key: prefix length 65 is not in 32 to 64, the range of ipv4"},
		{IPCacheKey{PrefixLen: 161, Family: FamilyIPv6}, "ipcache key: prefix length 161 is not in 32 to 160, the range of ipv6"},
	} {
		_, err := c.key.Prefix()
		if err == nil || err.Error() != c.want || c.key.String() != c.want {
			t.Errorf("%+v:\n got %v\nwant %s", c.key, err, c.want)
		}
	}
}

// TestTunnelFlags: the flags of the endpoint follow from it alone.
func TestTunnelFlags(t *testing.T) {
	all := FlagSkipTunnel | FlagHasTunnelEndpoint | FlagIPv6TunnelEndpoint | FlagRemoteCluster
	rest := FlagSkipTunnel | FlagRemoteCluster
	for tunnel, want := range map[netip.Addr]IPCacheFlags{
		{}:    rest,
		west4: rest | FlagHasTunnelEndpoint,
		west6: rest | FlagHasTunnelEndpoint | FlagIPv6TunnelEndpoint,
	} {
		v := MakeIPCacheValue(1, tunnel, 0, all)
		if v.Flags != want || v.Tunnel() != tunnel {
			t.Errorf("tunnel %v: flags %v, want %v; reads back as %v", tunnel, v.Flags, want, v.Tunnel())
		}
	}
}

// TestEventCodec fills every byte of a record with another value.
func TestEventCodec(t *testing.T) {
	record := make([]byte, EventBytes+8)
	for i := range record {
		record[i] = byte(i + 1)
	}
	event, err := ParseEvent(record)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := wire(t, event), hex.EncodeToString(record[:EventBytes]); got != want {
		t.Errorf("event is\n     %s\nwant %s", got, want)
	}
	for n := range EventBytes {
		if _, err := ParseEvent(record[:n]); err == nil {
			t.Errorf("record of %d bytes: no error", n)
		}
	}
}
