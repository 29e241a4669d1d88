// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
)

// HostsLineBytes is the size of an element of a table in MapHosts: struct hosts_line in lib/structs.h.
const HostsLineBytes = 64

const (
	hostsLayout     = 2 // HOSTS_LAYOUT
	hostsMultiplier = 0x9e3779b97f4a7c15

	lineWords    = HostsLineBytes / 8
	groupBuckets = 8 // the tags of a group are one line
	bucketSlots  = 8 // the tags of a bucket are one word
	// groupEntries is how many of its 64 slots a group is planned to fill. One entry in a thousand then finds both of its
	// buckets full; with 48 it would be one in 300.
	groupEntries = 44
)

// hostsHead is the first line of a table: struct hosts_head in lib/structs.h.
type hostsHead struct {
	Layout  uint64
	Seeds   [3]uint64
	Summary uint64
	Groups  uint64
	Pad     [2]uint64
}

// hostsSlotWords is how many words a slot of a family takes.
func hostsSlotWords(family Family) int {
	if family == FamilyIPv6 {
		return 4
	}
	return 1
}

// hostsShape is how many groups and lines of summary a table has that is planned for a number of entries. With eight hosts
// in a network, the summary has a bit for each.
func hostsShape(entries int) (groups, summary int) {
	groups = max(1, (entries+groupEntries-1)/groupEntries)
	return groups, (groups + 63) / 64
}

// HostsLines is how many lines a table takes that is planned for a number of entries.
func HostsLines(family Family, entries int) uint32 {
	groups, summary := hostsShape(entries)
	return uint32(1 + summary + groups*(1+groupBuckets*hostsSlotWords(family)))
}

// HostsSpec is the spec of the map that a table is kept in.
func HostsSpec(family Family, entries int) (*ebpf.MapSpec, error) {
	spec, err := LoadFromNetdev()
	if err != nil {
		return nil, err
	}
	inner := spec.Maps[MapHosts].InnerMap.Copy()
	inner.Name = "weft_hosts_" + family.String()
	inner.MaxEntries = HostsLines(family, entries)
	return inner, nil
}

// HostTable writes one table of the fast path, in memory that programs may be reading: an element of MapHosts, of which
// lib/hosts.h is the reader. It holds what it has room for; programs ask MapIPCache about the rest. At no instant can a
// program read another identity for an address than the one set last, or any after Delete has returned.
//
// It is for one goroutine.
type HostTable struct {
	words   []atomic.Uint64
	family  Family
	seeds   [3]uint64
	groups  int
	summary int      // lines
	hosts   []uint32 // how many stand behind each bit of the summary
	crowds  []uint8  // see crowd
	live    int
	writes  uint32 // of IPv6 slots; tells apart any two contents of one
}

// NewHostTable makes an empty table that is planned for a number of entries, of HostsLines lines of memory that is zero
// and that no program reads yet. The seeds are to be random; nobody who chooses addresses may know them.
func NewHostTable(memory []byte, family Family, entries int, seeds [3]uint64) (*HostTable, error) {
	lines := int(HostsLines(family, entries))
	switch {
	case family != FamilyIPv4 && family != FamilyIPv6:
		return nil, fmt.Errorf("host table: there are no addresses of family %v", family)
	case len(memory) < lines*HostsLineBytes:
		return nil, fmt.Errorf("host table: %d bytes for %d lines", len(memory), lines)
	case uintptr(unsafe.Pointer(&memory[0]))%HostsLineBytes != 0:
		return nil, errors.New("host table: memory is not aligned to lines")
	}
	seeds[1], seeds[2] = seeds[1]|1, seeds[2]|1
	groups, summary := hostsShape(entries)
	*(*hostsHead)(unsafe.Pointer(&memory[0])) = hostsHead{
		Layout: hostsLayout, Seeds: seeds, Summary: uint64(summary), Groups: uint64(groups),
	}
	return &HostTable{
		words:   unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(&memory[0])), lines*lineWords),
		family:  family,
		seeds:   seeds,
		groups:  groups,
		summary: summary,
		hosts:   make([]uint32, summary*lineWords*64),
		crowds:  make([]uint8, groups*groupEntries/4),
	}, nil
}

// Len is how many entries the table holds.
func (t *HostTable) Len() int { return t.live }

// Capacity is how many entries the table is planned for. It takes more, but ever fewer of them.
func (t *HostTable) Capacity() int { return t.groups * groupEntries }

