// SPDX-License-Identifier: Apache-2.0

package test

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
)

// kernelMap reads the pinned map as an operator would, with bpftool: for each prefix the bytes of key and value, and what
// the named fields say.
func (h host) kernelMap(t *testing.T) (bytes, fields map[string]string) {
	t.Helper()
	var dump []struct {
		Key, Value []string
		Formatted  struct {
			Value struct {
				Identity uint32 `json:"sec_identity"`
				Tunnel   struct {
					IP4 struct{ Addr []int }
				} `json:"tunnel_endpoint"`
				Key    uint8
				Skip   string `json:"flag_skip_tunnel"`
				Has    string `json:"flag_has_tunnel_ep"`
				IPv6   string `json:"flag_ipv6_tunnel_ep"`
				Remote string `json:"flag_remote_cluster"`
			}
		}
	}
	out := command(t, "bpftool", "-j", "map", "dump", "pinned", filepath.Join(h.bpffs, "weft", "ipcache"))
	if err := json.Unmarshal(out, &dump); err != nil {
		t.Fatalf("bpftool: %v\n%s", err, out)
	}
	bytes, fields = make(map[string]string), make(map[string]string)
	for _, e := range dump {
		key, value := joinHex(e.Key), joinHex(e.Value)
		prefix := prefixOf(t, key)
		bytes[prefix] = key + " " + value
		v := e.Formatted.Value
		var flags []string
		for _, f := range []struct{ set, name string }{
			{v.Skip, "skiptunnel"}, {v.Has, "hastunnel"}, {v.IPv6, "ipv6tunnel"}, {v.Remote, "remotecluster"},
		} {
			if f.set == "0x1" {
				flags = append(flags, f.name)
			}
		}
		if len(flags) == 0 {
			flags = []string{"<none>"}
		}
		a := v.Tunnel.IP4.Addr
		fields[prefix] = fmt.Sprintf("identity=%d encryptkey=%d tunnelendpoint=%d.%d.%d.%d flags=%s",
			v.Identity, v.Key, a[0], a[1], a[2], a[3], strings.Join(flags, ","))
	}
	return bytes, fields
}

func joinHex(digits []string) string {
	var b strings.Builder
	for _, d := range digits {
		b.WriteString(strings.TrimPrefix(d, "0x"))
	}
	return b.String()
}

// prefixOf decodes a key by the layout in the specification, not by weft's own code.
func prefixOf(t *testing.T, key string) string {
	t.Helper()
	b, err := hex.DecodeString(key)
	if err != nil || len(b) != 24 {
		t.Fatalf("key %q: %v", key, err)
	}
	length := int(b[0]) | int(b[1])<<8
	if b[7] == 1 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte(b[8:12])), length-32).String()
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte(b[8:24])), length-32).String()
}

// vectors are the recorded bytes of Cilium's own map, by prefix and then by value, since one prefix is there twice.
func vectors(t *testing.T) map[string]string {
	t.Helper()
	all := make(map[string]string)
	for _, v := range golden.Lines[struct {
		Prefix string
		Key    string `json:"key_hex"`
		Value  string `json:"value_hex"`
		Text   string `json:"cilium_value_string"`
	}](t, "bpf-ipcache-v2.jsonl") {
		all[v.Prefix+" "+v.Text] = v.Key + " " + v.Value
	}
	return all
}

const (
	own  = "identity=1 encryptkey=0 tunnelendpoint=0.0.0.0 flags=<none>"
	node = "identity=6 encryptkey=0 tunnelendpoint=0.0.0.0 flags=remotecluster"
)

