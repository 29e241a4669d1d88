// SPDX-License-Identifier: Apache-2.0

package node

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weftmesh/weft/internal/testutil/golden"
)

var netipEqual = cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})

func mustParse(t testing.TB, value string) Node {
	t.Helper()
	n, err := Parse([]byte(value))
	if err != nil {
		t.Fatalf("%s: %v", value, err)
	}
	return n
}

func TestRoundTrip(t *testing.T) {
	for key, value := range golden.Values(t, "/nodes/v1/") {
		n := mustParse(t, value)
		if want := strings.Replace(key, "cilium/cache/", "cilium/state/", 1); n.Key() != want {
			t.Errorf("key: got %q, want %q", n.Key(), want)
		}
		got, err := n.Marshal()
		if err != nil || string(got) != value {
			t.Errorf("%s: (-want +got):\n%s", key, cmp.Diff(value, string(got)))
		}
	}
}

func TestParse(t *testing.T) {
	n := mustParse(t, golden.Values(t, "/nodes/v1/")["cilium/state/nodes/v1/west/west-n2"])
	want := Node{
		Name: "west-n2", Cluster: "west", ClusterID: 2, Source: "custom-resource", EncryptKey: 3,
		Addresses: []Address{
			{InternalIP, netip.MustParseAddr("172.18.2.2")}, {CiliumInternalIP, netip.MustParseAddr("10.2.2.1")},
			{ExternalIP, netip.MustParseAddr("198.51.100.2")}, {InternalIP, netip.MustParseAddr("fd00:18:2::2")},
			{CiliumInternalIP, netip.MustParseAddr("fd00:10:2:2::1")},
		},
		IPv4PodCIDR: netip.MustParsePrefix("10.2.2.0/24"), IPv6PodCIDR: netip.MustParsePrefix("fd00:10:2:2::/96"),
		IPv4SecondaryPodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.2.102.0/26")},
		IPv4Health:            netip.MustParseAddr("10.2.2.2"), IPv6Health: netip.MustParseAddr("fd00:10:2:2::2"),
		IPv4Ingress: netip.MustParseAddr("10.2.2.3"),
	}
	if diff := cmp.Diff(want, n, netipEqual, cmpopts.IgnoreFields(Node{}, "Labels", "Annotations", "WireguardPubKey", "BootID")); diff != "" {
		t.Errorf("west-n2 (-want +got):\n%s", diff)
	}
	wantCIDRs := []netip.Prefix{n.IPv4PodCIDR, n.IPv4SecondaryPodCIDRs[0], n.IPv6PodCIDR}
	if diff := cmp.Diff(wantCIDRs, n.PodCIDRs(), netipEqual); diff != "" {
		t.Errorf("pod CIDRs (-want +got):\n%s", diff)
	}
}

func TestParseRejects(t *testing.T) {
	for name, value := range map[string]string{
		"CIDR as text":        `{"IPv4AllocCIDR":"10.2.1.0/24"}`,
		"mask with holes":     `{"IPv4AllocCIDR":{"IP":"10.2.1.0","Mask":"/wD/AA=="}}`,
		"mask of 33 bits":     `{"IPv4AllocCIDR":{"IP":"10.2.1.0","Mask":"/////4A="}}`,
		"IPv6 mask for IPv4":  `{"IPv4AllocCIDR":{"IP":"10.2.1.0","Mask":"//////////8AAAAAAAAAAA=="}}`,
		"CIDR of no address":  `{"IPv4AllocCIDR":{"Mask":"////AA=="}}`,
		"IPv6 as IPv4":        `{"IPv4AllocCIDR":{"IP":"fd00::","Mask":"//////////8AAAAAAAAAAA=="}}`,
		"IPv4 as IPv6":        `{"IPv6HealthIP":"10.0.0.1"}`,
		"secondary as IPv6":   `{"IPv6SecondaryAllocCIDRs":[{"IP":"10.2.1.0","Mask":"////AA=="}]}`,
		"zone":                `{"IPAddresses":[{"Type":"InternalIP","IP":"fe80::1%eth0"}]}`,
		"no address":          `{"IPAddresses":[{"Type":"InternalIP"}]}`,
		"negative cluster":    `{"ClusterID":-1}`,
		"key of 9 bits":       `{"EncryptionKey":256}`,
		"truncated":           `{"Name":"a"`,
		"not an object":       `[]`,
		"labels not a map":    `{"Labels":["a"]}`,
		"two values":          `{}{}`,
		"empty":               ``,
		"address out of text": `{"IPv4HealthIP":1}`,
	} {
		if n, err := Parse([]byte(value)); err == nil {
			t.Errorf("%s: accepted as %+v", name, n)
		}
	}
}

