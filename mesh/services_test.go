// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/service"
)

var webName = service.Name{Namespace: "shop", Name: "web"}

// webFrontend is that of the local service of [putWeb].
var webFrontend = service.Frontend{Addr: netip.MustParseAddr("10.96.1.10"), Port: 80, Protocol: service.TCP}

// putWeb makes shop/web a local service that is global, with one backend unless that is empty.
func putWeb(table *service.Table, backend string) {
	l := service.Local{
		Service: webName, Settings: service.Settings{Global: true}, Addrs: []netip.Addr{webFrontend.Addr},
		Ports: []service.NamedPort{{Name: "http", Protocol: service.TCP, Port: 80}},
	}
	if backend != "" {
		l.Backends = []service.Subset{{
			Ports: []service.NamedPort{{Name: "http", Protocol: service.TCP, Port: 8080}}, Addrs: []netip.Addr{netip.MustParseAddr(backend)},
		}}
	}
	table.PutLocal(l)
}

func (c *cluster) web(backends ...string) {
	c.t.Helper()
	var texts []string
	for _, b := range slices.Sorted(slices.Values(backends)) {
		texts = append(texts, fmt.Sprintf(`%q:{"http":{"Protocol":"TCP","Port":8080}}`, b))
	}
	c.etcd.Put(c.t, "cilium/state/services/v1/"+c.name+"/shop/web", fmt.Sprintf(
		`{"cluster":%q,"namespace":"shop","name":"web","frontends":{},"backends":{%s},"includeExternal":true,"shared":true,"clusterID":%d}`,
		c.name, strings.Join(texts, ","), c.id))
}

// awaitBackends waits until webFrontend leads to these.
func (w *world) awaitBackends(want ...string) {
	w.t.Helper()
	testutil.Eventually(w.t, soon, func() error {
		s, _ := w.cfg.Services.Select(webFrontend)
		var got []string
		for _, b := range s.Backends {
			got = append(got, b.Addr.String())
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("backends %v, want %v", got, want)
		}
		return nil
	})
}

// What the table of services lacks is known to be gone once every cluster has listed all that it has, and not before: a canary
// that is missing tells that a cluster is still writing.
//
// mechanism: H8
func TestServicesListedWaitsForEveryCluster(t *testing.T) {
	t.Parallel()
	west, south := newWest(t, 1), newCluster(t, "south", 3)
	const canary = "cilium/synced/south/cilium/state/services/v1"
	south.etcd.Delete(t, canary)
	west.web("10.2.1.10")
	south.web("10.3.1.10")
	w := newWorld(t, withConfig(west), withConfig(south))
	putWeb(w.cfg.Services, "")
	w.awaitState("west", Ready)
	w.awaitBackends("10.2.1.10")
	w.never("services are listed while south is still writing", w.ServicesListed)
	south.etcd.Put(t, canary, "2026-11-20T22:37:21Z")
	testutil.Eventually(t, soon, func() error {
		if !w.ServicesListed() {
			return errors.New("not all services are listed")
		}
		return nil
	})
	w.awaitBackends("10.2.1.10", "10.3.1.10")
}

