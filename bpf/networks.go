// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
)

const (
	// NetworksChunkBytes is the size of a table in MapNetworks: they all have the same, which is why programs need no call
	// to look into one.
	NetworksChunkBytes = 1 << 18
	// NetworksSlots is how many tables of MapNetworks a generation of a family can have.
	NetworksSlots = 256
	// NetworkHosts is how many addresses a network has: a /24 of IPv4, a /120 of IPv6.
	NetworkHosts = 256
	// FastLayout is the layout of MapFast and MapNetworks: FAST_LAYOUT in lib/consts.h. It is not 0, which is what a version
	// of weft tells the programs in Config that does not know of them, and so leaves them behind.
	FastLayout = 1

	networksProbes  = 8                      // NETWORKS_PROBES
	chunkWords      = NetworksChunkBytes / 8 // NETWORKS_CHUNK_WORDS
	blockWords      = NetworkHosts / 2       // BLOCK_WORDS: two identities a word
	fewestPlaces    = 256                    // of a directory: a page of IPv4
	generationWords = NetworksSlots * chunkWords
)

// FastHead is where programs begin to look for a host: struct fast_head in lib/structs.h, one for each family in MapFast.
// The seeds are to be random, and nobody who chooses addresses may know them; they never change while programs have a
// shape. All of it is read and written with the functions of sync/atomic.
type FastHead struct {
	Seeds [3]uint64
	Shape uint64 // of the directory: where it is, and in the upper half how many places it has less one; 0: there is none
	Epoch uint64 // of lib/near.h: 0 while MapIPCache or a table is written
	// Others has a bit for the networks, /24 or /64, whose hosts are in a HostTable, and 0 where there are none, which spares
	// programs the way there.
	Others uint64
	Pad    [2]uint64
}

// OthersBit is which bit of Others the network of an address has.
func (h *FastHead) OthersBit(family Family, ip [16]byte) int {
	network := binary.NativeEndian.Uint64(ip[:8])
	if family == FamilyIPv4 {
		network = uint64(binary.NativeEndian.Uint32(ip[:4]) & 0xff_ffff)
	}
	return int((network ^ h.Seeds[0]) * h.Seeds[1] >> 58)
}

// Clear makes programs that read the head ask MapIPCache, and remember nothing.
func (h *FastHead) Clear() {
	atomic.StoreUint64(&h.Epoch, 0)
	atomic.StoreUint64(&h.Shape, 0)
}

// Generation is which of the two generations of MapNetworks programs read that have this head.
func (h *FastHead) Generation() int {
	return int(uint32(atomic.LoadUint64(&h.Shape))) / generationWords & 1
}

// NetworksChunkSpec is the spec of a table in MapNetworks.
func NetworksChunkSpec() (*ebpf.MapSpec, error) {
	spec, err := LoadFromNetdev()
	if err != nil {
		return nil, err
	}
	return spec.Maps[MapNetworks].InnerMap.Copy(), nil
}

// NetworksSlot is the first of the NetworksSlots keys of MapNetworks that a generation, 0 or 1, of a family has.
func NetworksSlot(family Family, generation int) uint32 {
	return uint32((int(family-FamilyIPv4)*2 + generation) * NetworksSlots)
}

// Networks writes the hosts of networks that are full of them, in memory that programs may be reading, of which
// lib/networks.h is the reader: a directory of the networks, and for each a block with an identity for every address that it has.
// A network has its block for as long as the Networks are shown. At no instant can a program read another identity for an
// address than the one set last, or any after Delete has returned.
//
// It is for one goroutine.
type Networks struct {
	family Family
	seeds  [3]uint64
	chunk  func(i int) ([]byte, error)
	head   *FastHead // nil: no program sees them

	chunks   [][]atomic.Uint64
	first    int // the first word of the generation, of all words that MapNetworks has room for
	end      int // words in use, from there
	at       int // where the directory is
	places   int // in the directory, a power of two; 0: there is none
	spare    int // a block that is nobody's; 0: none
	networks int
	live     int
}

// NewNetworks makes a generation, 0 or 1, without networks, which no program sees. It takes memory as it needs it: chunk
// returns that of table i, new and zero, which is the one that NetworksSlot(family, generation)+i leads to.
func NewNetworks(family Family, generation int, seeds [3]uint64, chunk func(i int) ([]byte, error)) *Networks {
	return &Networks{family: family, seeds: seeds, chunk: chunk, first: int(NetworksSlot(family, generation)) * chunkWords}
}

