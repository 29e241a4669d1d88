// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"sync"
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
	Capacity int `json:"capacity"` // entries that the table is planned for
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
	outer *ebpf.Map
	hosts hostSet
	// rebuilt is when the tables were made.
	rebuilt time.Time

	mu    sync.Mutex
	state FastPathStatus
}

var _ prefixMap = (*fastPath)(nil)

// newFastPath puts tables for the hosts of trie into outer, where the programs find them. None is planned for more than
// limit entries, which is what trie can hold; expected says how many it is going to hold.
func newFastPath(trie prefixMap, outer *ebpf.Map, limit uint32, expected func() int) *fastPath {
	f := &fastPath{trie: trie, outer: outer}
	f.hosts = hostSet{limit: int(limit), expected: expected, create: createHostTable, show: f.show}
	return f
}

// Close ends the writing. Programs go on reading the tables.
func (f *fastPath) Close() { f.hosts.Close() }

// Update is that of the map.
func (f *fastPath) Update(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) (int, error) {
	f.hosts.beginWrite()
	defer f.hosts.endWrite()
	f.hosts.remove(keys)
	n, err := f.trie.Update(keys, values)
	f.hosts.add(keys[:n], values[:n])
	f.publish()
	return n, err
}

// Delete is that of the map.
func (f *fastPath) Delete(keys []bpf.IPCacheKey) (int, error) {
	f.hosts.beginWrite()
	defer f.hosts.endWrite()
	f.hosts.remove(keys)
	f.publish()
	return f.trie.Delete(keys)
}

// Dump is that of the map, and replaces the tables by new ones that hold what it yields. After an error, programs still
// see the old ones, or none.
func (f *fastPath) Dump(yield func([]bpf.IPCacheKey, []bpf.IPCacheValue)) error {
	fresh := hostSet{limit: f.hosts.limit, expected: f.hosts.expected, create: f.hosts.create}
	defer fresh.Close()
	err := f.trie.Dump(func(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) {
		fresh.add(keys, values)
		yield(keys, values)
	})
	if err != nil {
		return err
	}
	drift := f.hosts.drift(&fresh)
	fresh.endWrite()
	for i := range fresh.tables {
		if err := f.show(familyAt(i), fresh.tables[i]); err != nil {
			return err
		}
		f.hosts.tables[i], fresh.tables[i] = fresh.tables[i], f.hosts.tables[i]
	}
	f.hosts.stuck, f.hosts.err, f.rebuilt = fresh.stuck, fresh.err, time.Now()
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
		if err := f.outer.Put(at, t.m); err != nil {
			return fmt.Errorf("put the table of %v hosts into map %s: %w", family, bpf.MapHosts, err)
		}
		return nil
	}
	if err := f.outer.Delete(at); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("take the table of %v hosts out of map %s: %w", family, bpf.MapHosts, err)
	}
	return nil
}

// publish brings the status up to date.
func (f *fastPath) publish() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.state.IPv4, f.state.IPv6 = f.hosts.tables[0].status(), f.hosts.tables[1].status()
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
