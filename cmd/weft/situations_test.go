// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// question is a command that is asked when something is broken, and what its answer must have: what is wrong, and what to do.
type question struct {
	args        string
	code        int
	cause, next string
}

// situation is something broken.
type situation struct {
	name string
	// happen breaks it, and returns what mends it; nil if nothing needs mending.
	happen func(*testing.T, *trouble) (mend func())
	ask    []question
}

// passing are the situations that weft puts an end to by itself, so that they happen again whenever somebody asks.
var passing = map[string]bool{"foreign map entry": true}

// trouble is an agent of east on the kernel that follows west, over TLS, and south, both well; north is a cluster whose config
// situations write.
type trouble struct {
	site
	west    *securedWest
	south   *testutil.Etcd
	line    *testutil.Proxy // to south
	private *testutil.Etcd  // asks for a password
	limits  string          // file
	again   func()          // what happens whenever somebody asks, or nil
}

func newTrouble(t *testing.T) *trouble {
	t.Helper()
	x := &trouble{site: newSite(t), west: newSecuredWest(t), south: testutil.StartEtcd(t), private: testutil.StartEtcd(t, testutil.WithAuth("north"))}
	x.west.etcd.Delete(t, "cilium/.heartbeat") // who has seen one misses it after a while
	x.clustermesh = x.west.dir
	x.line = testutil.StartProxy(t, x.south.Addr())
	x.south.Put(t, "cilium/cluster-config/south", `{"id":3,"capabilities":{"maxConnectedClusters":255}}`)
	x.south.Put(t, "cilium/state/nodes/v1/south/south-n1", `{"Name":"south-n1","Cluster":"south","ClusterID":3,`+
		`"IPAddresses":[{"Type":"InternalIP","IP":"172.18.3.1"}],"IPv4AllocCIDR":{"IP":"10.3.1.0","Mask":"////AA=="}}`)
	x.announce(t, "10.3.1.10", "172.18.3.1", 3<<16+257)
	x.south.Put(t, "cilium/state/identities/v1/id/196865", "k8s:app=web;k8s:io.cilium.k8s.policy.cluster=south;")
	x.southConfig(t, "south", x.line.Addr())
	ip(t, "address add fd00:18:1::1/32 dev eth0 nodad") // the recorded nodes have such addresses, too
	ip(t, "neighbour add 172.18.3.1 lladdr 02:00:00:00:00:03 dev eth0")
	ip(t, "neighbour add 172.18.9.9 lladdr 02:00:00:00:00:09 dev eth0") // a machine that never answers
	return x
}

// announce has south say whose an address is.
func (x *trouble) announce(t *testing.T, addr, host string, id int) {
	t.Helper()
	x.south.Put(t, "cilium/state/ip/v1/default/"+addr, fmt.Sprintf(`{"IP":%q,"HostIP":%q,"ID":%d,"Key":0,"Metadata":""}`, addr, host, id))
}

// southConfig writes a config that leads to an address.
func (x *trouble) southConfig(t *testing.T, name, addr string, more ...string) {
	t.Helper()
	testutil.MustWriteFile(t, x.west.path(name), []byte("endpoints:\n- http://"+addr+"\n"+strings.Join(more, "")))
}

// northern is a situation of a config of north's that leads to west's etcd, with TLS.
func northern(server, client testutil.Certificate, other string, changes ...string) func(*testing.T, *trouble) func() {
	return func(t *testing.T, x *trouble) func() {
		w, ca := x.west, testutil.NewCA(t, "other-ca")
		if client.CommonName == "" {
			client.CommonName = "remote"
		}
		of := func(name string) *testutil.CA {
			if name == other {
				return ca
			}
			return w.ca
		}
		w.etcd.Present(t, of("server"), server)
		cert, key := of("client").Issue(t, client)
		testutil.MustWriteFile(t, w.path("north.crt"), cert)
		testutil.MustWriteFile(t, w.path("north.key"), key)
		w.config(t, "north", append(changes, w.path("client.crt"), w.path("north.crt"), w.path("client.key"), w.path("north.key"))...)
		return func() {
			w.etcd.Present(t, w.ca, testutil.Certificate{})
			x.remove(t, "north")
		}
	}
}

