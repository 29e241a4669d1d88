// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/weftmesh/weft/internal/testutil"
)

// lockPath has a label string in it, as those of the identity allocator do.
const lockPath = "cilium/state/identities/v1/locks/k8s:app=web;"

func mustLock(t *testing.T, c *Client, path string) *Lock {
	t.Helper()
	l, err := c.Lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.lease.Orphan)
	return l
}

func mustUnlock(t *testing.T, l *Lock) {
	t.Helper()
	if err := l.Unlock(t.Context()); err != nil {
		t.Error(err)
	}
}

func mustSession(t *testing.T, e *testutil.Etcd) *concurrency.Session {
	t.Helper()
	s, err := concurrency.NewSession(e.Client(), concurrency.WithTTL(5))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Orphan)
	return s
}

// waits waits until n keys are below a path: the holder's and those behind it.
func waits(t *testing.T, e *testutil.Etcd, path string, n int) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		resp, err := e.Client().Get(t.Context(), path+"/", clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err == nil && resp.Count != int64(n) {
			err = fmt.Errorf("%d keys are below %s, want %d", resp.Count, path, n)
		}
		return err
	})
}

func TestLockWritesAndUnlocks(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	l := mustLock(t, c, lockPath)
	if value, ok := e.Get(t, fmt.Sprintf("%s/%x", lockPath, int64(l.lease.Lease()))); !ok || value != "" {
		t.Errorf("the lock key has value %q, exists: %v", value, ok)
	}
	lease, revision := leaseOf(t, e, l.Key())
	if info, err := c.TimeToLive(t.Context(), LeaseID(lease)); err != nil || info.Granted != 25*time.Second || revision != l.Revision() {
		t.Errorf("lease %+v, %v; revision %d, want %d", info, err, l.Revision(), revision)
	}
	ctx := t.Context()
	err := errors.Join(l.Put(ctx, "p/a", []byte("1")), l.Create(ctx, "p/b", []byte("1")),
		l.Txn(ctx, Op{Kind: OpCreate, Key: "p/c", Value: []byte("1")}, Op{Kind: OpPut, Key: "p/d", Value: []byte("1"), Lease: LeaseID(lease)}),
		l.Delete(ctx, "p/a"), l.Delete(ctx, "p/a"))
	if err != nil {
		t.Error(err)
	}
	holds(t, e, map[string]string{"b": "1", "c": "1", "d": "1"})
	for _, err := range []error{
		l.Create(ctx, "p/b", []byte("1")),
		l.Txn(ctx, Op{Kind: OpPut, Key: "p/e"}, Op{Kind: OpCreate, Key: "p/b"}),
	} {
		if !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), "p/b") {
			t.Errorf("%v, want %v of p/b", err, ErrExists)
		}
	}
	mustUnlock(t, l)
	mustUnlock(t, l)
	ends(t, "the lock", l.Lost())
	holds(t, e, map[string]string{"b": "1", "c": "1", "d": "1"}) // under the lease that the locks have in common
	if l.Held() || exists(t, e, l.Key()) {
		t.Error("the lock is held after it was given back")
	}
	if err := l.Put(ctx, "p/a", nil); !errors.Is(err, ErrLockLost) {
		t.Errorf("put: %v", err)
	}
}

