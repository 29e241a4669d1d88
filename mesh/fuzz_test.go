// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

// Whatever a cluster publishes, under whatever key: no decoder panics, nothing but the cluster's own is ever claimed, and
// the deletion of the key takes back all that its value has brought.
//
// mechanism: D4
// lesson: C1 C7
func FuzzDecoders(f *testing.F) {
	for _, seed := range []struct{ key, value string }{
		{"west-n1", `{"Name":"west-n1","Cluster":"west","ClusterID":2,"IPAddresses":[{"Type":"InternalIP","IP":"172.18.2.1"}],"IPv4AllocCIDR":{"IP":"10.2.1.0","Mask":"////AA=="}}`},
		{"shop/web", `{"cluster":"west","namespace":"shop","name":"web","clusterID":2,"backends":{"10.2.1.10":{"":{"Protocol":"TCP","Port":80}}}}`},
		{"a/b/c", `{"cluster":"west","namespace":"a/b","name":"c","clusterID":2}`},
		{"10.2.1.10", `{"IP":"10.2.1.10","Mask":null,"HostIP":"172.18.2.1","ID":131329,"K8sNamespace":"shop","K8sPodName":"a"}`},
		{"10.2.1.10/32", `{"IP":"10.2.1.10","Mask":"/////w==","ID":1}`},
		{"fd00::/64", `{"IP":"fd00::","Mask":"//////////8AAAAAAAAAAA==","ID":6}`},
		{"10.2.1.10", `{"IP":"::ffff:10.2.1.10","ID":131329}`},
		{"<nil>", `{"ID":131329}`},
		{"131329", "k8s:app=web;k8s:io.cilium.k8s.policy.cluster=west;"},
		{"0131329", "k8s:io.cilium.k8s.policy.cluster=west;"},
	} {
		f.Add(seed.key, seed.value)
	}
	layout, err := identity.NewLayout(255)
	if err != nil {
		f.Fatal(err)
	}
	ours := []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("fd00:9::/64")}
	f.Fuzz(func(t *testing.T, key, value string) {
		cfg := Config{
			Layout: layout, IPs: ipcache.New(), Nodes: node.NewTable(), Identities: identity.NewTable(), Services: service.NewTable(),
			Log: slog.New(slog.DiscardHandler),
		}
		if err := cfg.complete(); err != nil {
			t.Fatal(err)
		}
		limits := DefaultLimits(1000)
		limits.Default.AnyHost = true
		cfg.Limits, cfg.OwnPrefixes = &limits, ours
		policy, err := newPolicy(&cfg, testTiming)
		if err != nil {
			t.Fatal(err)
		}
		fs := newRemote(&Mesh{cfg: cfg, policy: policy, ground: newGround(9)}, "west").newFeeds(2, false)
		for _, f := range fs.inDrainOrder() {
			err := f.decode.upsert([]byte(key), []byte(value), 1)
			f.decode.flush(time.Time{})
			if err != nil && printable(err.Error()) == "" {
				t.Errorf("%s: an error without text: %#v", f.kind, err)
			}
			checkClaims(t, cfg, f.kind)
			f.decode.remove([]byte(key))
			f.decode.flush(time.Time{})
			if left := fmt.Sprint(tableText(cfg.IPs), cfg.Services.Len(), cfg.Identities.Len()); left != "[] 0 0" {
				t.Errorf("%s %q: left after the deletion: %s", f.kind, key, left)
			}
			if nodes, _ := cfg.Nodes.Snapshot(); len(nodes) != 0 {
				t.Errorf("%s %q: left after the deletion: %v", f.kind, key, nodes)
			}
		}
	})
}

// checkClaims sees to it that all in the tables is what cluster west (id 2) may claim.
func checkClaims(t *testing.T, cfg Config, kind string) {
	t.Helper()
	for c := range cfg.IPs.All() {
		id := c.Entry.Identity
		if c.Owner.Cluster != 2 || c.Owner.Source != ipcache.ClusterMesh || id < 2 || !id.Reserved() && cfg.Layout.Cluster(id) != 2 {
			t.Errorf("%s: claim %s", kind, claimText(c))
		}
		if specialSpans.overlap(spanOf(c.Prefix)) || spansOf(netip.MustParsePrefix("10.9.0.0/16")).overlap(spanOf(c.Prefix)) || c.Prefix.Bits() < 16 {
			t.Errorf("%s: claim %s is of nobody's, or ours, or too much", kind, claimText(c))
		}
		if c.Prefix != c.Prefix.Masked() || c.Prefix.Addr().Is4In6() || c.Prefix.Addr().Zone() != "" {
			t.Errorf("%s: prefix %s is not canonical", kind, c.Prefix)
		}
	}
	for id := range cfg.Identities.All() {
		if cfg.Layout.Cluster(id) != 2 {
			t.Errorf("%s: identity %d", kind, id)
		}
	}
	nodes, _ := cfg.Nodes.Snapshot()
	for _, n := range nodes {
		if n.Cluster != "west" || n.ClusterID != 2 {
			t.Errorf("%s: node %q of cluster %q, %d", kind, n.Name, n.Cluster, n.ClusterID)
		}
	}
}
