// SPDX-License-Identifier: Apache-2.0

// Package measure owns the programs that measure and try lookups in the kernel, made of the same C as those that ship;
// benchmarks and tests alone link it.
package measure

import "github.com/cilium/ebpf"

// LoadTry is LoadLookup without the programs that make many lookups in one run, which kernels before 5.17 refuse.
func LoadTry() (*ebpf.CollectionSpec, error) {
	spec, err := LoadLookup()
	if err != nil {
		return nil, err
	}
	for _, name := range []string{LookupProgMeasureNothing, LookupProgMeasureTrie, LookupProgMeasureIdentity} {
		delete(spec.Programs, name)
	}
	return spec, nil
}

// Measurement is what a program is told and tells, the one value of the map measure_order: struct measurement in
// lookup.c.
type Measurement struct {
	Lookups uint32 // to be made
	At      uint32 // in the list, where to begin and where it ended
	Length  uint32 // of the list
	Known   uint32 // lookups with an identity
	Last    uint32 // the identity that the last lookup found
	Wrong   uint32 // try_check: identities of other addresses
	Stale   uint32 // try_check: older than one that was seen before
	Absent  uint32 // try_check: none, where there always is one
}

// VersionBits are the low bits of an identity that try_check takes for the number of its change; the others are to
// be the Checksum of the address.
const VersionBits = 12

// Checksum is what try_check expects of an address in four words, as they stand in memory.
func Checksum(words [4]uint32) uint32 {
	sum := words[0] ^ words[1]*3 ^ words[2]*5 ^ words[3]*7
	return sum * 0x9e3779b1 >> (VersionBits + 1)
}