// beat has north's heartbeat be of a time. The agent does not follow north, or it would miss the next.
func (x *trouble) beat(t *testing.T, at time.Time) (mend func()) {
	t.Helper()
	x.private.Put(t, "cilium/.heartbeat", at.Format(time.RFC3339))
	x.southConfig(t, "north", x.private.Addr(), "username: root\npassword: "+testutil.Password+"\n")
	return func() { x.remove(t, "north") }
}

func (x *trouble) remove(t *testing.T, name string) {
	t.Helper()
	if err := os.Remove(x.west.path(name)); err != nil {
		t.Error(err)
	}
}

// shell runs a command that must succeed.
func shell(t *testing.T, line string, args ...string) {
	t.Helper()
	words := append(strings.Fields(line), args...)
	if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(words, " "), err, out)
	}
}

const (
	tryNorth = "troubleshoot kvstore north --timeout 2s"
	trySouth = "troubleshoot kvstore south --timeout 2s"
	nobodys  = "explain 10.9.9.9" // an address that no cluster announces
	seeNorth = "see `weft troubleshoot kvstore north`"
	seeSouth = "see `weft troubleshoot kvstore south`"
)

// situations are asked about one after the other, while an agent runs.
var situations = []situation{
	{"wrong CA", northern(testutil.Certificate{}, testutil.Certificate{}, "server"), []question{
		{tryNorth, 1, "✗ TLS: x509: certificate signed by unknown authority", "put the authority that signed the certificate, CN=other-ca, into"},
		{nobodys, 0, "it may be of cluster north, which is failed: no answer from etcd", seeNorth},
		{"status", 1, "cluster north is failed: no answer from etcd", seeNorth},
	}},
	{"expired certificate", northern(testutil.Certificate{NotBefore: time.Now().AddDate(0, 0, -9), NotAfter: time.Now().AddDate(0, 0, -3)}, testutil.Certificate{}, ""), []question{
		{tryNorth, 1, "certificate has expired", "renew the server's certificate"},
		{nobodys, 0, "it may be of cluster north, which is failed: no answer from etcd", seeNorth},
	}},
	{"certificate not yet valid", northern(testutil.Certificate{NotBefore: time.Now().Add(time.Hour), NotAfter: time.Now().Add(2 * time.Hour)}, testutil.Certificate{}, ""), []question{
		{tryNorth, 1, "not yet valid", "clocks"},
		{nobodys, 0, "it may be of cluster north, which is failed: no answer from etcd", seeNorth},
	}},
	{"wrong name", northern(testutil.Certificate{Hosts: []string{"east.example.net"}}, testutil.Certificate{}, ""), []question{
		{tryNorth, 1, "certificate is valid for east.example.net, not west.mesh.cilium.io", "the certificate is for east.example.net"},
		{nobodys, 0, "it may be of cluster north, which is failed: no answer from etcd", seeNorth},
	}},
	{"own certificate expired", northern(testutil.Certificate{}, testutil.Certificate{NotBefore: time.Now().AddDate(0, 0, -9), NotAfter: time.Now().AddDate(0, 0, -3)}, ""), []question{
		{tryNorth, 1, "ended 3 days ago", "renew it"},
		{nobodys, 0, "it may be of cluster north, which is failed: no answer from etcd", seeNorth},
	}},
	{"own certificate of another CA", northern(testutil.Certificate{}, testutil.Certificate{}, "client"), []question{
		{tryNorth, 1, "none of the accepted authorities", "signed by an authority that the server trusts"},
		{nobodys, 0, "it may be of cluster north, which is failed: no answer from etcd", seeNorth},
	}},
	{"missing grant", northern(testutil.Certificate{}, testutil.Certificate{CommonName: "stranger"}, ""), []question{
		{tryNorth, 1, "permission denied", "etcdctl role grant-permission ROLE read"},
		{nobodys, 0, "it may be of cluster north, which is failed: no answer from etcd: get cilium/cluster-config/north: etcdserver: permission denied", seeNorth},
	}},
	{"wrong password", func(t *testing.T, x *trouble) func() {
		x.southConfig(t, "north", x.private.Addr(), "username: remote\npassword: guess\n")
		return func() { x.remove(t, "north") }
	}, []question{
		{tryNorth, 1, "authentication failed", "correct username and password"},
		{nobodys, 0, "authentication failed", seeNorth},
	}},
	{"refused port", func(t *testing.T, x *trouble) func() {
		x.line.Refuse()
		return x.line.Forward
	}, []question{
		{trySouth, 1, "connection refused", "nothing listens at this port: see whether etcd runs there"},
		{"explain 10.3.1.10", 0, "cluster south is stale, and this may be out of date: ", seeSouth},
		{"status", 1, "cluster south is stale: ", seeSouth},
	}},
	{"firewall black hole", func(t *testing.T, x *trouble) func() {
		x.southConfig(t, "north", "172.18.9.9:2379")
		return func() { x.remove(t, "north") }
	}, []question{
		{tryNorth, 1, "✗ connect: dial tcp 172.18.9.9:2379: i/o timeout", "see whether a firewall between here and there lets this port pass"},
		{nobodys, 0, "it may be of cluster north, which is connecting", ""},
	}},
	{"etcd hangs", func(t *testing.T, x *trouble) func() {
		x.line.Pause()
		return x.line.Forward
	}, []question{
		{trySouth, 1, "deadline exceeded", "something accepts connections there"},
	}},
	{"file named after another cluster", func(t *testing.T, x *trouble) func() {
		x.southConfig(t, "north", x.south.Addr())
		return func() { x.remove(t, "north") }
	}, []question{
		{tryNorth, 1, "cilium/cluster-config/north does not exist", "this etcd holds cilium/cluster-config/south: is the file \"north\" named after the right cluster?"},
		{"status", 1, `etcd has no key "cilium/cluster-config/north"`, seeNorth},
	}},
	{"name clash", func(t *testing.T, x *trouble) func() {
		x.southConfig(t, "east", x.south.Addr())
		return func() { x.remove(t, "east") }
	}, []question{
		{"troubleshoot kvstore east --timeout 2s", 1, "the running agent passes the file over: east is the name of its own cluster", "give one of the two another name"},
	}},
	{"id clash", func(t *testing.T, x *trouble) func() {
		x.south.Put(t, "cilium/cluster-config/north", `{"id":2}`)
		x.southConfig(t, "north", x.south.Addr())
		return func() { x.remove(t, "north") }
	}, []question{
		{tryNorth, 1, "cluster id 2, of 255 at most, cached=false, canaries=false, which cluster west has", "give one of the two clusters another id"},
		{nobodys, 0, "it may be of cluster north, which is conflict: cluster id is in use: cluster north says that its id is 2, which cluster west holds", "give one of the two another id"},
		{"status", 1, "cluster north says that its id is 2, which cluster west holds", "give one of the two another id"},
	}},
	{"id of our own", func(t *testing.T, x *trouble) func() {
		x.south.Put(t, "cilium/cluster-config/north", `{"id":1}`)
		x.southConfig(t, "north", x.south.Addr())
		return func() { x.remove(t, "north") }
	}, []question{
		{tryNorth, 1, "which cluster east (our own) has", "give one of the two clusters another id"},
		{"status", 1, "cluster id is our own, 1", "give one of the two clusters another id"},
	}},
	{"cluster-config that is none", func(t *testing.T, x *trouble) func() {
		x.south.Put(t, "cilium/cluster-config/north", `id: 7`)
		x.southConfig(t, "north", x.south.Addr())
		return func() { x.remove(t, "north") }
	}, []question{
		{tryNorth, 1, "cilium/cluster-config/north: cluster config: invalid character", "the cluster's own components must write it anew"},
		{"status", 1, `etcd key "cilium/cluster-config/north": cluster config: invalid character`, seeNorth},
	}},
	{"cluster id out of range", func(t *testing.T, x *trouble) func() {
		x.south.Put(t, "cilium/cluster-config/north", `{"id":300,"capabilities":{"maxConnectedClusters":511}}`)
		x.southConfig(t, "north", x.south.Addr())
		return func() { x.remove(t, "north") }
	}, []question{
		{tryNorth, 1, "cluster id 300, of 511 at most, cached=false, canaries=false: ClusterID > 255 is not supported", "all clusters of the mesh the same --max-connected-clusters"},
		{"status", 1, "ClusterID > 255 is not supported", seeNorth},
	}},
	{"config that is no YAML", func(t *testing.T, x *trouble) func() {
		testutil.MustWriteFile(t, x.west.path("north"), []byte("endpoints: {\n"))
		return func() { x.remove(t, "north") }
	}, []question{
		{tryNorth, 1, "north: parse: error converting YAML to JSON: yaml: line 1", "correct the file"},
		{"status", 1, "cluster north: /", "yaml: line 1: did not find expected node content: correct the file"},
	}},
	{"late heartbeat", func(t *testing.T, x *trouble) func() {
		return x.beat(t, testNow.Add(-10*time.Minute))
	}, []question{
		{tryNorth, 1, "! heartbeat: written 10m0s ago, the last time", "see whether its writer runs (clustermesh-apiserver, kvstoremesh, an operator)"},
	}},
	{"clock skew", func(t *testing.T, x *trouble) func() {
		return x.beat(t, testNow.Add(time.Hour))
	}, []question{
		{tryNorth, 1, "! heartbeat: written in 1h0m, by a clock that is ahead of ours", "set the clocks of both machines right"},
	}},
	{"rejected address", func(t *testing.T, x *trouble) func() {
		x.announce(t, "10.3.1.99", "172.18.3.1", 65793)
		return func() { x.south.Delete(t, "cilium/state/ip/v1/default/10.3.1.99") }
	}, []question{
		{"explain 10.3.1.99", 0, "Refused: 10.3.1.99 of south", "cluster south announces it against the rules: correct that there, or allow it in --mesh-limits"},
		{trySouth, 0, "! agent: refused by reason: ip/foreign-identity=1", "see `weft clusters rejected south`: each has its reason"},
		{"clusters rejected south", 0, "10.3.1.99 identity 65793 is neither reserved nor in the cluster's range", "196608 to 262143"},
	}},
	{"node that is not known", func(t *testing.T, x *trouble) func() {
		x.announce(t, "10.3.1.98", "172.18.3.98", 3<<16+257)
		return func() { x.south.Delete(t, "cilium/state/ip/v1/default/10.3.1.98") }
	}, []question{
		{"explain 10.3.1.98", 0, "no node of cluster south has the address 172.18.3.98", "see whether an agent runs on that node, and publishes it: `weft node list`"},
		{trySouth, 0, "! agent: 1 announcement whose node is not known wait", "see whether agents run on those nodes"},
	}},
	{"address of another cluster", func(t *testing.T, x *trouble) func() {
		x.announce(t, "10.2.1.10", "172.18.3.1", 3<<16+257)
		return func() { x.south.Delete(t, "cilium/state/ip/v1/default/10.2.1.10") }
	}, []question{
		{"explain 10.2.1.10", 0, "Refused: 10.2.1.10 of south", "cluster south announces it against the rules: correct that there"},
		{"explain 10.2.1.10", 0, "10.2.1.10/32 overlaps what nodes of the cluster with id 2 have", "`weft clusters rejected south` has more"},
	}},
	{"conflict", func(t *testing.T, x *trouble) func() {
		const key = "cilium/state/ip/v1/default/10.2.1.10"
		x.east.Put(t, key, `{"IP":"10.2.1.10","HostIP":"172.18.1.2","ID":65799,"Key":0,"Metadata":"","K8sNamespace":"shop","K8sPodName":"thief"}`)
		return func() { x.east.Delete(t, key) }
	}, []question{
		{"explain 10.2.1.10", 0, "cluster west claims it for something else, and only one can be right", "take the other claim away where it stands, see KEY"},
		{"ip conflicts", 0, "10.2.1.10/32 65799 by east (kvstore) shop/thief", "131329 by west (clustermesh)"},
		{"status", 0, "1 conflict", "see weft ip conflicts"},
	}},
	{"labels not known", func(t *testing.T, x *trouble) func() {
		x.announce(t, "10.3.1.11", "172.18.3.1", 3<<16+999)
		return func() { x.south.Delete(t, "cilium/state/ip/v1/default/10.3.1.11") }
	}, []question{
		{"explain 10.3.1.11", 0, "its cluster has not published what identity 197607 stands for", "`weft identity get 197607` shows it once it has"},
	}},
	{"map full", func(t *testing.T, x *trouble) func() {
		const many = 60
		for i := range many {
			x.announce(t, fmt.Sprintf("10.3.2.%d", i), "172.18.3.1", 3<<16+257)
		}
		return func() { x.south.DeletePrefix(t, "cilium/state/ip/v1/default/10.3.2.") }
	}, []question{
		{"status", 1, "the ipcache map is full (50 entries)", "restart with a larger --max-ipcache-entries"},
		{"explain 10.3.2.59", 0, "the map is full (50 entries)", "restart the agent with a larger --max-ipcache-entries"},
		{"verify", 1, "absent", "`weft verify --repair` makes right what this node can"},
	}},
	{"quota", func(t *testing.T, x *trouble) func() {
		testutil.MustWriteFile(t, x.limits+".new", []byte("clusters: {south: {max-entries: 2}}\n"))
		x.announce(t, "10.3.1.12", "172.18.3.1", 3<<16+257)
		if err := os.Rename(x.limits+".new", x.limits); err != nil {
			t.Fatal(err)
		}
		return func() {
			x.south.Delete(t, "cilium/state/ip/v1/default/10.3.1.12")
			testutil.MustWriteFile(t, x.limits, []byte("clusters: {south: {max-entries: 1000}}\n"))
		}
	}, []question{
		{"status", 1, "cluster south: quota max-entries: ", "raise max-entries in --mesh-limits if it should have more"},
		{trySouth, 0, "! agent: quota max-entries: ", "raise max-entries of this cluster in --mesh-limits if it should have more"},
	}},
	{"foreign map entry", func(t *testing.T, x *trouble) func() {
		key := strings.Fields("key hex 40 00 00 00 00 00 00 01 0a 07 07 07 00 00 00 00 00 00 00 00 00 00 00 00")
		value := strings.Fields("value hex 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00")
		shell(t, "bpftool map update pinned "+x.bpffs+"/weft/ipcache", append(key, value...)...)
		return func() { x.cli(t, 0, "verify --repair") }
	}, []question{
		{"explain 10.7.7.7", 0, "differs from what it should be: nothing", "`weft verify --repair` puts it right now"},
		{"verify", 1, "map 10.7.7.7/32 absent an entry that nobody claims", "`weft verify --repair` makes right what this node can"},
	}},
	{"foreign route in place of ours", func(t *testing.T, x *trouble) func() {
		ip(t, "route replace 10.3.1.0/24 via 172.18.2.1 proto static")
		return func() { ip(t, "route del 10.3.1.0/24 proto static") }
	}, []question{
		{"status", 1, "route to 10.3.1.0/24 of node south/south-n1: a route of protocol static has this prefix already", "remove it if weft is to route there: `ip route del 10.3.1.0/24 proto static`"},
	}},
	{"missing route", func(t *testing.T, x *trouble) func() {
		const key = "cilium/state/nodes/v1/south/south-n2"
		x.south.Put(t, key, `{"Name":"south-n2","Cluster":"south","ClusterID":3,"IPAddresses":[{"Type":"InternalIP","IP":"172.31.0.1"}],`+
			`"IPv4AllocCIDR":{"IP":"10.3.7.0","Mask":"////AA=="}}`)
		return func() { x.south.Delete(t, key) }
	}, []question{
		{"status", 1, "route to 10.3.7.0/24 of node south/south-n2: node address 172.31.0.1: no route: network is unreachable", "add a route to the node"},
		{"explain 10.3.7.7", 0, "no route to 10.3.7.7: network is unreachable", "no packet gets there: see the routes of `weft status`"},
	}},
	{"device gone", func(t *testing.T, x *trouble) func() {
		ip(t, "link del spare")
		return func() { ip(t, "link add spare type veth peer name spare0") }
	}, []question{
		{"status", 1, "device spare: there is no such device", "it gets its programs when it appears"},
		{"diagnose --devices eth0,spare", 0, "! device spare does not exist", "it gets its programs when it appears"},
	}},
	{"way without programs", func(t *testing.T, x *trouble) func() {
		ip(t, "link add other type veth peer name other0")
		ip(t, "link set other up")
		ip(t, "link set other0 up")
		ip(t, "route add 10.3.1.10/32 dev other")
		return func() { ip(t, "link del other") }
	}, []question{
		{"explain 10.3.1.10", 0, "packets to it leave by other, which has no programs", "name it in --devices"},
	}},
	{"services are nobody's", func(*testing.T, *trouble) func() { return func() {} }, []question{
		{"explain 10.96.1.10", 0, "sockets of this node are given no backends", "start the agent with --service-lb"},
	}},
	{"bad file of a workload", func(t *testing.T, x *trouble) func() {
		file := filepath.Join(x.endpointsDir, "bad.yaml")
		testutil.MustWriteFile(t, file, []byte("{name: x, ipp: 10.1.1.12}\n"))
		return func() {
			if err := os.Remove(file); err != nil {
				t.Error(err)
			}
		}
	}, []question{
		{"status", 1, "endpoints: ", `unknown field "ipp": an endpoint has the fields name, namespace`},
	}},
}

