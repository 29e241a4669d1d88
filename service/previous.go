// SPDX-License-Identifier: Apache-2.0

package service

import (
	"bytes"
	"net/netip"
	"slices"
	"strings"
)

const (
	// previousLeast is from how many bytes on a value is kept: decoding less takes no longer than what it would save.
	previousLeast = 16 << 10
	// previousPerBackend bounds what is kept for each address: a value that is long for other reasons than its backends is not.
	previousPerBackend = 128
	// markEvery is at how many addresses there is a mark: so many are read before what differs, and behind it.
	markEvery = 16
	// mostGroups is how many of what is between two marks is read, at most, until the two are in step again.
	mostGroups = 3
	// mostDifferent is how many addresses may differ between one value and the next; with more, the whole is decoded.
	mostDifferent = 64
)

// Previous is a large value of [StatePrefix] that was decoded, kept to read the next one under its key only where it differs:
// finding that out is comparing memory, a hundredth of decoding.
//
// It knows values whose backends are all reached at the same ports, as those of one service commonly are. It is for one
// goroutine.
type Previous struct {
	value []byte
	marks []uint32 // offsets of addresses in value, ascending; the last is that of the end of the object that they are in
	ports string   // what stands behind each address
}

// DecodeOffer is [ParseOffer] which also returns what it takes to read the next value faster; nil if that is not worth
// while. Value may be reused afterwards.
func DecodeOffer(value []byte) (Offer, *Previous, error) {
	if len(value) < previousLeast {
		o, err := ParseOffer(value)
		return o, nil, err
	}
	var marks markedBackends
	o, ok := scanMarked(value, &marks)
	if !ok {
		o, err := ParseOffer(value)
		return o, nil, err
	}
	if len(o.Backends) != 1 || o.Len() != marks.addresses || !marks.alike || len(value) > previousPerBackend*marks.addresses {
		return o, nil, nil
	}
	return o, &Previous{value: slices.Clone(value), marks: slices.Clone(marks.offsets), ports: strings.Clone(marks.ports)}, nil
}

// Size is how many bytes are kept.
func (p *Previous) Size() int {
	if p == nil {
		return 0
	}
	return cap(p.value) + 4*cap(p.marks)
}

// Next tells by which addresses the backends of value, the next under the key, differ from those before; in all else the two
// are the same. If it is not ok, value must be decoded, and p is of no use any more: that they differ elsewhere, or by too much,
// or value is none. Who applies the difference must find all that is removed, and nothing that is added.
func (p *Previous) Next(value []byte) (removed, added []netip.Addr, ok bool) {
	var (
		old, now = 0, 0 // up to where the two were read; the rest is in step
		first    = -1   // where they differ first
		mark     = 0    // the next one to be carried over
		marks    = make([]uint32, 0, len(p.marks)+4)
	)
	for {
		same := commonPrefix(p.value[old:], value[now:])
		ends := old+same == len(p.value) && now+same == len(value)
		if ends && first < 0 {
			return nil, nil, true
		}
		from := len(p.marks)
		if !ends {
			if from, ok = p.before(old + same); !ok {
				return nil, nil, false
			}
		}
		for ; mark < from; mark++ {
			marks = append(marks, uint32(int(p.marks[mark])-old+now))
		}
		if ends {
			break
		}
		begin := int(p.marks[from]) - old + now
		part, ok := p.compare(from, value[begin:])
		if !ok || len(removed)+len(added)+len(part.removed)+len(part.added) > mostDifferent {
			return nil, nil, false
		}
		removed, added = append(removed, part.removed...), append(added, part.added...)
		for _, offset := range part.offsets {
			marks = append(marks, uint32(begin+offset))
		}
		if first < 0 {
			first = begin
		}
		mark, old, now = part.mark, int(p.marks[part.mark]), begin+part.size
	}
	p.value, p.marks = append(p.value[:first], value[first:]...), marks
	return removed, added, true
}

// before returns the index of the last mark before an offset at which values differ, if they differ in a backend there.
func (p *Previous) before(offset int) (mark int, ok bool) {
	end := len(p.marks) - 1
	mark, exact := slices.BinarySearch(p.marks, uint32(offset))
	if !exact {
		mark--
	}
	if mark < 0 || offset > int(p.marks[end]) {
		return 0, false
	}
	return min(mark, end-1), true // what comes behind all others stands behind the last of them
}

// difference is a part in which a value differs from the one before.
type difference struct {
	removed, added []netip.Addr
	mark           int   // of the value before, up to which it goes
	size           int   // in the value
	offsets        []int // of marks in it, from its beginning
}

// compare reads the addresses that value has from a mark on, until it is in step with what was there before.
func (p *Previous) compare(mark int, value []byte) (d difference, ok bool) {
	end := len(p.marks) - 1
	var steps [mostGroups][]byte // what stands at the next marks
	for i := range steps {
		if next := mark + 1 + i; next < end {
			name := p.value[p.marks[next]:]
			steps[i] = name[:1+bytes.IndexByte(name, ':')]
		}
	}
	var now []netip.Addr
	s := scanner{rest: value}
	for previous := ""; d.mark == 0; {
		for i, step := range steps {
			if step != nil && bytes.HasPrefix(s.rest, step) {
				d.mark = mark + 1 + i
			}
		}
		if d.mark > 0 {
			break
		}
		if len(now)%markEvery == 0 {
			d.offsets = append(d.offsets, len(value)-len(s.rest))
		}
		name, addr, ok := p.address(&s)
		if !ok || name <= previous || len(now) > mostGroups*markEvery+mostDifferent {
			return d, false
		}
		previous, now = name, append(now, addr)
		if !s.skip(',') {
			d.mark = end
		}
	}
	if d.mark-mark > mostGroups {
		return d, false
	}
	d.size = len(value) - len(s.rest)
	var before []netip.Addr
	for s = (scanner{rest: p.value[p.marks[mark]:p.marks[d.mark]]}); len(s.rest) > 0; s.skip(',') {
		_, addr, ok := p.address(&s)
		if !ok {
			return d, false
		}
		before = append(before, addr)
	}
	before, now = trim(before, now)
	d.removed, d.added = without(before, now), without(now, before)
	return d, true
}

// address reads an address and the ports behind it.
func (p *Previous) address(s *scanner) (name string, addr netip.Addr, ok bool) {
	name, addr, ok = s.address()
	mapped := ok && addr.Is4() && name[0] == ':' // it has another name, too
	return name, addr, ok && !mapped && s.literal(p.ports)
}

// without returns what is in a and not in b.
func without(a, b []netip.Addr) (left []netip.Addr) {
	for _, addr := range a {
		if !slices.Contains(b, addr) {
			left = append(left, addr)
		}
	}
	return left
}

// block is how much is compared at once.
const block = 1024

// commonPrefix is how many bytes two values have in common from the beginning.
func commonPrefix(a, b []byte) (n int) {
	most := min(len(a), len(b))
	for n+block <= most && bytes.Equal(a[n:n+block], b[n:n+block]) {
		n += block
	}
	for n < most && a[n] == b[n] {
		n++
	}
	return n
}
