// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
)

const (
	eastConfig  = "cilium/cluster-config/east"
	eastCanary  = "cilium/synced/east/cilium/state/ip/v1"
	eastCanary2 = "cilium/synced/east/cilium/state/nodes/v1"
	describes   = `{"id":1,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255}}`
)

// heralding is a herald that runs, with the writer of its node.
type heralding struct {
	*Herald
	client *kvstore.Client
	writer *kvstore.Writer
	stop   func()
}

func startHerald(t *testing.T, etcd *testutil.Etcd, change ...func(*HeraldConfig)) *heralding {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	client, err := kvstore.Dial(kvstore.Config{Endpoints: []string{etcd.Endpoint()}, QPS: 100_000, BootstrapQPS: 100_000}, log)
	if err != nil {
		t.Fatal(err)
	}
	writer := kvstore.NewWriter(client, kvstore.WriterConfig{VerifyInterval: verifyEvery, Log: log})
	published := make(chan struct{})
	close(published)
	cfg := HeraldConfig{
		Client: client, ClusterName: "east", Prefixes: []string{"cilium/state/ip/v1", "cilium/state/nodes/v1"},
		Config:    identity.ClusterConfig{ID: 1, Capabilities: identity.Capabilities{SyncedCanaries: true, MaxConnectedClusters: 255}},
		Published: published, Flush: writer.Flush, Settle: time.Millisecond, Refill: time.Millisecond, Log: log,
	}
	for _, c := range change {
		c(&cfg)
	}
	h, err := NewHerald(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 2)
	go func() { done <- h.Run(ctx) }()
	go func() { done <- writer.Run(ctx) }()
	x := &heralding{Herald: h, client: client, writer: writer}
	x.stop = func() {
		if ctx.Err() != nil {
			return
		}
		cancel()
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		_ = client.Close()
	}
	t.Cleanup(x.stop)
	select {
	case <-h.Ready():
	case <-time.After(patience):
		t.Fatal("the herald has not heard what there is")
	}
	return x
}

// stands waits until a key is in etcd, and returns it.
func stands(t *testing.T, etcd *testutil.Etcd, key string) (value string, lease clientv3.LeaseID) {
	t.Helper()
	testutil.Eventually(t, patience, func() error {
		resp, err := etcd.Client().Get(t.Context(), key)
		if err == nil && len(resp.Kvs) == 0 {
			err = fmt.Errorf("%s is missing", key)
		}
		if err == nil {
			value, lease = string(resp.Kvs[0].Value), clientv3.LeaseID(resp.Kvs[0].Lease)
		}
		return err
	})
	return value, lease
}

// Several nodes say together what one of them has to: each key is written once, under a lease, and again by some other node
// when that one is gone.
//
// mechanism: Q7
func TestHeraldsTakeTurns(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	for range 4 {
		startHerald(t, etcd)
	}
	for round := range 3 {
		value, lease := stands(t, etcd, eastConfig)
		if value != describes || lease == 0 {
			t.Fatalf("the cluster is described as %s, under lease %x", value, lease)
		}
		for _, key := range []string{eastCanary, eastCanary2} {
			value, lease := stands(t, etcd, key)
			if _, err := time.Parse(time.RFC3339, value); err != nil || lease == 0 {
				t.Errorf("%s is %q, under lease %x: %v", key, value, lease, err)
			}
		}
		for _, key := range []string{eastConfig, eastCanary, eastCanary2} {
			resp, err := etcd.Client().Get(t.Context(), key)
			if err != nil || len(resp.Kvs) != 1 || resp.Kvs[0].Version != 1 {
				t.Errorf("round %d: %s: %v, %v, want it written once", round, key, resp.Kvs, err)
			}
		}
		if _, err := etcd.Client().Revoke(t.Context(), lease); err != nil { // the node is gone, or thinks so
			t.Fatal(err)
		}
		testutil.Eventually(t, patience, func() error {
			resp, err := etcd.Client().Get(t.Context(), eastConfig)
			if err == nil && len(resp.Kvs) > 0 && clientv3.LeaseID(resp.Kvs[0].Lease) == lease {
				err = fmt.Errorf("the lease lives")
			}
			return err
		})
	}
}

