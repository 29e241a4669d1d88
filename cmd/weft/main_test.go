// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"flag"
	"iter"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/api"
)

// TestMain has times printed as they are in testdata, before anything runs that might read where we are.
func TestMain(m *testing.M) {
	if os.Getenv(asProcess) != "" {
		main()
	}
	time.Local = time.UTC
	os.Exit(m.Run())
}

// asProcess is the variable that makes a process of the tests a weft.
const asProcess = "WEFT_TEST_PROCESS"

var update = flag.Bool("update", false, "write what the commands print into testdata")

var (
	testNow = time.Date(2026, 11, 20, 22, 30, 0, 0, time.UTC)
	addr    = netip.MustParseAddr
	prefix  = netip.MustParsePrefix
)

// weft runs a command line and returns all that it leaves.
func weft(t *testing.T, env map[string]string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errors bytes.Buffer
	code = run(environment{
		ctx: t.Context(), stdout: &out, stderr: &errors, lookup: lookupIn(env), now: func() time.Time { return testNow },
		signals: func() <-chan os.Signal { return nil },
	}, args)
	return code, out.String(), errors.String()
}

// golden compares got with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got), see -update\n%s", file, diff)
	}
}

// serveAgent offers an agent on a socket until the test ends, and returns the socket's path.
func serveAgent(t *testing.T, agent api.Agent) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "weft.sock")
	serveOn(t, api.NewServer(path, agent, slog.New(slog.DiscardHandler)))
	return path
}

// serveOn runs a server until the test ends, and returns once it answers.
func serveOn(t *testing.T, server task) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("server: %v", err)
		}
	})
	select {
	case <-server.Ready():
	case err := <-done:
		t.Fatalf("server: %v", err)
	}
}

var (
	webLabels = []string{
		"k8s:app=web", "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop", "k8s:io.cilium.k8s.policy.cluster=west",
		"k8s:io.cilium.k8s.policy.serviceaccount=default", "k8s:io.kubernetes.pod.namespace=shop",
	}
	westPod = api.IP{
		Prefix: prefix("10.2.1.10/32"), Identity: 131329, Cluster: 2, ClusterName: "west", Source: "clustermesh", Owner: "ip", Revision: 7,
		Host: addr("172.18.2.1"), Namespace: "shop", Pod: "web-0",
	}
	// A cluster that is not well-meaning: its names would clear the screen and turn the text around.
	evilPod = api.IP{
		Prefix: prefix("10.2.1.11/32"), Identity: 131330, Cluster: 2, Source: "clustermesh", Host: addr("172.18.2.1"),
		Namespace: "shop\x1b[2J", Pod: "evil\u202e\u009b\xff",
	}
	westNode = api.IP{
		Prefix: prefix("172.18.2.1/32"), Identity: 6, Cluster: 2, ClusterName: "west", Source: "clustermesh", Owner: "node/west-n1",
		Flags: []string{"remotecluster"},
	}
)

