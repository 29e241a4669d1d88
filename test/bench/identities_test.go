// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/operator"
)

// Identities of an etcd to be collected. A range holds 65,536: the others of the 100,000 are another cluster's.
const (
	collectedIdentities = 60_000
	usedIdentities      = 5_536
	foreignIdentities   = 34_464
)

func identityLabels(n int) string {
	return fmt.Sprintf("k8s:app=app-%d;k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop;"+
		"k8s:io.cilium.k8s.policy.cluster=east;k8s:io.cilium.k8s.policy.serviceaccount=default;k8s:io.kubernetes.pod.namespace=shop;", n)
}

// BenchmarkIdentityGC measures the two rounds over 100,000 identities after which those that nobody uses are gone, against the
// bare deletion of as many keys by the plain client.
//
//	s            both rounds: two lists of all, and the deletion of 60,000
//	trips/id     transactions for each identity that is deleted
//	x-delete     time of the bare deletion, 50 keys to a transaction / time of the rounds
func BenchmarkIdentityGC(b *testing.B) {
	etcd := startServer(b)
	plain := dial(b, etcd.endpoint)
	var took, bare, trips float64
	rounds := 0
	for b.Loop() {
		rounds++
		fillIdentities(b, plain)
		seconds, transactions := collectIdentities(b, etcd.endpoint, plain)
		took += seconds
		trips += float64(transactions)
		bare += deleteBare(b, plain)
	}
	measured(b, "s", took/float64(rounds), goal{what: "operator: GC of 60k among 100k identities", unit: "s", atMost: 60})
	measured(b, "trips/id", trips/float64(rounds*collectedIdentities), goal{what: "operator: round trips for each identity deleted", atMost: 2})
	measured(b, "x-delete", bare/took, goal{what: "operator: bare deletion / GC of as many identities"})
	b.ReportMetric(0, "ns/op")
}

// putEach puts n keys in transactions of 100.
func putEach(b *testing.B, client *clientv3.Client, n int, kv func(i int) (key, value string)) {
	b.Helper()
	var ops []clientv3.Op
	for i := range n {
		key, value := kv(i)
		if ops = append(ops, clientv3.OpPut(key, value)); len(ops) < 100 && i < n-1 {
			continue
		}
		if _, err := client.Txn(b.Context()).Then(ops...).Commit(); err != nil {
			b.Fatal(err)
		}
		ops = nil
	}
}

func fillIdentities(b *testing.B, client *clientv3.Client) {
	b.Helper()
	progress(b, "filling etcd: %d identities", collectedIdentities+usedIdentities+foreignIdentities)
	putEach(b, client, collectedIdentities+usedIdentities+foreignIdentities, func(i int) (string, string) {
		return identity.MasterKey(identity.ID(65536 + i)), identityLabels(i)
	})
	putEach(b, client, usedIdentities, func(i int) (string, string) {
		return identity.SlavePrefix(identityLabels(i)) + "172.18.1.1", strconv.Itoa(65536 + i)
	})
}

// collectIdentities has an operator do both rounds, and returns their time in seconds and the transactions that wrote.
func collectIdentities(b *testing.B, endpoint string, client *clientv3.Client) (seconds float64, transactions int64) {
	b.Helper()
	layout, err := identity.NewLayout(255)
	if err != nil {
		b.Fatal(err)
	}
	gc := operator.NewIdentityGC(operator.IdentityGCConfig{ClusterName: "east", ClusterID: 1, Layout: layout, Interval: time.Millisecond})
	o, err := operator.New(operator.Config{
		ClusterName: "east", ClusterID: 1, Name: "bench", LeaseTTL: time.Minute, Election: operator.Election{By: operator.ElectNone},
		Etcd:   kvstore.Config{Endpoints: []string{endpoint}, QPS: unlimited},
		Duties: []operator.Duty{gc}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		b.Fatal(err)
	}
	before := head(b, client)
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error, 1)
	begun := time.Now()
	go func() { done <- o.Run(ctx) }()
	for gc.Status().Deleted < collectedIdentities {
		if s := gc.Status(); s.Errors > 0 {
			b.Fatal(s.LastError)
		}
		time.Sleep(time.Millisecond)
	}
	seconds = time.Since(begun).Seconds()
	transactions = head(b, client) - before
	cancel()
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	return seconds, transactions
}

func head(b *testing.B, client *clientv3.Client) int64 {
	b.Helper()
	resp, err := client.Get(b.Context(), "a", clientv3.WithCountOnly())
	if err != nil {
		b.Fatal(err)
	}
	return resp.Header.Revision
}

// deleteBare deletes as many keys as were collected, and as large, and returns the time in seconds.
func deleteBare(b *testing.B, client *clientv3.Client) float64 {
	b.Helper()
	key := func(i int) string { return "bare/" + strconv.Itoa(i) }
	putEach(b, client, collectedIdentities, func(i int) (string, string) { return key(i), identityLabels(i) })
	begun := time.Now()
	for i := 0; i < collectedIdentities; i += 50 {
		var ops []clientv3.Op
		for j := i; j < min(i+50, collectedIdentities); j++ {
			ops = append(ops, clientv3.OpDelete(key(j)))
		}
		if _, err := client.Txn(b.Context()).Then(ops...).Commit(); err != nil {
			b.Fatal(err)
		}
	}
	return time.Since(begun).Seconds()
}
