// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/service"
)

// Many services of an API server that has too much to do, forgets, repeats itself and restarts, while services and their
// backends come and go: in the end etcd has what the server has.
//
// mechanism: L2 L3
// lesson: O5
func TestKubernetesFaults(t *testing.T) {
	many, steps := 60, 5
	long := os.Getenv("WEFT_TEST_FAULTS") != ""
	if long {
		many, steps = 5000, 40
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	c := newCluster(t)
	proxy := testutil.StartKubeProxy(t, c.kube)
	c.kube.WriteKubeconfig(t, c.kubeconfig, proxy.Addr, c.kube.ServiceAccountToken(t, "kube-system", "weft-operator"))
	c.namespace("shop")
	c.kube.FillServices(t, "shop", many, 10)
	want := make(map[string]int)
	for i := range many {
		want[fmt.Sprintf("shop/service-%d", i)] = 10
	}
	startReplica(t, "replica", c.etcd.Endpoint(), func(cfg *Config) {
		c.kubernetes(cfg)
		cfg.Election = Election{By: ElectNone}
	})
	c.wants(want)

	faults := []testutil.KubeFault{
		testutil.KubeTooMany, testutil.KubeBroken, testutil.KubeSlow, testutil.KubeExpired, testutil.KubeBookmark, testutil.KubeRepeat, testutil.KubeCut,
	}
	for round, fault := range faults {
		proxy.Misbehave(chance(random.Uint64(), fault))
		switch {
		case round == 1:
			c.etcd.Wipe(t)
		case long:
			c.kube.Restart(t)
		}
		for i := range steps {
			if c.change(random, want); i%5 == 0 {
				proxy.EndWatches()
			}
		}
		testutil.Eventually(t, testTimeout, func() error {
			if n := proxy.Done()[fault]; n < 2 {
				proxy.EndWatches()
				return fmt.Errorf("%s: %d times", fault, n)
			}
			return nil
		})
		if round%2 == 0 {
			c.kubeEtcd.Compact(t)
		}
		c.wants(want) // although one request in two fares ill
		t.Logf("%s: %d requests", fault, proxy.Done()[fault])
	}
	proxy.Misbehave(nil)
	c.change(random, want)
	c.wants(want)
	c.testEndpoints(proxy)
}

// testEndpoints: where the server has no EndpointSlices, backends are those of Endpoints, but for what the components of
// Kubernetes elected their leaders by.
func (c *cluster) testEndpoints(proxy *testutil.KubeProxy) {
	c.t.Helper()
	proxy.Misbehave(func(r *http.Request) testutil.KubeFault {
		if strings.HasPrefix(r.URL.Path, "/apis/discovery.k8s.io") {
			return testutil.KubeUnknown
		}
		return testutil.KubeWell
	})
	c.namespace("old")
	endpoints := func(namespace, name string, addresses ...string) {
		var all []string
		for _, a := range addresses {
			all = append(all, fmt.Sprintf(`{"ip": %q}`, a))
		}
		c.kube.Create(c.t, "/api/v1/namespaces/"+namespace+"/endpoints", fmt.Sprintf(
			`{"metadata": {"name": %q}, "subsets": [{"addresses": [%s], "notReadyAddresses": [{"ip": "10.9.9.9"}], "ports": [{"name": "http", "port": 8080}]}]}`,
			name, strings.Join(all, ",")))
	}
	c.service("old", "web", global)
	endpoints("old", "web", "10.9.0.1", "10.9.0.2")
	c.service("old", "kube-scheduler", global)
	endpoints("old", "kube-scheduler", "10.9.0.3")
	other := &cluster{t: c.t, etcd: testutil.StartEtcd(c.t), kube: c.kube, kubeEtcd: c.kubeEtcd, kubeconfig: c.kubeconfig}
	startReplica(c.t, "without-slices", other.etcd.Endpoint(), func(cfg *Config) {
		other.kubernetes(cfg)
		cfg.Election = Election{By: ElectNone}
	})
	old := func(web int) {
		c.t.Helper()
		testutil.Eventually(c.t, testTimeout, func() error {
			got := make(map[string]int)
			for key, value := range list(c.t, other.etcd, servicesOfEast+"old/") {
				s, err := service.Parse([]byte(value))
				if err != nil {
					return err
				}
				got[key] = len(s.Backends)
			}
			if want := map[string]int{"web": web, "kube-scheduler": 0}; !maps.Equal(got, want) {
				return fmt.Errorf("%v, want %v", got, want)
			}
			return nil
		})
	}
	old(2)
	c.kube.Delete(c.t, "/api/v1/namespaces/old/endpoints/web")
	old(0)
	endpoints("old", "web", "10.9.0.1")
	old(1)
}

// chance has a fault befall every second request, on average.
func chance(seed uint64, fault testutil.KubeFault) func(*http.Request) testutil.KubeFault {
	var mu sync.Mutex
	random := rand.New(rand.NewPCG(seed, 0))
	return func(*http.Request) testutil.KubeFault {
		mu.Lock()
		defer mu.Unlock()
		if random.IntN(2) == 0 {
			return testutil.KubeWell
		}
		return fault
	}
}

// change makes, changes or deletes a service or its backends, and notes what is to be published then.
func (c *cluster) change(random *rand.Rand, want map[string]int) {
	c.t.Helper()
	name := fmt.Sprintf("extra-%d", random.IntN(4))
	key, path := "shop/"+name, fmt.Sprintf(servicesPath, "shop")+"/"+name
	there := c.kube.Exists(path) == nil
	switch backends := random.IntN(150); random.IntN(4) {
	case 0:
		if !there {
			c.slices("shop", name, backends)
			c.service("shop", name, global)
			want[key] = backends
		}
	case 1:
		if there {
			c.kube.Delete(c.t, path)
			delete(want, key)
		}
	case 2:
		if _, published := want[key]; published {
			c.slices("shop", name, backends)
			want[key] = backends
		}
	case 3:
		if _, published := want[key]; there && published {
			c.kube.Patch(c.t, path, `{"metadata": {"annotations": {"service.cilium.io/shared": "false"}}}`)
			delete(want, key)
		}
	}
}
