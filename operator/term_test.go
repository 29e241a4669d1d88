// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
)

// mustBegin begins a term in an etcd that has no election: whoever does it last leads.
func mustBegin(t testing.TB, etcd *testutil.Etcd) *Term {
	t.Helper()
	client, err := kvstore.Dial(etcdConfig(etcd.Endpoint()), silent)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	fence, err := client.TakeFence(t.Context(), FenceKey, nil, func(context.Context) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	return &Term{client: client, fence: fence, ttl: time.Minute, since: time.Now(), log: silent}
}

// mustRound does one round of a duty.
func mustRound(t testing.TB, l *Loop, term *Term) Outcome {
	t.Helper()
	did, err := l.round(t.Context(), term)
	if err != nil {
		t.Fatalf("%s: %v", l, err)
	}
	return did
}

// putLeased puts a key under a lease of its own, which lasts for ttl unless it is renewed.
func putLeased(t testing.TB, term *Term, key, value string, ttl time.Duration) kvstore.LeaseID {
	t.Helper()
	lease, _, err := term.client.Grant(t.Context(), ttl)
	if err == nil {
		err = term.Txn(t.Context(), kvstore.Op{Kind: kvstore.OpPut, Key: key, Value: []byte(value), Lease: lease})
	}
	if err != nil {
		t.Fatal(err)
	}
	return lease
}