// What our own cluster's operator publishes is a local service, never an offer to ourselves; what a remote publishes under our
// name is refused.
//
// mechanism: H1 H2 H8
func TestOwnServicesAreLocal(t *testing.T) {
	t.Parallel()
	own := &cluster{t: t, etcd: testutil.StartEtcd(t), name: "here", id: 9}
	own.etcd.Put(t, "cilium/state/services/v1/here/shop/web", `{"cluster":"here","namespace":"shop","name":"web","frontends":{"10.96.1.10":{"http":{"Protocol":"TCP","Port":80}}},`+
		`"backends":{"10.9.1.1":{"http":{"Protocol":"TCP","Port":8080}}},"labels":{},"selector":{},"includeExternal":true,"shared":true,"clusterID":9}`)
	west := newWest(t, 1)
	west.web("10.2.1.10")
	west.etcd.Put(t, "cilium/state/services/v1/west/shop/db", `{"cluster":"here","namespace":"shop","name":"db","clusterID":9,"shared":true}`)
	w := newWorld(t, withConfig(west), func(c *Config) { c.Own = &kvstore.Config{Endpoints: []string{own.etcd.Endpoint()}} })
	w.awaitState("west", Ready)
	w.awaitState("here", Ready)
	w.awaitBackends("10.2.1.10", "10.9.1.1")
	if !w.ServicesListed() {
		t.Error("not all services are listed")
	}
	if n, locals := w.cfg.Services.Len(), w.cfg.Services.Locals(); n != 1 || locals != 1 {
		t.Errorf("%d offers and %d local services, want one of each", n, locals)
	}
	s, _ := w.remote("west")
	if s.Rejected["service/mismatch"] != 1 {
		t.Errorf("rejected: %v", s.Rejected)
	}
	own.etcd.Delete(t, "cilium/state/services/v1/here/shop/web")
	testutil.Eventually(t, soon, func() error {
		if n := w.cfg.Services.Locals(); n != 0 {
			return fmt.Errorf("%d local services", n)
		}
		return nil
	})
}

// A cluster that says that its services come in slices is read so; when it changes its mind, what came in one form stays until
// all has come in the other.
func TestSlices(t *testing.T) {
	t.Parallel()
	const key = "cilium/state/endpointslices/v1/east/shop/web-abcde"
	var slice []byte
	for _, kv := range golden.Lines[struct {
		Key         string
		ValueBase64 string `json:"value_base64"`
	}](t, "kvstore-state-east.jsonl") {
		if kv.Key == key {
			slice, _ = base64.StdEncoding.DecodeString(kv.ValueBase64)
		}
	}
	for _, test := range []struct {
		mode   string
		prefer bool
		sliced bool
	}{
		{"", true, false}, {"services-and-endpointslices", false, false}, {"services-and-endpointslices", true, true}, {"endpointslices-only", false, true},
	} {
		t.Run(fmt.Sprintf("%s %v", test.mode, test.prefer), func(t *testing.T) {
			t.Parallel()
			east := newCluster(t, "east", 1)
			mode := func(mode string) {
				east.config(fmt.Sprintf(`{"id":1,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255,"endpointSlicesExportMode":%q}}`, mode))
			}
			mode(test.mode)
			east.web("10.1.9.9")
			east.etcd.Put(t, key, string(slice))
			w := newWorld(t, withConfig(east), func(c *Config) { c.PreferSlices = test.prefer })
			putWeb(w.cfg.Services, "")
			if !test.sliced {
				w.awaitState("east", Ready)
				w.awaitBackends("10.1.9.9")
				return
			}
			w.awaitState("east", Syncing)
			if w.ServicesListed() {
				t.Error("services are listed before their canary")
			}
			east.etcd.Put(t, "cilium/synced/east/cilium/state/endpointslices/v1", "2026-11-20T22:37:21Z")
			w.awaitState("east", Ready)
			w.awaitBackends("10.1.1.10")
			if !test.prefer {
				mode("")
				w.awaitBackends("10.1.9.9")
				mode("endpointslices-only")
				w.awaitBackends("10.1.1.10")
			}
			if s := w.awaitState("east", Ready); s.Services != 1 || w.cfg.Services.Len() != 1 {
				t.Errorf("%d services, %d offers", s.Services, w.cfg.Services.Len())
			}
			east.etcd.Put(t, key, "what is no slice")
			w.await("east", "a refusal", func(s RemoteStatus) bool { return s.Rejected["service/malformed"] == 1 })
			w.awaitBackends("10.1.1.10")
			east.etcd.Delete(t, key)
			w.awaitBackends()
			w.remove("east")
			w.awaitGone("east")
		})
	}
}

