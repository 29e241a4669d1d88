// SPDX-License-Identifier: Apache-2.0

package service

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// twin does what a [Table] should do, in the plainest way: it keeps what it was told and reckons everything anew when asked.
type twin struct {
	offers map[string]Offer // by cluster, service and slice
	locals map[Name]map[Source]Local
	lost   map[string]bool
}

func (w *twin) selections() map[Frontend]Selection {
	type claim struct {
		Local
		port string
	}
	claims := make(map[Frontend][]claim)
	for _, bySource := range w.locals {
		sources := slices.Sorted(maps.Keys(bySource))
		if len(sources) == 0 {
			continue
		}
		l := bySource[sources[0]]
		for _, addr := range l.Addrs {
			for _, p := range l.Ports {
				at := Frontend{addr, p.Port, p.Protocol}
				claims[at] = append(claims[at], claim{l, p.Name})
			}
		}
	}
	all := make(map[Frontend]Selection)
	for at, of := range claims {
		first := slices.MinFunc(of, func(a, b claim) int {
			if a.Source != b.Source {
				return int(a.Source) - int(b.Source)
			}
			if c := a.Service.Compare(b.Service); c != 0 {
				return c
			}
			return 0
		})
		all[at] = Selection{
			Frontend: at, Service: first.Service, ClientAffinity: first.ClientAffinity, Algorithm: first.Algorithm,
			Backends: w.backends(at, first.Local, first.port),
		}
	}
	return all
}

// backends sorts what is there into what is alike, and takes the first that is not empty.
func (w *twin) backends(at Frontend, l Local, port string) []Backend {
	type kind struct {
		remote, draining, lost bool
	}
	found := make(map[kind]map[Backend]bool)
	collect := func(subsets []Subset, remote, lost bool) {
		for _, s := range subsets {
			for _, p := range s.Ports {
				for _, addr := range s.Addrs {
					if p.Name == port && p.Protocol == at.Protocol && addr.Is4() == at.Addr.Is4() {
						k := kind{remote, s.State == Draining, lost}
						if found[k] == nil {
							found[k] = make(map[Backend]bool)
						}
						found[k][Backend{addr, p.Port}] = true
					}
				}
			}
		}
	}
	collect(l.Backends, false, false)
	for _, o := range w.offers {
		if o.Service == l.Service && l.Global && o.Shared {
			collect(o.Backends, true, w.lost[o.Cluster])
		}
	}
	union := func(kinds ...kind) []Backend {
		sum := make(map[Backend]bool)
		for _, k := range kinds {
			maps.Copy(sum, found[k])
		}
		return slices.SortedFunc(maps.Keys(sum), Backend.Compare)
	}
	var orders [][]kind
	for _, lost := range []bool{false, true} {
		for _, draining := range []bool{false, true} {
			near, far := kind{false, draining, lost}, kind{true, draining, lost}
			switch l.Affinity {
			case AffinityNone:
				orders = append(orders, []kind{near, far})
			case AffinityLocal:
				orders = append(orders, []kind{near}, []kind{far})
			case AffinityRemote:
				orders = append(orders, []kind{far}, []kind{near})
			}
		}
	}
	for _, kinds := range orders {
		if sum := union(kinds...); len(sum) > 0 {
			return sum
		}
	}
	return nil
}

// reader follows the changes of a table.
type reader struct {
	at      Revision
	has     map[Frontend]Selection
	doubted map[Frontend]bool // after a reset, what has not been given again; nil between resets
}

