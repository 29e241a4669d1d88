// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// What an earlier agent of this node announced, and nobody declares any more, is withdrawn once all sources are known;
// an address that another node has announced since is its new owner's.
//
// mechanism: Q7
// lesson: X8
func TestWithdrawsWhatAnEarlierAgentPublished(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	a := startAllocator(t, etcd, "172.18.1.1")
	put := func(addr, host, node string) string {
		t.Helper()
		ann := ipcache.Announcement{
			Prefix: netip.MustParsePrefix(addr + "/32"), Host: netip.MustParseAddr(host), Identity: 65793, Metadata: metadataOf(node) + "7",
		}
		value, err := ann.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		etcd.Put(t, ann.Key(), string(value))
		return ann.Key()
	}
	gone := put("10.1.1.50", "172.18.1.1", "east-n1")
	kept := []string{
		put("10.1.1.51", "172.18.1.2", "east-n2"),   // reused by another node
		put("10.1.1.52", "172.18.1.1", "east-n1-b"), // of another agent behind this address
		put("10.1.1.10", "172.18.1.1", "east-n1"),   // still declared
	}
	goneSlave := identity.SlaveKey(labelsOf("old"), a.host)
	keptSlave := identity.SlaveKey(labelsOf("old"), netip.MustParseAddr("172.18.1.2"))
	etcd.Put(t, goneSlave, "65799")
	etcd.Put(t, keptSlave, "65799")
	b := newBench(t, func(c *Config) {
		c.Publisher, c.Allocator, c.Leftovers = a.writer, a.Allocator, a.client
	})
	b.write("a.yaml", "name: web\nnamespace: shop\nip: 10.1.1.10\nlabels: {app: web}\n")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- b.Run(ctx) }()
	testutil.Eventually(t, patience, func() error {
		for _, key := range []string{gone, goneSlave} {
			if _, ok := etcd.Get(t, key); ok {
				return fmt.Errorf("%s is still there", key)
			}
		}
		for _, e := range b.Status().Endpoints {
			if e.State == Identified {
				return nil
			}
		}
		return errors.New("the endpoint has no identity")
	})
	for _, key := range append(kept, keptSlave) {
		if _, ok := etcd.Get(t, key); !ok {
			t.Errorf("%s was taken away", key)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// The key that this node would take back has been written by another node since it was read.
//
// lesson: X8
func TestReusedAddressStays(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	a := startAllocator(t, etcd, "172.18.1.1")
	const key = announced + "10.1.1.50"
	etcd.Put(t, key, "ours")
	read, _, err := a.client.Get(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	etcd.Put(t, key, "theirs")
	if deleted, err := a.client.DeleteIfUnchanged(t.Context(), read); err != nil || deleted {
		t.Errorf("deleted: %v, %v", deleted, err)
	}
	if got, _ := etcd.Get(t, key); got != "theirs" {
		t.Errorf("%s is %q", key, got)
	}
}

// directly answers for a registry that does not run.
func directly(question func()) { question() }

// Without an identity a workload is init on its node, and nobody else hears of it; then it is itself.
//
// mechanism: J3
func TestWaitsAsInit(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	a := startAllocator(t, etcd, "172.18.1.1")
	etcd.Stop(t)
	b := newBench(t, func(c *Config) { c.Publisher, c.Allocator = a.writer, a.Allocator })
	b.write("a.yaml", "name: web\nnamespace: shop\nip: 10.1.1.10\nlabels: {app: web}\n")
	b.scan(true)
	b.wantIPs("10.1.1.10 init shop/web")
	if e := b.Status().Endpoints[0]; e.State != Waiting || e.Identity != identity.Init {
		t.Errorf("the endpoint is %+v", e)
	}
	if s := a.writer.Status(); s.Keys != 0 {
		t.Errorf("%d keys are published", s.Keys)
	}
	etcd.Restart(t)
	testutil.Eventually(t, patience, func() error {
		b.update(true)
		if e := b.Status().Endpoints[0]; e.State != Identified {
			return fmt.Errorf("the endpoint is %+v", e)
		}
		value, _ := etcd.Get(t, announced+"10.1.1.10")
		if !strings.Contains(value, fmt.Sprintf(`"ID":%d,`, b.Status().Endpoints[0].Identity)) {
			return fmt.Errorf("announced is %q", value)
		}
		return nil
	})
	if labels, ok := b.cfg.Identities.Labels(b.Status().Endpoints[0].Identity); !ok || !strings.Contains(labels.String(), "k8s:app=web;") {
		t.Errorf("labels %s", labels)
	}

	// What it has it keeps, whatever becomes of etcd.
	etcd.Stop(t)
	id := b.Status().Endpoints[0].Identity
	since := b.Status().Endpoints[0].Since
	time.Sleep(time.Millisecond)
	b.update(true)
	b.wantIPs(fmt.Sprintf("10.1.1.10 %s shop/web", id))
	if got := b.Status().Endpoints[0].Since; !got.Equal(since) {
		t.Errorf("it is so since %s, and was since %s", got, since)
	}
}

func TestWithoutAllocator(t *testing.T) {
	b := newBench(t)
	b.write("a.yaml", "name: web\nip: 10.1.1.10\n")
	b.scan(true)
	b.wantIPs("10.1.1.10 init default/web")
	if e := b.Status().Endpoints[0]; !strings.Contains(e.Reason, "--kvstore-config") || len(b.etcd.keys) != 0 {
		t.Errorf("the endpoint is %+v, published %v", e, b.etcd.keys)
	}
}
