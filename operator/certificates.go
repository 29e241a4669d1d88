// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/weftmesh/weft/internal/certificate"
)

// CertificatesConfig says which certificates a directory is to have, each with its key: NAME.crt and NAME.key.
type CertificatesConfig struct {
	Dir   string
	Users []string // a client's certificate for each, of that common name
	// Server are the names and addresses by which clients reach the etcd, whose certificate is etcd.crt. Without any, that is somebody else's affair.
	Server []string
	// Lifetime is how long a certificate is good; one is renewed in the last third of it. An authority lasts ten times as long.
	Lifetime time.Duration
	Dry      bool // tell what would be done
}

// CertificateChange is a certificate that is made, or made anew.
type CertificateChange struct {
	Action   string    `json:"action"` // make or renew
	File     string    `json:"file"`
	NotAfter time.Time `json:"notAfter"`
	Why      string    `json:"why,omitempty"` // it is renewed
}

// String says it in words.
func (c CertificateChange) String() string {
	text := fmt.Sprintf("%s certificate %s, good until %s", c.Action, c.File, c.NotAfter.UTC().Format(time.DateOnly))
	if c.Why != "" {
		text += ": " + c.Why
	}
	return text
}

const (
	authorityName = "ca"
	serverName    = "etcd"
	// authorityLives is how many lifetimes of a certificate an authority lasts.
	authorityLives = 10
	// clockSkew is how far behind the clocks of others may be.
	clockSkew = 5 * time.Minute
)

// MakeCertificates makes what is missing of the certificates of a directory, and renews what is near its end, is not the
// authority's, or has not all the names that it should; a renewed certificate keeps its key where that is there. Done again it
// does nothing. An authority that is there, with its key, is used. Without its key nothing can be signed: then all must be
// there, and the error names what is not.
//
// What was done before an error stays, and is returned with it.
func MakeCertificates(cfg CertificatesConfig, now time.Time) ([]CertificateChange, error) {
	m := &certificateMaker{cfg: cfg, now: now}
	if !cfg.Dry {
		if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
			return nil, err
		}
	}
	if err := m.authority(); err != nil {
		return m.done, err
	}
	wanted := make([]wantedCertificate, 0, len(cfg.Users)+1)
	if len(cfg.Server) > 0 {
		wanted = append(wanted, wantedCertificate{serverName, cfg.Server})
	}
	for _, user := range cfg.Users {
		wanted = append(wanted, wantedCertificate{user, nil})
	}
	var errs []error
	for _, w := range wanted {
		errs = append(errs, m.see(w))
	}
	return m.done, errors.Join(errs...)
}

// wantedCertificate is of a client, or, with the names and addresses of a server, of one.
type wantedCertificate struct {
	name  string
	hosts []string
}

// certificateMaker works on one directory.
type certificateMaker struct {
	cfg  CertificatesConfig
	now  time.Time
	ca   *x509.Certificate
	sign *certificate.Authority // nil: its key is elsewhere
	done []CertificateChange
}

func (m *certificateMaker) file(name, kind string) string { return filepath.Join(m.cfg.Dir, name+kind) }

// authority reads the one that is there, or makes one.
func (m *certificateMaker) authority() error {
	crt, keyFile := m.file(authorityName, ".crt"), m.file(authorityName, ".key")
	key, err := readKey(keyFile)
	if err != nil {
		return err
	}
	m.ca, err = readCertificate(crt)
	switch {
	case err != nil:
		return err
	case m.ca == nil:
		return m.makeAuthority(key)
	case !m.ca.IsCA:
		return fmt.Errorf("%s is not the certificate of an authority: put another there, or move it away and one is made", crt)
	case m.now.After(m.ca.NotAfter):
		return fmt.Errorf("%s ended on %s: move it and its key away, and give the one that is made then to all who trust it", crt,
			m.ca.NotAfter.UTC().Format(time.DateTime))
	case key == nil:
		return nil
	case !sameKey(key, m.ca.PublicKey):
		return fmt.Errorf("%s is not the key of %s: put the right one there, or move both away", keyFile, crt)
	}
	m.sign = certificate.AuthorityOf(m.ca, key)
	return nil
}

func (m *certificateMaker) makeAuthority(key crypto.Signer) (err error) {
	if key == nil {
		if key, err = certificate.NewKey(); err != nil {
			return err
		}
		text, err := certificate.MarshalKey(key)
		if err != nil {
			return err
		}
		if err := m.write(m.file(authorityName, ".key"), text, 0o600); err != nil {
			return err
		}
	}
	until := m.now.Add(authorityLives * m.cfg.Lifetime)
	if m.sign, err = certificate.MakeAuthority("weft mesh authority", key, m.now.Add(-clockSkew), until); err != nil {
		return err
	}
	m.ca = m.sign.Certificate()
	m.done = append(m.done, CertificateChange{"make", m.file(authorityName, ".crt"), until, ""})
	return m.write(m.file(authorityName, ".crt"), m.sign.PEM, 0o644)
}

