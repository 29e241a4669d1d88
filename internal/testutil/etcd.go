// SPDX-License-Identifier: Apache-2.0

package testutil

import (
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
// unless told otherwise, on a loopback port of its own, its data in a
// temporary directory and never synced to disk. It stops when the test ends. Its methods fail the test on
// any error and are for the test's own goroutine.
type Etcd struct {
	etcdKeys
	dir    string
	token  string
	tls    *serverFiles // nil for plain HTTP
	auth   string       // cluster whose users there are, "" for no authentication
	member *member      // nil for a server that is alone
	server *embed.Etcd
	rpc    *rpcServers
}

// EtcdOption changes how StartEtcd starts a server.
type EtcdOption func(testing.TB, *Etcd)

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
func StartEtcd(t testing.TB, options ...EtcdOption) *Etcd {
	t.Helper()
	e := newEtcd(t)
	for _, option := range options {
		option(t, e)
	}
	e.start(t)
	if e.auth != "" {
		e.enableAuth(t)
	}
	return e
}

// newEtcd returns a server that does not run yet.
func newEtcd(t testing.TB) *Etcd {
	e := &Etcd{dir: t.TempDir(), token: newEtcdToken()}
	e.addr, e.scheme = anyPort, "http"
	t.Cleanup(e.stop)
	return e
}

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

func (e *Etcd) config(rpc *rpcServers) *embed.Config {
	client := url.URL{Scheme: e.scheme, Host: e.addr}
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
	if e.tls != nil {
		e.tls.configure(cfg)
	}
	if e.member != nil {
		e.member.configure(cfg)
	}
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	return cfg
}

// start serves at e.addr and returns when it is ready.
func (e *Etcd) start(t testing.TB) {
	t.Helper()
	e.begin(t)
	e.awaitReady(t)
}

// begin starts the server without waiting for it. After the first start the
// port is fixed; a process elsewhere may hold it for an instant as the local
// end of a connection, hence the retry.
func (e *Etcd) begin(t testing.TB) {
	t.Helper()
	deadline := time.Now().Add(etcdStartTimeout)
	for {
		rpc := &rpcServers{}
		server, err := embed.StartEtcd(e.config(rpc))
		if err == nil {
			e.server, e.rpc = server, rpc
			return
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			t.Fatalf("start etcd at %s: %v", e.addr, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (e *Etcd) awaitReady(t testing.TB) {
	t.Helper()
	select {
	case <-e.server.Server.ReadyNotify():
	case err := <-e.server.Err():
		t.Fatalf("start etcd at %s: %v", e.addr, err)
	case <-time.After(etcdStartTimeout):
		t.Fatalf("start etcd at %s: not ready after %s", e.addr, etcdStartTimeout)
	}
	e.addr = e.server.Clients[0].Addr().String()
	if e.auth != "" && e.server.Server.AuthStore().IsAuthEnabled() {
		e.client = e.dialAsRoot(t)
		return
	}
	e.client = v3client.New(e.server.Server)
}

func (e *Etcd) stop() {
	if e.server == nil {
		return
	}
	if e.client != nil {
		e.client.Close()
	}
	e.rpc.stop()
	e.server.Close()
	e.server, e.client, e.rpc = nil, nil, nil
}
