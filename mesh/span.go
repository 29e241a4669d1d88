// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"encoding/binary"
	"math/bits"
	"net/netip"
	"slices"
)

// point is an address in one space for both families, in which IPv4 has the place of IPv4-mapped IPv6.
type point struct{ hi, lo uint64 }

var lastPoint = point{^uint64(0), ^uint64(0)}

func pointOf(addr netip.Addr) point {
	b := addr.As16()
	return point{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func (p point) less(q point) bool { return p.hi < q.hi || p.hi == q.hi && p.lo < q.lo }

func (p point) compare(q point) int { return cmp.Or(cmp.Compare(p.hi, q.hi), cmp.Compare(p.lo, q.lo)) }

// next is the point after p, which must not be the last one.
func (p point) next() point {
	lo, carry := bits.Add64(p.lo, 1, 0)
	return point{p.hi + carry, lo}
}

// before is the point before p, which must not be the first one.
func (p point) before() point {
	lo, borrow := bits.Sub64(p.lo, 1, 0)
	return point{p.hi - borrow, lo}
}

// span is all points from first to last.
type span struct{ first, last point }

var everything = span{last: lastPoint}

// spanOf is the span of a masked prefix.
func spanOf(p netip.Prefix) span {
	s := span{first: pointOf(p.Addr())}
	s.last = s.first
	switch free := p.Addr().BitLen() - p.Bits(); {
	case free > 64:
		s.last = point{s.first.hi | (1<<(free-64) - 1), ^uint64(0)}
	case free == 64:
		s.last.lo = ^uint64(0)
	default:
		s.last.lo |= 1<<free - 1
	}
	return s
}

func (s span) contains(t span) bool { return !t.first.less(s.first) && !s.last.less(t.last) }

// within is the part of s that lies in t too, of which there must be one.
func (s span) within(t span) span {
	if s.first.less(t.first) {
		s.first = t.first
	}
	if t.last.less(s.last) {
		s.last = t.last
	}
	return s
}

// spans is a set of points: ascending spans that neither overlap nor touch.
type spans []span

func spansOf(prefixes ...netip.Prefix) spans {
	all := make(spans, 0, len(prefixes))
	for _, p := range prefixes {
		all = append(all, spanOf(p))
	}
	slices.SortFunc(all, func(a, b span) int { return a.first.compare(b.first) })
	var set spans
	for _, s := range all {
		last := len(set) - 1
		switch {
		case last < 0 || set[last].last != lastPoint && set[last].last.next().less(s.first):
			set = append(set, s)
		case set[last].last.less(s.last):
			set[last].last = s.last
		}
	}
	return set
}

// minus is s without the points of t.
func (s spans) minus(t spans) spans {
	var set spans
	for _, rest := range s {
		for _, cut := range t[t.find(rest.first):] {
			if rest.last.less(cut.first) {
				break
			}
			if rest.first.less(cut.first) {
				set = append(set, span{rest.first, cut.first.before()})
			}
			if !cut.last.less(rest.last) {
				rest = span{first: lastPoint} // nothing is left of it
				break
			}
			rest.first = cut.last.next()
		}
		if !rest.last.less(rest.first) {
			set = append(set, rest)
		}
	}
	return set
}

// find returns the place of the first span that does not end before p.
func (s spans) find(p point) int {
	i, _ := slices.BinarySearchFunc(s, p, func(s span, p point) int { return s.last.compare(p) })
	return i
}

func (s spans) overlap(t span) bool {
	i := s.find(t.first)
	return i < len(s) && !t.last.less(s[i].first)
}

// around returns the span of the set that contains all of t.
func (s spans) around(t span) (span, bool) {
	if i := s.find(t.first); i < len(s) && s[i].contains(t) {
		return s[i], true
	}
	return span{}, false
}
