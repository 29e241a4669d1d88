// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// parseOptions reads the options of the agent as the command does: flags, then the environment, then the file.
func parseOptions(t *testing.T, env map[string]string, args ...string) (agentConfig, error) {
	t.Helper()
	flags := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	flags.SetOutput(io.Discard)
	c, o := newClientOptions(flags), newAgentOptions(flags)
	if err := flags.Parse(args); err != nil {
		return agentConfig{}, err
	}
	if err := fromEnvironment(flags, lookupIn(env)); err != nil {
		return agentConfig{}, err
	}
	return o.load(flags, c)
}

func lookupIn(env map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		value, ok := env[name]
		return value, ok
	}
}

func writeFile(t testing.TB, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// others has for every option values that differ from its default and from one another.
var others = map[string][3]string{
	"api-socket":                {"/a", "/b", "/c"},
	"bpffs":                     {"/a", "/b", "/c"},
	"cluster-name":              {"a", "b", "c"},
	"cluster-id":                {"1", "2", "3"},
	"max-connected-clusters":    {"511", "511", "511"},
	"node-name":                 {"a", "b", "c"},
	"node-ip":                   {"10.0.0.1", "10.0.0.2", "10.0.0.3"},
	"pod-cidr":                  {"10.1.0.0/24", "10.2.0.0/24", "10.3.0.0/24"},
	"clustermesh-config":        {"/a", "/b", "/c"},
	"mesh-limits":               {"/a", "/b", "/c"},
	"clustermesh-cache-ttl":     {"1m0s", "2m0s", "3m0s"},
	"clustermesh-cache-ttl-all": {"true", "true", "true"},
	"node-ip-preference":        {"ExternalIP", "west=10.0.0.0/8", "Wireguard"},
	"kvstore-config":            {}, // see below: it must be a real one
	"kvstore-opt":               {"etcd.qps=1", "etcd.qps=2", "etcd.limit=3"},
	"kvstore-lease-ttl":         {"1m0s", "2m0s", "3m0s"},
	"endpoints-dir":             {"/a", "/b", "/c"},
	"kubernetes":                {"true", "true", "true"},
	"kubeconfig":                {"/a", "/b", "/c"},
	"state-dir":                 {"/a", "/b", "/c"},
	"devices":                   {"a", "b", "c"},
	"labels":                    {"k8s:app", "k8s:!zone", "team"},
	"routing-mode":              {"native", "tunnel", "native"},
	"cluster-routing-mode":      {"west=tunnel", "west=native", "north=none"},
	"tunnel-port":               {"1", "2", "3"},
	"overlay-check":             {"count", "count", "count"},
	"pod-check":                 {"off", "drop", "off"},
	"mark":                      {"cilium", "cilium", "cilium"},
	"mark-mask":                 {}, // see below: they need a mark of their own, and each other
	"mark-shift":                {},
	"max-ipcache-entries":       {"1", "2", "3"},
	"verify-interval":           {"1m0s", "2m0s", "3m0s"},
	"flow-sample":               {"1", "2", "3"},
	"service-lb":                {"true", "true", "true"},
	"service-cgroup":            {"/a", "/b", "/c"},
	"service-netns-dir":         {"/a", "/b", "/c"},
	"service-tc":                {"true", "true", "true"},
	"service-tc-devices":        {"eth1", "eth2", "eth3,eth4"},
	"service-tc-flows":          {"2000", "3000", "4000"},
	"service-algorithm":         {"maglev", "maglev", "maglev"},
	"metrics-address":           {"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"},
	"page-address":              {"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"},
	"log-level":                 {"DEBUG", "WARN", "ERROR"},

	"kubernetes-services":                  {"true", "true", "true"},
	"services-dir":                         {"/a", "/b", "/c"},
	"clustermesh-default-global-namespace": {"false", "false", "false"},
	"service-slices":                       {"true", "true", "true"},
	"service-withdraw-after":               {"1m0s", "2m0s", "3m0s"},
}

// Every option can be given in all three ways, and the stronger way counts.
func TestPrecedence(t *testing.T) {
	etcd := writeFile(t, "etcd", "endpoints:\n- http://127.0.0.1:2379\n")
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	newClientOptions(flags)
	newAgentOptions(flags)
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Name == "config" {
			return
		}
		values, ok := others[f.Name]
		if !ok {
			t.Errorf("option %s has no values in this test", f.Name)
		}
		if f.Name == "kvstore-config" {
			values = [3]string{etcd, etcd, etcd}
		}
		custom := map[string][3]string{"mark-mask": {"0xff00", "0xff000", "0xff0000"}, "mark-shift": {"1", "2", "3"}}[f.Name]
		if custom[0] != "" {
			values = custom
		}
		t.Run(f.Name, func(t *testing.T) {
			base := map[string]string{"WEFT_CLUSTER_NAME": "base", "WEFT_CLUSTER_ID": "9", "WEFT_NODE_NAME": "base", "WEFT_CLUSTERMESH_CACHE_TTL": "9m", "WEFT_KUBERNETES": "true", "WEFT_KUBERNETES_SERVICES": "true", "WEFT_SERVICE_LB": "true", "WEFT_SERVICE_TC": "true"}
			file := writeFile(t, "agent.yaml", fmt.Sprintf("%s: %s\n", f.Name, values[2]))
			get := func(env, flag string) string {
				t.Helper()
				vars := map[string]string{"WEFT_CONFIG": file}
				for k, v := range base {
					if k != environmentName(f.Name) {
						vars[k] = v
					}
				}
				// The other options must make the file's own value possible.
				if f.Name == "cluster-name" || f.Name == "cluster-id" {
					delete(vars, environmentName(f.Name))
				}
				if env != "" {
					vars[environmentName(f.Name)] = env
				}
				if custom[0] != "" {
					vars["WEFT_MARK"] = "custom"
				}
				if f.Name == "mark-shift" {
					vars["WEFT_MARK_MASK"] = "0xffffff00"
				}
				var args []string
				if flag != "" {
					args = append(args, "--"+f.Name+"="+flag)
				}
				cfg, err := parseOptions(t, vars, args...)
				if err != nil {
					t.Fatal(err)
				}
				return optionIn(t, cfg, f.Name)
			}
			if got := get("", ""); got != values[2] {
				t.Errorf("from the file %q, want %q", got, values[2])
			}
			if got := get(values[1], ""); got != values[1] {
				t.Errorf("environment over file %q, want %q", got, values[1])
			}
			if got := get(values[1], values[0]); got != values[0] {
				t.Errorf("flag over environment %q, want %q", got, values[0])
			}
			if got := get("", values[0]); got != values[0] {
				t.Errorf("flag over file %q, want %q", got, values[0])
			}
		})
	})
}

