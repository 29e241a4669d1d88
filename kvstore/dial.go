// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"
)

// dialTimeout bounds the TCP connection, again the TLS handshake, and again the
// wait for the server's first word.
const dialTimeout = 20 * time.Second

// dialer opens the connections of one Client. It resolves host aliases and is
// where all waiting between connection attempts happens: gRPC's own back-off
// is switched off, since it neither spreads clients widely nor survives a
// server that accepts and hangs up.
type dialer struct {
	aliases map[string][]string // lower-case host → addresses
	observe dialObserver

	mu       sync.Mutex
	attempts map[string]*backoff // by address; guarded by mu
}

// dialObserver is told what becomes of connections.
type dialObserver interface {
	connected(conn connection, address string)
	disconnected(conn connection)
	failed(err error)
}

func newDialer(aliases []HostAlias, observe dialObserver) *dialer {
	d := &dialer{
		aliases:  make(map[string][]string, len(aliases)),
		observe:  observe,
		attempts: make(map[string]*backoff),
	}
	for _, a := range aliases {
		host := strings.ToLower(a.Hostname)
		for _, ip := range a.IPs {
			d.aliases[host] = append(d.aliases[host], ip.String())
		}
	}
	return d
}

// dial connects to address, host:port, when its turn has come.
func (d *dialer) dial(ctx context.Context, address string) (net.Conn, error) {
	if !sleep(ctx, d.turn(address)) {
		return nil, ctx.Err()
	}
	conn, err := d.connect(ctx, address)
	if err != nil {
		if ctx.Err() == nil {
			d.observe.failed(err)
		}
		return nil, err
	}
	id := connectionOf(conn.LocalAddr(), conn.RemoteAddr())
	d.observe.connected(id, address)
	return greeted(&trackedConn{Conn: conn, closed: sync.OnceFunc(func() { d.observe.disconnected(id) })}), nil
}

// turn returns how long an attempt at address must wait: the first one not at
// all, later ones as long as the back-off says.
func (d *dialer) turn(address string) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	b, ok := d.attempts[address]
	if !ok {
		d.attempts[address] = newBackoff(now)
		return 0
	}
	return b.next(now)
}

func (d *dialer) connect(ctx context.Context, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("address %q: %w", address, err)
	}
	ips, ok := d.aliases[strings.ToLower(host)]
	if !ok {
		return new(net.Dialer).DialContext(ctx, "tcp", address)
	}
	var errs []error
	for _, ip := range ips {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(ip, port))
		if err == nil {
			return conn, nil
		}
		errs = append(errs, err)
	}
	return nil, fmt.Errorf("host alias %s: %w", host, errors.Join(errs...))
}

// trackedConn tells when a connection ends.
type trackedConn struct {
	net.Conn
	closed func()
}

// Close implements net.Conn. It tells first: once closed, the addresses can be
// those of another connection.
func (c *trackedConn) Close() error {
	c.closed()
	return c.Conn.Close()
}

// greetedConn is a connection on which the other side is still to say its
// first word. A load balancer accepts connections that it then forgets, for
// which gRPC waits as long as the longest pause between attempts.
type greetedConn struct {
	net.Conn
	late *time.Timer
}

// greeted closes conn when nothing comes on it for dialTimeout from now.
func greeted(conn net.Conn) net.Conn {
	return &greetedConn{Conn: conn, late: time.AfterFunc(dialTimeout, func() { conn.Close() })}
}

// Read implements net.Conn.
func (c *greetedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.late.Stop()
	}
	return n, err
}

// Close implements net.Conn.
func (c *greetedConn) Close() error {
	c.late.Stop()
	return c.Conn.Close()
}
