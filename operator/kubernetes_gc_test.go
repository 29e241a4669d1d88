// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// ciliumCluster is the Kubernetes of cluster east, with or without Cilium's kinds of objects.
type ciliumCluster struct {
	*testutil.KubeAPIServer
	t       *testing.T
	objects *Objects // with the rights that deploy/kubernetes gives
	term    *Term
	etcd    *testutil.Etcd // of weft
}

const (
	crds       = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	ciliumPath = "/apis/" + ciliumGroup
)

func startCiliumCluster(t *testing.T) *ciliumCluster {
	t.Helper()
	of := newCluster(t)
	objects, err := NewObjects(of.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(objects.client.Client.CloseIdleConnections)
	return &ciliumCluster{KubeAPIServer: of.kube, t: t, objects: objects, etcd: of.etcd, term: mustBegin(t, of.etcd)}
}

// define installs a kind of Cilium's objects, and waits until it is served.
func (c *ciliumCluster) define(plural, kind, scope string) {
	c.t.Helper()
	c.Create(c.t, crds, fmt.Sprintf(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"%[1]s.cilium.io"},
		"spec":{"group":"cilium.io","scope":%[3]q,"names":{"plural":%[1]q,"singular":%[4]q,"kind":%[2]q,"listKind":"%[2]sList"},
		"versions":[{"name":"v2","served":true,"storage":true,"subresources":{"status":{}},
		"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}]}}`, plural, kind, scope, strings.ToLower(kind)))
	c.awaitKind(plural, true)
}

// undefine removes a kind with all its objects.
func (c *ciliumCluster) undefine(plural string) {
	c.t.Helper()
	c.Delete(c.t, crds+"/"+plural+".cilium.io")
	c.awaitKind(plural, false)
	testutil.Eventually(c.t, testTimeout, func() error {
		if c.Exists(crds+"/"+plural+".cilium.io") == nil {
			return fmt.Errorf("the definition of %s is still there", plural)
		}
		return nil
	})
}

func (c *ciliumCluster) awaitKind(plural string, served bool) {
	c.t.Helper()
	testutil.Eventually(c.t, testTimeout, func() error {
		kinds, err := c.objects.kinds(c.t.Context(), ciliumGroup)
		if err == nil && kinds[plural] != served {
			err = fmt.Errorf("%s served: %t, want %t", plural, kinds[plural], served)
		}
		if err == nil && served {
			err = c.Exists(ciliumPath + "/" + plural)
		}
		return err
	})
}

func (c *ciliumCluster) namespace(name string) {
	c.t.Helper()
	c.Create(c.t, "/api/v1/namespaces", fmt.Sprintf(`{"metadata":{"name":%q}}`, name))
}

func (c *ciliumCluster) node(name string) {
	c.t.Helper()
	c.Create(c.t, "/api/v1/nodes", fmt.Sprintf(`{"metadata":{"name":%q}}`, name))
	c.Patch(c.t, "/api/v1/nodes/"+name+"/status", `{"status":{"addresses":[{"type":"InternalIP","address":"172.18.1.1"},{"type":"Hostname","address":"n1"}]}}`)
}

// pod makes a pod, running with an address if one is given, and returns its UID.
func (c *ciliumCluster) pod(namespace, name, ip string, labels string) (uid string) {
	c.t.Helper()
	made := c.Create(c.t, "/api/v1/namespaces/"+namespace+"/pods",
		fmt.Sprintf(`{"metadata":{"name":%q,"labels":%s},"spec":{"nodeName":"n1","containers":[{"name":"c","image":"i"}]}}`, name, labels))
	if ip != "" {
		c.Patch(c.t, "/api/v1/namespaces/"+namespace+"/pods/"+name+"/status",
			fmt.Sprintf(`{"status":{"phase":"Running","podIP":%[1]q,"podIPs":[{"ip":%[1]q}]}}`, ip))
	}
	var pod object
	if err := json.Unmarshal(made, &pod); err != nil {
		c.t.Fatal(err)
	}
	return pod.Metadata.UID
}

// endpoint makes a CiliumEndpoint, owned as JSON says.
func (c *ciliumCluster) endpoint(name, owners string) {
	c.t.Helper()
	c.Create(c.t, ciliumPath+"/namespaces/shop/"+ciliumEndpoints,
		fmt.Sprintf(`{"apiVersion":"cilium.io/v2","kind":"CiliumEndpoint","metadata":{"name":%q,"ownerReferences":%s}}`, name, owners))
}

func ownedBy(kind, name, uid string) string {
	return fmt.Sprintf(`[{"apiVersion":"v1","kind":%q,"name":%q,"uid":%q}]`, kind, name, uid)
}

// names are those of the objects of a collection.
func (c *ciliumCluster) names(path string) string {
	c.t.Helper()
	var all []string
	if err := each(c.t.Context(), c.objects, path, onlyMetadata, func(o object) { all = append(all, o.Metadata.Name) }); err != nil {
		c.t.Fatal(err)
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// reports are the nodes that report in the policies of a kind.
func (c *ciliumCluster) reports(kind string) string {
	c.t.Helper()
	type policy struct {
		Status struct{ Nodes any }
	}
	var all []string
	err := each(c.t.Context(), c.objects, ciliumPath+"/"+kind, "application/json", func(p policy) {
		nodes, _ := p.Status.Nodes.(map[string]any)
		all = append(all, slices.Collect(maps.Keys(nodes))...)
	})
	if err != nil {
		c.t.Fatal(err)
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// What Cilium leaves behind in Kubernetes is collected where its kinds of objects exist, from when they do until they are
// gone; what belongs to something that lives stays.
//
// mechanism: M3 P1 P2 P3 K7
// lesson: O4
func TestKubernetesGC(t *testing.T) {
	c := startCiliumCluster(t)
	c.namespace("shop")
	c.node("n1")
	for _, part := range []struct {
		name string
		test func(*testing.T)
	}{
		{"CiliumEndpoints", c.testEndpoints}, {"policies", c.testPolicies}, {"addresses", c.testAddresses}, {"DNS", c.testDNS},
		{"leftovers", c.testLeftovers},
	} {
		t.Run(part.name, func(t *testing.T) {
			c.t = t
			part.test(t)
		})
	}
}

func (c *ciliumCluster) testEndpoints(t *testing.T) {
	gc := NewCiliumEndpointGC(c.objects, time.Millisecond)
	const off = "off: the API has no CiliumEndpoints"
	if did := mustRound(t, gc, c.term); did.Detail != off {
		t.Errorf("without the kind: %+v", did)
	}
	c.define(ciliumEndpoints, "CiliumEndpoint", "Namespaced")
	uid := c.pod("shop", "web", "", "{}")
	c.pod("shop", "plain", "", "{}")
	c.endpoint("web", ownedBy("Pod", "web", uid))
	c.endpoint("plain", "[]")
	c.endpoint("gone", ownedBy("Pod", "gone", "1b4e28ba-2fa1-11d2-883f-0016d3cca427"))
	c.endpoint("orphan", "[]")
	c.endpoint("reborn", ownedBy("Pod", "web", "1b4e28ba-2fa1-11d2-883f-0016d3cca427")) // the pod of that name is another one now
	c.endpoint("health", ownedBy("CiliumNode", "n1", "1b4e28ba-2fa1-11d2-883f-0016d3cca427"))
	all := ciliumPath + "/" + ciliumEndpoints
	if did := mustRound(t, gc, c.term); did.Deleted != 0 || c.names(all) != "gone health orphan plain reborn web" {
		t.Errorf("the first round deletes: %+v, %s", did, c.names(all))
	}
	c.Delete(t, ciliumPath+"/namespaces/shop/"+ciliumEndpoints+"/orphan") // made again, it is another one
	c.endpoint("orphan", "[]")
	did := mustRound(t, gc, c.term)
	if got := c.names(all); did.Deleted != 2 || got != "health orphan plain web" {
		t.Errorf("%+v, left: %s", did, got)
	}
	if did = mustRound(t, gc, c.term); did.Deleted != 1 || c.names(all) != "health plain web" {
		t.Errorf("%+v, left: %s", did, c.names(all))
	}
	c.endpoint("late", "[]")
	mustRound(t, gc, c.term)
	mustBegin(t, c.etcd)
	if did, err := gc.round(t.Context(), c.term); !over(err) || did.Deleted != 0 || c.names(all) != "health late plain web" {
		t.Errorf("another one leads: %+v, %v", did, err)
	}
	c.term = mustBegin(t, c.etcd)
	c.undefine(ciliumEndpoints)
	if did := mustRound(t, gc, c.term); did.Detail != off {
		t.Errorf("when the kind is gone: %+v", did)
	}
}

func (c *ciliumCluster) testPolicies(t *testing.T) {
	duty, err := NewPolicyGC(c.objects, 20*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	c.term = mustBegin(t, c.etcd)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- duty.Run(ctx, c.term) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	settled := func(detail string) {
		t.Helper()
		testutil.Eventually(t, testTimeout, func() error {
			if s := duty.Status(); !s.Running || !strings.HasPrefix(s.Detail, detail) || !s.Ready {
				return fmt.Errorf("%+v, want %s", s, detail)
			}
			return nil
		})
	}
	settled("off: the API has no policies of Cilium's")
	c.define("ciliumnetworkpolicies", "CiliumNetworkPolicy", "Namespaced")
	c.define("ciliumclusterwidenetworkpolicies", "CiliumClusterwideNetworkPolicy", "Cluster")
	settled("0 policies with reports, 1 nodes")
	const status = `{"status":{"nodes":{"n1":{"ok":true},"n8":{"ok":true},"n9.example":{"ok":true}},"conditions":[{"type":"Valid"}]}}`
	one, wide := ciliumPath+"/namespaces/shop/ciliumnetworkpolicies", ciliumPath+"/ciliumclusterwidenetworkpolicies"
	c.Create(t, one, `{"apiVersion":"cilium.io/v2","kind":"CiliumNetworkPolicy","metadata":{"name":"web"},"spec":{}}`)
	c.Create(t, wide, `{"apiVersion":"cilium.io/v2","kind":"CiliumClusterwideNetworkPolicy","metadata":{"name":"all"},"spec":{}}`)
	c.Create(t, one, `{"apiVersion":"cilium.io/v2","kind":"CiliumNetworkPolicy","metadata":{"name":"odd"},"spec":{}}`)
	c.Patch(t, one+"/odd/status", `{"status":{"nodes":"none"}}`)
	c.Patch(t, one+"/web/status", status)
	c.Patch(t, wide+"/all/status", status)
	for _, kind := range policyKinds {
		testutil.Eventually(t, testTimeout, func() error {
			if got := c.reports(kind); got != "n1" {
				return fmt.Errorf("%s: reports of %q, want those of n1", kind, got)
			}
			return nil
		})
	}
	testutil.Eventually(t, testTimeout, func() error {
		if s := duty.Status(); s.Deleted != 4 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	c.undefine("ciliumnetworkpolicies")
	settled("1 policies with reports, 1 nodes")
	c.undefine("ciliumclusterwidenetworkpolicies")
	settled("off: ")
	before := duty.Status()
	testutil.Eventually(t, testTimeout, func() error {
		if s := duty.Status(); s.Runs < before.Runs+3 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	if s := duty.Status(); s.Errors != before.Errors || s.Deleted != 4 {
		t.Errorf("without the kinds: %+v, before %+v", s, before)
	}
}

func (c *ciliumCluster) testAddresses(t *testing.T) {
	term := mustBegin(t, c.etcd)
	c.etcd.Put(t, announced+"10.1.0.1", announcement("10.1.0.1", "172.18.1.1", "cilium-global:default:n1:7", "shop/web"))
	c.etcd.Put(t, announced+"10.1.0.2", announcement("10.1.0.2", "172.18.1.1", "cilium-global:default:n1:8", "shop/gone"))
	c.etcd.Put(t, announced+"10.1.0.3", announcement("10.1.0.3", "172.18.1.9", "cilium-global:default:n9:8", "shop/web"))
	c.etcd.Put(t, announced+"10.1.0.4", announcement("10.1.0.4", "172.18.1.1", "", ""))
	putLeased(t, term, announced+"10.1.0.5", announcement("10.1.0.5", "172.18.1.1", "cilium-global:default:n1:9", "shop/gone"), time.Hour)
	gc := NewAddressGC(AddressGCConfig{ClusterName: "east", Interval: time.Millisecond, Objects: c.objects})
	mustRound(t, gc, term)
	did := mustRound(t, gc, term)
	if got := announcedIn(t, term); got != "10.1.0.1 10.1.0.4 10.1.0.5" {
		t.Errorf("%+v, left: %s", did, got)
	}
}

func (c *ciliumCluster) testDNS(t *testing.T) {
	term := mustBegin(t, c.etcd)
	const label = `{"k8s-app":"kube-dns"}`
	c.pod("kube-system", "coredns-a", "10.1.0.53", label)
	c.pod("kube-system", "coredns-b", "10.1.0.54", label)
	c.pod("kube-system", "coredns-c", "", label) // not running yet
	c.pod("kube-system", "other", "10.1.0.55", "{}")
	c.etcd.DeletePrefix(t, announced)
	w := NewDNSWatch(c.objects, time.Millisecond)
	if did := mustRound(t, w, term); len(did.Problems) != 0 || did.Detail != "off: no agent announces anything" {
		t.Errorf("without agents: %+v", did)
	}
	c.etcd.Put(t, announced+"10.1.0.53", announcement("10.1.0.53", "172.18.1.1", "", "kube-system/coredns-a"))
	did := mustRound(t, w, term)
	if len(did.Problems) != 1 || !strings.HasPrefix(did.Problems[0], "pod kube-system/coredns-b (10.1.0.54) on node n1 is not announced by any agent") {
		t.Errorf("%+v", did)
	}
	c.etcd.Put(t, announced+"10.1.0.54", announcement("10.1.0.54", "172.18.1.1", "", "kube-system/coredns-b"))
	if did = mustRound(t, w, term); len(did.Problems) != 0 || did.Detail != "2 pods of kube-dns, 0 that no agent announces" {
		t.Errorf("%+v", did)
	}
}

func (c *ciliumCluster) testLeftovers(t *testing.T) {
	term := mustBegin(t, c.etcd)
	c.define(ciliumEndpoints, "CiliumEndpoint", "Namespaced")
	c.define("ciliumnetworkpolicies", "CiliumNetworkPolicy", "Namespaced")
	c.endpoint("gone", "[]")
	one := ciliumPath + "/namespaces/shop/ciliumnetworkpolicies"
	c.Create(t, one, `{"apiVersion":"cilium.io/v2","kind":"CiliumNetworkPolicy","metadata":{"name":"web"},"spec":{}}`)
	c.Patch(t, one+"/web/status", `{"status":{"nodes":{"n1":{},"n9":{}}}}`)
	c.etcd.Put(t, announced+"10.1.0.9", announcement("10.1.0.9", "172.18.1.1", "", "shop/gone"))
	identities{c.etcd, t}.bind(65540, labelsOf("unused").String())
	found, err := FindLeftovers(t.Context(), term.client, LeftoverConfig{
		Identities: testIdentityGC(t), Addresses: AddressGCConfig{ClusterName: "east", Objects: c.objects},
	})
	want := []Leftover{
		{"identity", "65540", "no node uses it: " + labelsOf("unused").String()},
		{"address", "10.1.0.9", "pod shop/gone is gone"},
		{"CiliumEndpoint", "shop/gone", "its pod is gone"},
		{"report", "ciliumnetworkpolicies/shop/web/n9", "the node is gone"},
	}
	if err != nil || !slices.Equal(found, want) {
		t.Errorf("%v, %v\nwant %v", found, err, want)
	}
}
