// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.uber.org/zap"
	"google.golang.org/grpc"
)

const (
	etcdStartTimeout = 30 * time.Second
	etcdOpTimeout    = 10 * time.Second

	anyPort = "127.0.0.1:0"

	// maxEtcdRequest is far above etcd's 1.5 MiB, so that tests can store
	// values that a production server would refuse.
	maxEtcdRequest = 32 << 20
	etcdQuota      = 8 << 30
)

// Etcd is a real etcd server inside the test process: one member, plain HTTP
// on a loopback port of its own, its data in a temporary directory and never
// synced to disk. It stops when the test ends. Its methods fail the test on
// any error and are for the test's own goroutine.
type Etcd struct {
	dir    string
	token  string
	addr   string // host:port of the client listener, fixed after the first start
	server *embed.Etcd
	client *clientv3.Client
	rpc    *rpcServers
}

// rpcServers collects the gRPC servers of one etcd, to be stopped at once:
// etcd itself waits seconds for open watches before it closes them.
type rpcServers struct {
	mu      sync.Mutex
	servers []*grpc.Server
}

func (r *rpcServers) add(s *grpc.Server) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.servers = append(r.servers, s)
}

func (r *rpcServers) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.servers {
		s.Stop()
	}
}

var etcdInstances atomic.Int64

// newEtcdToken makes the cluster id of every instance unique, those of other
// processes included.
func newEtcdToken() string {
	return fmt.Sprintf("weft-test-%d-%d-%d", os.Getpid(), time.Now().UnixNano(), etcdInstances.Add(1))
}

// StartEtcd starts an empty etcd with a cluster id of its own and returns once
// it serves.
func StartEtcd(t testing.TB) *Etcd {
	t.Helper()
	e := &Etcd{dir: t.TempDir(), token: newEtcdToken(), addr: anyPort}
	e.start(t)
	t.Cleanup(e.stop)
	return e
}

// Endpoint is the URL that clients connect to. It stays the same over Stop,
// Restart, Replace and Wipe.
func (e *Etcd) Endpoint() string { return "http://" + e.addr }

// Addr is the host:port of Endpoint.
func (e *Etcd) Addr() string { return e.addr }

// Client is a client inside the server's process, which needs no network. It
// is another one after each start, and nil while the server is stopped.
func (e *Etcd) Client() *clientv3.Client { return e.client }

// Stop ends the server at once: open connections and watches break.
func (e *Etcd) Stop(t testing.TB) {
	t.Helper()
	if e.server == nil {
		t.Fatalf("stop etcd at %s: it is not running", e.addr)
	}
	e.stop()
}

// Restart starts the server again, stopping it first if it runs, with the same
// data and at the same address.
func (e *Etcd) Restart(t testing.TB) {
	t.Helper()
	e.stop()
	e.start(t)
}

// Replace starts another, empty etcd at the same address, stopping this one
// first if it runs. The new one has another cluster id and a history of its
// own.
func (e *Etcd) Replace(t testing.TB) {
	t.Helper()
	e.stop()
	e.dir, e.token = t.TempDir(), newEtcdToken()
	e.start(t)
}

// Wipe starts an empty etcd at the same address, stopping this one first if it
// runs, with the same cluster id but a history of its own: what becomes of an
// etcd that loses its data directory and is started with the same settings.
func (e *Etcd) Wipe(t testing.TB) {
	t.Helper()
	e.stop()
	e.dir = t.TempDir()
	e.start(t)
}

// Put stores value under key.
func (e *Etcd) Put(t testing.TB, key, value string) {
	t.Helper()
	e.do(t, "put "+key, func(ctx context.Context) error {
		_, err := e.client.Put(ctx, key, value)
		return err
	})
}

// Delete removes key; an absent one is fine.
func (e *Etcd) Delete(t testing.TB, key string) {
	t.Helper()
	e.do(t, "delete "+key, func(ctx context.Context) error {
		_, err := e.client.Delete(ctx, key)
		return err
	})
}

// DeletePrefix removes every key that begins with prefix.
func (e *Etcd) DeletePrefix(t testing.TB, prefix string) {
	t.Helper()
	e.do(t, "delete prefix "+prefix, func(ctx context.Context) error {
		_, err := e.client.Delete(ctx, prefix, clientv3.WithPrefix())
		return err
	})
}

// Get returns the value of key, and whether the key exists.
func (e *Etcd) Get(t testing.TB, key string) (value string, ok bool) {
	t.Helper()
	e.do(t, "get "+key, func(ctx context.Context) error {
		resp, err := e.client.Get(ctx, key)
		if err == nil && len(resp.Kvs) == 1 {
			value, ok = string(resp.Kvs[0].Value), true
		}
		return err
	})
	return value, ok
}

