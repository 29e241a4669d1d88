// SPDX-License-Identifier: Apache-2.0

package test

import (
	"cmp"
	"os"
	"path/filepath"
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
