// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/strvals"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write what is rendered instead of comparing")

const dir = "../../deploy/kubernetes/chart"

// render returns the chart's objects, as `helm template weft deploy/kubernetes/chart -n kube-system` prints them.
func render(t *testing.T, values map[string]any) (string, error) {
	t.Helper()
	c, err := loader.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	capabilities := chartutil.DefaultCapabilities.Copy()
	all, err := chartutil.ToRenderValuesWithSchemaValidation(c, values, chartutil.ReleaseOptions{Name: "weft", Namespace: "kube-system", Revision: 1, IsInstall: true}, capabilities, false)
	if err != nil {
		return "", err
	}
	files, err := engine.Engine{Strict: true}.Render(c, all)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if strings.HasSuffix(name, ".yaml") && strings.TrimSpace(files[name]) != "" {
			fmt.Fprintf(&out, "---\n%s\n", strings.TrimSpace(files[name]))
		}
	}
	return out.String(), nil
}

func parse(t *testing.T, text string) map[string]any {
	t.Helper()
	values := make(map[string]any)
	if err := yaml.UnmarshalStrict([]byte(text), &values); err != nil {
		t.Fatal(err)
	}
	return values
}

// What the chart makes stands in files, for review, and for a test that has a real API server judge it.
func TestRendered(t *testing.T) {
	inputs, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil || len(inputs) < 3 {
		t.Fatal(len(inputs), err)
	}
	for _, input := range inputs {
		t.Run(filepath.Base(input), func(t *testing.T) {
			text, err := os.ReadFile(input)
			if err != nil {
				t.Fatal(err)
			}
			got, err := render(t, parse(t, string(text)))
			if err != nil {
				t.Fatal(err)
			}
			for _, object := range strings.Split(got, "---\n")[1:] {
				parse(t, object)
			}
			file := strings.TrimSuffix(input, ".values.yaml") + ".rendered.yaml"
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("%s is not what the chart makes of %s: see `go test -update` in test/chart, and review the difference", file, input)
			}
		})
	}
}

// The schema refuses what could not work, and names the value.
func TestSchema(t *testing.T) {
	for values, want := range map[string]string{
		"cluster: {name: east, id: 512}":                      "/cluster/id",
		"cluster: {name: '', id: 1}":                          "/cluster",
		"cluster: {name: default, id: 1}":                     "/cluster",
		"cluster: {name: East}":                               "/cluster/name",
		"cluster: {maxConnectedClusters: 256}":                "/cluster/maxConnectedClusters",
		"agent: {routingMode: vxlan}":                         "/agent/routingMode",
		"agent: {metricsAddress: '0.0.0.0:9879'}":             "/agent/metricsAddress",
		"agent: {options: {ClusterName: east}}":               "ClusterName",
		"agent: {option: {}}":                                 "option",
		"operator: {replicas: 0}":                             "/operator/replicas",
		"image: {repository: ''}":                             "/image/repository",
		"kvStore: {secret: a}":                                "kvStore",
		"agent: {capabilities: [SYS_ADMIN]}":                  "/agent/capabilities",
		"agent: {stateDir: state}":                            "/agent/stateDir",
		"clustermesh: {secret: a, config: b}":                 "config",
		"operator: {metricsAddress: 'weft.example.net:9963'}": "/operator/metricsAddress",
	} {
		if _, err := render(t, parse(t, values)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error that names %s", values, err, want)
		}
	}
}

// An option that is given wins over what the chart makes of other values, and new options make new pods.
func TestOptions(t *testing.T) {
	before, err := render(t, parse(t, "cluster: {name: east, id: 1}"))
	if err != nil {
		t.Fatal(err)
	}
	after, err := render(t, parse(t, "cluster: {name: east, id: 1}\nagent: {options: {routing-mode: tunnel, flow-sample: 10, devices: [eth0, eth1]}}"))
	if err != nil {
		t.Fatal(err)
	}
	hash := func(text string) string {
		_, rest, _ := strings.Cut(text, "weft.dev/config: ")
		return rest[:64]
	}
	if hash(before) == hash(after) {
		t.Error("other options do not change the pods")
	}
	for _, want := range []string{"    routing-mode: tunnel\n", "    flow-sample: 10\n", "    devices:\n    - eth0\n    - eth1\n", "    cluster-name: east\n"} {
		if !strings.Contains(after, want) {
			t.Errorf("%q is missing of\n%s", want, after)
		}
	}
}

