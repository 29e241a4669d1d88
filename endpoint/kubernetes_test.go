// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// soon bounds waiting for what takes milliseconds on an idle machine.
const soon = time.Minute

// kubeBench is one API server for several tests, each with a node and a namespace of its own.
type kubeBench struct {
	etcd   *testutil.Etcd
	server *testutil.KubeAPIServer
	token  string // of the account that deploy/kubernetes makes
}

func startKube(t *testing.T) *kubeBench {
	t.Helper()
	etcd := testutil.StartEtcd(t)
	b := &kubeBench{etcd: etcd, server: testutil.StartKubeAPIServer(t, etcd)}
	testutil.Eventually(t, soon, func() error { // the server makes it a moment after it is ready
		return b.server.Exists("/api/v1/namespaces/kube-system")
	})
	return b
}

// manifest makes the objects of a file below deploy whose kinds are named.
func (b *kubeBench) manifest(t *testing.T, file string, kinds ...string) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("..", "deploy", file))
	if err != nil {
		t.Fatal(err)
	}
	paths := map[string]string{
		"ServiceAccount":     "/api/v1/namespaces/kube-system/serviceaccounts",
		"ClusterRole":        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
		"ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
	}
	made := 0
	for _, document := range strings.Split(string(content), "\n---\n") {
		object, err := yaml.YAMLToJSON([]byte(document))
		if err != nil {
			t.Fatal(err)
		}
		var meta struct{ Kind string }
		if err := json.Unmarshal(object, &meta); err != nil {
			t.Fatal(err)
		}
		if slices.Contains(kinds, meta.Kind) {
			b.server.Create(t, paths[meta.Kind], string(object))
			made++
		}
	}
	if made != len(kinds) {
		t.Fatalf("%s: made %d objects of the kinds %v", file, made, kinds)
	}
}

// follow runs a source for a node, which reaches the server at addr.
func (b *kubeBench) follow(t *testing.T, node, addr string) *Kubernetes {
	t.Helper()
	return b.followLogged(t, node, addr, slog.New(slog.DiscardHandler))
}

func (b *kubeBench) followLogged(t *testing.T, node, addr string, log *slog.Logger) *Kubernetes {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	b.server.WriteKubeconfig(t, kubeconfig, addr, b.token)
	k, err := NewKubernetes(KubernetesConfig{Kubeconfig: kubeconfig, NodeName: node, Longest: 200 * time.Millisecond, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	runSource(t, k)
	return k
}

// runSource runs a source until the test ends.
func runSource(t *testing.T, s Source) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("%s: %v", s, err)
		}
	})
}

func (b *kubeBench) namespace(t *testing.T, name, labels string) {
	t.Helper()
	b.server.Create(t, "/api/v1/namespaces", fmt.Sprintf(`{"metadata": {"name": %q, "labels": {%s}}}`, name, labels))
}

// pod makes a pod with a spec and, as a kubelet would, a status.
func (b *kubeBench) pod(t *testing.T, key, spec, status string) {
	t.Helper()
	namespace, name, _ := strings.Cut(key, "/")
	path := "/api/v1/namespaces/" + namespace + "/pods"
	b.server.Create(t, path, fmt.Sprintf(`{"metadata": {"name": %q, "labels": {"app": %q}}, "spec": {%s}}`, name, name, spec))
	if status != "" {
		b.server.Patch(t, path+"/"+name+"/status", `{"status": {`+status+`}}`)
	}
}

func podPath(key string) string {
	namespace, name, _ := strings.Cut(key, "/")
	return "/api/v1/namespaces/" + namespace + "/pods/" + name
}

// container is the spec of a pod of one container on a node.
func container(node string) string {
	return fmt.Sprintf(`"nodeName": %q, "containers": [{"name": "c", "image": "i"}]`, node)
}

func running(ips ...string) string {
	var all []string
	for _, ip := range ips {
		all = append(all, fmt.Sprintf(`{"ip": %q}`, ip))
	}
	return fmt.Sprintf(`"phase": "Running", "podIP": %q, "podIPs": [%s]`, ips[0], strings.Join(all, ","))
}

// wantWorkloads waits until a source has exactly these, as "namespace/name addresses".
func wantWorkloads(t *testing.T, s Source, want ...string) {
	t.Helper()
	testutil.Eventually(t, soon, func() error {
		got := []string{}
		for _, w := range s.Workloads() {
			got = append(got, fmt.Sprintf("%s/%s %v", w.Namespace, w.Name, w.IPs))
		}
		if diff := cmp.Diff(append([]string{}, want...), got); diff != "" {
			return fmt.Errorf("workloads (-want +got)\n%s\nproblems %v", diff, s.Problems())
		}
		return nil
	})
}

// wantProblems waits until a source has as many problems, each with its text.
func wantProblems(t *testing.T, s Source, want ...string) {
	t.Helper()
	testutil.Eventually(t, soon, func() error {
		got := s.Problems()
		if !slices.EqualFunc(got, want, func(e SourceError, text string) bool { return strings.Contains(e.Error(), text) }) {
			return fmt.Errorf("problems %q, want those with %q", got, want)
		}
		return nil
	})
}

func awaitReady(t *testing.T, s Source) {
	t.Helper()
	select {
	case <-s.Ready():
	case <-time.After(soon):
		t.Fatalf("%s is not ready: %v", s, s.Problems())
	}
}

func TestKubernetes(t *testing.T) {
	b := startKube(t)
	t.Run("Permissions", b.testPermissions) // the others use what it makes
	t.Run("Pods", b.testPods)
	t.Run("AddressPassesOn", b.testAddressPassesOn)
	t.Run("Faults", b.testFaults)
	t.Run("Outage", b.testOutage)
}

