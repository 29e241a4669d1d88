// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"net/netip"
)

// maglevSizes are the sizes that a table can have: primes, each shortly below a power of two, so that it fills its room.
var maglevSizes = [...]int{4093, 8191, 16381, 32749, 65521, 131071}

// maglevShare is how many entries a backend gets on average, at least: by so many in a hundred, about, do backends differ
// in what they get. Only the largest table is exceeded.
const maglevShare = 20

// maglevSize is the size of the table for a number of backends. It depends on nothing else, so that all nodes agree.
func maglevSize(backends int) int {
	for _, size := range maglevSizes {
		if size >= backends*maglevShare {
			return size
		}
	}
	return maglevSizes[len(maglevSizes)-1]
}

// maglevTable fills a table with indices of backends, which must be sorted: Eisenbud and others, "Maglev: A Fast and
// Reliable Software Network Load Balancer", NSDI 2016, section 3.4. Each backend has a permutation of the entries that
// follows from its address alone, and they take turns in claiming the next entry that is free. So nodes with the same
// backends have the same table, and one backend more or less changes few of the others' entries.
func maglevTable(backends []netip.AddrPort) []uint32 {
	size := uint64(maglevSize(len(backends)))
	next, skip := make([]uint64, len(backends)), make([]uint64, len(backends))
	for i, b := range backends {
		h := hashBackend(b)
		next[i], skip[i] = h%size, mix64(h)%(size-1)+1
	}
	const free = ^uint32(0)
	table := make([]uint32, size)
	for i := range table {
		table[i] = free
	}
	for filled := uint64(0); ; {
		for i := range backends {
			for table[next[i]] != free {
				next[i] = (next[i] + skip[i]) % size
			}
			table[next[i]] = uint32(i)
			if filled++; filled == size {
				return table
			}
		}
	}
}

// hashBackend is the same on all nodes, whatever their byte order.
func hashBackend(b netip.AddrPort) uint64 {
	addr := b.Addr().As16()
	h := mix64(binary.BigEndian.Uint64(addr[:8]) + 0x9e3779b97f4a7c15)
	h = mix64(h ^ binary.BigEndian.Uint64(addr[8:]))
	return mix64(h ^ uint64(b.Port()))
}

// mix64 is the finalizer of SplitMix64, as in lib/service.h.
func mix64(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
