// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"encoding/binary"
	"strings"
)

// group is what the pods of one workload have in common: kept once for all of them.
type group struct {
	namespace, account string
	ports              NamedPorts
}

func (g group) own() group {
	return group{strings.Clone(g.namespace), strings.Clone(g.account), NamedPorts(strings.Clone(string(g.ports)))}
}

// names keeps who the workloads of claims are. Names of pods rarely repeat, so they stand back to back in blocks without
// pointers, each after the number of its group. Reference 0 is "none".
//
// A block with nobody's names in it any more goes at once. When half of everything is dead, all blocks are given up: a
// sweep through the table then moves what is in use into new ones, a little with every batch of claims.
type names struct {
	groups   interned[group]
	blocks   []nameBlock
	absent   []uint32 // blocks without memory
	current  uint32   // the block that is written
	size     int      // bytes in use, dead ones included
	dead     int
	sweeping bool
}

type nameBlock struct {
	records []byte
	dead    int
	old     bool // to be left by the sweep
}

const (
	// nameLimit is the length up to which a name is kept; Kubernetes allows 253 bytes.
	nameLimit = 255
	// A reference is the number of a block and the place in it. A record never crosses blocks.
	blockBits = 16
	blockSize = 1 << blockBits
	maxBlocks = 1 << (32 - blockBits)
)

func newNames() names {
	// The first byte is used up, so that no reference is 0; as it never dies, the first block never goes.
	return names{groups: newInterned(group.own), blocks: []nameBlock{{records: make([]byte, 1, blockSize)}}}
}

// clip bounds a name to what a record can hold.
func clip(name string) string { return name[:min(len(name), nameLimit)] }

// room makes the current block one with space for n more bytes, and reports whether there is one.
func (m *names) room(n int) bool {
	if b := &m.blocks[m.current]; len(b.records)+n <= blockSize && !b.old {
		return true
	}
	number := uint32(len(m.blocks))
	if last := len(m.absent) - 1; last >= 0 {
		number, m.absent = m.absent[last], m.absent[:last]
	} else if number == maxBlocks {
		return false
	} else {
		m.blocks = append(m.blocks, nameBlock{})
	}
	full := m.current
	m.current = number
	m.blocks[number] = nameBlock{records: make([]byte, 0, blockSize)}
	m.drop(full)
	return true
}

// drop gives back the memory of a block with nothing but dead records.
func (m *names) drop(number uint32) {
	b := &m.blocks[number]
	if b.records == nil || b.dead < len(b.records) || number == m.current {
		return
	}
	m.size -= len(b.records)
	m.dead -= b.dead
	*b = nameBlock{}
	m.absent = append(m.absent, number)
}

// add stores the names of an entry. When there is no room left at all, the entry is kept and loses only its names.
func (m *names) add(e *Entry) uint32 {
	g := group{clip(e.Namespace), clip(e.ServiceAccount), e.NamedPorts.clip()}
	pod := clip(e.Pod)
	if pod == "" && g == (group{}) || !m.room(binary.MaxVarintLen32+1+len(pod)) {
		return 0
	}
	b := &m.blocks[m.current]
	at := len(b.records)
	b.records = binary.AppendUvarint(b.records, uint64(m.groups.acquire(g)))
	b.records = append(b.records, byte(len(pod)))
	b.records = append(b.records, pod...)
	m.size += len(b.records) - at
	return m.current<<blockBits | uint32(at)
}

// record returns the number of a record's group, its pod, and its length.
func (m *names) record(ref uint32) (g uint32, pod []byte, length int) {
	rec := m.blocks[ref>>blockBits].records[ref%blockSize:]
	number, n := binary.Uvarint(rec)
	length = n + 1 + int(rec[n])
	return uint32(number), rec[n+1 : length], length
}

// get completes an entry by its names.
func (m *names) get(ref uint32, e *Entry) {
	if ref == 0 {
		return
	}
	number, pod, _ := m.record(ref)
	g := &m.groups.values[number]
	e.Namespace, e.ServiceAccount, e.NamedPorts, e.Pod = g.namespace, g.account, g.ports, string(pod)
}

func (m *names) release(ref uint32) {
	if ref == 0 {
		return
	}
	number, _, length := m.record(ref)
	m.groups.release(number)
	m.kill(ref, length)
}

func (m *names) kill(ref uint32, length int) {
	m.dead += length
	m.blocks[ref>>blockBits].dead += length
	m.drop(ref >> blockBits)
}

// wasteful reports whether enough is dead for a sweep to pay.
func (m *names) wasteful() bool { return m.dead > blockSize && m.dead > m.size/2 }

// giveUp begins a sweep.
func (m *names) giveUp() {
	m.sweeping = true
	for i := range m.blocks {
		m.blocks[i].old = m.blocks[i].records != nil
	}
}

// moved returns where a record is after a sweep has come to it.
func (m *names) moved(ref uint32) uint32 {
	if ref == 0 || !m.blocks[ref>>blockBits].old {
		return ref
	}
	_, _, length := m.record(ref)
	if !m.room(length) {
		return ref
	}
	b := &m.blocks[m.current]
	at := len(b.records)
	b.records = append(b.records, m.blocks[ref>>blockBits].records[ref%blockSize:][:length]...)
	m.size += length
	m.kill(ref, length)
	return m.current<<blockBits | uint32(at)
}

// swept ends a sweep.
func (m *names) swept() {
	m.sweeping = false
	for i := range m.blocks {
		m.blocks[i].old = false
	}
}
