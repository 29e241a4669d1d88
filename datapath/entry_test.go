// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"testing"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil/golden"
	"github.com/weftmesh/weft/ipcache"
)

// goldenEntry is a line of bpf-ipcache-v2.jsonl: bytes that Cilium's own map code wrote.
type goldenEntry struct {
	Prefix   netip.Prefix  `json:"prefix"`
	Cluster  uint16        `json:"cluster_id"`
	Identity identity.ID   `json:"identity"`
	Tunnel   string        `json:"tunnel_endpoint"`
	Key      uint8         `json:"encrypt_key"`
	Flags    ipcache.Flags `json:"endpoint_flags_in"`
	KeyHex   string        `json:"key_hex"`
	ValueHex string        `json:"value_hex"`
}

func TestEncodeGolden(t *testing.T) {
	vectors := golden.Lines[goldenEntry](t, "bpf-ipcache-v2.jsonl")
	for _, g := range vectors {
		e := ipcache.Entry{Identity: g.Identity, EncryptKey: g.Key, Flags: g.Flags}
		if g.Tunnel != "" {
			e.Host = netip.MustParseAddr(g.Tunnel)
		}
		u := underlay{NodeIPs: []netip.Addr{netip.MustParseAddr("172.18.1.1")}, V6: e.Host.Is6()}
		key, value := u.encode(g.Prefix, e)
		key.ClusterID = g.Cluster // weft leaves it 0; one vector has one
		if got := hexOf(t, key); got != g.KeyHex {
			t.Errorf("%v: key %s, want %s", g.Prefix, got, g.KeyHex)
		}
		if got := hexOf(t, value); got != g.ValueHex {
			t.Errorf("%v: value %s, want %s", g.Prefix, got, g.ValueHex)
		}
	}
	if len(vectors) != 13 {
		t.Errorf("read %d vectors, want 13", len(vectors))
	}
}

func hexOf(t *testing.T, v any) string {
	t.Helper()
	var b bytes.Buffer
	if err := binary.Write(&b, binary.NativeEndian, v); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(b.Bytes())
}

// mechanism: F5
func TestTunnelEndpoint(t *testing.T) {
	own := netip.MustParseAddr("172.18.1.1")
	own6 := netip.MustParseAddr("fd00:18:1::1")
	for _, tc := range []struct {
		name, host string
		v6         bool
		want       string
	}{
		{"IPv4 underlay", "172.18.2.1", false, "172.18.2.1"},
		{"IPv6 underlay", "fd00:18:2::1", true, "fd00:18:2::1"},
		{"host of the wrong family", "fd00:18:2::1", false, ""},
		{"host of the wrong family, IPv6 underlay", "172.18.2.1", true, ""},
		{"behind this node", "172.18.1.1", false, ""},
		{"behind this node, IPv6 underlay", "fd00:18:1::1", true, ""},
		{"no host", "", false, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var host, want netip.Addr
			if tc.host != "" {
				host = netip.MustParseAddr(tc.host)
			}
			if tc.want != "" {
				want = netip.MustParseAddr(tc.want)
			}
			u := underlay{NodeIPs: []netip.Addr{own, own6}, V6: tc.v6}
			_, value := u.encode(netip.MustParsePrefix("10.2.1.10/32"), ipcache.Entry{Identity: 131329, Host: host})
			if got := value.Tunnel(); got != want {
				t.Errorf("tunnel endpoint %v, want %v", got, want)
			}
			if has := value.Flags&bpf.FlagHasTunnelEndpoint != 0; has != want.IsValid() {
				t.Errorf("flags %v, want that they agree with endpoint %v", value.Flags, want)
			}
		})
	}
}
