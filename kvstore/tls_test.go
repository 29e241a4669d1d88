// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t testing.TB) *authority {
	a := &authority{key: newKey(t)}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err == nil {
		a.cert, err = x509.ParseCertificate(der)
	}
	if err != nil {
		t.Fatal(err)
	}
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return a
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// leaf returns a certificate for name, and its key, as PEM.
func (a *authority) leaf(t testing.TB, name string, edit ...func(*x509.Certificate)) (cert, key []byte) {
	k := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, f := range edit {
		f(template)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, k.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw})
}

// tlsFront speaks TLS in front of an etcd that does not, and wants a client
// certificate.
type tlsFront struct {
	listener net.Listener
	wg       sync.WaitGroup

	mu    sync.Mutex
	cfg   *tls.Config
	conns []net.Conn
	peers []string // common names of the clients
}

func newTLSFront(t testing.TB, e *testutil.Etcd) *tlsFront {
	f := &tlsFront{}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f.listener = tls.NewListener(l, &tls.Config{
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.cfg, nil
		},
	})
	f.wg.Go(func() {
		for {
			in, err := f.listener.Accept()
			if err != nil {
				return
			}
			f.wg.Go(func() { f.pass(in.(*tls.Conn), e.Addr()) })
		}
	})
	t.Cleanup(func() {
		f.listener.Close()
		f.hangUp()
		f.wg.Wait()
	})
	return f
}

func (f *tlsFront) pass(in *tls.Conn, target string) {
	defer in.Close()
	if in.Handshake() != nil {
		return
	}
	out, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	f.mu.Lock()
	f.conns = append(f.conns, in, out)
	f.peers = append(f.peers, in.ConnectionState().PeerCertificates[0].Subject.CommonName)
	f.mu.Unlock()
	f.wg.Go(func() {
		_, _ = io.Copy(out, in)
		out.Close()
	})
	_, _ = io.Copy(in, out)
}

// serve has the front present another certificate, and accept clients of ca,
// from the next connection on.
func (f *tlsFront) serve(t testing.TB, ca *authority, name string) {
	t.Helper()
	f.present(t, ca, func(leaf *x509.Certificate) { leaf.DNSNames = []string{name} }, nil)
}

// present is serve with any certificate and any configuration.
func (f *tlsFront) present(t testing.TB, ca *authority, leaf func(*x509.Certificate), edit func(*tls.Config)) {
	t.Helper()
	pair, err := tls.X509KeyPair(ca.leaf(t, "west.mesh.cilium.io", leaf))
	if err != nil {
		t.Fatal(err)
	}
	clients := x509.NewCertPool()
	clients.AddCert(ca.cert)
	cfg := &tls.Config{
		Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2"},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients,
	}
	if edit != nil {
		edit(cfg)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cfg = cfg
}

func (f *tlsFront) hangUp() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		c.Close()
	}
	f.conns = nil
}

func (f *tlsFront) lastPeer() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.peers) == 0 {
		return ""
	}
	return f.peers[len(f.peers)-1]
}

func mustWriteFile(t testing.TB, file string, content []byte) {
	t.Helper()
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

// Certificate, key and authority are replaced one after the other, and each
// handshake does with what fits.
// mechanism: C4
// lesson: T1
func TestTLSFilesAreReadAtEachHandshake(t *testing.T) {
	e := testutil.StartEtcd(t)
	e.Put(t, "p/a", "1")
	f := newTLSFront(t, e)
	old, dir := newAuthority(t), t.TempDir()
	f.serve(t, old, "west.mesh.cilium.io")
	cfg := Config{
		CAFile: filepath.Join(dir, "ca"), CertFile: filepath.Join(dir, "cert"), KeyFile: filepath.Join(dir, "key"),
		HostAliases: []HostAlias{{Hostname: "west.mesh.cilium.io", IPs: loopback}},
		Endpoints:   []string{"https://west.mesh.cilium.io:" + frontPort(f)},
	}
	c := mustDial(t, e, func(c *Config) { *c = cfg })
	impatient(c)
	get := func(what, peer string) {
		t.Helper()
		f.hangUp()
		testutil.Eventually(t, testTimeout, func() error {
			_, _, err := c.Get(t.Context(), "p/a")
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			return nil
		})
		if got := f.lastPeer(); got != peer {
			t.Errorf("%s: the client is %q, want %q", what, got, peer)
		}
	}
	testErr := func(what, want string) {
		t.Helper()
		f.hangUp()
		testutil.Eventually(t, testTimeout, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			if _, _, err := c.Get(ctx, "p/a"); err == nil || !strings.Contains(err.Error(), want) {
				return fmt.Errorf("%s: error %v, want one with %q", what, err, want)
			}
			return nil
		})
	}

	testErr("no file is there yet", cfg.CAFile)
	mustWriteFile(t, cfg.CAFile, old.pem)
	testErr("the certificate is not there yet", cfg.CertFile)
	cert, key := old.leaf(t, "remote-1")
	mustWriteFile(t, cfg.CertFile, cert)
	mustWriteFile(t, cfg.KeyFile, key)
	get("all are there", "remote-1")

	cert, key = old.leaf(t, "remote-2")
	mustWriteFile(t, cfg.CertFile, cert)
	get("the certificate does not fit the key", "remote-1")
	mustWriteFile(t, cfg.KeyFile, key)
	get("it does", "remote-2")

	fresh := newAuthority(t)
	mustWriteFile(t, cfg.CAFile, append(fresh.pem, old.pem...))
	get("old and new authority", "remote-2")
	f.serve(t, fresh, "west.mesh.cilium.io")
	cert, key = fresh.leaf(t, "remote-3")
	mustWriteFile(t, cfg.CertFile, cert)
	mustWriteFile(t, cfg.KeyFile, key)
	get("the new authority serves", "remote-3")
	mustWriteFile(t, cfg.CAFile, []byte("nothing"))
	get("the authorities are unreadable", "remote-3")

	f.serve(t, fresh, "east.mesh.cilium.io")
	testErr("another name", "east.mesh.cilium.io")
	f.serve(t, newAuthority(t), "west.mesh.cilium.io")
	testErr("another authority", "unknown authority")
}

