// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/bpf/measure"
	"github.com/weftmesh/weft/internal/testutil"
)

// newMeasure loads the measuring programs, on the maps of another collection if one is given.
func newMeasure(t testing.TB, maps *ebpf.Collection, list, entries uint32) *ebpf.Collection {
	t.Helper()
	testutil.RequireRoot(t)
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	spec, err := measure.LoadTry()
	if err != nil {
		t.Fatal(err)
	}
	spec.Maps[measure.LookupMapMeasureList].MaxEntries = list
	spec.Maps[bpf.MapIPCache].MaxEntries = entries
	var opts ebpf.CollectionOptions
	if maps != nil {
		opts.MapReplacements = map[string]*ebpf.Map{
			bpf.MapIPCache: maps.Maps[bpf.MapIPCache], bpf.MapHosts: maps.Maps[bpf.MapHosts],
			bpf.MapFast: maps.Maps[bpf.MapFast], bpf.MapNetworks: maps.Maps[bpf.MapNetworks],
		}
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, opts)
	if err != nil {
		t.Fatalf("load the measuring programs: %+v", err)
	}
	t.Cleanup(coll.Close)
	return coll
}

// fastMapsOf are the maps of a collection in which programs look for hosts.
func fastMapsOf(t testing.TB, coll *ebpf.Collection) *fastMaps {
	t.Helper()
	maps, err := openFastMaps(coll.Maps)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(maps.Close)
	return maps
}

// look runs a program so many times over a list of which the first entries are set.
func look(t testing.TB, coll *ebpf.Collection, program string, times, length uint32) measure.Measurement {
	order := measure.Measurement{Length: length}
	err := coll.Maps[measure.LookupMapMeasureOrder].Put(uint32(0), order)
	if err == nil {
		_, err = coll.Programs[program].Run(&ebpf.RunOptions{Data: make([]byte, 64), Repeat: times})
	}
	if err == nil {
		err = coll.Maps[measure.LookupMapMeasureOrder].Lookup(uint32(0), &order)
	}
	if err != nil {
		t.Errorf("run %s: %v", program, err)
	}
	return order
}

// torture is a map with its fast path under change, and what it must hold.
type torture struct {
	t      *testing.T
	coll   *ebpf.Collection
	prober *ebpf.Collection

	mu       sync.Mutex // the writers take turns
	path     *fastPath
	keys     []bpf.IPCacheKey
	versions []uint32 // of each key, raised by each change
	there    []bool
	changes  int
}

// stable reports whether a key is never deleted.
func stable(i int) bool { return i%8 == 0 }

// tortureKey is one of few networks, so that hosts share all that they can share.
func tortureKey(i int) bpf.IPCacheKey {
	addr := netip.AddrFrom4([4]byte{10, 0, byte(i >> 7), byte(i >> 1)})
	if i%2 == 1 {
		addr = netip.AddrFrom16([16]byte{0: 0xfd, 7: byte(i >> 9), 14: byte(i >> 8), 15: byte(i)})
	}
	return bpf.MakeIPCacheKey(netip.PrefixFrom(addr, addr.BitLen()))
}