// lab is an agent of cluster east that follows west, which is well, and south, which is not.
func lab(healthy bool) api.Agent {
	flows := api.NewFlowLog()
	flows.Append([]api.Flow{
		{
			Time: testNow, Device: "eth0", Direction: "ingress", Verdict: "identified", Protocol: "TCP", TCPFlags: "SYN", Length: 74,
			Source:      api.Peer{IP: addr("10.2.1.10"), Port: 34567, Identity: 131329, Cluster: 2, ClusterName: "west", Labels: webLabels},
			Destination: api.Peer{IP: addr("10.1.1.10"), Port: 80, Identity: 65793, Cluster: 1, ClusterName: "east", Labels: []string{"k8s:app=\x1b[31mweb"}},
		},
		{
			Time: testNow, Device: "eth0", Direction: "egress", Verdict: "world", Protocol: "ICMPv6", ICMP: "128/0", Length: 118,
			Source:      api.Peer{IP: addr("fd00:10:1:1::10"), Identity: 65793, Cluster: 1, ClusterName: "east"},
			Destination: api.Peer{IP: addr("2001:db8::1"), Identity: 10, Name: "world-ipv6", Labels: []string{"reserved:world-ipv6"}},
		},
		{Time: testNow, Device: "eth0", Direction: "ingress", Verdict: "not-ip", Protocol: "0", Length: 42},
	})
	level := new(slog.LevelVar)
	return api.Agent{
		Page:     func() (string, bool) { return "http://127.0.0.1:9880/?token=CN3WSLIGVUODC7N5AHFBT54AKE", true },
		LogLevel: level,
		Config: func() api.Config {
			return api.Config{Meta: api.MetaOf(api.KindConfig), File: "/etc/weft/agent.yaml", Items: []api.ConfigOption{
				{Name: "cluster-name", Value: "east", Origin: "/etc/weft/agent.yaml:3", Default: "default"},
				{Name: "flow-sample", Value: "1", Origin: "WEFT_FLOW_SAMPLE", Default: "100"},
				{Name: "kvstore-config", Value: "", Origin: "default"},
				{Name: "log-level", Value: "DEBUG", Origin: "flag", Default: "INFO"},
			}}
		},
		Version: func() api.VersionInfo {
			return api.VersionInfo{Meta: api.MetaOf(api.KindVersion), Version: "v1.2.3", Revision: "abc", Go: "go1.26", Platform: "linux/amd64"}
		},
		Status:   func() api.Status { return labStatus(healthy) },
		IPs:      func() iter.Seq[api.IP] { return slices.Values([]api.IP{westNode, evilPod, westPod}) },
		Describe: func([]api.Flow) {},
		IP: func(a netip.Addr) (api.IPDetail, bool) {
			detail := api.IPDetail{Meta: api.MetaOf(api.KindIP), Address: a, IP: westPod, Shadowed: []api.IP{evilPod}}
			detail.IP.Labels = webLabels
			return detail, westPod.Prefix.Contains(a)
		},
		Nodes: func() []api.Node {
			return []api.Node{
				{Name: "east-n1", Cluster: "east", ClusterID: 1, Local: true, Addresses: []api.NodeAddress{{Type: "InternalIP", IP: addr("172.18.1.1")}}},
				{
					Name: "west-n1", Cluster: "west", ClusterID: 2, EncryptKey: 3, PodCIDRs: []netip.Prefix{prefix("10.2.1.0/24"), prefix("fd00:10:2:1::/64")},
					Addresses: []api.NodeAddress{{Type: "InternalIP", IP: addr("172.18.2.1")}, {Type: "InternalIP", IP: addr("fd00:18:2::1")}},
				},
			}
		},
		Identities: func() iter.Seq[api.Identity] {
			return slices.Values([]api.Identity{
				{ID: 65793, Cluster: 1, ClusterName: "east", Labels: []string{"k8s:app=web"}, References: new(2)},
				{ID: 65794, Cluster: 1, ClusterName: "east", Labels: []string{"k8s:app=db"}, References: new(0)},
				{ID: 131329, Cluster: 2, ClusterName: "west", Labels: webLabels}, {ID: 196609, Cluster: 3, Labels: []string{"k8s:a=\n"}},
			})
		},
		Identity: func(id uint32) (api.Identity, bool) {
			if id == 6 {
				return api.Identity{ID: 6, Name: "remote-node", Labels: []string{"reserved:remote-node"}}, true
			}
			return api.Identity{ID: id, Cluster: 2, ClusterName: "west", Labels: webLabels}, id == 131329
		},
		Flows: flows, Explain: labExplanation,
		Services: func() iter.Seq[api.Service] { return slices.Values(labServices()) },
		Service: func(namespace, name string) (api.Service, bool) {
			return labServices()[0], namespace+"/"+name == "shop/web"
		},
		Conflicts: func() iter.Seq[api.Conflict] {
			return slices.Values([]api.Conflict{{
				Prefix: westPod.Prefix, Winner: westPod, Shadowed: []api.IP{evilPod}, Why: "the lowest cluster id, 2 before 3",
			}})
		},
		Metrics: newHandler(slog.New(slog.DiscardHandler), newCollector(func() api.Status { return labStatus(healthy) }, labCounters)),
	}
}

