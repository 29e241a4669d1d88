// SPDX-License-Identifier: Apache-2.0

// Package kvstore follows and writes keys of an etcd; it knows bytes and
// prefixes, and no meanings. It hands on what a prefix holds as differences
// (Watcher), and takes what keys should hold as desired state (Writer). It
// may be late, as etcd's outages make it, but it is never wrong: a lost
// connection deletes nothing, a deletion that happened unseen is found by the
// next list, and one etcd is never mistaken for another.
package kvstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

var (
	// ErrHistoryChanged indicates that another etcd answers than the one whose
	// state was read: its cluster id differs, or its revision went back. All
	// that is known of the old one is stale, and nothing of it is deleted yet:
	// make a new Client and run the same Watcher with it.
	ErrHistoryChanged = errors.New("etcd has another history than before")

	// ErrClosed indicates that the Client was closed.
	ErrClosed = errors.New("etcd client is closed")

	// errUnverified indicates an answer without cluster id over a connection
	// that has not shown one yet.
	errUnverified = errors.New("the etcd behind this connection is not verified yet")
)

// requestTimeout bounds every single request whose context does not end
// sooner, waiting for a connection included.
const requestTimeout = 25 * time.Second

// readBuffer is what a connection reads at least at once, in bytes. The parts of a
// list are larger and pass it by; gRPC's own choice, four times this, is memory
// that hundreds of connections hold for nothing.
const readBuffer = 8 << 10

// KV is one key of etcd.
type KV struct {
	Key      string
	Value    []byte
	Revision int64   // ModRevision: when it was last written
	Version  int64   // how often it was written since it was created
	Lease    LeaseID // 0: it has none
}

// Client is a connection to one etcd. It connects and reconnects by itself, as
// long as anything wants an answer; all methods may be called concurrently.
type Client struct {
	cfg     Config
	log     *slog.Logger
	etcd    *clientv3.Client
	dialer  *dialer
	history *history
	limiter *limiter
	prober  *prober
	streams *streams
	expiry  *expiry
	status  *clientStatus
	turns   turns
	leases  *lockLeases
	overdue overdue

	listed atomic.Uint64 // keys that lists have delivered

	// pagedOnly is set when the server does not know streamed ranges, until
	// the next connection.
	pagedOnly atomic.Bool
}

// Dial makes a client for cfg. It does not wait for, nor insist on, a server
// or a certificate file being there; an error means that cfg is unusable.
func Dial(cfg Config, log *slog.Logger) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	c := &Client{cfg: cfg, log: log, limiter: newLimiter(cfg), status: newClientStatus(), expiry: &expiry{log: log}, leases: newLockLeases()}
	c.streams = &streams{c: c}
	c.prober = &prober{probe: c.Probe}
	c.history = &history{observer: c.status}
	c.dialer = newDialer(cfg.HostAliases, c)

	creds, err := c.credentials()
	if err != nil {
		return nil, err
	}
	endpoints := slices.Clone(cfg.Endpoints)
	rand.Shuffle(len(endpoints), func(i, j int) { endpoints[i], endpoints[j] = endpoints[j], endpoints[i] })
	c.etcd, err = clientv3.New(clientv3.Config{
		Endpoints:            endpoints,
		DialKeepAliveTime:    cfg.KeepAliveInterval,
		DialKeepAliveTimeout: cfg.KeepAliveTimeout,
		MaxCallRecvMsgSize:   cfg.MaxMessageBytes,
		MaxUnaryRetries:      1, // retries are decided here, in one place
		Logger:               zap.NewNop(),
		DialOptions:          c.dialOptions(creds),
	})
	if err != nil {
		return nil, fmt.Errorf("etcd client: %w", err)
	}
	return c, nil
}

func (c *Client) credentials() (credentials.TransportCredentials, error) {
	secure, err := c.cfg.secureEndpoint(c.cfg.Endpoints[0])
	if err != nil {
		return nil, err
	}
	if !secure {
		return insecure.NewCredentials(), nil
	}
	files := &reloadingTLS{cfg: c.cfg, log: c.log, failed: c.status.failed, refused: c.failed, expiry: c.expiry}
	c.expiry.reread = files.clientCertificate
	return files, nil
}

