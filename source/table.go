// SPDX-License-Identifier: Apache-2.0

package source

import (
	"cmp"
	"maps"
	"slices"
	"sync"

	"github.com/weftmesh/weft/service"
)

// maxGone bounds the services that are remembered only because they are gone; a reader that missed older ones gets all.
const maxGone = 10_000

// Table holds services as their parts come: what a service is, its backends piece by piece, and what its namespace says. It
// does no I/O and starts nothing; all methods may be called concurrently.
type Table struct {
	mu       sync.Mutex
	at       Revision
	entries  map[service.Name]*entry
	spaces   map[string]bool // what namespaces say of being global, where they say it
	fallback bool            // what they say otherwise
	gone     int             // entries without a service that readers may still have
	floor    Revision        // readers before it get all
	changed  chan struct{}   // closed and replaced at each change; nil while nobody has it
	services int
}

// entry is what is known of one name. head is nil where there are backends without a service, or a service that is gone.
type entry struct {
	head   *Service // without backends
	pieces map[string][]Backend
	at     Revision
	told   bool // readers may have been told of a service of the name
}

// NewTable returns an empty table. global is what counts for services of namespaces that say nothing.
func NewTable(global bool) *Table {
	return &Table{entries: make(map[service.Name]*entry), spaces: make(map[string]bool), fallback: global, at: 1}
}

// PutService takes what a service is, backends and Global aside.
func (t *Table) PutService(s Service) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entry(s.Name)
	s.Backends, s.Pieces, s.Global = nil, nil, false
	if e.head != nil && sameHead(e.head, &s) {
		return
	}
	if e.head == nil {
		t.services++
		if e.told {
			t.gone--
		}
	}
	e.head, e.told = &s, true
	t.touch(e)
}

// RemoveService forgets a service; its backends stay until they are removed, too.
func (t *Table) RemoveService(name service.Name) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.removeService(name)
}

func (t *Table) removeService(name service.Name) {
	e := t.entries[name]
	if e == nil || e.head == nil {
		return
	}
	e.head = nil
	t.services--
	t.gone++
	t.touch(e)
	if t.gone > maxGone {
		t.forget()
	}
}

// PutBackends takes one piece of a service's backends, in the place of what the piece was before.
func (t *Table) PutBackends(name service.Name, piece string, backends []Backend) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entry(name)
	if before, ok := e.pieces[piece]; ok && slices.EqualFunc(before, backends, sameBackend) {
		return
	}
	if e.pieces == nil {
		e.pieces = make(map[string][]Backend)
	}
	e.pieces[piece] = backends
	t.touchIfThere(e)
}

// RemoveBackends forgets a piece.
func (t *Table) RemoveBackends(name service.Name, piece string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.removeBackends(name, piece)
}

func (t *Table) removeBackends(name service.Name, piece string) {
	e := t.entries[name]
	if e == nil {
		return
	}
	if _, ok := e.pieces[piece]; !ok {
		return
	}
	delete(e.pieces, piece)
	t.touchIfThere(e)
	if e.head == nil && !e.told && len(e.pieces) == 0 {
		delete(t.entries, name)
	}
}

// PutNamespace takes what a namespace says of being global; said is false where it says nothing.
func (t *Table) PutNamespace(namespace string, global, said bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	before, had := t.spaces[namespace]
	if had == said && before == (global && said) {
		return
	}
	delete(t.spaces, namespace)
	if said {
		t.spaces[namespace] = global
	}
	for name, e := range t.entries {
		if name.Namespace == namespace {
			t.touchIfThere(e)
		}
	}
}

// Keep forgets the services that keep does not name.
func (t *Table) Keep(keep func(service.Name) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name := range t.entries {
		if !keep(name) {
			t.removeService(name)
		}
	}
}

// KeepBackends forgets the pieces that keep does not name.
func (t *Table) KeepBackends(keep func(name service.Name, piece string) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, e := range t.entries {
		for piece := range e.pieces {
			if !keep(name, piece) {
				t.removeBackends(name, piece)
			}
		}
	}
}

// KeepNamespaces forgets what namespaces said that keep does not name.
func (t *Table) KeepNamespaces(keep func(namespace string) bool) {
	t.mu.Lock()
	names := slices.Collect(maps.Keys(t.spaces))
	t.mu.Unlock()
	for _, name := range names {
		if !keep(name) {
			t.PutNamespace(name, false, false)
		}
	}
}

// entry finds or makes an entry. The caller holds mu.
func (t *Table) entry(name service.Name) *entry {
	e := t.entries[name]
	if e == nil {
		e = new(entry)
		t.entries[name] = e
	}
	return e
}

