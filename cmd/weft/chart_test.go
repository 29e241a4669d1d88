// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

// The options that the Helm chart writes are options of the agent and the operator, with values that they take.
func TestChartOptions(t *testing.T) {
	files, err := filepath.Glob("../../test/chart/testdata/*.rendered.yaml")
	if err != nil || len(files) < 3 {
		t.Fatal(files, err)
	}
	env := map[string]string{"WEFT_NODE_NAME": "n1", "WEFT_KVSTORE_CONFIG": filepath.Join(t.TempDir(), "etcd.yaml")}
	testutil.MustWriteFile(t, env["WEFT_KVSTORE_CONFIG"], []byte("endpoints: [http://127.0.0.1:2379]\n"))
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		agents := 0
		for _, manifest := range strings.Split("\n"+string(content), "\n---\n") {
			var object struct{ Data map[string]string }
			if err := yaml.Unmarshal([]byte(manifest), &object); err != nil {
				t.Fatal(err)
			}
			if options, ok := object.Data["agent.yaml"]; ok {
				agents++
				if _, err := parseOptions(t, env, "--config", writeFile(t, "agent.yaml", options)); err != nil {
					t.Errorf("%s: %v", file, err)
				}
			}
			if options, ok := object.Data["operator.yaml"]; ok {
				if _, err := parseOperator(t, env, "--config", writeFile(t, "operator.yaml", options)); err != nil {
					t.Errorf("%s: %v", file, err)
				}
			}
		}
		if agents != 1 {
			t.Errorf("%s has %d configurations of the agent", file, agents)
		}
	}
}
