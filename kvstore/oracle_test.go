// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

// TestWatcherOracle does random things to an etcd, to its history and to the
// way there, has the consumer be slow at times, and compares what the watcher
// makes of it with what etcd holds whenever there is rest. No key may be
// reported deleted that was not, and the revisions of each only grow.
//
// lesson: X1, X6, E1, E2, E13
func TestWatcherOracle(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, edit func(*Config)) {
		t.Parallel()
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		o := newOracle(t, seed)
		w := NewWatcher("p/", o.deliver)
		c := dialThrough(t, o.proxy, edit, unlimited)
		impatient(c)
		run := start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
		rests, broken := 0, 0
		for end := time.Now().Add(figure(3*time.Second, time.Minute)); time.Now().Before(end); rests++ {
			broke := o.disturb(t)
			eventually(t, time.Minute, func() error { return o.recorder.equals(stored(t, o.etcd)) })
			o.check(t)
			if broke {
				broken++
				time.Sleep(time.Duration(o.random.Int64N(int64(figure(200*time.Millisecond, 2*time.Second)))))
			}
		}
		if err := run.stop(); err != nil {
			t.Error(err)
		}
		s := w.Status()
		t.Logf("compared %d times, after %d outages, %d lists and %d resumptions", rests, broken, s.Lists, s.Resumes)
	})
}

// oracle is an etcd, the way there, and who remembers what was deleted.
type oracle struct {
	etcd     *testutil.Etcd
	proxy    *testutil.Proxy
	random   *rand.Rand
	recorder *recorder
	deleted  map[string]int64 // revision of the last deletion of each key

	mu   sync.Mutex
	told map[string]int64 // by the watcher, since the last check: revision of the last deletion
	slow *rand.Rand
}

func newOracle(t *testing.T, seed uint64) *oracle {
	e := testutil.StartEtcd(t)
	return &oracle{
		etcd: e, proxy: testutil.StartProxy(t, e.Addr()), recorder: newRecorder(),
		random: rand.New(rand.NewPCG(seed, 0)), slow: rand.New(rand.NewPCG(seed, 1)),
		deleted: make(map[string]int64), told: make(map[string]int64),
	}
}

// deliver consumes events, sometimes slowly.
func (o *oracle) deliver(events []Event) {
	o.mu.Lock()
	for _, e := range events {
		if e.Kind == Deleted {
			o.told[string(e.Key)] = e.Revision
		}
	}
	pause := time.Duration(0)
	if o.slow.IntN(20) == 0 {
		pause = time.Duration(o.slow.Int64N(int64(200 * time.Millisecond)))
	}
	o.mu.Unlock()
	time.Sleep(pause)
	o.recorder.deliver(events)
}

// check fails the test if something happened that never must. A deletion has
// its own revision, or that of the write before it if it was not seen itself.
func (o *oracle) check(t *testing.T) {
	t.Helper()
	o.recorder.check(t)
	o.recorder.take()
	o.mu.Lock()
	defer o.mu.Unlock()
	for key, revision := range o.told {
		if last := o.deleted[key]; last < revision {
			t.Errorf("%s is told to be deleted at %d, and was so at %d (0: never)", key, revision, last)
		}
	}
	clear(o.told)
}

// disturb does some random things, and reports whether an outage was one of
// them.
func (o *oracle) disturb(t *testing.T) bool {
	t.Helper()
	fault := o.random.IntN(24)
	switch fault {
	case 0, 1:
		o.proxy.Refuse()
	case 2:
		o.proxy.Reset()
	case 3:
		o.proxy.Pause()
	case 4:
		o.proxy.BlackHole()
	}
	for range o.random.IntN(100) {
		o.change(t)
	}
	o.proxy.Forward()
	switch fault {
	case 5:
		o.proxy.Cut()
	case 6:
		o.etcd.Restart(t)
	}
	return fault <= 6
}

// change changes something in etcd.
func (o *oracle) change(t *testing.T) {
	t.Helper()
	key := fmt.Sprintf("%02d", o.random.IntN(60))
	switch n := o.random.IntN(200); {
	case n < 120:
		o.etcd.Put(t, "p/"+key, fmt.Sprint(o.random.Int()))
	case n < 180:
		o.delete(t, key)
	case n < 185:
		o.delete(t, key[:1], clientv3.WithPrefix())
	case n < 190:
		o.etcd.Compact(t)
	default:
		putTogether(t, o.etcd, o.random)
	}
}

func (o *oracle) delete(t *testing.T, key string, how ...clientv3.OpOption) {
	t.Helper()
	resp, err := o.etcd.Client().Delete(t.Context(), "p/"+key, append(how, clientv3.WithPrevKV())...)
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range resp.PrevKvs {
		o.deleted[string(kv.Key[2:])] = resp.Header.Revision
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