// touchIfThere has readers told of an entry unless it is no service. The caller holds mu.
func (t *Table) touchIfThere(e *entry) {
	if e.head != nil {
		t.touch(e)
	}
}

// touch has readers told of an entry. The caller holds mu.
func (t *Table) touch(e *entry) {
	t.at++
	e.at = t.at
	t.wake()
}

func (t *Table) wake() {
	if t.changed != nil {
		close(t.changed)
		t.changed = nil
	}
}

// Wake tells readers that there is something new besides the services.
func (t *Table) Wake() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.wake()
}

// forget drops what is remembered only to be told of. The caller holds mu.
func (t *Table) forget() {
	for name, e := range t.entries {
		if e.head != nil {
			continue
		}
		if e.told = false; len(e.pieces) == 0 {
			delete(t.entries, name)
		}
	}
	t.gone, t.floor = 0, t.at
}

// Changed returns a channel that closes at the next change.
func (t *Table) Changed() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.changed == nil {
		t.changed = make(chan struct{})
	}
	return t.changed
}

// Len is how many services there are.
func (t *Table) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.services
}

// Changes returns each service once that has changed since a revision, in the order of the last changes. full tells that it
// is all there are: what is not among them is gone.
func (t *Table) Changes(since Revision) (changes []Change, next Revision, full bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	full = since == 0 || since < t.floor
	type news struct {
		Change
		at Revision
	}
	var all []news
	if !full && since == t.at {
		return nil, t.at, false
	}
	for name, e := range t.entries {
		switch {
		case e.head == nil && (full || !e.told || e.at <= since), !full && e.at <= since:
		case e.head == nil:
			all = append(all, news{Change{Name: name}, e.at})
		default:
			all = append(all, news{Change{Name: name, Service: t.whole(e)}, e.at})
		}
	}
	slices.SortFunc(all, func(a, b news) int { return cmp.Compare(a.at, b.at) })
	changes = make([]Change, len(all))
	for i := range all {
		changes[i] = all[i].Change
	}
	return changes, t.at, full
}

// whole puts a service together. The caller holds mu.
func (t *Table) whole(e *entry) *Service {
	s := *e.head
	said, ok := t.spaces[s.Namespace]
	s.Global = said || !ok && t.fallback
	for _, piece := range slices.Sorted(maps.Keys(e.pieces)) {
		s.Backends = append(s.Backends, e.pieces[piece]...)
		s.Pieces = append(s.Pieces, Piece{piece, e.pieces[piece]})
	}
	slices.SortStableFunc(s.Backends, func(a, b Backend) int { return a.Addr.Compare(b.Addr) })
	s.Backends = joined(s.Backends)
	return &s
}

// joined makes one of backends that several pieces have, as where the ports of one address stand in two EndpointSlices.
func joined(sorted []Backend) []Backend {
	out := sorted[:0]
	for _, b := range sorted {
		last := len(out) - 1
		if last < 0 || out[last].Addr != b.Addr {
			out = append(out, b)
			continue
		}
		o := &out[last]
		// An endpoint that moves between slices is in both for a while: the better news are the later ones.
		o.Ready, o.Serving, o.Terminating = o.Ready || b.Ready, o.Serving || b.Serving, o.Terminating && b.Terminating
		o.Hostname, o.Zone, o.Node = cmp.Or(o.Hostname, b.Hostname), cmp.Or(o.Zone, b.Zone), cmp.Or(o.Node, b.Node)
		if len(o.ForZones) == 0 {
			o.ForZones = b.ForZones
		}
		o.Ports = sortedPorts(slices.Concat(o.Ports, b.Ports))
	}
	return out
}

func sortedPorts(ports []Port) []Port {
	slices.SortFunc(ports, func(a, b Port) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	})
	return slices.Compact(ports)
}

func sameHead(a, b *Service) bool {
	return a.Affinity == b.Affinity && maps.Equal(a.Annotations, b.Annotations) && maps.Equal(a.Labels, b.Labels) &&
		maps.Equal(a.Selector, b.Selector) && slices.Equal(a.Addresses, b.Addresses) && slices.Equal(a.Ports, b.Ports)
}

func sameBackend(a, b Backend) bool {
	return a.Addr == b.Addr && a.Ready == b.Ready && a.Serving == b.Serving && a.Terminating == b.Terminating &&
		a.Hostname == b.Hostname && a.Zone == b.Zone && a.Node == b.Node && slices.Equal(a.ForZones, b.ForZones) && slices.Equal(a.Ports, b.Ports)
}
