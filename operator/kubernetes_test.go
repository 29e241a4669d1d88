// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
	"github.com/weftmesh/weft/source"
)

// cluster is a cluster with a real API server, whose etcd is not that of the mesh, as in production.
type cluster struct {
	t          *testing.T
	kubeEtcd   *testutil.Etcd
	kube       *testutil.KubeAPIServer
	etcd       *testutil.Etcd // of the mesh
	kubeconfig string         // of the account that deploy/kubernetes makes
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{t: t, kubeEtcd: testutil.StartEtcd(t), etcd: testutil.StartEtcd(t), kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	c.kube = testutil.StartKubeAPIServer(t, c.kubeEtcd)
	testutil.Eventually(t, testTimeout, func() error { // the server makes it a moment after it is ready
		return c.kube.Exists("/api/v1/namespaces/kube-system")
	})
	content, err := os.ReadFile(filepath.Join("..", "deploy", "kubernetes", "operator-rbac.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for document := range strings.SplitSeq(string(content), "\n---\n") {
		object, err := yaml.YAMLToJSON([]byte(document))
		if err != nil {
			t.Fatal(err)
		}
		var meta struct{ Kind string }
		if err := json.Unmarshal(object, &meta); err != nil {
			t.Fatal(err)
		}
		const rbac = "/apis/rbac.authorization.k8s.io/v1/"
		path, ok := map[string]string{
			"ServiceAccount": "/api/v1/namespaces/kube-system/serviceaccounts", "ClusterRole": rbac + "clusterroles",
			"ClusterRoleBinding": rbac + "clusterrolebindings", "Role": rbac + "namespaces/kube-system/roles",
			"RoleBinding": rbac + "namespaces/kube-system/rolebindings",
		}[meta.Kind]
		if !ok {
			t.Fatalf("operator-rbac.yaml: an object of kind %q", meta.Kind)
		}
		c.kube.Create(t, path, string(object))
	}
	token := c.kube.ServiceAccountToken(t, "kube-system", "weft-operator")
	c.kube.WriteKubeconfig(t, c.kubeconfig, "", token)
	c.kube.MustRefuse(t, http.MethodGet, "/api/v1/secrets", token)
	return c
}

// kubernetes is a change of a replica's configuration: it publishes services of the API server, and is elected there. The
// source runs until the test ends, as a task of its own does.
func (c *cluster) kubernetes(cfg *Config) {
	from, err := source.NewKubernetes(source.KubernetesConfig{
		Kubeconfig: c.kubeconfig, Agent: "test", DefaultGlobal: true, Longest: 200 * time.Millisecond, Log: silent,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	runTask(c.t, from)
	nodes, err := source.NewKubernetesNodes(source.KubernetesConfig{Kubeconfig: c.kubeconfig, Agent: "test", Longest: 200 * time.Millisecond, Log: silent})
	if err != nil {
		c.t.Fatal(err)
	}
	runTask(c.t, nodes)
	publishesNodes(c.t, nodes)(cfg)
	cfg.Duties = append(cfg.Duties, mustServices(c.t, from))
	cfg.Election = Election{
		By: ElectKubernetes, LeaseDuration: 4 * time.Second, RenewDeadline: 3 * time.Second, RetryPeriod: 200 * time.Millisecond,
		Kubeconfig: c.kubeconfig, Namespace: "kube-system",
	}
}

// wants waits until exactly these services are published, each with so many backends.
func (c *cluster) wants(want map[string]int) {
	c.t.Helper()
	testutil.Eventually(c.t, 2*testTimeout, func() error {
		got := list(c.t, c.etcd, servicesOfEast)
		for key, value := range got {
			s, err := service.Parse([]byte(value))
			if n, ok := want[key]; err != nil || !ok || n != len(s.Backends) {
				return fmt.Errorf("%s has %d backends, %v; want %v", key, len(s.Backends), err, want)
			}
		}
		if len(got) != len(want) {
			return fmt.Errorf("%d services, want %v", len(got), want)
		}
		return nil
	})
}

func (c *cluster) namespace(name string) {
	c.kube.Create(c.t, "/api/v1/namespaces", fmt.Sprintf(`{"metadata": {"name": %q}}`, name))
}

const servicesPath = "/api/v1/namespaces/%s/services"

func (c *cluster) service(namespace, name, annotations string) {
	c.kube.Create(c.t, fmt.Sprintf(servicesPath, namespace), fmt.Sprintf(
		`{"metadata": {"name": %q, "annotations": {%s}}, "spec": {"selector": {"app": "web"}, "ports": [{"name": "http", "port": 80}]}}`, name, annotations))
}

const global = `"service.cilium.io/global": "true"`

// slices makes the EndpointSlices of a service, as the controller does, of 100 backends each, in the place of those there are.
func (c *cluster) slices(namespace, name string, backends int) {
	path := "/apis/discovery.k8s.io/v1/namespaces/" + namespace + "/endpointslices"
	for i := 0; ; i++ {
		slice := fmt.Sprintf("%s-%d", name, i)
		from := i * 100
		there := c.kube.Exists(path+"/"+slice) == nil
		if from >= backends && !there {
			return
		}
		if there {
			c.kube.Delete(c.t, path+"/"+slice)
		}
		if from >= backends {
			continue
		}
		var endpoints []string
		for n := from; n < min(from+100, backends); n++ {
			endpoints = append(endpoints, fmt.Sprintf(`{"addresses": ["10.1.%d.%d"], "conditions": {"ready": true}}`, n/250, n%250+1))
		}
		c.kube.Create(c.t, path, fmt.Sprintf(`{"metadata": {"name": %q, "labels": {"kubernetes.io/service-name": %q}}, "addressType": "IPv4",
			"ports": [{"name": "http", "port": 8080, "protocol": "TCP"}], "endpoints": [%s]}`, slice, name, strings.Join(endpoints, ",")))
	}
}

// Services of a real API server, which knows no kinds but its own, through everything that happens to them, to it and to the
// operators.
//
// mechanism: K4 K5 L1 L2 L3 L4 L5
// lesson: O5 O6
func TestKubernetesServices(t *testing.T) {
	c := newCluster(t)
	c.namespace("shop")
	c.service("shop", "web", global)
	c.slices("shop", "web", 3)
	c.etcd.Put(t, servicesOfEast+"shop/left", "of an earlier life")
	replicas := []*replica{startReplica(t, "replica-0", c.etcd.Endpoint(), c.kubernetes), startReplica(t, "replica-1", c.etcd.Endpoint(), c.kubernetes)}
	c.wants(map[string]int{"shop/web": 3})
	c.checkValue()

	const nodes = "/api/v1/nodes"
	c.kube.Create(t, nodes, `{"metadata": {"name": "n1"}, "spec": {"podCIDRs": ["10.1.1.0/24", "fd00:10:1:1::/64"]}}`)
	c.kube.Patch(t, nodes+"/n1/status", `{"status": {"addresses": [{"type": "InternalIP", "address": "172.18.1.1"}, {"type": "Hostname", "address": "n1"}]}}`)
	testutil.Eventually(t, testTimeout, func() error {
		n, err := node.Parse([]byte(list(t, c.etcd, nodesOfEast)["n1"]))
		if err != nil || n.IP(false) != netip.MustParseAddr("172.18.1.1") || n.Validate("n1", "east", 1, 255) != nil || len(n.PodCIDRs()) != 2 {
			return fmt.Errorf("node %+v, %v", n, err)
		}
		return nil
	})
	c.kube.Delete(t, nodes+"/n1")
	holds(t, c.etcd, nodesOfEast, map[string]string{})

	c.service("shop", "local", "")
	web := fmt.Sprintf(servicesPath, "shop") + "/web"
	c.kube.Patch(t, web, `{"metadata": {"annotations": {"service.cilium.io/shared": "false"}}}`)
	c.wants(map[string]int{})
	c.kube.Patch(t, web, `{"metadata": {"annotations": {"service.cilium.io/shared": null}}}`)
	c.kube.Patch(t, fmt.Sprintf(servicesPath, "shop")+"/local", `{"metadata": {"annotations": {`+global+`}}}`)
	c.wants(map[string]int{"shop/web": 3, "shop/local": 0})
	c.kube.Patch(t, "/api/v1/namespaces/shop", `{"metadata": {"annotations": {"clustermesh.cilium.io/global": "false"}}}`)
	c.wants(map[string]int{})
	c.kube.Patch(t, "/api/v1/namespaces/shop", `{"metadata": {"annotations": {"clustermesh.cilium.io/global": null}}}`)

	c.slices("shop", "web", 1000)
	c.wants(map[string]int{"shop/web": 1000, "shop/local": 0})
	c.slices("shop", "web", 0)
	c.wants(map[string]int{"shop/web": 0, "shop/local": 0})
	c.slices("shop", "web", 2)

	c.testNamespaceGone(map[string]int{"shop/web": 2, "shop/local": 0})

	// A rename is a deletion and a creation.
	c.kube.Delete(t, fmt.Sprintf(servicesPath, "shop")+"/local")
	c.service("shop", "renamed", global)
	c.wants(map[string]int{"shop/web": 2, "shop/renamed": 0})

	// While the API server is away nothing is lost, and nobody leads for long; then all goes on.
	leader := awaitLeader(t, replicas...)
	c.kube.Stop(t)
	testutil.Eventually(t, testTimeout, func() error {
		if leader.Status().Leads {
			return fmt.Errorf("%s leads without its Lease", leader.cfg.Name)
		}
		return nil
	})
	c.wants(map[string]int{"shop/web": 2, "shop/renamed": 0})
	c.kube.Restart(t)
	c.slices("shop", "web", 4)
	c.wants(map[string]int{"shop/web": 4, "shop/renamed": 0})

	// The API server forgets its history while nobody can watch: what happened meanwhile is in the list.
	c.kube.Stop(t)
	c.kubeEtcd.Put(t, "/unrelated", "")
	c.kubeEtcd.Compact(t)
	c.kube.Restart(t)
	c.kube.Delete(t, fmt.Sprintf(servicesPath, "shop")+"/renamed")
	c.kubeEtcd.Compact(t)
	c.wants(map[string]int{"shop/web": 4})

	// The etcd of the mesh restarts, and is emptied.
	c.etcd.Restart(t)
	c.slices("shop", "web", 5)
	c.wants(map[string]int{"shop/web": 5})
	c.etcd.Wipe(t)
	c.wants(map[string]int{"shop/web": 5})

	// A leader that ends gives its Lease up; the other one goes on.
	leader = awaitLeader(t, replicas...)
	if err := leader.stop(); err != nil {
		t.Error(err)
	}
	replicas = slices.DeleteFunc(replicas, func(r *replica) bool { return r == leader })
	c.slices("shop", "web", 6)
	c.wants(map[string]int{"shop/web": 6})
	if awaitLeader(t, replicas...).Status().Terms == 0 {
		t.Error("the other replica leads without a term")
	}
	c.kube.Delete(t, web)
	c.wants(map[string]int{})
}

// testNamespaceGone: a namespace with its services goes, as when the controller of namespaces, which does not run here, has
// deleted what is in it.
func (c *cluster) testNamespaceGone(others map[string]int) {
	c.t.Helper()
	const path = "/api/v1/namespaces/gone"
	c.namespace("gone")
	want := maps.Clone(others)
	for _, name := range []string{"a", "b"} {
		c.service("gone", name, global)
		c.slices("gone", name, 2)
		want["gone/"+name] = 2
	}
	c.wants(want)
	c.kube.Delete(c.t, path)
	c.wants(want) // it ends, and what is in it is there still
	for _, name := range []string{"a", "b"} {
		c.kube.Delete(c.t, "/apis/discovery.k8s.io/v1/namespaces/gone/endpointslices/"+name+"-0")
		c.kube.Delete(c.t, path+"/services/"+name)
	}
	c.kubeEtcd.Delete(c.t, "/registry/namespaces/gone")
	c.wants(others)
	c.namespace("gone") // again, with nothing in it
	c.wants(others)
}

// checkValue: what the server filled in is in what is published.
func (c *cluster) checkValue() {
	c.t.Helper()
	var object struct{ Spec struct{ ClusterIP string } }
	if err := json.Unmarshal(c.kube.Read(c.t, fmt.Sprintf(servicesPath, "shop")+"/web"), &object); err != nil {
		c.t.Fatal(err)
	}
	s, err := service.Parse([]byte(list(c.t, c.etcd, servicesOfEast)["shop/web"]))
	if err != nil {
		c.t.Fatal(err)
	}
	at := netip.MustParseAddr(object.Spec.ClusterIP)
	if s.Frontends[at]["http"] != (service.Port{Protocol: "TCP", Port: 80}) || s.Selector["app"] != "web" || s.ClusterID != 1 || !s.Shared ||
		s.Backends[netip.MustParseAddr("10.1.0.3")]["http"] != (service.Port{Protocol: "TCP", Port: 8080}) {
		c.t.Errorf("published: %+v", s)
	}
}