// Show makes programs that have the head see the networks, from here on as they are written, and no others.
func (n *Networks) Show(head *FastHead) {
	n.head = head
	atomic.StoreUint64(&head.Shape, n.shape())
}

// ShownBy reports whether programs that have the head see the networks.
func (n *Networks) ShownBy(head *FastHead) bool {
	return head.Seeds == n.seeds && atomic.LoadUint64(&head.Shape) == n.shape()
}

func (n *Networks) shape() uint64 {
	if n.places == 0 {
		return 0
	}
	return uint64(n.first+n.at) | uint64(n.places-1)<<32
}

// Len is how many hosts there are, Networks how many networks they are in, Bytes how much memory they take.
func (n *Networks) Len() int { return n.live }

// Networks is how many networks have a block.
func (n *Networks) Networks() int { return n.networks }

// Bytes is how much memory of the kernel all of it takes.
func (n *Networks) Bytes() int { return len(n.chunks) * NetworksChunkBytes }

// word is a word of the generation.
func (n *Networks) word(i int) *atomic.Uint64 { return &n.chunks[i/chunkWords][i%chunkWords] }

// allocate returns where so many words are that nothing uses, all zero. A block has the number of its first word among
// blocks, so it begins at a multiple of them.
func (n *Networks) allocate(words int) (int, error) {
	at := n.end
	if at+words > generationWords {
		return 0, fmt.Errorf("networks full of %v hosts: there is room for %d MiB of them", n.family, NetworksSlots*NetworksChunkBytes>>20)
	}
	for len(n.chunks)*chunkWords < at+words {
		memory, err := n.chunk(len(n.chunks))
		if err != nil {
			return 0, err
		}
		n.chunks = append(n.chunks, unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(&memory[0])), chunkWords))
	}
	n.end += words
	return at, nil
}

// network is an address without its last byte, as the directory has it: for IPv4, the second word is 0.
type network struct{ d1, d2 uint64 }

// split returns the network of an address, and its place there.
func (n *Networks) split(ip *[16]byte) (network, int) {
	if n.family == FamilyIPv4 {
		return network{d1: uint64(binary.NativeEndian.Uint32(ip[:4]) & 0xff_ffff)}, int(ip[3])
	}
	return network{binary.NativeEndian.Uint64(ip[:8]), binary.NativeEndian.Uint64(ip[8:]) << 8 >> 8}, int(ip[15])
}

// hash is where the search for a network begins, modulo the places of the directory.
func (n *Networks) hash(w network) int {
	h := (w.d1 ^ n.seeds[0]) * n.seeds[1]
	if n.family == FamilyIPv6 {
		h = (h ^ h>>32 ^ bits.RotateLeft64(w.d2, 32)) * n.seeds[2]
	}
	return int(h >> 32)
}

// placeWords is how many words a place of the directory has. For IPv4, it is one: the network, and its block in the upper
// half. For IPv6, they are the network in two, the block, which is written last, and one that is nothing.
func (n *Networks) placeWords() int {
	if n.family == FamilyIPv6 {
		return 4
	}
	return 1
}

// find returns the first word of a network's block, 0 if it has none.
func (n *Networks) find(w network) int {
	if n.places == 0 {
		return 0
	}
	h := n.hash(w)
	for i := range networksProbes {
		at := n.at + (h+i)&(n.places-1)*n.placeWords()
		if n.family == FamilyIPv4 {
			switch word := n.word(at).Load(); {
			case word == 0:
				return 0
			case uint64(uint32(word)) == w.d1:
				return int(word>>32)*blockWords - n.first
			}
			continue
		}
		switch block := n.word(at + 2).Load(); {
		case block == 0:
			return 0
		case n.word(at).Load() == w.d1 && n.word(at+1).Load() == w.d2:
			return int(block)*blockWords - n.first
		}
	}
	return 0
}

// enter puts a network into a directory that it is not in. It reports whether there was a place where programs look.
func (n *Networks) enter(at, places int, w network, block uint64) bool {
	h := n.hash(w)
	for i := range networksProbes {
		at := at + (h+i)&(places-1)*n.placeWords()
		switch {
		case n.family == FamilyIPv4 && n.word(at).Load() == 0:
			n.word(at).Store(w.d1 | block<<32)
			return true
		case n.family == FamilyIPv6 && n.word(at+2).Load() == 0:
			n.word(at).Store(w.d1)
			n.word(at + 1).Store(w.d2)
			n.word(at + 2).Store(block)
			return true
		}
	}
	return false
}

