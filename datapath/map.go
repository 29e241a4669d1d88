// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// pins maps the name of each map in the specs to the name of its pin.
var pins = map[string]string{
	bpf.MapIPCache:  pinIPCache,
	bpf.MapCounters: pinCounters,
	bpf.MapNear:     pinNear,
	bpf.MapFront:    pinFront,
	bpf.MapMissed:   pinMissed,
	bpf.MapEvents:   pinEvents,
	bpf.MapConfig:   pinConfig,
	bpf.MapFast:     pinFast,
	bpf.MapNetworks: pinNetworks,
	bpf.MapHosts:    pinHosts,
	bpf.MapPods:     pinPods,
}

// mapSet is the pinned maps, by their names in the specs.
type mapSet map[string]*ebpf.Map

// openMaps opens the pin of every map in specs, or makes the map and pins it. An error wraps [ErrIncompatible] if a pin
// holds something else than its spec says.
func openMaps(dir *pinDir, specs map[string]*ebpf.MapSpec, log *slog.Logger) (_ mapSet, err error) {
	set := mapSet{}
	defer func() {
		if err != nil {
			set.Close()
		}
	}()
	for name, spec := range specs {
		pin, ok := pins[name]
		if !ok {
			return nil, fmt.Errorf("map %s has no pin", name)
		}
		if err := removePin(dir.file(pin) + pinNewSuffix); err != nil { // of an agent that died while it made one
			return nil, err
		}
		m, err := openMap(dir.file(pin), spec, log)
		if err != nil {
			return nil, err
		}
		set[name] = m
	}
	return set, nil
}

// Close closes the maps and leaves their pins.
func (s mapSet) Close() {
	for _, m := range s {
		_ = m.Close()
	}
}

// repin puts back the pins that somebody removed or replaced. The map lives on in this process and in the programs, but the next
// agent would not find it. It returns how many it put back.
func (s mapSet) repin(dir *pinDir) (put int, err error) {
	var errs []error
	for name, m := range s {
		did, err := putBack(dir.file(pins[name]), mapAt, m)
		if did {
			put++
		}
		errs = append(errs, err)
	}
	return put, errors.Join(errs...)
}

// openMap opens the map that is pinned at path, or makes and pins it. One of another size or layout is replaced in such a
// way that the programs of a running node always have one to read: see migrate.go.
func openMap(path string, spec *ebpf.MapSpec, log *slog.Logger) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return createMap(path, spec)
	case err != nil:
		var errno unix.Errno
		if !errors.As(err, &errno) {
			return nil, fmt.Errorf("%w: %s holds no map: stop weft, remove it and start again", ErrIncompatible, path)
		}
		return nil, explain("open map "+path, err)
	}
	differs := spec.Compatible(m)
	if differs == nil {
		return m, nil
	}
	defer m.Close()
	began := time.Now()
	fresh, err := migrate(path, m, spec)
	if err != nil {
		return nil, err
	}
	log.Info("map made anew with its content", "pin", path, "because", differs, "took", time.Since(began))
	return fresh, nil
}

func createMap(path string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, explain("create map "+spec.Name, err)
	}
	if err := m.Pin(path); err != nil {
		_ = m.Close()
		return nil, explain("pin map at "+path, err)
	}
	return m, nil
}

// prefixMap is what the reconciler needs of the kernel's map.
type prefixMap interface {
	// Update sets keys[i] to values[i], in order, and returns how many it set; with an error, the next one is at fault.
	Update(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) (int, error)
	// Delete removes keys, in order, and returns how many it removed; with an error, the next one is at fault, and is
	// absent if that error is [ebpf.ErrKeyNotExist].
	Delete(keys []bpf.IPCacheKey) (int, error)
	// Dump yields all entries in chunks, which are valid during the call only.
	Dump(yield func(keys []bpf.IPCacheKey, values []bpf.IPCacheValue)) error
	// Walk begins a walk through all entries.
	Walk() mapWalk
	// Check holds what programs find before they look into the map against entries of it, and puts right what differs. With
	// all, every entry has been looked at since the last time, and there must be nothing else. wrong: something did differ.
	Check(keys []bpf.IPCacheKey, values []bpf.IPCacheValue, all bool) (wrong bool, err error)
}

// mapWalk fills keys and values with the next entries, as many as fit, and returns how many there were; end: they were the last
// ones. Between two calls the map may be written: what stays is met all the same, perhaps twice, as long as the entry that was met
// last is there.
type mapWalk = walk[bpf.IPCacheKey, bpf.IPCacheValue]

