// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
)

// labOperator is the state of a replica that leads, or of one that does not and is not well.
func labOperator(leads bool) api.OperatorStatus {
	s := api.OperatorStatus{
		Meta: api.MetaOf(api.KindOperatorStatus), Version: "v1.2.3", Started: testNow.Add(-time.Hour), Name: "east-cp1-4xk9vbmw2z",
		Cluster: api.LocalCluster{Name: "east", ID: 1, MaxConnectedClusters: 255}, Election: "kubernetes", IsLeader: leads,
		Leader: "east-cp1-4xk9vbmw2z", LeaderSince: testNow.Add(-time.Minute), Terms: 1,
		KVStore: &api.KVStore{
			Endpoints: []string{"https://127.0.0.1:2379"}, Endpoint: "127.0.0.1:2379", Connected: true, State: "ready", Since: testNow.Add(-time.Hour),
			ServerVersion: "3.7.0", Revision: 42, Ready: true, Leases: []string{}, Keys: 12, Pending: 1,
		},
		Sources: []api.OperatorSource{{Name: "kubernetes", Ready: true, Objects: 30}},
		Duties: []api.OperatorDuty{
			{Name: "heartbeat", Running: leads, Ready: leads, Runs: 3, LastRun: testNow, LastDuration: time.Millisecond, Detail: "2026-11-20T22:30:00Z"},
			{Name: "services", Running: leads, Ready: leads, Runs: 7, Errors: 1, Deleted: 2, Keys: 12, Pending: 1},
		},
		Tasks: []api.Task{{Name: "operator", Ready: true}},
	}
	if leads {
		s.Since = testNow.Add(-time.Minute)
	} else {
		s.Name, s.KVStore.Connected, s.KVStore.LastError = "east-cp2-8hd7cqrt5n", false, "dial tcp: connection refused"
		s.Sources[0].Problems = []string{"services cannot be followed"}
	}
	s.Assess()
	return s
}

// serveOperator offers an operator's state on a socket until the test ends, and returns the socket's path.
func serveOperator(t *testing.T, s api.OperatorStatus) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "operator.sock")
	serveOn(t, api.NewOperatorServer(path, api.Operator{
		Version: versionInfo, Status: func() api.OperatorStatus { return s }, Metrics: http.NotFoundHandler(),
	}, slog.New(slog.DiscardHandler)))
	return path
}

// parseOperator reads the options of the operator as the command does.
func parseOperator(t *testing.T, env map[string]string, args ...string) (operatorConfig, error) {
	t.Helper()
	flags := pflag.NewFlagSet("operator", pflag.ContinueOnError)
	flags.SetOutput(io.Discard)
	o := newOperatorOptions(flags)
	if err := flags.Parse(args); err != nil {
		return operatorConfig{}, err
	}
	if err := fromEnvironment(flags, lookupIn(env)); err != nil {
		return operatorConfig{}, err
	}
	return o.load(flags)
}

