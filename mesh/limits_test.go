// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
)

func cidrs(texts ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

// A cluster's limits are the file's for it, over the file's for all, over those built in.
func TestParseLimits(t *testing.T) {
	defaults := DefaultLimits(512_000)
	l, err := ParseLimits([]byte(`
own-prefixes: [10.96.0.0/12, 192.0.2.1, "fd00:9::/48"]
default:
  shortest-ipv4-prefix: 20
  max-events-per-second: 0
  denied-prefixes: [10.200.0.0/16]
clusters:
  west:
    pod-prefixes: [10.2.0.0/16, "fd00:2::/56"]
    node-prefixes: [172.18.2.0/24]
    shortest-ipv6-prefix: 56
    reserved-identities: [remote-node, 7]
    host-ip: any
    overlaps: allow
    max-entries: 10
    max-bytes: 20
    burst-events: 30
  north:
`), defaults)
	if err != nil {
		t.Fatal(err)
	}
	all := defaults.Default
	all.ShortestIPv4, all.MaxEventsPerSecond, all.DeniedPrefixes = 20, 0, cidrs("10.200.0.0/16")
	west := all
	west.PodPrefixes, west.NodePrefixes = cidrs("10.2.0.0/16", "fd00:2::/56"), cidrs("172.18.2.0/24")
	west.aside = cidrs("10.2.0.0/16", "fd00:2::/56", "172.18.2.0/24")
	west.ShortestIPv6, west.AnyHost, west.Overlaps, west.MaxEntries, west.MaxBytes, west.BurstEvents = 56, true, true, 10, 20, 30
	west.ReservedIdentities = []identity.ID{identity.RemoteNode, identity.KubeAPIServer}
	want := Limits{
		OwnPrefixes: cidrs("10.96.0.0/12", "192.0.2.1/32", "fd00:9::/48"), Default: all,
		Clusters: map[string]ClusterLimits{"west": west, "north": all},
	}
	if diff := cmp.Diff(want, l, cmp.AllowUnexported(ClusterLimits{}), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("limits (-want +got):\n%s", diff)
	}
	if all.MaxEntries != 256_000 {
		t.Errorf("a cluster may have %d of 512000 entries, want half", all.MaxEntries)
	}
	for _, empty := range []string{"# nothing\n", "{}", "default:\nclusters:\n"} {
		l, err := ParseLimits([]byte(empty), defaults)
		if diff := cmp.Diff(defaults.Default, l.Default, cmp.AllowUnexported(ClusterLimits{})); err != nil || diff != "" {
			t.Errorf("%q: %v\n%s", empty, err, diff)
		}
	}
}

// What is wrong in a file is said with its line, in the operator's words.
func TestParseLimitsErrors(t *testing.T) {
	for content, want := range map[string]string{
		"defaults: {}\n":                            "line 1: field defaults not found",
		"default:\n  pod-prefix: []\n":              "line 2: field pod-prefix not found",
		"default:\n  pod-prefixes: 10.0.0.0/8\n":    "line 2: want a list",
		"default:\n  pod-prefixes: [10.0.0.1/8]\n":  "line 2: 10.0.0.1/8 has bits beyond its length: did you mean 10.0.0.0/8?",
		"own-prefixes:\n- 10.0.0.0/33\n":            `line 2: "10.0.0.0/33" is not a prefix such as 10.1.0.0/16`,
		"own-prefixes:\n- fe80::1%eth0\n":           `line 2: "fe80::1%eth0" is not a prefix such as 10.1.0.0/16`,
		"own-prefixes:\n- [a]\n":                    "line 2: want a plain value",
		"default:\n  reserved-identities: [host]\n": `line 2: "host": want the name or the number, 2 to 255, of a reserved identity`,
		"default:\n  reserved-identities: [300]\n":  `line 2: "300": want the name`,
		"default:\n  max-entries: -1\n":             `line 2: "-1": want a whole number, not negative`,
		"default:\n  max-entries: many\n":           `line 2: "many": want a whole number`,
		"default:\n  shortest-ipv4-prefix: 33\n":    "default: line 2: shortest-ipv4-prefix: want at most 32",
		"clusters:\n  west:\n    host-ip: some\n":   `clusters: west: line 3: host-ip: "some": want nodes or any`,
		"clusters:\n  west:\n    overlaps: maybe\n": `clusters: west: line 3: overlaps: "maybe": want refuse or allow`,
		"clusters:\n  WEST: {}\n":                   `clusters: cluster name "WEST"`,
		"clusters:\n  west: {}\n  west: {}\n":       `line 3: mapping key "west" already defined at line 2`,
		"default: {max-bytes: 99999999999999999}\n": "default: line 1: max-bytes: want at most",
		"{}\n---\n{}\n":                             "want one YAML document",
		"[":                                         "line 1",
		"":                                          "the file is empty; write {}",
		" \n":                                       "the file is empty",
	} {
		_, err := ParseLimits([]byte(content), DefaultLimits(0))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "mesh.") {
			t.Errorf("%q: error %v, want %q", content, err, want)
		}
	}
}

