// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weftmesh/weft/bpf"
)

// rebuildInterval is how often, at most, the tables are made anew because they could be better, not because they are wrong.
const rebuildInterval = 5 * time.Minute

// Walk is that of the map.
func (f *fastPath) Walk() mapWalk { return f.trie.Walk() }

// Check holds the tables against entries of the map. Where they say something else, or say something of what the map has not,
// somebody else has written them: they are wrong, and replaced. They are replaced, too, where they lack a host, which costs time
// alone, and now and then where one could not be had or is far too large.
func (f *fastPath) Check(keys []bpf.IPCacheKey, values []bpf.IPCacheValue, all bool) (wrong bool, err error) {
	f.hosts.touch(keys)
	lacks := false
	for i := range keys {
		has, differs := f.hosts.compare(&keys[i], values[i].Identity)
		lacks = lacks || differs && has == 0
		wrong = wrong || differs && has != 0
	}
	if all && !wrong {
		if wrong, err = f.others(); err != nil {
			return false, err
		}
	}
	if !wrong && !lacks && !(all && f.hosts.wanting() && time.Since(f.rebuilt) >= rebuildInterval) {
		return false, nil
	}
	return wrong, f.Dump(func([]bpf.IPCacheKey, []bpf.IPCacheValue) {})
}

// others reports whether programs see other tables than ours, or more in ours than was written there.
func (f *fastPath) others() (bool, error) {
	for i, t := range f.hosts.tables {
		var ours ebpf.MapID
		if t != nil {
			info, err := t.m.Info()
			if err != nil {
				return false, explain("look at a table of hosts", err)
			}
			ours, _ = info.ID()
		}
		shown, err := shownAt(f.maps.hosts, uint32(i))
		if err != nil || shown != ours {
			return err == nil, err
		}
		other, err := f.hosts.networks[i].differ(f.maps.heads[i])
		if err != nil || other {
			return other, err
		}
		n := 0
		for range f.hosts.all(i) {
			n++
		}
		if inNetworks, inTable := f.hosts.len(i); n != inNetworks+inTable {
			return true, nil
		}
	}
	return false, nil
}

// shownAt is the table at a key of a map of maps, 0 if there is none.
func shownAt(outer *ebpf.Map, key uint32) (shown ebpf.MapID, err error) {
	if err := outer.Lookup(key, &shown); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, explain("look at the tables of hosts", err)
	}
	return shown, nil
}

// touch reads ahead what the tables have of keys.
func (s *hostSet) touch(keys []bpf.IPCacheKey) {
	for i := range keys {
		at, ok := hostIndex(&keys[i])
		if !ok || s.networks[at] != nil && s.networks[at].Touch(keys[i].IP) {
			continue
		}
		if s.tables[at] != nil {
			s.tables[at].Touch(keys[i].IP)
		}
	}
}

// compare returns what a table has of a key, and whether it should have another identity, or one at all. It may lack any if it
// had no room for all.
func (s *hostSet) compare(key *bpf.IPCacheKey, identity uint32) (has uint32, differs bool) {
	at, ok := hostIndex(key)
	if !ok {
		return 0, false
	}
	has = s.get(at, key.IP)
	complete := !s.stuck[at].table && (s.tables[at] == nil || s.tables[at].crowded == 0)
	return has, has != identity && (has != 0 || complete)
}

// wanting reports whether more memory was not to be had, or far more is taken than is needed.
func (s *hostSet) wanting() bool {
	const much, least = 8, 4096
	for i, t := range s.tables {
		if s.stuck[i] != (stuck{}) || t != nil && t.Capacity() > max(least, much*max(t.Len(), s.expected())) {
			return true
		}
		if n := s.networks[i]; n != nil && n.Networks.Networks()*bpf.NetworkIsFull > max(least, much*n.Len()) {
			return true
		}
	}
	return false
}