// etcd's own mutex and this lock exclude each other, in both directions.
func TestLockExcludesEtcdsMutex(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	theirs := concurrency.NewMutex(mustSession(t, e), lockPath)
	for range 3 {
		if err := theirs.Lock(t.Context()); err != nil {
			t.Fatal(err)
		}
		var ours *Lock
		locking := start(t, func(ctx context.Context) (err error) { ours, err = c.Lock(ctx, lockPath); return err })
		waits(t, e, lockPath, 2)
		if held, err := e.Client().Txn(t.Context()).If(theirs.IsOwner()).Commit(); err != nil || !held.Succeeded {
			t.Errorf("their lock is gone: %v", err)
		}
		if err := theirs.Unlock(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := locking.wait(t); err != nil {
			t.Fatal(err)
		}
		if err := theirs.TryLock(t.Context()); !errors.Is(err, concurrency.ErrLocked) {
			t.Errorf("they lock what we hold: %v", err)
		}
		relocking := start(t, theirs.Lock)
		waits(t, e, lockPath, 2)
		if err := ours.Put(t.Context(), "p/a", nil); err != nil {
			t.Error(err)
		}
		mustUnlock(t, ours)
		if err := relocking.wait(t); err != nil {
			t.Fatal(err)
		}
		if err := theirs.Unlock(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// A lock that cannot be had says who has it, and leaves nothing behind.
func TestLockGivesUp(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited, func(cfg *Config) { cfg.LockTimeout = 100 * time.Millisecond })
	held := mustLock(t, mustDial(t, e, unlimited), lockPath)
	_, err := c.Lock(t.Context(), lockPath)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), held.Key()) {
		t.Errorf("lock: %v", err)
	}
	waits(t, e, lockPath, 1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Lock(ctx, lockPath); !errors.Is(err, context.Canceled) {
		t.Errorf("lock: %v", err)
	}
	mustUnlock(t, held)
	mustUnlock(t, mustLock(t, c, lockPath))
	mustLock(t, c, lockPath)
	if _, err := c.Lock(t.Context(), lockPath); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("lock in the same process: %v", err)
	}
	waits(t, e, lockPath, 1)
}

// Those of one process wait in order, and one of them only at etcd.
func TestLockQueuesInProcess(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	held := mustLock(t, c, lockPath)
	order := make(chan int)
	for i := range 5 {
		start(t, func(ctx context.Context) error {
			l, err := c.Lock(ctx, lockPath)
			if err != nil {
				return err
			}
			order <- i
			return l.Unlock(ctx)
		})
		testutil.Eventually(t, testTimeout, func() error {
			c.turns.mu.Lock()
			defer c.turns.mu.Unlock()
			if n := len(c.turns.lines[lockPath]); n != i+2 {
				return fmt.Errorf("%d are in line", n)
			}
			return nil
		})
	}
	waits(t, e, lockPath, 1)
	mustLock(t, c, "another/path")
	mustUnlock(t, held)
	for i := range 5 {
		if got := <-order; got != i {
			t.Errorf("number %d locked as number %d", got, i)
		}
	}
}

// A holder that does not know yet that its lease or its key is gone writes
// nothing: etcd itself compares.
func TestLockLostUnnoticed(t *testing.T) {
	for name, take := range map[string]func(*testing.T, *testutil.Etcd, *Lock){
		"lease revoked": func(t *testing.T, e *testutil.Etcd, l *Lock) { revoke(t, e, clientv3.LeaseID(l.lease.Lease())) },
		"key deleted":   func(t *testing.T, e *testutil.Etcd, l *Lock) { e.Delete(t, l.Key()) },
		"key put again": func(t *testing.T, e *testutil.Etcd, l *Lock) {
			e.Delete(t, l.Key())
			e.Put(t, l.Key(), "")
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := testutil.StartEtcd(t)
			e.Put(t, "p/theirs", "1")
			l := mustLock(t, mustDial(t, e, unlimited), lockPath)
			take(t, e, l)
			if !l.Held() {
				t.Fatal("the loss is noticed already")
			}
			ctx := t.Context()
			err := l.Txn(ctx, Op{Kind: OpPut, Key: "p/a"}, Op{Kind: OpDelete, Key: "p/theirs"})
			for _, err := range []error{err, l.Put(ctx, "p/a", nil), l.Create(ctx, "p/a", nil), l.Delete(ctx, "p/theirs")} {
				if !errors.Is(err, ErrLockLost) {
					t.Errorf("%v, want %v", err, ErrLockLost)
				}
			}
			ends(t, "the lock", l.Lost())
			holds(t, e, map[string]string{"theirs": "1"})
			mustUnlock(t, l)
		})
	}
}