func labCounters() ([]counter, error) {
	return []counter{
		{Source: 1, Destination: 6, Direction: "egress", Verdict: "identified", Mode: "native", Packets: 3, Bytes: 300},
		{Source: 65793, Destination: 131329, Direction: "egress", Verdict: "identified", Mode: "overlay", Packets: 4, Bytes: 400},
	}, nil
}

// labExplanation knows one address, with a claim that it keeps out and a prefix around it.
func labExplanation(a netip.Addr) api.Explanation {
	e := api.Explanation{
		Meta: api.MetaOf(api.KindExplanation), Address: a, Claims: []api.Claim{},
		Identity: api.Identity{ID: 2, Name: "world", Labels: []string{"reserved:world"}}, LabelsKnown: true,
		Why:    "nobody claims a prefix that contains it, so it is the world's",
		Kernel: api.Kernel{Pin: "/sys/fs/bpf/weft/ipcache", Equal: true, RouteError: "no route to " + a.String() + ": network is unreachable"},
	}
	if a == addr("10.2.9.9") {
		waits := westPod
		waits.Prefix, waits.Host = prefix("10.2.9.9/32"), addr("172.18.2.99")
		e.Waiting = []api.Claim{{IP: waits, Key: "cilium/state/ip/v1/default/10.2.9.9"}}
		e.Refused = []api.Refused{{Cluster: "north", Rejection: api.Rejection{
			Kind: "ip", Key: "10.2.9.0/24", Reason: "10.2.9.0/24 overlaps what nodes of the cluster with id 2 have", At: testNow.Add(-4 * time.Second),
		}}}
	}
	if !westPod.Prefix.Contains(a) {
		return e
	}
	evil := evilPod
	evil.Prefix = westPod.Prefix
	e.Identity, e.LabelsKnown = api.Identity{ID: 131329, Cluster: 2, ClusterName: "west", Labels: []string{}}, false
	e.Why = "10.2.1.10/32 is the longest of 2 prefixes that contain it; of its 2 claims the winner has the lowest cluster id, 2 before 3"
	e.Claims = []api.Claim{
		{IP: westPod, Wins: true, Key: "cilium/state/ip/v1/default/10.2.1.10", Since: testNow.Add(-192 * time.Second), Exactly: true},
		{IP: evil, CIDR: true, Key: "cilium/cache/ip/v1/no\x1b[2Jrth/10.2.1.10/32", Since: testNow.Add(-2 * time.Hour)},
		{
			IP:   api.IP{Prefix: prefix("10.2.1.0/24"), Identity: 2, Cluster: 2, ClusterName: "west", Source: "clustermesh", Owner: "node/west-n1", Revision: 3},
			CIDR: true, Wins: true, Key: "cilium/state/nodes/v1/west/west-n1",
		},
	}
	e.Node = &api.ExplainedNode{Name: "west-n1", Cluster: "west", ClusterID: 2, Via: addr("172.18.2.1")}
	e.Cluster = &labStatus(true).Clusters[1]
	e.Kernel = api.Kernel{
		Pin: "/sys/fs/bpf/weft/ipcache", Entry: &api.KernelEntry{Identity: 131330, TunnelEndpoint: addr("172.18.2.1"), Flags: []string{"hastunnel"}},
		Wanted: "identity=131329 encryptkey=0 tunnelendpoint=172.18.2.1 flags=hastunnel",
		Route:  &api.KernelRoute{Type: "unicast", Device: "eth0", Gateway: addr("172.18.2.1"), Source: addr("172.18.1.1"), Table: 254, Protocol: "weft"},
	}
	s := labStatus(true)
	e.Advice = advice(&e, &s)
	return e
}