// Each way in which TLS can fail has its own text, that of a client's
// certificate being refused included, which with TLS 1.3 comes after the
// handshake.
// lesson: T2
func TestTLSFailuresHaveTheirTexts(t *testing.T) {
	e := testutil.StartEtcd(t)
	f := newTLSFront(t, e)
	ca, dir := newAuthority(t), t.TempDir()
	cfg := Config{
		CAFile: filepath.Join(dir, "ca"), CertFile: filepath.Join(dir, "cert"), KeyFile: filepath.Join(dir, "key"),
		HostAliases: []HostAlias{{Hostname: "west.mesh.cilium.io", IPs: loopback}},
		Endpoints:   []string{"https://west.mesh.cilium.io:" + frontPort(f)},
	}
	mustWriteFile(t, cfg.CAFile, ca.pem)
	writePair := func(by *authority) {
		cert, key := by.leaf(t, "remote")
		mustWriteFile(t, cfg.CertFile, cert)
		mustWriteFile(t, cfg.KeyFile, key)
	}
	writePair(ca)
	only12 := func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }
	for _, step := range []struct {
		want   string // "": it works
		minTLS string
		leaf   func(*x509.Certificate)
		front  func(*tls.Config)
		client *authority
	}{
		{want: "certificate has expired", leaf: func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }},
		{want: "not yet valid", leaf: func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) }},
		{want: "valid for east.mesh.cilium.io", leaf: func(c *x509.Certificate) { c.DNSNames = []string{"east.mesh.cilium.io"} }},
		{want: "use SANs instead", leaf: func(c *x509.Certificate) { c.DNSNames = nil }},
		{want: "incompatible key usage", leaf: func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }},
		{want: "protocol version not supported", front: only12},
		{front: only12, minTLS: "1.2"},
		{want: "refused by the server, look at the client's certificate", client: newAuthority(t)},
		{client: ca},
	} {
		if step.client != nil {
			writePair(step.client)
		}
		f.present(t, ca, func(c *x509.Certificate) {
			if step.leaf != nil {
				step.leaf(c)
			}
		}, step.front)
		c := mustDial(t, e, func(c *Config) { *c = cfg; c.MinTLS = step.minTLS })
		impatient(c)
		testutil.Eventually(t, testTimeout, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			_, _, err := c.Get(ctx, "p/a")
			if step.want == "" || err == nil {
				return err
			}
			if !strings.Contains(err.Error(), step.want) {
				return fmt.Errorf("error %v, want one with %q", err, step.want)
			}
			return nil
		})
		c.Close()
	}
}

// lesson: T3
func TestStatusTellsWhenCertificatesExpire(t *testing.T) {
	e := testutil.StartEtcd(t)
	f := newTLSFront(t, e)
	ca, dir := newAuthority(t), t.TempDir()
	client, server := time.Now().Add(24*time.Hour).Truncate(time.Second), time.Now().Add(48*time.Hour).Truncate(time.Second)
	cert, key := ca.leaf(t, "remote", func(c *x509.Certificate) { c.NotAfter = client })
	cfg := Config{
		CAFile: filepath.Join(dir, "ca"), CertFile: filepath.Join(dir, "cert"), KeyFile: filepath.Join(dir, "key"),
		HostAliases: []HostAlias{{Hostname: "west.mesh.cilium.io", IPs: loopback}},
		Endpoints:   []string{"https://west.mesh.cilium.io:" + frontPort(f)},
	}
	mustWriteFile(t, cfg.CAFile, ca.pem)
	mustWriteFile(t, cfg.CertFile, cert)
	mustWriteFile(t, cfg.KeyFile, key)
	f.present(t, ca, func(c *x509.Certificate) {
		c.DNSNames, c.NotAfter = []string{"west.mesh.cilium.io"}, server
	}, nil)
	c := mustDial(t, e, func(c *Config) { *c = cfg })
	if _, _, err := c.Get(t.Context(), "p/a"); err != nil {
		t.Fatal(err)
	}
	if s := c.Status(); !s.CertNotAfter.Equal(client) || !s.ServerCertNotAfter.Equal(server) {
		t.Errorf("good until %s and %s, want %s and %s", s.CertNotAfter, s.ServerCertNotAfter, client, server)
	}
}

func frontPort(f *tlsFront) string {
	_, port, err := net.SplitHostPort(f.listener.Addr().String())
	if err != nil {
		panic(err)
	}
	return port
}
