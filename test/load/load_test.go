// SPDX-License-Identifier: Apache-2.0

package load

import (
	"net/netip"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
)

// Made-up clusters hang together: no address twice in a mesh, every workload inside the prefix of its host, and every
// identity of the cluster's own range and with labels. The same seed makes the same cluster.
func TestClustersHangTogether(t *testing.T) {
	layout, err := identity.NewLayout(255)
	if err != nil {
		t.Fatal(err)
	}
	for _, mesh := range [][]Cluster{
		{{Name: "c1", ID: 1, Workloads: 1000, Identities: 10}, {Name: "c255", ID: 255, Nodes: 100, Workloads: 1000, Identities: 100, Cached: true}},
		{{Name: "c1", ID: 1, Nodes: 300, Workloads: 2000, Identities: 10}, {Name: "c15", ID: 15, Nodes: 4096, Workloads: 100, Identities: 500}},
	} {
		seen := make(map[netip.Prefix]bool)
		for _, c := range mesh {
			if err := c.Validate(); err != nil {
				t.Fatal(err)
			}
			check(t, c, layout, seen)
		}
		if want := mesh[0].Entries() + mesh[1].Entries(); len(seen) != want {
			t.Errorf("%d prefixes, want %d", len(seen), want)
		}
	}
}

func check(t *testing.T, c Cluster, layout identity.Layout, seen map[netip.Prefix]bool) {
	t.Helper()
	hosts, labels := make(map[netip.Addr]netip.Prefix), make(map[identity.ID]bool)
	claim := func(p netip.Prefix) {
		if seen[p] {
			t.Fatalf("%s: %s is claimed twice", c.Name, p)
		}
		seen[p] = true
	}
	nodes := c.key(node.StatePrefix, c.Name, "")
	ids := c.key(identity.StatePrefix, "id", "")
	for key, value := range c.Objects() {
		if name, ok := strings.CutPrefix(key, nodes); ok {
			n, err := node.Parse([]byte(value))
			if err == nil {
				err = n.Validate(name, c.Name, uint32(c.ID), 255)
			}
			if err != nil {
				t.Fatalf("%s: %v", key, err)
			}
			hosts[n.IP(false)] = n.IPv4PodCIDR
			claim(n.IPv4PodCIDR)
			for _, a := range n.Addresses {
				claim(netip.PrefixFrom(a.IP, 32))
			}
		} else if rest, ok := strings.CutPrefix(key, ids); ok {
			id, _, err := identity.ParseEntry(layout, c.ID, c.Name, rest, []byte(value))
			if err != nil {
				t.Fatalf("%s: %v", key, err)
			}
			labels[id] = true
		} else if rest, ok := strings.CutPrefix(key, c.WorkloadPrefix()); ok {
			a, err := ipcache.ParseAnnouncement([]byte(rest), []byte(value))
			if err != nil || !hosts[a.Host].Contains(a.Prefix.Addr()) || !labels[a.Identity] {
				t.Fatalf("%s: %v: host %s has %s, identity %d", key, err, a.Host, hosts[a.Host], a.Identity)
			}
			claim(a.Prefix)
		} else {
			t.Fatalf("%s is no key of %s", key, c.Name)
		}
	}
	if again, other := collect(c), c; again != collect(c) {
		t.Errorf("%s: the same seed makes another cluster", c.Name)
	} else if other.Seed++; again == collect(other) {
		t.Errorf("%s: another seed makes the same cluster", c.Name)
	}
}

func collect(c Cluster) string {
	var all strings.Builder
	for key, value := range c.Objects() {
		all.WriteString(key + value)
	}
	return all.String()
}

func TestFill(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	c := Cluster{Name: "west", ID: 2, Workloads: 1000, Identities: 10, Seed: 1}
	f := Filler{Client: etcd.Client()}
	if err := f.Fill(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := f.Delete(t.Context(), c, 0, 300); err != nil {
		t.Fatal(err)
	}
	if err := f.Put(t.Context(), c, 100, 100, 7); err != nil {
		t.Fatal(err)
	}
	want := make(map[string]string)
	for _, part := range []func(func(string, string) bool){c.Config(), c.Objects(), c.Canaries()} {
		for key, value := range part {
			want[key] = value
		}
	}
	for i := range 300 {
		key, value := c.Workload(i, 7)
		if delete(want, key); i >= 100 && i < 200 {
			want[key] = value
		}
	}
	resp, err := etcd.Client().Get(t.Context(), "cilium/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]string)
	for _, kv := range resp.Kvs {
		got[string(kv.Key)] = string(kv.Value)
	}
	if len(got) != len(want) {
		t.Fatalf("etcd holds %d keys, want %d", len(got), len(want))
	}
	for key, value := range want {
		if got[key] != value {
			t.Fatalf("%s: got %q, want %q", key, got[key], value)
		}
	}
}
