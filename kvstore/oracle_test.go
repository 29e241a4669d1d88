// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

// oracleTime is how long each half of the oracle test runs.
const oracleTime = 3 * time.Second

// TestWatcherOracle does random things to an etcd, to its history and to the
// way there, and compares what the watcher makes of it with what etcd holds
// whenever there is rest. The recorder finds deletions of what was not there
// and revisions that do not grow.
//
// lesson: X1, X6, E1, E2, E13
func TestWatcherOracle(t *testing.T) {
	both(t, func(t *testing.T, edit func(*Config)) {
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		random := rand.New(rand.NewPCG(seed, 0))
		e := testutil.StartEtcd(t)
		g := newGate(t, e)
		r := newRecorder()
		w := NewWatcher("p/", r.deliver)
		c := mustDial(t, e, edit, g.use)
		impatient(c)
		run := start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
		rests := 0
		for end := time.Now().Add(oracleTime); time.Now().Before(end); rests++ {
			disturb(t, e, g, random)
			r.is(t, stored(t, e))
		}
		if err := run.stop(); err != nil {
			t.Error(err)
		}
		s := w.Status()
		t.Logf("compared %d times after %d lists and %d resumptions", rests, s.Lists, s.Resumes)
	})
}

// disturb does some random things.
func disturb(t *testing.T, e *testutil.Etcd, g *gate, random *rand.Rand) {
	t.Helper()
	shut := random.IntN(6) == 0
	if shut {
		g.shut()
	}
	for range random.IntN(100) {
		key := fmt.Sprintf("p/%02d", random.IntN(60))
		switch n := random.IntN(200); {
		case n < 120:
			e.Put(t, key, fmt.Sprint(random.Int()))
		case n < 180:
			e.Delete(t, key)
		case n < 185:
			e.DeletePrefix(t, fmt.Sprintf("p/%d", random.IntN(6)))
		case n < 190:
			e.Compact(t)
		case n < 192:
			e.Restart(t)
		case n < 194 && !shut:
			g.shut()
			g.open()
		default:
			putTogether(t, e, random)
		}
	}
	if shut {
		g.open()
	}
}

// putTogether writes several keys at one revision.
func putTogether(t *testing.T, e *testutil.Etcd, random *rand.Rand) {
	t.Helper()
	var ops []clientv3.Op
	for i := range 10 {
		ops = append(ops, clientv3.OpPut(fmt.Sprintf("p/%d%d", random.IntN(6), i), "together"))
	}
	if _, err := e.Client().Txn(t.Context()).Then(ops...).Commit(); err != nil {
		t.Fatal(err)
	}
}

// stored returns what etcd holds below p/.
func stored(t *testing.T, e *testutil.Etcd) map[string]string {
	t.Helper()
	resp, err := e.Client().Get(t.Context(), "p/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	keys := make(map[string]string)
	for _, kv := range resp.Kvs {
		keys[string(kv.Key[2:])] = string(kv.Value)
	}
	return keys
}
