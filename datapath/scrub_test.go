// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// foreign is somebody else who changes a map.
type foreign struct {
	*recorder
	rng *rand.Rand
}

// change deletes an entry, gives it another value, or adds one.
func (f foreign) change() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	keys := slices.SortedFunc(maps.Keys(f.entries), compareKeys)
	if len(keys) == 0 {
		return "left it empty"
	}
	key := keys[f.rng.IntN(len(keys))]
	switch f.rng.IntN(3) {
	case 0:
		f.drop(key)
		return fmt.Sprintf("deleted %v", key)
	case 1:
		f.put(key, bpf.IPCacheValue{Identity: 999})
		return fmt.Sprintf("changed %v", key)
	}
	key = bpf.MakeIPCacheKey(netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, byte(f.rng.Uint32()), byte(f.rng.Uint32())}), 32))
	f.put(key, bpf.IPCacheValue{Identity: 131330})
	return fmt.Sprintf("added %v", key)
}

// wanted is what the map of a table holds.
func wanted(table *ipcache.Table) map[bpf.IPCacheKey]bpf.IPCacheValue {
	all := map[bpf.IPCacheKey]bpf.IPCacheValue{}
	for claim := range table.All() {
		key, value := underlay{}.encode(claim.Prefix, claim.Entry)
		all[key] = value
	}
	return all
}

// scrubPrefix is one of many hosts of both families, in networks that are prefixes themselves.
func scrubPrefix(i int) string {
	switch i % 8 {
	case 0:
		return fmt.Sprintf("10.%d.%d.0/24", i>>16&255, i>>8&255)
	case 1, 2:
		return fmt.Sprintf("fd00:%x::%x/128", i>>8, i&255)
	}
	return fmt.Sprintf("10.%d.%d.%d/32", i>>16&255, i>>8&255, i&255)
}

// Whatever somebody else does to a map of whatever size, at whatever instant, is undone within 30 seconds. The clock is not real.
//
// lesson: K2
func TestScrub(t *testing.T) {
	for _, entries := range []int{1, 700, 5000} {
		t.Run(fmt.Sprint(entries), func(t *testing.T) {
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			synctest.Test(t, func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, 0))
				b := newReconcilerBench(t, newRecorder())
				b.heard[0], b.heard[2] = true, true
				b.pace = comparePace{compareInterval, DefaultVerifyInterval}
				for i := range entries {
					b.apply(upsert(scrubPrefix(i), 131329))
				}
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan struct{})
				go func() { b.run(ctx, func() {}); close(done) }()
				synctest.Wait()
				want, changes := wanted(b.table), uint64(0)
				other := foreign{b.kernel, rng}
				for range 4 {
					var what []string
					for range 1 + rng.IntN(4) {
						time.Sleep(time.Duration(rng.Int64N(int64(7 * time.Second))))
						what = append(what, other.change())
					}
					time.Sleep(30 * time.Second)
					synctest.Wait()
					if diff := cmp.Diff(want, b.kernel.entries); diff != "" {
						t.Fatalf("30 s after somebody %v (-want +got):\n%s", what, diff)
					}
					changes += uint64(len(what))
				}
				cancel()
				<-done
				// Two changes of one entry may have been found as one.
				if s := b.status(); s.Drift == 0 || s.Drift > changes || s.VerifiedAt.IsZero() {
					t.Errorf("status %+v, want a drift of up to %d", s, changes)
				}
			})
		})
	}
}

// A scrub that the map is written under, where it has been and where it is going to, finds what somebody else did before it
// began, and nothing else.
func TestScrubAmongChanges(t *testing.T) {
	const space = 3200
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	b := newReconcilerBench(t, newRecorder())
	b.heard[0], b.heard[2] = true, true
	// change makes claims come, go and change, whose prefixes others leave alone: those with odd numbers.
	change := func(n int) {
		for range n {
			prefix := scrubPrefix(rng.IntN(space/2)*2 + 1)
			if rng.IntN(3) == 0 {
				b.apply(remove(prefix))
			} else {
				b.apply(upsert(prefix, identity.ID(131329+rng.IntN(3))))
			}
		}
	}
	for i := range space {
		b.apply(upsert(scrubPrefix(i), 131329))
	}
	b.step(0)
	for round := range 4 {
		var want []string
		for range round * 3 {
			key := bpf.MakeIPCacheKey(netip.MustParsePrefix(scrubPrefix(rng.IntN(space/8)*8 + []int{2, 4, 6}[rng.IntN(3)])))
			if b.kernel.entries[key].Identity != 131329 {
				continue // one that is changed already
			}
			if want = append(want, key.String()); rng.IntN(2) == 0 {
				b.kernel.drop(key)
			} else {
				b.kernel.put(key, bpf.IPCacheValue{Identity: 999})
			}
		}
		var got []string
		s, restarts := b.newScrub(64), 0
		b.scrubbing = s
		for done := false; !done; {
			var suspects []suspect
			var err error
			change(rng.IntN(8)) // and nobody has taken it
			if suspects, done, err = s.step(); err != nil {
				t.Fatal(err)
			}
			for _, one := range suspects {
				got = append(got, one.key.String())
			}
			b.mend(suspects)
			change(rng.IntN(8))
			if restarts < 3 && rng.IntN(30) == 0 { // what the walk has met last
				if prefix, err := s.last.Prefix(); err == nil && !slices.Contains(want, s.last.String()) {
					restarts++
					b.apply(remove(prefix.String()))
					b.step(0)
					b.apply(upsert(prefix.String(), 131329))
				}
			}
			b.step(0)
		}
		b.scrubbing = nil
		slices.Sort(want)
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("round %d: differences (-want +got):\n%s", round, diff)
		}
		if diff := cmp.Diff(wanted(b.table), b.kernel.entries); diff != "" {
			t.Fatalf("round %d: map (-want +got):\n%s", round, diff)
		}
	}
}

// Steps of a scrub are as far apart as its interval asks, or so far that it takes no more than its share of the time; after a
// difference they follow each other closely, but not at once.
func TestScrubPace(t *testing.T) {
	p := comparePace{20 * time.Second, 5 * time.Minute}
	for _, v := range []struct {
		took  time.Duration
		steps int
		rush  bool
		want  time.Duration
	}{
		{0, 1, false, 10 * time.Second},
		{time.Millisecond, 200, false, 20 * time.Second / 251},
		{500 * time.Microsecond, 2000, false, 20 * time.Second / 2501},
		{5 * time.Millisecond, 2000, false, 50 * time.Millisecond}, // a machine that is ten times as slow
		{time.Minute, 2000, false, 5 * time.Minute / 2501},
		{time.Millisecond, 2000, true, 3 * time.Millisecond},
	} {
		for range 100 {
			if got := p.pause(v.took, v.steps, v.rush); got < v.want*8/10 || got > v.want*12/10 {
				t.Errorf("%+v: %v", v, got)
			}
		}
	}
}
