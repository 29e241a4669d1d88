// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"os"
	"path/filepath"
	"testing"

	"go.etcd.io/etcd/server/v3/embed"

	"github.com/weftmesh/weft/internal/certificate"
)

// CA signs certificates.
type CA struct{ *certificate.Authority }

// NewCA makes an authority that is good for ten years either way.
func NewCA(t testing.TB, name string) *CA {
	t.Helper()
	authority, err := certificate.NewAuthority(name)
	if err != nil {
		t.Fatal(err)
	}
	return &CA{authority}
}

// Certificate says what a CA is to sign.
type Certificate = certificate.Request

// Issue returns a certificate and its key as PEM.
func (ca *CA) Issue(t testing.TB, c Certificate) (cert, key []byte) {
	t.Helper()
	cert, key, err := ca.Authority.Issue(c)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

// MustWriteFile writes a file that nobody else may read. It appears with one rename, never half written.
func MustWriteFile(t testing.TB, file string, content []byte) {
	t.Helper()
	tmp := file + ".new"
	err := os.WriteFile(tmp, content, 0o600)
	if err == nil {
		err = os.Rename(tmp, file)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// serverFiles are the TLS files of an Etcd.
type serverFiles struct{ dir string }

func (f *serverFiles) ca() string   { return filepath.Join(f.dir, "ca.crt") }
func (f *serverFiles) cert() string { return filepath.Join(f.dir, "etcd.crt") }
func (f *serverFiles) key() string  { return filepath.Join(f.dir, "etcd.key") }

func (f *serverFiles) configure(cfg *embed.Config) {
	tls := &cfg.ClientTLSInfo
	tls.CertFile, tls.KeyFile, tls.TrustedCAFile, tls.ClientCertAuth = f.cert(), f.key(), f.ca(), true
}

// ServerHosts are the names of a server certificate, as clustermesh-apiserver has them.
var ServerHosts = []string{"*.mesh.cilium.io", "localhost", "127.0.0.1", "::1"}

// WithTLS has the server speak TLS with a certificate of ca for ServerHosts, and want one of ca from its clients.
func WithTLS(ca *CA) EtcdOption {
	return func(t testing.TB, e *Etcd) {
		t.Helper()
		e.scheme, e.tls = "https", &serverFiles{t.TempDir()}
		e.TrustClients(t, ca.PEM)
		e.Present(t, ca, Certificate{})
	}
}

// WithTLSFiles has the server speak TLS with etcd.crt, etcd.key and ca.crt of a directory, and want a certificate of that
// authority from its clients.
func WithTLSFiles(dir string) EtcdOption {
	return func(_ testing.TB, e *Etcd) { e.scheme, e.tls = "https", &serverFiles{dir} }
}

// Present has the server show another certificate from the next handshake on; without hosts, one for ServerHosts.
func (e *Etcd) Present(t testing.TB, ca *CA, c Certificate) {
	t.Helper()
	if c.CommonName == "" {
		c.CommonName = "clustermesh-apiserver.kube-system.svc"
	}
	if c.Hosts == nil {
		c.Hosts = ServerHosts
	}
	cert, key := ca.Issue(t, c)
	MustWriteFile(t, e.tls.cert(), cert)
	MustWriteFile(t, e.tls.key(), key)
}

// TrustClients has the server accept clients of other authorities from the next start on.
func (e *Etcd) TrustClients(t testing.TB, authorities []byte) {
	t.Helper()
	MustWriteFile(t, e.tls.ca(), authorities)
}
