// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/weftmesh/weft/bpf"
)

// DefaultServiceTCFlows is for how many flows of translated packets there is room where nothing else is said.
const DefaultServiceTCFlows = 65536

// LeastServiceTCFlows and MostServiceTCFlows are the bounds of [Config.ServiceTCFlows]: the kernel gives each CPU a share of the
// entries in advance, and takes some 140 bytes for each, of which a flow has two.
const (
	LeastServiceTCFlows = 1024
	MostServiceTCFlows  = 1 << 24
)

// A conntrack has the size that it was made with. One of another size takes its place while packets pass, and no flow is without
// one at any instant, whichever program it meets:
//
//  1. the new conntrack is made under a name of its own;
//  2. the present one becomes the one before, in which programs look for what the present one has not, and then the new one the
//     present one: that is one step for all programs, which fetch it by its place;
//  3. what is in the one before is copied, as far as programs have not taken it over themselves;
//  4. there is no one before any more, and the new one's pin takes the place of the old one's.
//
// An agent that dies before 2 leaves a conntrack that nothing uses; one that dies after 2, a copy that the next one ends.

// openConntrack opens the conntrack, or makes it, with room for so many flows, and has the programs that find it in places
// use it.
func openConntrack(dir *pinDir, places *ebpf.Map, flows uint32, log *slog.Logger) (_ *ebpf.Map, err error) {
	spec, err := bpf.ConntrackSpec(flows)
	if err != nil {
		return nil, err
	}
	path := dir.file(pinServicesDir, servicePins[bpf.MapConntrack])
	aside := path + pinNewSuffix
	r := conntrackReplacement{places: places, path: path, aside: aside}
	defer func() {
		if err != nil {
			closeMaps(r.now, r.next)
		}
	}()
	if r.now, err = openTranslationMap(path, spec, true, log); err != nil {
		return nil, err
	}
	if err := r.resume(spec); err != nil {
		return nil, err
	}
	if r.next == nil && r.now.MaxEntries() == spec.MaxEntries {
		return r.now, nil
	}
	if r.next == nil {
		if err := removePin(aside); err != nil {
			return nil, err
		}
		if r.next, err = createMap(aside, spec); err != nil {
			log.Warn("the conntrack of services keeps its size", "flows", r.now.MaxEntries()/2, "wanted", flows, "err", err)
			return r.now, nil
		}
	}
	was := r.now.MaxEntries() / 2
	copied, err := r.replace()
	if err != nil {
		return nil, explain("change the size of the conntrack", err)
	}
	_ = r.now.Close()
	log.Info("the conntrack of services has another size", "flows", r.next.MaxEntries()/2, "before", was, "entries kept", copied)
	if r.next.MaxEntries() == spec.MaxEntries {
		return r.next, nil
	}
	_ = r.next.Close() // an earlier agent's replacement, for another size: it is replaced in turn
	return openConntrack(dir, places, flows, log)
}

// conntrackReplacement is one conntrack on its way into the place of another.
type conntrackReplacement struct {
	places      *ebpf.Map
	path, aside string // of the pins
	now, next   *ebpf.Map
}

// resume looks how far an earlier agent came: next is its new conntrack if programs use that already. If none is on its way,
// programs use the pinned one.
func (r *conntrackReplacement) resume(spec *ebpf.MapSpec) error {
	used, err := placed(r.places, bpf.ConntrackNow)
	if err != nil {
		return err
	}
	if m, err := ebpf.LoadPinnedMap(r.aside, nil); err == nil {
		like := spec.Copy()
		like.MaxEntries = m.MaxEntries()
		if id, err := mapID(m); err == nil && id == used && like.Compatible(m) == nil {
			r.next = m
			return nil
		}
		_ = m.Close()
	}
	id, err := mapID(r.now)
	if err != nil || id == used {
		return err
	}
	if err := r.places.Put(bpf.ConntrackNow, r.now); err != nil {
		return explain("put the conntrack in its place", err)
	}
	return nil
}

// replace makes next the conntrack, and returns how many entries were copied.
func (r *conntrackReplacement) replace() (copied int, err error) {
	if err := r.places.Put(bpf.ConntrackBefore, r.now); err != nil {
		return 0, err
	}
	// It returns when no program uses the other any more.
	if err := r.places.Put(bpf.ConntrackNow, r.next); err != nil {
		return 0, err
	}
	if copied, err = copyConntrack(r.next, r.now); err != nil {
		return copied, err
	}
	if err := r.places.Delete(bpf.ConntrackBefore); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return copied, err
	}
	return copied, os.Rename(r.aside, r.path)
}

// copyConntrack copies the entries that are not over and that to has not. If there is not enough room, those that were used last
// are kept.
func copyConntrack(to, from *ebpf.Map) (copied int, err error) {
	type flow struct {
		key   bpf.ConntrackKey
		entry bpf.Conntrack
	}
	now, err := monotonic()
	if err != nil {
		return 0, err
	}
	var all []flow
	if err := dumpConntrack(from, func(key *bpf.ConntrackKey, entry *bpf.Conntrack) bool {
		if !entry.Over(key.Protocol, now) {
			all = append(all, flow{*key, *entry})
		}
		return true
	}); err != nil {
		return 0, err
	}
	if room := int(to.MaxEntries()); len(all) > room {
		slices.SortFunc(all, func(a, b flow) int { return cmp.Compare(b.entry.UsedNS, a.entry.UsedNS) })
		all = all[:room]
	}
	for i := range all {
		switch err := to.Update(&all[i].key, &all[i].entry, ebpf.UpdateNoExist); {
		case err == nil:
			copied++
		case !errors.Is(err, ebpf.ErrKeyExist):
			return copied, fmt.Errorf("after %d entries: %w", copied, err)
		}
	}
	return copied, nil
}

// placed is the number of the map at a place of a map of maps; 0: there is none.
func placed(places *ebpf.Map, at uint32) (ebpf.MapID, error) {
	var id uint32
	if err := places.Lookup(at, &id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, explain("read which conntrack is used", err)
	}
	return ebpf.MapID(id), nil
}

// mapID is the number of a map.
func mapID(m *ebpf.Map) (ebpf.MapID, error) {
	info, err := m.Info()
	if err != nil {
		return 0, explain("look at map", err)
	}
	id, ok := info.ID()
	if !ok {
		return 0, errors.New("the kernel does not tell the number of a map")
	}
	return id, nil
}

func closeMaps(all ...*ebpf.Map) {
	for _, m := range all {
		if m != nil {
			_ = m.Close()
		}
	}
}
