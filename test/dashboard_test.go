// SPDX-License-Identifier: Apache-2.0

package test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
)

// board is the part of a dashboard that asks Prometheus.
type board struct {
	Panels     []boardPanel
	Templating struct {
		List []struct{ Name, Type, Query, AllValue string }
	}
}

type boardPanel struct {
	Title   string
	Targets []struct{ Expr, LegendFormat string }
}

// promSeries is a series of an answer of Prometheus, with its value now: seconds of the epoch, and a number as text.
type promSeries struct {
	Metric map[string]string
	Value  [2]any
}

// prometheusServer is a running Prometheus.
type prometheusServer struct{ url string }

// startPrometheus starts Prometheus, which reads the targets each second and evaluates the rules of deploy. It ends with the test.
func startPrometheus(t *testing.T, targets map[string]string) prometheusServer {
	t.Helper()
	rules, err := filepath.Abs("../deploy/prometheus/weft.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	var config strings.Builder
	fmt.Fprintf(&config, "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [%s]\nscrape_configs:\n", rules)
	for _, job := range slices.Sorted(maps.Keys(targets)) {
		fmt.Fprintf(&config, "- {job_name: %s, static_configs: [{targets: ['%s']}]}\n", job, targets[job])
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "prometheus.yml")
	testutil.MustWriteFile(t, file, []byte(config.String()))
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	const at = "127.0.0.1:9090" // of a network of our own
	cmd := exec.Command("prometheus", "--config.file", file, "--storage.tsdb.path", filepath.Join(dir, "data"), "--web.listen-address", at)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatalf("%v: make deps installs it", err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			content, _ := os.ReadFile(log.Name())
			t.Logf("log of Prometheus:\n%s", content)
		}
	})
	p := prometheusServer{"http://" + at}
	testutil.Eventually(t, patience, func() error { return p.get("/api/v1/status/runtimeinfo", nil, nil) })
	return p
}

// get decodes the data of an answer.
func (p prometheusServer) get(path string, parameters url.Values, data any) error {
	client := http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Get(p.url + path + "?" + parameters.Encode())
	if err != nil {
		return err
	}
	defer response.Body.Close()
	var answer struct {
		Status, Error string
		Data          json.RawMessage
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return err
	}
	if answer.Status != "success" {
		return fmt.Errorf("%s: %s", answer.Status, answer.Error)
	}
	if data == nil {
		return nil
	}
	return json.Unmarshal(answer.Data, data)
}

// query asks for the series that an expression has now.
func (p prometheusServer) query(expr string) ([]promSeries, error) {
	var vector struct{ Result []promSeries }
	err := p.get("/api/v1/query", url.Values{"query": {expr}}, &vector)
	return vector.Result, err
}

var legendLabel = regexp.MustCompile(`\{\{\s*([a-z_]+)\s*\}\}`)

// checkPanel: each query of the panel has an answer, with the labels that its legend names.
func (p prometheusServer) checkPanel(panel boardPanel, variables *strings.Replacer) error {
	for _, target := range panel.Targets {
		series, err := p.query(variables.Replace(target.Expr))
		switch {
		case err != nil:
			return fmt.Errorf("panel %q: %s: %w", panel.Title, target.Expr, err)
		case !slices.ContainsFunc(series, func(s promSeries) bool { return s.Value[1] != "NaN" }):
			return fmt.Errorf("panel %q: %s: no data", panel.Title, target.Expr)
		}
		for _, m := range legendLabel.FindAllStringSubmatch(target.LegendFormat, -1) {
			if series[0].Metric[m[1]] == "" {
				return fmt.Errorf("panel %q: its legend names %s, which %s lacks: %v", panel.Title, m[1], target.Expr, series[0].Metric)
			}
		}
	}
	return nil
}

