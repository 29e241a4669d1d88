// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
	recorded "github.com/weftmesh/weft/internal/testutil/golden"
	"github.com/weftmesh/weft/node"
)

// runningAgent is `weft agent` in this process.
type runningAgent struct {
	t       *testing.T
	signals chan os.Signal
	done    chan int
	log     *buffer
}

// buffer is a buffer that may be read while it is written.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func startAgent(t *testing.T, args ...string) *runningAgent {
	t.Helper()
	return startAgentIn(t, nil, args...)
}

// startAgentIn starts an agent with variables of its environment.
func startAgentIn(t *testing.T, variables map[string]string, args ...string) *runningAgent {
	t.Helper()
	a := &runningAgent{t: t, signals: make(chan os.Signal, 1), done: make(chan int, 1), log: new(buffer)}
	env := environment{
		ctx: t.Context(), stdout: io.Discard, stderr: a.log, lookup: lookupIn(variables), now: time.Now,
		signals: func() <-chan os.Signal { return a.signals },
	}
	go func() { a.done <- run(env, append([]string{"agent"}, args...)) }()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the agent:\n%s", a.log)
		}
	})
	return a
}

// stop ends the agent by a signal; it must end well.
func (a *runningAgent) stop() {
	a.t.Helper()
	a.signals <- syscall.SIGTERM
	select {
	case code := <-a.done:
		if code != exitOK {
			a.t.Errorf("the agent ended with exit code %d", code)
		}
	case <-time.After(5 * time.Second):
		a.t.Fatal("the agent does not end")
	}
}

func ip(t *testing.T, args string) {
	t.Helper()
	if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v\n%s", args, err, out)
	}
}

// site is the surroundings of an agent of east: a device, an etcd of its own, and the recorded etcd of west.
type site struct {
	east         *testutil.Etcd
	bpffs        string
	socket       string
	clustermesh  string
	endpointsDir string
	config       string
	metrics      string // address
}

