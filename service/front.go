// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"slices"
)

// front is a frontend that local services have. The first of its claims is in force; the others wait for it to go.
type front struct {
	at     Frontend
	claims []claim // by source and name of the service
	dead   bool    // there is no claim, and readers are still to hear of it

	tally    tally
	use      classSet
	backends []Backend // in use, sorted
	// The rest of what readers are told.
	service        Name
	clientAffinity uint32
	algorithm      Algorithm

	rev          uint64
	older, newer *front
	log          log
}

// claim is a local service's to a frontend.
type claim struct {
	entry  *entry
	source Source
	port   string
}

func (c claim) compare(d claim) int {
	return cmp.Or(cmp.Compare(c.source, d.source), c.entry.name.Compare(d.entry.name))
}

// classed is a backend with its class.
type classed struct {
	Backend
	class class
}

func compareClassed(a, b classed) int {
	return cmp.Or(a.Backend.Compare(b.Backend), cmp.Compare(a.class, b.class))
}

// enforce makes the frontends those of the local service that is in force now, in place of before. mu is held.
func (t *Table) enforce(e *entry, before *Local) {
	now := e.local()
	if before != nil && now != nil && before.Source == now.Source && before.sameBut(now) {
		for _, f := range e.fronts {
			if f.claims[0].entry == e {
				t.turnOver(f, before.Backends, now.Backends, 0)
			}
		}
		return
	}
	old := e.fronts
	e.fronts = nil
	if now != nil {
		now.frontends(func(at Frontend, port string) {
			e.fronts = append(e.fronts, t.claim(at, claim{e, now.Source, port}))
		})
	}
	for _, f := range old {
		if !slices.Contains(e.fronts, f) {
			t.disclaim(f, e)
		}
	}
}

// claim adds a claim, or renews it. mu is held.
func (t *Table) claim(at Frontend, c claim) *front {
	f := t.fronts[at]
	if f == nil {
		f = &front{at: at}
		t.fronts[at] = f
	}
	f.claims = slices.DeleteFunc(f.claims, func(d claim) bool { return d.entry == c.entry })
	i, _ := slices.BinarySearchFunc(f.claims, c, claim.compare)
	f.claims = slices.Insert(f.claims, i, c)
	t.rebuild(f)
	return f
}

// disclaim takes a claim back. mu is held.
func (t *Table) disclaim(f *front, e *entry) {
	f.claims = slices.DeleteFunc(f.claims, func(c claim) bool { return c.entry == e })
	t.rebuild(f)
}

// rebuildAll reckons anew what the frontends of a service lead to. mu is held.
func (t *Table) rebuildAll(e *entry) {
	for _, f := range e.fronts {
		if f.claims[0].entry == e {
			t.rebuild(f)
		}
	}
}

// replace takes a changed offer into account. Either may be nil. mu is held.
func (t *Table) replace(e *entry, before, now *Offer, lost bool) {
	if l := e.local(); l == nil || !l.Global {
		return
	}
	class := classRemote
	if lost {
		class |= classLost
	}
	var old, fresh []Subset
	if before != nil {
		old = before.Backends
	}
	if now != nil {
		fresh = now.Backends
	}
	for _, f := range e.fronts {
		if f.claims[0].entry == e {
			t.turnOver(f, old, fresh, class)
		}
	}
}

// reach appends the backends among subsets that a frontend could use.
func (f *front) reach(buf []classed, subsets []Subset, class class) []classed {
	port, protocol, v6 := f.claims[0].port, f.at.Protocol, f.at.Addr.Is6()
	for i := range subsets {
		s := &subsets[i]
		target := s.target(port, protocol)
		if target == 0 {
			continue
		}
		of := class
		if s.State == Draining {
			of |= classDraining
		}
		for _, addr := range s.family(v6) {
			buf = append(buf, classed{Backend{addr, target}, of})
		}
	}
	return buf
}

// pool appends all backends that a frontend could use.
func (f *front) pool(buf []classed) []classed {
	e := f.claims[0].entry
	buf = f.reach(buf, e.local().Backends, 0)
	if !e.local().Global {
		return buf
	}
	for i := range e.parts {
		class := classRemote
		if e.parts[i].lost {
			class |= classLost
		}
		buf = f.reach(buf, e.parts[i].Backends, class)
	}
	return buf
}

// offers reports whether anybody offers b to the frontend, in a class that is used.
func (f *front) offers(b Backend) bool {
	e := f.claims[0].entry
	port, protocol := f.claims[0].port, f.at.Protocol
	in := func(subsets []Subset, class class) bool {
		for i := range subsets {
			s := &subsets[i]
			of := class
			if s.State == Draining {
				of |= classDraining
			}
			if f.use.has(of) && s.target(port, protocol) == b.Port && s.has(b.Addr) {
				return true
			}
		}
		return false
	}
	switch l := e.local(); {
	case in(l.Backends, 0):
		return true
	case !l.Global:
		return false
	}
	for i := range e.parts {
		class := classRemote
		if e.parts[i].lost {
			class |= classLost
		}
		if in(e.parts[i].Backends, class) {
			return true
		}
	}
	return false
}

// fewAtOnce reports whether so many changes among n backends are carried out one by one. With more, the selection is reckoned
// anew, which leaves no room behind it unused.
func fewAtOnce(changes, n int) bool { return changes <= 32 && changes <= max(2, n/8) }

