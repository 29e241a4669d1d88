// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/service"
)

// scene is a mesh of four clusters: ours (here, id 9), east (1) and north (3), which are honest, and west (2), which has an
// honest node and an honest workload and then misbehaves.
type scene struct {
	*world
	here, east, west, north *cluster
}

// defaultLimits is an option by which the limits are those of an agent without a file.
func defaultLimits(mapEntries int) func(*Config) {
	return func(c *Config) { c.Limits = new(DefaultLimits(mapEntries)) }
}

func newScene(t *testing.T, options ...func(*Config)) *scene {
	t.Helper()
	s := new(scene)
	s.here = &cluster{t: t, etcd: testutil.StartEtcd(t), name: "here", id: 9}
	s.east, s.west, s.north = newCluster(t, "east", 1), newCluster(t, "west", 2), newCluster(t, "north", 3)
	for _, c := range []*cluster{s.here, s.east, s.west, s.north} {
		c.node(c.name+"-n1", fmt.Sprintf("172.18.%d.1", c.id), fmt.Sprintf("10.%d.1.0", c.id))
		c.ip(fmt.Sprintf("10.%d.1.10", c.id), 257, fmt.Sprintf("172.18.%d.1", c.id))
		c.identity(257, "web")
		c.service("shop", "web")
	}
	s.world = newWorld(t, append([]func(*Config){
		defaultLimits(1000), withConfig(s.east), withConfig(s.west), withConfig(s.north),
		func(c *Config) {
			c.Own = &kvstore.Config{Endpoints: []string{s.here.etcd.Endpoint()}}
			c.OwnPrefixes = []netip.Prefix{netip.MustParsePrefix("172.18.9.9/32"), netip.MustParsePrefix("10.9.9.0/24")}
			c.IPs.Apply([]ipcache.Op{{Claim: ipcache.Claim{
				Prefix: netip.MustParsePrefix("172.18.9.9/32"), Owner: ipcache.Owner{Cluster: 9, Source: ipcache.Local, Object: "node/here-1"},
				Entry: ipcache.Entry{Identity: identity.Host},
			}}})
		},
	}, options...)...)
	for _, c := range []*cluster{s.here, s.east, s.west, s.north} {
		s.awaitState(c.name, Ready)
	}
	testutil.Eventually(t, soon, func() error {
		if got, want := len(s.ips()), 4*3+1; got != want {
			return fmt.Errorf("%d entries, want %d: %q", got, want, s.ips())
		}
		return nil
	})
	return s
}

// others lists all that is in the tables and does not belong to west.
func (s *scene) others() []string {
	var all []string
	for _, text := range s.ips() {
		if !strings.Contains(text, " by 2 ") {
			all = append(all, text)
		}
	}
	nodes, _ := s.cfg.Nodes.Snapshot()
	for _, n := range nodes {
		if n.Cluster != "west" {
			all = append(all, fmt.Sprintf("node %+v", n))
		}
	}
	for _, o := range s.cfg.Services.Snapshot() {
		if o.Cluster != "west" {
			all = append(all, fmt.Sprintf("service %+v", *o))
		}
	}
	for id, labels := range s.cfg.Identities.All() {
		if s.cfg.Layout.Cluster(id) != 2 {
			all = append(all, fmt.Sprintf("identity %d %s", uint32(id), labels))
		}
	}
	return all
}

// westIPs lists what west has in the ipcache.
func (s *scene) westIPs() []string {
	return slices.DeleteFunc(s.ips(), func(text string) bool { return !strings.Contains(text, " by 2 ") })
}

// awaitRejected waits until so many refusals of a kind and reason have been counted of west, beyond those before.
func (s *scene) awaitRejected(before map[string]uint64, want map[string]uint64) {
	s.t.Helper()
	testutil.Eventually(s.t, soon, func() error {
		status, _ := s.remote("west")
		for what, n := range want {
			if got := status.Rejected[what] - before[what]; got < n {
				return fmt.Errorf("%d refusals %s, want %d: %v", got, what, n, status.Rejected)
			}
		}
		return nil
	})
}

const westNode = "cilium/state/nodes/v1/west/"

// nodeValue is a node of west, or of who says so, with an address and a pod CIDR 10.x.y.z/bits.
func nodeValue(cluster, name, addr, cidr string) string {
	p := netip.MustParsePrefix(cidr)
	mask := map[int]string{8: "/wAAAA==", 0: "AAAAAA==", 16: "//8AAA==", 24: "////AA==", 26: "////wA=="}[p.Bits()]
	return fmt.Sprintf(`{"Name":%q,"Cluster":%q,"IPAddresses":[{"Type":"InternalIP","IP":%q}],"IPv4AllocCIDR":{"IP":%q,"Mask":%q},"ClusterID":2}`,
		name, cluster, addr, p.Addr(), mask)
}