func newSite(t *testing.T) site {
	t.Helper()
	ip(t, "link add eth0 type veth peer name wire")
	ip(t, "address add 172.18.1.1/16 dev eth0")
	ip(t, "link set eth0 up")
	ip(t, "link set wire up")
	ip(t, "neighbour add 172.18.2.1 lladdr 02:00:00:00:00:02 dev eth0")
	dir := t.TempDir()
	s := site{
		east: testutil.StartEtcd(t), bpffs: testutil.MountBPFFS(t), socket: filepath.Join(dir, "weft.sock"),
		clustermesh: filepath.Join(dir, "clustermesh"), endpointsDir: filepath.Join(dir, "endpoints"),
		config: filepath.Join(dir, "agent.yaml"), metrics: "127.0.0.1:9879", // the network namespace is the test's own
	}
	services := filepath.Join(dir, "services")
	for _, d := range []string{s.clustermesh, s.endpointsDir, services} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	kvstore := filepath.Join(dir, "kvstore.yaml")
	s.east.WriteConfig(t, kvstore)
	write := func(file, content string) {
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(s.config, fmt.Sprintf("cluster-name: east\ncluster-id: 1\nnode-name: east-n1\npod-cidr: [10.1.1.0/24]\nclustermesh-config: %s\n"+
		"kvstore-config: %s\nendpoints-dir: %s\nservices-dir: %s\nstate-dir: %s\nbpffs: %s\napi-socket: %s\ndevices: [eth0]\nflow-sample: 1\nmax-ipcache-entries: 1000\nmetrics-address: %s\n",
		s.clustermesh, kvstore, s.endpointsDir, services, filepath.Join(dir, "state"), s.bpffs, s.socket, s.metrics))
	write(filepath.Join(s.endpointsDir, "web.yaml"), "{name: web-0, namespace: shop, ip: 10.1.1.10, identity: 65793, labels: {app: web}}\n")
	write(filepath.Join(services, "web.yaml"), "{name: web, namespace: shop, global: true, affinity: local, addresses: [10.96.1.10], "+
		"ports: [{name: http, port: 80, target: 8080}], backends: [{ip: 10.1.1.10}]}\n")
	return s
}

// cli runs a command against the site's agent, which must give the exit code.
func (s *site) cli(t *testing.T, want int, args string) string {
	t.Helper()
	code, stdout, stderr := weft(t, map[string]string{"WEFT_API_SOCKET": s.socket, "WEFT_BPFFS": s.bpffs}, strings.Fields(args)...)
	if code != want {
		t.Fatalf("weft %s: exit code %d, want %d\n%s%s", args, code, want, stdout, stderr)
	}
	return stdout + stderr
}

func TestDetectNodeIPs(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	detect := func(devices []string, want string) {
		t.Helper()
		if ips, err := detectNodeIPs(devices); err != nil || fmt.Sprint(ips) != want {
			t.Errorf("on %q: %v, %v; want %s", devices, ips, err, want)
		}
	}
	if ips, err := detectNodeIPs(nil); !errors.Is(err, errNoAddress) {
		t.Errorf("with loopback alone: %v, %v", ips, err)
	}
	ip(t, "link add eth1 type veth peer name eth0")
	ip(t, "address add 10.9.0.1/24 dev eth0")
	ip(t, "address add fd00:9::1/64 dev eth0 nodad")
	ip(t, "address add 10.8.0.1/24 dev eth1")
	ip(t, "link set eth0 up")
	ip(t, "link set eth1 up")
	detect(nil, "[10.9.0.1 fd00:9::1]")
	detect([]string{"eth1"}, "[10.8.0.1]")
	ip(t, "route add default via 10.8.0.254")
	detect(nil, "[10.8.0.1 fd00:9::1]")
	if ips, err := detectNodeIPs([]string{"eth7"}); !errors.Is(err, errNoAddress) {
		t.Errorf("on a device that does not exist: %v, %v", ips, err)
	}
}

// TestAgent runs the whole agent on the kernel, and asks it all that the command line can ask.
//
// mechanism: A1 A3 R1
// lesson: A2 A7
func TestAgent(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	west := testutil.StartEtcd(t)
	west.Load(t, recorded.Path(t, "kvstore-state-west.jsonl"))
	s := newSite(t)
	agent := startAgent(t, "--config", s.config)

	// West is not configured yet: the agent is well without it, and finds it while it runs.
	testutil.Eventually(t, 20*time.Second, func() error { return s.healthy(t) })
	west.WriteConfig(t, filepath.Join(s.clustermesh, "west"))
	testutil.Eventually(t, 20*time.Second, func() error {
		err := contains(s.cli(t, 0, "bpf ipcache list"),
			"10.2.1.10/32 identity=131329 encryptkey=0 tunnelendpoint=172.18.2.1 flags=hastunnel",
			"10.2.1.0/24 identity=2 encryptkey=0 tunnelendpoint=172.18.2.1 flags=hastunnel",
			"10.1.1.10/32 identity=65793 encryptkey=0 tunnelendpoint=0.0.0.0 flags=<none>",
			"172.18.1.1/32 identity=1 encryptkey=0 tunnelendpoint=0.0.0.0 flags=<none>",
			"172.18.2.1/32 identity=6 encryptkey=0 tunnelendpoint=0.0.0.0 flags=remotecluster")
		if err != nil {
			return err
		}
		return s.healthy(t) // asked second: before west was found, all was well, too
	})
	s.checkCommands(t)
	s.checkUnused(t, west)
	s.checkExplain(t)
	s.checkMetrics(t)
	s.checkPropagation(t, west)
	s.checkPublished(t)
	s.checkFlows(t)
	s.checkAdmin(t)
	s.checkSecondAgent(t)
	s.checkBadFiles(t)

	before := s.cli(t, 0, "bpf ipcache list")
	agent.stop()
	s.cli(t, exitUnreachable, "status")
	if err := contains(s.cli(t, exitUnreachable, "explain 10.2.1.10"), "Identity: 131329", "Labels: not known yet",
		"Why: no agent answers: this is what the kernel goes by without it",
		"Kernel: identity=131329 encryptkey=0 tunnelendpoint=172.18.2.1 flags=hastunnel in "+s.bpffs+"/weft/ipcache",
		"weft: agent unreachable at "); err != nil {
		t.Errorf("explain without an agent: %v", err)
	}
	if diff := cmp.Diff(before, s.cli(t, 0, "bpf ipcache list")); diff != "" {
		t.Errorf("the kernel's map changed when the agent ended (-before +after)\n%s", diff)
	}

	// With no etcd at all the agent starts, and keeps what it finds.
	s.east.Stop(t)
	west.Stop(t)
	agent = startAgent(t, "--config", s.config)
	testutil.Eventually(t, 20*time.Second, func() error {
		_, stdout, stderr := weft(t, map[string]string{"WEFT_API_SOCKET": s.socket}, "status")
		return contains(stdout+stderr, "Datapath:      ready", "ClusterMesh:   0/1 remote clusters ready")
	})
	s.cli(t, exitNot, "status")
	if diff := cmp.Diff(before, s.cli(t, 0, "bpf ipcache list")); diff != "" {
		t.Errorf("the kernel's map changed with every etcd down (-before +after)\n%s", diff)
	}
	agent.stop()
}

func (s *site) healthy(t *testing.T) error {
	code, stdout, stderr := weft(t, map[string]string{"WEFT_API_SOCKET": s.socket}, "status")
	if code != exitOK {
		return fmt.Errorf("exit code %d\n%s%s", code, stdout, stderr)
	}
	return nil
}

// contains looks for texts; how wide the space is that parts columns does not matter.
func contains(text string, wants ...string) error {
	text = squeeze(text)
	for _, want := range wants {
		if !strings.Contains(text, squeeze(want)) {
			return fmt.Errorf("no %q in\n%s", want, text)
		}
	}
	return nil
}

func squeeze(s string) string { return strings.Join(strings.Fields(s), " ") }

// checkCommands asks what there is to ask.
func (s *site) checkCommands(t *testing.T) {
	t.Helper()
	for args, want := range map[string][]string{
		"status":                    {"ClusterMesh:   1/1 remote clusters ready", "west: ready", "2 nodes, 4 endpoints, 2 identities", "shop/web-0: 10.1.1.10, identity 65793, app=web", "/1000 entries", "device eth0: weft_from_netdev, weft_to_netdev"},
		"status --all-controllers":  {"remote-etcd-west   ready", "datapath"},
		"ip list":                   {"10.2.1.10/32", "clustermesh", "172.18.1.1/32 1 host"},
		"ip get 10.2.1.10":          {"k8s:app=web", "Cluster:       west"},
		"ip get 10.1.1.10":          {"Source:        local", "endpoint/shop/web-0"},
		"node list":                 {"east/east-n1 (local)", "west/west-n2"},
		"identity get 131329":       {"k8s:app=web", "west"},
		"identity list":             {"65793    east"},
		"service list":              {"shop/web 10.96.1.10:80/TCP local own 1, west 2 1 affinity"},
		"service get shop/web":      {"1 used: affinity * 10.1.1.10:8080 east ready 10.2.1.10:8080 west ready: affinity prefers others 10.2.2.10:8080 west ready: affinity prefers others"},
		"metrics list":              {`weft_service_backends_used`, `weft_service_offered_backends`},
		"bpf ipcache get 10.2.1.77": {"10.2.1.77 maps to identity=2"},
		"version --agent":           {"weft "},
		"clusters list":             {"west 2 ready"},
		"top --interval 100ms":      {"east/east-n1, agent up", "west ready", "PACKETS/S BYTES/S SOURCE DESTINATION VERDICT"},
		"clusters get west":         {"west: ready", "last answer: ", "synchronization status: nodes=true"},
		"clusters rejected west":    {"CLUSTER KIND REASON COUNT"},
	} {
		if err := contains(s.cli(t, 0, args), want...); err != nil {
			t.Errorf("weft %s: %v", args, err)
		}
	}
}

// checkAdmin asks how the agent is configured, changes what it logs, and reads a profile, on the socket alone.
func (s *site) checkAdmin(t *testing.T) {
	t.Helper()
	if err := contains(s.cli(t, 0, "config view --origin"), "cluster-name east "+s.config+":1", "routing-mode none default",
		"node-ip 172.18.1.1 found on the devices", "config "+s.config+" flag"); err != nil {
		t.Error(err)
	}
	for _, args := range [][2]string{{"log-level", "INFO"}, {"log-level debug", "DEBUG"}, {"log-level", "DEBUG"}} {
		if got := strings.TrimSpace(s.cli(t, 0, args[0])); got != args[1] {
			t.Errorf("weft %s: %q, want %q", args[0], got, args[1])
		}
	}
	if err := contains(s.cli(t, 0, "config view --origin"), "log-level DEBUG weft log-level"); err != nil {
		t.Error(err)
	}
	s.cli(t, 0, "log-level info")
	profile, err := api.NewClient(s.socket).Profile(t.Context(), "goroutine", 1)
	if err != nil {
		t.Fatal(err)
	}
	defer profile.Close()
	if text, err := io.ReadAll(profile); err != nil || !strings.Contains(string(text), "goroutine profile: total ") {
		t.Errorf("profile: %.200s, %v", text, err)
	}
	for _, path := range []string{"/debug/pprof/", "/v1/config", "/v1/log-level"} {
		response, err := http.Get("http://" + s.metrics + path)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != http.StatusNotFound {
			t.Errorf("%s on TCP: %s", path, response.Status)
		}
	}
}

// checkUnused has west announce addresses that are not used, and finds out why.
func (s *site) checkUnused(t *testing.T, west *testutil.Etcd) {
	t.Helper()
	announce := func(addr, host string, id int) {
		west.Put(t, "cilium/state/ip/v1/default/"+addr, fmt.Sprintf(`{"IP":%q,"HostIP":%q,"ID":%d,"Key":0,"Metadata":""}`, addr, host, id))
	}
	announce("10.2.1.98", "172.18.2.98", 131329)
	announce("10.2.1.99", "172.18.2.1", 65793)
	testutil.Eventually(t, 20*time.Second, func() error {
		return contains(s.cli(t, 0, "explain 10.2.1.98"), "Why: 10.2.1.0/24 is the only prefix that contains it",
			"Waiting: 10.2.1.98/32 of west, identity 131329, is not used: no node with its host 172.18.2.98 is known (cilium/state/ip/v1/default/10.2.1.98)")
	})
	testutil.Eventually(t, 20*time.Second, func() error {
		return contains(s.cli(t, 0, "explain 10.2.1.99"), "Refused: 10.2.1.99 of west, ",
			" ago: identity 65793 is neither reserved nor in the cluster's range 131072 to 196607")
	})
	if err := contains(s.cli(t, 0, "clusters get west"), "waiting: 1 endpoint whose node is not known", "quota: ", "rejected: ip/foreign-identity=1; last ("); err != nil {
		t.Error(err)
	}
	for _, addr := range []string{"10.2.1.98", "10.2.1.99"} {
		west.Delete(t, "cilium/state/ip/v1/default/"+addr)
	}
	testutil.Eventually(t, 20*time.Second, func() error {
		if text := s.cli(t, 0, "explain 10.2.1.98"); strings.Contains(text, "Waiting:") {
			return errors.New(text)
		}
		return nil
	})
}

// checkExplain asks about addresses of every kind, and makes a conflict.
func (s *site) checkExplain(t *testing.T) {
	t.Helper()
	pin := s.bpffs + "/weft/ipcache"
	for addr, want := range map[string][]string{
		"10.2.1.10": {
			"Identity: 131329", "Labels: k8s:app=web", "Why: 10.2.1.10/32 is the longest of 2 prefixes that contain it, and has one claim",
			"Node: west/west-n1, by 172.18.2.1", "Cluster: west: ready for ",
			"Kernel: identity=131329 encryptkey=0 tunnelendpoint=172.18.2.1 flags=hastunnel in " + pin, "Route: no route to 10.2.1.10: network is unreachable",
			"10.2.1.10/32 in force 131329 west clustermesh 172.18.2.1 shop/pod-1 9 over ", "cilium/state/ip/v1/default/10.2.1.10",
			"10.2.1.0/24 covered 2 world west clustermesh 172.18.2.1 -", "cilium/state/nodes/v1/west/west-n1",
		},
		"10.1.1.10": {
			"Identity: 65793", "Node: east/east-n1, by 172.18.1.1", "10.1.1.10/32 in force 65793 east local",
			"cilium/state/ip/v1/default/10.1.1.10 " + s.endpointsDir + "/web.yaml",
		},
		"172.18.2.1": {
			"Identity: 6 remote-node", "Labels: reserved:remote-node", "Node: west/west-n1", "Route: unicast dev eth0 src 172.18.1.1 table 254 proto kernel",
		},
		"192.0.2.1": {
			"Identity: 2 world", "Why: nobody claims a prefix that contains it, so it is the world's", "Kernel: no entry in " + pin, "Node: - Cluster: -",
		},
	} {
		if err := contains(s.cli(t, 0, "explain "+addr), want...); err != nil {
			t.Errorf("weft explain %s: %v", addr, err)
		}
	}
	if got := s.cli(t, 0, "ip conflicts --no-headers"); got != "" {
		t.Errorf("conflicts before there are any: %q", got)
	}
	const key = "cilium/state/ip/v1/default/10.2.1.10"
	s.east.Put(t, key, `{"IP":"10.2.1.10","HostIP":"172.18.1.2","ID":65799,"Key":0,"Metadata":"","K8sNamespace":"shop","K8sPodName":"thief"}`)
	const reason = "source kvstore before clustermesh"
	testutil.Eventually(t, 20*time.Second, func() error {
		return contains(s.cli(t, 0, "ip conflicts"), "10.2.1.10/32 65799 by east (kvstore) shop/thief 131329 by west (clustermesh) shop/pod-1 "+reason)
	})
	testutil.Eventually(t, 20*time.Second, func() error {
		return contains(s.cli(t, 0, "explain 10.2.1.10"), "Labels: not known yet", "of its 2 claims the winner has "+reason, "Node: -",
			"Kernel: identity=65799 encryptkey=0 tunnelendpoint=172.18.1.2 flags=hastunnel in "+pin+" Route:",
			"10.2.1.10/32 in force 65799 east kvstore 172.18.1.2 shop/thief", "10.2.1.10/32 shadowed 131329 west clustermesh")
	})
	if err := contains(s.cli(t, 0, "status"), "1 conflict"); err != nil {
		t.Error(err)
	}
	s.east.Delete(t, key)
	testutil.Eventually(t, 20*time.Second, func() error {
		if err := contains(s.cli(t, 0, "ip get 10.2.1.10"), "Identity: 131329"); err != nil {
			return err
		}
		return contains(s.cli(t, 0, "bpf ipcache get 10.2.1.10"), "identity=131329")
	})
}

// checkMetrics reads metrics and probes on the socket and on TCP.
func (s *site) checkMetrics(t *testing.T) {
	t.Helper()
	if err := contains(s.cli(t, 0, "metrics list"), `weft_clustermesh_remote_cluster_readiness_status target_cluster="west" 1`,
		`weft_clustermesh_remote_cluster_endpoints target_cluster="west" 4`, `weft_bpf_map_capacity map_name="ipcache" 1000`, "weft_healthy - 1",
		`weft_kvstore_connected cluster="east" scope="own" 1`, "process_open_fds", "go_goroutines", `weft_device_programs_attached device="eth0" 2`); err != nil {
		t.Error(err)
	}
	for path, want := range map[string]string{"metrics": "\nweft_healthy 1\n", "livez": "ok\n", "readyz": "ok\n", "healthz": "ok\n"} {
		response, err := http.Get("http://" + s.metrics + "/" + path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil || response.StatusCode != http.StatusOK || !strings.Contains(string(body), want) {
			t.Errorf("/%s: %s, %v\n%s", path, response.Status, err, body)
		}
	}
}

// checkPropagation changes something in west, and back: both are timed.
func (s *site) checkPropagation(t *testing.T, west *testutil.Etcd) {
	t.Helper()
	counted := func(n int) {
		t.Helper()
		testutil.Eventually(t, 20*time.Second, func() error {
			return contains(s.cli(t, 0, "metrics list --match propagation"), fmt.Sprintf(`weft_propagation_seconds_count cluster="west" %d`, n))
		})
	}
	const key = "cilium/state/ip/v1/default/10.2.1.99"
	west.Put(t, key, `{"IP":"10.2.1.99","Mask":null,"HostIP":"172.18.2.1","ID":131329,"Key":0,"Metadata":""}`)
	counted(1)
	west.Delete(t, key)
	counted(2)
}

// checkPublished looks at what other clusters see.
func (s *site) checkPublished(t *testing.T) {
	t.Helper()
	value, ok := s.east.Get(t, "cilium/state/nodes/v1/east/east-n1")
	n, err := node.Parse([]byte(value))
	if !ok || err != nil || n.Validate("east-n1", "east", 1, 255) != nil || n.IP(false) != addr("172.18.1.1") || n.IPv4PodCIDR != prefix("10.1.1.0/24") {
		t.Errorf("the node's entry: %s, %v", value, err)
	}
	value, _ = s.east.Get(t, "cilium/state/ip/v1/default/10.1.1.10")
	if err := contains(value, `"HostIP":"172.18.1.1"`, `"ID":65793`, `"Metadata":"cilium-global:default:east-n1:`, `"K8sPodName":"web-0"`); err != nil {
		t.Errorf("the endpoint's entry: %v", err)
	}
}

// checkFlows sends a packet to a node of west and finds it identified.
func (s *site) checkFlows(t *testing.T) {
	t.Helper()
	conn, err := net.Dial("udp", "172.18.2.1:9999")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	testutil.Eventually(t, 10*time.Second, func() error {
		if _, err := conn.Write([]byte("hello")); err != nil {
			return err
		}
		return contains(s.cli(t, 0, "flows"), "eth0 egress  identified UDP 172.18.1.1:", "(1 host @east) -> 172.18.2.1:9999 (6 remote-node @west)")
	})
	var event api.FlowEvent
	line, _, _ := strings.Cut(s.cli(t, 0, "flows --last 1 -o json"), "\n")
	if err := json.Unmarshal([]byte(line), &event); err != nil || event.Kind != api.KindFlow || event.Flow == nil {
		t.Errorf("flow %q: %v", line, err)
	}
	if err := contains(s.cli(t, 0, "bpf counters list"), "egress", "6 remote-node"); err != nil {
		t.Error(err)
	}
}

// checkSecondAgent starts agents that the first one excludes.
func (s *site) checkSecondAgent(t *testing.T) {
	t.Helper()
	config := s.config + " --metrics-address 127.0.0.1:9880" // else it may be what the first agent excludes them by
	if err := contains(s.cli(t, exitNot, "agent --config "+config), "another agent"); err != nil {
		t.Error(err)
	}
	if err := contains(s.cli(t, exitNot, "agent --config "+config+" --api-socket "+s.socket+"2"), "another agent"); err != nil {
		t.Error(err)
	}
	if err := contains(s.cli(t, exitNot, "agent --config "+config+" --api-socket "+s.socket+"2 --bpffs "+s.clustermesh),
		"no usable BPF file system"); err != nil {
		t.Error(err)
	}
}

// checkBadFiles shows that what is wrong with files is seen, and that all else goes on.
func (s *site) checkBadFiles(t *testing.T) {
	t.Helper()
	bad := filepath.Join(s.endpointsDir, "bad.yaml")
	south := filepath.Join(s.clustermesh, "south")
	for file, content := range map[string]string{bad: "name: x\nipp: 10.1.1.12\n", south: "endpoints:\n- http://127.0.0.1:1\n"} {
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	testutil.Eventually(t, 20*time.Second, func() error {
		code, stdout, _ := weft(t, map[string]string{"WEFT_API_SOCKET": s.socket}, "status")
		if code != exitNot {
			return fmt.Errorf("exit code %d", code)
		}
		return contains(stdout, bad+`:1: line 2: unknown field "ipp"`, "cluster south is ", "1/2 remote clusters ready")
	})
	for _, file := range []string{bad, south} {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	testutil.Eventually(t, 20*time.Second, func() error { return s.healthy(t) })
}
