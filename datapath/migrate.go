// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/weftmesh/weft/bpf"
)

// pinNewSuffix ends the name of a pin that is being made beside the one whose place it will take.
const pinNewSuffix = "-new"

// A map of another size or layout than the wanted one is left by an earlier life of the agent, of this or another version:
// the options changed, or the program was upgraded or downgraded. Its content goes on in a new map. The order leaves no
// moment without identity, and none at which a crash would lose anything:
//
//  1. the new map is made and filled under a name of its own, while the programs use the old one;
//  2. one rename puts it in the old one's place; the old one lives on in the programs that use it;
//  3. programs that use the new map are pinned in place of the old ones, each by one rename, and every hook is updated to
//     them in one step;
//  4. the last program gone, the kernel frees the old map by itself, in the background.
//
// An agent that dies before 2 leaves the old map and a half-filled one that the next replaces; one that dies after 2
// leaves programs that differ from what the next would load, as after any upgrade.

// migratable says whether the content of a map of ours can go on in one that spec describes, and returns an error that
// says why not. What two versions of an entry have in common stands at the beginning of its value.
func migratable(path string, m *ebpf.Map, spec *ebpf.MapSpec) error {
	sameKeys := m.KeySize() == spec.KeySize || spec.Name == bpf.MapCounters // those begin anew
	if m.Type() == spec.Type && sameKeys {
		return nil
	}
	return fmt.Errorf("%w: %s is another map than this version of weft makes (type %s with keys of %d bytes, want %s and %d): "+
		"stop weft, remove %[2]s and start again", ErrIncompatible, path, m.Type(), m.KeySize(), spec.Type, spec.KeySize)
}

// migrate replaces the map at path by one that spec describes, and returns that. The ipcache keeps its content. Counters
// and events begin anew: their readers take differences, and nothing depends on their past.
func migrate(path string, old *ebpf.Map, spec *ebpf.MapSpec) (_ *ebpf.Map, err error) {
	if err := migratable(path, old, spec); err != nil {
		return nil, err
	}
	aside := path + pinNewSuffix
	m, err := createMap(aside, spec)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = removePin(aside)
			_ = m.Close()
		}
	}()
	if spec.Name == bpf.MapIPCache {
		if err := copyEntries(path, m, old); err != nil {
			return nil, err
		}
	}
	if err := os.Rename(aside, path); err != nil {
		return nil, explain("move map pin to "+path, err)
	}
	return m, nil
}

// copyEntries fills an ipcache from another one, which nobody writes meanwhile.
func copyEntries(path string, to, from *ebpf.Map) error {
	var (
		kernel = kernelMap{m: to}
		copied int
		failed error
	)
	write := func(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) bool {
		var n int
		n, failed = kernel.Update(keys, values)
		copied += n
		return failed == nil
	}
	dump := dumpIPCache
	if from.ValueSize() != to.ValueSize() {
		dump = dumpOtherValues
	}
	err := errors.Join(dump(from, write), failed)
	switch {
	case isFull(err):
		return fmt.Errorf("%w: %s holds more than the %d entries that are configured: raise --max-ipcache-entries (it was made "+
			"for %d)", ErrIncompatible, path, to.MaxEntries(), from.MaxEntries())
	case err != nil:
		return explain(fmt.Sprintf("copy %s after %d entries", path, copied), err)
	}
	return nil
}

// dumpOtherValues is dumpIPCache for a map whose values have another size: of longer ones the beginning counts, shorter
// ones are filled up with zeros.
func dumpOtherValues(m *ebpf.Map, yield func([]bpf.IPCacheKey, []bpf.IPCacheValue) bool) error {
	var (
		keys    = make([]bpf.IPCacheKey, 0, dumpChunk)
		values  = make([]bpf.IPCacheValue, 0, dumpChunk)
		key     bpf.IPCacheKey
		raw     []byte
		entries = m.Iterate()
	)
	for entries.Next(&key, &raw) {
		var value bpf.IPCacheValue
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&value)), unsafe.Sizeof(value)), raw)
		keys, values = append(keys, key), append(values, value)
		if len(keys) < dumpChunk {
			continue
		}
		if !yield(keys, values) {
			return nil
		}
		keys, values = keys[:0], values[:0]
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("read map ipcache: %w", err)
	}
	if len(keys) > 0 {
		yield(keys, values)
	}
	return nil
}
