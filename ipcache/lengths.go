// SPDX-License-Identifier: Apache-2.0

package ipcache

import "math/bits"

// lengths counts prefixes by length: those of which there are any are what a lookup has to try.
type lengths struct {
	count [129]int
	some  [3]uint64 // bit n%64 of word n/64: count[n] is not 0
}

func (l *lengths) add(length, by int) {
	l.count[length] += by
	bit := uint64(1) << (length % 64)
	if l.count[length] != 0 {
		l.some[length/64] |= bit
	} else {
		l.some[length/64] &^= bit
	}
}

// longest returns the greatest length up to most of which there are prefixes.
func (l *lengths) longest(most int) (length int, ok bool) {
	if most < 0 {
		return 0, false
	}
	word := most / 64
	some := l.some[word] & (^uint64(0) >> (63 - most%64))
	for some == 0 {
		if word--; word < 0 {
			return 0, false
		}
		some = l.some[word]
	}
	return word*64 + 63 - bits.LeadingZeros64(some), true
}