// westFromEast is what a node of east with one family and an IPv4 underlay must know of the recorded west, by the rules
// of what a node and an announcement contribute.
var westFromEast = map[string]string{
	"172.18.1.1/32": own,
	// a workload of our own
	"10.1.1.10/32": "identity=65793 encryptkey=0 tunnelendpoint=0.0.0.0 flags=<none>",
	// west-n1
	"172.18.2.1/32": node,
	"10.2.1.1/32":   "identity=6 encryptkey=0 tunnelendpoint=172.18.2.1 flags=hastunnel,remotecluster",
	"10.2.1.2/32":   "identity=4 encryptkey=0 tunnelendpoint=172.18.2.1 flags=hastunnel",
	"10.2.1.3/32":   "identity=8 encryptkey=0 tunnelendpoint=172.18.2.1 flags=hastunnel",
	"10.2.1.0/24":   "identity=2 encryptkey=0 tunnelendpoint=172.18.2.1 flags=hastunnel",
	// west-n2
	"172.18.2.2/32":      node,
	"198.51.100.2/32":    node,
	"fd00:18:2::2/128":   node,
	"10.2.2.1/32":        "identity=6 encryptkey=0 tunnelendpoint=172.18.2.2 flags=hastunnel,remotecluster",
	"fd00:10:2:2::1/128": "identity=6 encryptkey=0 tunnelendpoint=172.18.2.2 flags=hastunnel,remotecluster",
	"10.2.2.2/32":        "identity=4 encryptkey=3 tunnelendpoint=172.18.2.2 flags=hastunnel",
	"fd00:10:2:2::2/128": "identity=4 encryptkey=3 tunnelendpoint=172.18.2.2 flags=hastunnel",
	"10.2.2.3/32":        "identity=8 encryptkey=3 tunnelendpoint=172.18.2.2 flags=hastunnel",
	"10.2.2.0/24":        "identity=2 encryptkey=3 tunnelendpoint=172.18.2.2 flags=hastunnel",
	"10.2.102.0/26":      "identity=2 encryptkey=3 tunnelendpoint=172.18.2.2 flags=hastunnel",
	"fd00:10:2:2::/96":   "identity=2 encryptkey=3 tunnelendpoint=172.18.2.2 flags=hastunnel",
	// announced
	"10.2.1.10/32":        "identity=131329 encryptkey=0 tunnelendpoint=172.18.2.1 flags=hastunnel",
	"10.2.2.10/32":        "identity=131330 encryptkey=0 tunnelendpoint=172.18.2.2 flags=hastunnel",
	"fd00:10:2:2::10/128": "identity=131330 encryptkey=3 tunnelendpoint=172.18.2.2 flags=hastunnel",
	"192.0.2.32/28":       "identity=131329 encryptkey=0 tunnelendpoint=0.0.0.0 flags=<none>",
}

const ownPod = `
name: web-0
namespace: shop
ip: 10.1.1.10
labels: {app: web}
identity: 65793
`

