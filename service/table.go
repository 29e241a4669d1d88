// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"net/netip"
	"slices"
	"sync"
)

// Table is where what clusters offer meets the services of our own: for each frontend of a local service, it holds the
// backends that are used now. It is safe for concurrent use.
//
// Offers are always kept, and used only while a local service of their name is there and is global.
type Table struct {
	mu       sync.RWMutex
	entries  map[Name]*entry
	fronts   map[Frontend]*front
	clusters map[string]*cluster
	offers   int
	locals   int
	changes  changes
	changed  chan struct{} // closed at the next change

	a, b, c []classed // scratch
}

// entry is what is known of the services of one name.
type entry struct {
	name   Name
	locals []*Local // by source; the first is in force
	parts  []part   // by cluster and slice
	fronts []*front // that claim to be those of locals[0], in its order
}

// part is an offer in the table.
type part struct {
	*Offer
	lost bool // the cluster's backends are a last resort
}

func (p *part) compare(cluster, slice string) int {
	return cmp.Or(cmp.Compare(p.Cluster, cluster), cmp.Compare(p.Slice, slice))
}

// cluster is what is known of all offers of a cluster.
type cluster struct {
	lost  bool
	names map[Name]int // offers by service
}

// NewTable returns an empty table.
func NewTable() *Table {
	return &Table{
		entries: make(map[Name]*entry), fronts: make(map[Frontend]*front), clusters: make(map[string]*cluster),
		changes: newChanges(), changed: make(chan struct{}),
	}
}

// Put puts what a cluster offers of a service, or a slice of it, in place of what it offered there before. It keeps o. Of what
// is not shared, nothing is for us: the cluster says so, and takes back what it shared before.
func (t *Table) Put(o Offer) {
	if o.Backends = normalize(o.Backends); !o.Shared {
		o.Backends = nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entry(o.Service)
	c := t.cluster(o.Cluster)
	i, found := slices.BinarySearchFunc(e.parts, &o, func(p part, o *Offer) int { return p.compare(o.Cluster, o.Slice) })
	var before *Offer
	if found {
		before = e.parts[i].Offer
		e.parts[i].Offer = &o
	} else {
		e.parts = slices.Insert(e.parts, i, part{&o, c.lost})
		c.names[o.Service]++
		t.offers++
	}
	t.replace(e, before, &o, e.parts[i].lost)
	t.announce()
}

// Revise takes addresses from what a cluster offers of a service, and adds others to it, which are reached at the same ports. It
// is not ok, and changes nothing, if there is no such offer, its addresses differ in more than themselves, not all that is
// removed is there or some of what is added, or nothing would be left.
func (t *Table) Revise(cluster string, name Name, removed, added []netip.Addr) (ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[name]
	if e == nil {
		return false
	}
	i, found := slices.BinarySearchFunc(e.parts, "", func(p part, slice string) int { return p.compare(cluster, slice) })
	if !found || len(e.parts[i].Backends) != 1 {
		return false
	}
	is := e.parts[i].Backends[0]
	addrs, ok := revised(is.Addrs, removed, added)
	if !ok || len(addrs) == 0 {
		return false
	}
	of := func(addrs []netip.Addr) *Offer {
		o := *e.parts[i].Offer
		o.Backends = []Subset{{Ports: is.Ports, State: is.State, Addrs: addrs}}
		return &o
	}
	e.parts[i].Offer = of(addrs)
	t.replace(e, of(removed), of(added), e.parts[i].lost)
	t.announce()
	return true
}

// revised returns a copy of sorted addresses without some and with others, both of which it sorts.
func revised(all, removed, added []netip.Addr) (now []netip.Addr, ok bool) {
	slices.SortFunc(removed, netip.Addr.Compare)
	slices.SortFunc(added, netip.Addr.Compare)
	now = make([]netip.Addr, 0, len(all)+len(added)) // a few more than are left
	for len(removed)+len(added) > 0 {
		removes := len(added) == 0 || len(removed) > 0 && removed[0].Less(added[0])
		var next netip.Addr
		if removes {
			next, removed = removed[0], removed[1:]
		} else {
			next, added = added[0], added[1:]
		}
		i, found := slices.BinarySearchFunc(all, next, netip.Addr.Compare)
		if found != removes {
			return nil, false
		}
		now, all = append(now, all[:i]...), all[i:]
		switch {
		case removes:
			all = all[1:]
		case len(now) > 0 && now[len(now)-1] == next: // it is added twice
			return nil, false
		default:
			now = append(now, next)
		}
	}
	return append(now, all...), true
}

// Delete forgets what a cluster offers of a service, or of a slice of it; an unknown one is fine.
func (t *Table) Delete(clusterName string, name Name, slice string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[name]
	if e == nil {
		return
	}
	i, found := slices.BinarySearchFunc(e.parts, slice, func(p part, slice string) int { return p.compare(clusterName, slice) })
	if !found {
		return
	}
	before := e.parts[i]
	e.parts = slices.Delete(e.parts, i, i+1)
	t.offers--
	c := t.clusters[clusterName]
	if c.names[name]--; c.names[name] == 0 {
		delete(c.names, name)
	}
	t.replace(e, before.Offer, nil, before.lost)
	t.release(e)
	if len(c.names) == 0 && !c.lost {
		delete(t.clusters, clusterName)
	}
	t.announce()
}

// Offer returns what a cluster offers of a service, or of a slice of it.
func (t *Table) Offer(cluster string, name Name, slice string) (o *Offer, ok bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	e := t.entries[name]
	if e == nil {
		return nil, false
	}
	i, found := slices.BinarySearchFunc(e.parts, slice, func(p part, slice string) int { return p.compare(cluster, slice) })
	if !found {
		return nil, false
	}
	return e.parts[i].Offer, true
}

// PutLocal puts a service of our own cluster in place of what its source had under its name.
func (t *Table) PutLocal(local Local) {
	l := local.normalized()
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entry(l.Service)
	i, found := slices.BinarySearchFunc(e.locals, l.Source, func(l *Local, s Source) int { return cmp.Compare(l.Source, s) })
	before := e.local()
	if found {
		e.locals[i] = l
	} else {
		e.locals = slices.Insert(e.locals, i, l)
	}
	if !found && len(e.locals) == 1 {
		t.locals++
	}
	if i == 0 {
		t.enforce(e, before)
	}
	t.announce()
}

// DeleteLocal forgets the service of our own cluster that the source had under the name; an unknown one is fine.
func (t *Table) DeleteLocal(source Source, name Name) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.entries[name]
	if e == nil {
		return
	}
	i, found := slices.BinarySearchFunc(e.locals, source, func(l *Local, s Source) int { return cmp.Compare(l.Source, s) })
	if !found {
		return
	}
	before := e.local()
	e.locals = slices.Delete(e.locals, i, i+1)
	if len(e.locals) == 0 {
		t.locals--
	}
	if i == 0 {
		t.enforce(e, before)
	}
	t.release(e)
	t.announce()
}