func TestOperatorOptions(t *testing.T) {
	etcd := writeFile(t, "etcd.yaml", "endpoints: [http://127.0.0.1:2379]\n")
	cfg, err := parseOperator(t, map[string]string{"WEFT_CLUSTER_NAME": "east"}, "--kvstore-config", etcd, "--kvstore-opt", "etcd.qps=7", "--config",
		writeFile(t, "operator.yaml", "cluster-name: west\ncluster-id: 3\nelection: kubernetes\nleader-election-retry-period: 1s\n"))
	if err != nil {
		t.Fatal(err)
	}
	if cfg.clusterName != "east" || cfg.clusterID != 3 || cfg.kvstore.QPS != 7 || cfg.kvstoreLeaseTTL != 24*time.Hour {
		t.Errorf("%+v", cfg)
	}
	if e := cfg.elects("kube-system"); e.Namespace != "kube-system" || e.RetryPeriod != time.Second || e.LeaseDuration != 15*time.Second {
		t.Errorf("%+v", e)
	}
	if cfg, err = parseOperator(t, map[string]string{"WEFT_NAMESPACE": "weft"}, "--kvstore-config", etcd); err != nil || cfg.elects("kube-system").Namespace != "weft" {
		t.Errorf("%+v, %v", cfg, err)
	}
	for export, want := range map[string]string{"services": "", "endpointslices-only": "endpointslices-only"} {
		cfg, err := parseOperator(t, nil, "--cluster-name=a", "--cluster-id=1", "--services-dir=/x", "--service-export="+export, "--kvstore-config="+etcd)
		if err != nil || cfg.sliceMode() != want {
			t.Errorf("%s: the cluster says that it publishes %q, %v", export, cfg.sliceMode(), err)
		}
	}
	for args, want := range map[string]string{
		"":                                  "--kvstore-config: name the etcd of the cluster",
		"--cluster-id 256 --cluster-name a": "--cluster-id 256: want at most 255",
		"--cluster-id 1":                    "a cluster of a mesh needs a name of its own",
		"--max-connected-clusters 7":        "--max-connected-clusters: ",
		"--cluster-name A":                  "--cluster-name: ",
		"--kvstore-lease-ttl 1s":            "--kvstore-lease-ttl 1s: want 25s to 24h0m0s",
		"--kubernetes":                      "--kubernetes, --services-dir, --nodes-dir: only a cluster of a mesh publishes",
		"--cluster-id 1 --cluster-name a --kubernetes --services-dir /x":             "--services-dir: services come from there or from --kubernetes",
		"--cluster-id 1 --cluster-name a --export-nodes":                             "--export-nodes: nodes come from the Kubernetes API",
		"--cluster-id 1 --cluster-name a --kubernetes --export-nodes --nodes-dir /x": "--nodes-dir: nodes come from there or with --export-nodes",

		"--service-export both":                "--service-export both: want services, services-and-endpointslices or endpointslices-only",
		"--service-export endpointslices-only": "--service-export endpointslices-only: no services are published",

		"--canary-delay=-1s":                                                          "--canary-delay -1s: want 0 or more",
		"--kubeconfig /x":                                                             "--kubeconfig: it is read with --kubernetes or --election kubernetes alone",
		"--metrics-address 192.0.2.1:80":                                              "--metrics-address 192.0.2.1:80: want an address of the loopback device",
		"--leader-election-lease-duration 1ms":                                        "lease duration 1ms: want at least 1s",
		"--election kubernetes --leader-election-renew-deadline 15s":                  "renew deadline 15s: want more than 0 and less than the lease duration, 15s",
		"--election kubernetes --leader-election-retry-period 9s":                     "retry period 9s: want more than 0 and less than five sixths of the renew deadline, 10s",
		"--election none --leader-election-retry-period 9s --kvstore-config /nowhere": "--kvstore-config: ",
	} {
		fields := strings.Fields(args)
		if args != "" && !strings.Contains(args, "--kvstore-config") {
			fields = append(fields, "--kvstore-config", etcd)
		}
		if _, err := parseOperator(t, nil, fields...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v\nwant %q", args, err, want)
		}
	}
}

// The operator as a command: it leads, says so, keeps what is its own in etcd, and ends with a signal; what it published stays.
//
// mechanism: K1 K2 K3 K6
func TestOperator(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	config, socket := filepath.Join(t.TempDir(), "etcd.yaml"), filepath.Join(t.TempDir(), "operator.sock")
	etcd.WriteConfig(t, config)
	signals, done, log := make(chan os.Signal, 1), make(chan int, 1), new(buffer)
	env := environment{
		ctx: t.Context(), stdout: io.Discard, stderr: log, lookup: lookupIn(nil), now: time.Now,
		signals: func() <-chan os.Signal { return signals },
	}
	go func() {
		done <- run(env, strings.Fields("operator --cluster-name east --cluster-id 1 --canary-delay 0 --kvstore-config "+config+" --operator-socket "+socket))
	}()
	variables := map[string]string{"WEFT_OPERATOR_SOCKET": socket}
	const key, value = "cilium/cluster-config/east", `{"id":1,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255}}`
	testutil.Eventually(t, time.Minute, func() error {
		code, stdout, stderr := weft(t, variables, "operator", "status")
		if code != exitOK || !strings.Contains(stdout, "this replica, since") || !strings.Contains(stdout, "4 prefixes declared complete") {
			return fmt.Errorf("exit code %d\n%s%s%s", code, stdout, stderr, log)
		}
		for _, prefix := range []string{"nodes", "services", "identities", "ip"} {
			if _, ok := etcd.Get(t, "cilium/synced/east/cilium/state/"+prefix+"/v1"); !ok {
				return fmt.Errorf("no canary of %s", prefix)
			}
		}
		if _, ok := etcd.Get(t, "cilium/.heartbeat"); !ok {
			return fmt.Errorf("no heartbeat")
		}
		return nil
	})
	for range 2 {
		etcd.Put(t, key, "changed")
		testutil.Eventually(t, time.Minute, func() error {
			if got, _ := etcd.Get(t, key); got != value {
				return fmt.Errorf("%s is %q", key, got)
			}
			return nil
		})
		etcd.Delete(t, key)
	}
	server, err := api.NewOperatorClient(socket).Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	metrics, err := io.ReadAll(server)
	server.Close()
	for _, want := range []string{"weft_operator_leader 1\n", "weft_operator_terms_total 1\n", `weft_operator_runs_total{duty="heartbeat"} 1`, `weft_operator_ready{duty="cluster-config"} `} {
		if err != nil || !strings.Contains(string(metrics), want) {
			t.Errorf("metrics lack %s: %v", want, err)
		}
	}
	signals <- syscall.SIGTERM
	select {
	case code := <-done:
		if code != exitOK {
			t.Errorf("exit code %d\n%s", code, log)
		}
	case <-time.After(time.Minute):
		t.Fatalf("the operator does not end\n%s", log)
	}
	if got, _ := etcd.Get(t, "cilium/synced/east/cilium/state/ip/v1"); got == "" {
		t.Error("the canary went with the operator")
	}
	if !strings.Contains(log.String(), "Leading the operator HA deployment") {
		t.Errorf("log: %s", log)
	}
}

