// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"encoding/base64"
	"math"
	"strings"
	"unsafe"
)

// scanAnnouncement decodes the JSON that writers really emit: one flat object, names in their usual case, plain strings.
// It allocates nothing but the mask. On anything else, valid or not, it returns false with w in any state, and the
// general decoder has the word; FuzzScan holds the two to the same results.
func scanAnnouncement(value []byte, w *wireAnnouncement) bool {
	s := scanner{rest: value}
	if !s.skip('{') {
		return false
	}
	if s.skip('}') {
		return len(s.rest) == 0
	}
	for {
		name, ok := s.text()
		if !ok || !s.skip(':') || !s.field(name, w) {
			return false
		}
		if s.skip('}') {
			return len(s.rest) == 0
		}
		if !s.skip(',') {
			return false
		}
	}
}

type scanner struct {
	rest []byte
	seen uint16 // fields met: a repeated one is for the general decoder
}

// field decodes the value of one field.
func (s *scanner) field(name string, w *wireAnnouncement) bool {
	var (
		to  *string
		bit uint16
	)
	switch name {
	case "IP":
		to, bit = &w.IP, 1<<0
	case "Mask":
		return s.once(1<<1) && s.mask(w)
	case "HostIP":
		to, bit = &w.HostIP, 1<<2
	case "ID":
		n, ok := s.number(math.MaxUint32)
		w.ID = uint32(n)
		return ok && s.once(1<<3)
	case "Key":
		n, ok := s.number(math.MaxUint8)
		w.Key = uint8(n)
		return ok && s.once(1<<4)
	case "Metadata":
		to, bit = &w.Metadata, 1<<5
	case "K8sNamespace":
		to, bit = &w.K8sNamespace, 1<<6
	case "K8sPodName":
		to, bit = &w.K8sPodName, 1<<7
	case "K8sServiceAccount":
		to, bit = &w.K8sServiceAccount, 1<<8
	case "NamedPorts":
		ports, ok := s.ports()
		w.NamedPorts = ports
		return ok && s.once(1<<9)
	default:
		return false
	}
	var ok bool
	*to, ok = s.text()
	return ok && s.once(bit)
}

func (s *scanner) once(bit uint16) bool {
	fresh := s.seen&bit == 0
	s.seen |= bit
	return fresh
}

// skip passes over c if it comes next.
func (s *scanner) skip(c byte) bool {
	if len(s.rest) == 0 || s.rest[0] != c {
		return false
	}
	s.rest = s.rest[1:]
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

// ports passes over a list of at least one named port, and returns it in place. What it accepts is exactly what
// [NewNamedPorts] writes.
func (s *scanner) ports() (NamedPorts, bool) {
	from := s.rest
	if !s.skip('[') {
		return "", false
	}
	for {
		ok := s.literal(`{"Name":`) && s.plain() && s.literal(`,"Port":`)
		if !ok {
			return "", false
		}
		if _, ok := s.number(math.MaxUint16); !ok || !s.literal(`,"Protocol":`) || !s.plain() || !s.skip('}') {
			return "", false
		}
		if s.skip(']') {
			n := len(from) - len(s.rest)
			return NamedPorts(unsafe.String(unsafe.SliceData(from), n)), true
		}
		if !s.skip(',') {
			return "", false
		}
	}
}

// plain passes over a string that JSON writes in one way only.
func (s *scanner) plain() bool {
	text, ok := s.text()
	return ok && !strings.ContainsAny(text, "<>&")
}

// literal passes over text if it comes next.
func (s *scanner) literal(text string) bool {
	if len(s.rest) < len(text) || string(s.rest[:len(text)]) != text {
		return false
	}
	s.rest = s.rest[len(text):]
	return true
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

// mask reads null or the base64 of a mask.
func (s *scanner) mask(w *wireAnnouncement) bool {
	const null = "null"
	if len(s.rest) >= len(null) && string(s.rest[:len(null)]) == null {
		s.rest = s.rest[len(null):]
		return true
	}
	text, ok := s.text()
	if !ok {
		return false
	}
	mask, err := base64.StdEncoding.DecodeString(text)
	w.Mask = mask
	return err == nil
}