// optionIn prints the value of an option in a config, by declaring the options over the config's own fields.
func optionIn(t *testing.T, cfg agentConfig, name string) string {
	t.Helper()
	v := map[string]any{
		"api-socket": cfg.socket, "bpffs": cfg.bpffs, "cluster-name": cfg.clusterName, "cluster-id": cfg.clusterID,
		"max-connected-clusters": cfg.maxConnectedClusters, "node-name": cfg.nodeName, "clustermesh-config": cfg.clustermeshConfig,
		"mesh-limits":           cfg.meshLimits,
		"clustermesh-cache-ttl": cfg.cacheTTL, "clustermesh-cache-ttl-all": cfg.cacheTTLAll,
		"node-ip-preference": strings.Join(texts(cfg.nodeIPPreference), ","),
		"kvstore-config":     cfg.kvstoreConfig, "endpoints-dir": cfg.endpointsDir, "routing-mode": cfg.routingMode,
		"max-ipcache-entries": cfg.maxEntries, "flow-sample": cfg.flowSample, "log-level": cfg.logLevel, "metrics-address": cfg.metricsAddress, "page-address": cfg.pageAddress,
		"node-ip": strings.Join(texts(cfg.nodeIPs), ","), "pod-cidr": strings.Join(texts(cfg.podCIDRs), ","),
		"labels": strings.Join(cfg.labels, ","), "devices": strings.Join(cfg.devices, ","), "kvstore-opt": strings.Join(texts(cfg.kvstoreOpts), ","),
		"cluster-routing-mode": strings.Join(texts(cfg.clusterRoutingMode), ","), "tunnel-port": cfg.tunnelPort,
		"overlay-check": cfg.overlayCheck, "pod-check": cfg.podCheck, "mark": cfg.mark, "mark-mask": cfg.markMask.String(), "mark-shift": cfg.markShift,
		"kvstore-lease-ttl": cfg.kvstoreLeaseTTL, "verify-interval": cfg.verifyInterval,
		"service-lb": cfg.serviceLB, "service-cgroup": cfg.serviceCgroup, "service-netns-dir": cfg.serviceNetNSDir, "service-tc": cfg.serviceTC,
		"service-tc-devices": strings.Join(cfg.serviceTCDevices, ","), "service-tc-flows": cfg.serviceTCFlows, "service-algorithm": cfg.serviceAlgorithm,
		"kubernetes": cfg.kubernetes, "kubeconfig": cfg.kubeconfig, "state-dir": cfg.stateDir,
		"kubernetes-services": cfg.kubernetesServices, "services-dir": cfg.servicesDir,
		"clustermesh-default-global-namespace": cfg.globalNamespaces, "service-slices": cfg.serviceSlices, "service-withdraw-after": cfg.serviceWithdrawAfter,
	}
	value, ok := v[name]
	if !ok {
		t.Fatalf("option %s is not known to this test", name)
	}
	return fmt.Sprint(value)
}

