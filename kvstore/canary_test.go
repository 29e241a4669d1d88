// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

// canaryKey sorts before the keys that it speaks of.
const canaryKey = "p/canary"

// replayCanary goes through the present etcd's history of p/, and has check
// judge what was there whenever the canary was put. It returns how often that
// was.
func replayCanary(t *testing.T, e *testutil.Etcd, check func(canary string, state map[string]string)) (puts int) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	// The last event to see is of a key of the test's own, as one of a
	// deletion leaves no key to tell its revision by.
	e.Put(t, "p/end", "")
	state := make(map[string]string)
	var at int64
	seen := false // the canary, at the revision at
	judge := func() {
		if seen {
			puts++
			check(state["canary"], maps.Clone(state))
		}
		seen = false
	}
	for resp := range e.Client().Watch(ctx, "p/", clientv3.WithPrefix(), clientv3.WithRev(1)) {
		for _, ev := range resp.Events {
			if ev.Kv.ModRevision != at {
				judge()
				at = ev.Kv.ModRevision
			}
			key := string(ev.Kv.Key[2:])
			switch {
			case key == "end" && ev.Type == mvccpb.PUT:
				e.Delete(t, "p/end")
				return puts
			case ev.Type == mvccpb.DELETE:
				delete(state, key)
			default:
				state[key] = string(ev.Kv.Value)
				seen = seen || key == "canary"
			}
		}
	}
	t.Fatal("the history ended early")
	return 0
}

func TestCanaryIsLast(t *testing.T) {
	e := testutil.StartEtcd(t)
	w := NewWriter(mustDial(t, e, unlimited), WriterConfig{})
	said := 0
	canary := func() []byte { said++; return fmt.Append(nil, said) }
	for i := range 250 {
		w.Set(fmt.Sprintf("p/k%03d", i), []byte("1"))
	}
	w.Canary(canaryKey, canary)
	w.Set("p/k000", []byte("2")) // said again: it counts as said before
	w.Set("p/later", nil)
	start(t, w.Run)
	awaitReady(t, w)
	if puts := replayCanary(t, e, func(_ string, state map[string]string) {
		for i := range 250 {
			if key := fmt.Sprintf("k%03d", i); state[key] == "" {
				t.Errorf("the canary is before %s", key)
			}
		}
	}); puts != 1 {
		t.Errorf("the canary was put %d times", puts)
	}
	if lease, _ := leaseOf(t, e, canaryKey); lease == 0 {
		t.Error("the canary has no lease")
	}
	w.Canary(canaryKey, canary)
	if err := w.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if value, _ := e.Get(t, canaryKey); value != "2" {
		t.Errorf("the canary is %q when said again", value)
	}
	w.Delete(canaryKey)
	if err := w.Flush(t.Context()); err != nil || exists(t, e, canaryKey) {
		t.Errorf("the canary was not deleted: %v", err)
	}
}

// A key that is refused holds the canary back, and nothing else, until it is
// given up.
func TestCanaryWaitsForARefusedKey(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Put(t, "p/exists", "theirs")
	w, _ := mustWrite(t, mustDial(t, e, unlimited), WriterConfig{VerifyInterval: 10 * time.Millisecond})
	w.Create("p/exists", []byte("ours")) // is there all the same
	w.Set("p/large", make([]byte, 3<<20))
	w.Canary(canaryKey, func() []byte { return nil })
	w.Set("p/a", nil)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := w.Flush(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("flush: %v", err)
	}
	holds(t, e, map[string]string{"exists": "theirs", "a": ""})
	w.Set("p/large", nil)
	holds(t, e, map[string]string{"exists": "theirs", "a": "", "large": "", "canary": ""})
}