// read takes up to most changes, and reports whether there were any.
func (r *reader) read(t *testing.T, table *Table, most int) bool {
	batch, next, full := table.Changes(r.at, most)
	if len(batch) > most {
		t.Fatalf("%d changes, asked for at most %d", len(batch), most)
	}
	if r.at = next; full {
		r.doubted = make(map[Frontend]bool)
		for at := range r.has {
			r.doubted[at] = true
		}
	}
	for _, c := range batch {
		delete(r.doubted, c.Frontend)
		switch was, known := r.has[c.Frontend]; {
		case c.Deleted:
			delete(r.has, c.Frontend)
		case c.Whole:
			r.has[c.Frontend] = c.Selection
		case !known:
			t.Fatalf("difference of an unknown frontend: %+v", c)
		default:
			s := c.Selection
			s.Backends = slices.Clone(was.Backends)
			for _, b := range c.Removed {
				if i, found := slices.BinarySearchFunc(s.Backends, b, Backend.Compare); found {
					s.Backends = slices.Delete(s.Backends, i, i+1)
				}
			}
			for _, b := range c.Added {
				if i, found := slices.BinarySearchFunc(s.Backends, b, Backend.Compare); !found {
					s.Backends = slices.Insert(s.Backends, i, b)
				}
			}
			r.has[c.Frontend] = s
		}
	}
	if len(batch) > 0 {
		return true
	}
	for at := range r.doubted {
		delete(r.has, at)
	}
	r.doubted = nil
	return false
}

// TestOracle throws random events at a table and at its twin, and lets readers of different speed follow.
func TestOracle(t *testing.T) {
	for round := range 12 {
		seed := rand.Uint64()
		t.Logf("round %d, seed %d", round, seed)
		oracle(t, rand.New(rand.NewPCG(seed, 1)))
	}
}

func oracle(t *testing.T, random *rand.Rand) {
	table := NewTable()
	table.changes.limit = 3
	w := &twin{offers: make(map[string]Offer), locals: make(map[Name]map[Source]Local), lost: make(map[string]bool)}
	readers := make([]*reader, 4)
	for i := range readers {
		readers[i] = &reader{has: make(map[Frontend]Selection)}
	}
	e := &events{random: random}
	for step := range 400 {
		e.happen(table, w)
		want := w.selections()
		got := make(map[Frontend]Selection)
		for _, s := range table.Selections() {
			got[s.Frontend] = s
		}
		if diff := diffSelections(want, got); diff != "" {
			t.Fatalf("step %d: (-want +got):\n%s", step, diff)
		}
		if table.Len() != len(w.offers) {
			t.Fatalf("step %d: %d offers, want %d", step, table.Len(), len(w.offers))
		}
		r := readers[random.IntN(len(readers))]
		if random.IntN(3) > 0 {
			r.read(t, table, 1+random.IntN(4))
			continue
		}
		for r.read(t, table, 1+random.IntN(4)) {
		}
		if diff := diffSelections(want, r.has); diff != "" {
			t.Fatalf("step %d: a reader that has seen everything (-want +got):\n%s", step, diff)
		}
	}
	for key, o := range w.offers {
		table.Delete(o.Cluster, o.Service, o.Slice)
		delete(w.offers, key)
	}
	for name, bySource := range w.locals {
		for source := range bySource {
			table.DeleteLocal(source, name)
		}
	}
	for c := range w.lost {
		table.SetLost(c, false)
	}
	if len(table.entries) != 0 || len(table.clusters) != 0 || table.Len() != 0 || table.Locals() != 0 || len(table.Selections()) != 0 {
		t.Errorf("left when all is gone: %d services, %d clusters", len(table.entries), len(table.clusters))
	}
}

func diffSelections(want, got map[Frontend]Selection) string {
	return cmp.Diff(texts(want), texts(got))
}

func texts(all map[Frontend]Selection) map[string]string {
	text := make(map[string]string)
	for at, s := range all {
		text[at.String()] = fmt.Sprint(s.Service, s.Backends, s.ClientAffinity, s.Algorithm)
	}
	return text
}

// events makes what may happen to a table, in a world so small that all of it meets.
type events struct{ random *rand.Rand }

func (e *events) name() Name { return Name{"ns", []string{"a", "b", "c"}[e.random.IntN(3)]} }

func (e *events) ports() []NamedPort {
	var all []NamedPort
	for _, name := range []string{"", "http", "dns"} {
		if e.random.IntN(3) > 0 {
			all = append(all, NamedPort{name, []Protocol{TCP, UDP}[e.random.IntN(2)], uint16(80 + e.random.IntN(3))})
		}
	}
	return all
}

