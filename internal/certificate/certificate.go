// SPDX-License-Identifier: Apache-2.0

// Package certificate makes authorities and the certificates that they sign, as PEM. Where those are kept, and who gets them, is
// its callers' business.
package certificate

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"time"
)

// Authority signs certificates. It is safe for concurrent use.
type Authority struct {
	PEM  []byte // its own certificate
	cert *x509.Certificate
	key  crypto.Signer
}

// NewAuthority makes an authority that is good for ten years either way.
func NewAuthority(name string) (*Authority, error) {
	key, err := NewKey()
	if err != nil {
		return nil, err
	}
	return MakeAuthority(name, key, time.Now().AddDate(-10, 0, 0), time.Now().AddDate(10, 0, 0))
}

// MakeAuthority makes an authority of a key, which is good from one time to another.
func MakeAuthority(name string, key crypto.Signer, from, until time.Time) (*Authority, error) {
	number, err := serial()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: number, Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: from, NotAfter: until,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("certificate authority %s: %w", name, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("certificate authority %s: %w", name, err)
	}
	return AuthorityOf(cert, key), nil
}

// AuthorityOf returns the authority that has a certificate and its key already.
func AuthorityOf(cert *x509.Certificate, key crypto.Signer) *Authority {
	return &Authority{PEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw}), cert: cert, key: key}
}

// Certificate returns the authority's own, which must not be changed.
func (a *Authority) Certificate() *x509.Certificate { return a.cert }

// Request says what an authority is to sign. Zero values: no names, valid from an hour ago to an hour from now, for servers
// and clients, with an ECDSA P-256 key of its own.
type Request struct {
	CommonName          string
	Hosts               []string // DNS names and addresses
	NotBefore, NotAfter time.Time
	Usage               []x509.ExtKeyUsage
	Key                 crypto.Signer
}

// Issue returns a certificate and its key as PEM.
func (a *Authority) Issue(r Request) (cert, key []byte, err error) {
	number, err := serial()
	if err != nil {
		return nil, nil, err
	}
	if r.Key == nil {
		if r.Key, err = NewKey(); err != nil {
			return nil, nil, err
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, r.template(number), a.cert, r.Key.Public(), a.key)
	if err != nil {
		return nil, nil, fmt.Errorf("certificate %s: %w", r.CommonName, err)
	}
	if key, err = MarshalKey(r.Key); err != nil {
		return nil, nil, fmt.Errorf("certificate %s: %w", r.CommonName, err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), key, nil
}

func (r *Request) template(number *big.Int) *x509.Certificate {
	template := &x509.Certificate{
		SerialNumber: number, Subject: pkix.Name{CommonName: r.CommonName}, KeyUsage: x509.KeyUsageDigitalSignature,
		NotBefore: r.NotBefore, NotAfter: r.NotAfter, ExtKeyUsage: r.Usage,
	}
	if r.NotBefore.IsZero() {
		template.NotBefore = time.Now().Add(-time.Hour)
	}
	if r.NotAfter.IsZero() {
		template.NotAfter = time.Now().Add(time.Hour)
	}
	if r.Usage == nil {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	}
	for _, host := range r.Hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	return template
}

// NewKey makes an ECDSA P-256 key.
func NewKey() (crypto.Signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	return key, nil
}

// MarshalKey returns a key as PEM.
func MarshalKey(key crypto.Signer) ([]byte, error) {
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("write a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), nil
}

func serial() (*big.Int, error) {
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, fmt.Errorf("number of a certificate: %w", err)
	}
	return n, nil
}
