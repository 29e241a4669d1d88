// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/weftmesh/weft/internal/testutil"
)

const electionPath = "weft/leader"

// observed runs Observe and hands on the leaders' values, "" for none.
func observed(t *testing.T, c *Client) <-chan string {
	leaders := make(chan string, 100)
	start(t, func(ctx context.Context) error {
		return c.Observe(ctx, electionPath, func(leader KV, ok bool) {
			if !ok {
				leaders <- ""
				return
			}
			leaders <- string(leader.Value)
		})
	})
	return leaders
}

func leads(t *testing.T, leaders <-chan string, want string) {
	t.Helper()
	for deadline := time.After(testTimeout); ; {
		select {
		case got := <-leaders:
			if got == want {
				return
			}
		case <-deadline:
			t.Fatalf("%q is never observed to lead", want)
		}
	}
}

func campaign(t *testing.T, c *Client, value string) (*Leadership, *task) {
	t.Helper()
	l := new(Leadership)
	return l, start(t, func(ctx context.Context) error {
		won, err := c.Campaign(ctx, electionPath, []byte(value))
		if err == nil {
			*l = *won
		}
		return err
	})
}

func TestElection(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited, shortLocks)
	leaders := observed(t, c)
	leads(t, leaders, "")
	if _, ok, err := c.Leader(t.Context(), electionPath); ok || err != nil {
		t.Errorf("there is a leader: %v, %v", ok, err)
	}
	first, won := campaign(t, c, "first")
	if err := won.wait(t); err != nil {
		t.Fatal(err)
	}
	leads(t, leaders, "first")
	second, later := campaign(t, mustDial(t, e, unlimited, shortLocks), "second")
	waits(t, e, electionPath, 2)
	if err := first.Proclaim(t.Context(), []byte("changed")); err != nil {
		t.Error(err)
	}
	leads(t, leaders, "changed")
	if err := first.Put(t.Context(), "p/a", []byte("first")); err != nil {
		t.Error(err)
	}
	// It goes on although the leader is not asked: its lease is gone.
	revoke(t, e, clientv3.LeaseID(first.lease.Lease()))
	if err := later.wait(t); err != nil {
		t.Fatal(err)
	}
	leads(t, leaders, "second")
	for _, err := range []error{first.Put(t.Context(), "p/a", nil), first.Proclaim(t.Context(), nil)} {
		if !errors.Is(err, ErrLockLost) {
			t.Errorf("%v of the former leader", err)
		}
	}
	holds(t, e, map[string]string{"a": "first"})
	if leader, ok, err := c.Leader(t.Context(), electionPath); !ok || err != nil || leader.Key != second.Key() || string(leader.Value) != "second" {
		t.Errorf("leader %+v, %v", leader, err)
	}
	if err := second.Resign(t.Context()); err != nil {
		t.Error(err)
	}
	leads(t, leaders, "")
}

// A candidate may give up, and leaves nothing then.
func TestElectionGivesUp(t *testing.T) {
	e := testutil.StartEtcd(t)
	leader, won := campaign(t, mustDial(t, e, unlimited), "leader")
	if err := won.wait(t); err != nil {
		t.Fatal(err)
	}
	_, other := campaign(t, mustDial(t, e, unlimited), "other")
	waits(t, e, electionPath, 2)
	if err := other.stop(); !errors.Is(err, context.Canceled) {
		t.Errorf("campaign: %v", err)
	}
	waits(t, e, electionPath, 1)
	if err := leader.Resign(t.Context()); err != nil {
		t.Error(err)
	}
}

// Campaigns of etcd's own package and of this one are the same election.
func TestElectionWithEtcdsOwn(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	leaders := observed(t, c)
	theirs := concurrency.NewElection(mustSession(t, e), electionPath)
	if err := theirs.Campaign(t.Context(), "theirs"); err != nil {
		t.Fatal(err)
	}
	leads(t, leaders, "theirs")
	ours, won := campaign(t, c, "ours")
	waits(t, e, electionPath, 2)
	if err := theirs.Proclaim(t.Context(), "still theirs"); err != nil {
		t.Fatal(err)
	}
	leads(t, leaders, "still theirs")
	if err := theirs.Resign(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := won.wait(t); err != nil {
		t.Fatal(err)
	}
	leads(t, leaders, "ours")
	if leader, err := theirs.Leader(t.Context()); err != nil || string(leader.Kvs[0].Value) != "ours" {
		t.Errorf("they see leader %v, %v", leader, err)
	}
	again := start(t, func(ctx context.Context) error { return theirs.Campaign(ctx, "theirs again") })
	waits(t, e, electionPath, 2)
	if err := ours.Resign(t.Context()); err != nil {
		t.Error(err)
	}
	if err := again.wait(t); err != nil {
		t.Fatal(err)
	}
	leads(t, leaders, "theirs again")
}

// Observers follow through restarts.
func TestElectionObservedThroughARestart(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	impatient(c)
	leaders := observed(t, c)
	e.Put(t, electionPath+"/1", "one")
	leads(t, leaders, "one")
	e.Restart(t)
	e.Put(t, electionPath+"/1", "two")
	leads(t, leaders, "two")
	e.Delete(t, electionPath+"/1")
	leads(t, leaders, "")
}

// What was compacted while nobody looked is no reason to stop waiting.
func TestWaitBeginsAfterACompaction(t *testing.T) {
	e := testutil.StartEtcd(t)
	c := mustDial(t, e, unlimited)
	for i := range 3 {
		e.Put(t, "p/a", fmt.Sprint(i))
	}
	e.Compact(t)
	if err := c.awaitChange(t.Context(), "p/a", 1); err == nil || permanent(err) {
		t.Errorf("waiting since a compacted revision: %v", err)
	}
}
