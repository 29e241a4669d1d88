// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil/golden"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
)

// readLines decodes each line of a file of JSON lines.
// decoders returns the decoders of cluster west (id 2), over fresh tables.
func decoders(t *testing.T) (Config, *nodes, *services, *ips, *identities) {
	t.Helper()
	cfg := testConfig(t)
	m, err := newMesh(cfg, testTiming)
	if err != nil {
		t.Fatal(err)
	}
	fs := newRemote(m, "west").newFeeds(2, false)
	return m.cfg, fs.nodes.decode.(*nodes), fs.services.decode.(*services), fs.ips.decode.(*ips), fs.identities.decode.(*identities)
}

// Every object that Cilium accepts is accepted, and every one that it refuses is refused, for a reason that can be counted.
//
// mechanism: B6
// lesson: C1 C2 C3
func TestValidationVectors(t *testing.T) {
	type vector struct {
		Kind          string
		KeySuffix     string `json:"key_suffix"`
		RemoteCluster string `json:"remote_cluster"`
		RemoteID      int    `json:"remote_cluster_id"`
		LocalMax      int    `json:"local_max_connected_clusters"`
		Name, Value   string
		Accepted      bool
		CiliumError   string `json:"cilium_error"`
	}
	_, nodes, services, ips, _ := decoders(t)
	for i, v := range golden.Lines[vector](t, "validation.jsonl") {
		t.Run(fmt.Sprintf("%d-%s", i, v.Kind), func(t *testing.T) {
			if v.RemoteCluster != "" && (v.RemoteCluster != "west" || v.RemoteID != 2) {
				t.Fatalf("vector of cluster %s, id %d", v.RemoteCluster, v.RemoteID)
			}
			var err error
			switch key, value := []byte(v.KeySuffix), []byte(v.Value); v.Kind {
			case "node":
				err = nodes.upsert(key, value, 1)
			case "service":
				err = services.upsert(key, value, 1)
			case "ip":
				err = ips.upsert(key, value, 1)
			case "cluster-name":
				err = identity.ValidateClusterName(v.Name)
			case "cluster-config":
				err = validateClusterConfig(t, v.LocalMax, v.Value)
			default:
				t.Fatalf("unknown kind %q", v.Kind)
			}
			if accepted := err == nil || errors.Is(err, errIgnored); accepted != v.Accepted {
				t.Errorf("%s under %q: error %v, accepted %v; Cilium: %v %s", v.Value, v.KeySuffix, err, accepted, v.Accepted, v.CiliumError)
			}
			if err != nil {
				t.Logf("%v", err)
			}
		})
	}
}

func validateClusterConfig(t *testing.T, localMax int, value string) error {
	t.Helper()
	layout, err := identity.NewLayout(localMax)
	if err != nil {
		t.Fatal(err)
	}
	config, err := identity.ParseClusterConfig([]byte(value))
	if err != nil {
		return err
	}
	return config.Validate(layout)
}

// An address may have an identity of its own cluster, or one of the reserved ones that are allowed; the host of another
// cluster is a remote node here.
//
// mechanism: G9
// lesson: C4
func TestIPIdentities(t *testing.T) {
	for id, want := range map[identity.ID]identity.ID{
		131072: 131072, 131329: 131329, 196607: 196607, // the range of cluster 2
		1: 6, 2: 2, 4: 4, 6: 6, 8: 8, 9: 9, 10: 10,
		0: 0, 256: 0, 65793: 0, 131071: 0, 196608: 0, 1<<24 + 1: 0, 1<<32 - 1: 0, // refused
		3: 0, 5: 0, 7: 0, 11: 0, 100: 0, 128: 0, 255: 0, // refused by default
	} {
		cfg, _, _, ips, _ := decoders(t)
		err := ips.upsert([]byte("10.2.1.10"), []byte(ipValue("10.2.1.10", int(id), "172.18.2.1")), 7)
		ips.flush(time.Time{})
		got := tableText(cfg.IPs)
		if want == 0 {
			var refused *refusal
			if !errors.As(err, &refused) || refused.reason != wantReason(id) || len(got) != 0 {
				t.Errorf("identity %d: error %v, table %q", uint32(id), err, got)
			}
			continue
		}
		expect := []string{fmt.Sprintf("10.2.1.10/32 %d via 172.18.2.1 by 2 ip", uint32(want))}
		if diff := cmp.Diff(expect, got); err != nil || diff != "" {
			t.Errorf("identity %d: error %v, table (-want +got):\n%s", uint32(id), err, diff)
		}
	}
}