// TestBrokenSituations breaks what can break, one thing after the other, and asks: each answer names the cause and the next step.
func TestBrokenSituations(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	x := newTrouble(t)
	ip(t, "link add spare type veth peer name spare0")
	x.limits = filepath.Join(t.TempDir(), "limits.yaml")
	testutil.MustWriteFile(t, x.limits, []byte("clusters: {south: {max-entries: 1000}}\n"))
	agent := startAgent(t, "--config", x.config, "--clustermesh-config", x.clustermesh, "--devices", "eth0,spare", "--max-ipcache-entries", "50",
		"--routing-mode", "native", "--mesh-limits", x.limits)
	x.settle(t)
	x.try(t, situations)
	agent.stop()
	for _, s := range withoutAgent {
		t.Run(s.name, func(t *testing.T) {
			if mend := s.happen(t, x); mend != nil {
				defer mend()
			}
			for _, q := range s.ask {
				x.ask(t, q)
			}
		})
	}
}

// try asks about one situation after the other; between them all is well.
func (x *trouble) try(t *testing.T, all []situation) {
	t.Helper()
	for _, s := range all {
		t.Run(s.name, func(t *testing.T) {
			mend := s.happen(t, x)
			if passing[s.name] {
				x.again = func() { s.happen(t, x) }
			}
			func() {
				defer mend()
				defer func() { x.again = nil }()
				for _, q := range s.ask {
					x.ask(t, q)
				}
			}()
			x.settle(t)
		})
	}
}

