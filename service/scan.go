// SPDX-License-Identifier: Apache-2.0

package service

import (
	"bytes"
	"math"
	"net/netip"
	"strings"
	"unsafe"
)

// scanOffer decodes the JSON that writers really emit: names in their usual case and each once, plain strings, addresses in
// ascending order. On anything else, valid or not, it returns false, and the general decoder has the word; FuzzParseOffer holds
// the two to the same results.
func scanOffer(value []byte) (o Offer, ok bool) { return scanMarked(value, nil) }

// markedBackends is where in a value the backends are.
type markedBackends struct {
	offsets   []uint32 // of every so many addresses, and of what closes the object
	addresses int
	ports     string // what stands behind the last of them, in place
	alike     bool   // the same stands behind all
}

// scanMarked is scanOffer which, unless marks is nil, fills them.
func scanMarked(value []byte, marks *markedBackends) (o Offer, ok bool) {
	s := scanner{rest: value, marks: marks, size: len(value)}
	if !s.skip('{') {
		return o, false
	}
	for {
		name, ok := s.text()
		if !ok || !s.skip(':') || !s.field(name, &o) {
			return o, false
		}
		if s.skip('}') {
			break
		}
		if !s.skip(',') {
			return o, false
		}
	}
	if len(s.rest) > 0 {
		return o, false
	}
	for _, side := range []*[]Subset{&o.Frontends, &o.Backends} {
		*side = normalize(*side)
		sortSubsets(*side)
	}
	return o, true
}

type scanner struct {
	rest  []byte
	seen  uint16 // fields met: a repeated one is for the general decoder
	marks *markedBackends
	size  int // of the value
}

func (s *scanner) once(bit uint16) bool {
	fresh := s.seen&bit == 0
	s.seen |= bit
	return fresh
}

// field decodes the value of one field.
func (s *scanner) field(name string, o *Offer) bool {
	var ok bool
	switch name {
	case "cluster":
		return s.kept(&o.Cluster) && s.once(1<<0)
	case "namespace":
		return s.kept(&o.Service.Namespace) && s.once(1<<1)
	case "name":
		return s.kept(&o.Service.Name) && s.once(1<<2)
	case "frontends":
		o.Frontends, ok = s.addresses(nil)
		return ok && s.once(1<<3)
	case "backends":
		o.Backends, ok = s.addresses(s.marks)
		return ok && s.once(1<<4)
	case "includeExternal":
		o.IncludeExternal, ok = s.truth()
		return ok && s.once(1<<5)
	case "shared":
		o.Shared, ok = s.truth()
		return ok && s.once(1<<6)
	case "clusterID":
		var n uint64
		n, ok = s.number(math.MaxUint32)
		o.ClusterID = uint32(n)
		return ok && s.once(1<<7)
	case "hostnames", "zones", "labels", "selector":
		return s.any(8)
	}
	return false
}

// longestAddr is that of the text of an address.
const longestAddr = len("ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255")

// address reads the name of a member of such an object, and what stands between it and the ports.
func (s *scanner) address() (name string, addr netip.Addr, ok bool) {
	var buf [longestAddr]byte
	name, ok = s.text()
	if !ok || !s.skip(':') {
		return "", addr, false
	}
	addr, err := netip.ParseAddr(name)
	if err != nil || addr.Is6() && string(addr.AppendTo(buf[:0])) != name || addr.Zone() != "" {
		return "", addr, false
	}
	return name, addr.Unmap(), true
}

// addresses reads an object of ports by address.
func (s *scanner) addresses(marks *markedBackends) ([]Subset, bool) {
	var (
		subsets  []Subset
		alike    map[string]int // by the text of the ports
		text     []byte         // of the ports of subsets[at]
		at       int
		previous string
		n        int
	)
	if !s.skip('{') {
		return nil, false
	}
	if s.skip('}') {
		return nil, true
	}
	for ; ; n++ {
		if marks != nil && n%markEvery == 0 {
			marks.offsets = append(marks.offsets, uint32(s.size-len(s.rest)))
		}
		name, addr, ok := s.address()
		if !ok || name <= previous {
			return nil, false
		}
		previous = name
		if text != nil && bytes.HasPrefix(s.rest, text) {
			s.rest = s.rest[len(text):]
		} else {
			from := s.rest
			ports, ok := s.ports()
			if !ok {
				return nil, false
			}
			text = from[:len(from)-len(s.rest)]
			if alike == nil {
				alike = make(map[string]int)
			}
			if at, ok = alike[string(text)]; !ok {
				at = len(subsets)
				alike[string(text)] = at
				subsets = append(subsets, Subset{Ports: ports})
			}
		}
		subsets[at].Addrs = append(subsets[at].Addrs, addr)
		if s.skip('}') {
			if marks != nil {
				marks.offsets = append(marks.offsets, uint32(s.size-len(s.rest)-1))
				marks.addresses, marks.alike = n+1, len(alike) == 1
				marks.ports = unsafe.String(unsafe.SliceData(text), len(text))
			}
			return subsets, true
		}
		if !s.skip(',') {
			return nil, false
		}
	}
}

