// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
)

// CA signs certificates.
type CA struct {
	PEM  []byte // its own certificate
	cert *x509.Certificate
	key  crypto.Signer
}

// NewCA makes an authority that is good for ten years either way.
func NewCA(t testing.TB, name string) *CA {
	t.Helper()
	ca := &CA{key: newKey(t)}
	template := &x509.Certificate{
		SerialNumber: serial(t), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage:  x509.KeyUsageCertSign,
		NotBefore: time.Now().AddDate(-10, 0, 0), NotAfter: time.Now().AddDate(10, 0, 0),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, ca.key.Public(), ca.key)
	if err == nil {
		ca.cert, err = x509.ParseCertificate(der)
	}
	if err != nil {
		t.Fatalf("certificate authority %s: %v", name, err)
	}
	ca.PEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return ca
}

// Certificate says what a CA is to sign. Zero values: no names, valid from an hour ago to an hour from now, for servers
// and clients, with an ECDSA P-256 key of its own.
type Certificate struct {
	CommonName          string
	Hosts               []string // DNS names and addresses
	NotBefore, NotAfter time.Time
	Usage               []x509.ExtKeyUsage
	Key                 crypto.Signer
}

// Issue returns a certificate and its key as PEM.
func (ca *CA) Issue(t testing.TB, c Certificate) (cert, key []byte) {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: serial(t), Subject: pkix.Name{CommonName: c.CommonName}, KeyUsage: x509.KeyUsageDigitalSignature,
		NotBefore: c.NotBefore, NotAfter: c.NotAfter, ExtKeyUsage: c.Usage,
	}
	if c.NotBefore.IsZero() {
		template.NotBefore = time.Now().Add(-time.Hour)
	}
	if c.NotAfter.IsZero() {
		template.NotAfter = time.Now().Add(time.Hour)
	}
	if c.Usage == nil {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	}
	for _, host := range c.Hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	if c.Key == nil {
		c.Key = newKey(t)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, c.Key.Public(), ca.key)
	if err != nil {
		t.Fatalf("certificate %s: %v", c.CommonName, err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(c.Key)
	if err != nil {
		t.Fatalf("key of certificate %s: %v", c.CommonName, err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw})
}

func newKey(t testing.TB) crypto.Signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func serial(t testing.TB) *big.Int {
	t.Helper()
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		t.Fatal(err)
	}
	return n
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
func (f *serverFiles) cert() string { return filepath.Join(f.dir, "server.crt") }
func (f *serverFiles) key() string  { return filepath.Join(f.dir, "server.key") }

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