func labStatus(healthy bool) api.Status {
	s := api.Status{
		Meta: api.MetaOf(api.KindStatus), Version: "v1.2.3", Started: testNow.Add(-26 * time.Hour),
		Cluster: api.LocalCluster{Name: "east", ID: 1, MaxConnectedClusters: 255},
		Node:    api.LocalNode{Name: "east-n1", IPs: []netip.Addr{addr("172.18.1.1"), addr("fd00:18:1::1")}, PodCIDRs: []netip.Prefix{prefix("10.1.1.0/24")}},
		KVStore: &api.KVStore{
			Endpoints: []string{"http://127.0.0.1:2379"}, Connected: true, State: "ready", Since: testNow.Add(-time.Hour),
			ServerVersion: "3.7.0", Warning: "a reader may see more than it should", EtcdClusterID: "1f2e", Revision: 42, Ready: true,
			Keys: 5, Leases: []string{"7c028201b53de662"},
		},
		Clusters: []api.Cluster{
			{
				Name: "east", ID: 1, Own: true, State: "ready", Ready: true, Since: testNow.Add(-time.Hour), Endpoints: []string{"http://127.0.0.1:2379"},
				Synced: map[string]bool{"nodes": true, "ips": true, "identities": true, "services": true}, Counts: api.Counts{Nodes: 1},
			},
			{
				Name: "west", ID: 2, State: "ready", Ready: true, Since: testNow.Add(-65 * time.Second), ServerVersion: "3.5.33", EtcdClusterID: "cdf8", Revision: 99,
				LastSuccess: testNow.Add(-3 * time.Second), ConfigFile: "/etc/weft/clustermesh/west",
				Certificates: []api.Certificate{
					{Role: "ca", Of: "/etc/weft/tls/west-ca.crt", Subject: "CN=west", NotAfter: testNow.Add(900 * 24 * time.Hour)},
					{Role: "client", Of: "/etc/weft/tls/client.crt", Subject: "CN=east", NotAfter: testNow.Add(12 * 24 * time.Hour)},
					{Role: "server", Of: "west.mesh.cilium.io:2379", Subject: "CN=we\x1b[2Jst", NotAfter: testNow.Add(400 * 24 * time.Hour)},
					{Role: "server", Of: "west.mesh.cilium.io:2380", Subject: "CN=west", NotAfter: testNow.Add(300 * 24 * time.Hour)},
				},
				CertificateWarnings: []string{"the client certificate /etc/weft/tls/client.crt ends in 12 days"},
				Endpoints:           []string{"https://west.mesh.cilium.io:2379"}, Canaries: true, Counts: api.Counts{Nodes: 2, IPs: 25, Identities: 8, Services: 10},
				Synced: map[string]bool{"nodes": true, "ips": true, "identities": true, "services": true}, Reconnects: 1, LastReconnect: testNow.Add(-65 * time.Second), Failures: 1, Conflicts: 1,
				LastError: "dial tcp: connection refused", LastErrorAt: testNow.Add(-2 * time.Minute),
				Rejected:   map[string]uint64{"ip/range": 3, "node/name": 1},
				Rejections: []api.Rejection{{Kind: "ip", Key: "10.9.9.9\x1b[2J", Reason: "identity 1 is outside the cluster's range", At: testNow.Add(-time.Minute)}},
			},
		},
		Tables: api.Tables{IPs: 28, Identities: 10, Nodes: 3, Services: 1, Conflicts: 1},
		Endpoints: api.Endpoints{Items: []api.Endpoint{
			{Namespace: "shop", Name: "web-0", IPs: []netip.Addr{addr("10.1.1.10"), addr("fd00:10:1:1::10")}, Identity: 65793, Labels: webLabels, Source: "file", Origin: "/etc/weft/endpoints/a.yaml:1", State: "ready", Since: testNow.Add(-time.Hour)},
		}},
		Allocator: &api.Allocator{Listed: true, LabelSets: 3, Waiting: 1, Restored: 1, Free: 65533, Allocated: 4, Failed: 2},
		Datapath: api.Datapath{
			Ready: true, RoutingMode: "native", Routes: 4, Flows: api.FlowStat{Received: 12, Lost: 1},
			Map: api.Map{Pin: "/sys/fs/bpf/weft/ipcache", Entries: 28, MaxEntries: 512000},
			Devices: []api.Device{{Name: "eth0", Index: 2, Programs: []api.DeviceProgram{
				{Name: "weft_from_netdev", Attached: true}, {Name: "weft_to_netdev", Attached: true},
			}}},
			Overlay: &api.Overlay{Device: "weft_vxlan", Port: 8473, MTU: 1450},
			Services: &api.ServiceTable{
				Cgroup: "/sys/fs/cgroup", Frontends: 3, MaxFrontends: 65535, Backends: 9, MaxBackends: 524287, Slots: 16, MaxSlots: 2097152,
				Affinities: 2, MaxAffinities: 65536, Pending: 1, Chosen: 1412, Refused: 1, Destroyed: 4, Namespaces: 1, Written: 30, Calls: 3, Rebuilds: 2, Failures: 1,
			},
		},
		Tasks: []api.Task{{Name: "kvstore writer", Ready: true}, {Name: "mesh"}},
	}
	if !healthy {
		s.Clusters = append(s.Clusters, api.Cluster{
			Name: "south", State: "failed", Since: testNow.Add(-5 * time.Second), ConfigFile: "/etc/weft/clustermesh/south",
			ConfigError: "/etc/weft/clustermesh/south: parse: yaml: line 3: did not find expected key",
		}, api.Cluster{
			Name: "north", ID: 4, State: "stale", Since: testNow.Add(-20 * time.Minute), LastSuccess: testNow.Add(-20 * time.Minute),
			StaleSince: testNow.Add(-20 * time.Minute), Withdrawn: true, Endpoints: []string{"https://north.mesh.cilium.io:2379"}, Failures: 34,
			LastError: "no answer from etcd", LastErrorAt: testNow.Add(-5 * time.Second), Waiting: 2,
			Quotas: api.Quotas{
				Entries: api.Quota{Used: 250, Limit: 250}, Bytes: api.Quota{Used: 4096}, EventsPerSecond: 20000, HeldBack: 3, Full: true,
			},
		})
		s.Endpoints.Errors = []api.ConfigError{{File: "/etc/weft/endpoints/b.yaml", Line: 4, Message: `unknown field "ipp"`}}
		s.Datapath.Devices = append(s.Datapath.Devices, api.Device{Name: "eth9", Error: "no such device"})
	}
	s.Assess()
	return s
}

