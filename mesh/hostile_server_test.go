// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weftmesh/weft/kvstore"
)

// hostileEtcd is a server that speaks etcd's protocol for cluster west, honestly where a hook does not say otherwise.
type hostileEtcd struct {
	etcdserverpb.UnimplementedKVServer
	etcdserverpb.UnimplementedWatchServer

	endpoint string
	replies  atomic.Int64 // in the way that is hostile

	header func() *etcdserverpb.ResponseHeader
	// list answers a range over announced addresses, from a key on.
	list func(from []byte) (*etcdserverpb.RangeResponse, error)
	// stream answers the same as a stream; nil: the server has no streams.
	stream func(send func(*etcdserverpb.RangeResponse) error) error
	// watch goes on after a watch has been confirmed, until ctx ends.
	watch func(ctx context.Context, send func(*etcdserverpb.WatchResponse) error)
	// addresses is watch for announced addresses alone; nil: watch is for all kinds.
	addresses func(ctx context.Context, send func(*etcdserverpb.WatchResponse) error)
}

func startHostile(t *testing.T, set func(*hostileEtcd)) *hostileEtcd {
	t.Helper()
	h := &hostileEtcd{header: func() *etcdserverpb.ResponseHeader {
		return &etcdserverpb.ResponseHeader{ClusterId: 7, MemberId: 7, Revision: 100, RaftTerm: 1}
	}}
	h.list = func([]byte) (*etcdserverpb.RangeResponse, error) {
		return h.answer(false, h.kv("10.2.1.10")), nil
	}
	h.watch = func(ctx context.Context, _ func(*etcdserverpb.WatchResponse) error) { <-ctx.Done() }
	if set != nil {
		set(h)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h.endpoint = "http://" + listener.Addr().String()
	server := grpc.NewServer(grpc.MaxSendMsgSize(1 << 30))
	etcdserverpb.RegisterKVServer(server, h)
	etcdserverpb.RegisterWatchServer(server, h)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return h
}

func (h *hostileEtcd) kv(addr string) *mvccpb.KeyValue {
	return &mvccpb.KeyValue{
		Key: []byte("cilium/state/ip/v1/default/" + addr), Value: []byte(announce(addr, 2<<16+257, "")),
		CreateRevision: 50, ModRevision: 50, Version: 1,
	}
}

func (h *hostileEtcd) answer(more bool, kvs ...*mvccpb.KeyValue) *etcdserverpb.RangeResponse {
	return &etcdserverpb.RangeResponse{Header: h.header(), Kvs: kvs, More: more, Count: int64(len(kvs))}
}

func (h *hostileEtcd) Range(_ context.Context, r *etcdserverpb.RangeRequest) (*etcdserverpb.RangeResponse, error) {
	switch {
	case bytes.HasPrefix(r.Key, []byte("cilium/cluster-config/west")):
		return h.answer(false, &mvccpb.KeyValue{
			Key: r.Key, Value: []byte(`{"id":2,"capabilities":{"maxConnectedClusters":255}}`), CreateRevision: 10, ModRevision: 10, Version: 1,
		}), nil
	case bytes.HasPrefix(r.Key, []byte("cilium/state/ip/v1/default/")) && len(r.RangeEnd) > 0:
		return h.list(r.Key)
	}
	return h.answer(false), nil
}

func (h *hostileEtcd) RangeStream(r *etcdserverpb.RangeRequest, stream grpc.ServerStreamingServer[etcdserverpb.RangeStreamResponse]) error {
	if h.stream == nil {
		return status.Error(codes.Unimplemented, "no streams")
	}
	send := func(a *etcdserverpb.RangeResponse) error {
		return stream.Send(&etcdserverpb.RangeStreamResponse{RangeResponse: a})
	}
	if !strings.HasPrefix(string(r.Key), "cilium/state/ip/") {
		return send(h.answer(false))
	}
	return h.stream(send)
}

// Watch ends no watch for being cancelled.
func (h *hostileEtcd) Watch(stream grpc.BidiStreamingServer[etcdserverpb.WatchRequest, etcdserverpb.WatchResponse]) error {
	var (
		sending sync.Mutex
		tasks   sync.WaitGroup
	)
	ctx, cancel := context.WithCancel(stream.Context())
	defer tasks.Wait()
	defer cancel()
	for watches := int64(0); ; {
		request, err := stream.Recv()
		if err != nil {
			return err
		}
		create := request.GetCreateRequest()
		if create == nil {
			continue
		}
		id := watches
		watches++
		send := func(answer *etcdserverpb.WatchResponse) error {
			sending.Lock()
			defer sending.Unlock()
			answer.WatchId = id
			return stream.Send(answer)
		}
		if err := send(&etcdserverpb.WatchResponse{Header: h.header(), Created: true}); err != nil {
			return err
		}
		tasks.Go(func() { h.follow(ctx, create.Key, send) })
	}
}

// follow goes on after a watch has been confirmed.
func (h *hostileEtcd) follow(ctx context.Context, key []byte, send func(*etcdserverpb.WatchResponse) error) {
	switch {
	case h.addresses == nil:
		h.watch(ctx, send)
	case bytes.HasPrefix(key, []byte("cilium/state/ip/")):
		h.addresses(ctx, send)
	}
}

var hostileServers = []struct {
	name string
	set  func(*hostileEtcd)
	most float64 // replies that the client may take in a second; 0: any number
}{
	{"endless progress notifications", func(h *hostileEtcd) {
		h.watch = func(ctx context.Context, send func(*etcdserverpb.WatchResponse) error) {
			for ctx.Err() == nil && send(&etcdserverpb.WatchResponse{Header: h.header()}) == nil {
				h.replies.Add(1)
			}
		}
	}, 5_000},
	{"a revision that goes back", func(h *hostileEtcd) {
		var n atomic.Int64
		h.header = func() *etcdserverpb.ResponseHeader {
			return &etcdserverpb.ResponseHeader{ClusterId: 7, Revision: 1_000_000 - n.Add(1)}
		}
		h.watch = func(ctx context.Context, send func(*etcdserverpb.WatchResponse) error) {
			for sleep(ctx, 10*time.Millisecond) && send(&etcdserverpb.WatchResponse{Header: h.header()}) == nil {
				continue
			}
		}
	}, 0},
	{"another cluster id in each reply", func(h *hostileEtcd) {
		var n atomic.Uint64
		h.header = func() *etcdserverpb.ResponseHeader {
			h.replies.Add(1)
			return &etcdserverpb.ResponseHeader{ClusterId: 7 + n.Add(1), Revision: 100}
		}
	}, 5_000},
	{"infinite pages of one key", func(h *hostileEtcd) {
		h.list = func([]byte) (*etcdserverpb.RangeResponse, error) {
			h.replies.Add(1)
			return h.answer(true, h.kv("10.2.1.10")), nil
		}
	}, 5_000},
	{"pages without keys", func(h *hostileEtcd) {
		h.list = func([]byte) (*etcdserverpb.RangeResponse, error) {
			h.replies.Add(1)
			return h.answer(true), nil
		}
	}, 5_000},
	{"an endless list in pages", func(h *hostileEtcd) {
		var n atomic.Int64
		h.list = func(from []byte) (*etcdserverpb.RangeResponse, error) {
			var kvs []*mvccpb.KeyValue
			for range 100 {
				kvs = append(kvs, &mvccpb.KeyValue{
					Key: fmt.Appendf(nil, "cilium/state/ip/v1/default/x%012d", n.Add(1)), Value: []byte("{}"), ModRevision: 50, Version: 1,
				})
			}
			h.replies.Add(1)
			return h.answer(true, kvs...), nil
		}
	}, 20_000},
	{"an endless list as a stream", func(h *hostileEtcd) {
		var n atomic.Int64
		h.stream = func(send func(*etcdserverpb.RangeResponse) error) error {
			for {
				kv := &mvccpb.KeyValue{Key: fmt.Appendf(nil, "cilium/state/ip/v1/default/x%012d", n.Add(1)), Value: []byte("{}"), ModRevision: 50, Version: 1}
				if err := send(h.answer(true, kv)); err != nil {
					return err
				}
				h.replies.Add(1)
			}
		}
	}, 200_000},
	{"giant messages", func(h *hostileEtcd) {
		value := bytes.Repeat([]byte("x"), 80<<20)
		h.list = func([]byte) (*etcdserverpb.RangeResponse, error) {
			h.replies.Add(1)
			kv := h.kv("10.2.1.10")
			kv.Value = value
			return h.answer(false, kv), nil
		}
	}, 200},
	{"events from nowhere", func(h *hostileEtcd) {
		h.watch = func(ctx context.Context, send func(*etcdserverpb.WatchResponse) error) {
			for i := int64(0); ctx.Err() == nil; i++ {
				foreign := &mvccpb.KeyValue{Key: []byte("cilium/state/ip/v1/default/10.1.1.10"), Value: []byte(announce("10.1.1.10", 2<<16+257, "")), ModRevision: 101 + i}
				events := []*mvccpb.Event{{Kv: foreign}, {Type: mvccpb.Event_DELETE, Kv: foreign}, {Kv: &mvccpb.KeyValue{ModRevision: -5}}, {}, {Kv: &mvccpb.KeyValue{}}}
				if send(&etcdserverpb.WatchResponse{Header: h.header(), Events: events}) != nil {
					return
				}
				h.replies.Add(1)
			}
		}
	}, 5_000},
}

// Whatever an etcd server does, its cluster's entries are its own, memory stays bounded, its client does not do its bidding
// as fast as it can ask, other clusters go on as ever, and the agent stops at once.
//
// lesson: R12 E15
func TestHostileServer(t *testing.T) {
	for _, c := range hostileServers {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			h := startHostile(t, c.set)
			checkHostileServer(t, h, h.endpoint, c.most)
		})
	}
	t.Run("one byte a second", func(t *testing.T) {
		t.Parallel()
		checkHostileServer(t, new(hostileEtcd), "http://"+listenSlowly(t), 0)
	})
}

