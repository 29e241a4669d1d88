// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"encoding/base64"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
	"github.com/weftmesh/weft/service"
	"github.com/weftmesh/weft/source"
)

const slicesOfEast = service.SlicePrefix + "/east/"

// slicing is a change of a replica's configuration: it publishes services in slices, or does not any more.
func slicing(t testing.TB, from source.Source, withdrawn bool) func(*Config) {
	t.Helper()
	form, err := NewServiceSlices()
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewServices(ServicesConfig{ClusterName: "east", ClusterID: 1, Source: from, Form: form, Withdrawn: withdrawn})
	if err != nil {
		t.Fatal(err)
	}
	return func(c *Config) {
		c.Election = Election{By: ElectNone}
		c.Duties = append(c.Duties, s)
	}
}

// offers waits until exactly these slices are in etcd, each as a reader understands it: its service and its addresses.
func offers(t *testing.T, etcd *testutil.Etcd, want map[string]string) {
	t.Helper()
	reader, err := service.NewSliceReader()
	if err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, testTimeout, func() error {
		got := make(map[string]string)
		for key, value := range list(t, etcd, slicesOfEast) {
			o, err := reader.Parse([]byte(value))
			if err == nil {
				err = o.Validate(key, "east", 1)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
			text := []string{o.Service.Name}
			for _, b := range o.Backends {
				for _, addr := range b.Addrs {
					text = append(text, fmt.Sprintf("%s:%d", addr, b.Ports[0].Port))
				}
			}
			got[key] = strings.Join(text, " ")
		}
		if diff := cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("slices (-want +got)\n%s", diff)
		}
		return nil
	})
}