// see makes or renews a certificate if that is to be done.
func (m *certificateMaker) see(w wantedCertificate) error {
	crt := m.file(w.name, ".crt")
	there, err := readCertificate(crt)
	if err != nil {
		return err
	}
	key, err := readKey(m.file(w.name, ".key"))
	if err != nil {
		return err
	}
	change := CertificateChange{Action: "make", File: crt, NotAfter: earlier(m.now.Add(m.cfg.Lifetime), m.ca.NotAfter)}
	if there != nil {
		if there.Subject.CommonName != w.name {
			return fmt.Errorf("%s is of %q and not of %q: etcd would take who shows it for somebody else; move it away", crt, there.Subject.CommonName, w.name)
		}
		if change.Action, change.Why = "renew", m.fault(there, key, change.NotAfter, w.hosts); change.Why == "" {
			return nil
		}
	}
	if m.sign == nil {
		return fmt.Errorf("%s cannot be signed, as %s is not there%s: put the key there, or a certificate of that name that the authority signed",
			crt, m.file(authorityName, ".key"), because(change.Why))
	}
	request := certificate.Request{
		CommonName: w.name, Hosts: w.hosts, NotBefore: m.now.Add(-clockSkew), NotAfter: change.NotAfter, Key: key,
		Usage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if w.hosts != nil { // an etcd shows it to other members, too
		request.Usage = append(request.Usage, x509.ExtKeyUsageServerAuth)
	}
	made, text, err := m.sign.Issue(request)
	if err != nil {
		return err
	}
	if key == nil {
		if err := m.write(m.file(w.name, ".key"), text, 0o600); err != nil {
			return err
		}
	}
	m.done = append(m.done, change)
	return m.write(crt, made, 0o644)
}

// fault is what is wrong with a certificate that is there; empty: nothing.
func (m *certificateMaker) fault(there *x509.Certificate, key crypto.Signer, next time.Time, hosts []string) string {
	left, whole := there.NotAfter.Sub(m.now), there.NotAfter.Sub(there.NotBefore)
	switch {
	case key == nil:
		return "its key is gone"
	case !sameKey(key, there.PublicKey):
		return "it is of another key"
	case there.CheckSignatureFrom(m.ca) != nil:
		return "another authority signed it"
	case left < whole/3 && next.After(there.NotAfter.Add(clockSkew)):
		return "it ends on " + there.NotAfter.UTC().Format(time.DateOnly)
	}
	for _, host := range hosts {
		if there.VerifyHostname(host) != nil {
			return "it is not for " + host
		}
	}
	return ""
}

// write puts a file there in one step.
func (m *certificateMaker) write(file string, content []byte, mode fs.FileMode) error {
	if m.cfg.Dry {
		return nil
	}
	f, err := os.CreateTemp(m.cfg.Dir, ".new-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // after the rename there is nothing
	_, err = f.Write(content)
	if err := errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), file)
}

// readCertificate returns nil where there is no such file.
func readCertificate(file string) (*x509.Certificate, error) {
	block, err := readPEM(file, "CERTIFICATE")
	if err != nil || block == nil {
		return nil, err
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return c, nil
}

// readKey returns nil where there is no such file.
func readKey(file string) (crypto.Signer, error) {
	block, err := readPEM(file, "PRIVATE KEY")
	if err != nil || block == nil {
		return nil, err
	}
	var key any
	switch block.Type {
	case "EC PRIVATE KEY":
		key, err = x509.ParseECPrivateKey(block.Bytes)
	case "RSA PRIVATE KEY":
		key, err = x509.ParsePKCS1PrivateKey(block.Bytes)
	default:
		key, err = x509.ParsePKCS8PrivateKey(block.Bytes)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%s: a key of kind %T cannot sign", file, key)
	}
	return signer, nil
}

// readPEM returns the first block of a kind, among others, and nil where there is no such file.
func readPEM(file, kind string) (*pem.Block, error) {
	content, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for block := (*pem.Block)(nil); err == nil; {
		if block, content = pem.Decode(content); block == nil {
			err = fmt.Errorf("%s: there is no %s in it", file, kind)
		} else if strings.HasSuffix(block.Type, kind) {
			return block, nil
		}
	}
	return nil, err
}

// sameKey reports whether a key is the private half of another.
func sameKey(key crypto.Signer, public crypto.PublicKey) bool {
	own, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool })
	return ok && own.Equal(public)
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// because adds what is wrong to a sentence.
func because(why string) string {
	if why == "" {
		return ""
	}
	return " (" + why + ")"
}