// lostShare is how many services [Table.SetLost] turns over before it lets others at the table.
const lostShare = 256

// SetLost says whether a cluster is lost: then its backends are used where there is no other. It is for what the cluster
// offers from now on, too.
func (t *Table) SetLost(name string, lost bool) {
	t.mu.Lock()
	c := t.cluster(name)
	c.lost = lost
	names := make([]Name, 0, len(c.names))
	for n := range c.names {
		names = append(names, n)
	}
	if len(names) == 0 && !lost {
		delete(t.clusters, name)
	}
	t.mu.Unlock()
	for share := range slices.Chunk(names, lostShare) {
		t.mu.Lock()
		for _, n := range share {
			t.turn(name, t.entries[n], lost)
		}
		t.announce()
		t.mu.Unlock()
	}
}

// turn makes the parts of a cluster lost or not. mu is held.
func (t *Table) turn(cluster string, e *entry, lost bool) {
	if c := t.clusters[cluster]; e == nil || c == nil || c.lost != lost {
		return
	}
	turned := false
	for i := range e.parts {
		if p := &e.parts[i]; p.Cluster == cluster && p.lost != lost {
			p.lost, turned = lost, true
		}
	}
	if turned {
		t.rebuildAll(e)
	}
}

// Len is the number of offers.
func (t *Table) Len() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.offers
}

// Locals is the number of local services.
func (t *Table) Locals() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.locals
}

// Snapshot returns all offers, ordered by service, cluster and slice.
func (t *Table) Snapshot() []*Offer {
	t.mu.RLock()
	all := make([]*Offer, 0, t.offers)
	for _, e := range t.entries {
		for _, p := range e.parts {
			all = append(all, p.Offer)
		}
	}
	t.mu.RUnlock()
	slices.SortFunc(all, func(a, b *Offer) int {
		return cmp.Or(a.Service.Compare(b.Service), cmp.Compare(a.Cluster, b.Cluster), cmp.Compare(a.Slice, b.Slice))
	})
	return all
}

func (t *Table) entry(name Name) *entry {
	e := t.entries[name]
	if e == nil {
		e = &entry{name: name}
		t.entries[name] = e
	}
	return e
}

func (t *Table) cluster(name string) *cluster {
	c := t.clusters[name]
	if c == nil {
		c = &cluster{names: make(map[Name]int)}
		t.clusters[name] = c
	}
	return c
}

// release forgets an entry of which nothing is known any more.
func (t *Table) release(e *entry) {
	if len(e.parts) == 0 && len(e.locals) == 0 {
		delete(t.entries, e.name)
	}
}

// local is the local service in force, nil if there is none.
func (e *entry) local() *Local {
	if len(e.locals) == 0 {
		return nil
	}
	return e.locals[0]
}