func (e *events) subsets() []Subset {
	var all []Subset
	for range e.random.IntN(4) {
		s := Subset{Ports: e.ports(), State: State(e.random.IntN(2))}
		for range e.random.IntN(60) {
			if e.random.IntN(3) == 0 {
				s.Addrs = append(s.Addrs, netip.AddrFrom16([16]byte{0xfd, 15: byte(e.random.IntN(20))}))
			} else {
				s.Addrs = append(s.Addrs, netip.AddrFrom4([4]byte{10, 0, 0, byte(e.random.IntN(60))}))
			}
		}
		all = append(all, s)
	}
	return all
}

// mutate changes one address of an offer, as scaling does.
func (e *events) mutate(subsets []Subset) []Subset {
	all := slices.Clone(subsets)
	if len(all) == 0 {
		return e.subsets()
	}
	s := &all[e.random.IntN(len(all))]
	s.Addrs = slices.Clone(s.Addrs)
	if len(s.Addrs) > 0 && e.random.IntN(2) == 0 {
		i := e.random.IntN(len(s.Addrs))
		s.Addrs = slices.Delete(s.Addrs, i, i+1)
	} else {
		s.Addrs = append(s.Addrs, netip.AddrFrom4([4]byte{10, 0, 0, byte(e.random.IntN(60))}))
	}
	return all
}

func (e *events) happen(table *Table, w *twin) {
	r := e.random
	name := e.name()
	clusterName := []string{"north", "west"}[r.IntN(2)]
	slice := []string{"", "s1", "s2"}[r.IntN(3)]
	key := clusterName + " " + name.String() + " " + slice
	source := Source(r.IntN(int(sources)))
	switch r.IntN(10) {
	case 0:
		table.Delete(clusterName, name, slice)
		delete(w.offers, key)
	case 1:
		table.DeleteLocal(source, name)
		delete(w.locals[name], source)
	case 2:
		w.lost[clusterName] = r.IntN(2) == 0
		table.SetLost(clusterName, w.lost[clusterName])
	case 3, 4:
		l := Local{
			Service: name, Source: source, Ports: e.ports(), ClientAffinity: uint32(r.IntN(2)),
			Settings: Settings{Global: r.IntN(4) > 0, Affinity: Affinity(r.IntN(3)), Algorithm: Algorithm(r.IntN(3))},
			Backends: e.subsets(),
		}
		for _, addr := range addrs("10.96.0.1", "10.96.0.2", "fd96::1") {
			if r.IntN(2) == 0 {
				l.Addrs = append(l.Addrs, addr)
			}
		}
		slices.SortFunc(l.Ports, comparePorts)
		e.putLocal(table, w, l)
	case 5:
		if l, ok := w.locals[name][source]; ok {
			l.Backends = e.mutate(l.Backends)
			e.putLocal(table, w, l)
		}
	case 6, 7:
		o := Offer{Service: name, Cluster: clusterName, Slice: slice, Shared: r.IntN(8) > 0, Backends: e.subsets()}
		e.put(table, w, key, o)
	default:
		if o, ok := w.offers[key]; ok {
			o.Backends = e.mutate(o.Backends)
			e.put(table, w, key, o)
		}
	}
}

func (e *events) put(table *Table, w *twin, key string, o Offer) {
	w.offers[key] = o
	o.Backends = copied(o.Backends)
	table.Put(o)
}

func (e *events) putLocal(table *Table, w *twin, l Local) {
	if w.locals[l.Service] == nil {
		w.locals[l.Service] = make(map[Source]Local)
	}
	w.locals[l.Service][l.Source] = l
	l.Backends = copied(l.Backends)
	table.PutLocal(l)
}

// copied is for the table to keep, and to sort.
func copied(subsets []Subset) []Subset {
	all := slices.Clone(subsets)
	for i := range all {
		all[i].Addrs, all[i].Ports = slices.Clone(all[i].Addrs), slices.Clone(all[i].Ports)
	}
	return all
}