// Random keys are set and deleted, and after them a canary, while the server
// restarts and connections break. Whenever a canary came to be, all that was
// said before was there.
func TestCanaryIsNeverEarly(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	e := testutil.StartEtcd(t)
	g := newGate(t, e)
	c := mustDial(t, e, unlimited, g.use)
	impatient(c)
	w, _ := mustWrite(t, c, WriterConfig{KeysPerLease: 30, VerifyInterval: 100 * time.Millisecond})
	want := make(map[string]int)    // key to the last round that set it
	said := []map[string]int{}      // by round
	deleted := make(map[string]int) // key to the round that deleted it; it is never set again
	next := 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
		round := len(said)
		for range random.IntN(300) {
			key := fmt.Sprintf("k%d", next-random.IntN(min(next+1, 100)))
			if _, gone := deleted[key]; gone {
				continue
			}
			if random.IntN(4) == 0 && want[key] > 0 {
				w.Delete("p/" + key)
				delete(want, key)
				deleted[key] = round
				continue
			}
			next++
			w.Set("p/"+key, strconv.AppendInt(nil, int64(round), 10))
			want[key] = round
		}
		w.Canary(canaryKey, func() []byte { return strconv.AppendInt(nil, int64(round), 10) })
		said = append(said, maps.Clone(want))
		switch random.IntN(20) {
		case 0, 1:
			e.Restart(t)
		case 2, 3:
			g.shut()
			g.open()
		default:
			if random.IntN(2) == 0 {
				settled(t, w)
			}
		}
	}
	settled(t, w)
	puts := replayCanary(t, e, func(canary string, state map[string]string) {
		round, err := strconv.Atoi(canary)
		if err != nil {
			t.Fatal(err)
		}
		checkRound(t, round, said[round], deleted, state)
	})
	if last, _ := e.Get(t, canaryKey); last != strconv.Itoa(len(said)-1) {
		t.Errorf("the canary is %q after %d rounds", last, len(said))
	}
	t.Logf("%d canaries in %d rounds of %d keys", puts, len(said), next)
}

// checkRound compares what was there when the canary of a round came to be with
// what was said before it: the round that set each key, and the one that
// deleted it. What was said later may be there already.
func checkRound(t *testing.T, round int, said, deleted map[string]int, state map[string]string) {
	t.Helper()
	for key, set := range said {
		if when, gone := deleted[key]; gone && when > round && state[key] == "" {
			continue
		}
		if got, err := strconv.Atoi(state[key]); err != nil || got < set {
			t.Errorf("canary %d is there, and %s=%q, which was set in round %d", round, key, state[key], set)
		}
	}
	for key, when := range deleted {
		if when <= round && state[key] != "" {
			t.Errorf("canary %d is there, and so is %s, which was deleted in round %d", round, key, when)
		}
	}
}

// An etcd that was emptied, whether it looks like another one or the same, gets
// its canary last again, however the keys are spread over leases or have none.
//
// lesson: X2, E3
func TestCanaryIsLastAgain(t *testing.T) {
	for name, empty := range map[string]func(*testutil.Etcd, testing.TB){
		"replaced": (*testutil.Etcd).Replace, "wiped": (*testutil.Etcd).Wipe,
	} {
		t.Run(name, func(t *testing.T) {
			e := testutil.StartEtcd(t)
			c := mustDial(t, e, unlimited)
			impatient(c)
			w, _ := mustWrite(t, c, WriterConfig{TTL: 2 * time.Second, KeysPerLease: 20})
			w.Set("p/first", nil)
			settled(t, w)
			want := map[string]string{"first": ""}
			for i := range 150 {
				key := fmt.Sprintf("k%d", i)
				want[key] = "v"
				if i%3 == 0 {
					w.Create("p/"+key, []byte("v"))
				} else {
					w.Set("p/"+key, []byte("v"))
				}
			}
			w.Delete("p/first") // makes room in the first lease, for the canary
			delete(want, "first")
			settled(t, w)
			round := 0
			w.Canary(canaryKey, func() []byte { round++; return fmt.Append(nil, round) })
			settled(t, w)
			empty(e, t)
			testutil.Eventually(t, testTimeout, func() error {
				if now := stored(t, e)["canary"]; now == "" || now == "1" {
					return fmt.Errorf("the canary is %q", now)
				}
				return nil
			})
			if puts := replayCanary(t, e, func(canary string, state map[string]string) {
				delete(state, "canary")
				if !maps.Equal(state, want) {
					t.Errorf("canary %s is there with %d keys of %d", canary, len(state), len(want))
				}
			}); puts != 1 {
				t.Errorf("the canary was put %d times", puts)
			}
		})
	}
}

// mechanism: C13
func TestWriterRevokesOnClose(t *testing.T) {
	e := testutil.StartEtcd(t)
	w, run := mustWrite(t, mustDial(t, e, unlimited), WriterConfig{KeysPerLease: 2, RevokeOnClose: true})
	for i := range 5 {
		w.Set(fmt.Sprintf("p/%d", i), nil)
	}
	w.Create("p/made", nil)
	settled(t, w)
	if err := run.stop(); err != nil {
		t.Error(err)
	}
	if got := stored(t, e); len(got) != 1 {
		t.Errorf("etcd holds %v after the end", got)
	}
	w, run = mustWrite(t, mustDial(t, e, unlimited), WriterConfig{RevokeOnClose: true})
	w.Set("p/a", nil)
	settled(t, w)
	e.Stop(t)
	if err := run.stop(); err == nil {
		t.Error("leases were revoked in an etcd that is down")
	}
}