func (c *Client) dialOptions(creds credentials.TransportCredentials) []grpc.DialOption {
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(c.dialer.dial),
		grpc.WithReadBufferSize(readBuffer),
		grpc.WithConnectParams(grpc.ConnectParams{
			// The dialer waits, see there; gRPC's clock runs meanwhile.
			Backoff:           grpcbackoff.Config{BaseDelay: time.Millisecond, Multiplier: 1, MaxDelay: time.Millisecond},
			MinConnectTimeout: backoffMax + 2*dialTimeout,
		}),
	}
	options = append(options,
		grpc.WithChainUnaryInterceptor(c.prober.unary),
		grpc.WithChainStreamInterceptor(c.prober.stream))
	if c.cfg.Username != "" {
		auth := newPasswordAuth(c.cfg.Username, string(c.cfg.Password))
		options = append(options,
			grpc.WithChainUnaryInterceptor(auth.unary),
			grpc.WithChainStreamInterceptor(auth.stream))
	}
	return append(options,
		grpc.WithChainUnaryInterceptor(c.limiter.unary, c.history.unary),
		grpc.WithChainStreamInterceptor(c.limiter.stream, c.history.stream))
}

// callOptions are those of a call that bypasses clientv3's own methods.
func (c *Client) callOptions() []grpc.CallOption {
	return []grpc.CallOption{grpc.WaitForReady(true), grpc.MaxCallRecvMsgSize(c.cfg.MaxMessageBytes)}
}

var _ dialObserver = (*Client)(nil)

// connected is told by the dialer of each new connection.
func (c *Client) connected(conn connection, address string) {
	c.history.connected(conn)
	c.pagedOnly.Store(false)
	c.status.connected(conn)
	c.prober.due.Store(true)
	c.log.Debug("connected to etcd", "endpoint", address)
}

func (c *Client) disconnected(conn connection) { c.status.disconnected(conn) }

// failed is told by the dialer of each attempt to connect that came to nothing.
func (c *Client) failed(err error) { c.status.unconnected(err) }

// Close ends all connections; what is under way fails. The lease of locks that
// were given back is revoked if etcd answers at once.
func (c *Client) Close() error {
	c.expiry.stop()
	c.overdue.stop()
	c.leases.close(c.etcd.ActiveConnection().GetState() == connectivity.Ready)
	return c.etcd.Close()
}

// Get reads one key. ok tells whether it exists.
func (c *Client) Get(ctx context.Context, key string) (kv KV, ok bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.etcd.Get(ctx, key)
	if err != nil {
		return KV{}, false, fmt.Errorf("get %s: %w", key, c.explain(err))
	}
	if len(resp.Kvs) == 0 {
		return KV{}, false, nil
	}
	return kvOf(resp.Kvs[0]), true, nil
}

// List reads all keys that begin with prefix, at one revision, which it
// returns. It holds them all in memory: a prefix of unknown size is for a
// Watcher.
func (c *Client) List(ctx context.Context, prefix string) ([]KV, int64, error) {
	at, err := c.head(ctx, prefixed(prefix))
	if err != nil {
		return nil, 0, err
	}
	var kvs []KV
	err = c.list(ctx, prefixed(prefix), at.revision, func(chunk []*keyValue) error {
		for _, kv := range chunk {
			kvs = append(kvs, kvOf(kv))
		}
		return nil
	})
	if err != nil {
		return nil, 0, err
	}
	return kvs, at.revision, nil
}

// Probe asks the server for its version, and so finds out whether it answers.
func (c *Client) Probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	maintenance := etcdserverpb.NewMaintenanceClient(c.etcd.ActiveConnection())
	resp, err := maintenance.Status(ctx, &etcdserverpb.StatusRequest{}, c.callOptions()...)
	if err != nil {
		return fmt.Errorf("probe: %w", c.explain(err))
	}
	c.status.versionIs(resp.Version)
	return nil
}

// waitReady returns nil once a connection is up. It waits as long as ctx
// lives, since how often to dial is the dialer's business.
func (c *Client) waitReady(ctx context.Context) error {
	c.overdue.begin(c)
	conn := c.etcd.ActiveConnection()
	for {
		state := conn.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.Shutdown:
			return ErrClosed
		case connectivity.Idle:
			conn.Connect()
		}
		if !conn.WaitForStateChange(ctx, state) {
			return ctx.Err()
		}
	}
}

// explain adds to the error of a request that ran out of time what keeps the
// connection from coming up, which gRPC and clientv3 leave out.
func (c *Client) explain(err error) error {
	if c.etcd.ActiveConnection().GetState() == connectivity.Ready {
		return err
	}
	if cause := c.status.lastError(); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w (not connected: %v)", err, cause)
	}
	return err
}
