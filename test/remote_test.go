// SPDX-License-Identifier: Apache-2.0

package test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/internal/testutil/golden"
)

func announcement(ip, host string, identity int) (key, value string) {
	return "cilium/state/ip/v1/default/" + ip, fmt.Sprintf(`{"IP":"%s","Mask":null,"HostIP":"%s","ID":%d,"Key":0,"Metadata":""}`, ip, host, identity)
}

// status asks the agent.
func (h host) status(t *testing.T) api.Status {
	t.Helper()
	s, err := api.NewClient(h.socket).Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// An address is in the kernel before its identity is known, and neither when that comes, changes or goes is the kernel's
// entry touched: no packet in between is the world's.
//
// lesson: X7
func TestIdentityAfterAddress(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	west := testutil.StartEtcd(t)
	west.Load(t, golden.Path(t, "kvstore-state-west.jsonl"))
	h := newHost(t)
	west.WriteConfig(t, filepath.Join(h.clustermesh, "west"))
	h.start(t, "east", 1)
	h.awaitVerified(t)
	const id = 131999
	ip, value := announcement("10.2.9.9", "172.18.2.1", id)
	west.Put(t, ip, value)
	var before map[string]string
	testutil.Eventually(t, 20*time.Second, func() error {
		bytes, fields := h.kernelMap(t)
		if got := fields["10.2.9.9/32"]; !strings.Contains(got, fmt.Sprint(id)) {
			return fmt.Errorf("the entry is %q, want identity %d", got, id)
		}
		before = bytes
		return nil
	})
	h.awaitVerified(t)
	written := h.status(t).Datapath.Map.Written
	known := h.status(t).Tables.Identities
	key := fmt.Sprintf("cilium/state/identities/v1/id/%d", id)
	awaitKnown := func(n int) {
		t.Helper()
		testutil.Eventually(t, 20*time.Second, func() error {
			if got := h.status(t).Tables.Identities; got != n {
				return fmt.Errorf("%d identities, want %d", got, n)
			}
			return nil
		})
	}
	west.Put(t, key, "k8s:app=a;k8s:io.cilium.k8s.policy.cluster=west;")
	awaitKnown(known + 1)
	west.Put(t, key, "k8s:app=b;k8s:io.cilium.k8s.policy.cluster=west;")
	west.Delete(t, key)
	awaitKnown(known)
	after, _ := h.kernelMap(t)
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("the map has changed (-before +after):\n%s", diff)
	}
	if got := h.status(t).Datapath.Map.Written; got != written {
		t.Errorf("%d entries were written", got-written)
	}
}

// An agent that is killed in the middle of a drain leaves a part of the cluster in the kernel. The next one, which has never
// heard of the cluster, removes exactly that.
//
// mechanism: B5
// lesson: A4
func TestKilledWhileDraining(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	const workloads = 20_000
	west := testutil.StartEtcd(t)
	west.Load(t, golden.Path(t, "kvstore-state-west.jsonl"))
	east := testutil.StartEtcd(t)
	east.Load(t, golden.Path(t, "kvstore-state-east.jsonl"))
	fill(t, west, workloads)
	h := newHost(t)
	config := filepath.Join(h.clustermesh, "west")
	east.WriteConfig(t, filepath.Join(h.clustermesh, "east"))

	a := h.start(t, "south", 3)
	h.awaitVerified(t)
	alone, _ := h.kernelMap(t)
	var left int
	for attempt := 0; left == 0; attempt++ {
		if attempt == 10 {
			t.Fatal("in ten attempts, no agent was killed in the middle of a drain")
		}
		west.WriteConfig(t, config)
		testutil.Eventually(t, 60*time.Second, func() error {
			if n := h.status(t).Datapath.Map.Entries; n < workloads {
				return fmt.Errorf("%d entries", n)
			}
			return nil
		})
		if err := os.Remove(config); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(30 * time.Second); h.status(t).Datapath.Map.Entries >= workloads; {
			if time.Now().After(deadline) {
				t.Fatal("no drain has begun")
			}
		}
		a.stop(t, syscall.SIGKILL)
		now, _ := h.kernelMap(t)
		left = len(now) - len(alone)
		a = h.start(t, "south", 3)
		h.awaitVerified(t)
	}
	t.Logf("%d of more than %d entries of west were left", left, workloads)
	testutil.Eventually(t, 30*time.Second, func() error {
		now, _ := h.kernelMap(t)
		if diff := cmp.Diff(alone, now); diff != "" {
			return fmt.Errorf("%d entries, want %d", len(now), len(alone))
		}
		return nil
	})
}

// fill announces workloads of west.
func fill(t *testing.T, west *testutil.Etcd, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var ops []clientv3.Op
	for i := range n {
		key, value := announcement(fmt.Sprintf("10.2.%d.%d", 100+i/250, i%250), "172.18.2.1", probed)
		if ops = append(ops, clientv3.OpPut(key, value)); len(ops) < 100 && i < n-1 {
			continue
		}
		if _, err := west.Client().Txn(ctx).Then(ops...).Commit(); err != nil {
			t.Fatal(err)
		}
		ops = nil
	}
}
