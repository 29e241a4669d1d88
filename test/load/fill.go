// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"fmt"
	"iter"
	"math/rand/v2"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
)

const (
	// batch is etcd's default limit of operations in a transaction.
	batch = 128
	// inFlight is how many transactions an etcd works on at once.
	inFlight = 8
)

// Filler writes clusters into an etcd.
type Filler struct {
	Client *clientv3.Client
	// Progress is told now and then how many keys are written; nil: nobody is.
	Progress func(keys int)
}

// Fill writes a whole cluster, its config first and its canaries last.
func (f Filler) Fill(ctx context.Context, c Cluster) error {
	if err := c.Validate(); err != nil {
		return err
	}
	for _, part := range []iter.Seq2[string, string]{c.Config(), c.Objects(), c.Canaries()} {
		if err := f.put(ctx, part); err != nil {
			return fmt.Errorf("fill %s: %w", c.Name, err)
		}
	}
	return nil
}

// Put writes workloads from and including first, n of them, as they are in a generation.
func (f Filler) Put(ctx context.Context, c Cluster, first, n int, generation uint64) error {
	return f.put(ctx, func(yield func(string, string) bool) {
		for i := first; i < first+n && yield(c.Workload(i, generation)); i++ {
		}
	})
}

// Delete deletes workloads from and including first, n of them.
func (f Filler) Delete(ctx context.Context, c Cluster, first, n int) error {
	return f.commit(ctx, func(yield func(clientv3.Op) bool) {
		for i := first; i < first+n && yield(clientv3.OpDelete(c.WorkloadPrefix()+c.Address(i).String())); i++ {
		}
	})
}

func (f Filler) put(ctx context.Context, pairs iter.Seq2[string, string]) error {
	return f.commit(ctx, func(yield func(clientv3.Op) bool) {
		for key, value := range pairs {
			if !yield(clientv3.OpPut(key, value)) {
				return
			}
		}
	})
}

// commit carries out ops, in transactions that may overtake each other.
func (f Filler) commit(ctx context.Context, ops iter.Seq[clientv3.Op]) error {
	tasks, ctx := errgroup.WithContext(ctx)
	tasks.SetLimit(inFlight)
	told, done := time.Now(), 0
	flush := func(ops []clientv3.Op) {
		tasks.Go(func() error {
			_, err := f.Client.Txn(ctx).Then(ops...).Commit()
			return err
		})
		done += len(ops)
		if f.Progress != nil && time.Since(told) > time.Second {
			told = time.Now()
			f.Progress(done)
		}
	}
	next := make([]clientv3.Op, 0, batch)
	for op := range ops {
		if next = append(next, op); len(next) == batch {
			flush(next)
			next = make([]clientv3.Op, 0, batch)
		}
		if ctx.Err() != nil {
			break
		}
	}
	if len(next) > 0 {
		flush(next)
	}
	return tasks.Wait()
}

// Churn changes workloads one by one, so many a second, for a while: every tenth change is a deletion, the others write
// the workload anew. It returns how many changes it made, which is fewer than asked for if the etcd cannot keep up.
func (f Filler) Churn(ctx context.Context, c Cluster, rate int, span time.Duration) (changes int, err error) {
	const tick = 2 * time.Millisecond
	rnd := rand.New(rand.NewPCG(c.Seed, 1))
	tasks, ctx := errgroup.WithContext(ctx)
	tasks.SetLimit(inFlight)
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for start := time.Now(); ctx.Err() == nil; {
		passed := time.Since(start)
		if passed >= span {
			break
		}
		for due := int(passed.Seconds() * float64(rate)); changes < due && ctx.Err() == nil; changes++ {
			key, value := c.Workload(rnd.IntN(c.Workloads), rnd.Uint64())
			op := clientv3.OpPut(key, value)
			if changes%10 == 9 {
				op = clientv3.OpDelete(key)
			}
			tasks.Go(func() error {
				_, err := f.Client.Do(ctx, op)
				return err
			})
		}
		<-ticker.C
	}
	return changes, tasks.Wait()
}