func serviceValue(name, frontends, backends string) string {
	return fmt.Sprintf(`{"cluster":"west","namespace":"shop","name":%q,"frontends":{%s},"backends":{%s},"shared":true,"clusterID":2}`, name, frontends, backends)
}

// attack is what west writes, how that is counted, and what of it, if anything, is to be in the ipcache.
type attack struct {
	name     string
	keys     map[string]string
	rejected map[string]uint64
	waiting  int
	used     []string
}

func ipAttack(name, reason string, addrs ...string) attack {
	a := attack{name: name, keys: map[string]string{}, rejected: map[string]uint64{"ip/" + reason: uint64(len(addrs))}}
	for _, addr := range addrs {
		a.keys["cilium/state/ip/v1/default/"+addr] = announce(addr, 2<<16+257, "172.18.2.1")
	}
	return a
}

// announce is the announcement of an address or a prefix.
func announce(key string, id int, host string) string {
	p, err := netip.ParsePrefix(key)
	if err != nil {
		return ipValue(key, id, host)
	}
	a := ipcache.Announcement{Prefix: p, CIDR: true, Identity: identity.ID(id)}
	if host != "" {
		a.Host = netip.MustParseAddr(host)
	}
	value, _ := a.Marshal()
	return string(value)
}

func nodeAttack(name, reason, addr, cidr string, used ...string) attack {
	return attack{
		name: name, keys: map[string]string{westNode + "evil": nodeValue("west", "evil", addr, cidr)},
		rejected: map[string]uint64{"node/" + reason: 1}, used: used,
	}
}

func identityAttack(reason string, ids ...int) attack {
	a := attack{name: "R6 " + reason, keys: map[string]string{}, rejected: map[string]uint64{"ip/" + reason: uint64(len(ids))}}
	for i, id := range ids {
		addr := fmt.Sprintf("10.2.1.%d", 20+i)
		a.keys["cilium/state/ip/v1/default/"+addr] = announce(addr, id, "172.18.2.1")
	}
	return a
}

func hostAttack(hosts ...string) attack {
	a := attack{name: "R5", keys: map[string]string{}, rejected: map[string]uint64{"ip/" + reasonForeignHost: uint64(len(hosts))}}
	for i, host := range hosts {
		addr := fmt.Sprintf("10.2.1.%d", 20+i)
		a.keys["cilium/state/ip/v1/default/"+addr] = announce(addr, 2<<16+257, host)
	}
	return a
}