// kernelMap writes the pinned map, in batches where the kernel has them. It is for one goroutine.
type kernelMap struct {
	m      *ebpf.Map
	single bool // the kernel has no batches for this map
}

var _ prefixMap = (*kernelMap)(nil)

func (k *kernelMap) Update(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) (int, error) {
	if !k.single {
		n, err := k.m.BatchUpdate(keys, values, nil)
		if !k.noBatch(n, len(keys), err) {
			return n, err
		}
	}
	for i := range keys {
		if err := k.m.Update(&keys[i], &values[i], ebpf.UpdateAny); err != nil {
			return i, err
		}
	}
	return len(keys), nil
}

func (k *kernelMap) Delete(keys []bpf.IPCacheKey) (int, error) {
	if !k.single {
		n, err := k.m.BatchDelete(keys, nil)
		if !k.noBatch(n, len(keys), err) {
			return n, err
		}
	}
	for i := range keys {
		if err := k.m.Delete(&keys[i]); err != nil {
			return i, err
		}
	}
	return len(keys), nil
}

// noBatch reports whether to go on one by one: for good if the kernel has no batches, and for this once if it failed
// before it began, when the count that it leaves behind says nothing.
func (k *kernelMap) noBatch(done, of int, err error) bool {
	if errors.Is(err, ebpf.ErrNotSupported) {
		k.single = true
	}
	return err != nil && (k.single || done >= of)
}

func (k *kernelMap) Dump(yield func([]bpf.IPCacheKey, []bpf.IPCacheValue)) error {
	return dumpIPCache(k.m, func(keys []bpf.IPCacheKey, values []bpf.IPCacheValue) bool {
		yield(keys, values)
		return true
	})
}

func (k *kernelMap) Walk() mapWalk {
	return walkMap[bpf.IPCacheKey, bpf.IPCacheValue](k.m, "ipcache")
}

// Check has nothing to do: programs look into the map.
func (k *kernelMap) Check([]bpf.IPCacheKey, []bpf.IPCacheValue, bool) (bool, error) {
	return false, nil
}

// dumpChunk is how many entries one system call of a dump returns.
const dumpChunk = 4096

// dumpIPCache is dumpMap for the ipcache.
func dumpIPCache(m *ebpf.Map, yield func([]bpf.IPCacheKey, []bpf.IPCacheValue) bool) error {
	return dumpMap(m, "ipcache", yield)
}

// dumpMap yields all entries of m in chunks, which are valid during the call only, until yield returns false.
func dumpMap[K, V any](m *ebpf.Map, name string, yield func([]K, []V) bool) error {
	keys, values := make([]K, dumpChunk), make([]V, dumpChunk)
	for next := walkMap[K, V](m, name); ; {
		n, end, err := next(keys, values)
		if err != nil || n > 0 && !yield(keys[:n], values[:n]) || end {
			return err
		}
	}
}

// walk is a mapWalk of any map.
type walk[K, V any] func(keys []K, values []V) (n int, end bool, err error)

// walkMap begins a walk through all entries of m. A map that is written meanwhile can make the kernel begin again; then a walk
// might not end, and is given up with an error.
func walkMap[K, V any](m *ebpf.Map, name string) walk[K, V] {
	var (
		cursor ebpf.MapBatchCursor
		single walk[K, V] // on kernels without batches
		met    uint64
	)
	return func(keys []K, values []V) (n int, end bool, err error) {
		if single == nil {
			n, err = m.BatchLookup(&cursor, keys, values, nil)
			if errors.Is(err, ebpf.ErrNotSupported) {
				single = iterateMap[K, V](m)
			}
		}
		if single != nil {
			n, end, err = single(keys, values)
		} else if errors.Is(err, ebpf.ErrKeyNotExist) {
			end, err = true, nil
		}
		met += uint64(n)
		switch {
		case err != nil:
			return 0, false, fmt.Errorf("read map %s: %w", name, err)
		case met > 2*(uint64(m.MaxEntries())+dumpChunk) && !end:
			return 0, false, fmt.Errorf("read map %s: it changes faster than it can be read: try again", name)
		}
		return n, end, nil
	}
}

// iterateMap walks entry by entry.
func iterateMap[K, V any](m *ebpf.Map) walk[K, V] {
	entries := m.Iterate()
	return func(keys []K, values []V) (n int, end bool, err error) {
		for n < len(keys) && entries.Next(&keys[n], &values[n]) {
			n++
		}
		return n, n < len(keys), entries.Err()
	}
}
