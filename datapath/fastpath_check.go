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
// somebody else has written them: then they are replaced, as they are, now and then, where one could not be had or is far too large.
func (f *fastPath) Check(keys []bpf.IPCacheKey, values []bpf.IPCacheValue, all bool) error {
	wrong := false
	f.hosts.touch(keys)
	for i := range keys {
		wrong = wrong || f.hosts.differs(&keys[i], values[i].Identity)
	}
	if all && !wrong {
		others, err := f.others()
		if err != nil {
			return err
		}
		wrong = others || f.hosts.wanting() && time.Since(f.rebuilt) >= rebuildInterval
	}
	if !wrong {
		return nil
	}
	return f.Dump(func([]bpf.IPCacheKey, []bpf.IPCacheValue) {})
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

// differs reports whether the set has something else of a host than an identity. One that had no room for all may lack any.
func (s *hostSet) differs(key *bpf.IPCacheKey, identity uint32) bool {
	at, ok := hostIndex(key)
	if !ok {
		return false
	}
	has := s.get(at, key.IP)
	complete := !s.stuck[at].table && (s.tables[at] == nil || s.tables[at].crowded == 0)
	return has != identity && (has != 0 || complete)
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
