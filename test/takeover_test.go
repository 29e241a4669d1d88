// SPDX-License-Identifier: Apache-2.0

package test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/endpoint"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/operator"
)

const (
	eastConfig = "cilium/cluster-config/east"
	eastCanary = "cilium/synced/east/cilium/state/ip/v1"

	saidByNodes    = `{"id":1,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255}}`
	saidByOperator = `{"id":1,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":511}}`
)

// describing are the keys of which there is one for a cluster.
var describing = []string{eastConfig, eastCanary}

func describedFor(clusters uint32) identity.ClusterConfig {
	return identity.ClusterConfig{ID: 1, Capabilities: identity.Capabilities{SyncedCanaries: true, MaxConnectedClusters: clusters}}
}

// startNode runs what of a node's agent describes the cluster, until the test ends.
func startNode(t *testing.T, etcd *testutil.Etcd) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	client, err := kvstore.Dial(kvstore.Config{Endpoints: []string{etcd.Endpoint()}}, log)
	if err != nil {
		t.Fatal(err)
	}
	writer := kvstore.NewWriter(client, kvstore.WriterConfig{Log: log})
	herald, err := endpoint.NewHerald(endpoint.HeraldConfig{
		Client: client, ClusterName: "east", Config: describedFor(255), Prefixes: []string{"cilium/state/ip/v1"},
		Settle: time.Millisecond, Refill: time.Millisecond, Published: writer.Ready(), Flush: writer.Flush, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running errgroup.Group
	running.Go(func() error { return writer.Run(ctx) })
	running.Go(func() error { return herald.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(running.Wait(), client.Close()); err != nil {
			t.Error(err)
		}
	})
}

// startOperator runs a replica of the operator until stop, and waits until the description of the cluster is its own.
func startOperator(t *testing.T, etcd *testutil.Etcd, name string, ttl time.Duration) (stop func()) {
	t.Helper()
	config, err := operator.NewClusterConfig(operator.ClusterConfigConfig{
		ClusterName: "east", Config: describedFor(511), Canaries: []string{"cilium/state/ip/v1"}, CanaryDelay: time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
	o, err := operator.New(operator.Config{
		ClusterName: "east", ClusterID: 1, Name: name, Etcd: kvstore.Config{Endpoints: []string{etcd.Endpoint()}}, LeaseTTL: ttl,
		Election: operator.Election{By: operator.ElectEtcd, LeaseDuration: 15 * time.Second},
		Duties:   []operator.Duty{operator.NewHeartbeat(3 * time.Second), config}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	before := leases(t, etcd)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- o.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(stop)
	testutil.Eventually(t, patience, func() error {
		for i, lease := range leases(t, etcd) {
			if lease == 0 || lease == before[i] {
				return fmt.Errorf("%s has the lease %x, as before", describing[i], lease)
			}
		}
		return beats(t, etcd, 3)
	})
	return stop
}

// beats reports an error unless the heartbeat has been written so often.
func beats(t *testing.T, etcd *testutil.Etcd, often int64) error {
	resp, err := etcd.Client().Get(t.Context(), identity.HeartbeatKey)
	if err == nil && (len(resp.Kvs) == 0 || resp.Kvs[0].Version < often) {
		err = fmt.Errorf("the heartbeat is %v", resp.Kvs)
	}
	return err
}

// leases are those of the keys that describe the cluster; 0 for one that is not there.
func leases(t *testing.T, etcd *testutil.Etcd) []clientv3.LeaseID {
	t.Helper()
	all := make([]clientv3.LeaseID, len(describing))
	for i, key := range describing {
		resp, err := etcd.Client().Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		for _, kv := range resp.Kvs {
			all[i] = clientv3.LeaseID(kv.Lease)
		}
	}
	return all
}

// awaitDescription waits until the cluster is described completely, and its config is this.
func awaitDescription(t *testing.T, etcd *testutil.Etcd, want string) {
	t.Helper()
	testutil.Eventually(t, patience, func() error {
		config, _ := etcd.Get(t, eastConfig)
		if _, declared := etcd.Get(t, eastCanary); config != want || !declared {
			return fmt.Errorf("the config is %q, the canary is there: %t", config, declared)
		}
		return nil
	})
}

// Nodes describe a cluster that has no operator. One that comes takes that over, and so does the next one: at no moment is the
// description missing, and no node writes any of it. When no operator comes any more and the leases of the last one have
// ended, the nodes write it again, once.
//
// mechanism: Q7
func TestOperatorTakesOverFromNodes(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	for range 3 {
		startNode(t, etcd)
	}
	awaitDescription(t, etcd, saidByNodes)
	alone := revision(t, etcd)

	ttl := time.Minute
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		ttl = 10 * time.Second
	}
	var operators []clientv3.LeaseID
	for _, name := range []string{"first", "second"} {
		stop := startOperator(t, etcd, name, ttl)
		awaitDescription(t, etcd, saidByOperator)
		operators = append(operators, leases(t, etcd)...)
		stop()
	}
	operated := revision(t, etcd)
	if os.Getenv("WEFT_TEST_FAULTS") == "" { // what etcd does when the time has come
		for _, lease := range append(leases(t, etcd), leaseOf(t, etcd, identity.HeartbeatKey)) {
			_, _ = etcd.Client().Revoke(t.Context(), lease) // which two of them may have in common
		}
	}
	awaitDescription(t, etcd, saidByNodes)

	history := eventsOf(t, etcd, revision(t, etcd))
	for _, key := range describing {
		var before, during, after []string
		for _, e := range history[key] {
			switch {
			case e.Kv.ModRevision <= alone:
				before = append(before, e.Type.String())
			case e.Kv.ModRevision > operated:
				after = append(after, e.Type.String())
			default:
				during = append(during, e.Type.String())
				if e.Type != clientv3.EventTypePut || !slices.Contains(operators, clientv3.LeaseID(e.Kv.Lease)) {
					t.Errorf("%s while there is an operator: %s %q, under lease %x", key, e.Type, e.Kv.Value, e.Kv.Lease)
				}
			}
		}
		if !slices.Equal(before, []string{"PUT"}) || len(during) < 2 || !slices.Equal(after, []string{"DELETE", "PUT"}) {
			t.Errorf("%s: before there was an operator %v, while there was %v, and after %v", key, before, during, after)
		}
	}
}

// eventsOf reads etcd's history up to a revision, by key.
func eventsOf(t *testing.T, etcd *testutil.Etcd, upTo int64) map[string][]*clientv3.Event {
	t.Helper()
	etcd.Put(t, "end", "")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	history := make(map[string][]*clientv3.Event)
	for resp := range etcd.Client().Watch(ctx, "", clientv3.WithPrefix(), clientv3.WithRev(1)) {
		for _, e := range resp.Events {
			if e.Kv.ModRevision > upTo {
				return history
			}
			history[string(e.Kv.Key)] = append(history[string(e.Kv.Key)], e)
		}
	}
	t.Fatalf("the history of etcd: %v", ctx.Err())
	return nil
}