func newTorture(t *testing.T, keys int) *torture {
	o := &torture{t: t, coll: newMeasure(t, nil, 1, 1<<16), versions: make([]uint32, keys), there: make([]bool, keys)}
	o.prober = newMeasure(t, o.coll, 1, 1<<16)
	trie := &kernelMap{m: o.coll.Maps[bpf.MapIPCache]}
	o.path = newFastPath(trie, fastMapsOf(t, o.coll), 1<<16, func() int { return 0 })
	t.Cleanup(o.path.Close)
	for i := range keys {
		o.keys = append(o.keys, tortureKey(i))
		if stable(i) {
			o.there[i] = true
			if _, err := o.path.Update(o.keys[i:i+1], []bpf.IPCacheValue{o.value(i)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	return o
}

// value is what the key has now: a checksum of it, and its version.
func (o *torture) value(i int) bpf.IPCacheValue {
	ip := o.keys[i].IP
	var words [4]uint32
	for w := range words {
		words[w] = uint32(ip[4*w]) | uint32(ip[4*w+1])<<8 | uint32(ip[4*w+2])<<16 | uint32(ip[4*w+3])<<24
	}
	return bpf.IPCacheValue{Identity: measure.Checksum(words)<<measure.VersionBits | o.versions[i]}
}

// reader returns a program's list of all keys, in an order of its own.
func (o *torture) reader(rng *rand.Rand) *ebpf.Collection {
	coll := newMeasure(o.t, o.coll, uint32(len(o.keys)), 1<<16)
	for at, i := range rng.Perm(len(o.keys)) {
		key := o.keys[i]
		key.PrefixLen = 0
		if stable(i) {
			key.Pad = 1
		}
		if err := coll.Maps[measure.LookupMapMeasureList].Put(uint32(at), key); err != nil {
			o.t.Fatal(err)
		}
	}
	return coll
}

// change makes one batch of random changes and returns how many.
func (o *torture) change(rng *rand.Rand) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := 1 + rng.IntN(64)
	from := rng.IntN(len(o.keys) - n)
	var keys []bpf.IPCacheKey
	var values []bpf.IPCacheValue
	var err error
	o.changes++
	switch remove := rng.IntN(3) == 0; {
	case o.changes%1000 == 0:
		err = o.path.Dump(func([]bpf.IPCacheKey, []bpf.IPCacheValue) {})
	case remove:
		for i := from; i < from+n; i++ {
			if o.there[i] && !stable(i) {
				keys, o.there[i] = append(keys, o.keys[i]), false
			}
		}
		_, err = o.path.Delete(keys)
	default:
		for i := from; i < from+n; i++ {
			if o.versions[i]++; o.versions[i] >= 1<<measure.VersionBits {
				o.t.Errorf("version %d of a key is more than programs can tell", o.versions[i])
			}
			keys, values, o.there[i] = append(keys, o.keys[i]), append(values, o.value(i)), true
		}
		_, err = o.path.Update(keys, values)
	}
	if err != nil {
		o.t.Errorf("change the map: %v", err)
	}
	if rng.IntN(16) == 0 {
		o.probe(from)
	}
	return n
}

// probe wants a program to find what a key has now, and nothing else.
func (o *torture) probe(i int) {
	key, want := o.keys[i], uint32(0)
	if o.there[i] {
		want = o.value(i).Identity
	}
	key.PrefixLen = 0
	if err := o.prober.Maps[measure.LookupMapMeasureList].Put(uint32(0), key); err != nil {
		o.t.Error(err)
	}
	if got := look(o.t, o.prober, measure.LookupProgTryIdentity, 1, 1).Last; got != want {
		o.t.Errorf("%v: a program finds %#x, want %#x", o.keys[i], got, want)
	}
}

// TestLookupsDuringChanges: two writers change map and tables, rebuild and enlarge the tables, and replace keys by others in
// the same slots, while programs look up all keys on two CPUs. No program finds an identity of another address, nor one
// that is older than one it has found, nor none for an entry that is always there.
//
// lesson: K10
func TestLookupsDuringChanges(t *testing.T) {
	changes, keys := 100_000, 4096
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		changes = 1_000_000
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	o := newTorture(t, keys)
	if err := o.path.Dump(func([]bpf.IPCacheKey, []bpf.IPCacheValue) {}); err != nil {
		t.Fatal(err)
	}
	var readers, writers sync.WaitGroup
	var done atomic.Bool
	for r := range uint64(2) {
		coll := o.reader(rand.New(rand.NewPCG(seed, r)))
		readers.Go(func() {
			var sum measure.Measurement
			for !done.Load() {
				m := look(t, coll, measure.LookupProgTryCheck, uint32(keys), uint32(keys))
				sum.Known, sum.Wrong, sum.Stale, sum.Absent = sum.Known+m.Known, sum.Wrong+m.Wrong, sum.Stale+m.Stale, sum.Absent+m.Absent
			}
			t.Logf("reader %d: %d lookups found an identity", r, sum.Known)
			if sum.Wrong != 0 || sum.Stale != 0 || sum.Absent != 0 || sum.Known == 0 {
				t.Errorf("reader %d: %d of another address, %d outdated, %d missing, %d found", r, sum.Wrong, sum.Stale, sum.Absent, sum.Known)
			}
		})
		rng := rand.New(rand.NewPCG(seed, 10+r))
		writers.Go(func() {
			for n := 0; n < changes && !t.Failed(); {
				n += o.change(rng)
			}
		})
	}
	writers.Wait()
	done.Store(true)
	readers.Wait()
	for i := range o.keys {
		o.probe(i)
	}
	s := o.path.status()
	t.Logf("%+v", s)
	if s.IPv4.Entries == 0 || s.IPv6.Entries == 0 || s.Rebuilds < 2 || s.Drift != 0 || s.LastError != "" {
		t.Errorf("status %+v, want entries of both families, rebuilds, no drift and no error", s)
	}
}
