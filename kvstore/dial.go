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

// dialTimeout bounds the TCP connection, and again the TLS handshake.
const dialTimeout = 20 * time.Second

// dialer opens the connections of one Client. It resolves host aliases and is
// where all waiting between connection attempts happens: gRPC's own back-off
// is switched off, since it neither spreads clients widely nor survives a
// server that accepts and hangs up.
type dialer struct {
	aliases   map[string][]string // lower-case host → addresses
	connected func(conn net.Conn, address string)
	failed    func(error)

	mu       sync.Mutex
	attempts map[string]*backoff // by address; guarded by mu
}

func newDialer(aliases []HostAlias, connected func(net.Conn, string), failed func(error)) *dialer {
	d := &dialer{
		aliases:   make(map[string][]string, len(aliases)),
		connected: connected,
		failed:    failed,
		attempts:  make(map[string]*backoff),
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
			d.failed(err)
		}
		return nil, err
	}
	d.connected(conn, address)
	return conn, nil
}

// turn returns how long an attempt at address must wait: the first one not at
// all, later ones as long as the back-off says.
func (d *dialer) turn(address string) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	b, ok := d.attempts[address]
	if !ok {
		d.attempts[address] = &backoff{started: now}
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