// turnOver takes into account that old, of somebody whose class is given, has become fresh. mu is held.
func (t *Table) turnOver(f *front, old, fresh []Subset, class class) {
	gone, come := t.difference(f, old, fresh, class)
	if len(gone) == 0 && len(come) == 0 {
		return
	}
	for _, b := range gone {
		f.tally[b.class]--
	}
	for _, b := range come {
		f.tally[b.class]++
	}
	use := choose(f.claims[0].entry.local().Affinity, &f.tally)
	if use != f.use || !fewAtOnce(len(gone)+len(come), len(f.backends)) {
		t.rebuild(f)
		return
	}
	rev, touched := t.changes.rev+1, false
	for _, b := range gone {
		i, found := slices.BinarySearchFunc(f.backends, b.Backend, Backend.Compare)
		if use.has(b.class) && found && !f.offers(b.Backend) {
			f.backends = slices.Delete(f.backends, i, i+1)
			f.log.add(rev, b.Backend, false, len(f.backends))
			touched = true
		}
	}
	for _, b := range come {
		i, found := slices.BinarySearchFunc(f.backends, b.Backend, Backend.Compare)
		if use.has(b.class) && !found {
			f.backends = slices.Insert(f.backends, i, b.Backend)
			f.log.add(rev, b.Backend, true, len(f.backends))
			touched = true
		}
	}
	if touched {
		t.changes.touch(f)
	}
}

// difference returns what turns old into fresh, as the frontend sees it. The answers are scratch.
func (t *Table) difference(f *front, old, fresh []Subset, class class) (gone, come []classed) {
	a, b := t.a[:0], t.b[:0]
	if sameShape(old, fresh) {
		for i := range old {
			o, n := old[i], fresh[i]
			o.Addrs, n.Addrs = trim(o.Addrs, n.Addrs)
			a, b = f.reach(a, []Subset{o}, class), f.reach(b, []Subset{n}, class)
		}
	} else {
		a, b = f.reach(a, old, class), f.reach(b, fresh, class)
	}
	if len(old) > 1 {
		slices.SortFunc(a, compareClassed)
	}
	if len(fresh) > 1 {
		slices.SortFunc(b, compareClassed)
	}
	t.a, t.b = a, b
	return subtract(a, b)
}

// trim leaves away what two lists have in common at both ends.
func trim[T comparable](a, b []T) ([]T, []T) {
	for len(a) > 0 && len(b) > 0 && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for len(a) > 0 && len(b) > 0 && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return a, b
}

// subtract returns what of the sorted a is not in the sorted b, and the reverse, in their places. What stands in one of them
// twice counts twice.
func subtract(a, b []classed) (gone, come []classed) {
	gone, come = a[:0], b[:0]
	i, j := 0, 0
	for i < len(a) || j < len(b) {
		order := -1
		switch {
		case i == len(a):
			order = 1
		case j < len(b) && a[i] == b[j]:
			i, j = i+1, j+1
			continue
		case j < len(b):
			order = compareClassed(a[i], b[j])
		}
		switch {
		case order < 0:
			gone = append(gone, a[i])
			i++
		default:
			come = append(come, b[j])
			j++
		}
	}
	return gone, come
}

// rebuild reckons anew what a frontend leads to. mu is held.
func (t *Table) rebuild(f *front) {
	if len(f.claims) == 0 {
		f.tally, f.use, f.backends, f.dead = tally{}, 0, nil, true
		f.log.forget(t.changes.rev + 1)
		t.changes.touch(f)
		t.bury(f)
		return
	}
	e := f.claims[0].entry
	local := e.local()
	pool := f.pool(t.c[:0])
	t.c = pool
	f.tally = tally{}
	for _, b := range pool {
		f.tally[b.class]++
	}
	f.use = choose(local.Affinity, &f.tally)
	pool = slices.DeleteFunc(pool, func(b classed) bool { return !f.use.has(b.class) })
	slices.SortFunc(pool, compareClassed)
	pool = slices.CompactFunc(pool, func(a, b classed) bool { return a.Backend == b.Backend })

	fresh := f.rev == 0 || f.dead
	other := f.service != e.name || f.clientAffinity != local.ClientAffinity || f.algorithm != local.Algorithm
	f.service, f.clientAffinity, f.algorithm = e.name, local.ClientAffinity, local.Algorithm
	changed := f.become(pool, t.changes.rev+1, fresh)
	if f.dead {
		f.dead = false
		t.changes.tombstones--
	}
	if changed || fresh || other {
		t.changes.touch(f)
	}
}

// become makes pool, which is sorted and unique, what is in use, and reports whether that is a change.
func (f *front) become(pool []classed, rev uint64, fresh bool) (changed bool) {
	same := len(pool) == len(f.backends)
	for i := 0; same && i < len(pool); i++ {
		same = pool[i].Backend == f.backends[i]
	}
	if same {
		if fresh {
			f.log.forget(rev)
		}
		return false
	}
	now := make([]Backend, len(pool))
	for i := range pool {
		now[i] = pool[i].Backend
	}
	if fresh {
		f.log.forget(rev)
	} else {
		f.log.compare(rev, f.backends, now)
	}
	f.backends = now
	return true
}
