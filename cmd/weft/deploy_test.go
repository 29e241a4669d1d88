// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.yaml.in/yaml/v3"

	"github.com/weftmesh/weft/api"
)

const (
	rulesFile     = "../../deploy/prometheus/weft.rules.yml"
	dashboardFile = "../../deploy/grafana/weft.json"
	runbookFile   = "../../docs/alerts.md"
)

// describedMetrics maps the name of every metric of ours to its labels.
func describedMetrics(t *testing.T) map[string][]string {
	t.Helper()
	descs := make(chan *prometheus.Desc)
	go func() {
		defer close(descs)
		newCollector(func() api.Status { return api.Status{} }, nil).Describe(descs)
		propagationCollector{}.Describe(descs)
		serviceCollector{}.Describe(descs)
		operatorCollector{}.Describe(descs)
	}()
	pattern := regexp.MustCompile(`fqName: "([^"]+)".*variableLabels: \{([^}]*)\}`)
	metrics := make(map[string][]string)
	for d := range descs {
		m := pattern.FindStringSubmatch(d.String())
		if m == nil {
			t.Fatalf("description of another form: %s", d)
		}
		metrics[m[1]] = strings.Split(m[2], ",")
	}
	return metrics
}

var (
	usedMetric  = regexp.MustCompile(`\b(weft_[a-z_]+)(\{[^}]*\})?`)
	usedMatcher = regexp.MustCompile(`([a-z_]+)\s*(=~|!=|!~|=)`)
)

// histogram is the one whose parts have names of their own.
const histogram = "weft_propagation_seconds"

// wrongMetrics says which metrics or labels of an expression there are not.
func wrongMetrics(expr string, metrics map[string][]string) (wrong []string) {
	for _, use := range usedMetric.FindAllStringSubmatch(expr, -1) {
		name := use[1]
		for _, part := range []string{"_bucket", "_sum", "_count"} {
			if name == histogram+part {
				name = histogram
			}
		}
		labels, ok := metrics[name]
		if !ok {
			wrong = append(wrong, "there is no metric "+use[1])
			continue
		}
		for _, m := range usedMatcher.FindAllStringSubmatch(use[2], -1) {
			if label := m[1]; label != "instance" && label != "job" && !slices.Contains(labels, label) {
				wrong = append(wrong, use[1]+" has no label "+label)
			}
		}
	}
	return wrong
}

// alertRule is an alert as Prometheus reads it.
type alertRule struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

func readRules(t *testing.T) []alertRule {
	t.Helper()
	content, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct{ Rules []alertRule }
	}
	if err := yaml.Unmarshal(content, &file); err != nil {
		t.Fatal(err)
	}
	var rules []alertRule
	for _, g := range file.Groups {
		rules = append(rules, g.Rules...)
	}
	if len(rules) == 0 {
		t.Fatal("no rules")
	}
	return rules
}

// Every alert is about metrics that exist, and has a page that says what it means, where it comes from and what to do; no
// page is about an alert that is gone.
func TestAlerts(t *testing.T) {
	content, err := os.ReadFile(runbookFile)
	if err != nil {
		t.Fatal(err)
	}
	pages := make(map[string]string)
	for _, section := range strings.Split("\n"+string(content), "\n## ")[1:] {
		title, text, _ := strings.Cut(section, "\n")
		pages[title] = text
	}
	metrics := describedMetrics(t)
	for _, rule := range readRules(t) {
		for _, wrong := range wrongMetrics(rule.Expr, metrics) {
			t.Errorf("%s: %s", rule.Alert, wrong)
		}
		page, ok := pages[rule.Alert]
		if !ok {
			t.Errorf("%s has no section in %s", rule.Alert, runbookFile)
		}
		delete(pages, rule.Alert)
		for _, part := range []string{"**Meaning.** ", "**Cause.** ", "**Remedy.** "} {
			if ok && strings.Count(page, part) != 1 {
				t.Errorf("%s: its section in %s lacks %q", rule.Alert, runbookFile, part)
			}
		}
		if want := "docs/alerts.md#" + strings.ToLower(rule.Alert); rule.Annotations["runbook"] != want {
			t.Errorf("%s: runbook %q, want %q", rule.Alert, rule.Annotations["runbook"], want)
		}
		if s := rule.Labels["severity"]; s != "warning" && s != "critical" {
			t.Errorf("%s: severity %q", rule.Alert, s)
		}
	}
	for title := range pages {
		t.Errorf("%s: section %q is about no alert", runbookFile, title)
	}
}