var attacks = []attack{
	ipAttack("R1 inside another remote's CIDR, of a lower and of a higher id", reasonForeignPrefix,
		"10.1.1.10", "10.1.1.77", "10.3.1.10", "10.3.1.77", "10.3.1.0/24", "10.3.1.64/26", "10.3.0.0/16"),
	ipAttack("R2 inside our own CIDRs", reasonOwnPrefix, "10.9.1.10", "10.9.1.77", "10.9.9.1", "10.9.0.0/16", "10.9.9.128/25"),
	ipAttack("R3 addresses of our nodes", reasonOwnPrefix, "172.18.9.1", "172.18.9.9"),
	ipAttack("R3 addresses of others' nodes", reasonForeignPrefix, "172.18.1.1", "172.18.3.1", "172.18.3.1/32"),
	nodeAttack("R3 a node with our address", reasonOwnPrefix, "172.18.9.9", "10.2.7.0/24"),
	nodeAttack("R3 a node with the address of a node of ours", reasonOwnPrefix, "172.18.9.1", "10.2.7.0/24"),
	nodeAttack("R3 a node with another's address", reasonForeignPrefix, "172.18.1.1", "10.2.7.0/24", "10.2.7.0/24 2 by 2 node/evil"),
	ipAttack("R4 too short", reasonPrefixLength, "0.0.0.0/0", "::/0", "10.0.0.0/8", "128.0.0.0/1", "2001:db8::/32"),
	ipAttack("R4 nobody's", reasonSpecialPrefix, "127.0.0.1", "127.0.0.0/16", "169.254.169.254", "169.254.0.0/16", "224.0.0.1", "239.1.0.0/16",
		"255.255.255.255", "0.0.0.0", "::", "::1", "fe80::1", "fe80::/64", "ff02::1", "ff02::/64"),
	nodeAttack("R4 a node for the default route", reasonPrefixLength, "172.18.2.6", "0.0.0.0/0"),
	nodeAttack("R4 a node for loopback", reasonSpecialPrefix, "172.18.2.6", "127.0.0.0/16"),
	nodeAttack("R4 a node with a loopback address", reasonSpecialPrefix, "127.0.0.1", "10.2.7.0/24"),
	hostAttack("172.18.9.9", "172.18.9.1", "172.18.1.1", "172.18.3.1", "127.0.0.1", "169.254.0.1", "::1", "0.0.0.0", "10.9.1.10"),
	{
		name: "R5 a host that nobody knows", waiting: 1,
		keys: map[string]string{"cilium/state/ip/v1/default/10.2.1.30": announce("10.2.1.30", 2<<16+257, "172.18.2.200")},
	},
	identityAttack(reasonForeign, 0, 256, 1<<16+257, 3<<16+257, 9<<16+257, 1<<24+1, 1<<32-1),
	identityAttack(reasonReserved, 3, 5, 7, 11, 100, 115, 128, 255),
	{
		name: "R7 nodes of ours and of others",
		keys: map[string]string{
			westNode + "here-1":                 nodeValue("here", "here-1", "172.18.2.6", "10.2.7.0/24"),
			westNode + "east-n1":                nodeValue("east", "east-n1", "172.18.2.6", "10.2.7.0/24"),
			westNode + "b":                      nodeValue("west", "here-1", "172.18.2.6", "10.2.7.0/24"),
			westNode + "c":                      strings.Replace(nodeValue("west", "c", "172.18.2.6", "10.2.7.0/24"), `"ClusterID":2`, `"ClusterID":9`, 1),
			"cilium/state/nodes/v1/here/here-1": nodeValue("here", "here-1", "172.18.2.6", "10.2.7.0/24"),
		},
		rejected: map[string]uint64{"node/mismatch": 4},
	},
	nodeAttack("R8 pod CIDR of ours", reasonOwnPrefix, "172.18.2.6", "10.9.1.0/24"),
	nodeAttack("R8 pod CIDR around ours", reasonOwnPrefix, "172.18.2.6", "10.9.0.0/16"),
	nodeAttack("R8 pod CIDR of another", reasonForeignPrefix, "172.18.2.6", "10.1.1.0/24", "172.18.2.6/32 6 remote by 2 node/evil"),
	nodeAttack("R8 pod CIDR inside another's", reasonForeignPrefix, "172.18.2.6", "10.1.1.64/26", "172.18.2.6/32 6 remote by 2 node/evil"),
	nodeAttack("R8 pod CIDR around another's", reasonForeignPrefix, "172.18.2.6", "10.1.0.0/16", "172.18.2.6/32 6 remote by 2 node/evil"),
	{
		name: "R9",
		keys: map[string]string{"cilium/state/services/v1/west/shop/evil": serviceValue("evil",
			`"127.0.0.1":{"":{"Protocol":"TCP","Port":80}},"10.9.9.5":{"":{"Protocol":"TCP","Port":80}},"10.96.0.10":{"":{"Protocol":"TCP","Port":80}}`,
			`"169.254.169.254":{"":{"Protocol":"TCP","Port":80}},"172.18.9.9":{},"172.18.9.1":{},"10.9.1.10":{},"10.9.9.5":{},"127.0.0.1":{},"::1":{},`+
				`"fe80::1":{},"::ffff:127.0.0.1":{},"10.1.1.10":{},"172.18.3.1":{},"10.2.1.10":{"":{"Protocol":"TCP","Port":8080}}`)},
		rejected: map[string]uint64{"service/foreign-prefix": 1}, // the first of them by address
	},
	{
		name: "R13",
		keys: map[string]string{
			westNode + "a\x1b[2Jb":                               strings.ReplaceAll(nodeValue("west", "EVIL", "172.18.2.6", "10.2.7.0/24"), "EVIL", `a\u001b[2Jb`),
			westNode + "..":                                      nodeValue("west", "..", "172.18.2.6", "10.2.7.0/24"),
			westNode + "../../east/east-n1":                      nodeValue("west", "../../east/east-n1", "172.18.2.6", "10.2.7.0/24"),
			westNode + "a\nb":                                    nodeValue("west", "a\nb", "172.18.2.6", "10.2.7.0/24"),
			"cilium/state/services/v1/west/../shop/web":          serviceValue("web", "", ""),
			"cilium/state/services/v1/west/shop/\x1b]0;evil\x07": serviceValue("x", "", ""),
			"cilium/state/services/v1/west/../x":                 `{"cluster":"west","namespace":"..","name":"x","clusterID":2}`,
			"cilium/state/ip/v1/default/../10.1.1.10":            announce("10.1.1.10", 2<<16+257, "172.18.2.1"),
			"cilium/state/ip/v1/default/10.2.1.31": `{"IP":"10.2.1.31","HostIP":"172.18.2.1","ID":131329,` +
				`"K8sNamespace":"a\u001b[31m","K8sPodName":"b"}`,
			"cilium/state/ip/v1/default/10.2.1.32":   `{"IP":"10.2.1.32","HostIP":"172.18.2.1","ID":131329,"K8sNamespace":"a","K8sPodName":"../../b"}`,
			"cilium/state/identities/v1/id/../65793": "k8s:io.cilium.k8s.policy.cluster=west;",
		},
		rejected: map[string]uint64{"node/malformed": 4, "service/malformed": 3, "ip/malformed": 3, "identity/malformed": 1},
	},
}

