// SPDX-License-Identifier: Apache-2.0

package service

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var sameAddr = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })

func addrs(texts ...string) []netip.Addr {
	var all []netip.Addr
	for _, text := range texts {
		all = append(all, netip.MustParseAddr(text))
	}
	return all
}

func backends(texts ...string) []Backend {
	var all []Backend
	for _, text := range texts {
		a := netip.MustParseAddrPort(text)
		all = append(all, Backend{a.Addr(), a.Port()})
	}
	return all
}

func frontend(text string, p Protocol) Frontend {
	a := netip.MustParseAddrPort(text)
	return Frontend{a.Addr(), a.Port(), p}
}

var web = Name{"shop", "web"}

func webOffer(cluster string, id uint32, texts ...string) Offer {
	o := Offer{Service: web, Cluster: cluster, ClusterID: id, Shared: true, IncludeExternal: true}
	if len(texts) > 0 {
		o.Backends = []Subset{{Ports: []NamedPort{{"http", TCP, 8080}}, Addrs: addrs(texts...)}}
	}
	return o
}

func webLocal(s Settings, texts ...string) Local {
	l := Local{
		Service: web, Source: Kubernetes, Settings: s, Addrs: addrs("10.96.1.10"), Ports: []NamedPort{{"http", TCP, 80}},
	}
	if len(texts) > 0 {
		l.Backends = []Subset{{Ports: []NamedPort{{"http", TCP, 8080}}, Addrs: addrs(texts...)}}
	}
	return l
}

var webFront = frontend("10.96.1.10:80", TCP)

func wantBackends(t *testing.T, table *Table, at Frontend, texts ...string) {
	t.Helper()
	s, ok := table.Select(at)
	if !ok {
		t.Fatalf("nobody has the frontend %s", at)
	}
	if diff := cmp.Diff(backends(texts...), s.Backends, sameAddr); diff != "" {
		t.Errorf("backends of %s (-want +got):\n%s", at, diff)
	}
}

// mechanism: H1 H3 H4 H6
func TestOffersAreUsedWhileALocalServiceWantsThem(t *testing.T) {
	table := NewTable()
	table.Put(webOffer("west", 2, "10.2.1.10", "10.2.1.11"))
	if all := table.Selections(); len(all) != 0 {
		t.Fatalf("without a local service: %v", all)
	}
	table.PutLocal(webLocal(Settings{}, "10.1.1.10"))
	wantBackends(t, table, webFront, "10.1.1.10:8080")

	table.PutLocal(webLocal(Settings{Global: true, Shared: true}, "10.1.1.10"))
	wantBackends(t, table, webFront, "10.1.1.10:8080", "10.2.1.10:8080", "10.2.1.11:8080")

	// What a cluster offers replaces what it offered before, whole.
	table.Put(webOffer("west", 2, "10.2.1.12"))
	table.Put(webOffer("north", 3, "10.3.1.10"))
	wantBackends(t, table, webFront, "10.1.1.10:8080", "10.2.1.12:8080", "10.3.1.10:8080")

	table.Delete("west", web, "")
	table.Delete("west", web, "")
	wantBackends(t, table, webFront, "10.1.1.10:8080", "10.3.1.10:8080")

	// What it does not share any more, it takes back.
	unshared := webOffer("west", 2, "10.2.1.12")
	unshared.Shared = false
	table.Put(unshared)
	wantBackends(t, table, webFront, "10.1.1.10:8080", "10.3.1.10:8080")
	table.Put(webOffer("west", 2, "10.2.1.12"))
	wantBackends(t, table, webFront, "10.1.1.10:8080", "10.2.1.12:8080", "10.3.1.10:8080")
	table.Delete("west", web, "")

	// A service that is not shared by us is fed by others all the same.
	table.PutLocal(webLocal(Settings{Global: true}, "10.1.1.10"))
	wantBackends(t, table, webFront, "10.1.1.10:8080", "10.3.1.10:8080")

	table.DeleteLocal(Kubernetes, web)
	if _, ok := table.Select(webFront); ok || table.Len() != 1 {
		t.Errorf("after the local service: frontend %v, %d offers", ok, table.Len())
	}
	table.PutLocal(webLocal(Settings{Global: true}))
	wantBackends(t, table, webFront, "10.3.1.10:8080")
}

