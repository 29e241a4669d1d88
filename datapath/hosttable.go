// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"iter"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// hostSet is the hosts of each family: in networks that are full of them, and in a table of the others, which is made larger
// as they come. An address is in one of the two.
type hostSet struct {
	limit          int        // no table is planned for more entries
	expected       func() int // how many entries there are going to be, of both families
	create         func(family bpf.Family, entries int) (*hostTable, error)
	createNetworks func(family bpf.Family) (*hostNetworks, error)
	// show is called with a larger table that is complete, and returns when no program uses the one before; nil if no
	// program sees the tables at all. So is showNetworks, with those of a family that has had none.
	show         func(bpf.Family, *hostTable) error
	showNetworks func(bpf.Family, *hostNetworks)

	tables   [2]*hostTable // see familyIndex
	networks [2]*hostNetworks
	others   [2]others
	stuck    [2]stuck
	err      error // the last of them
}

// others counts the hosts in a table by the bits that their networks have in the head.
type others struct {
	head   *bpf.FastHead
	shown  bool // programs see what is counted
	counts [64]int
}

// add counts a host more, or one less. A bit that is wrong for a moment costs programs time.
func (o *others) add(family bpf.Family, ip [16]byte, n int) {
	bit := o.head.OthersBit(family, ip)
	had := o.counts[bit] > 0
	if o.counts[bit] += n; o.shown && had != (o.counts[bit] > 0) {
		o.show()
	}
}

// show tells programs.
func (o *others) show() {
	var word uint64
	for bit, n := range o.counts {
		if n > 0 {
			word |= 1 << bit
		}
	}
	o.shown = true
	atomic.StoreUint64(&o.head.Others, word)
}