// Compact drops all history before the current revision, so that a watch from
// an earlier one is refused.
func (e *Etcd) Compact(t testing.TB) {
	t.Helper()
	e.do(t, "compact", func(ctx context.Context) error {
		resp, err := e.client.Get(ctx, "\x00", clientv3.WithCountOnly())
		if err != nil {
			return err
		}
		_, err = e.client.Compact(ctx, resp.Header.Revision, clientv3.WithCompactPhysical())
		if errors.Is(err, rpctypes.ErrCompacted) {
			return nil // nothing has happened since the last time
		}
		return err
	})
}

// Load stores the keys of a file of JSON lines {"key","value"} or
// {"key","value_base64"}; other members are ignored.
func (e *Etcd) Load(t testing.TB, file string) {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(bytes.NewReader(content))
	lines.Buffer(nil, maxEtcdRequest)
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		var kv struct {
			Key         string
			Value       string
			ValueBase64 string `json:"value_base64"`
		}
		if err := json.Unmarshal(lines.Bytes(), &kv); err != nil {
			t.Fatalf("%s:%d: %v", file, n, err)
		}
		if kv.ValueBase64 != "" {
			raw, err := base64.StdEncoding.DecodeString(kv.ValueBase64)
			if err != nil {
				t.Fatalf("%s:%d: value_base64: %v", file, n, err)
			}
			kv.Value = string(raw)
		}
		e.Put(t, kv.Key, kv.Value)
	}
	if err := lines.Err(); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

// WriteConfig writes a client configuration file that names this etcd. The
// file appears with one rename, never half written.
func (e *Etcd) WriteConfig(t testing.TB, file string) {
	t.Helper()
	tmp, err := os.CreateTemp(t.TempDir(), "config")
	if err != nil {
		t.Fatal(err)
	}
	_, err = fmt.Fprintf(tmp, "endpoints:\n- %s\n", e.Endpoint())
	if err = errors.Join(err, tmp.Close()); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp.Name(), file); err != nil {
		t.Fatal(err)
	}
}

func (e *Etcd) do(t testing.TB, what string, op func(context.Context) error) {
	t.Helper()
	if e.client == nil {
		t.Fatalf("%s: etcd at %s is stopped", what, e.addr)
	}
	ctx, cancel := context.WithTimeout(context.Background(), etcdOpTimeout)
	defer cancel()
	if err := op(ctx); err != nil {
		t.Fatalf("%s: etcd at %s: %v", what, e.addr, err)
	}
}

func (e *Etcd) config(rpc *rpcServers) *embed.Config {
	client := url.URL{Scheme: "http", Host: e.addr}
	peer := url.URL{Scheme: "http", Host: anyPort} // nobody ever connects to it
	cfg := embed.NewConfig()
	cfg.Dir = filepath.Join(e.dir, "etcd")
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.InitialClusterToken = e.token
	cfg.UnsafeNoFsync = true
	cfg.EnableGRPCGateway = false
	cfg.MaxRequestBytes = maxEtcdRequest
	cfg.QuotaBackendBytes = etcdQuota
	// A single member elects itself: short ticks make it serve sooner.
	cfg.TickMs, cfg.ElectionMs = 10, 100
	cfg.BcryptCost = 4 // the least there is: no password here is worth more
	cfg.ServiceRegister = rpc.add
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	return cfg
}

// start serves at e.addr. After the first start the port is fixed; a process
// elsewhere may hold it for an instant as the local end of a connection, hence
// the retry.
func (e *Etcd) start(t testing.TB) {
	t.Helper()
	deadline := time.Now().Add(etcdStartTimeout)
	for {
		rpc := &rpcServers{}
		server, err := embed.StartEtcd(e.config(rpc))
		if err == nil {
			e.server, e.rpc = server, rpc
			break
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			t.Fatalf("start etcd at %s: %v", e.addr, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
	select {
	case <-e.server.Server.ReadyNotify():
	case err := <-e.server.Err():
		t.Fatalf("start etcd at %s: %v", e.addr, err)
	case <-time.After(time.Until(deadline)):
		t.Fatalf("start etcd at %s: not ready after %s", e.addr, etcdStartTimeout)
	}
	e.addr = e.server.Clients[0].Addr().String()
	e.client = v3client.New(e.server.Server)
}

func (e *Etcd) stop() {
	if e.server == nil {
		return
	}
	e.client.Close()
	e.rpc.stop()
	e.server.Close()
	e.server, e.client, e.rpc = nil, nil, nil
}