// An option that nothing reads would be accepted and ignored: every field must be used beyond its declaration.
func TestEveryOptionIsRead(t *testing.T) {
	used := make(map[string]bool)
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") || file == "config.go" || file == "config_service.go" {
			continue
		}
		tree, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(tree, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok {
				used[s.Sel.Name] = true
			}
			return true
		})
	}
	for _, options := range []any{agentOptions{}, clientOptions{}} {
		for _, field := range reflect.VisibleFields(reflect.TypeOf(options)) {
			if !used[field.Name] && field.Name != "config" && !field.Anonymous {
				t.Errorf("option %s is declared, but nothing reads it", field.Name)
			}
		}
	}
}

// Choices are gathered by cluster, in their order.
func TestNodeIPPreference(t *testing.T) {
	cfg, err := parseOptions(t, nil, "--node-ip-preference", "west=192.0.2.0/24,ExternalIP,west=Wireguard")
	if err != nil {
		t.Fatal(err)
	}
	p := cfg.preferences()
	if got := fmt.Sprint(p.Of("west"), p.Of("east")); got != "[192.0.2.0/24 Wireguard] [ExternalIP]" {
		t.Error(got)
	}
}

func TestLists(t *testing.T) {
	file := writeFile(t, "agent.yaml", "node-ip: [172.18.1.1, 'fd00:18:1::1']\npod-cidr:\n- 10.1.1.0/24\n- 10.1.101.0/24\ndevices: eth0\n")
	cfg, err := parseOptions(t, nil, "--config", file, "--devices", "eth1,eth2", "--devices", "eth3")
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(cfg.nodeIPs, cfg.podCIDRs, cfg.devices); got != "[172.18.1.1 fd00:18:1::1] [10.1.1.0/24 10.1.101.0/24] [eth1 eth2 eth3]" {
		t.Error(got)
	}
	n := cfg.self()
	if n.IP(false) != netip.MustParseAddr("172.18.1.1") || n.IP(true) != netip.MustParseAddr("fd00:18:1::1") ||
		n.IPv4PodCIDR.String() != "10.1.1.0/24" || len(n.IPv4SecondaryPodCIDRs) != 1 || n.IPv6PodCIDR.IsValid() {
		t.Errorf("node %+v", n)
	}
}