// What an export would do is told, for services and nodes, and nothing is done.
func TestOperatorExport(t *testing.T) {
	etcd, dir := testutil.StartEtcd(t), t.TempDir()
	config := filepath.Join(t.TempDir(), "etcd.yaml")
	etcd.WriteConfig(t, config)
	for _, of := range []string{"services", "nodes"} {
		if err := os.Mkdir(filepath.Join(dir, of), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	testutil.MustWriteFile(t, filepath.Join(dir, "services", "a.yaml"), []byte(
		"- {name: web, namespace: shop, global: true, addresses: [10.96.1.10], ports: [{name: http, port: 80}], backends: [{ip: 10.1.1.10}]}\n- {name: local}\n"))
	testutil.MustWriteFile(t, filepath.Join(dir, "nodes", "a.yaml"), []byte("- {name: n1, ips: [172.18.1.1]}\n- {name: n2, ips: [172.18.1.2]}\n"))
	etcd.Put(t, "cilium/state/services/v1/east/shop/old", "{}")
	etcd.Put(t, "cilium/state/services/v1/west/shop/web", "{}")
	etcd.Put(t, "cilium/state/nodes/v1/east/n2", `{"Name":"n2","Cluster":"east","ClusterID":1,"Source":"local"}`)
	etcd.Put(t, "cilium/state/nodes/v1/east/n3", `{"Name":"n3","Cluster":"east","ClusterID":1,"Source":"k8s"}`)
	args := []string{
		"operator", "export", "--dry-run", "--cluster-name", "east", "--cluster-id", "1", "--kvstore-config", config,
		"--services-dir", filepath.Join(dir, "services"), "--nodes-dir", filepath.Join(dir, "nodes"),
	}
	for format, name := range map[string]string{"table": "operator-export.txt", "json": "operator-export.json"} {
		code, stdout, stderr := weft(t, nil, append(args, "-o", format)...)
		if code != exitOK {
			t.Errorf("exit code %d, stderr %q", code, stderr)
		}
		golden(t, name, stdout)
	}
	// In slices alone, what was published whole is to go.
	code, stdout, stderr := weft(t, nil, append(args, "--service-export", "endpointslices-only")...)
	if words := strings.Join(strings.Fields(stdout), " "); code != exitOK || !strings.HasPrefix(words, "ACTION KEY delete cilium/state/services/v1/east/shop/old "+
		"create cilium/state/endpointslices/v1/east/shop/web ") {
		t.Errorf("exit code %d, stderr %q, stdout\n%s", code, stderr, stdout)
	}
	if _, ok := etcd.Get(t, "cilium/state/services/v1/east/shop/web"); ok {
		t.Error("something was written")
	}
	code, _, stderr = weft(t, nil, "operator", "export", "--dry-run", "--cluster-name", "east", "--cluster-id", "1", "--kvstore-config", config,
		"--services-dir", filepath.Join(dir, "none"), "--timeout", "3s")
	if code != exitNot || !strings.Contains(stderr, "service files: not read yet") || !strings.Contains(stderr, "no such file or directory") {
		t.Errorf("exit code %d, stderr %q", code, stderr)
	}
}
