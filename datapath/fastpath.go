// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weftmesh/weft/bpf"
)

// FastPathStatus is the state of the tables in front of the map, which spare most lookups of hosts the way through it.
type FastPathStatus struct {
	IPv4 HostTableStatus `json:"ipv4"`
	IPv6 HostTableStatus `json:"ipv6"`
	// Rebuilds is how often the tables were made anew of what the map holds, the first time included.
	Rebuilds uint64 `json:"rebuilds"`
	// Drift is how many of their entries were found to differ from the map by then, which somebody else has written.
	Drift uint64 `json:"drift"`
	// LastError is why, since the last rebuild, a table is missing or too small; "" if none is. Addresses are identified
	// all the same, only slower.
	LastError string `json:"lastError,omitempty"`
}

// HostTableStatus is the state of the table of a family. All is 0 if there is none, as where there are no hosts.
type HostTableStatus struct {
	Entries  int `json:"entries"`
	Networks int `json:"networks"` // /24 or /120, full of hosts, whose entries are not in the table but side by side
	Capacity int `json:"capacity"` // entries that the table is planned for, of other networks
	Bytes    int `json:"bytes"`    // of kernel memory
	// Crowded is how many entries, since the last rebuild, there was no room for: programs find them in the map alone.
	Crowded int `json:"crowded"`
}

// fastPath is a map with host tables in front of it. Whatever a table has, the map has, at every instant: an entry is
// taken out of its table before the map changes, and put into it afterwards. So a table may be missing, too small, or left
// behind by an agent that was killed at any point, and no program takes a wrong answer from it.
//
// The tables of the agent before are not written but replaced, by the first Dump; nothing may be written before. This
// process could not open them without CAP_SYS_ADMIN, and making new ones takes less time than comparing.
//
// It is for one goroutine, except for status.
type fastPath struct {
	trie  prefixMap
	maps  *fastMaps
	hosts hostSet
	epoch uint64 // the last one
	// rebuilt is when the tables were made.
	rebuilt time.Time

	mu    sync.Mutex
	state FastPathStatus
}

var _ prefixMap = (*fastPath)(nil)

// newFastPath puts the hosts of trie into maps, where the programs find them. No table is planned for more than
// limit entries, which is what trie can hold; expected says how many it is going to hold.
func newFastPath(trie prefixMap, maps *fastMaps, limit uint32, expected func() int) *fastPath {
	f := &fastPath{trie: trie, maps: maps, epoch: randomSeeds()[0]}
	f.hosts = hostSet{
		limit: int(limit), expected: expected, create: createHostTable, createNetworks: f.createNetworks, show: f.show,
		showNetworks: f.showNetworks,
	}
	for i, head := range maps.heads {
		f.hosts.others[i] = others{head: head, shown: true}
		if head.Seeds[1] == 0 { // programs have not begun to use it
			seeds := randomSeeds()
			head.Seeds = [3]uint64{seeds[0], seeds[1] | 1, seeds[2] | 1}
		}
	}
	return f
}

// Close ends the writing. Programs go on reading the tables.
func (f *fastPath) Close() { f.hosts.Close() }

// beginWrite makes programs remember no identity from here on: the map or the tables are about to be written.
func (f *fastPath) beginWrite() {
	for _, head := range f.maps.heads {
		atomic.StoreUint64(&head.Epoch, 0)
	}
}

// endWrite lets programs remember what they find, until the next beginWrite.
func (f *fastPath) endWrite() {
	f.epoch = max(f.epoch+1, 1)
	for _, head := range f.maps.heads {
		atomic.StoreUint64(&head.Epoch, f.epoch)
	}
}

// Update is that of the map.
func (f *fastPath) Update(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) (int, error) {
	f.beginWrite()
	defer f.endWrite()
	f.hosts.remove(keys)
	n, err := f.trie.Update(keys, values)
	f.hosts.add(keys[:n], values[:n])
	f.publish()
	return n, err
}