// Sets of spans agree with their points.
func TestSpans(t *testing.T) {
	a := spansOf(cidrs("10.0.0.0/24", "10.0.1.0/24", "10.0.0.128/25", "10.0.3.0/24", "fd00::/64", "255.255.255.255/32", "ff00::/8")...)
	if len(a) != 5 {
		t.Errorf("%d spans, want those that touch or overlap as one: %v", len(a), a)
	}
	b := a.minus(spansOf(cidrs("10.0.0.5/32", "10.0.3.0/25", "fd00::/65", "ff00::/9")...))
	for text, want := range map[string]bool{
		"10.0.0.4/32": true, "10.0.0.5/32": false, "10.0.0.6/32": true, "10.0.0.0/24": false, "10.0.1.0/24": true, "10.0.2.0/32": false,
		"10.0.3.0/24": false, "10.0.3.127/32": false, "10.0.3.128/25": true, "fd00::1/128": false, "fd00::8000:0:0:0/65": true,
		"255.255.255.255/32": true, "255.255.255.254/32": false, "ff7f::/16": false, "ff80::/9": true, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128": true,
		"::/0": false, "::/128": false, "0.0.0.0/0": false,
	} {
		if _, got := b.around(spanOf(netip.MustParsePrefix(text))); got != want {
			t.Errorf("%s inside: %v, want %v", text, got, want)
		}
	}
	for text, want := range map[string]bool{"10.0.0.5/32": false, "10.0.0.4/31": true, "10.0.2.0/24": false, "10.0.0.0/8": true, "::/0": true, "9.0.0.0/8": false} {
		if got := b.overlap(spanOf(netip.MustParsePrefix(text))); got != want {
			t.Errorf("%s overlaps: %v, want %v", text, got, want)
		}
	}
	if rest := (spans{everything}).minus(spans{everything}); len(rest) != 0 {
		t.Errorf("everything without everything is %v", rest)
	}
}

// Whose ground a claim intrudes upon depends on what is declared, not on the order in which it was.
func TestGround(t *testing.T) {
	declared := []struct {
		c    identity.ClusterID
		node string
		p    []netip.Prefix
	}{
		{1, "a", cidrs("10.1.1.0/24", "172.18.1.1/32")}, {3, "a", cidrs("10.3.1.0/24", "10.1.1.128/25")},
		{2, "a", cidrs("10.3.1.0/25")}, {9, "a", cidrs("10.9.1.0/24")}, {3, "b", cidrs("10.3.1.0/24")},
	}
	for shift := range declared {
		g := newGround(9)
		for i := range declared {
			d := declared[(i+shift)%len(declared)]
			g.declare(d.c, d.node, d.p)
		}
		if !g.publish() || g.publish() {
			t.Error("publish does not tell news from none")
		}
		for _, c := range []struct {
			prefix   string
			by       identity.ClusterID
			declares bool
			want     identity.ClusterID
		}{
			{"10.1.1.5/32", 1, false, 0}, {"10.1.1.5/32", 2, false, 1}, {"10.1.1.5/32", 3, false, 1},
			{"10.1.1.200/32", 1, false, 0}, {"10.1.1.200/32", 3, false, 1}, {"10.1.1.200/32", 2, false, 1},
			{"10.3.1.5/32", 3, false, 2}, {"10.3.1.5/32", 2, false, 0}, {"10.3.1.200/32", 2, false, 3}, {"10.3.1.200/32", 3, false, 0},
			{"10.3.1.0/24", 2, false, 3}, {"10.3.1.0/24", 2, true, 0}, {"10.3.0.0/16", 1, true, 0}, {"10.3.0.0/16", 1, false, 2},
			{"10.9.1.1/32", 1, false, 9}, {"10.9.0.0/16", 1, true, 9}, {"10.0.0.0/8", 3, true, 9}, {"10.4.0.0/16", 3, false, 0}, {"::/0", 1, true, 9},
		} {
			if got, _ := g.now.Load().stranger(spanOf(netip.MustParsePrefix(c.prefix)), c.by, 9, c.declares); got != c.want {
				t.Errorf("shift %d: %s by %d (declares %v): ground of %d, want %d", shift, c.prefix, c.by, c.declares, got, c.want)
			}
		}
		for _, d := range declared {
			g.declare(d.c, d.node, nil)
		}
		if g.publish(); len(*g.now.Load()) != 1 {
			t.Errorf("left when all is gone: %v", *g.now.Load())
		}
	}
}

