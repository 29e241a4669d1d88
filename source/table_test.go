// SPDX-License-Identifier: Apache-2.0

package source

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/weftmesh/weft/service"
)

// twin is what a Table should hold, kept in the plainest way.
type twin struct {
	heads  map[service.Name]Service
	pieces map[service.Name]map[string][]Backend
	spaces map[string]bool
}

func (w *twin) services(global bool) map[service.Name]Service {
	all := make(map[service.Name]Service)
	for name, s := range w.heads {
		said, ok := w.spaces[name.Namespace]
		s.Global = said || !ok && global
		byAddr := make(map[netip.Addr]Backend)
		for _, piece := range w.pieces[name] {
			for _, b := range piece {
				have, ok := byAddr[b.Addr]
				if ok {
					b.Ready, b.Serving, b.Terminating = b.Ready || have.Ready, b.Serving || have.Serving, b.Terminating && have.Terminating
					b.Ports = sortedPorts(slices.Concat(have.Ports, b.Ports))
				}
				byAddr[b.Addr] = b
			}
		}
		s.Backends = nil
		for _, piece := range slices.Sorted(maps.Keys(w.pieces[name])) {
			s.Pieces = append(s.Pieces, Piece{piece, w.pieces[name][piece]})
		}
		for _, b := range byAddr {
			s.Backends = append(s.Backends, b)
		}
		slices.SortFunc(s.Backends, func(a, b Backend) int { return a.Addr.Compare(b.Addr) })
		all[name] = s
	}
	return all
}

var compareAddrs = cmp.Options{cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmpopts.EquateEmpty()}

// Whatever the order in which parts come and go, a reader who takes the changes ends up with exactly the whole services that
// there are, whether it looks often or seldom.
//
// mechanism: L2 L3
// lesson: O5
func TestTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		global := rapid.Bool().Draw(t, "default")
		table := NewTable(global)
		want := &twin{make(map[service.Name]Service), make(map[service.Name]map[string][]Backend), make(map[string]bool)}
		readers := make([]map[service.Name]Service, 3)
		at := make([]Revision, len(readers))
		name := rapid.Custom(func(t *rapid.T) service.Name {
			return service.Name{Namespace: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "namespace"), Name: rapid.SampledFrom([]string{"x", "y"}).Draw(t, "name")}
		})
		piece := rapid.SampledFrom([]string{"1", "2"})
		backends := rapid.SliceOfNDistinct(rapid.Custom(func(t *rapid.T) Backend {
			i := rapid.ByteRange(1, 4).Draw(t, "address")
			ready := rapid.Bool().Draw(t, "ready")
			return Backend{
				Addr: netip.AddrFrom4([4]byte{10, 0, 0, i}), Ready: ready, Serving: ready || rapid.Bool().Draw(t, "serving"),
				Ports: []Port{{"http", service.TCP, rapid.Uint16Range(80, 82).Draw(t, "port")}},
			}
		}), 0, 4, func(b Backend) netip.Addr { return b.Addr })
		t.Repeat(map[string]func(*rapid.T){
			"put service": func(t *rapid.T) {
				s := Service{Name: name.Draw(t, "service"), Labels: map[string]string{"v": rapid.StringN(0, 1, 1).Draw(t, "label")}}
				table.PutService(s)
				want.heads[s.Name] = s
			},
			"remove service": func(t *rapid.T) {
				n := name.Draw(t, "service")
				table.RemoveService(n)
				delete(want.heads, n)
			},
			"put backends": func(t *rapid.T) {
				n, p, b := name.Draw(t, "service"), piece.Draw(t, "piece"), backends.Draw(t, "backends")
				table.PutBackends(n, p, b)
				if want.pieces[n] == nil {
					want.pieces[n] = make(map[string][]Backend)
				}
				want.pieces[n][p] = b
			},
			"remove backends": func(t *rapid.T) {
				n, p := name.Draw(t, "service"), piece.Draw(t, "piece")
				table.RemoveBackends(n, p)
				delete(want.pieces[n], p)
			},
			"namespace": func(t *rapid.T) {
				n, said, global := rapid.SampledFrom([]string{"a", "b"}).Draw(t, "namespace"), rapid.Bool().Draw(t, "said"), rapid.Bool().Draw(t, "global")
				table.PutNamespace(n, global, said)
				if delete(want.spaces, n); said {
					want.spaces[n] = global
				}
			},
			"list": func(t *rapid.T) {
				keep := rapid.SliceOf(name).Draw(t, "services")
				table.Keep(func(n service.Name) bool { return slices.Contains(keep, n) })
				for n := range want.heads {
					if !slices.Contains(keep, n) {
						delete(want.heads, n)
					}
				}
			},
			"list backends": func(t *rapid.T) {
				keep := piece.Draw(t, "piece")
				table.KeepBackends(func(_ service.Name, p string) bool { return p == keep })
				for _, pieces := range want.pieces {
					for p := range pieces {
						if p != keep {
							delete(pieces, p)
						}
					}
				}
			},
			"list namespaces": func(t *rapid.T) {
				table.KeepNamespaces(func(n string) bool { return n == "a" })
				delete(want.spaces, "b")
			},
			"forget": func(*rapid.T) { // as when more are gone than are remembered
				table.mu.Lock()
				defer table.mu.Unlock()
				table.forget()
			},
			"": func(t *rapid.T) {
				i := rapid.IntRange(0, len(readers)-1).Draw(t, "reader")
				changed := table.Changed()
				changes, next, full := table.Changes(at[i])
				select {
				case <-changed:
					t.Fatal("a reader is told of changes that there are none of")
				default:
				}
				if full {
					readers[i] = make(map[service.Name]Service)
				}
				at[i] = next
				for _, c := range changes {
					if delete(readers[i], c.Name); c.Service != nil {
						readers[i][c.Name] = *c.Service
					}
				}
				if diff := cmp.Diff(want.services(global), readers[i], compareAddrs); diff != "" {
					t.Fatalf("reader %d (-want +got)\n%s", i, diff)
				}
				if len(want.heads) != table.Len() {
					t.Fatalf("%d services, want %d", table.Len(), len(want.heads))
				}
			},
		})
	})
}

// What is remembered of services that are gone is bounded, and nobody misses that they are.
func TestTableForgets(t *testing.T) {
	table := NewTable(true)
	table.PutService(Service{Name: service.Name{Namespace: "a", Name: "stays"}})
	_, at, _ := table.Changes(0)
	for i := range maxGone + 1 {
		name := service.Name{Namespace: "a", Name: fmt.Sprint(i)}
		table.PutService(Service{Name: name})
		table.RemoveService(name)
	}
	if n := len(table.entries); n > 2 {
		t.Errorf("%d entries are remembered", n)
	}
	if changes, _, full := table.Changes(at); !full || len(changes) != 1 || changes[0].Service == nil {
		t.Errorf("%v, full: %v", changes, full)
	}
}