func TestCommands(t *testing.T) {
	t.Setenv("TZ", "UTC")
	well, unwell := serveAgent(t, lab(true)), serveAgent(t, lab(false))
	leads, waits := serveOperator(t, labOperator(true)), serveOperator(t, labOperator(false))
	for _, tc := range []struct {
		golden string
		socket string
		code   int
		args   string
	}{
		{"status.txt", well, 0, "status --all-controllers"},
		{"status-unhealthy.txt", unwell, 1, "status"},
		{"status.json", well, 0, "status -o json"},
		{"status-wide.txt", well, 0, "status -o wide"},
		{"status.tsv", unwell, 1, "status -o tsv"},
		{"status.yaml", unwell, 1, "status -o yaml --brief"},
		{"status.jsonpath", unwell, 1, "status -o jsonpath={.clusters[*].name}"},
		{"ip-list.txt", well, 0, "ip list"},
		{"ip-list.json", well, 0, "ip list -o json"},
		{"ip-get.txt", well, 0, "ip get 10.2.1.10"},
		{"ip-get.json", well, 0, "ip get ::ffff:10.2.1.10 --output json"},
		{"node-list.txt", well, 0, "node list"},
		{"node-list.json", well, 0, "node list -o json"},
		{"identity-list.txt", well, 0, "identity list"},
		{"identity-list-cluster.txt", well, 0, "identity list --cluster west"},
		{"identity-list.json", well, 0, "identity list -o json"},
		{"identity-get.txt", well, 0, "identity get 131329"},
		{"identity-get.json", well, 0, "identity get remote-node -o json"},
		{"flows.txt", well, 0, "flows"},
		{"flows.json", well, 0, "flows -o json --last 2"},
		{"version.txt", well, 0, "version --agent"},
		{"version.json", well, 0, "version --agent -o json"},
		{"status-brief.txt", unwell, 1, "status --brief --all-clusters"},
		{"service-list.txt", well, 0, "service list"},
		{"service-list-wide.txt", well, 0, "service list -o wide"},
		{"service-list.json", well, 0, "service list -o json"},
		{"service-get.txt", well, 0, "service get shop/web"},
		{"service-get.json", well, 0, "service get shop/web -o json"},
		{"help.txt", well, 0, "agent --help"},
		{"ip-list-wide.txt", well, 0, "ip list -o wide"},
		{"ip-list.tsv", well, 0, "ip list -o tsv --no-headers"},
		{"ip-list.yaml", well, 0, "ip list -o yaml"},
		{"ip-list.jsonpath", well, 0, "ip list -o jsonpath={.items[*].prefix}"},
		{"ip-conflicts.txt", well, 0, "ip conflicts"},
		{"ip-conflicts.json", well, 0, "ip conflicts -o json"},
		{"explain.txt", well, 0, "explain 10.2.1.10"},
		{"explain.json", well, 0, "explain 10.2.1.10 -o json"},
		{"explain-world.txt", well, 0, "explain 192.0.2.1"},
		{"explain-unused.txt", well, 0, "explain 10.2.9.9"},
		{"explain-unused.json", well, 0, "explain 10.2.9.9 -o json"},
		{"clusters-list.txt", well, 0, "clusters list"},
		{"clusters-list-wide.txt", unwell, 0, "clusters list -o wide"},
		{"clusters-get.txt", well, 0, "clusters get west"},
		{"clusters-get.json", well, 0, "clusters get west -o json"},
		{"clusters-rejected.txt", well, 0, "clusters rejected"},
		{"clusters-rejected.json", well, 0, "clusters rejected west -o json"},
		{"metrics-list.txt", well, 0, "metrics list --match ^weft_(clustermesh|rejected|packet|cert)"},
		{"operator-status.txt", leads, 0, "operator status"},
		{"operator-status.json", leads, 0, "operator status -o json"},
		{"operator-status-unhealthy.txt", waits, 1, "operator status"},
		{"config-view.txt", well, 0, "config view"},
		{"config-view-origin.txt", well, 0, "config view --origin"},
		{"config-view.json", well, 0, "config view -o json"},
		{"page.txt", well, 0, "page"},
		{"page.json", well, 0, "page -o json"},
		{"log-level.txt", well, 0, "log-level"},
		{"log-level.json", well, 0, "log-level -o json"},
		{"metrics.json", well, 0, "metrics -o json --match ^weft_bpf"},
	} {
		t.Run(tc.golden, func(t *testing.T) {
			code, stdout, stderr := weft(t, map[string]string{"WEFT_API_SOCKET": tc.socket, "WEFT_OPERATOR_SOCKET": tc.socket}, strings.Fields(tc.args)...)
			if code != tc.code || stderr != "" {
				t.Errorf("exit code %d, want %d; stderr %q", code, tc.code, stderr)
			}
			golden(t, tc.golden, stdout)
			checkHarmless(t, stdout)
		})
	}
}

