// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"
)

// twin is the index as two maps.
type twin struct {
	live map[string]int64
	dead map[string]int64
}

// compare fails the test where the index is not its twin. A tombstone may have
// been dropped.
func (n twin) compare(t *testing.T, x *index) {
	t.Helper()
	seen := 0
	for e := range x.all() {
		seen++
		if rev, ok := n.live[string(x.key(e))]; !ok || rev != e.revision() {
			t.Fatalf("%q is live at %d, want %d (%v)", x.key(e), e.revision(), rev, ok)
		}
	}
	if seen != len(n.live) || x.live != seen {
		t.Fatalf("%d entries are live, %d counted, want %d", seen, x.live, len(n.live))
	}
	for key, rev := range n.live {
		if e := x.find([]byte(key)); e == nil || !e.alive() || e.revision() != rev {
			t.Fatalf("%q is not found at %d", key, rev)
		}
	}
	for key, rev := range n.dead {
		if e := x.find([]byte(key)); e != nil && (e.alive() || e.revision() != rev) {
			t.Fatalf("%q is alive, or its tombstone not of %d", key, rev)
		}
	}
}

// apply does one random thing to both.
func (n twin) apply(t *testing.T, x *index, op byte, key string, rev int64) {
	t.Helper()
	e := x.find([]byte(key))
	_, live := n.live[key]
	if live != (e != nil && e.alive()) {
		t.Fatalf("%q: live is %v", key, live)
	}
	switch {
	case op < 160 && e == nil:
		if _, err := x.insert([]byte(key), rev, 0); err != nil {
			t.Fatal(err)
		}
		n.live[key] = rev
		delete(n.dead, key)
	case op < 160:
		if !e.alive() {
			x.revive(e)
		}
		e.set(rev, 0)
		n.live[key] = rev
		delete(n.dead, key)
	case op < 250 && live:
		x.bury(e, rev)
		delete(n.live, key)
		n.dead[key] = rev
	case op == 250:
		x.purge()
		clear(n.dead)
	case op == 251:
		x.markStale()
		for e := range x.all() {
			if !e.stale() {
				t.Fatalf("%q is not stale", x.key(e))
			}
			e.keep()
		}
	}
}

func TestIndexEqualsMaps(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, keys := range []int{1, 50, 5000} {
		x, n := &index{}, twin{map[string]int64{}, map[string]int64{}}
		for i := range 60_000 {
			key := fmt.Sprintf("k%d", r.IntN(keys))
			if r.IntN(1000) == 0 {
				key = strings.Repeat("x", r.IntN(3)*arenaChunk/2)
			}
			n.apply(t, x, byte(r.IntN(256)), key, int64(i)<<20)
			if i%5000 == 0 {
				n.compare(t, x)
			}
		}
		n.compare(t, x)
	}
}

func FuzzIndex(f *testing.F) {
	f.Add([]byte("\x00\x01\x00\x02\xb0\x01\xfa\x00"))
	f.Fuzz(func(t *testing.T, ops []byte) {
		x, n := &index{}, twin{map[string]int64{}, map[string]int64{}}
		for i := 0; i+2 <= len(ops); i += 2 {
			n.apply(t, x, ops[i], strings.Repeat("k", int(ops[i+1])), int64(i+1))
		}
		n.compare(t, x)
	})
}

func TestIndexKeepsNewest(t *testing.T) {
	var x index
	if x.newest() != nil {
		t.Error("an empty index has a newest entry")
	}
	for i, key := range []string{"a", "b", "c"} {
		if _, err := x.insert([]byte(key), int64(i+1)<<40, 0); err != nil {
			t.Fatal(err)
		}
	}
	x.bury(x.find([]byte("c")), 9<<40)
	if got := string(x.key(x.newest())); got != "b" {
		t.Errorf("the newest is %q", got)
	}
}

// The memory per key is a promise of the package, so it is tested and not only
// measured.
func TestIndexIsCompact(t *testing.T) {
	const keys, limit = 500_000, 45
	if got := indexBytes(keys) / keys; got > limit {
		t.Errorf("a key takes %.1f bytes, more than %d", got, limit)
	}
}

// indexBytes returns the heap that an index of n keys such as "10.2.3.4" takes.
func indexBytes(n int) float64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	x := &index{}
	for i := range n {
		var ip [4]byte
		binary.BigEndian.PutUint32(ip[:], uint32(i)+0x0a800000)
		key := fmt.Sprintf("%d.%d.%d.%d", ip[0], ip[1], ip[2], ip[3])
		if _, err := x.insert([]byte(key), int64(i), 0); err != nil {
			panic(err)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	runtime.KeepAlive(x)
	return float64(after.HeapAlloc) - float64(before.HeapAlloc)
}