// The account of the manifest can do what the agent needs; without its role, what is missing is told, and once the role
// is there nothing has to be restarted.
func (b *kubeBench) testPermissions(t *testing.T) {
	const manifest = "kubernetes/agent-rbac.yaml"
	b.manifest(t, manifest, "ServiceAccount")
	b.token = b.server.ServiceAccountToken(t, "kube-system", "weft-agent")
	k := b.follow(t, "n-rbac", "")
	wantProblems(t, k, `cannot list resource "namespaces"`, "account needs the verbs list and watch on pods and namespaces")
	select {
	case <-k.Ready():
		t.Fatal("ready without having listed anything")
	default:
	}
	b.manifest(t, manifest, "ClusterRole", "ClusterRoleBinding")
	awaitReady(t, k)
	wantProblems(t, k)
	b.server.MustRefuse(t, http.MethodGet, "/api/v1/secrets", b.token)
	b.server.MustRefuse(t, http.MethodDelete, "/api/v1/namespaces/default", b.token)
}

func (b *kubeBench) testPods(t *testing.T) {
	b.namespace(t, "shop", `"team": "blue"`)
	k := b.follow(t, "n1", "")
	awaitReady(t, k)
	wantWorkloads(t, k)

	b.pod(t, "shop/web", `"nodeName": "n1", "serviceAccountName": "robot",
		"initContainers": [
			{"name": "before", "image": "i", "ports": [{"name": "never", "containerPort": 1}]},
			{"name": "beside", "image": "i", "restartPolicy": "Always", "ports": [{"name": "metrics", "containerPort": 9100, "protocol": "UDP"}]}],
		"containers": [{"name": "c", "image": "i", "ports": [{"name": "http", "containerPort": 8080}, {"containerPort": 8081}]}]`, "")
	b.pod(t, "shop/host", container("n1")+`, "hostNetwork": true`, running("10.1.0.1"))
	b.pod(t, "shop/elsewhere", container("n2"), running("10.2.0.1"))
	b.pod(t, "shop/done", container("n1"), `"phase": "Succeeded", "podIP": "10.1.1.9", "podIPs": [{"ip": "10.1.1.9"}]`)
	b.pod(t, "shop/other", container("n1"), running("10.1.1.2"))
	wantWorkloads(t, k, "shop/other [10.1.1.2]") // web has no address yet

	b.server.Patch(t, podPath("shop/web")+"/status", `{"status": {`+running("10.1.1.1", "fd00::1")+`}}`)
	wantWorkloads(t, k, "shop/other [10.1.1.2]", "shop/web [10.1.1.1 fd00::1]")
	web := k.Workloads()[1]
	if web.Origin == "" {
		t.Error("the pod has no UID")
	}
	web.Origin = ""
	if diff := cmp.Diff(Workload{
		Source: "kubernetes", Namespace: "shop", Name: "web", ServiceAccount: "robot",
		IPs: []netip.Addr{netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("fd00::1")}, Labels: map[string]string{"app": "web"},
		NamespaceLabels: map[string]string{"team": "blue", "kubernetes.io/metadata.name": "shop"},
		Ports:           []ipcache.NamedPort{{Name: "http", Port: 8080, Protocol: "TCP"}, {Name: "metrics", Port: 9100, Protocol: "UDP"}},
	}, web, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("workload (-want +got)\n%s", diff)
	}

	b.server.Patch(t, podPath("shop/web"), `{"metadata": {"labels": {"app": null, "tier": "front"}}}`)
	b.server.Patch(t, "/api/v1/namespaces/shop", `{"metadata": {"labels": {"team": "red"}}}`)
	testutil.Eventually(t, soon, func() error {
		w := k.Workloads()[1]
		if len(w.Labels) == 1 && w.Labels["tier"] == "front" && w.NamespaceLabels["team"] == "red" && k.Workloads()[0].NamespaceLabels["team"] == "red" {
			return nil
		}
		return fmt.Errorf("labels %v of %v", w.Labels, w.NamespaceLabels)
	})

	b.server.Patch(t, podPath("shop/other")+"/status", `{"status": {"phase": "Failed"}}`)
	b.server.Delete(t, podPath("shop/web"))
	wantWorkloads(t, k)
	wantProblems(t, k)
}

// A pod that was asked to end keeps what it has until it is gone, but not what has been given to another.
//
// lesson: X8
func (b *kubeBench) testAddressPassesOn(t *testing.T) {
	b.namespace(t, "turn", "")
	k := b.follow(t, "n3", "")
	b.pod(t, "turn/old", container("n3"), running("10.3.0.1", "fd00::3"))
	wantWorkloads(t, k, "turn/old [10.3.0.1 fd00::3]")
	b.server.DeleteGracefully(t, podPath("turn/old"))
	b.pod(t, "turn/witness", container("n3"), running("10.3.0.9")) // what comes after the deletion has been seen
	wantWorkloads(t, k, "turn/old [10.3.0.1 fd00::3]", "turn/witness [10.3.0.9]")
	b.pod(t, "turn/new", container("n3"), running("10.3.0.1"))
	wantWorkloads(t, k, "turn/new [10.3.0.1]", "turn/old [fd00::3]", "turn/witness [10.3.0.9]")
	b.server.Delete(t, podPath("turn/old"))
	wantWorkloads(t, k, "turn/new [10.3.0.1]", "turn/witness [10.3.0.9]")
}