// checkHarmless: nothing in what is printed drives a terminal. Tabs part columns.
func checkHarmless(t *testing.T, printed string) {
	t.Helper()
	for i, r := range printed {
		if r != '\n' && r != '\t' && unprintable(r) {
			t.Errorf("the output would drive a terminal: %q", printed[i:min(i+20, len(printed))])
			return
		}
	}
}

func TestExitCodes(t *testing.T) {
	socket := serveAgent(t, lab(true))
	nobody := filepath.Join(t.TempDir(), "none.sock")
	etcd := writeFile(t, "etcd.yaml", "endpoints: [http://127.0.0.1:1]\n")
	for _, tc := range []struct {
		args   string
		code   int
		stderr string
	}{
		{"version", 0, ""},
		{"completion bash", 0, ""},
		{"ip get 10.0.0.1 --api-socket " + socket, 1, "weft: no prefix contains 10.0.0.1: not found\n"},
		{"service get shop/db --api-socket " + socket, 1, "weft: nobody has a service shop/db: not found\n"},
		{"identity get 7 --api-socket " + socket, 1, "weft: identity 7 is not known: not found\n"},
		{"bpf ipcache list --bpffs /nonexistent", 1, "weft: no usable BPF file system: /nonexistent does not exist"},
		{"", 2, "weft: weft needs one of: agent, bench, bpf, cleanup, clusters, completion, config, diagnose, endpoint, explain, flows, "},
		{"status --wait --timeout 0s", 2, "weft: --timeout 0s: want a duration above 0"},
		{"status --wait --timeout 300ms --api-socket " + nobody, 3, "weft: agent unreachable at "},
		{"monitor --last 1 --api-socket " + socket, 0, ""},
		{"nonsense", 2, `weft: unknown command "nonsense" for "weft" (see ` + "`weft --help`)\n"},
		{"ip", 2, "weft: weft ip needs one of: conflicts, get, list\n"},
		{"ip nonsense", 2, `weft: unknown command "nonsense" for "weft ip"`},
		{"ip get", 2, "weft: ADDRESS is missing"},
		{"ip get nonsense", 2, `weft: "nonsense" is not an IP address`},
		{"ip list extra", 2, "weft: there is an argument too many"},
		{"ip list -o xml", 2, `weft: invalid argument "xml" for "-o, --output" flag: want table, wide, tsv, json, yaml, or jsonpath=`},
		{"ip list -o json=x", 2, `weft: invalid argument "json=x" for "-o, --output" flag: want table`},
		{"ip list -o jsonpath={.items[", 2, `weft: invalid argument "jsonpath={.items[" for "-o, --output" flag: jsonpath $.items[: `},
		{"status --watch --interval 1ms", 2, "weft: --interval 1ms: want at least 100ms"},
		{"ip list --watch --interval 1ms", 2, "weft: --interval 1ms: want at least 100ms"},
		{"clusters get nowhere --api-socket " + socket, 1, "weft: cluster nowhere is not followed: not found: there are west, east\n"},
		{"clusters rejected nowhere --api-socket " + socket, 1, "weft: cluster nowhere is not followed: not found"},
		{"metrics --match ( --api-socket " + socket, 2, "weft: --match: "},
		{"explain west", 2, `weft: "west" is not an IP address`},
		{"agent --page-address 192.0.2.1:80", 2, "weft: --page-address 192.0.2.1:80: want an address of the loopback device and a port"},
		{"agent --metrics-address 192.0.2.1:80", 2, "weft: --metrics-address 192.0.2.1:80: want an address of the loopback device and a port"},
		{"log-level loud --api-socket " + socket, 2, "weft: log-level loud: want debug, info, warn or error\n"},
		{"config view --api-socket " + nobody, 3, "weft: agent unreachable at "},
		{"clusters add West --endpoint http://127.0.0.1:1", 2, "weft: cluster name \"West\": must consist of"},
		{"clusters add west --clustermesh-config /nonexistent", 2, "weft: no endpoints: name at least one"},
		{"clusters add west --endpoint http://127.0.0.1:1 --username u", 2, "weft: "},
		{"clusters add west --endpoint http://127.0.0.1:1 --timeout 0s", 2, "weft: --timeout 0s: want a duration above 0"},
		{"clusters add west --endpoint http://127.0.0.1:1 --username u --password-file /nonexistent", 2, "weft: --password-file: open /nonexistent"},
		{"clusters remove west --clustermesh-config /nonexistent", 1, "weft: cluster west has no config in /nonexistent: "},
		{"clusters remove ../x", 2, "weft: cluster name"},
		{"flows --ip west", 2, `weft: invalid argument "west" for "--ip" flag: "west" is neither an address nor a prefix`},
		{"flows --port 0", 2, `weft: invalid argument "0" for "--port" flag: port "0": want a number from 1 to 65535`},
		{"flows --identity web", 2, `weft: invalid argument "web" for "--identity" flag: identity "web": want a number`},
		{"ip list --nonsense", 2, "weft: unknown flag: --nonsense"},
		{"service get web", 2, `weft: "web" is not the name of a service: want namespace/name`},
		{"identity get web", 2, `weft: identity "web": want a number`},
		{"flows --last -5", 2, "weft: --last -5: want a number of flows"},
		{"agent --cluster-id 1", 2, "weft: --cluster-id 1: a cluster of a mesh needs a name of its own: give one with --cluster-name\n"},
		{"agent --config /nonexistent", 2, "weft: config: open /nonexistent: no such file or directory\n"},
		{"status --api-socket " + nobody, 3, "weft: agent unreachable at " + nobody + ": connect: no such file or directory: is `weft agent` running?\n"},
		{"flows -f --api-socket " + nobody, 3, "weft: agent unreachable at "},
		{"operator", 2, "weft: --kvstore-config: name the etcd of the cluster"},
		{"operator --kvstore-config /nonexistent --election vote", 2, "weft: --election, --leader-election-*: election by \"vote\": want kubernetes, etcd or none"},
		{"operator export --kvstore-config " + etcd, 2, "weft: export: the leader of the running operators publishes by itself; --dry-run shows what it would do now\n"},
		{"operator export --dry-run --kvstore-config " + etcd, 2, "weft: export: nothing is published: give --kubernetes, --services-dir or --nodes-dir\n"},
		{"operator gc --kvstore-config " + etcd, 2, "weft: gc: what nobody needs any more the leader of the running operators collects by itself; --dry-run shows it\n"},
		{"operator gc --dry-run --timeout 0s --kvstore-config " + etcd, 2, "weft: --timeout 0s: want a duration above 0"},
		{"operator --identity-gc-interval 1ms --kvstore-config " + etcd, 2, "weft: --identity-gc-interval 1ms: want at least 1s, or 0 for never\n"},
		{"operator --identity-gc-rate-limit -1 --kvstore-config " + etcd, 2, "weft: --identity-gc-rate-limit -1: want a number of identities a minute"},
		{"operator etcd-init", 2, "weft: --kvstore-config: name the etcd of the cluster, or with --certificates a directory, or both\n"},
		{"operator etcd-init --server-name a --kvstore-config " + etcd, 2, "weft: --server-name: it is for --certificates: give that, too\n"},
		{"operator etcd-init --certificates /x --certificate-lifetime 1m", 2, "weft: --certificate-lifetime 1m0s: want at least 1h0m0s\n"},
		{"operator etcd-init --cluster-name East --kvstore-config " + etcd, 2, "weft: cluster name \"East\": must consist of"},
		{"operator etcd-init --remote a_b --kvstore-config " + etcd, 2, "weft: remote cluster: cluster name \"a_b\": must consist of"},
		{"operator status --operator-socket " + nobody, 3, "weft: operator unreachable at " + nobody + ": connect: no such file or directory: is `weft operator` running?\n"},
		{"version --agent --api-socket " + nobody, 3, "weft: agent unreachable at "},
	} {
		code, _, stderr := weft(t, nil, strings.Fields(tc.args)...)
		if code != tc.code || !strings.HasPrefix(stderr, tc.stderr) || (tc.stderr == "" && stderr != "") || strings.Count(stderr, "\n") > 1 {
			t.Errorf("weft %s: exit code %d, stderr %q\nwant %d, %q", tc.args, code, stderr, tc.code, tc.stderr)
		}
	}
}

func TestBadEnvironmentIsUsage(t *testing.T) {
	code, _, stderr := weft(t, map[string]string{"WEFT_OUTPUT": "xml"}, "version")
	const want = "weft: WEFT_OUTPUT=\"xml\": want table, wide, tsv, json, yaml, or jsonpath= and a path such as {.items[*].prefix} (see `weft version --help`)\n"
	if code != 2 || stderr != want {
		t.Errorf("exit code %d, stderr %q, want 2, %q", code, stderr, want)
	}
}
