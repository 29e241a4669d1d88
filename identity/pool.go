// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"maps"
	"slices"
)

// Pool knows which identities of a cluster's range stand for which labels, and which are free. It decides, and does
// nothing else; it is not safe for concurrent use.
type Pool struct {
	lo, hi ID
	byID   map[ID]string   // canonical labels
	ids    map[string][]ID // ascending; more than one where the cluster's etcd has lost the count
	held   map[ID]bool     // picked, and not known to be bound yet
}

// NewPool returns the pool of the identities lo to hi, all free.
func NewPool(lo, hi ID) *Pool {
	return &Pool{lo: lo, hi: hi, byID: make(map[ID]string), ids: make(map[string][]ID), held: make(map[ID]bool)}
}

// Bind notes that id stands for labels, in their canonical form. Identities out of the range are none of the pool's.
func (p *Pool) Bind(id ID, labels string) {
	if id < p.lo || id > p.hi || p.byID[id] == labels {
		return
	}
	p.Unbind(id)
	p.byID[id] = labels
	all := p.ids[labels]
	at, _ := slices.BinarySearch(all, id)
	p.ids[labels] = slices.Insert(all, at, id)
}

// Unbind notes that id stands for nothing any more.
func (p *Pool) Unbind(id ID) {
	labels, ok := p.byID[id]
	if !ok {
		return
	}
	delete(p.byID, id)
	if rest := slices.DeleteFunc(p.ids[labels], func(other ID) bool { return other == id }); len(rest) > 0 {
		p.ids[labels] = rest
	} else {
		delete(p.ids, labels)
	}
}

// ID returns the identity of labels: the lowest if there are several, so that all nodes choose the same.
func (p *Pool) ID(labels string) (ID, bool) {
	if all := p.ids[labels]; len(all) > 0 {
		return all[0], true
	}
	return Invalid, false
}

// Labels returns what id stands for.
func (p *Pool) Labels(id ID) (string, bool) {
	labels, ok := p.byID[id]
	return labels, ok
}

// Pick returns a free identity near to a random one of n, that random chooses below n, and holds it until Release: nobody
// else is given it. It returns false if none is free.
func (p *Pool) Pick(random func(n uint32) uint32) (ID, bool) {
	size := uint32(p.hi - p.lo + 1)
	start := random(size)
	for i := range size {
		id := p.lo + ID((start+i)%size)
		if _, bound := p.byID[id]; !bound && !p.held[id] {
			p.held[id] = true
			return id, true
		}
	}
	return Invalid, false
}

// Hold keeps id, which is in use, from being picked, bound or not, until Release.
func (p *Pool) Hold(id ID) { p.held[id] = true }

// Release ends what Pick or Hold held.
func (p *Pool) Release(id ID) { delete(p.held, id) }

// Free is how many identities are neither bound nor held.
func (p *Pool) Free() int {
	n := int(p.hi-p.lo) + 1 - len(p.byID)
	for id := range maps.Keys(p.held) {
		if _, bound := p.byID[id]; !bound {
			n--
		}
	}
	return n
}