// stuck is what could not be had of a family, and is not asked for again.
type stuck struct {
	table   bool // a larger one
	network bool
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

// Close ends the writing. Programs go on with what they see.
func (s *hostSet) Close() {
	for i, t := range s.tables {
		t.Close()
		s.networks[i].Close()
		s.tables[i], s.networks[i] = nil, nil
	}
}

// remove takes keys out of the set.
func (s *hostSet) remove(keys []bpf.IPCacheKey) {
	for i := range keys {
		at, ok := hostIndex(&keys[i])
		if !ok || s.networks[at] != nil && s.networks[at].Delete(keys[i].IP) {
			continue
		}
		if s.tables[at] != nil && s.tables[at].Delete(keys[i].IP) {
			s.others[at].add(familyAt(at), keys[i].IP, -1)
		}
	}
}

// add puts hosts among the keys into the set, as far as there is room. An entry without identity stays out: programs
// ask on where they find none.
func (s *hostSet) add(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) {
	const some = 256 // lines of memory: they fit into the first cache
	for len(keys) > 0 {
		n := min(len(keys), some)
		s.touch(keys[:n])
		for i := range keys[:n] {
			if at, ok := hostIndex(&keys[i]); ok && values[i].Identity != 0 {
				s.set(at, keys[i].IP, values[i].Identity)
			}
		}
		keys, values = keys[n:], values[n:]
	}
}

func (s *hostSet) set(at int, ip [16]byte, identity uint32) {
	if s.networks[at] != nil && s.networks[at].Set(ip, identity) {
		return
	}
	s.makeRoom(at)
	t := s.tables[at]
	if t == nil {
		return
	}
	before := t.Len()
	if !t.Set(ip, identity) {
		t.crowded++
		return
	}
	if t.Len() > before {
		s.others[at].add(familyAt(at), ip, 1)
	}
	if t.MayBeFull(ip) {
		s.promote(at, ip)
	}
}

// get returns the identity that the set has for an address, 0 if there is none.
func (s *hostSet) get(at int, ip [16]byte) (identity uint32) {
	if s.networks[at] != nil {
		identity = s.networks[at].Get(ip)
	}
	if identity == 0 && s.tables[at] != nil {
		identity = s.tables[at].Get(ip)
	}
	return identity
}

// all yields every host of a family until yield returns false.
func (s *hostSet) all(at int) iter.Seq2[[16]byte, uint32] {
	return func(yield func([16]byte, uint32) bool) {
		if s.networks[at] != nil {
			for ip, identity := range s.networks[at].All {
				if !yield(ip, identity) {
					return
				}
			}
		}
		if s.tables[at] != nil {
			s.tables[at].All(yield)
		}
	}
}

// len is how many hosts of a family there are, in networks and in the table.
func (s *hostSet) len(at int) (networks, table int) {
	if s.networks[at] != nil {
		networks = s.networks[at].Len()
	}
	if s.tables[at] != nil {
		table = s.tables[at].Len()
	}
	return networks, table
}

// makeRoom replaces a table by a larger one if one entry more is more than it is planned for.
func (s *hostSet) makeRoom(at int) {
	const fewest = 128
	inNetworks, have := s.len(at)
	capacity := 0
	if t := s.tables[at]; t != nil {
		capacity = t.Capacity()
	}
	if have < capacity || capacity >= s.limit || s.stuck[at].table {
		return
	}
	// Of those that are still to come, as many are for the table as of those that came.
	otherNetworks, other := s.len(1 - at)
	soon := s.expected() - otherNetworks - other
	soon = int(float64(soon) * float64(have) / float64(max(1, have+inNetworks)))
	want := max(fewest, 2*capacity, min(soon, s.limit))
	larger, err := s.create(familyAt(at), want)
	if err == nil && capacity > 0 {
		larger.copy(s.tables[at])
	}
	if err == nil && s.show != nil {
		err = s.show(familyAt(at), larger)
	}
	if err != nil {
		larger.Close()
		s.stuck[at].table, s.err = true, err
		return
	}
	s.tables[at].Close()
	s.tables[at] = larger
}

// promote moves the hosts of an address's network out of the table if there are enough of them. At every instant, programs
// find each in one of the two, or ask the map.
func (s *hostSet) promote(at int, ip [16]byte) {
	if s.stuck[at].network {
		return
	}
	t := s.tables[at]
	last := 15
	if familyAt(at) == bpf.FamilyIPv4 {
		last = 3
	}
	var identities [bpf.NetworkHosts]uint32
	hosts := 0
	for i := range identities {
		ip[last] = byte(i)
		if identities[i] = t.Get(ip); identities[i] != 0 {
			hosts++
		}
	}
	if hosts < bpf.NetworkIsFull {
		return
	}
	if err := s.addNetwork(at, ip); err != nil {
		s.stuck[at].network, s.err = true, err
		return
	}
	for i, identity := range identities {
		if ip[last] = byte(i); identity != 0 {
			s.networks[at].Set(ip, identity)
			t.Delete(ip)
			s.others[at].add(familyAt(at), ip, -1)
		}
	}
}

// addNetwork makes room for a network, and for the first one of a family what it takes to have some.
func (s *hostSet) addNetwork(at int, ip [16]byte) error {
	if s.networks[at] == nil {
		n, err := s.createNetworks(familyAt(at))
		if err != nil {
			return err
		}
		s.networks[at] = n
		if s.showNetworks != nil {
			s.showNetworks(familyAt(at), n)
		}
	}
	return s.networks[at].Add(ip)
}

// drift is how many entries of s are not in fresh, or are others there. Where fresh had no room for all, what it lacks
// says nothing.
func (s *hostSet) drift(fresh *hostSet) (n int) {
	for at := range s.tables {
		f := fresh.tables[at]
		complete := !fresh.stuck[at].table && (f == nil || f.crowded == 0)
		for ip, identity := range s.all(at) {
			if has := fresh.get(at, ip); has != identity && (has != 0 || complete) {
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
	memory, err := mapMemory(m)
	if err != nil {
		_ = m.Close()
		return nil, explain(fmt.Sprintf("map a table of %d %v hosts into memory", entries, family), err)
	}
	t := &hostTable{m: m, memory: memory}
	t.HostTable, err = bpf.NewHostTable(memory, family, entries, randomSeeds())
	if err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// randomSeeds are for hashes that nobody who chooses addresses is to know.
func randomSeeds() (seeds [3]uint64) {
	for i := range seeds {
		var word [8]byte
		_, _ = rand.Read(word[:]) // never fails
		seeds[i] = binary.NativeEndian.Uint64(word[:])
	}
	return seeds
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

// status describes what the set has of a family.
func (s *hostSet) status(at int) (status HostTableStatus) {
	if t := s.tables[at]; t != nil {
		status = HostTableStatus{Entries: t.Len(), Capacity: t.Capacity(), Bytes: len(t.memory), Crowded: t.crowded}
	}
	if n := s.networks[at]; n != nil {
		status.Networks = n.Networks.Networks()
		status.Entries += n.Len()
		status.Bytes += n.Bytes()
	}
	return status
}