// Delete is that of the map.
func (f *fastPath) Delete(keys []bpf.IPCacheKey) (int, error) {
	f.beginWrite()
	defer f.endWrite()
	f.hosts.remove(keys)
	f.publish()
	return f.trie.Delete(keys)
}

// Dump is that of the map, and replaces the tables by new ones that hold what it yields. After an error, programs still
// see the old ones, or none.
func (f *fastPath) Dump(yield func([]bpf.IPCacheKey, []bpf.IPCacheValue)) error {
	fresh := hostSet{limit: f.hosts.limit, expected: f.hosts.expected, create: f.hosts.create, createNetworks: f.createNetworks}
	defer fresh.Close()
	for i, head := range f.maps.heads {
		fresh.others[i].head = head
	}
	err := f.trie.Dump(func(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) {
		fresh.add(keys, values)
		yield(keys, values)
	})
	if err != nil {
		return err
	}
	drift := f.hosts.drift(&fresh)
	f.beginWrite()
	defer f.endWrite()
	for i := range fresh.tables {
		if err := f.show(familyAt(i), fresh.tables[i]); err != nil {
			return err
		}
		f.showNetworks(familyAt(i), fresh.networks[i])
		f.hosts.tables[i], fresh.tables[i] = fresh.tables[i], f.hosts.tables[i]
		f.hosts.networks[i], fresh.networks[i] = fresh.networks[i], f.hosts.networks[i]
		f.hosts.others[i] = fresh.others[i]
		f.hosts.others[i].show()
	}
	f.hosts.stuck, f.hosts.err, f.rebuilt = fresh.stuck, fresh.err, time.Now()
	if err := f.freeNetworks(); err != nil {
		f.hosts.err = err
	}
	f.mu.Lock()
	f.state.Rebuilds++
	f.state.Drift += uint64(drift)
	f.mu.Unlock()
	f.publish()
	return nil
}

// show makes the programs use a table, or none if t is nil, and returns when none uses the one before.
func (f *fastPath) show(family bpf.Family, t *hostTable) error {
	at := uint32(familyIndex(family))
	if t != nil {
		if err := f.maps.hosts.Put(at, t.m); err != nil {
			return fmt.Errorf("put the table of %v hosts into map %s: %w", family, bpf.MapHosts, err)
		}
		return nil
	}
	if err := f.maps.hosts.Delete(at); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("take the table of %v hosts out of map %s: %w", family, bpf.MapHosts, err)
	}
	return nil
}

// showNetworks makes the programs use networks, or none if n is nil. Some may go on with those of before for as long as a
// packet takes.
func (f *fastPath) showNetworks(family bpf.Family, n *hostNetworks) {
	head := f.maps.heads[familyIndex(family)]
	if n == nil {
		atomic.StoreUint64(&head.Shape, 0)
		return
	}
	n.Show(head)
}

// createNetworks makes networks in the generation that no program uses, nor this fast path.
func (f *fastPath) createNetworks(family bpf.Family) (*hostNetworks, error) {
	at := familyIndex(family)
	used := f.maps.heads[at].Generation()
	if n := f.hosts.networks[at]; n != nil {
		used = n.generation
	}
	return newHostNetworks(f.maps.networks, family, 1-used, f.maps.heads[at].Seeds)
}

// freeNetworks takes memory away from programs that they have no use for.
func (f *fastPath) freeNetworks() (err error) {
	for i, n := range f.hosts.networks {
		for generation := range 2 {
			if n == nil || n.generation != generation {
				unused := hostNetworks{family: familyAt(i), generation: generation, outer: f.maps.networks}
				err = errors.Join(err, unused.clear())
			}
		}
	}
	return err
}

// publish brings the status up to date.
func (f *fastPath) publish() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.state.IPv4, f.state.IPv6 = f.hosts.status(0), f.hosts.status(1)
	f.state.LastError = ""
	if f.hosts.err != nil {
		f.state.LastError = f.hosts.err.Error()
	}
}

// status is safe for concurrent use.
func (f *fastPath) status() FastPathStatus {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state
}