func wantReason(id identity.ID) string {
	if id.Reserved() && id != identity.Invalid {
		return reasonReserved
	}
	return reasonForeign
}

// Deletions are matched by the canonical key that the addition had, so that no second spelling can take a claim away.
func TestIPKeys(t *testing.T) {
	for key, want := range map[string]string{
		"10.2.1.10": "10.2.1.10/32", "10.2.1.10/32": "10.2.1.10/32 cidr", "192.0.2.16/28": "192.0.2.16/28 cidr",
		"fd00::87": "fd00::87/128", "fd00::/64": "fd00::/64 cidr", "0.0.0.0/0": "0.0.0.0/0 cidr",
		"010.2.1.10": "", "fd00:0::87": "", "FD00::87": "", "::ffff:10.2.1.10": "", "fe80::1%eth0": "", "10.2.1.10/24": "",
		"10.2.1.0/024": "", "": "", "<nil>": "", "10.2.1.10/": "", "a/b": "", "10.2.1.10\n": "",
	} {
		prefix, cidr, ok := parsePrefixKey(key)
		got := ""
		if ok {
			got = prefix.String()
		}
		if ok && cidr {
			got += " cidr"
		}
		if got != want {
			t.Errorf("parsePrefixKey(%q) = %q, want %q", key, got, want)
		}
	}
}

// An address in use by one owner is not lost when another owner takes back its own claim.
//
// lesson: X8
func TestReusedIPOfAnotherOwner(t *testing.T) {
	cfg, nodes, _, ips, _ := decoders(t)
	mustUpsert(t, nodes, "west-n1", `{"Name":"west-n1","Cluster":"west","ClusterID":2,"IPAddresses":[{"Type":"InternalIP","IP":"10.2.1.10"}]}`, 1)
	mustUpsert(t, ips, "10.2.1.10", ipValue("10.2.1.10", 131329, "172.18.2.1"), 2)
	want := "10.2.1.10/32 131329 via 172.18.2.1 by 2 ip"
	if got := tableText(cfg.IPs); len(got) != 1 || got[0] != want {
		t.Fatalf("table %q, want %q", got, want)
	}
	nodes.remove([]byte("west-n1"))
	nodes.flush(time.Time{})
	if got := tableText(cfg.IPs); len(got) != 1 || got[0] != want {
		t.Errorf("after the node is gone: table %q, want %q", got, want)
	}
}

func mustUpsert(t *testing.T, d decoder, key, value string, revision int64) {
	t.Helper()
	if err := d.upsert([]byte(key), []byte(value), revision); err != nil {
		t.Fatalf("%s: %v", key, err)
	}
	d.flush(time.Time{})
}

