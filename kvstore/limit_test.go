// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// enterAll passes n calls one after the other and returns how long it took.
func enterAll(t *testing.T, l *limiter, n int) time.Duration {
	t.Helper()
	begin := time.Now()
	for range n {
		if err := l.enter(t.Context()); err != nil {
			t.Fatal(err)
		}
		l.leave()
	}
	return time.Since(begin)
}

func TestLimiterRates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter(Config{QPS: 20, BootstrapQPS: 1000}.withDefaults())
		expect := func(what string, got, want time.Duration) {
			t.Helper()
			if got != want {
				t.Errorf("%s took %s, want %s", what, got, want)
			}
		}
		expect("a burst", enterAll(t, l, 20), 0)
		expect("what follows on it", enterAll(t, l, 20), time.Second)
		time.Sleep(time.Minute)
		expect("a burst after a rest, and ten more", enterAll(t, l, 30), 500*time.Millisecond)

		done := l.bootstrapping()
		also := l.bootstrapping()
		time.Sleep(time.Minute)
		expect("twice the bootstrap's burst", enterAll(t, l, 2000), time.Second)
		also()
		also()
		expect("with one list still under way", enterAll(t, l, 100), 100*time.Millisecond)
		done()
		expect("after the lists", enterAll(t, l, 20), time.Second)
	})
}

func TestLimiterKeepsDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLimiter(Config{QPS: 1, MaxInflight: 2}.withDefaults())
		enterAll(t, l, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		begin := time.Now()
		for range 100 { // in vain, and at nobody's cost
			if err := l.enter(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
		}
		if took := time.Since(begin); took != 0 {
			t.Errorf("what cannot be in time took %s", took)
		}
		if took := enterAll(t, l, 1); took != time.Second {
			t.Errorf("the next call waited for %s", took)
		}
		time.Sleep(time.Minute)
		for range 2 {
			if err := l.enter(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := l.enter(ctx); err == nil {
			t.Error("a third call is in flight, of two")
		}
	})
}

// counter is an etcd that does nothing but count what reaches it, and answer.
type counter struct {
	etcdserverpb.UnimplementedKVServer
	etcdserverpb.UnimplementedWatchServer
	etcdserverpb.UnimplementedLeaseServer
	etcdserverpb.UnimplementedMaintenanceServer

	mu    sync.Mutex
	calls []time.Time
}

func startCounter(t *testing.T) (*counter, Config) {
	t.Helper()
	c := &counter{}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	count := func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.calls = append(c.calls, time.Now())
	}
	s := grpc.NewServer(
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			count()
			return next(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			count()
			return next(srv, stream)
		}))
	etcdserverpb.RegisterKVServer(s, c)
	etcdserverpb.RegisterWatchServer(s, c)
	etcdserverpb.RegisterLeaseServer(s, c)
	etcdserverpb.RegisterMaintenanceServer(s, c)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = s.Serve(l)
	}()
	t.Cleanup(func() {
		s.Stop()
		<-served
	})
	return c, Config{Endpoints: []string{"http://" + l.Addr().String()}}
}

func counterHeader() *etcdserverpb.ResponseHeader {
	return &etcdserverpb.ResponseHeader{ClusterId: 1, Revision: 5}
}

// Range answers with one key, and that there are more.
func (c *counter) Range(_ context.Context, r *etcdserverpb.RangeRequest) (*etcdserverpb.RangeResponse, error) {
	kv := &keyValue{Key: append(r.Key, '0'), ModRevision: 3}
	return &etcdserverpb.RangeResponse{Header: counterHeader(), Kvs: []*keyValue{kv}, More: len(r.Key) < 60}, nil
}

func (c *counter) Txn(context.Context, *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	return &etcdserverpb.TxnResponse{Header: counterHeader()}, nil
}

func (c *counter) LeaseGrant(context.Context, *etcdserverpb.LeaseGrantRequest) (*etcdserverpb.LeaseGrantResponse, error) {
	return &etcdserverpb.LeaseGrantResponse{Header: counterHeader(), ID: 1, TTL: 60}, nil
}

func (c *counter) LeaseKeepAlive(s etcdserverpb.Lease_LeaseKeepAliveServer) error {
	for {
		if _, err := s.Recv(); err != nil {
			return nil
		}
		if err := s.Send(&etcdserverpb.LeaseKeepAliveResponse{Header: counterHeader(), ID: 1, TTL: 60}); err != nil {
			return err
		}
	}
}

// Watch ends every watch at once.
func (c *counter) Watch(etcdserverpb.Watch_WatchServer) error { return nil }

func (c *counter) Status(context.Context, *etcdserverpb.StatusRequest) (*etcdserverpb.StatusResponse, error) {
	return &etcdserverpb.StatusResponse{Header: counterHeader(), Version: "3.4.0"}, nil
}

// Pages, watches, transactions and the calls of leases all count, and no
// second of them exceeds the limit.
// mechanism: C3
func TestEveryOperationPassesTheLimiter(t *testing.T) {
	const qps = 100
	server, cfg := startCounter(t)
	cfg.QPS, cfg.Burst, cfg.Paged = qps, 10, true
	c, err := Dial(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	begin := time.Now()
	var calls sync.WaitGroup
	for range 4 {
		calls.Go(func() {
			ctx := t.Context()
			for range 3 {
				if _, _, err := c.List(ctx, "p/"); err != nil { // some thirty pages
					t.Error(err)
				}
				if _, err := c.etcd.Txn(ctx).Commit(); err != nil {
					t.Error(err)
				}
				if _, err := c.etcd.Grant(ctx, 60); err != nil {
					t.Error(err)
				}
				w, err := etcdserverpb.NewWatchClient(c.etcd.ActiveConnection()).Watch(ctx)
				if err == nil {
					_, err = w.Recv()
				}
				if err == nil {
					t.Error("the watch goes on")
				}
			}
		})
	}
	calls.Wait()
	took := time.Since(begin)
	server.mu.Lock()
	defer server.mu.Unlock()
	n := len(server.calls)
	if n < 4*3*30 || float64(n) > 10+qps*took.Seconds()+1 {
		t.Errorf("%d calls reached the server within %s", n, took)
	}
}