// Whatever data a remote cluster publishes, nothing that is another's changes; each claim that it may not make is refused,
// counted by kind and reason, and shown; what it may claim is used meanwhile.
//
// lesson: R1 R2 R3 R4 R5 R6 R7 R8 R9 R13 C2 C4
func TestHostileData(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	others, honest := s.others(), s.westIPs()
	if len(others) < 12 || len(honest) != 3 {
		t.Fatalf("before: %q and %q", others, honest)
	}
	for _, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			w := *s.world
			w.t = t
			s := &scene{&w, s.here, s.east, s.west, s.north}
			before, _ := s.remote("west")
			for key, value := range a.keys {
				s.west.etcd.Put(t, key, value)
			}
			s.awaitRejected(before.Rejected, a.rejected)
			// A good value of each kind shows that all before it have been seen.
			s.west.ip("10.2.1.200", 257, "172.18.2.1")
			s.west.node("west-n9", "172.18.2.9", "")
			want := append(append([]string{
				"10.2.1.200/32 131329 via 172.18.2.1 by 2 ip", "172.18.2.9/32 6 remote by 2 node/west-n9",
			}, honest...), a.used...)
			slices.Sort(want)
			testutil.Eventually(t, soon, func() error {
				if diff := cmp.Diff(want, s.westIPs()); diff != "" {
					return fmt.Errorf("entries of west (-want +got):\n%s", diff)
				}
				return nil
			})
			s.awaitRejected(before.Rejected, a.rejected)
			if diff := cmp.Diff(others, s.others()); diff != "" {
				t.Errorf("what is not west's (-want +got):\n%s", diff)
			}
			status := s.await("west", "waiting", func(r RemoteStatus) bool { return r.Waiting == a.waiting })
			for _, r := range status.LastRejections {
				if strings.ContainsFunc(r.Key+r.Reason, func(c rune) bool { return c < ' ' }) {
					t.Errorf("shown unescaped: %+v", r)
				}
			}
			if strings.HasPrefix(a.name, "R9") {
				s.checkEvilService(t)
			}
			for key := range a.keys {
				s.west.etcd.Delete(t, key)
			}
			s.west.etcd.Delete(t, s.west.ipKey("10.2.1.200"))
			s.west.etcd.Delete(t, westNode+"west-n9")
			testutil.Eventually(t, soon, func() error {
				if diff := cmp.Diff(honest, s.westIPs()); diff != "" {
					return fmt.Errorf("afterwards, entries of west (-want +got):\n%s", diff)
				}
				return nil
			})
		})
	}
}

// checkEvilService sees that only the one backend and the one frontend that west may have are left.
func (s *scene) checkEvilService(t *testing.T) {
	t.Helper()
	o, ok := s.cfg.Services.Offer("west", service.Name{Namespace: "shop", Name: "evil"}, "")
	if ok {
		left := func(subsets []service.Subset) (all []netip.Addr) {
			for _, s := range subsets {
				all = append(all, s.Addrs...)
			}
			return all
		}
		if got := left(o.Backends); !slices.Equal(got, []netip.Addr{netip.MustParseAddr("10.2.1.10")}) {
			t.Errorf("backends: %v", got)
		}
		if got := left(o.Frontends); !slices.Equal(got, []netip.Addr{netip.MustParseAddr("10.96.0.10")}) {
			t.Errorf("frontends: %v", got)
		}
		return
	}
	t.Error("the service is not in the table")
}