func TestAffinity(t *testing.T) {
	draining := func(o Offer) Offer {
		for i := range o.Backends {
			o.Backends[i].State = Draining
		}
		return o
	}
	const local, remote = "10.1.1.10", "10.2.1.10"
	for _, test := range []struct {
		name     string
		affinity Affinity
		offer    Offer
		local    []string
		lost     bool
		want     []string
		why      Why
	}{
		{"none", AffinityNone, webOffer("west", 2, remote), []string{local}, false, []string{local, remote}, Alike},
		{"local", AffinityLocal, webOffer("west", 2, remote), []string{local}, false, []string{local}, ByAffinity},
		{"local, none there", AffinityLocal, webOffer("west", 2, remote), nil, false, []string{remote}, FallenBack},
		{"remote", AffinityRemote, webOffer("west", 2, remote), []string{local}, false, []string{remote}, ByAffinity},
		{"remote, none there", AffinityRemote, webOffer("west", 2), []string{local}, false, []string{local}, FallenBack},
		{"remote, draining", AffinityRemote, draining(webOffer("west", 2, remote)), []string{local}, false, []string{local}, FallenBack},
		{"remote, lost", AffinityRemote, webOffer("west", 2, remote), []string{local}, true, []string{local}, FallenBack},
		{"none, lost", AffinityNone, webOffer("west", 2, remote), []string{local}, true, []string{local}, Alike},
		{"lost is better than nothing", AffinityLocal, webOffer("west", 2, remote), nil, true, []string{remote}, NoneReliable},
		{"draining is better than nothing", AffinityLocal, draining(webOffer("west", 2, remote)), nil, false, []string{remote}, NoneReady},
		{"draining and lost is better than nothing", AffinityNone, draining(webOffer("west", 2, remote)), nil, true, []string{remote}, NoneReliable},
		{"nothing", AffinityNone, webOffer("west", 2), nil, false, nil, NoBackend},
	} {
		t.Run(test.name, func(t *testing.T) {
			table := NewTable()
			table.PutLocal(webLocal(Settings{Global: true, Affinity: test.affinity}, test.local...))
			table.Put(test.offer)
			table.SetLost("west", test.lost)
			var want []string
			for _, addr := range test.want {
				want = append(want, addr+":8080")
			}
			wantBackends(t, table, webFront, want...)
			if v, _ := table.Get(web); v.Fronts[0].Why != test.why {
				t.Errorf("why: got %q, want %q", v.Fronts[0].Why, test.why)
			}
			if table.SetLost("west", false); test.lost && test.affinity == AffinityRemote {
				wantBackends(t, table, webFront, remote+":8080")
			}
		})
	}
}

// A cluster that was lost before it offered anything is lost all the same, and its return is for all that it offers.
func TestLostBeforeTheFirstOffer(t *testing.T) {
	table := NewTable()
	table.SetLost("west", true)
	table.PutLocal(webLocal(Settings{Global: true}, "10.1.1.10"))
	table.Put(webOffer("west", 2, "10.2.1.10"))
	wantBackends(t, table, webFront, "10.1.1.10:8080")
	table.SetLost("west", false)
	wantBackends(t, table, webFront, "10.1.1.10:8080", "10.2.1.10:8080")
}

// A backend that is gone from a service that is not global is gone, whoever else offers its address.
func TestOffersOfOthersKeepNothingAlive(t *testing.T) {
	table := NewTable()
	var pods []string
	for i := range 40 { // so that one is a small change
		pods = append(pods, netip.AddrFrom4([4]byte{10, 1, 1, byte(i)}).String())
	}
	table.Put(webOffer("west", 2, pods[0]))
	table.PutLocal(webLocal(Settings{}, pods...))
	table.PutLocal(webLocal(Settings{}, pods[1:]...))
	wantBackends(t, table, webFront, ports(pods[1:])...)
}