// A cluster that says that a service is not shared takes back what it offered of it.
//
// mechanism: H4
func TestUnsharedServiceIsTakenBack(t *testing.T) {
	m, fs := newFollowed(t)
	putWeb(m.cfg.Services, "")
	for _, shared := range []bool{true, false, true} {
		value := strings.Replace(largeService("web", 1), `"shared":true`, fmt.Sprintf(`"shared":%v`, shared), 1)
		fs.services.apply(created("shop/web", value))
		if s, _ := m.cfg.Services.Select(webFrontend); len(s.Backends) > 0 != shared {
			t.Errorf("shared %v: backends %v", shared, s.Backends)
		}
	}
}

// largeService is the value of a service with so many backends, and more by name.
func largeService(name string, n int, more ...string) string {
	all := more
	for i := range n {
		all = append(all, fmt.Sprintf("10.2.%d.%d", 100+i/250, i%250))
	}
	slices.Sort(all)
	var texts []string
	for _, b := range all {
		texts = append(texts, fmt.Sprintf(`%q:{"http":{"Protocol":"TCP","Port":8080}}`, b))
	}
	return fmt.Sprintf(
		`{"cluster":"west","namespace":"shop","name":%q,"frontends":{},"backends":{%s},"includeExternal":true,"shared":true,"clusterID":2}`,
		name, strings.Join(texts, ","))
}

// A large service is read where it differs from what it was, and held to the limits all the same: a backend that may not be
// used is left out whether it comes with the first value or later, and one that may no longer be goes.
func TestLargeServiceIsRead(t *testing.T) {
	m, fs := newFollowed(t)
	d := fs.services.decode.(*services)
	apply := func(value string, refused bool) {
		t.Helper()
		before, _ := fs.services.rejects.report()
		fs.services.apply(created("shop/web", value))
		if after, _ := fs.services.rejects.report(); !maps.Equal(before, after) != refused {
			t.Fatalf("refused %v after %v, want a refusal: %v", after, before, refused)
		}
	}
	want := func(n int, kept bool) {
		t.Helper()
		o, _ := m.cfg.Services.Offer("west", webName, "")
		if o == nil || o.Len() != n {
			t.Fatalf("the offer is %v, want %d backends", o, n)
		}
		if k := d.known["shop/web"]; (k.previous != nil) != kept || d.kept != k.previous.Size() {
			t.Fatalf("kept: %d bytes, %d in all, want some: %v", k.previous.Size(), d.kept, kept)
		}
	}
	apply(largeService("web", 1000), false)
	want(1000, true)
	previous := d.known["shop/web"].previous
	apply(largeService("web", 1000, "10.2.200.1"), false)
	want(1001, true)
	if d.known["shop/web"].previous != previous {
		t.Error("the second value was decoded whole")
	}
	apply(largeService("web", 1000, "10.2.200.1", "127.0.0.1"), true)
	want(1001, false)
	apply(largeService("web", 1000, "10.2.200.2"), false)
	want(1001, true)
	apply(largeService("other", 1000), true) // not what its key says
	want(1001, false)
	apply(largeService("web", 999), false)
	want(999, true)
	fs.services.apply([]kvstore.Event{{Kind: kvstore.Deleted, Key: []byte("shop/web"), Revision: 1}})
	if d.kept != 0 || m.cfg.Services.Len() != 0 {
		t.Errorf("%d bytes are kept of %d offers, want nothing", d.kept, m.cfg.Services.Len())
	}
}

// Of many large services, so much is kept and no more.
func TestLargeServicesAreBounded(t *testing.T) {
	m, fs := newFollowed(t)
	d := fs.services.decode.(*services)
	const n = 40
	for i := range n {
		name := fmt.Sprint("web-", i)
		fs.services.apply(created("shop/"+name, largeService(name, 10_000)))
	}
	kept := 0
	for _, k := range d.known {
		kept += k.previous.Size()
	}
	if kept != d.kept || kept > mostKept || kept < mostKept/2 {
		t.Errorf("%d bytes are kept, counted as %d, want up to %d", kept, d.kept, mostKept)
	}
	if got := m.cfg.Services.Len(); got != n {
		t.Errorf("%d services, want %d", got, n)
	}
}

