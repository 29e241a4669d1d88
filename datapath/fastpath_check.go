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
		var shown, ours ebpf.MapID
		if err := f.outer.Lookup(uint32(i), &shown); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return false, explain("look at map "+bpf.MapHosts, err)
		}
		if t != nil {
			info, err := t.m.Info()
			if err != nil {
				return false, explain("look at a table of hosts", err)
			}
			ours, _ = info.ID()
			n := 0
			for range t.All {
				n++
			}
			if n != t.Len() {
				return true, nil
			}
		}
		if shown != ours {
			return true, nil
		}
	}
	return false, nil
}

// differs reports whether a table has something else of a host than an identity. One that had no room for all may lack any.
func (s *hostSet) differs(key *bpf.IPCacheKey, identity uint32) bool {
	at, ok := hostIndex(key)
	if !ok {
		return false
	}
	t := s.tables[at]
	if t == nil {
		return identity != 0 && !s.stuck[at]
	}
	has := t.Get(key.IP)
	return has != identity && (has != 0 || !s.stuck[at] && t.crowded == 0)
}

// wanting reports whether a larger table was not to be had, or one is far larger than it needs to be.
func (s *hostSet) wanting() bool {
	const much, least = 8, 4096
	for i, t := range s.tables {
		if s.stuck[i] || t != nil && t.Capacity() > max(least, much*max(t.Len(), s.expected())) {
			return true
		}
	}
	return false
}