// What a node contributes follows its last value, and nothing of an earlier one stays.
//
// mechanism: F1 F2 F5
func TestNodeUpdate(t *testing.T) {
	cfg, nodes, _, _, _ := decoders(t)
	mustUpsert(t, nodes, "west-n2", `{"Name":"west-n2","Cluster":"west","ClusterID":2,"EncryptionKey":3,"IPAddresses":[`+
		`{"Type":"InternalIP","IP":"172.18.2.2"},{"Type":"CiliumInternalIP","IP":"10.2.2.1"},{"Type":"InternalIP","IP":"fd00:18:2::2"}],`+
		`"IPv4AllocCIDR":{"IP":"10.2.2.0","Mask":"////AA=="},"IPv4HealthIP":"10.2.2.2","IPv4IngressIP":"10.2.2.3"}`, 1)
	want := []string{
		"10.2.2.0/24 2 via 172.18.2.2 key 3 by 2 node/west-n2",
		"10.2.2.1/32 6 via 172.18.2.2 remote by 2 node/west-n2",
		"10.2.2.2/32 4 via 172.18.2.2 key 3 by 2 node/west-n2",
		"10.2.2.3/32 8 via 172.18.2.2 key 3 by 2 node/west-n2",
		"172.18.2.2/32 6 remote by 2 node/west-n2",
		"fd00:18:2::2/128 6 remote by 2 node/west-n2",
	}
	if diff := cmp.Diff(want, tableText(cfg.IPs)); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}
	mustUpsert(t, nodes, "west-n2", `{"Name":"west-n2","Cluster":"west","ClusterID":2,"IPAddresses":[`+
		`{"Type":"InternalIP","IP":"172.18.2.9"},{"Type":"CiliumInternalIP","IP":"10.2.2.1"}],"IPv4AllocCIDR":{"IP":"10.2.7.0","Mask":"////AA=="}}`, 2)
	want = []string{
		"10.2.2.1/32 6 via 172.18.2.9 remote by 2 node/west-n2",
		"10.2.7.0/24 2 via 172.18.2.9 by 2 node/west-n2",
		"172.18.2.9/32 6 remote by 2 node/west-n2",
	}
	if diff := cmp.Diff(want, tableText(cfg.IPs)); diff != "" {
		t.Errorf("after the update: table (-want +got):\n%s", diff)
	}
	nodes.remove([]byte("west-n2"))
	nodes.flush(time.Time{})
	if got := tableText(cfg.IPs); len(got) != 0 {
		t.Errorf("after the deletion: table %q", got)
	}
}

// In a batch, what a node newly claims comes before what it no longer does.
func TestNodeAddsBeforeDeletes(t *testing.T) {
	d := &nodes{table: node.NewTable(), name: "west", known: map[string]knownNode{"n": {}}}
	d.table.Upsert(node.Node{
		Cluster: "west", Name: "n", IPv4PodCIDR: netip.MustParsePrefix("10.0.0.0/24"),
		IPv4SecondaryPodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.1.0/24")},
	})
	claim := func(prefix string) ipcache.Claim {
		return ipcache.Claim{Prefix: netip.MustParsePrefix(prefix), CIDR: true}
	}
	d.replace("n", []ipcache.Claim{claim("10.0.1.0/24"), claim("10.0.2.0/24")})
	var got []string
	for _, op := range *d.batch.ops {
		got = append(got, fmt.Sprint(op.Delete, " ", op.Claim.Prefix))
	}
	want := []string{"false 10.0.1.0/24", "false 10.0.2.0/24", "true 10.0.0.0/24"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("ops (-want +got):\n%s", diff)
	}
}

// The underlay's family decides behind which address of a node its pods are, and dual stack tells the worlds apart.
func TestNodeUnderlay6(t *testing.T) {
	cfg, nodes, _, _, _ := decoders(t)
	nodes.underlay6, nodes.dualStack = true, true
	mustUpsert(t, nodes, "west-n2", `{"Name":"west-n2","Cluster":"west","ClusterID":2,"IPAddresses":[`+
		`{"Type":"InternalIP","IP":"172.18.2.2"},{"Type":"InternalIP","IP":"fd00:18:2::2"}],`+
		`"IPv4AllocCIDR":{"IP":"10.2.2.0","Mask":"////AA=="},"IPv6AllocCIDR":{"IP":"fd00:10:2:2::","Mask":"////////////////AAAAAA=="}}`, 1)
	want := []string{
		"10.2.2.0/24 9 via fd00:18:2::2 by 2 node/west-n2",
		"172.18.2.2/32 6 remote by 2 node/west-n2",
		"fd00:10:2:2::/96 10 via fd00:18:2::2 by 2 node/west-n2",
		"fd00:18:2::2/128 6 remote by 2 node/west-n2",
	}
	if diff := cmp.Diff(want, tableText(cfg.IPs)); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}
}