// address is an address as the table has it: for IPv4, network is the first three bytes and host the last.
type address struct{ network, host uint64 }

func (t *HostTable) address(ip *[16]byte) address {
	if t.family == FamilyIPv4 {
		be32 := uint64(binary.NativeEndian.Uint32(ip[:4]))
		return address{be32 & 0xff_ffff, be32 >> 24}
	}
	return address{binary.NativeEndian.Uint64(ip[:8]), binary.NativeEndian.Uint64(ip[8:])}
}

// be32 is an IPv4 address as it stands in a packet.
func (a address) be32() uint32 { return uint32(a.network | a.host<<24) }

// place is where an address belongs.
type place struct {
	bit           int // of the summary
	first, second int // words of tags, one for each bucket
	tag           uint8
}

func (t *HostTable) place(a address) place {
	below := func(hash uint64, bound int) int { return int((hash >> 32) * uint64(bound) >> 32) }
	h := (a.network ^ t.seeds[0]) * t.seeds[1]
	bit := below(h, len(t.hosts))
	h = (h ^ h>>32 ^ bits.RotateLeft64(a.host, 32)) * t.seeds[2]
	h = (h ^ h>>29) * hostsMultiplier
	h ^= h >> 32
	tags := (1 + t.summary + below(h, t.groups)) * lineWords
	first := int(h >> 8 & 7)
	second := first ^ int(h>>11&6) ^ 1
	return place{bit: bit, first: tags + first, second: tags + second, tag: max(uint8(h), 1)}
}

// slot returns the first word of slot i of the bucket whose tags are in a word.
func (t *HostTable) slot(tags, i int) int {
	bucket := tags - (1+t.summary)*lineWords // buckets are in the order of their tags
	return (1+t.summary+t.groups)*lineWords + (bucket*bucketSlots+i)*hostsSlotWords(t.family)
}

// holds reports whether the slot at a word is that of an address.
func (t *HostTable) holds(at int, a address) bool {
	if t.family == FamilyIPv4 {
		return uint32(t.words[at].Load()) == a.be32()
	}
	return t.words[at].Load() == a.network && t.words[at+1].Load() == a.host
}

// find returns where an address is: the word of its tags and its slot in the bucket. The tag must be there, not only
// perhaps: an empty slot may still hold the address that it was left with.
func (t *HostTable) find(p place, a address) (tags, i int, ok bool) {
	for _, tags := range [...]int{p.first, p.second} {
		word := t.words[tags].Load()
		for found := matches(word, p.tag); found != 0; found &= found - 1 {
			i := bits.TrailingZeros64(found) / 8
			if uint8(word>>(8*i)) == p.tag && t.holds(t.slot(tags, i), a) {
				return tags, i, true
			}
		}
	}
	return 0, 0, false
}

// matches sets the top bit of each byte of tags that equals tag, and perhaps that of a byte above such a one.
func matches(tags uint64, tag uint8) uint64 {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	x := tags ^ uint64(tag)*ones
	return (x - ones) &^ x & highs
}

// Get returns the identity of an address, 0 if the table does not have it. It serves comparisons; programs do not need it.
func (t *HostTable) Get(ip [16]byte) uint32 {
	a := t.address(&ip)
	tags, i, ok := t.find(t.place(a), a)
	if !ok {
		return 0
	}
	return t.identity(t.slot(tags, i))
}

func (t *HostTable) identity(at int) uint32 {
	if t.family == FamilyIPv6 {
		at += 2
	}
	return uint32(t.words[at].Load() >> 32)
}

// Set gives an address, IPv4 in the first four bytes and the rest 0, an identity, which must not be 0. It reports whether
// there was room.
func (t *HostTable) Set(ip [16]byte, identity uint32) bool {
	a := t.address(&ip)
	p := t.place(a)
	if tags, i, ok := t.find(p, a); ok {
		t.write(t.slot(tags, i), a, identity)
		return true
	}
	tags, word := t.roomier(p)
	empty := matches(word, 0)
	if empty == 0 {
		return false
	}
	i := bits.TrailingZeros64(empty) / 8
	t.write(t.slot(tags, i), a, identity)
	t.words[tags].Store(word | uint64(p.tag)<<(8*i)) // from here on, programs look into the slot
	t.live++
	if crowd := t.crowd(a); *crowd < math.MaxUint8 {
		*crowd++
	}
	if t.hosts[p.bit]++; t.hosts[p.bit] == 1 {
		word := &t.words[lineWords+p.bit/64]
		word.Store(word.Load() | 1<<(p.bit%64))
	}
	return true
}