// A real Prometheus reads a real agent and a real operator: every query of the dashboard is answered with data, as Grafana asks
// it, and every alert is evaluated.
func TestDashboard(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	ca := testutil.NewCA(t, "west")
	west, east := testutil.StartEtcd(t, testutil.WithTLS(ca)), testutil.StartEtcd(t)
	west.Load(t, golden.Path(t, "kvstore-state-west.jsonl"))
	west.Put(t, "cilium/state/ip/v1/default/not-an-ip", "{}") // something to reject
	h := newHost(t)
	tls := t.TempDir()
	cert, key := ca.Issue(t, testutil.Certificate{CommonName: "remote-east"})
	for name, content := range map[string][]byte{"ca.crt": ca.PEM, "client.crt": cert, "client.key": key} {
		testutil.MustWriteFile(t, filepath.Join(tls, name), content)
	}
	testutil.MustWriteFile(t, filepath.Join(h.clustermesh, "west"), fmt.Appendf(nil,
		"endpoints: [%s]\ntrusted-ca-file: %[2]s/ca.crt\ncert-file: %[2]s/client.crt\nkey-file: %[2]s/client.key\n", west.Endpoint(), tls))
	own, services := filepath.Join(t.TempDir(), "own"), t.TempDir()
	east.WriteConfig(t, own)
	testutil.MustWriteFile(t, filepath.Join(services, "db.yaml"), []byte(
		"{name: db, namespace: shop, global: true, addresses: [10.96.1.20], ports: [{name: t, port: 5432}], backends: [{ip: 172.18.1.9}]}\n"))
	h.declare(t, "web.yaml", "{name: web, namespace: shop, ip: 10.1.1.10, identity: 65793, labels: {app: web}}\n")
	const agentAt, operatorAt = "127.0.0.1:9879", "127.0.0.1:9963"
	h.start(t, "east", 1, "--metrics-address", agentAt, "--kvstore-config", own, "--clustermesh-cache-ttl", "1h",
		"--service-lb", "--service-cgroup", testutil.NewCgroup(t).Path(), "--service-tc")
	startWeft(t, 0, "operator", "--cluster-name", "east", "--cluster-id", "1", "--kvstore-config", own, "--services-dir", services,
		"--metrics-address", operatorAt, "--operator-socket", filepath.Join(t.TempDir(), "operator.sock"))
	h.awaitVerified(t)
	// Packets to a workload of west. Nobody is there, so the way is set by hand.
	command(t, "ip", "neighbour", "add", "172.18.2.1", "lladdr", "02:00:00:00:02:01", "dev", "eth0")
	command(t, "ip", "route", "add", "10.2.1.0/24", "via", "172.18.2.1")
	conn, err := net.Dial("udp", "10.2.1.10:80")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range 10 {
		if _, err := conn.Write([]byte("packet")); err != nil {
			t.Fatal(err)
		}
	}

	p := startPrometheus(t, map[string]string{"weft-agent": agentAt, "weft-operator": operatorAt})
	content, err := os.ReadFile("../deploy/grafana/weft.json")
	if err != nil {
		t.Fatal(err)
	}
	var b board
	if err := json.Unmarshal(content, &b); err != nil {
		t.Fatal(err)
	}
	var variables []string
	for _, v := range b.Templating.List {
		if v.Type != "query" {
			continue
		}
		testutil.Eventually(t, patience, func() error { return p.checkVariable(v.Query) })
		variables = append(variables, "$"+v.Name, v.AllValue)
	}
	replacer := strings.NewReplacer(variables...)
	changes := 0
	for _, panel := range b.Panels {
		testutil.Eventually(t, patience, func() error {
			changes++ // a change for the rates
			west.Put(t, "cilium/state/ip/v1/default/10.2.1.99",
				fmt.Sprintf(`{"IP":"10.2.1.99","Mask":null,"HostIP":"172.18.2.1","ID":%d,"Key":0,"Metadata":"","K8sNamespace":"shop","K8sPodName":"web"}`, 131329+changes%2))
			return p.checkPanel(panel, replacer)
		})
	}
	testutil.Eventually(t, patience, p.checkRules)
}

var labelValues = regexp.MustCompile(`^label_values\(([a-z_]+), ([a-z_]+)\)$`)

// checkVariable: the query of a variable has values.
func (p prometheusServer) checkVariable(query string) error {
	m := labelValues.FindStringSubmatch(query)
	if m == nil {
		return fmt.Errorf("variable: %s is not label_values(metric, label)", query)
	}
	var values []string
	if err := p.get("/api/v1/label/"+m[2]+"/values", url.Values{"match[]": {m[1]}}, &values); err != nil || len(values) == 0 {
		return fmt.Errorf("variable: %s has the values %q, %w", query, values, err)
	}
	return nil
}

// checkRules: every rule has been evaluated, without an error.
func (p prometheusServer) checkRules() error {
	var groups struct {
		Groups []struct {
			Rules []struct{ Name, Health, LastError string }
		}
	}
	if err := p.get("/api/v1/rules", nil, &groups); err != nil {
		return err
	}
	rules := 0
	for _, g := range groups.Groups {
		for _, r := range g.Rules {
			if rules++; r.Health != "ok" {
				return fmt.Errorf("alert %s is %s: %s", r.Name, r.Health, r.LastError)
			}
		}
	}
	if rules < 10 {
		return fmt.Errorf("Prometheus knows %d rules", rules)
	}
	return nil
}