// each yields the networks of the directory and their blocks.
func (n *Networks) each(yield func(w network, block uint64) bool) {
	for i := range n.places {
		at := n.at + i*n.placeWords()
		word := n.word(at).Load()
		w, block := network{d1: uint64(uint32(word))}, word>>32
		if n.family == FamilyIPv6 {
			w, block = network{word, n.word(at + 1).Load()}, n.word(at+2).Load()
		}
		if block != 0 && !yield(w, block) {
			return
		}
	}
}

// grow makes a directory that is at least twice as large, which programs see from then on. What it replaces stays as it is, for
// those that are reading it.
func (n *Networks) grow() error {
	places := max(fewestPlaces, 2*n.places)
	for ; ; places *= 2 {
		// Blocks begin at multiples of their size, so directories take whole ones.
		at, err := n.allocate(places * n.placeWords())
		if err != nil {
			return err
		}
		all := true
		for w, block := range n.each {
			if all = n.enter(at, places, w, block); !all {
				break
			}
		}
		if all {
			n.at, n.places = at, places
			if n.head != nil {
				atomic.StoreUint64(&n.head.Shape, n.shape())
			}
			return nil
		}
	}
}

// Add gives the network of an address a block, with which Set takes its hosts. After an error, the networks are as they
// were.
func (n *Networks) Add(ip [16]byte) error {
	w, _ := n.split(&ip)
	if n.find(w) != 0 {
		return nil
	}
	if n.places == 0 {
		if err := n.grow(); err != nil {
			return err
		}
	}
	if n.spare == 0 {
		at, err := n.allocate(blockWords)
		if err != nil {
			return err
		}
		n.spare = at
	}
	block := uint64(n.first+n.spare) / blockWords
	for 4*n.networks >= n.places || !n.enter(n.at, n.places, w, block) {
		if err := n.grow(); err != nil {
			return err
		}
	}
	n.spare = 0
	n.networks++
	return nil
}

// identity returns where the identity of an address is: a word, and by how many bits to shift it. The word is nil if its
// network has no block.
func (n *Networks) identity(ip *[16]byte) (*atomic.Uint64, int) {
	w, host := n.split(ip)
	block := n.find(w)
	if block == 0 {
		return nil, 0
	}
	return n.word(block + host/2), host % 2 * 32
}

// Has reports whether the network of an address has a block.
func (n *Networks) Has(ip [16]byte) bool {
	w, _ := n.split(&ip)
	return n.find(w) != 0
}

// Get returns the identity of an address, 0 if there is none.
func (n *Networks) Get(ip [16]byte) uint32 {
	word, shift := n.identity(&ip)
	if word == nil {
		return 0
	}
	return uint32(word.Load() >> shift)
}

// Set gives an address, IPv4 in the first four bytes and the rest 0, an identity, which must not be 0. It reports whether
// its network has a block.
func (n *Networks) Set(ip [16]byte, identity uint32) bool {
	word, shift := n.identity(&ip)
	if word == nil {
		return false
	}
	had := word.Load()
	word.Store(had&^(0xffff_ffff<<shift) | uint64(identity)<<shift)
	if uint32(had>>shift) == 0 {
		n.live++
	}
	return true
}

// Touch reads what Set may be about to write; see HostTable.Touch. It reports whether the network has a block.
func (n *Networks) Touch(ip [16]byte) bool {
	word, _ := n.identity(&ip)
	return word != nil && word.Load()|1 != 0
}

// Delete removes an address. It reports whether its network has a block.
func (n *Networks) Delete(ip [16]byte) bool {
	word, shift := n.identity(&ip)
	if word == nil {
		return false
	}
	had := word.Load()
	if uint32(had>>shift) != 0 {
		word.Store(had &^ (0xffff_ffff << shift))
		n.live--
	}
	return true
}

// All yields every host until yield returns false.
func (n *Networks) All(yield func(ip [16]byte, identity uint32) bool) {
	for w, block := range n.each {
		var ip [16]byte
		host := &ip[15]
		if n.family == FamilyIPv4 {
			binary.NativeEndian.PutUint32(ip[:4], uint32(w.d1))
			host = &ip[3]
		} else {
			binary.NativeEndian.PutUint64(ip[:8], w.d1)
			binary.NativeEndian.PutUint64(ip[8:], w.d2)
		}
		at := int(block)*blockWords - n.first
		for i := range NetworkHosts {
			*host = byte(i)
			identity := uint32(n.word(at+i/2).Load() >> (i % 2 * 32))
			if identity != 0 && !yield(ip, identity) {
				return
			}
		}
	}
}
