// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/identity"
)

// auditBench is a table with 5,000 prefixes, of which a reader was told.
type auditBench struct {
	*Audit
	t   *testing.T
	rng *rand.Rand
	all []netip.Prefix // in the order of a walk
}

func newAuditBench(t *testing.T) *auditBench {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	b := &auditBench{t: t, rng: rand.New(rand.NewPCG(seed, 0))}
	table := New()
	for i := range 5000 {
		prefix := fmt.Sprintf("10.%d.%d.%d", i>>9, i>>1&255, i&1)
		switch i % 3 {
		case 1:
			prefix = fmt.Sprintf("10.%d.%d.0/%d", i>>9, i>>1&254, 16+i%15)
		case 2:
			prefix = fmt.Sprintf("fd00::%x", i)
		}
		c := claimed(t, prefix, 2, identity.ID(256+i))
		c.Prefix = c.Prefix.Masked()
		table.Apply(made(c))
	}
	for c := range table.All() {
		b.all = append(b.all, c.Prefix)
	}
	slices.SortFunc(b.all, CompareWalk)
	var since Revision
	for buf := make([]Change, 0, 512); ; {
		batch, next, _ := table.Changes(since, buf)
		if since = next; len(batch) == 0 {
			break
		}
	}
	b.Audit = table.Audit(since)
	return b
}

// check checks a prefix in so many, of some, and returns those that it did not.
func (b *auditBench) check(some []netip.Prefix) (unchecked map[netip.Prefix]bool) {
	b.t.Helper()
	unchecked = map[netip.Prefix]bool{}
	var met []netip.Prefix
	for _, p := range some {
		if b.rng.IntN(20) == 0 {
			unchecked[p] = true
		} else {
			met = append(met, p)
		}
	}
	strangers := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), {}}
	found := make([]Found, len(met)+len(strangers))
	b.Check(append(slices.Clone(met), strangers...), found)
	for i, f := range found {
		want := Found{}
		if i < len(met) {
			if c, ok := b.table.Get(met[i]); ok {
				want = Found{Entry: c.Entry, OK: true}
			}
		}
		if f != want {
			b.t.Errorf("found %+v, want %+v", f, want)
		}
	}
	return unchecked
}

// wantMissing scans all of the table.
func (b *auditBench) wantMissing(upTo netip.Prefix, want map[netip.Prefix]bool) {
	b.t.Helper()
	got := map[netip.Prefix]bool{}
	entries := map[netip.Prefix]Entry{}
	for done := false; !done; {
		done = b.Missing(1, upTo, func(p netip.Prefix, e Entry) { got[p], entries[p] = true, e })
	}
	if diff := cmp.Diff(want, got, netipEqual); diff != "" {
		b.t.Fatalf("missing (-want +got):\n%s", diff)
	}
	for p, e := range entries {
		if c, ok := b.table.Get(p); !ok || c.Entry != e {
			b.t.Errorf("missing %v: %+v, want %+v", p, e, c.Entry)
		}
	}
}

// An audit tells of what was found what the table has, and of what was not, each prefix once, as far as the copy should have it:
// not what lies ahead, and not what came later.
func TestAudit(t *testing.T) {
	b := newAuditBench(t)
	gone, changed, late := b.all[0], b.all[1], netip.MustParsePrefix("10.0.0.0/30")
	claim := func(p netip.Prefix, id identity.ID) Claim {
		c := claimed(t, p.String(), 2, id)
		c.CIDR = !p.IsSingleIP()
		return c
	}
	b.table.Apply([]Op{{Delete: true, Claim: claim(gone, 0)}, {Claim: claim(changed, 99)}, {Claim: claim(late, 300)}})
	half := len(b.all) / 2
	unchecked := b.check(b.all[:half])
	delete(unchecked, gone)
	delete(unchecked, changed)
	b.wantMissing(b.all[half-1], unchecked)
	b.wantMissing(b.all[half-1], map[netip.Prefix]bool{})
	unchecked = b.check(b.all[half:])
	for i := range 3000 { // which need slots that there were not
		b.table.Apply(made(claimed(t, fmt.Sprintf("fd01::%x", i), 2, 300)))
	}
	b.wantMissing(netip.Prefix{}, unchecked)
	b.wantMissing(netip.Prefix{}, map[netip.Prefix]bool{})
}

// Prefixes are in the order in which the kernel's trie is walked: a node's low half, its high half, itself.
func TestCompareWalk(t *testing.T) {
	want := []string{
		"10.0.0.0/32", "10.0.0.1/32", "10.0.0.0/24", "10.0.1.7/32", "10.0.0.0/16", "11.0.0.0/8", "0.0.0.0/0", "fd00::1/128", "fd00::/64", "::/0",
	}
	set := map[netip.Prefix]bool{}
	for _, p := range want {
		set[netip.MustParsePrefix(p)] = true
	}
	var got []string
	for _, p := range slices.SortedFunc(maps.Keys(set), CompareWalk) {
		got = append(got, p.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}