// ports reads an object of ports by name.
func (s *scanner) ports() (ports []NamedPort, ok bool) {
	if !s.skip('{') {
		return nil, false
	}
	if s.skip('}') {
		return nil, true
	}
	previous := ""
	for first := true; ; first = false {
		name, ok := s.text()
		if !ok || !first && name <= previous || !s.literal(`:{"Protocol":`) {
			return nil, false
		}
		previous = name
		text, ok := s.text()
		if !ok || !s.literal(`,"Port":`) {
			return nil, false
		}
		number, ok := s.number(math.MaxUint16)
		if !ok || !s.skip('}') {
			return nil, false
		}
		protocol, err := ParseProtocol(text)
		if err != nil || number == 0 || protocol.String() != text {
			return nil, false
		}
		ports = append(ports, NamedPort{strings.Clone(name), protocol, uint16(number)})
		if s.skip('}') {
			return ports, true
		}
		if !s.skip(',') {
			return nil, false
		}
	}
}

// any passes over a value, of at most depth levels.
func (s *scanner) any(depth int) bool {
	if depth == 0 || len(s.rest) == 0 {
		return false
	}
	switch s.rest[0] {
	case '"':
		_, ok := s.text()
		return ok
	case '{':
		return s.members(depth, '{', '}', true)
	case '[':
		return s.members(depth, '[', ']', false)
	case 't', 'f':
		_, ok := s.truth()
		return ok
	}
	return s.literal("null")
}

// members passes over an object or an array.
func (s *scanner) members(depth int, open, end byte, named bool) bool {
	if !s.skip(open) {
		return false
	}
	if s.skip(end) {
		return true
	}
	for {
		if named {
			if _, ok := s.text(); !ok || !s.skip(':') {
				return false
			}
		}
		if !s.any(depth - 1) {
			return false
		}
		if s.skip(end) {
			return true
		}
		if !s.skip(',') {
			return false
		}
	}
}

// kept reads a string that outlives the value.
func (s *scanner) kept(to *string) bool {
	text, ok := s.text()
	*to = strings.Clone(text)
	return ok
}

// skip passes over c if it comes next.
func (s *scanner) skip(c byte) bool {
	if len(s.rest) == 0 || s.rest[0] != c {
		return false
	}
	s.rest = s.rest[1:]
	return true
}

// literal passes over text if it comes next.
func (s *scanner) literal(text string) bool {
	if len(s.rest) < len(text) || string(s.rest[:len(text)]) != text {
		return false
	}
	s.rest = s.rest[len(text):]
	return true
}

// text reads a string of printable ASCII without escapes, and returns it in place.
func (s *scanner) text() (string, bool) {
	if !s.skip('"') {
		return "", false
	}
	for i, c := range s.rest {
		switch {
		case c == '"':
			text := unsafe.String(unsafe.SliceData(s.rest), i)
			s.rest = s.rest[i+1:]
			return text, true
		case c < ' ' || c > '~' || c == '\\':
			return "", false
		}
	}
	return "", false
}

func (s *scanner) truth() (value, ok bool) {
	if s.literal("true") {
		return true, true
	}
	return false, s.literal("false")
}

// number reads a decimal number of at most limit, without sign, leading zeros, fraction or exponent.
func (s *scanner) number(limit uint64) (uint64, bool) {
	var n uint64
	for i, c := range s.rest {
		if c < '0' || c > '9' {
			s.rest = s.rest[i:]
			return n, i > 0 && c != '.' && c != 'e' && c != 'E'
		}
		if n = n*10 + uint64(c-'0'); n > limit || i > 0 && s.rest[0] == '0' {
			return 0, false
		}
	}
	return 0, false
}