// crowd counts the hosts in the network of an address, as Networks has it, and in those that share the number, up to a
// number that it keeps.
func (t *HostTable) crowd(a address) *uint8 {
	h := (a.network ^ t.seeds[0]) * t.seeds[1]
	if t.family == FamilyIPv6 {
		h = (h ^ h>>32 ^ bits.RotateLeft64(a.host<<8, 32)) * t.seeds[2]
	}
	return &t.crowds[(h>>32)*uint64(len(t.crowds))>>32]
}

// NetworkIsFull is how many hosts of a network make it a matter of Networks, where they then take 32 bytes each, or less.
const NetworkIsFull = 32

// MayBeFull reports, when an address has been set, whether it is time to count the hosts of its network, of which there may be
// NetworkIsFull.
func (t *HostTable) MayBeFull(ip [16]byte) bool {
	n := *t.crowd(t.address(&ip))
	return n >= NetworkIsFull && n%(NetworkIsFull/2) == 0
}

// Touch reads what Set may be about to write, whatever it will be: reads that depend on nothing wait for memory together,
// where one Set after the other waits for itself.
func (t *HostTable) Touch(ip [16]byte) {
	p := t.place(t.address(&ip))
	t.words[p.first].Load()
	t.words[t.slot(p.first, 0)].Load()
	t.words[t.slot(p.second, 0)].Load()
}

// roomier returns the tags of the emptier bucket.
func (t *HostTable) roomier(p place) (tags int, word uint64) {
	first, second := t.words[p.first].Load(), t.words[p.second].Load()
	if used(second) < used(first) {
		return p.second, second
	}
	return p.first, first
}

// used is how many tags of a word are set.
func used(tags uint64) int {
	const lows = 0x7f7f7f7f7f7f7f7f
	return bits.OnesCount64(((tags & lows) + lows | tags) &^ lows)
}

// write fills a slot, whatever it held, such that no program takes half of it for a whole.
func (t *HostTable) write(at int, a address, identity uint32) {
	if t.family == FamilyIPv4 {
		t.words[at].Store(uint64(a.be32()) | uint64(identity)<<32)
		return
	}
	t.writes++
	t.words[at+2].Store(uint64(t.writes))
	t.words[at].Store(a.network)
	t.words[at+1].Store(a.host)
	t.words[at+2].Store(uint64(t.writes) | uint64(identity)<<32)
}

// Delete removes an address. It reports whether it was there.
func (t *HostTable) Delete(ip [16]byte) bool {
	a := t.address(&ip)
	p := t.place(a)
	tags, i, ok := t.find(p, a)
	if !ok {
		return false
	}
	if at := t.slot(tags, i); t.family == FamilyIPv4 {
		t.words[at].Store(0)
	} else {
		t.writes++
		t.words[at+2].Store(uint64(t.writes))
	}
	t.words[tags].Store(t.words[tags].Load() &^ (0xff << (8 * i)))
	t.live--
	if crowd := t.crowd(a); *crowd < math.MaxUint8 {
		*crowd--
	}
	if t.hosts[p.bit]--; t.hosts[p.bit] == 0 {
		word := &t.words[lineWords+p.bit/64]
		word.Store(word.Load() &^ (1 << (p.bit % 64)))
	}
	return true
}

// All yields every entry until yield returns false.
func (t *HostTable) All(yield func(ip [16]byte, identity uint32) bool) {
	for tags := (1 + t.summary) * lineWords; tags < (1+t.summary+t.groups)*lineWords; tags++ {
		for i, word := 0, t.words[tags].Load(); word != 0; i, word = i+1, word>>8 {
			if word&0xff == 0 {
				continue
			}
			at := t.slot(tags, i)
			var ip [16]byte
			if t.family == FamilyIPv4 {
				binary.NativeEndian.PutUint32(ip[:4], uint32(t.words[at].Load()))
			} else {
				binary.NativeEndian.PutUint64(ip[:8], t.words[at].Load())
				binary.NativeEndian.PutUint64(ip[8:], t.words[at+1].Load())
			}
			if !yield(ip, t.identity(at)) {
				return
			}
		}
	}
}