func TestBadOptions(t *testing.T) {
	for _, tc := range []struct {
		file string
		args []string
		want string
	}{
		{file: "cluster-nam: east\n", want: `agent.yaml:1: unknown option "cluster-nam"`},
		{file: "# x\n\nhelp: true\n", want: `agent.yaml:3: unknown option "help"`},
		{file: "config: other.yaml\n", want: `agent.yaml:1: option "config" cannot stand in a file`},
		{file: "node-name: a\nnode-name: b\n", want: `agent.yaml:2: option "node-name" stands already in line 1`},
		{file: "cluster-id: many\n", want: "agent.yaml:1: cluster-id: invalid syntax"},
		{file: "cluster-id: [1]\n", want: "agent.yaml:1: cluster-id: want a plain value"},
		{file: "kvstore-opt: [etcd.qps=0]\n", want: `etcd.qps: "0" is not a number above 0`},
		{file: "kvstore-opt: etcd.qsp=1\n", want: `unknown option "etcd.qsp"`},
		{file: "kvstore-opt: etcd.qps\n", want: "want name=value"},
		{file: "kvstore-lease-ttl: 1s\n", want: "--kvstore-lease-ttl 1s: want 25s to 24h"},
		{file: "devices: {a: b}\n", want: "agent.yaml:1: devices: want a value or a list of values"},
		{file: "node-ip:\n- 10.0.0.1\n- nonsense\n", want: `node-ip: "nonsense" is not an IP address`},
		{file: "node-ip: nonsense\n", args: []string{"--node-ip", "10.0.0.1"}, want: `"nonsense" is not an IP address`},
		{file: "- a\n", want: "agent.yaml:1: want a mapping of options to values"},
		{file: "a: [\n", want: "agent.yaml: yaml: line 1"},
		{file: "devices: a\n---\ndevices: b\n", want: "want one document"},
		{args: []string{"--config", "/nonexistent.yaml"}, want: "config: open /nonexistent.yaml: no such file or directory"},
		{args: []string{"--cluster-name", "East"}, want: `--cluster-name: cluster name "East": must consist of`},
		{args: []string{"--clustermesh-cache-ttl", "1ms"}, want: "--clustermesh-cache-ttl 1ms: want 0 or at least 1s"},
		{args: []string{"--service-withdraw-after", "1ms"}, want: "--service-withdraw-after 1ms: want 0 or at least 1s"},
		{args: []string{"--clustermesh-default-global-namespace=false"}, want: "--clustermesh-default-global-namespace: it is for namespaces of Kubernetes: give --kubernetes-services, too"},
		{args: []string{"--clustermesh-cache-ttl-all"}, want: "--clustermesh-cache-ttl-all: give the time with --clustermesh-cache-ttl"},
		{args: []string{"--node-ip-preference", "West=ExternalIP"}, want: "cluster name"},
		{args: []string{"--node-ip-preference", "west=CiliumInternalIP"}, want: "address in a pod network"},
		{args: []string{"--cluster-id", "1"}, want: "--cluster-id 1: a cluster of a mesh needs a name of its own"},
		{args: []string{"--cluster-name", "east", "--cluster-id", "256"}, want: "--cluster-id 256: want at most 255"},
		{args: []string{"--max-connected-clusters", "300"}, want: "--max-connected-clusters: max connected clusters 300: want 255 or 511"},
		{args: []string{"--clustermesh-config", "/x"}, want: "--clustermesh-config: a cluster of a mesh needs a number of its own"},
		{args: []string{"--routing-mode", "tunel"}, want: `--routing-mode "tunel": want none, native or tunnel`},
		{args: []string{"--cluster-routing-mode", "west"}, want: `"west": want CLUSTER=MODE`},
		{args: []string{"--cluster-routing-mode", "west=both"}, want: `"west=both": want CLUSTER=MODE`},
		{args: []string{"--cluster-routing-mode", "West=tunnel"}, want: "cluster name"},
		{args: []string{"--service-cgroup", "/x"}, want: "--service-cgroup: it is used with --service-lb alone"},
		{args: []string{"--service-lb", "--service-cgroup", "x"}, want: `--service-cgroup "x": want an absolute path`},
		{args: []string{"--service-netns-dir", "/x"}, want: "--service-netns-dir: it is used with --service-lb alone"},
		{args: []string{"--service-lb", "--service-netns-dir", "x"}, want: `--service-netns-dir "x": want an absolute path`},
		{args: []string{"--service-tc"}, want: "--service-tc: it is used with --service-lb alone"},
		{args: []string{"--service-lb", "--service-tc-devices", "eth1"}, want: "--service-tc-devices: they are used with --service-tc alone"},
		{args: []string{"--service-tc-flows", "1000"}, want: "--service-tc-flows 1000: want 1024 to 16777216"},
		{args: []string{"--service-algorithm", "roundrobin"}, want: `algorithm "roundrobin"`},
		{args: []string{"--tunnel-port", "0"}, want: "--tunnel-port: want at least 1"},
		{args: []string{"--pod-check", "maybe"}, want: `--pod-check "maybe": want off, count or drop`},
		{args: []string{"--overlay-check", "maybe"}, want: `--overlay-check "maybe": want drop or count`},
		{args: []string{"--mark", "some"}, want: `--mark "some": want none, cilium or custom`},
		{args: []string{"--mark", "custom"}, want: "a shift needs a mask"},
		{args: []string{"--mark", "custom", "--mark-mask", "0xff", "--mark-shift", "8"}, want: "mask 0xff has bits below the shift 8"},
		{args: []string{"--mark-mask", "1"}, want: "--mark-mask and --mark-shift go with --mark custom"},
		{args: []string{"--mark", "cilium", "--cluster-name", "east", "--cluster-id", "128"}, want: "the mark of Cilium cannot tell cluster 128"},
		{args: []string{"--node-name", "a/b"}, want: `--node-name "a/b": want letters`},
		{args: []string{"--node-ip", "10.0.0.1,10.0.0.2"}, want: "--node-ip: several addresses of one family"},
		{args: []string{"--node-ip", "127.0.0.1"}, want: "127.0.0.1 cannot be a node's address"},
		{args: []string{"--pod-cidr", "10.1.1.1/24"}, want: "10.1.1.1/24 has bits beyond its length: did you mean 10.1.1.0/24?"},
		{args: []string{"--devices", "a-name-that-is-too-long"}, want: "is not the name of a device"},
		{args: []string{"--max-ipcache-entries", "0"}, want: "--max-ipcache-entries: want at least 1"},
		{args: []string{"--kubeconfig", "/x"}, want: "--kubeconfig: it is read with --kubernetes or --kubernetes-services alone"},
		{args: []string{"--state-dir", "relative"}, want: `--state-dir "relative": want an absolute path`},
		{args: []string{"--bpffs", "relative"}, want: `--bpffs "relative": want an absolute path`},
		{args: []string{"--kvstore-config", "/nonexistent"}, want: "--kvstore-config: "},
	} {
		args := tc.args
		if tc.file != "" {
			args = append(args, "--config", writeFile(t, "agent.yaml", tc.file))
		}
		if _, err := parseOptions(t, map[string]string{"WEFT_NODE_NAME": "n"}, args...); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q %q: error %v\nwant %q", tc.file, tc.args, err, tc.want)
		}
	}
}
