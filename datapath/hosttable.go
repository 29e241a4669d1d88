// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// hostSet is a table of hosts for each family that has some, made larger as they come.
type hostSet struct {
	limit    int        // no table is planned for more entries
	expected func() int // how many entries there are going to be, of both families
	create   func(family bpf.Family, entries int) (*hostTable, error)
	// show is called with a larger table that is complete, and returns when no program uses the one before; nil if no
	// program sees the tables at all.
	show func(bpf.Family, *hostTable) error

	tables [2]*hostTable // see familyIndex
	stuck  [2]bool       // a larger table could not be had, for err
	err    error
}

func familyIndex(family bpf.Family) int { return int(family - bpf.FamilyIPv4) }

func familyAt(index int) bpf.Family { return bpf.FamilyIPv4 + bpf.Family(index) }

// hostIndex is the familyIndex of a key that is a host's.
func hostIndex(key *bpf.IPCacheKey) (int, bool) {
	const static = 32
	switch {
	case key.ClusterID != 0 || key.Pad != 0:
		return 0, false
	case key.Family == bpf.FamilyIPv4:
		return 0, key.PrefixLen == static+32
	case key.Family == bpf.FamilyIPv6:
		return 1, key.PrefixLen == static+128
	}
	return 0, false
}

// Close closes the tables.
func (s *hostSet) Close() {
	for i, t := range s.tables {
		t.Close()
		s.tables[i] = nil
	}
}

// beginWrite and endWrite frame what is written to the map or the tables. Tables that come in between are
// framed, too.
func (s *hostSet) beginWrite() {
	for _, t := range s.tables {
		if t != nil {
			t.BeginWrite()
		}
	}
}

func (s *hostSet) endWrite() {
	for _, t := range s.tables {
		if t != nil {
			t.EndWrite()
		}
	}
}

// remove takes keys out of the tables that have them.
func (s *hostSet) remove(keys []bpf.IPCacheKey) {
	for i := range keys {
		if at, ok := hostIndex(&keys[i]); ok && s.tables[at] != nil {
			s.tables[at].Delete(keys[i].IP)
		}
	}
}

// add puts hosts among the keys into the tables, as far as there is room. An entry without identity stays out: programs
// ask on where they find none.
func (s *hostSet) add(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) {
	var hosts [2]int
	for i := range keys {
		if at, ok := hostIndex(&keys[i]); ok {
			hosts[at]++
		}
	}
	for at, n := range hosts {
		if n > 0 {
			s.makeRoom(at, n)
		}
	}
	const some = 256 // lines of memory: they fit into the first cache
	for len(keys) > 0 {
		n := min(len(keys), some)
		for i := range keys[:n] {
			if at, ok := hostIndex(&keys[i]); ok && s.tables[at] != nil {
				s.tables[at].Touch(keys[i].IP)
			}
		}
		for i := range keys[:n] {
			s.set(&keys[i], values[i].Identity)
		}
		keys, values = keys[n:], values[n:]
	}
}

func (s *hostSet) set(key *bpf.IPCacheKey, identity uint32) {
	at, ok := hostIndex(key)
	if !ok || s.tables[at] == nil || identity == 0 {
		return
	}
	if t := s.tables[at]; !t.Set(key.IP, identity) {
		t.crowded++
	}
}

// makeRoom replaces a table by a larger one if n more entries are more than it is planned for.
func (s *hostSet) makeRoom(at, n int) {
	const fewest = 128
	have, capacity := 0, 0
	if t := s.tables[at]; t != nil {
		have, capacity = t.Len(), t.Capacity()
	}
	if have+n <= capacity || capacity >= s.limit || s.stuck[at] {
		return
	}
	soon := s.expected()
	if other := s.tables[1-at]; other != nil {
		soon -= other.Len()
	}
	want := max(fewest, have+n, 2*capacity, min(soon, s.limit))
	larger, err := s.create(familyAt(at), want)
	if err == nil && capacity > 0 {
		larger.copy(s.tables[at])
	}
	if err == nil && s.show != nil {
		err = s.show(familyAt(at), larger)
	}
	if err != nil {
		larger.Close()
		s.stuck[at], s.err = true, err
		return
	}
	s.tables[at].Close()
	s.tables[at] = larger
}

// drift is how many entries of s are not in fresh, or are others there. Where fresh had no room for all, what it lacks
// says nothing.
func (s *hostSet) drift(fresh *hostSet) (n int) {
	for at, t := range s.tables {
		if t == nil {
			continue
		}
		f := fresh.tables[at]
		complete := !fresh.stuck[at] && (f == nil || f.crowded == 0)
		for ip, identity := range t.All {
			var has uint32
			if f != nil {
				has = f.Get(ip)
			}
			if has != identity && (has != 0 || complete) {
				n++
			}
		}
	}
	return n
}

// hostTable is a table in an array of its own.
type hostTable struct {
	*bpf.HostTable
	m       *ebpf.Map
	memory  []byte
	crowded int // entries that found no room, in this table or in those before it
}

// createHostTable makes a table that is planned for a number of entries.
func createHostTable(family bpf.Family, entries int) (*hostTable, error) {
	spec, err := bpf.HostsSpec(family, entries)
	if err != nil {
		return nil, err
	}
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, explain(fmt.Sprintf("create a table of %d %v hosts", entries, family), err)
	}
	size := int(spec.MaxEntries) * bpf.HostsLineBytes
	page := unix.Getpagesize()
	memory, err := unix.Mmap(m.FD(), 0, (size+page-1)/page*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		_ = m.Close()
		return nil, explain(fmt.Sprintf("map a table of %d %v hosts into memory", entries, family), err)
	}
	t := &hostTable{m: m, memory: memory}
	var seeds [24]byte
	_, _ = rand.Read(seeds[:]) // never fails
	word := func(i int) uint64 { return binary.NativeEndian.Uint64(seeds[8*i:]) }
	t.HostTable, err = bpf.NewHostTable(memory, family, entries, [3]uint64{word(0), word(1), word(2)})
	if err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// copy takes over what another table holds, and what it had no room for as something that is still missing.
func (t *hostTable) copy(from *hostTable) {
	t.crowded = from.crowded
	for ip, identity := range from.All {
		if !t.Set(ip, identity) {
			t.crowded++
		}
	}
}

// Close ends the writing. Of a table that programs see, the kernel keeps what they need.
func (t *hostTable) Close() {
	if t == nil {
		return
	}
	_ = unix.Munmap(t.memory)
	_ = t.m.Close()
}

func (t *hostTable) status() HostTableStatus {
	if t == nil {
		return HostTableStatus{}
	}
	return HostTableStatus{Entries: t.Len(), Capacity: t.Capacity(), Bytes: len(t.memory), Crowded: t.crowded}
}
