// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"

	"google.golang.org/grpc/credentials"
)

// reloadingTLS is the client side of TLS with its files read anew for each
// handshake, so that a rotation of leaf or authority needs no restart and no
// file watch. When the files do not fit together, as in the instant between
// the replacement of a certificate and of its key, the pair that last did is
// used.
type reloadingTLS struct {
	cfg Config
	log *slog.Logger
	// failed is told why a handshake, or the reading of the files, went wrong.
	failed func(error)
	// expiry is told of the certificates on both sides.
	expiry *expiry
	// refused is told of a handshake that failed.
	refused func(error)

	mu     sync.Mutex
	cert   *tls.Certificate // last good pair; guarded by mu
	roots  *x509.CertPool   // last good authorities; guarded by mu
	logged string           // what is wrong with the files, as last logged; guarded by mu
}

var _ credentials.TransportCredentials = (*reloadingTLS)(nil)

// ClientHandshake implements credentials.TransportCredentials. The server's
// certificate is verified against authority, the host of the endpoint.
func (r *reloadingTLS) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	cfg, err := r.config()
	if err == nil {
		r.expiry.presents(r.current())
		var conn net.Conn
		var info credentials.AuthInfo
		if conn, info, err = credentials.NewTLS(cfg).ClientHandshake(ctx, authority, raw); err == nil {
			if secured, ok := info.(credentials.TLSInfo); ok {
				r.expiry.shown(authority, r.cfg.serverCertificates(authority, secured.State.PeerCertificates, secured.State.VerifiedChains))
			}
			return greeted(&alertedConn{Conn: conn, authority: authority, failed: r.failed}), info, nil
		}
		err = fmt.Errorf("TLS with %s: %w", authority, err)
	}
	r.refused(err)
	return nil, nil, err
}

// alertedConn tells why the server ended a connection that was made. With TLS
// 1.3 that is how a server refuses a client's certificate, and gRPC keeps it
// to itself.
type alertedConn struct {
	net.Conn
	authority string
	failed    func(error)
}

// Read implements net.Conn.
func (c *alertedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "remote error" {
		c.failed(fmt.Errorf("TLS with %s: refused by the server, look at the client's certificate: %w", c.authority, err))
	}
	return n, err
}

// clientCertificate reads the files anew and returns what current does.
func (r *reloadingTLS) clientCertificate() *Certificate {
	// What is wrong with the files was told, and there may be good ones.
	_, _ = r.config()
	return r.current()
}

// current returns the client's certificate as last read, nil if there is none.
func (r *reloadingTLS) current() *Certificate {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cert == nil {
		return nil
	}
	c := r.cfg.clientCertificate(r.cert.Leaf)
	return &c
}

// config assembles the TLS configuration of one handshake. What is wrong with
// the files it logs once, however often it is tried again.
func (r *reloadingTLS) config() (*tls.Config, error) {
	cfg, wrong, err := r.read()
	text := ""
	if wrong != nil {
		text = wrong.Error()
	}
	if wrong != nil && err == nil {
		r.failed(wrong)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case text == r.logged:
	case text == "":
		r.log.Info("TLS files can be used again")
	case err != nil:
		r.log.Warn("waiting for TLS files", "err", wrong)
	default:
		r.log.Warn("TLS files cannot be used: those before stay", "err", wrong)
	}
	r.logged = text
	return cfg, err
}

// read reads the files. It returns what is wrong with them, and an error where
// there are none from before to go on with.
func (r *reloadingTLS) read() (_ *tls.Config, wrong, err error) {
	minVersion, err := r.cfg.minTLS()
	if err != nil {
		return nil, err, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	cfg := &tls.Config{
		MinVersion:         minVersion,
		InsecureSkipVerify: r.cfg.InsecureSkipVerify,
	}
	if r.cfg.CAFile != "" {
		roots, err := readRoots(r.cfg.CAFile)
		if err != nil && r.roots == nil {
			return nil, err, err
		}
		if err != nil {
			wrong = err
		} else {
			r.roots = roots
		}
		cfg.RootCAs = r.roots
	}
	if r.cfg.CertFile != "" {
		cert, err := tls.LoadX509KeyPair(r.cfg.CertFile, r.cfg.KeyFile)
		if err != nil {
			err = fmt.Errorf("client certificate %s with key %s: %w", r.cfg.CertFile, r.cfg.KeyFile, err)
		}
		if err != nil && r.cert == nil {
			return nil, err, err
		}
		switch {
		case err == nil:
			r.cert = &cert
		case wrong == nil:
			wrong = err
		default:
			wrong = fmt.Errorf("%w; %w", wrong, err)
		}
		current := r.cert
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return current, nil }
	}
	return cfg, wrong, nil
}

func readRoots(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("certificate authorities: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("certificate authorities %s: no PEM certificate in it", file)
	}
	return roots, nil
}

// ServerHandshake implements credentials.TransportCredentials; a client has no
// use for it.
func (r *reloadingTLS) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("client credentials used by a server")
}

// Info implements credentials.TransportCredentials.
func (r *reloadingTLS) Info() credentials.ProtocolInfo {
	return credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13}).Info()
}

// Clone implements credentials.TransportCredentials. The copy is the original:
// it holds nothing that belongs to one connection.
func (r *reloadingTLS) Clone() credentials.TransportCredentials { return r }

// OverrideServerName implements credentials.TransportCredentials; the name
// always comes from the endpoint.
func (r *reloadingTLS) OverrideServerName(string) error {
	return errors.New("the server name is that of the endpoint")
}
