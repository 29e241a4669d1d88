// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

// tablesOnly is an agent of east with tables, and nothing that fills them or the kernel.
func tablesOnly(t *testing.T) *agent {
	t.Helper()
	cfg, err := parseOptions(t, nil, "--cluster-name", "east", "--cluster-id", "1", "--node-name", "east-n1", "--node-ip", "172.18.1.1,fd00:18:1::1")
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{
		cfg: cfg, log: slog.New(slog.DiscardHandler), self: cfg.self(), ips: ipcache.New(), nodes: node.NewTable(),
		identities: identity.NewTable(), services: service.NewTable(), flows: api.NewFlowLog(),
	}
	if err := a.addMesh(); err != nil {
		t.Fatal(err)
	}
	if err := a.introduce(); err != nil {
		t.Fatal(err)
	}
	claim := func(p string, cluster identity.ClusterID, source ipcache.Source, object string, e ipcache.Entry) {
		a.ips.Apply([]ipcache.Op{{Claim: ipcache.Claim{Prefix: prefix(p), Owner: ipcache.Owner{Cluster: cluster, Source: source, Object: object}, Entry: e}}})
	}
	claim("10.1.1.10/32", 1, ipcache.Local, "endpoint/shop/web-0", ipcache.Entry{Identity: 65793})
	claim("10.1.1.10/32", 2, ipcache.ClusterMesh, "ip", ipcache.Entry{Identity: 131329})
	claim("172.18.2.1/32", 2, ipcache.ClusterMesh, "node/west-n1", ipcache.Entry{Identity: identity.RemoteNode, Flags: ipcache.FlagRemoteCluster})
	a.identities.Upsert(65793, identity.ParseLabels("k8s:app=web;"))
	return a
}

// How many workloads have an identity is known of our own cluster's alone.
func TestReferences(t *testing.T) {
	a := tablesOnly(t)
	known := map[identity.ID]int{65793: 2}
	for id, want := range map[identity.ID]*int{65793: new(2), 65794: new(0), 131329: nil, identity.RemoteNode: nil} {
		if diff := cmp.Diff(want, a.referencesOf(id, known)); diff != "" {
			t.Errorf("identity %d (-want +got)\n%s", id, diff)
		}
	}
}

func TestFlowPeers(t *testing.T) {
	a := tablesOnly(t)
	for name, tc := range map[string]struct {
		flow datapath.Flow
		want api.Flow
	}{
		"ingress": {
			datapath.Flow{
				IfIndex: 7, Direction: bpf.Ingress, Verdict: bpf.Identified, Mode: bpf.Overlay, Source: 131329, Destination: 65793, Proto: bpf.ProtocolTCP, TCPFlags: 0x12,
				SrcIP: addr("10.2.1.10"), DstIP: addr("10.1.1.10"), SrcPort: 1234, DstPort: 80,
			},
			api.Flow{
				Device: "7", Direction: "ingress", Verdict: "identified", Mode: "overlay", Protocol: "TCP", TCPFlags: "SYN,ACK",
				Source:      api.Peer{IP: addr("10.2.1.10"), Port: 1234, Identity: 131329, Cluster: 2, Labels: []string{}},
				Destination: api.Peer{IP: addr("10.1.1.10"), Port: 80, Identity: 65793, Cluster: 1, ClusterName: "east", Labels: []string{"k8s:app=web"}},
			},
		},
		"egress": {
			datapath.Flow{
				Device: "eth0", Direction: bpf.Egress, Verdict: bpf.Identified, Source: identity.Host, Destination: identity.RemoteNode, Proto: bpf.ProtocolICMP,
				SrcIP: addr("172.18.1.1"), DstIP: addr("172.18.2.1"), SrcPort: 8,
			},
			api.Flow{
				Device: "eth0", Direction: "egress", Verdict: "identified", Mode: "native", Protocol: "ICMP", ICMP: "8/0",
				Source:      api.Peer{IP: addr("172.18.1.1"), Identity: 1, Name: "host", Cluster: 1, ClusterName: "east", Labels: []string{"reserved:host"}},
				Destination: api.Peer{IP: addr("172.18.2.1"), Identity: 6, Name: "remote-node", Cluster: 2, Labels: []string{"reserved:remote-node"}},
			},
		},
		"the side that nobody knows is the world of its family": {
			datapath.Flow{Device: "eth0", Direction: bpf.Ingress, Verdict: bpf.World, Source: 10, Destination: 10, Proto: 47, SrcIP: addr("2001:db8::1"), DstIP: addr("2001:db8::2")},
			api.Flow{
				Device: "eth0", Direction: "ingress", Verdict: "world", Mode: "native", Protocol: "47",
				Source:      api.Peer{IP: addr("2001:db8::1"), Identity: 10, Name: "world-ipv6", Labels: []string{"reserved:world-ipv6"}},
				Destination: api.Peer{IP: addr("2001:db8::2"), Identity: 10, Name: "world-ipv6", Labels: []string{"reserved:world-ipv6"}},
			},
		},
		"not IP": {
			datapath.Flow{Device: "eth0", Direction: bpf.Ingress, Verdict: bpf.NotIP},
			api.Flow{Device: "eth0", Direction: "ingress", Verdict: "not-ip", Mode: "native", Protocol: "0"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := []api.Flow{a.flow(&tc.flow)}
			a.describe(got)
			if diff := cmp.Diff(tc.want, got[0], cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

func TestFindIP(t *testing.T) {
	a := tablesOnly(t)
	detail, ok := a.findIP(addr("10.1.1.10"))
	if !ok || detail.IP.Source != "local" || detail.IP.ClusterName != "east" || len(detail.IP.Labels) != 1 ||
		len(detail.Shadowed) != 1 || detail.Shadowed[0].Identity != 131329 || detail.Shadowed[0].Cluster != 2 {
		t.Errorf("10.1.1.10: %+v, %v", detail, ok)
	}
	if detail, ok = a.findIP(addr("172.18.2.1")); !ok || !cmp.Equal(detail.IP.Flags, []string{"remotecluster"}) {
		t.Errorf("172.18.2.1: %+v, %v", detail, ok)
	}
	if detail, ok = a.findIP(addr("192.0.2.1")); ok {
		t.Errorf("192.0.2.1: %+v", detail)
	}
}