// The rules are good for Prometheus, and do what they should with a fleet that is broken, one that is well, and a restart.
func TestAlertRules(t *testing.T) {
	for _, args := range [][]string{{"check", "rules", "weft.rules.yml"}, {"test", "rules", "weft.rules.test.yml"}} {
		cmd := exec.Command("promtool", args...)
		cmd.Dir = "../../deploy/prometheus"
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v (it is in Debian's package prometheus: make deps)\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// Every metric on the dashboard exists, with the labels that are asked for.
func TestDashboard(t *testing.T) {
	content, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Title  string
		Panels []struct {
			ID      int
			Title   string
			Type    string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(content, &board); err != nil {
		t.Fatal(err)
	}
	metrics, ids, queries := describedMetrics(t), make(map[int]bool), 0
	for _, p := range board.Panels {
		if ids[p.ID] {
			t.Errorf("two panels have the id %d", p.ID)
		}
		ids[p.ID] = true
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q shows nothing", p.Title)
		}
		for _, target := range p.Targets {
			queries++
			for _, wrong := range wrongMetrics(target.Expr, metrics) {
				t.Errorf("panel %q: %s", p.Title, wrong)
			}
		}
	}
	if queries == 0 {
		t.Fatal("no panel has a query")
	}
}

// grafanaUnits are those of Grafana's units (packages/grafana-data/src/valueFormats/categories.ts) that make sense here.
var grafanaUnits = []string{"short", "none", "percentunit", "s", "bytes", "bps", "pps", "ops"}

// The dashboard is what Grafana's import demands and shows: a schema that it migrates, a uid that links can name, a data source
// that is chosen when it is imported, panels that do not lie upon each other, units that there are.
func TestDashboardForm(t *testing.T) {
	content, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	type datasource struct{ Type, UID string }
	var board struct {
		ID            *int
		UID, Title    string
		SchemaVersion int
		Time          struct{ From, To string }
		Templating    struct {
			List []struct {
				Name, Type, Query string
				Datasource        datasource
			}
		}
		Panels []struct {
			Title, Type, Description string
			Datasource               datasource
			GridPos                  struct{ X, Y, W, H int }
			FieldConfig              struct{ Defaults struct{ Unit string } }
			Targets                  []struct {
				RefID      string
				Datasource datasource
			}
		}
	}
	if err := json.Unmarshal(content, &board); err != nil {
		t.Fatal(err)
	}
	if board.ID != nil || board.UID == "" || len(board.UID) > 40 || board.Title == "" || board.SchemaVersion < 36 || board.Time.From == "" || board.Time.To == "" {
		t.Errorf("want a title, a uid of up to 40 characters, no id, a schemaVersion of Grafana 9 or later and a time: %+v", board)
	}
	chosen := datasource{"prometheus", "${datasource}"}
	first := board.Templating.List[0]
	if first.Name != "datasource" || first.Type != "datasource" || first.Query != "prometheus" {
		t.Errorf("the first variable is %+v, want the data source, which the others need", first)
	}
	for _, v := range board.Templating.List[1:] {
		if v.Datasource != chosen {
			t.Errorf("variable %s asks %+v", v.Name, v.Datasource)
		}
	}
	const width = 24
	cells := make(map[[2]int]string)
	for _, p := range board.Panels {
		at := p.GridPos
		if at.W < 1 || at.H < 1 || at.X < 0 || at.X+at.W > width {
			t.Errorf("panel %q is not within %d columns: %+v", p.Title, width, at)
		}
		for x := at.X; x < at.X+at.W; x++ {
			for y := at.Y; y < at.Y+at.H; y++ {
				if other, taken := cells[[2]int{x, y}]; taken {
					t.Fatalf("panels %q and %q lie upon each other", p.Title, other)
				}
				cells[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Type != "stat" && p.Type != "timeseries" || p.Description == "" || p.Datasource != chosen || !slices.Contains(grafanaUnits, p.FieldConfig.Defaults.Unit) {
			t.Errorf("panel %q: want a stat or timeseries with a description, the chosen data source and a unit of %v: %+v", p.Title, grafanaUnits, p)
		}
		ids := make(map[string]bool)
		for _, target := range p.Targets {
			if ids[target.RefID] || target.RefID == "" || target.Datasource != chosen {
				t.Errorf("panel %q: target %+v: want a refId of its own and the chosen data source", p.Title, target)
			}
			ids[target.RefID] = true
		}
	}
}

// What is checked above can fail.
func TestWrongMetrics(t *testing.T) {
	metrics := describedMetrics(t)
	if len(metrics) < 40 {
		t.Fatalf("only %d metrics: %v", len(metrics), slices.Sorted(maps.Keys(metrics)))
	}
	for expr, good := range map[string]bool{
		`weft_ready == 0`: true, `weft_redy == 0`: false, `rate(weft_propagation_seconds_bucket[5m])`: true,
		`weft_kvstore_connected{scope="own"}`: true, `weft_kvstore_connected{scoop="own"}`: false, `weft_ready_bucket`: false,
	} {
		if wrong := wrongMetrics(expr, metrics); (len(wrong) == 0) != good {
			t.Errorf("%s: %v", expr, wrong)
		}
	}
}
