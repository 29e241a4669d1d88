// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
)

// testTimeout bounds what a loaded machine may take, and says nothing of how long it should.
const testTimeout = 60 * time.Second

func TestMain(m *testing.M) {
	if of := os.Getenv(replicaEnv); of != "" {
		of := strings.Fields(of)
		if err := runReplica(of[0], of[1], of[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	code := m.Run()
	for deadline := time.Now().Add(15 * time.Second); code == 0; { // a connection may learn late that its other end is gone
		err := goleak.Find()
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			fmt.Fprintln(os.Stderr, "after all tests passed:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// silent is where tests log that do not look at it.
var silent = slog.New(slog.DiscardHandler)

// etcdConfig names an etcd that no test waits its turn for.
func etcdConfig(endpoint string) kvstore.Config {
	return kvstore.Config{Endpoints: []string{endpoint}, QPS: 100_000, MaxInflight: 1000}
}

// replica is an operator that runs in this process.
type replica struct {
	*Operator
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

// startReplica runs an operator of cluster east until the test ends. edit may change its configuration.
func startReplica(t testing.TB, name, etcd string, edit func(*Config)) *replica {
	t.Helper()
	cfg := Config{
		ClusterName: "east", ClusterID: 1, Name: name, Etcd: etcdConfig(etcd), LeaseTTL: time.Minute, Log: silent,
		Election: Election{By: ElectEtcd, LeaseDuration: 2 * time.Second},
	}
	if edit != nil {
		edit(&cfg)
	}
	o, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &replica{Operator: o, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		r.err = o.Run(ctx)
	}()
	t.Cleanup(func() { r.stop() })
	return r
}

// stop ends the replica as a signal does, and returns Run's error.
func (r *replica) stop() error {
	r.cancel()
	<-r.done
	return r.err
}

// awaitLeader waits until exactly one replica leads, and returns it.
func awaitLeader(t testing.TB, replicas ...*replica) (leader *replica) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		var leading []*replica
		for _, r := range replicas {
			if r.Status().Leads {
				leading = append(leading, r)
			}
		}
		if len(leading) != 1 {
			return fmt.Errorf("%d of %d replicas lead", len(leading), len(replicas))
		}
		leader = leading[0]
		return nil
	})
	return leader
}

// runTask runs something until the test ends.
func runTask(t testing.TB, task interface{ Run(context.Context) error }) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- task.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("%v: %v", task, err)
		}
	})
}
