// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTopology(t *testing.T) {
	var got []string
	topo := newTopology("weft")
	for _, c := range topo.Clusters {
		got = append(got, fmt.Sprintf("%s %d etcd=%s in %s", c.Name, c.ID, c.Etcd.endpoint(), c.Etcd.NetNS))
		for _, n := range c.Nodes {
			got = append(got, fmt.Sprintf("  %s in %s: %s %s pods %s %s by %s %s", n.Name, n.NetNS, n.IPv4, n.IPv6, n.PodCIDR4, n.PodCIDR6, n.Gateway4, n.Gateway6))
			for _, p := range n.Pods {
				got = append(got, fmt.Sprintf("    %s in %s by %s: %s %s app=%s %d", p.path(), p.NetNS, p.Device, p.IPv4, p.IPv6, p.App, p.Identity))
			}
		}
	}
	want := `east 1 etcd=http://172.18.1.100:2379 in weft-etcd-east
  east-1 in weft-east-1: 172.18.1.1/16 fd00:18:1::1/32 pods 10.1.1.0/24 fd00:10:1:1::/64 by 10.1.1.1 fd00:10:1:1::1
    east-1/web in weft-east-1-web by pod-web: 10.1.1.10 fd00:10:1:1::10 app=web 65793
    east-1/db in weft-east-1-db by pod-db: 10.1.1.11 fd00:10:1:1::11 app=db 65794
  east-2 in weft-east-2: 172.18.1.2/16 fd00:18:1::2/32 pods 10.1.2.0/24 fd00:10:1:2::/64 by 10.1.2.1 fd00:10:1:2::1
    east-2/web in weft-east-2-web by pod-web: 10.1.2.10 fd00:10:1:2::10 app=web 65793
    east-2/db in weft-east-2-db by pod-db: 10.1.2.11 fd00:10:1:2::11 app=db 65794
west 2 etcd=http://172.18.2.100:2379 in weft-etcd-west
  west-1 in weft-west-1: 172.18.2.1/16 fd00:18:2::1/32 pods 10.2.1.0/24 fd00:10:2:1::/64 by 10.2.1.1 fd00:10:2:1::1
    west-1/web in weft-west-1-web by pod-web: 10.2.1.10 fd00:10:2:1::10 app=web 131329
    west-1/db in weft-west-1-db by pod-db: 10.2.1.11 fd00:10:2:1::11 app=db 131330
  west-2 in weft-west-2: 172.18.2.2/16 fd00:18:2::2/32 pods 10.2.2.0/24 fd00:10:2:2::/64 by 10.2.2.1 fd00:10:2:2::1
    west-2/web in weft-west-2-web by pod-web: 10.2.2.10 fd00:10:2:2::10 app=web 131329
    west-2/db in weft-west-2-db by pod-db: 10.2.2.11 fd00:10:2:2::11 app=db 131330`
	if diff := cmp.Diff(strings.Split(want, "\n"), got); diff != "" {
		t.Errorf("topology (-want +got):\n%s", diff)
	}
}

func TestTopologyOwns(t *testing.T) {
	topo := newTopology("weft")
	for name, want := range map[string]bool{
		"weft-net":          true,
		"weft-etcd-west":    true,
		"weft-east-2":       true,
		"weft-east-2-cache": true,
		"weft-east-3":       false,
		"weft-east-22":      false,
		"weft":              false,
		"weftier-net":       false,
		"weft-t1-net":       false,
		"net":               false,
	} {
		if got := topo.owns(name); got != want {
			t.Errorf("owns(%q) = %t, want %t", name, got, want)
		}
	}
}

func TestIdentityOf(t *testing.T) {
	for _, app := range []string{"web", "db", "cache", "a", ""} {
		east, west := identityOf(1, app), identityOf(2, app)
		if east>>16 != 1 || west>>16 != 2 {
			t.Errorf("identityOf(_, %q) = %d, %d: outside the clusters' ranges", app, east, west)
		}
		if east&0xffff != west&0xffff {
			t.Errorf("identityOf(_, %q): the lower halves %d and %d differ", app, east&0xffff, west&0xffff)
		}
	}
	if identityOf(1, "cache") == identityOf(1, "queue") {
		t.Error("cache and queue have one identity")
	}
}

func TestPodDeclaration(t *testing.T) {
	node, err := newTopology("weft").node("west-2")
	if err != nil {
		t.Fatal(err)
	}
	want := node.pod("cache", "redis", 42)
	content, err := want.declaration()
	if err != nil {
		t.Fatal(err)
	}
	got, err := node.parsePod(content)
	if err != nil {
		t.Fatalf("parse the declaration:\n%s\n%v", content, err)
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b fmt.Stringer) bool { return a.String() == b.String() })); diff != "" {
		t.Errorf("pod (-want +got):\n%s", diff)
	}
}

func TestPodNames(t *testing.T) {
	for name, want := range map[string]bool{
		"web": true, "a": true, "a-b": true, "elevenchars": true, // pod-elevenchars is 15 bytes long
		"": false, "twelve-chars": false, "-a": false, "a-": false, "Web": false, "a/b": false, "..": false, "a.b": false,
	} {
		if err := validatePodName(name); (err == nil) != want {
			t.Errorf("validatePodName(%q) = %v, want valid %t", name, err, want)
		}
	}
}

func TestFreeHost(t *testing.T) {
	node, err := newTopology("weft").node("east-1")
	if err != nil {
		t.Fatal(err)
	}
	pods := node.Pods
	for want := uint8(12); want <= 99; want++ {
		got, err := node.freeHost(pods)
		if err != nil || got != want {
			t.Fatalf("freeHost with %d pods = %d, %v, want %d", len(pods), got, err, want)
		}
		pods = append(pods, node.pod(fmt.Sprintf("p%d", want), "x", want))
	}
	if got, err := node.freeHost(pods); err == nil {
		t.Errorf("freeHost of a full node = %d, want an error", got)
	}
}
