// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/weftmesh/weft/internal/testutil"
)

// mechanism: N1
func TestLockSweeper(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	stuck := mustLock(t, c, "locks/k8s:u=http:/h;")
	brief := mustLock(t, c, "locks/b")
	beside := mustLock(t, c, "others/c")
	var next *Lock
	waiting := start(t, func(ctx context.Context) (err error) {
		next, err = mustDial(t, e, unlimited).Lock(ctx, "locks/k8s:u=http:/h;")
		return err
	})
	waits(t, e, "locks/k8s:u=http:/h;", 2)
	fence := mustTakeFence(t, c)
	s := NewLockSweeper(mustDial(t, e, unlimited), fence, "locks/")
	sweep := func(want ...string) {
		t.Helper()
		if freed, err := s.Sweep(t.Context()); err != nil || !slices.Equal(freed, want) {
			t.Errorf("freed %v, %v; want %v", freed, err, want)
		}
	}
	sweep()
	mustUnlock(t, brief)
	again := mustLock(t, c, "locks/b")
	sweep(stuck.Key())
	if err := waiting.wait(t); err != nil {
		t.Fatal(err)
	}
	if err := stuck.Put(t.Context(), "p/a", nil); !errors.Is(err, ErrLockLost) {
		t.Errorf("put: %v", err)
	}
	for _, l := range []*Lock{next, again, beside} {
		if err := l.Put(t.Context(), "p/a", nil); err != nil {
			t.Error(err)
		}
	}
	mustUnlock(t, next)
	sweep(again.Key())
	sweep()
	leaked := mustLock(t, c, "locks/c")
	sweep()
	mustTakeFence(t, c)
	if freed, err := s.Sweep(t.Context()); !errors.Is(err, ErrFenced) || len(freed) > 0 || !leaked.Held() {
		t.Errorf("another one has the fence, and freed %v, %v", freed, err)
	}
	e.Stop(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Sweep(ctx); err == nil {
		t.Error("locks of an etcd that is down were swept")
	}
}

// mustTakeFence takes the fence that the tests here write behind.
func mustTakeFence(t *testing.T, c *Client) Fence {
	t.Helper()
	f, err := c.TakeFence(t.Context(), "fence", nil, func(context.Context) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	return f
}
