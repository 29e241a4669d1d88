// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
)

// whileLocked starts act, which needs a feed's lock, while the feed is in the middle of a batch, and calls finish, which ends the
// batch, when act has come as far as it can. The wait decides nothing: it gives an act that does not need the lock after all the
// time to go wrong.
func whileLocked(f *feed, act, finish func()) {
	f.mu.Lock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		act()
	}()
	select {
	case <-done:
	case <-time.After(50 * time.Millisecond):
	}
	finish()
	f.mu.Unlock()
	<-done
}

// newFollowed returns the feeds of cluster west (id 2) with the default limits, as if its listings were complete, and their mesh.
func newFollowed(t *testing.T) (*Mesh, *feeds) {
	t.Helper()
	cfg := testConfig(t)
	defaultLimits(1000)(&cfg)
	m, err := newMesh(cfg, testTiming)
	must(t, err)
	return m, newRemote(m, "west").newFeeds(2, false)
}

func created(key, value string) []kvstore.Event {
	return []kvstore.Event{{Kind: kvstore.Created, Key: []byte(key), Value: []byte(value), Revision: 1}}
}

const westN1 = `{"Name":"west-n1","Cluster":"west","IPAddresses":[{"Type":"InternalIP","IP":"172.18.2.1"}],"ClusterID":2}`

// What was judged by the limits before a change, and comes into the table after the table has been looked through, is judged
// again all the same.
func TestRejudgeWaitsForBatch(t *testing.T) {
	m, fs := newFollowed(t)
	fs.nodes.apply(created("west-n1", westN1))
	key, value := "10.2.1.10", ipValue("10.2.1.10", 2<<16+257, "172.18.2.1")
	limits := *m.policy.now.Load()
	limits.Default.DeniedPrefixes = cidrs("10.2.1.0/24")

	fs.ips.mu.Lock()
	err := fs.ips.decode.upsert([]byte(key), []byte(value), 1) // as it is allowed yet
	fs.ips.mu.Unlock()
	must(t, err)
	m.policy.now.Store(&limits)
	whileLocked(fs.ips, func() { m.rejudge(map[identity.ClusterID]*feeds{2: fs}) }, func() { fs.ips.decode.flush(time.Time{}) })
	if left := m.cfg.IPs.Claims(netip.MustParsePrefix("10.2.1.10/32")); len(left) != 0 {
		t.Errorf("in use: %v", left)
	}
}

// A node that arrives while an announcement behind it is being judged is not missed.
func TestNodeArrivesMeanwhile(t *testing.T) {
	m, fs := newFollowed(t)
	d := fs.ips.decode.(*ips)
	claim := ipcache.Claim{
		Prefix: netip.MustParsePrefix("10.2.1.10/32"), Owner: d.owner, Revision: 1,
		Entry: ipcache.Entry{Identity: 2<<16 + 257, Host: netip.MustParseAddr("172.18.2.1")},
	}
	wait, err := d.reconsider(&claim)
	if must(t, err); !wait {
		t.Fatal("the announcement does not wait for its node")
	}
	whileLocked(fs.ips, func() {
		fs.nodes.apply(created("west-n1", westN1))
		fs.nodes.flushed()
	}, func() { d.hold(claim) })
	if got := m.cfg.IPs.Claims(claim.Prefix); len(got) != 1 || fs.waiting() != 0 {
		t.Errorf("claims %v, waiting %d, want it in use", got, fs.waiting())
	}
}

// What no longer waits is not counted as waiting.
func TestWaitingCount(t *testing.T) {
	_, fs := newFollowed(t)
	at := func(host string) string { return ipValue("10.2.1.10", 2<<16+257, host) }
	fs.nodes.apply(created("west-n1", westN1))
	for _, c := range []struct {
		value string
		want  int
	}{{at("172.18.2.2"), 1}, {at("172.18.2.1"), 0}, {at("172.18.2.2"), 1}, {"{", 1}, {at("127.0.0.1"), 0}} {
		fs.ips.apply(created("10.2.1.10", c.value))
		if got := fs.waiting(); got != c.want {
			t.Errorf("after %s: %d wait, want %d", c.value, got, c.want)
		}
	}
}

// A listing anew that is asked for just when the connection ends is made over the next one.
func TestListingAnewOutlivesConnection(t *testing.T) {
	_, fs := newFollowed(t)
	f := fs.ips
	f.apply(created("10.2.1.10", ipValue("10.2.1.10", 3<<16+257, "172.18.2.1"))) // refused for good
	f.apply(created("10.9.9.9", ipValue("10.9.9.9", 7, "")))                     // refused by the limits
	f.rejudge(nil)
	ctx, disconnect := context.WithCancel(context.Background())
	pass := f.begin(ctx)
	disconnect()
	f.retry(time.Now(), testTiming)
	if cause := context.Cause(pass); errors.Is(cause, errJudgeAnew) {
		t.Fatalf("the run ended for %v", cause)
	}
	f.end()

	pass = f.begin(context.Background())
	f.retry(time.Now().Add(time.Hour), testTiming)
	if cause := context.Cause(pass); !errors.Is(cause, errJudgeAnew) {
		t.Errorf("over the next connection, the run ends for %v, want %v", cause, errJudgeAnew)
	}
	f.end()
	f.move(f.prefix)
	pass = f.begin(context.Background())
	defer f.end()
	if f.retry(time.Now().Add(2*time.Hour), testTiming); pass.Err() != nil {
		t.Error("listed anew once more without a reason")
	}
}