// limitsFileOf is an option by which the limits come from a file.
func limitsFileOf(path string) func(*Config) {
	return func(c *Config) { defaultLimits(1000)(c); c.LimitsFile = path }
}

// Limits that change take effect at once and without the cluster's doing: what is not allowed any more is withdrawn, what is
// allowed now is taken. A file that has become bad changes nothing but the status.
func TestLimitsReload(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "limits.yaml")
	replace(t, file, "default: {}\n")
	s := newScene(t, limitsFileOf(file))
	others, honest := s.others(), s.westIPs()
	s.west.node("west-n2", "172.18.2.2", "")
	s.west.ip("10.2.7.7", 257, "172.18.2.2")
	const used = "10.2.7.7/32 131329 via 172.18.2.2 by 2 ip"
	s.awaitIP("10.2.7.7/32", used)

	replace(t, file, "clusters: {west: {pod-prefixes: [10.2.1.0/24], node-prefixes: [172.18.2.0/24]}}\n")
	s.awaitIP("10.2.7.7/32", "")
	s.await("west", "the refusal counted", func(r RemoteStatus) bool { return r.Rejected["ip/denied-prefix"] > 0 && r.State == Ready })
	replace(t, file, "clusters: {west: {pod-prefixes: [10.2.7.0/24]}}\n")
	s.awaitIP("10.2.7.7/32", used)
	s.awaitIP("10.2.1.10/32", "")
	s.awaitIP("10.2.1.0/24", "")
	s.await("west", "its node refused", func(r RemoteStatus) bool { return r.Rejected["node/denied-prefix"] > 0 })

	replace(t, file, "clusters: {west: {pod-prefix: [10.2.7.0/24]}}\n")
	testutil.Eventually(t, soon, func() error {
		if e := s.Limits().Error; !strings.Contains(e, "line 1") || !strings.Contains(e, file) {
			return fmt.Errorf("error %q", e)
		}
		return nil
	})
	s.awaitIP("10.2.7.7/32", used)
	s.awaitIP("10.2.1.10/32", "")

	replace(t, file, "{}\n")
	s.west.etcd.Delete(t, s.west.ipKey("10.2.7.7"))
	s.west.etcd.Delete(t, westNode+"west-n2")
	testutil.Eventually(t, soon, func() error {
		if diff := cmp.Diff(honest, s.westIPs()); diff != "" || s.Limits().Error != "" {
			return fmt.Errorf("limits %+v, entries of west (-want +got):\n%s", s.Limits(), diff)
		}
		return nil
	})
	if diff := cmp.Diff(others, s.others()); diff != "" {
		t.Errorf("what is not west's (-want +got):\n%s", diff)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, soon, func() error {
		if s.Limits().Error == "" {
			return fmt.Errorf("no error for a file that is gone")
		}
		return nil
	})
}

// A file that is bad at the start is an error.
func TestLimitsBadFromTheStart(t *testing.T) {
	t.Parallel()
	for _, path := range []string{filepath.Join(t.TempDir(), "none"), "/dev/null/x"} {
		cfg := testConfig(t)
		cfg.LimitsFile = path
		if _, err := New(cfg); err == nil {
			t.Errorf("%s is accepted", path)
		}
	}
}

// When our own cluster gets a node, what remotes claim of it is withdrawn, and may be taken when the node is gone.
func TestOwnGroundGrows(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	s.west.ip("10.7.7.7", 257, "172.18.2.1")
	s.west.node("west-n2", "172.18.7.7", "10.7.8.0")
	used, node := "10.7.7.7/32 131329 via 172.18.2.1 by 2 ip", "10.7.8.0/24 2 via 172.18.7.7 by 2 node/west-n2"
	s.awaitIP("10.7.7.7/32", used)
	s.awaitIP("10.7.8.0/24", node)
	s.here.node("here-n7", "172.18.7.7", "10.7.7.0")
	s.awaitIP("10.7.7.7/32", "")
	s.awaitIP("10.7.8.0/24", "")
	s.awaitIP("172.18.7.7/32", "172.18.7.7/32 6 by 9 node/here-n7")
	s.here.etcd.Delete(t, "cilium/state/nodes/v1/here/here-n7")
	s.awaitIP("10.7.7.7/32", used)
	s.awaitIP("10.7.8.0/24", node)
	s.awaitIP("172.18.7.7/32", "172.18.7.7/32 6 remote by 2 node/west-n2")
}

