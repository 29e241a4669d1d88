// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
)

func testLayout(t testing.TB) identity.Layout {
	t.Helper()
	layout, err := identity.NewLayout(255)
	if err != nil {
		t.Fatal(err)
	}
	return layout
}

func testIdentityGC(t testing.TB) IdentityGCConfig {
	t.Helper()
	return IdentityGCConfig{ClusterName: "east", ClusterID: 1, Layout: testLayout(t), Interval: time.Millisecond}
}

// labelsOf are those of an application of cluster east.
func labelsOf(app string) identity.Labels {
	return identity.ParseLabels("k8s:app=" + app + ";k8s:io.cilium.k8s.policy.cluster=east;")
}

// identities is the identities of an etcd, by number.
type identities struct {
	*testutil.Etcd
	t testing.TB
}

func (e identities) bind(id identity.ID, labels string) {
	e.Put(e.t, identity.MasterKey(id), labels)
}

// use has a node say that it uses an identity.
func (e identities) use(id identity.ID, labels identity.Labels, node string) {
	e.Put(e.t, identity.SlaveKey(labels, netip.MustParseAddr(node)), strconv.FormatUint(uint64(id), 10))
}

// left are the identities that there still are.
func (e identities) left(term *Term) (ids []identity.ID) {
	e.t.Helper()
	for kv, err := range term.client.All(e.t.Context(), identityMasters) {
		if err != nil {
			e.t.Fatal(err)
		}
		id, err := identity.ParseKey(strings.TrimPrefix(kv.Key, identityMasters))
		if err != nil {
			continue
		}
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// Of all that there is, only identities of the own range are deleted that nobody has used for two rounds.
//
// mechanism: O1 O2 O3
// lesson: O4
func TestIdentityGC(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	e, term := identities{etcd, t}, mustBegin(t, etcd)
	slashes := identity.ParseLabels("k8s:u=http://h;k8s:io.cilium.k8s.policy.cluster=east;")
	e.bind(65536, labelsOf("unused").String())
	e.bind(65537, labelsOf("used").String())
	e.use(65537, labelsOf("used"), "172.18.1.1")
	e.bind(65538, slashes.String())
	e.use(65538, slashes, "fd00::1")
	e.bind(65539, labelsOf("unused").String()+"k8s:longer=;") // begins like the one that is used below
	e.use(65539, identity.ParseLabels(labelsOf("unused").String()+"k8s:longer=;"), "172.18.1.1")
	e.bind(65540, labelsOf("twice").String()) // a second one of the labels, which nobody uses
	e.bind(65541, labelsOf("twice").String())
	e.use(65541, labelsOf("twice"), "172.18.1.1")
	e.bind(65542, "reserved:host=;")              // of no cluster by its labels
	e.bind(65543, labelsOf("elsewhere").String()) // that another set of labels names is used as well
	e.use(65543, labelsOf("confused"), "172.18.1.1")
	keep := []identity.ID{65537, 65538, 65539, 65541, 65543}
	for _, id := range []identity.ID{1, 255, 256, 65535, 131072, 16777215} { // of no range, or of others
		e.bind(id, labelsOf("unused").String())
		keep = append(keep, id)
	}
	e.bind(65545, "k8s:app=unused;k8s:io.cilium.k8s.policy.cluster=west;")
	putLeased(t, term, identity.MasterKey(65546), labelsOf("copied").String(), time.Minute)
	e.bind(65547, "")
	e.Put(t, identityMasters+"065548", labelsOf("unused").String())
	e.Put(t, identityMasters+"x", labelsOf("unused").String())
	keep = append(keep, 65545, 65546, 65547, 65548)
	slices.Sort(keep)
	all := e.left(term)

	gc := NewIdentityGC(testIdentityGC(t))
	if did := mustRound(t, gc, term); did.Deleted != 0 || !slices.Equal(e.left(term), all) {
		t.Fatalf("the first round deletes: %+v", did)
	}
	did := mustRound(t, gc, term)
	if got := e.left(term); did.Deleted != 3 || !slices.Equal(got, keep) {
		t.Errorf("left: %v\nwant  %v\n%+v", got, keep, did)
	}
	const want = "19 identities: 5 used, 7 of others, 1 leased, 3 not understood, 0 marked, 3 deleted, 0 kept as they were in use after all"
	if did.Detail != want {
		t.Errorf("detail %q\nwant   %q", did.Detail, want)
	}
}

// What is used again between two rounds, or bound anew, begins from the start; a new term knows nothing of the one before.
//
// mechanism: O2
func TestIdentityGCTakesTwoRounds(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	e, term := identities{etcd, t}, mustBegin(t, etcd)
	gc := NewIdentityGC(testIdentityGC(t))
	round := func(want ...identity.ID) {
		t.Helper()
		did := mustRound(t, gc, term)
		if got := e.left(term); !slices.Equal(got, want) {
			t.Errorf("left: %v, want %v (%s)", got, want, did.Detail)
		}
	}
	back, rebound := labelsOf("back"), labelsOf("rebound")
	e.bind(65536, back.String())
	e.bind(65537, rebound.String())
	round(65536, 65537)
	e.use(65536, back, "172.18.1.1")
	e.bind(65537, rebound.String())
	round(65536, 65537)
	e.Delete(t, identity.SlaveKey(back, netip.MustParseAddr("172.18.1.1")))
	round(65536) // 65536 counts from here
	term = mustBegin(t, etcd)
	round(65536)
	round()
}

// An identity that comes to be used after the round has looked is kept, and so is one that is being allocated, or that
// another collector looks at.
//
// mechanism: O2
// lesson: O4
func TestIdentityGCLooksOnceMore(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	e, term := identities{etcd, t}, mustBegin(t, etcd)
	cfg := testIdentityGC(t)
	for i, app := range []string{"used", "allocated", "collected", "rebound", "unused", "others"} {
		e.bind(65536+identity.ID(i), labelsOf(app).String())
	}
	census, err := takeIdentityCensus(t.Context(), term.client, cfg)
	if err != nil || len(census.unused) != 6 {
		t.Fatalf("%+v, %v", census, err)
	}
	e.use(65536, labelsOf("used"), "172.18.1.1")
	for _, path := range []string{identity.LockKey(labelsOf("allocated").String()), identity.LockKey("id/65538")} {
		lock, err := term.client.Lock(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := lock.Unlock(t.Context()); err != nil {
				t.Error(err)
			}
		}()
	}
	e.bind(65539, labelsOf("rebound").String())
	e.use(1, labelsOf("others"), "172.18.1.1")
	gc := &identityGC{cfg: cfg}
	done, err := gc.delete(t.Context(), term, census.unused)
	if err != nil || done.kept != 4 || len(done.deleted) != 2 {
		t.Errorf("%+v, %v", done, err)
	}
	if got, want := e.left(term), []identity.ID{65536, 65537, 65538, 65539}; !slices.Equal(got, want) {
		t.Errorf("left: %v, want %v", got, want)
	}
}

// A key that etcd refuses to delete keeps no other one, and is told of. A round behind another's fence deletes nothing.
//
// mechanism: O3
func TestIdentityGCGoesOn(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	e, term := identities{etcd, t}, mustBegin(t, etcd)
	long := labelsOf(strings.Repeat("x", 20))
	for i := range 120 {
		e.bind(65536+identity.ID(i), labelsOf(fmt.Sprint(i)).String())
	}
	cfg := testIdentityGC(t)
	census, err := takeIdentityCensus(t.Context(), term.client, cfg)
	if err != nil {
		t.Fatal(err)
	}
	census.unused[60] = unusedIdentity{id: 65600, labels: long.String() + strings.Repeat("y", 3<<20), revision: 1} // no message holds it
	gc := &identityGC{cfg: cfg}
	done, err := gc.delete(t.Context(), term, census.unused)
	if len(done.deleted) != 119 || err == nil || !strings.Contains(err.Error(), "identity 65600") {
		t.Errorf("%d deleted, %.200v", len(done.deleted), err)
	}
	mustBegin(t, etcd)
	e.bind(65536, labelsOf("again").String())
	if census, err = takeIdentityCensus(t.Context(), term.client, cfg); err != nil {
		t.Fatal(err)
	}
	if done, err = gc.delete(t.Context(), term, census.unused); !errors.Is(err, kvstore.ErrFenced) || len(done.deleted) > 0 {
		t.Errorf("another one leads, and this one deleted %v, %v", done.deleted, err)
	}
}

// A round that deletes at a rate ends with the term, and the next leader goes on.
//
// mechanism: J8 O3
func TestIdentityGCStops(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	e, term := identities{etcd, t}, mustBegin(t, etcd)
	const all = 300
	for i := range all {
		e.bind(65536+identity.ID(i), labelsOf(fmt.Sprint(i)).String())
	}
	cfg := testIdentityGC(t)
	cfg.PerMinute = 60 // one a second, which nobody waits for here
	census, err := takeIdentityCensus(t.Context(), term.client, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stopped := make(chan deletions, 1)
	go func() {
		done, err := (&identityGC{cfg: cfg}).delete(ctx, term, census.unused)
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		stopped <- done
	}()
	testutil.Eventually(t, testTimeout, func() error {
		if n := len(e.left(term)); n > all-2 {
			return fmt.Errorf("%d are left", n)
		}
		return nil
	})
	cancel()
	done := <-stopped
	// What became of the last one it may not have been told.
	if gone := all - len(e.left(term)); len(done.deleted) == 0 || gone == all || gone < len(done.deleted) || gone > len(done.deleted)+1 {
		t.Errorf("%d deleted, %d gone of %d", len(done.deleted), gone, all)
	}
	cfg.PerMinute = 0
	gc := NewIdentityGC(cfg)
	next := mustBegin(t, etcd)
	mustRound(t, gc, next)
	if mustRound(t, gc, next); len(e.left(next)) != 0 {
		t.Errorf("left by the next leader: %v", e.left(next))
	}
}