// listenSlowly accepts connections and answers with a byte now and then.
func listenSlowly(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				// A settings frame, which begins every connection, but of the greatest length.
				for _, b := range []byte{0, 64, 0, 4, 0, 0, 0, 0, 0} {
					if _, err := conn.Write([]byte{b}); err != nil || !sleep(ctx, time.Second) {
						return
					}
				}
			}()
		}
	}()
	t.Cleanup(func() {
		cancel()
		listener.Close()
		<-done
	})
	return listener.Addr().String()
}

func checkHostileServer(t *testing.T, h *hostileEtcd, endpoint string, most float64) {
	east := newCluster(t, "east", 1)
	east.node("east-n1", "172.18.1.1", "10.1.1.0")
	east.ip("10.1.1.10", 257, "172.18.1.1")
	const entry = "10.1.1.10/32 65793 via 172.18.1.1 by 1 ip"
	w := newWorld(t, defaultLimits(1000), withConfig(east), func(c *Config) {
		c.Tune = func(k *kvstore.Config) {
			if k.Endpoints[0] == endpoint {
				k.LivenessTimeout = time.Second
			}
		}
		write(t, filepath.Join(c.Dir, "west"), "endpoints:\n- "+endpoint+"\n")
	})
	w.awaitState("east", Ready)
	w.awaitIP("10.1.1.10/32", entry)
	// At some time the windows of the connections are full; what counts is how fast the client empties them then. One that takes
	// what it gets as fast as it can never has a slow moment.
	slowest, since, before := math.Inf(1), time.Now(), h.replies.Load()
	for i := range 10 {
		addr := fmt.Sprintf("10.1.1.%d", 100+i)
		east.ip(addr, 257, "172.18.1.1")
		w.awaitIP(addr+"/32", addr+"/32 65793 via 172.18.1.1 by 1 ip")
		time.Sleep(100 * time.Millisecond)
		now := h.replies.Load()
		slowest = min(slowest, float64(now-before)/time.Since(since).Seconds())
		since, before = time.Now(), now
	}
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	w.awaitIP("10.1.1.10/32", entry)
	for _, text := range w.ips() {
		if strings.Contains(text, " by 2 ") && !strings.HasPrefix(text, "10.2.") {
			t.Errorf("west has %s", text)
		}
	}
	r, _ := w.remote("west")
	t.Logf("%d replies, at the slowest %.0f a second, heap %d MiB, state %s: %s", h.replies.Load(), slowest, m.HeapAlloc>>20, r.State, r.LastError)
	if most != 0 && slowest > most {
		t.Errorf("never less than %.0f replies a second were taken, want at most %.0f", slowest, most)
	}
	if r.Quotas.Entries.Used > 500 {
		t.Errorf("quotas %+v", r.Quotas)
	}
	// The servers' own memory counts, too: all of them and we are one process.
	if m.HeapAlloc > 1<<30 {
		t.Errorf("the heap grew to %d MiB", m.HeapAlloc>>20)
	}
	if e := w.awaitState("east", Ready); e.Reconnects != 0 {
		t.Errorf("east: %+v", e)
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		w.stop()
	}()
	select {
	case <-stopped:
	case <-time.After(2 * soon):
		t.Error("the agent does not stop")
	}
}