func TestPortsAndFamilies(t *testing.T) {
	table := NewTable()
	table.PutLocal(Local{
		Service: web, Settings: Settings{Global: true}, Addrs: addrs("10.96.1.10", "fd00:96::10"),
		Ports: []NamedPort{{"dns", UDP, 53}, {"dns-tcp", TCP, 53}, {"http", TCP, 80}},
	})
	o := Offer{Service: web, Cluster: "west", ClusterID: 2, Shared: true, Backends: []Subset{
		{Ports: []NamedPort{{"http", TCP, 8080}, {"dns", UDP, 5353}, {"dns-tcp", UDP, 5353}, {"", TCP, 1}}, Addrs: addrs("fd00:2::1", "10.2.1.2", "10.2.1.1")},
		{Ports: []NamedPort{{"http", TCP, 9090}}, Addrs: addrs("10.2.1.1")},
	}}
	table.Put(o)
	wantBackends(t, table, frontend("10.96.1.10:53", UDP), "10.2.1.1:5353", "10.2.1.2:5353")
	wantBackends(t, table, frontend("[fd00:96::10]:53", UDP), "[fd00:2::1]:5353")
	wantBackends(t, table, frontend("10.96.1.10:53", TCP)) // the protocol is another one
	wantBackends(t, table, frontend("10.96.1.10:80", TCP), "10.2.1.1:8080", "10.2.1.1:9090", "10.2.1.2:8080")
	wantBackends(t, table, frontend("[fd00:96::10]:80", TCP), "[fd00:2::1]:8080")
}

// mechanism: H5
func TestChangesTellDifferences(t *testing.T) {
	table := NewTable()
	var many []string
	for i := range 100 {
		many = append(many, netip.AddrFrom4([4]byte{10, 2, 0, byte(i)}).String())
	}
	table.PutLocal(webLocal(Settings{Global: true}))
	table.Put(webOffer("west", 2, many[:99]...))
	batch, at, full := table.Changes(Revision{}, 10)
	if !full || len(batch) != 1 || !batch[0].Whole || len(batch[0].Backends) != 99 || batch[0].Service != web {
		t.Fatalf("first: full %v, %+v", full, batch)
	}
	changed := table.Changed()
	table.Put(webOffer("west", 2, many[1:]...))
	select {
	case <-changed:
	default:
		t.Error("a change was not announced")
	}
	batch, at, full = table.Changes(at, 10)
	want := []Change{{Selection: Selection{Frontend: webFront, Service: web}, Added: backends("10.2.0.99:8080"), Removed: backends("10.2.0.0:8080")}}
	if diff := cmp.Diff(want, batch, sameAddr); diff != "" || full {
		t.Errorf("full %v, changes (-want +got):\n%s", full, diff)
	}
	// What is back before anybody looked may be told again; what is the same is no change at all.
	table.Put(webOffer("west", 2, many[2:]...))
	table.Put(webOffer("west", 2, many[1:]...))
	batch, at, _ = table.Changes(at, 10)
	if len(batch) != 1 || batch[0].Whole || !slices.Equal(batch[0].Added, backends("10.2.0.1:8080")) || batch[0].Removed != nil {
		t.Errorf("there and back: %+v", batch)
	}
	changed = table.Changed()
	table.Put(webOffer("west", 2, many[1:]...))
	table.Put(webOffer("north", 3, many[50]))
	select {
	case <-changed:
		t.Error("what is the same was announced")
	default:
	}
	// Who has it twice loses it with the last one.
	table.Put(webOffer("west", 2, many[51:]...))
	wantBackends(t, table, webFront, append([]string{"10.2.0.50:8080"}, ports(many[51:])...)...)
	table.Delete("north", web, "")
	wantBackends(t, table, webFront, ports(many[51:])...)

	table.DeleteLocal(Kubernetes, web)
	batch, at, _ = table.Changes(at, 10)
	if len(batch) != 1 || !batch[0].Deleted || batch[0].Frontend != webFront {
		t.Errorf("deletion: %+v", batch)
	}
	if batch, _, _ = table.Changes(at, 10); len(batch) != 0 {
		t.Errorf("after all: %+v", batch)
	}
}

func ports(addrs []string) []string {
	var all []string
	for _, a := range addrs {
		all = append(all, a+":8080")
	}
	return all
}