// withoutAgent are asked about when the agent has ended.
var withoutAgent = []situation{
	{"no agent", func(*testing.T, *trouble) func() { return nil }, []question{
		{"status", 3, "agent unreachable at ", "is `weft agent` running?"},
		{"explain 10.2.1.10", 3, "no agent answers: this is what the kernel goes by without it", "start the agent, or name its socket with --api-socket"},
		{"diagnose --devices eth0", 0, "no agent runs", "✓ device eth0"},
	}},
	{"removed filter", func(t *testing.T, x *trouble) func() {
		shell(t, "rm -r "+filepath.Join(x.bpffs, "weft", "links")) // which detaches the programs
		return nil
	}, []question{
		{"diagnose --devices eth0", 0, "! device eth0 weft_from_netdev and weft_to_netdev is not attached", "start the agent"},
	}},
	{"MTU too large", func(t *testing.T, _ *trouble) func() {
		ip(t, "link add weft_vxlan mtu 1500 type vxlan external dstport 8472")
		return func() { ip(t, "link del weft_vxlan") }
	}, []question{
		{"diagnose --devices eth0", 1, "✗ overlay mtu packets of 1500 do not fit into the 1500 of the way below, with 50 bytes of headers", "ip link set weft_vxlan mtu 1450"},
	}},
	{"no bpffs", func(*testing.T, *trouble) func() { return nil }, []question{
		{"diagnose --devices eth0 --bpffs /nonexistent", 1, "✗ bpffs /nonexistent does not exist", "mount"},
		{"explain 10.2.1.10 --bpffs /nonexistent", 3, "not to be read: no usable BPF file system: /nonexistent does not exist", "`weft diagnose` tells what is in the way"},
		{"bpf ipcache list --bpffs /nonexistent", 1, "no usable BPF file system: /nonexistent does not exist", "mount"},
	}},
}

// patience is how long an answer may take to come through on a busy machine.
const patience = 30 * time.Second

// settle waits until all is well, but for what situations leave in counters.
func (x *trouble) settle(t *testing.T) {
	t.Helper()
	testutil.Eventually(t, patience, func() error {
		if err := x.healthy(t); err != nil {
			return err
		}
		return contains(x.cli(t, 0, "status"), "2/2 remote clusters ready", " 0 conflicts")
	})
}

// ask asks until the answer has come through to whom is asked, and is as it should be.
func (x *trouble) ask(t *testing.T, q question) {
	t.Helper()
	env := map[string]string{"WEFT_API_SOCKET": x.socket, "WEFT_BPFFS": x.bpffs}
	testutil.Eventually(t, patience, func() error {
		if x.again != nil {
			x.again()
		}
		code, stdout, stderr := weft(t, env, strings.Fields(q.args)...)
		if code != q.code {
			return fmt.Errorf("weft %s: exit code %d, want %d\n%s%s", q.args, code, q.code, stdout, stderr)
		}
		return contains(stdout+stderr, q.cause, q.next)
	})
}