// The backends of a cluster that is away for long are given up where there are others, never where there are none, and are
// back with the cluster.
func TestLostClusterGivesItsBackendsUp(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	west.web("10.2.1.10")
	w := newWorld(t, withConfig(west), func(c *Config) { c.LoseAfter = 200 * time.Millisecond })
	putWeb(w.cfg.Services, "10.9.1.1")
	w.awaitState("west", Ready)
	w.awaitBackends("10.2.1.10", "10.9.1.1")
	for range 2 {
		west.etcd.Stop(t)
		w.await("west", "the loss", func(s RemoteStatus) bool { return s.ServicesLost })
		w.awaitBackends("10.9.1.1")
		putWeb(w.cfg.Services, "")
		w.awaitBackends("10.2.1.10")
		putWeb(w.cfg.Services, "10.9.1.1")
		w.awaitBackends("10.9.1.1")
		west.etcd.Restart(t)
		w.awaitState("west", Ready)
		w.awaitBackends("10.2.1.10", "10.9.1.1")
		if s, _ := w.remote("west"); s.ServicesLost {
			t.Error("still lost")
		}
	}
	// Removing the config of a lost cluster is the end of it: under its name comes another one.
	west.etcd.Stop(t)
	w.await("west", "the loss", func(s RemoteStatus) bool { return s.ServicesLost })
	w.remove("west")
	w.awaitGone("west")
	w.awaitBackends("10.9.1.1")
	west.etcd.Restart(t)
	west.etcd.WriteConfig(t, w.file("west"))
	w.awaitBackends("10.2.1.10", "10.9.1.1")
}

// A cluster without a heartbeat is lost, too: its data is followed, but nobody vouches for it.
func TestLostHeartbeatGivesBackendsUp(t *testing.T) {
	t.Parallel()
	west := newWest(t, 1)
	west.web("10.2.1.10")
	west.etcd.Put(t, "cilium/.heartbeat", "2026-11-20T22:51:44Z")
	w := newWorld(t, withConfig(west), func(c *Config) {
		c.LoseAfter = 50 * time.Millisecond
		c.Tune = func(k *kvstore.Config) { k.HeartbeatTimeout = 500 * time.Millisecond }
	})
	putWeb(w.cfg.Services, "10.9.1.1")
	w.await("west", "the loss", func(s RemoteStatus) bool { return s.ServicesLost })
	w.awaitBackends("10.9.1.1")
	testutil.Eventually(t, soon, func() error { // each beat counts for half a second
		west.etcd.Put(t, "cilium/.heartbeat", time.Now().String())
		if s, _ := w.cfg.Services.Select(webFrontend); len(s.Backends) != 2 {
			return fmt.Errorf("backends %v", s.Backends)
		}
		return nil
	})
}

// A cluster that comes back in time is never lost, and none is after the end of its life.
func TestLossNotReached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := testConfig(t)
		cfg.Dir, cfg.LoseAfter = "/nowhere", time.Minute
		m, err := New(cfg)
		must(t, err)
		r := newRemote(m, "west")
		doubt := func(now bool) (lost bool) {
			synctest.Wait()
			r.mu.Lock()
			defer r.mu.Unlock()
			r.doubt(now)
			return r.doubts.lost
		}
		for range 3 {
			doubt(true)
			time.Sleep(59 * time.Second)
			if doubt(true) {
				t.Fatal("lost too early")
			}
			doubt(false)
			time.Sleep(2 * time.Second)
		}
		doubt(true)
		time.Sleep(61 * time.Second)
		if !doubt(true) || doubt(false) {
			t.Error("not lost, or not back")
		}
		doubt(true)
		r.end()
		time.Sleep(time.Hour)
		if doubt(true) {
			t.Error("lost after the end")
		}
	})
}
