// SPDX-License-Identifier: Apache-2.0

package test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
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
	identitiesPatience = time.Minute
	flappingApps       = 6
)

// flapper is the part of an agent that allocates identities, for workloads that come and go.
type flapper struct {
	host      netip.Addr
	allocator *endpoint.Allocator
	writer    *kvstore.Writer
	client    *kvstore.Client
	random    *rand.Rand
	kept      map[string]kept // by labels
}

// kept is an identity in use.
type kept struct {
	labels identity.Labels
	id     identity.ID
}

func newFlapper(t *testing.T, etcd *testutil.Etcd, host string, seed uint64) *flapper {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	f := &flapper{host: netip.MustParseAddr(host), random: rand.New(rand.NewPCG(seed, 0)), kept: make(map[string]kept)}
	var err error
	f.client, err = kvstore.Dial(kvstore.Config{Endpoints: []string{etcd.Endpoint()}, QPS: 100_000, BootstrapQPS: 100_000}, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.client.Close() })
	f.writer = kvstore.NewWriter(f.client, kvstore.WriterConfig{Log: log})
	layout, err := identity.NewLayout(255)
	if err == nil {
		f.allocator, err = endpoint.NewAllocator(endpoint.AllocatorConfig{
			Client: f.client, ClusterID: 1, Layout: layout, HostIP: f.host, StateDir: t.TempDir(), Observe: f.writer.Observe, Log: log,
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// run allocates until ctx ends, and meanwhile has its workloads come and go a number of times.
func (f *flapper) run(ctx context.Context, steps int) error {
	group, running := errgroup.WithContext(ctx)
	running, stop := context.WithCancel(running)
	group.Go(func() error { return f.allocator.Run(running) })
	group.Go(func() error { return f.writer.Run(running) })
	group.Go(func() error {
		defer stop()
		for range steps {
			if err := f.step(running, f.random.IntN(1<<flappingApps)); err != nil {
				return err
			}
		}
		return f.step(running, 0)
	})
	return group.Wait()
}

// step has the workloads of a set run and no others: it waits for the identities of those that come, and lets go of those of
// the others.
func (f *flapper) step(ctx context.Context, set int) error {
	ctx, cancel := context.WithTimeout(ctx, identitiesPatience)
	defer cancel()
	want := make(map[string]identity.Labels)
	for app := range flappingApps {
		if labels := flapping(app); set>>app&1 == 1 {
			want[labels.String()] = labels
		}
	}
	for text, k := range f.kept {
		if _, ok := want[text]; !ok {
			f.writer.Delete(identity.SlaveKey(k.labels, f.host))
			f.writer.Release(identity.MasterKey(k.id))
			delete(f.kept, text)
		}
	}
	f.allocator.Want(want, true)
	for {
		changed := f.allocator.Changed()
		s := f.allocator.Status()
		if s.Listed && s.Waiting == 0 {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%s: sets wait for their identity: %+v", f.host, s)
		}
	}
	for text, labels := range want {
		id, err := f.allocator.Identity(text)
		if err != nil || f.kept[text].id == id {
			continue
		}
		f.writer.Create(identity.MasterKey(id), []byte(text))
		f.writer.Set(identity.SlaveKey(labels, f.host), strconv.AppendUint(nil, uint64(id), 10))
		f.kept[text] = kept{labels, id}
	}
	if err := f.writer.Flush(ctx); err != nil {
		return fmt.Errorf("%s: %w", f.host, err)
	}
	return f.check(ctx)
}

// check finds identities in use that etcd does not have.
func (f *flapper) check(ctx context.Context) error {
	for text, k := range f.kept {
		kv, ok, err := f.client.Get(ctx, identity.MasterKey(k.id))
		if err != nil {
			return err
		}
		if !ok || string(kv.Value) != text {
			return fmt.Errorf("%s uses identity %s for %s, and etcd has %q (exists: %t)", f.host, k.id, text, kv.Value, ok)
		}
	}
	return nil
}

func flapping(app int) identity.Labels {
	return identity.ParseLabels(fmt.Sprintf("k8s:app=flapping-%d;k8s:io.cilium.k8s.policy.cluster=east;", app))
}

// identityHistory replays what happened to the identities of an etcd.
type identityHistory struct {
	masters, slaves map[string]string
	deleted         int
	faults          []string
}

// apply takes all events of one revision.
func (h *identityHistory) apply(events []*clientv3.Event) {
	var gone []string
	for _, e := range events {
		key, value := string(e.Kv.Key), string(e.Kv.Value)
		of := h.slaves
		if strings.HasPrefix(key, identity.StatePrefix+"/id/") {
			of = h.masters
		} else if !strings.HasPrefix(key, identity.StatePrefix+"/value/") {
			continue // a lock
		}
		if e.Type == clientv3.EventTypePut {
			of[key] = value
			continue
		}
		if strings.HasPrefix(key, identity.StatePrefix+"/id/") {
			gone = append(gone, key)
		}
		delete(of, key)
	}
	for _, master := range gone {
		h.deleted++
		id := strings.TrimPrefix(master, identity.StatePrefix+"/id/")
		if n, err := strconv.Atoi(id); err != nil || n < 65536 || n > 131071 {
			h.faults = append(h.faults, "identity "+id+", which is another cluster's, is deleted")
		}
		for slave, used := range h.slaves {
			if used == id {
				h.faults = append(h.faults, "identity "+id+" is deleted while it is used: "+slave)
			}
		}
	}
}

// replay reads the history of an etcd from its first revision to a key that is put now.
func (h *identityHistory) replay(t *testing.T, etcd *testutil.Etcd) {
	t.Helper()
	h.masters, h.slaves = make(map[string]string), make(map[string]string)
	end := identity.StatePrefix + "/value/end/of/history"
	etcd.Put(t, end, "0")
	ctx, cancel := context.WithTimeout(t.Context(), identitiesPatience)
	defer cancel()
	var (
		revision int64
		batch    []*clientv3.Event
	)
	for resp := range etcd.Client().Watch(ctx, identity.StatePrefix+"/", clientv3.WithPrefix(), clientv3.WithRev(1)) {
		if err := resp.Err(); err != nil {
			t.Fatal(err)
		}
		for _, e := range resp.Events {
			if e.Kv.ModRevision != revision {
				h.apply(batch)
				batch, revision = nil, e.Kv.ModRevision
			}
			if string(e.Kv.Key) == end {
				return
			}
			batch = append(batch, e)
		}
	}
	t.Fatal("the history of etcd does not end")
}

// Workloads come and go on two nodes, which allocate the same identities, while two operators, which are stopped after a few
// rounds and started again, collect those that nobody uses, without a pause. In all of etcd's history none is deleted that is used, nor another cluster's; and in the
// end none of the own is left.
//
// mechanism: O2
// lesson: O4
func TestIdentitiesFlap(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	steps, many := 50, 50
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		steps, many = 500, 50_000
	}
	// Besides those of others, at the edges of the range and in number, there are as many of our own that nobody uses.
	foreign, idle := map[string]string{}, map[string]string{}
	for _, id := range []int{1, 300, 65535, 131072, 16777215} {
		foreign[identity.MasterKey(identity.ID(id))] = flapping(id % flappingApps).String()
	}
	for i := range many {
		foreign[identity.MasterKey(identity.ID(131073+i))] = flapping(i).String()
		idle[identity.MasterKey(identity.ID(131071-i))] = flapping(flappingApps + i).String()
	}
	putKeys(t, etcd, foreign)
	putKeys(t, etcd, idle)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var operators errgroup.Group
	for i, name := range []string{"a", "b"} {
		random := rand.New(rand.NewPCG(seed+uint64(i), 1))
		operators.Go(func() error {
			for ctx.Err() == nil {
				if err := collect(ctx, etcd.Endpoint(), name, 1+random.Uint64N(8)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	var nodes errgroup.Group
	for i, host := range []string{"172.18.1.1", "172.18.1.2"} {
		f := newFlapper(t, etcd, host, seed+uint64(i))
		nodes.Go(func() error { return f.run(ctx, steps) })
	}
	if err := nodes.Wait(); err != nil {
		t.Error(err)
	}
	left := func() map[string]string {
		resp, err := etcd.Client().Get(t.Context(), identity.StatePrefix+"/id/", clientv3.WithPrefix())
		if err != nil {
			t.Fatal(err)
		}
		found := make(map[string]string)
		for _, kv := range resp.Kvs {
			found[string(kv.Key)] = string(kv.Value)
		}
		return found
	}
	testutil.Eventually(t, identitiesPatience, func() error {
		if got := left(); !maps.Equal(got, foreign) {
			return fmt.Errorf("left: %v, want those of others alone: %v", got, foreign)
		}
		return nil
	})
	cancel()
	if err := operators.Wait(); err != nil {
		t.Error(err)
	}
	var h identityHistory
	h.replay(t, etcd)
	for _, fault := range h.faults {
		t.Error(fault)
	}
	if h.deleted < many+flappingApps {
		t.Errorf("only %d identities were deleted: nothing was tried", h.deleted)
	}
	t.Logf("%d identities deleted", h.deleted)
}

// putKeys puts keys, a hundred at a time.
func putKeys(t *testing.T, etcd *testutil.Etcd, keys map[string]string) {
	t.Helper()
	var ops []clientv3.Op
	for key, value := range keys {
		ops = append(ops, clientv3.OpPut(key, value))
	}
	for some := range slices.Chunk(ops, 100) {
		if _, err := etcd.Client().Txn(t.Context()).Then(some...).Commit(); err != nil {
			t.Fatal(err)
		}
	}
}

// collect runs an operator that does nothing but collect identities until it has done so many rounds as the leader, or ctx
// ends.
func collect(ctx context.Context, endpoint, name string, rounds uint64) error {
	layout, err := identity.NewLayout(255)
	if err != nil {
		return err
	}
	gc := operator.NewIdentityGC(operator.IdentityGCConfig{ClusterName: "east", ClusterID: 1, Layout: layout, Interval: time.Millisecond})
	o, err := operator.New(operator.Config{
		ClusterName: "east", ClusterID: 1, Name: name, LeaseTTL: time.Minute,
		Election: operator.Election{By: operator.ElectEtcd, LeaseDuration: 10 * time.Second},
		Etcd:     kvstore.Config{Endpoints: []string{endpoint}, QPS: 100_000},
		Duties:   []operator.Duty{gc}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var group errgroup.Group
	group.Go(func() error { return o.Run(ctx) })
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for gc.Status().Runs < rounds && ctx.Err() == nil {
		<-look.C
	}
	cancel()
	return group.Wait()
}
