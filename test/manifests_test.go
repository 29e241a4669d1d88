// SPDX-License-Identifier: Apache-2.0

package test

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

// resources are the paths of the kinds that the chart makes, by apiVersion and kind; cluster-wide ones are of no namespace.
var resources = map[string]struct {
	path        string
	clusterWide bool
}{
	"v1 ServiceAccount":                               {"/api/v1", false},
	"v1 ConfigMap":                                    {"/api/v1", false},
	"apps/v1 DaemonSet":                               {"/apis/apps/v1", false},
	"apps/v1 Deployment":                              {"/apis/apps/v1", false},
	"rbac.authorization.k8s.io/v1 ClusterRole":        {"/apis/rbac.authorization.k8s.io/v1", true},
	"rbac.authorization.k8s.io/v1 ClusterRoleBinding": {"/apis/rbac.authorization.k8s.io/v1", true},
	"rbac.authorization.k8s.io/v1 Role":               {"/apis/rbac.authorization.k8s.io/v1", false},
	"rbac.authorization.k8s.io/v1 RoleBinding":        {"/apis/rbac.authorization.k8s.io/v1", false},
}

// Weft keeps its state in etcd and defines no kinds of its own: nothing that it installs is a definition, and no account of its
// may write one, so that there is none to register before the election. That the operator works where no kind but Kubernetes'
// own is defined is shown by TestKubernetes of weft-lab.
//
// mechanism: K4
func TestNothingDefinesKinds(t *testing.T) {
	rendered, err := filepath.Glob("chart/testdata/*.rendered.yaml")
	if err != nil {
		t.Fatal(err)
	}
	plain, err := filepath.Glob("../deploy/kubernetes/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	rules := 0
	for _, file := range slices.Concat(rendered, plain) {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for decoder := yaml.NewDecoder(bytes.NewReader(content)); ; {
			var object struct {
				Kind  string
				Rules []struct {
					APIGroups, Resources, Verbs []string
				}
			}
			if err := decoder.Decode(&object); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if object.Kind == "CustomResourceDefinition" {
				t.Errorf("%s defines a kind", file)
			}
			for _, rule := range object.Rules {
				rules++
				if slices.Contains(rule.APIGroups, "*") || slices.Contains(rule.APIGroups, "apiextensions.k8s.io") {
					t.Errorf("%s grants %q on %q of %q", file, rule.Verbs, rule.Resources, rule.APIGroups)
				}
			}
		}
	}
	if len(rendered) < 3 || len(plain) < 2 || rules < 10 {
		t.Errorf("looked at %d rules of %d files", rules, len(rendered)+len(plain))
	}
}

// What the chart makes of each set of values is accepted by a real API server, as a server-side apply with strict
// validation: no field that it does not know, none that is wrong.
func TestManifestsAreAccepted(t *testing.T) {
	k := testutil.StartKubeAPIServer(t, testutil.StartEtcd(t))
	files, err := filepath.Glob("chart/testdata/*.rendered.yaml")
	if err != nil || len(files) < 3 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, manifest := range strings.Split("\n"+string(content), "\n---\n")[1:] {
			var object struct {
				APIVersion string `yaml:"apiVersion"`
				Kind       string
				Metadata   struct{ Name, Namespace string }
			}
			if err := yaml.Unmarshal([]byte(manifest), &object); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			resource, ok := resources[object.APIVersion+" "+object.Kind]
			if !ok || resource.clusterWide != (object.Metadata.Namespace == "") {
				t.Errorf("%s: %s %s in namespace %q", file, object.APIVersion, object.Kind, cmp.Or(object.Metadata.Namespace, "none"))
				continue
			}
			path := resource.path
			if !resource.clusterWide {
				path += "/namespaces/" + object.Metadata.Namespace
			}
			k.Apply(t, path+"/"+strings.ToLower(object.Kind)+"s/"+object.Metadata.Name, manifest)
		}
	}
}