// An operator that comes takes over, and nobody disturbs it; when it has gone for good, nodes speak again. What somebody put
// there without a lease is never touched.
func TestHeraldsYield(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	nodes := []*heralding{startHerald(t, etcd), startHerald(t, etcd)}
	stands(t, etcd, eastCanary)
	stands(t, etcd, eastCanary2)

	client := etcd.Client()
	lease, err := client.Grant(t.Context(), 600)
	if err != nil {
		t.Fatal(err)
	}
	theirs := map[string]string{
		eastConfig: `{"id":1,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255,"serviceExportsEnabled":false}}`,
		eastCanary: "theirs", eastCanary2: "theirs", identity.HeartbeatKey: "now",
	}
	for key, value := range theirs {
		if _, err := client.Put(t.Context(), key, value, clientv3.WithLease(lease.ID)); err != nil {
			t.Fatal(err)
		}
	}
	// It takes a canary back, to write it when it has exported everything: that is for it alone to say.
	etcd.Delete(t, eastCanary)
	for _, x := range nodes {
		testutil.Eventually(t, patience, func() error {
			x.mu.Lock()
			defer x.mu.Unlock()
			if x.declared["cilium/state/ip/v1"] || !x.heartbeat {
				return fmt.Errorf("declared %v, heartbeat %v", x.declared, x.heartbeat)
			}
			return nil
		})
		if keys, _ := x.missing(time.Now().Add(time.Hour)); len(keys) > 0 {
			t.Errorf("beside an operator a node would write %v", keys)
		}
	}
	if value, ok := etcd.Get(t, eastCanary); ok {
		t.Errorf("a node declares %q complete beside an operator", value)
	}
	for _, key := range []string{eastConfig, eastCanary2} {
		if value, _ := etcd.Get(t, key); value != theirs[key] {
			t.Errorf("%s is %q, was %q", key, value, theirs[key])
		}
	}
	if _, err := client.Revoke(t.Context(), lease.ID); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{eastConfig, eastCanary, eastCanary2} {
		if value, _ := stands(t, etcd, key); value == theirs[key] {
			t.Errorf("%s is %q", key, value)
		}
	}
}

// A cluster that somebody describes by hand, without canaries, is left as it is.
func TestHeraldLeavesWhatIsThere(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	const byHand = `{"id":1,"capabilities":{"maxConnectedClusters":255}}`
	etcd.Put(t, eastConfig, byHand)
	startHerald(t, etcd)
	startHerald(t, etcd, func(c *HeraldConfig) { c.ClusterName = "south" })
	stands(t, etcd, "cilium/synced/south/cilium/state/ip/v1")
	if value, _ := etcd.Get(t, eastConfig); value != byHand {
		t.Errorf("the cluster is described as %s", value)
	}
	if value, ok := etcd.Get(t, eastCanary); ok {
		t.Errorf("a canary, which nobody looks for, says %q", value)
	}
}

// A prefix is declared complete after all that this node has to say, also in an etcd that was emptied.
func TestHeraldSpeaksLast(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	published := make(chan struct{})
	x := startHerald(t, etcd, func(c *HeraldConfig) { c.Published = published })
	stands(t, etcd, eastConfig)
	if value, ok := etcd.Get(t, eastCanary); ok {
		t.Errorf("the canary says %q before the node has spoken", value)
	}
	const keys = 300
	for i := range keys {
		x.writer.Set(fmt.Sprintf("%s10.1.1.%d", announced, i), []byte("x"))
	}
	close(published)
	check := func() {
		t.Helper()
		stands(t, etcd, eastCanary)
		resp, err := etcd.Client().Get(t.Context(), eastCanary)
		if err != nil {
			t.Fatal(err)
		}
		then, err := etcd.Client().Get(t.Context(), announced, clientv3.WithPrefix(), clientv3.WithCountOnly(), clientv3.WithRev(resp.Kvs[0].CreateRevision))
		if err != nil || then.Count != keys {
			t.Errorf("the canary came when %d keys of %d were there, %v", then.Count, keys, err)
		}
	}
	check()
	etcd.Replace(t)
	check()
}