// The next one in line of the same process need not wait for a holder that
// lost its lock to say so.
func TestLockLostGoesToTheNext(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited, shortLocks)
	lost := mustLock(t, c, lockPath)
	revoke(t, e, clientv3.LeaseID(lost.lease.Lease()))
	next := mustLock(t, c, lockPath)
	if err := next.Put(t.Context(), "p/a", []byte("next")); err != nil {
		t.Error(err)
	}
	if err := lost.Put(t.Context(), "p/a", []byte("lost")); !errors.Is(err, ErrLockLost) {
		t.Errorf("put: %v", err)
	}
	holds(t, e, map[string]string{"a": "next"})
}

// Who loses its lease while it waits, or its etcd for a while, goes on waiting.
//
// mechanism: C9
func TestLockWaitsThroughLosses(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Put(t, lockPath+"/0", "") // of somebody else, without lease
	c := mustDial(t, e, unlimited, shortLocks)
	impatient(c)
	var l *Lock
	locking := start(t, func(ctx context.Context) (err error) { l, err = c.Lock(ctx, lockPath); return err })
	waits(t, e, lockPath, 2)
	leases, err := c.Leases(t.Context())
	if err != nil || len(leases) != 1 {
		t.Fatalf("leases %v, %v", leases, err)
	}
	revoke(t, e, clientv3.LeaseID(leases[0]))
	waits(t, e, lockPath, 2)
	e.Restart(t)
	waits(t, e, lockPath, 2)
	e.Delete(t, lockPath+"/0")
	if err := locking.wait(t); err != nil {
		t.Fatal(err)
	}
	if err := l.Put(t.Context(), "p/a", nil); err != nil {
		t.Error(err)
	}
	mustUnlock(t, l)
}

// A lock that is asked for while etcd is down is had when it is back.
func TestLockWaitsForEtcd(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	impatient(c)
	mustUnlock(t, mustLock(t, c, lockPath))
	e.Stop(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := c.Lock(ctx, lockPath); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "refused") {
		t.Errorf("lock: %v", err)
	}
	locking := start(t, func(ctx context.Context) error {
		l, err := c.Lock(ctx, lockPath)
		if err != nil {
			return err
		}
		return l.Unlock(ctx)
	})
	e.Restart(t)
	if err := locking.wait(t); err != nil {
		t.Error(err)
	}
}

// holderEnv makes the test binary hold a lock in the etcd whose URL it is.
const holderEnv = "WEFT_TEST_LOCK_HOLDER"

// holdLock holds lockPath and puts each line that it reads under it, answering
// with "ok" or the error.
func holdLock(endpoint string) error {
	c, err := Dial(Config{Endpoints: []string{endpoint}, LockTTL: time.Second}, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer c.Close()
	l, err := c.Lock(context.Background(), lockPath)
	if err != nil {
		return err
	}
	fmt.Println("held")
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		if err := l.Put(context.Background(), "p/guarded", lines.Bytes()); err != nil {
			fmt.Println(err)
		} else {
			fmt.Println("ok")
		}
	}
	return nil
}

// A process that is stopped beyond its lease, and wakes up believing that it
// holds the lock, writes nothing.
func TestLockOfASuspendedProcess(t *testing.T) {
	e := testutil.StartEtcd(t)
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), holderEnv+"="+e.Endpoint())
	child.Stderr = os.Stderr
	stdin, errIn := child.StdinPipe()
	stdout, errOut := child.StdoutPipe()
	if err := errors.Join(errIn, errOut, child.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { child.Process.Kill(); child.Wait() })
	answers := bufio.NewScanner(stdout)
	expect := func(want string) {
		t.Helper()
		if !answers.Scan() || !strings.Contains(answers.Text(), want) {
			t.Fatalf("the holder says %q, want %q", answers.Text(), want)
		}
	}
	expect("held")
	io.WriteString(stdin, "first\n")
	expect("ok")
	if err := child.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	l := mustLock(t, mustDial(t, e, unlimited), lockPath)
	if err := l.Put(t.Context(), "p/guarded", []byte("second")); err != nil {
		t.Error(err)
	}
	mustUnlock(t, l)
	if err := child.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	io.WriteString(stdin, "third\n")
	expect(ErrLockLost.Error())
	holds(t, e, map[string]string{"guarded": "second"})
}