// The backends of a service in slices, through all that becomes of it, as a reader understands them; the value of a slice is
// byte for byte that of a real cluster.
//
// mechanism: L1 L4
// lesson: O6
func TestSlices(t *testing.T) {
	etcd, from := testutil.StartEtcd(t), newFakeSource()
	etcd.Put(t, slicesOfEast+"shop/left", "of an earlier life")
	etcd.Put(t, service.SlicePrefix+"/west/shop/web-1", "west")
	web, db := service.Name{Namespace: "shop", Name: "web"}, service.Name{Namespace: "shop", Name: "db"}
	from.global("web", nil)
	first := backend("10.1.1.10")
	first.Node = "east-n1"
	from.PutBackends(web, "web-abcde", []source.Backend{first})
	close(from.ready)
	r := startReplica(t, "replica", etcd.Endpoint(), slicing(t, from, false))
	offers(t, etcd, map[string]string{"shop/web-abcde": "web 10.1.1.10:8080"})
	var recorded string
	for _, kv := range golden.Lines[struct {
		Key         string
		ValueBase64 string `json:"value_base64"`
	}](t, "kvstore-state-east.jsonl") {
		if kv.Key == slicesOfEast+"shop/web-abcde" {
			recorded = kv.ValueBase64
		}
	}
	if got := base64.StdEncoding.EncodeToString([]byte(list(t, etcd, slicesOfEast)["shop/web-abcde"])); recorded == "" || got != recorded {
		t.Errorf("%s, recorded is\n%s", got, recorded)
	}

	// A second slice; one that has nothing to offer; one that goes over to another service.
	from.PutBackends(web, "web-2", []source.Backend{backend("10.1.2.10")})
	gone := backend("10.1.3.10")
	gone.Ready, gone.Serving = false, false
	from.PutBackends(web, "web-3", []source.Backend{gone})
	offers(t, etcd, map[string]string{"shop/web-abcde": "web 10.1.1.10:8080", "shop/web-2": "web 10.1.2.10:8080"})
	from.global("db", nil)
	from.RemoveBackends(web, "web-2")
	from.PutBackends(db, "web-2", []source.Backend{backend("10.1.2.10")})
	from.RemoveBackends(web, "web-3") // so that web is told of after db
	offers(t, etcd, map[string]string{"shop/web-abcde": "web 10.1.1.10:8080", "shop/web-2": "db 10.1.2.10:8080"})

	// What is no slice of Kubernetes, and is in two families and at other ports, comes in several; then in fewer.
	other, other6 := backend("10.1.1.12"), backend("fd00::12")
	other.Ports = []source.Port{{Name: "http", Protocol: service.TCP, Port: 9090}}
	from.PutBackends(web, "web-abcde", []source.Backend{first, other, other6, backend("10.1.1.13")})
	offers(t, etcd, map[string]string{
		"shop/web-abcde": "web 10.1.1.10:8080 10.1.1.13:8080", "shop/web-abcde.2": "web 10.1.1.12:9090", "shop/web-abcde.3": "web fd00::12:8080",
		"shop/web-2": "db 10.1.2.10:8080",
	})

	// Not shared any more, and shared again; then no service any more.
	from.PutService(source.Service{Name: web, Annotations: map[string]string{"service.cilium.io/global": "true", "service.cilium.io/shared": "false"}})
	offers(t, etcd, map[string]string{"shop/web-2": "db 10.1.2.10:8080"})
	from.global("web", nil)
	from.PutBackends(web, "web-abcde", []source.Backend{first})
	from.RemoveService(db)
	offers(t, etcd, map[string]string{"shop/web-abcde": "web 10.1.1.10:8080"})
	canary := canaryKey("east", service.SlicePrefix)
	if _, ok := etcd.Get(t, canary); !ok {
		t.Error("the slices are not declared complete")
	}

	// Switched off they stay for a while, and nothing is missing.
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	waiting := slicing(t, from, true)
	r = startReplica(t, "replica", etcd.Endpoint(), func(c *Config) {
		waiting(c)
		c.Duties[0].(*Services).cfg.WithdrawAfter = time.Hour
	})
	testutil.Eventually(t, testTimeout, func() error {
		if s := r.Status().Duties[0]; !s.Ready || s.Detail != "off; what is left of it goes after 1h0m0s" {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	offers(t, etcd, map[string]string{"shop/web-abcde": "web 10.1.1.10:8080"})

	// Then they go, and what declared them complete with them; those of others stay.
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	off := startReplica(t, "replica", etcd.Endpoint(), slicing(t, from, true))
	offers(t, etcd, map[string]string{})
	testutil.Eventually(t, testTimeout, func() error {
		if _, ok := etcd.Get(t, canary); ok || off.Status().Duties[0].Detail != "off" {
			return fmt.Errorf("canary %v, %+v", ok, off.Status().Duties[0])
		}
		return nil
	})
	if got, _ := etcd.Get(t, service.SlicePrefix+"/west/shop/web-1"); got != "west" {
		t.Errorf("the slice of another cluster is %q", got)
	}
}

// A slice has at most as many endpoints as one of Kubernetes, so that readers take it.
func TestSlicesAreBounded(t *testing.T) {
	form, err := NewServiceSlices()
	if err != nil {
		t.Fatal(err)
	}
	var many []source.Backend
	for i := range 2*largestSlice + 1 {
		b := backend(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String())
		b.Hostname, b.Node, b.Zone = strings.Repeat("h", 63), strings.Repeat("n", 253), strings.Repeat("z", 63)
		many = append(many, b)
	}
	s := &source.Service{Name: service.Name{Namespace: "shop", Name: "web"}, Pieces: []source.Piece{{Name: "web", Backends: many}}}
	values, err := form.values(s, "east", 1)
	if err != nil {
		t.Fatal(err)
	}
	reader, err := service.NewSliceReader()
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for i, key := range []string{"shop/web", "shop/web.2", "shop/web.3"} {
		if len(values) != 3 || values[i].key != key {
			t.Fatalf("%d slices", len(values))
		}
		o, err := reader.Parse(values[i].value)
		if err != nil {
			t.Fatal(err)
		}
		n += len(o.Backends[0].Addrs)
	}
	if n != len(many) {
		t.Errorf("%d of %d backends", n, len(many))
	}
}