func TestValidate(t *testing.T) {
	for _, v := range golden.Verdicts(t, "node") {
		n, err := Parse([]byte(v.Value))
		if err == nil {
			err = n.Validate(v.Key, v.Cluster, v.ClusterID, 255)
		}
		if (err == nil) != v.Accepted {
			t.Errorf("%s: got %v, want accepted=%v (%s)", v.Value, err, v.Accepted, v.Error)
		}
	}
}

func TestIP(t *testing.T) {
	addr := func(typ, ip string) Address { return Address{typ, netip.MustParseAddr(ip)} }
	for _, v := range []struct {
		name   string
		addrs  []Address
		v4, v6 string
	}{
		{"first internal", []Address{addr(ExternalIP, "1.1.1.1"), addr(InternalIP, "2.2.2.2"), addr(InternalIP, "3.3.3.3")}, "2.2.2.2", ""},
		{"last external", []Address{addr("Hostname", "9.9.9.9"), addr(ExternalIP, "1.1.1.1"), addr(ExternalIP, "2.2.2.2")}, "2.2.2.2", ""},
		{"first other", []Address{addr(CiliumInternalIP, "10.0.0.1"), addr("InternalDNS", "9.9.9.9"), addr("Hostname", "8.8.8.8")}, "9.9.9.9", ""},
		{"never the pod network's", []Address{addr(CiliumInternalIP, "10.0.0.1")}, "", ""},
		{"each family", []Address{addr(InternalIP, "2.2.2.2"), addr(InternalIP, "fd00::2")}, "2.2.2.2", "fd00::2"},
	} {
		n := Node{Addresses: v.addrs}
		for v6, want := range map[bool]string{false: v.v4, true: v.v6} {
			got := ""
			if ip := n.IP(v6); ip.IsValid() {
				got = ip.String()
			}
			if got != want {
				t.Errorf("%s: got %q, want %q", v.name, got, want)
			}
		}
	}
}

func TestTable(t *testing.T) {
	table := NewTable()
	changed := table.Changed()
	table.Upsert(Node{Name: "b", Cluster: "west"})
	select {
	case <-changed:
	default:
		t.Fatal("a change was not announced")
	}
	table.Upsert(Node{Name: "a", Cluster: "west"})
	table.Upsert(Node{Name: "z", Cluster: "east"})
	nodes, rev := table.Snapshot()
	if len(nodes) != 3 || nodes[0].Name != "z" || nodes[1].Name != "a" || nodes[2].Name != "b" {
		t.Errorf("snapshot is not ordered by cluster and name: %v", nodes)
	}
	changed = table.Changed()
	table.Delete("west", "unknown")
	select {
	case <-changed:
		t.Error("nothing changed, but a change was announced")
	default:
	}
	table.Delete("west", "b")
	if _, ok := table.Get("west", "b"); ok {
		t.Error("a deleted node is still there")
	}
	if _, after := table.Snapshot(); after <= rev {
		t.Errorf("revision did not grow: %d, then %d", rev, after)
	}
}

func FuzzParse(f *testing.F) {
	for _, value := range golden.Values(f, "/nodes/v1/") {
		f.Add([]byte(value))
	}
	f.Fuzz(func(t *testing.T, value []byte) {
		n, err := Parse(value)
		if err != nil {
			return
		}
		encoded, err := n.Marshal()
		if err != nil {
			t.Fatalf("cannot encode what was decoded: %v", err)
		}
		again, err := Parse(encoded)
		if err != nil {
			t.Fatalf("cannot decode what was encoded: %v\n%s", err, encoded)
		}
		if diff := cmp.Diff(n, again, netipEqual, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("round trip (-first +second):\n%s", diff)
		}
	})
}