// The stronger source has the service, the first service by source and name has the frontend, and the other gets it when that
// goes.
// However often a service changes, a reader who takes each change is told the difference.
func TestReaderWhoKeepsUpIsToldDifferences(t *testing.T) {
	const pods = 400
	table := NewTable()
	table.PutLocal(webLocal(Settings{Global: true}))
	offer := func(n int) Offer {
		return Offer{Service: web, Cluster: "west", Shared: true, Backends: []Subset{{Ports: []NamedPort{{"http", TCP, 8080}}, Addrs: manyPods(0, n)}}}
	}
	table.Put(offer(pods))
	_, at, _ := table.Changes(Revision{}, 16)
	for i := range 4 * pods {
		table.Put(offer(pods - 1 + i%2))
		batch, next, full := table.Changes(at, 16)
		if at = next; full || len(batch) != 1 || batch[0].Whole || len(batch[0].Added)+len(batch[0].Removed) != 1 {
			t.Fatalf("change %d: full %v, %+v, want one backend more or less", i, full, batch)
		}
	}
	// Who has missed more than the log holds is told the whole.
	behind := at
	for i := range pods {
		table.Put(offer(pods - 1 + i%2))
	}
	if batch, _, full := table.Changes(behind, 16); full || len(batch) != 1 || !batch[0].Whole || len(batch[0].Backends) != pods {
		t.Errorf("who is far behind: full %v, whole %v", full, batch[0].Whole)
	}
}

func TestContestedFrontends(t *testing.T) {
	table := NewTable()
	files := webLocal(Settings{}, "10.1.1.2")
	files.Source = Files
	table.PutLocal(files)
	wantBackends(t, table, webFront, "10.1.1.2:8080")
	table.PutLocal(webLocal(Settings{}, "10.1.1.1"))
	wantBackends(t, table, webFront, "10.1.1.1:8080")
	other := webLocal(Settings{}, "10.1.1.3")
	other.Service.Name = "aaa"
	table.PutLocal(other)
	wantBackends(t, table, webFront, "10.1.1.3:8080")
	if v, _ := table.Get(web); v.Fronts[0].Holder != other.Service || v.Fronts[0].Why != NotHeld || !slices.Equal(v.Others, []Source{Files}) {
		t.Errorf("view: %+v", v)
	}
	table.DeleteLocal(Kubernetes, other.Service)
	wantBackends(t, table, webFront, "10.1.1.1:8080")
	table.DeleteLocal(Kubernetes, web)
	wantBackends(t, table, webFront, "10.1.1.2:8080")
	table.DeleteLocal(Files, web)
	table.DeleteLocal(Files, web)
	if n := len(table.Selections()); n != 0 || table.Locals() != 0 || len(table.entries) != 0 {
		t.Errorf("%d frontends, %d services left", n, table.Locals())
	}
}

func TestWhyNot(t *testing.T) {
	for _, test := range []struct {
		b    BackendView
		want string
	}{
		{BackendView{Used: true, Lost: true}, ""},
		{BackendView{Lost: true, State: Draining}, "others have some whose cluster is not lost"},
		{BackendView{State: Draining}, "others are ready"},
		{BackendView{}, "affinity prefers others"},
	} {
		if got := test.b.WhyNot(); got != test.want {
			t.Errorf("%+v: %q, want %q", test.b, got, test.want)
		}
	}
}

// mechanism: H7
func TestViewAddsUpClusters(t *testing.T) {
	table := NewTable()
	table.PutLocal(webLocal(Settings{Global: true, Affinity: AffinityLocal}, "10.1.1.10"))
	for i, slice := range []string{"web-a", "web-b"} {
		o := webOffer("west", 2, []string{"10.2.1.10", "10.2.1.11"}[i])
		o.Slice = slice
		table.Put(o)
	}
	table.Put(webOffer("north", 3))
	var got []View
	for v := range table.All() {
		got = append(got, v)
	}
	want := []ClusterOffer{
		{Cluster: "north", ClusterID: 3, Shared: true, IncludeExternal: true},
		{Cluster: "west", ClusterID: 2, Slices: 2, Shared: true, IncludeExternal: true, Ready: 2},
	}
	if len(got) != 1 {
		t.Fatalf("%d services", len(got))
	}
	if diff := cmp.Diff(want, got[0].Offers); diff != "" {
		t.Errorf("offers (-want +got):\n%s", diff)
	}
	front := []FrontView{{
		Frontend: webFront, PortName: "http", Holder: web, Used: 1, Why: ByAffinity, Backends: []BackendView{
			{Backend: backends("10.1.1.10:8080")[0], Used: true},
			{Backend: backends("10.2.1.10:8080")[0], Cluster: "west"},
			{Backend: backends("10.2.1.11:8080")[0], Cluster: "west"},
		},
	}}
	if diff := cmp.Diff(front, got[0].Fronts, sameAddr); diff != "" {
		t.Errorf("frontends (-want +got):\n%s", diff)
	}
}