// What agent and operator may do is what the files beside the chart say: those are what their tests grant them.
func TestRules(t *testing.T) {
	rendered, err := os.ReadFile("testdata/member.rendered.yaml")
	if err != nil {
		t.Fatal(err)
	}
	got := rules(t, string(rendered))
	if len(got) != 3 {
		t.Errorf("the chart has the roles %v", slices.Sorted(maps.Keys(got)))
	}
	for _, file := range []string{"agent-rbac.yaml", "operator-rbac.yaml"} {
		text, err := os.ReadFile(filepath.Join(dir, "..", file))
		if err != nil {
			t.Fatal(err)
		}
		for role, want := range rules(t, string(text)) {
			if got[role] != want {
				t.Errorf("%s: the chart grants\n%s\nwant\n%s", role, got[role], want)
			}
		}
	}
}

// rules are those of the roles among objects, as YAML.
func rules(t *testing.T, objects string) map[string]string {
	t.Helper()
	found := make(map[string]string)
	for _, text := range strings.Split("\n"+objects, "\n---\n") {
		object := parse(t, text)
		if object["rules"] == nil {
			continue
		}
		out, err := yaml.Marshal(object["rules"])
		if err != nil {
			t.Fatal(err)
		}
		found[fmt.Sprint(object["kind"], " ", object["metadata"].(map[string]any)["name"])] = string(out)
	}
	return found
}

// What docs/kubernetes.md has its readers type fits the chart: the values of `helm install` are taken, the secrets that are made are those
// that pods mount, with the files that they name, and what is looked at afterwards is there. No kubelet is part of the tests.
func TestPage(t *testing.T) {
	page, err := os.ReadFile("../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	text := regexp.MustCompile(`\\\n\s*`).ReplaceAllString(string(page), "")
	install := regexp.MustCompile(`helm install weft deploy/kubernetes/chart --namespace kube-system (.*)`).FindStringSubmatch(text)
	if install == nil {
		t.Fatal("the page does not install the chart")
	}
	values := make(map[string]any)
	for _, set := range regexp.MustCompile(`--set (\S+)`).FindAllStringSubmatch(install[1], -1) {
		if err := strvals.ParseInto(set[1], values); err != nil {
			t.Fatal(err)
		}
	}
	objects, err := render(t, values)
	if err != nil {
		t.Fatal(err)
	}
	const files = "/etc/weft/kvstore/"
	secrets := regexp.MustCompile(`kubectl -n kube-system create secret generic (\S+) (.*)`).FindAllStringSubmatch(text, -1)
	if len(secrets) != 2 {
		t.Fatalf("the page makes the secrets %q", secrets)
	}
	for _, secret := range secrets {
		if !strings.Contains(objects, fmt.Sprintf("secretName: %q,", secret[1])) {
			t.Errorf("no pod mounts the secret %s", secret[1])
		}
	}
	if !strings.Contains(objects, "kvstore-config: "+files+"config\n") || !strings.Contains(secrets[0][2], "--from-file=config=") {
		t.Errorf("the pods' options do not name %sconfig, which the page makes of %s", files, secrets[0][2])
	}
	for _, m := range regexp.MustCompile(`(?:trusted-ca|cert|key)-file: (\S+)/(\S+)`).FindAllStringSubmatch(text, -1) {
		if m[1]+"/" != files || !strings.Contains(secrets[0][2], "--from-file="+m[2]) || !strings.Contains(objects, "mountPath: "+m[1]) {
			t.Errorf("%s/%s is no file of the secret", m[1], m[2])
		}
	}
	var kinds []string
	for _, object := range strings.Split("\n"+objects, "\n---\n") {
		o := parse(t, object)
		if metadata, ok := o["metadata"].(map[string]any); ok {
			kinds = append(kinds, strings.ToLower(fmt.Sprint(o["kind"], "/", metadata["name"])))
		}
	}
	looked := regexp.MustCompile(`daemonset/[\w-]+`).FindAllString(text, -1)
	if len(looked) == 0 {
		t.Error("the page looks at no daemonset")
	}
	for _, name := range looked {
		if !slices.Contains(kinds, name) {
			t.Errorf("the chart makes no %s, but %q", name, kinds)
		}
	}
	dockerfile := regexp.MustCompile(`docker build -f (\S+) `).FindStringSubmatch(text)
	if dockerfile == nil {
		t.Fatal("the page builds no image")
	}
	content, err := os.ReadFile("../../" + dockerfile[1])
	if err != nil || !regexp.MustCompile(`(?m)^COPY bin/weft /`).Match(content) {
		t.Errorf("%s does not take what `make build` makes: %v", dockerfile[1], err)
	}
}