// Many contend for one lock, each writing what it is while it believes that it
// holds it, and leases are revoked and keys deleted under them at random. Each
// write in etcd's history was that of the holder at that moment.
func TestLockHasOneHolder(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	e := testutil.StartEtcd(t)
	var stop atomic.Bool
	var writes, losses atomic.Int64
	var contenders sync.WaitGroup
	for range 4 {
		c := mustDial(t, e, unlimited, shortLocks)
		for range 4 {
			contenders.Go(func() {
				for !stop.Load() {
					l, err := c.Lock(t.Context(), lockPath)
					if err != nil {
						t.Error(err)
						return
					}
					for range 10 { // the believer does not look at Held or Lost
						err := l.Put(t.Context(), "p/guarded", fmt.Appendf(nil, "%s@%d", l.Key(), l.Revision()))
						switch {
						case err == nil:
							writes.Add(1)
						case errors.Is(err, ErrLockLost):
							losses.Add(1)
						default:
							t.Error(err)
						}
					}
					if err := l.Unlock(t.Context()); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
		undermine(t, e, random)
		time.Sleep(time.Duration(random.IntN(10)) * time.Millisecond)
	}
	stop.Store(true)
	contenders.Wait()
	if writes.Load() == 0 || losses.Load() == 0 {
		t.Errorf("%d writes and %d losses prove nothing", writes.Load(), losses.Load())
	}
	checked, holders := checkGuarded(t, e)
	if checked < writes.Load() {
		t.Errorf("%d writes are in the history, of %d", checked, writes.Load())
	}
	t.Logf("%d writes of %d holders, %d writes refused", checked, holders, losses.Load())
	waits(t, e, lockPath, 0)
}

// undermine takes a lease or a key away from some contender, the holder as a
// rule.
func undermine(t *testing.T, e *testutil.Etcd, random *rand.Rand) {
	t.Helper()
	resp, err := e.Client().Get(t.Context(), lockPath+"/", clientv3.WithPrefix(),
		clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	if err != nil {
		t.Fatal(err)
	}
	if len(resp.Kvs) == 0 {
		return
	}
	kv := resp.Kvs[0]
	if random.IntN(3) == 0 {
		kv = resp.Kvs[random.IntN(len(resp.Kvs))]
	}
	if random.IntN(2) == 0 {
		e.Delete(t, string(kv.Key))
		return
	}
	_, _ = e.Client().Revoke(t.Context(), clientv3.LeaseID(kv.Lease)) // or it is given back meanwhile
}

// checkGuarded replays the history of the guarded key: whoever wrote it held
// the lock then.
func checkGuarded(t *testing.T, e *testutil.Etcd) (writes, holders int64) {
	t.Helper()
	now, err := e.Client().Get(t.Context(), "p/guarded")
	if err != nil || len(now.Kvs) == 0 {
		t.Fatalf("the guarded key: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var last string
	var seen []string
	for resp := range e.Client().Watch(ctx, "p/guarded", clientv3.WithRev(1)) {
		for _, ev := range resp.Events {
			holder, err := e.Client().Get(t.Context(), lockPath+"/",
				append(clientv3.WithFirstCreate(), clientv3.WithRev(ev.Kv.ModRevision-1))...)
			if err != nil {
				t.Fatal(err)
			}
			writer := string(ev.Kv.Value)
			if len(holder.Kvs) == 0 || fmt.Sprintf("%s@%d", holder.Kvs[0].Key, holder.Kvs[0].CreateRevision) != writer {
				t.Fatalf("%s wrote at revision %d, when the holder was %v", writer, ev.Kv.ModRevision, holder.Kvs)
			}
			if writer != last {
				if slices.Contains(seen, writer) {
					t.Fatalf("%s held the lock again at revision %d", writer, ev.Kv.ModRevision)
				}
				last, seen = writer, append(seen, writer)
			}
			writes++
			if ev.Kv.ModRevision == now.Kvs[0].ModRevision {
				return writes, int64(len(seen))
			}
		}
	}
	t.Fatal("the history ended early")
	return 0, 0
}
