// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// secured returns a client of an etcd that wants certificates, and the files of
// its own. The client goes through p.
func secured(t *testing.T, p *testutil.Proxy, ca *testutil.CA, client testutil.Certificate) *Client {
	t.Helper()
	dir := t.TempDir()
	c := dialAt(t, []string{"https://" + p.Addr()}, func(c *Config) {
		c.CAFile, c.CertFile, c.KeyFile = filepath.Join(dir, "ca"), filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	})
	testutil.MustWriteFile(t, c.cfg.CAFile, ca.PEM)
	cert, key := ca.Issue(t, client)
	testutil.MustWriteFile(t, c.cfg.CertFile, cert)
	testutil.MustWriteFile(t, c.cfg.KeyFile, key)
	return c
}

// Leaf and authority of both sides are replaced, one file after the other and
// with connections breaking in between: the watch goes on without a list, and
// misses nothing.
// lesson: T1
func TestFaultRotation(t *testing.T) {
	t.Parallel()
	old, fresh := testutil.NewCA(t, "old"), testutil.NewCA(t, "new")
	bundle := slices.Concat(old.PEM, fresh.PEM)
	e := testutil.StartEtcd(t, testutil.WithTLS(old))
	p, quiet := testutil.StartProxy(t, e.Addr()), testutil.StartProxy(t, e.Addr())
	c := secured(t, p, old, testutil.Certificate{CommonName: "remote"})
	r, want := newRecorder(), map[string]string{"0": "v"}
	e.Put(t, "p/0", "v")
	w := NewWatcher("p/", r.deliver)
	// The watch has a connection of its own, which breaks at some steps only:
	// it would wait longer each time otherwise.
	r.awaitStart(t, w, dialThrough(t, quiet, func(to *Config) {
		*to = c.cfg
		to.Endpoints = []string{"https://" + quiet.Addr()}
	}), want)
	if _, _, err := c.Get(t.Context(), "p/0"); err != nil {
		t.Fatal(err)
	}
	cert, key := old.Issue(t, testutil.Certificate{CommonName: "remote"})
	freshCert, freshKey := fresh.Issue(t, testutil.Certificate{CommonName: "remote"})
	for i, step := range []struct {
		name string
		do   func()
		cut  bool // also the watch's connection
	}{
		{"certificate without its key", func() { testutil.MustWriteFile(t, c.cfg.CertFile, cert) }, true},
		{"its key", func() { testutil.MustWriteFile(t, c.cfg.KeyFile, key) }, false},
		{"server's leaf", func() { e.Present(t, old, testutil.Certificate{}) }, false},
		{"both authorities at the client", func() { testutil.MustWriteFile(t, c.cfg.CAFile, bundle) }, false},
		{"both authorities at the server", func() { e.TrustClients(t, bundle); e.Restart(t) }, false},
		{"server's leaf of the new one", func() { e.Present(t, fresh, testutil.Certificate{}) }, true},
		{"key of the new one without its certificate", func() { testutil.MustWriteFile(t, c.cfg.KeyFile, freshKey) }, false},
		{"its certificate", func() { testutil.MustWriteFile(t, c.cfg.CertFile, freshCert) }, false},
		{"unreadable authorities", func() { testutil.MustWriteFile(t, c.cfg.CAFile, []byte("nothing")) }, false},
		{"the new authority at the client", func() { testutil.MustWriteFile(t, c.cfg.CAFile, fresh.PEM) }, false},
		{"the new authority at the server", func() { e.TrustClients(t, fresh.PEM); e.Restart(t) }, false},
	} {
		impatient(c)
		step.do()
		p.Cut()
		if step.cut {
			quiet.Cut()
		}
		want[fmt.Sprint(i)] = step.name
		e.Put(t, "p/"+fmt.Sprint(i), step.name)
		testutil.Eventually(t, time.Minute, func() error {
			_, _, err := c.Get(t.Context(), "p/0")
			if err = errors.Join(err, r.equals(want), live(w)()); err != nil {
				return fmt.Errorf("%s: %w", step.name, err)
			}
			return nil
		})
	}
	r.check(t)
	if s := w.Status(); s.Lists != 1 {
		t.Errorf("%d lists", s.Lists)
	}
}

// Keys of every common kind work, and what etcd thinks of a client's
// certificate is told, though with TLS 1.3 it shows up after the handshake only.
// lesson: T2
func TestFaultClientCertificates(t *testing.T) {
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	_, edKey, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ca := testutil.NewCA(t, "ca")
	e := testutil.StartEtcd(t, testutil.WithTLS(ca))
	e.Put(t, "p/a", "1")
	for name, key := range map[string]crypto.Signer{"ECDSA": nil, "RSA": rsaKey, "Ed25519": edKey} {
		p := testutil.StartProxy(t, e.Addr())
		c := secured(t, p, ca, testutil.Certificate{CommonName: "remote", Key: key})
		if _, ok, err := c.Get(t.Context(), "p/a"); !ok || err != nil {
			t.Errorf("%s: %v, %v", name, ok, err)
		}
	}
	stranger := testutil.NewCA(t, "stranger")
	for name, bad := range map[string]func(p *testutil.Proxy) *Client{
		"expired": func(p *testutil.Proxy) *Client {
			return secured(t, p, ca, testutil.Certificate{CommonName: "remote", NotAfter: time.Now().Add(-time.Minute)})
		},
		"of another authority": func(p *testutil.Proxy) *Client {
			c := secured(t, p, stranger, testutil.Certificate{CommonName: "remote"})
			testutil.MustWriteFile(t, c.cfg.CAFile, ca.PEM)
			return c
		},
	} {
		c := bad(testutil.StartProxy(t, e.Addr()))
		testutil.Eventually(t, testTimeout, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			_, _, err := c.Get(ctx, "p/a")
			if cause := c.Status().LastError; err == nil || cause == nil || !strings.Contains(cause.Error(), "look at the client's certificate") {
				return fmt.Errorf("%s: the error is %v, the status tells %v", name, err, cause)
			}
			return nil
		})
		t.Logf("%s: %v", name, c.Status().LastError)
	}
}
