// SPDX-License-Identifier: Apache-2.0

package service

import "slices"

// log is the latest changes of what a frontend leads to.
type log struct {
	from    uint64 // all changes after this revision are in the log
	entries []logged
}

type logged struct {
	rev uint64
	Backend
	added bool
}

// add notes that a backend was added or removed, among n. A log that is not much shorter than what it tells of is worth nothing:
// of one that has grown so long, the later half is kept, so that a reader who keeps up is never told the whole.
func (l *log) add(rev uint64, b Backend, added bool, n int) {
	if most := n / 4; len(l.entries) >= most {
		l.trim(rev, most/2)
	}
	if l.from < rev {
		l.entries = append(l.entries, logged{rev, b, added})
	}
}

// trim keeps so many of the latest entries at most, of whole revisions.
func (l *log) trim(rev uint64, keep int) {
	if keep == 0 {
		l.forget(rev)
		return
	}
	first := len(l.entries) - keep
	l.from = l.entries[first-1].rev
	for first < len(l.entries) && l.entries[first].rev == l.from {
		first++
	}
	l.entries = slices.Clone(l.entries[first:])
}

// compare notes what turns the sorted was into the sorted now.
func (l *log) compare(rev uint64, was, now []Backend) {
	i, j := 0, 0
	for (i < len(was) || j < len(now)) && l.from < rev {
		order := -1
		switch {
		case i == len(was):
			order = 1
		case j < len(now):
			order = was[i].Compare(now[j])
		}
		switch {
		case order < 0:
			l.add(rev, was[i], false, len(now))
			i++
		case order > 0:
			l.add(rev, now[j], true, len(now))
			j++
		default:
			i, j = i+1, j+1
		}
	}
}

// forget makes everything up to rev unknown.
func (l *log) forget(rev uint64) { l.from, l.entries = rev, nil }

// since returns the backends that have changed after base and are there now, and those that are not, or that this is not
// known. It says so of those, too, that are back where they were: they may have been elsewhere when the reader saw them.
func (l *log) since(base uint64) (added, removed []Backend, whole bool) {
	if base < l.from {
		return nil, nil, true
	}
	recent := slices.Clone(l.entries[l.after(base):])
	slices.SortStableFunc(recent, func(a, b logged) int { return a.Backend.Compare(b.Backend) })
	for i, e := range recent {
		switch last := i+1 == len(recent) || recent[i+1].Backend != e.Backend; {
		case last && e.added:
			added = append(added, e.Backend)
		case last:
			removed = append(removed, e.Backend)
		}
	}
	return added, removed, false
}

// after is the index of the first entry after at.
func (l *log) after(at uint64) int {
	i := len(l.entries)
	for i > 0 && l.entries[i-1].rev > at {
		i--
	}
	return i
}
