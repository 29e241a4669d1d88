// SPDX-License-Identifier: Apache-2.0

package service

// class is what decides about the use of a backend, in three bits: whether it is another cluster's, whether it is draining,
// and whether its cluster is lost.
type class uint8

const (
	classRemote class = 1 << iota
	classDraining
	classLost
	classes
)

// classSet is a set of classes, a bit for each.
type classSet uint8

func (c classSet) has(of class) bool { return c>>of&1 == 1 }

// tally counts the backends of each class that a frontend could use.
type tally [classes]int32

func (t *tally) any(of classSet) bool {
	for c, n := range t {
		if n > 0 && of.has(class(c)) {
			return true
		}
	}
	return false
}

// choose returns the classes of the backends that are used: none only where there is no backend at all. The ready come
// before the draining, and these before those of lost clusters, of which nobody knows whether they are there still. Among
// the alike, affinity decides.
func choose(a Affinity, t *tally) classSet {
	const local, remote classSet = 1, 1 << classRemote
	first, second := local|remote, classSet(0)
	switch a {
	case AffinityLocal:
		first, second = local, remote
	case AffinityRemote:
		first, second = remote, local
	}
	for _, state := range []class{0, classDraining, classLost, classLost | classDraining} {
		for _, of := range []classSet{first << state, second << state} {
			if t.any(of) {
				return of
			}
		}
	}
	return 0
}