// Of two clusters whose nodes declare one prefix the lower id has it, whoever came first, and the other one when it is
// gone; prefixes that the limits set aside for a cluster are its own whatever its id.
func TestContestedPrefix(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "limits.yaml")
	replace(t, file, "{}\n")
	s := newScene(t, limitsFileOf(file))
	const prefix = "10.50.1.0/24"
	north, west := "10.50.1.0/24 2 via 172.18.3.5 by 3 node/north-n5", "10.50.1.0/24 2 via 172.18.2.5 by 2 node/west-n5"
	s.north.node("north-n5", "172.18.3.5", "10.50.1.0")
	s.north.ip("10.50.1.5", 257, "172.18.3.5")
	s.awaitIP(prefix, north)
	s.awaitIP("10.50.1.5/32", "10.50.1.5/32 196865 via 172.18.3.5 by 3 ip")
	s.west.node("west-n5", "172.18.2.5", "10.50.1.0")
	s.awaitIP(prefix, west)
	s.awaitIP("10.50.1.5/32", "")
	s.awaitIP("172.18.3.5/32", "172.18.3.5/32 6 remote by 3 node/north-n5")
	s.await("north", "the loss shown", func(r RemoteStatus) bool {
		return r.Rejected["node/foreign-prefix"] > 0 && r.Rejected["ip/foreign-prefix"] > 0
	})
	replace(t, file, "clusters: {north: {pod-prefixes: [10.3.0.0/16, 10.50.0.0/16]}}\n")
	s.awaitIP(prefix, north)
	s.awaitIP("10.50.1.5/32", "10.50.1.5/32 196865 via 172.18.3.5 by 3 ip")
	replace(t, file, "{}\n")
	s.awaitIP(prefix, west)
	s.west.etcd.Delete(t, westNode+"west-n5")
	s.awaitIP(prefix, north)
	s.awaitIP("10.50.1.5/32", "10.50.1.5/32 196865 via 172.18.3.5 by 3 ip")
}

// An address waits for its node. A node that goes away leaves its addresses for a while, then they wait for it.
func TestWaitingForNode(t *testing.T) {
	t.Parallel()
	s := newScene(t, func(c *Config) { c.KeepInvalid = 500 * time.Millisecond })
	used := "10.2.5.5/32 131329 via 172.18.2.5 by 2 ip"
	s.west.ip("10.2.5.5", 257, "172.18.2.5")
	s.await("west", "one waiting", func(r RemoteStatus) bool { return r.Waiting == 1 && r.IPs == 1 && len(r.Rejected) == 0 })
	s.awaitIP("10.2.5.5/32", "")
	s.west.node("west-n5", "172.18.2.5", "")
	s.awaitIP("10.2.5.5/32", used)
	s.await("west", "none waiting", func(r RemoteStatus) bool { return r.Waiting == 0 && r.IPs == 2 })
	gone := time.Now()
	s.west.etcd.Delete(t, westNode+"west-n5")
	s.await("west", "one waiting", func(r RemoteStatus) bool { return r.Waiting == 1 })
	if kept := time.Since(gone); kept < s.cfg.KeepInvalid {
		t.Errorf("withdrawn after %s already", kept)
	}
	s.awaitIP("10.2.5.5/32", "")
	s.west.node("west-n5", "172.18.2.5", "")
	s.awaitIP("10.2.5.5/32", used)
	s.west.ip("10.2.5.6", 257, "172.18.2.6")
	s.await("west", "one waiting", func(r RemoteStatus) bool { return r.Waiting == 1 })
	s.west.etcd.Delete(t, s.west.ipKey("10.2.5.6"))
	s.await("west", "none waiting", func(r RemoteStatus) bool { return r.Waiting == 0 })
	s.remove("west")
	s.awaitGone("west")
	if left := s.westIPs(); len(left) != 0 {
		t.Errorf("left of west: %q", left)
	}
}
