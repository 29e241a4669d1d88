// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"math/rand/v2"
	"net"
	"sync"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// injector stands between a client and an etcd and understands what they say:
// it can refuse calls, and deliver the answers of watches as a faulty server
// would.
type injector struct {
	etcdserverpb.UnimplementedKVServer
	etcdserverpb.UnimplementedWatchServer
	etcdserverpb.UnimplementedLeaseServer
	kv    etcdserverpb.KVClient
	watch etcdserverpb.WatchClient
	lease etcdserverpb.LeaseClient
	addr  string

	mu     sync.Mutex
	refuse error // of every call, nil for none
	calls  int
	mangle func(*etcdserverpb.WatchResponse) []*etcdserverpb.WatchResponse
}

func startInjector(t *testing.T, target string) *injector {
	t.Helper()
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	i := &injector{
		kv: etcdserverpb.NewKVClient(conn), watch: etcdserverpb.NewWatchClient(conn), lease: etcdserverpb.NewLeaseClient(conn),
		addr: listener.Addr().String(),
	}
	server := grpc.NewServer()
	etcdserverpb.RegisterKVServer(server, i)
	etcdserverpb.RegisterWatchServer(server, i)
	etcdserverpb.RegisterLeaseServer(server, i)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() {
		server.Stop()
		conn.Close()
		serving.Wait()
	})
	return i
}

// refusing has every call fail with err, or none with nil.
func (i *injector) refusing(err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.refuse = err
}

// mangling has the answers of all watches from now on replaced by what f makes
// of them.
func (i *injector) mangling(f func(*etcdserverpb.WatchResponse) []*etcdserverpb.WatchResponse) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.mangle = f
}

// called returns how many calls there were since it was last called.
func (i *injector) called() int {
	i.mu.Lock()
	defer i.mu.Unlock()
	n := i.calls
	i.calls = 0
	return n
}

func (i *injector) admit() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.calls++
	return i.refuse
}

// Range implements etcdserverpb.KVServer.
func (i *injector) Range(ctx context.Context, r *etcdserverpb.RangeRequest) (*etcdserverpb.RangeResponse, error) {
	if err := i.admit(); err != nil {
		return nil, err
	}
	return i.kv.Range(ctx, r)
}

// Txn implements etcdserverpb.KVServer.
func (i *injector) Txn(ctx context.Context, r *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	if err := i.admit(); err != nil {
		return nil, err
	}
	return i.kv.Txn(ctx, r)
}

// LeaseGrant implements etcdserverpb.LeaseServer.
func (i *injector) LeaseGrant(ctx context.Context, r *etcdserverpb.LeaseGrantRequest) (*etcdserverpb.LeaseGrantResponse, error) {
	if err := i.admit(); err != nil {
		return nil, err
	}
	return i.lease.LeaseGrant(ctx, r)
}

// Watch implements etcdserverpb.WatchServer.
func (i *injector) Watch(in etcdserverpb.Watch_WatchServer) error {
	if err := i.admit(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(in.Context())
	defer cancel()
	out, err := i.watch.Watch(ctx)
	if err != nil {
		return err
	}
	var asking sync.WaitGroup
	asking.Go(func() {
		defer cancel()
		for {
			request, err := in.Recv()
			if err != nil || out.Send(request) != nil {
				return
			}
		}
	})
	for {
		resp, err := out.Recv()
		if err != nil {
			return err
		}
		i.mu.Lock()
		mangled := []*etcdserverpb.WatchResponse{resp}
		if i.mangle != nil {
			mangled = i.mangle(resp)
		}
		i.mu.Unlock()
		for _, m := range mangled {
			if err := in.Send(m); err != nil {
				return err
			}
		}
	}
}

// unreliable delivers events as the worst servers of etcd's history did: twice,
// late, in another order, from before the watch began, or never.
type unreliable struct {
	random *rand.Rand
	late   []*mvccpb.Event
	past   []*mvccpb.Event
}

func (u *unreliable) mangle(resp *etcdserverpb.WatchResponse) []*etcdserverpb.WatchResponse {
	if len(resp.Events) == 0 {
		return []*etcdserverpb.WatchResponse{resp}
	}
	var events []*mvccpb.Event
	for _, ev := range resp.Events {
		u.past = append(u.past, ev)
		switch u.random.IntN(6) {
		case 0: // never
		case 1:
			u.late = append(u.late, ev)
		case 2:
			events = append(events, ev, ev)
		default:
			events = append(events, ev)
		}
	}
	if u.random.IntN(3) == 0 {
		events = append(events, u.late...)
		u.late = nil
	}
	if u.random.IntN(5) == 0 {
		events = append(events, u.past[u.random.IntN(len(u.past))])
	}
	u.random.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
	if len(events) == 0 {
		return nil
	}
	return []*etcdserverpb.WatchResponse{{
		Header: resp.Header, WatchId: resp.WatchId, Fragment: resp.Fragment, Events: events,
	}}
}