// TestRecordedState loads what a real Cilium 1.20 cluster keeps in its etcd, and finds in the kernel, entry for entry and
// byte for byte, what Cilium's own code wrote of it there. The map outlives the agent and its restart unchanged.
//
// mechanism: A1 A3 A8 B6 F2 F5 G9
// lesson: A2 X4
func TestRecordedState(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	etcd := testutil.StartEtcd(t)
	etcd.Load(t, "testdata/kvstore-state-west.jsonl")
	h := newHost(t)
	etcd.WriteConfig(t, filepath.Join(h.clustermesh, "west"))
	if err := os.WriteFile(filepath.Join(h.endpoints, "web-0.yaml"), []byte(ownPod), 0o644); err != nil {
		t.Fatal(err)
	}
	agent := h.start(t, "east", 1)
	var bytes map[string]string
	testutil.Eventually(t, 20*time.Second, func() error {
		if _, err := os.Stat(filepath.Join(h.bpffs, "weft", "ipcache")); err != nil {
			return err
		}
		var fields map[string]string
		bytes, fields = h.kernelMap(t)
		if diff := cmp.Diff(westFromEast, fields); diff != "" {
			return fmt.Errorf("kernel map (-want +got):\n%s", diff)
		}
		return nil
	})
	exact := 0
	recorded := vectors(t)
	for prefix, text := range westFromEast {
		want, ok := recorded[prefix+" "+text]
		if !ok {
			continue
		}
		exact++
		if bytes[prefix] != want {
			t.Errorf("%s: bytes in the kernel %s, want %s", prefix, bytes[prefix], want)
		}
	}
	if exact != 8 {
		t.Errorf("%d entries were compared byte for byte, want 8", exact)
	}

	agent.stop(t, syscall.SIGKILL)
	etcd.Stop(t)
	if after, _ := h.kernelMap(t); !cmp.Equal(bytes, after) {
		t.Errorf("after SIGKILL the map changed (-before +after):\n%s", cmp.Diff(bytes, after))
	}
	h.start(t, "east", 1)
	testutil.Eventually(t, 20*time.Second, func() error {
		_, err := os.Stat(h.socket)
		return err
	})
	deadline := time.Now().Add(3 * time.Second)
	for time.Now().Before(deadline) {
		if after, _ := h.kernelMap(t); !cmp.Equal(bytes, after) {
			t.Fatalf("with every etcd down the restarted agent changed the map (-before +after):\n%s", cmp.Diff(bytes, after))
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// TestRecordedCache does the same with the cache layout, in which one etcd holds several clusters, as KVStoreMesh keeps it.
//
// mechanism: B9
func TestRecordedCache(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	etcd := testutil.StartEtcd(t)
	etcd.Load(t, "testdata/kvstore-cache-mock-ipv6-wireguard.jsonl")
	etcd.Load(t, "testdata/kvstore-cache-mock.jsonl")
	h := newHost(t)
	for _, name := range []string{"cluster-001", "cluster-002"} {
		etcd.WriteConfig(t, filepath.Join(h.clustermesh, name))
	}
	// The recorded state is made up at random: addresses of one cluster lie in pod CIDRs of the other, some behind no node.
	limits := filepath.Join(t.TempDir(), "limits.yaml")
	if err := os.WriteFile(limits, []byte("default: {overlaps: allow, host-ip: any}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.start(t, "east", 3, "--mesh-limits", limits)
	want := map[string]string{
		// announced; 255 is WireGuard
		"10.0.0.24/32":  "identity=76494 encryptkey=0 tunnelendpoint=172.16.0.3 flags=hastunnel",
		"10.0.0.25/32":  "identity=70908 encryptkey=0 tunnelendpoint=172.16.0.4 flags=hastunnel",
		"10.0.0.26/32":  "identity=76494 encryptkey=0 tunnelendpoint=172.16.0.3 flags=hastunnel",
		"10.0.0.27/32":  "identity=168636 encryptkey=0 tunnelendpoint=172.16.0.1 flags=hastunnel",
		"10.0.0.28/32":  "identity=168636 encryptkey=0 tunnelendpoint=172.16.0.1 flags=hastunnel",
		"10.0.0.29/32":  "identity=168636 encryptkey=0 tunnelendpoint=172.16.0.2 flags=hastunnel",
		"10.0.0.139/32": "identity=127755 encryptkey=255 tunnelendpoint=172.16.0.5 flags=hastunnel",
		"fd00::87/128":  "identity=98870 encryptkey=255 tunnelendpoint=172.16.0.6 flags=hastunnel",
		"172.18.1.1/32": own,
		// two nodes of cluster-001 claim 172.16.0.4, and say the same of it
		"172.16.0.4/32": node, "172.16.0.3/32": node, "172.16.0.1/32": node, "172.16.0.2/32": node, "fc00::4/128": node,
	}
	for _, n := range []struct {
		ip, router, health, ingress, cidr string
		key                               int
	}{
		{"172.16.0.3", "10.0.0.12/32", "10.0.0.13/32", "10.0.0.14/32", "10.0.0.48/28", 0},
		{"172.16.0.4", "10.0.0.15/32", "10.0.0.16/32", "10.0.0.17/32", "10.0.0.64/28", 0},
		{"172.16.0.1", "10.0.0.1/32", "10.0.0.2/32", "10.0.0.3/32", "10.0.0.16/28", 0},
		{"172.16.0.2", "10.0.0.4/32", "10.0.0.5/32", "10.0.0.6/32", "10.0.0.32/28", 0},
		{"172.16.0.4", "10.0.0.52/32", "10.0.0.53/32", "10.0.0.54/32", "10.0.0.64/28", 255},
		{"172.16.0.4", "fd00::34/128", "fd00::35/128", "fd00::36/128", "fd00::400/120", 255},
	} {
		const format = "identity=%d encryptkey=%d tunnelendpoint=%s flags=hastunnel"
		want[n.router] = fmt.Sprintf(format, 6, 0, n.ip) + ",remotecluster"
		want[n.health] = fmt.Sprintf(format, 4, n.key, n.ip)
		want[n.ingress] = fmt.Sprintf(format, 8, n.key, n.ip)
		want[n.cidr] = fmt.Sprintf(format, 2, n.key, n.ip)
	}
	// Both nodes with the address 172.16.0.4 also claim 10.0.0.64/28, with different keys: the later statement wins.
	want["10.0.0.64/28"] = "identity=2 encryptkey=0 tunnelendpoint=172.16.0.4 flags=hastunnel"
	testutil.Eventually(t, 20*time.Second, func() error {
		if _, err := os.Stat(filepath.Join(h.bpffs, "weft", "ipcache")); err != nil {
			return err
		}
		if _, fields := h.kernelMap(t); !cmp.Equal(want, fields) {
			return fmt.Errorf("kernel map (-want +got):\n%s", cmp.Diff(want, fields))
		}
		return nil
	})
}