// A cluster can neither set nor delete identities of another one: the table is shared by all.
//
// mechanism: I1
// lesson: C4
func TestForeignIdentities(t *testing.T) {
	cfg, _, _, _, west := decoders(t)
	east := &identities{table: cfg.Identities, layout: cfg.Layout, cluster: 1, name: "east"}
	mustUpsert(t, east, "65793", "k8s:io.cilium.k8s.policy.cluster=east;", 1)
	mustUpsert(t, west, "131329", "k8s:io.cilium.k8s.policy.cluster=west;", 1)

	west.remove([]byte("65793"))
	west.remove([]byte("0131329"))
	west.remove([]byte("+131329"))
	for _, id := range []identity.ID{65793, 131329} {
		if _, ok := cfg.Identities.Labels(id); !ok {
			t.Errorf("identity %d is gone", uint32(id))
		}
	}
	for key, value := range map[string]string{
		"65793":   "k8s:io.cilium.k8s.policy.cluster=west;",
		"131330":  "k8s:io.cilium.k8s.policy.cluster=east;",
		"131331":  "k8s:app=x;",
		"0131329": "k8s:io.cilium.k8s.policy.cluster=west;",
		"7":       "k8s:io.cilium.k8s.policy.cluster=west;",
		"x":       "k8s:io.cilium.k8s.policy.cluster=west;",
	} {
		if err := west.upsert([]byte(key), []byte(value), 2); err == nil || errors.Is(err, errIgnored) {
			t.Errorf("identity %q with %q: error %v, want a refusal", key, value, err)
		}
	}
	if err := west.upsert([]byte("131329"), nil, 2); !errors.Is(err, errIgnored) {
		t.Errorf("empty identity: error %v, want it ignored", err)
	}
	if cfg.Identities.Len() != 2 {
		t.Errorf("%d identities, want 2", cfg.Identities.Len())
	}
	west.remove([]byte("131329"))
	if _, ok := cfg.Identities.Labels(131329); ok {
		t.Error("identity 131329 is still there")
	}
}

// Text of a remote is shown escaped and cut, and only the newest hundred refusals are kept.
//
// lesson: R13
func TestRejections(t *testing.T) {
	log := &logBuffer{}
	r := newRejections(newTextLog(log))
	for i := range 150 {
		r.add("ip", fmt.Appendf(nil, "key-%d", i), refuse(reasonForeign, errors.New("no")))
	}
	r.add("node", []byte("a\x1b[2J\nb"), refuse(reasonMalformed, errors.New("\x07bell")))
	r.add("node", []byte(strings.Repeat("x", 5000)), refuse(reasonMalformed, errors.New("long")))
	counts, last := r.report()
	if diff := cmp.Diff(map[string]uint64{"ip/foreign-identity": 150, "node/malformed": 2}, counts); diff != "" {
		t.Errorf("counts (-want +got):\n%s", diff)
	}
	if len(last) != 100 || last[0].Key != "key-52" || last[97].Key != "key-149" {
		t.Errorf("%d refusals, from %q to %q", len(last), last[0].Key, last[97].Key)
	}
	if got := last[98]; got.Key != `a\x1b[2J\nb` || got.Reason != `\abell` {
		t.Errorf("escaped: %+v", got)
	}
	if got := len(last[99].Key); got > rejectionTextMax+len("…") {
		t.Errorf("a key of %d bytes is kept", got)
	}
	if got := strings.Count(log.String(), "refused"); got != 1 {
		t.Errorf("%d lines logged, want 1:\n%s", got, log)
	}
}

// BenchmarkIPs takes announcements in batches of 1,000, each for an address of its own, as from a listing.
func BenchmarkIPs(b *testing.B) {
	const batch = 1000
	layout, err := identity.NewLayout(255)
	if err != nil {
		b.Fatal(err)
	}
	var keys, values [batch][]byte
	d := &ips{table: ipcache.New(), layout: layout, owner: ipcache.Owner{Cluster: 2, Source: ipcache.ClusterMesh, Object: ipOwnerObject}}
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		if i := n % batch; i == 0 {
			b.StopTimer()
			d.flush(time.Time{})
			for j := range batch {
				addr := netip.AddrFrom4([4]byte{10, byte((n + j) >> 16), byte((n + j) >> 8), byte(n + j)})
				keys[j] = []byte(addr.String())
				values[j] = fmt.Appendf(nil, `{"IP":%q,"Mask":null,"HostIP":"172.18.2.1","ID":131329,"Key":0,"Metadata":"",`+
					`"K8sNamespace":"shop","K8sPodName":"pod-%d"}`, addr, n+j)
			}
			b.StartTimer()
		}
		if err := d.upsert(keys[n%batch], values[n%batch], int64(n)); err != nil {
			b.Fatal(err)
		}
	}
}
