// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// Who has the certificate of the user remote may read what remote may, and
// nothing else.
func TestEtcdWithTLSAndAuth(t *testing.T) {
	ca := NewCA(t, "ca")
	e := StartEtcd(t, WithTLS(ca), WithAuth("east"))
	e.Put(t, "cilium/state/a", "1")
	e.Put(t, "cilium/cache/a", "1")
	e.Restart(t)
	if v, ok := e.Get(t, "cilium/state/a"); !ok || v != "1" {
		t.Errorf("after the restart: %q, %v", v, ok)
	}
	cert, key := ca.Issue(t, Certificate{CommonName: "remote"})
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.PEM)
	c, err := clientv3.New(clientv3.Config{
		Endpoints: []string{e.Endpoint()}, Logger: zap.NewNop(),
		TLS: &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots, ServerName: "west.mesh.cilium.io"},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), etcdOpTimeout)
	defer cancel()
	for key, want := range map[string]string{
		"cilium/state/a": "", "cilium/cluster-config/east": "", "cilium/synced/east/x": "",
		"cilium/cache/a": "permission denied", "cilium/cluster-config/west": "permission denied",
	} {
		_, err := c.Get(ctx, key)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("get %s: %v, want %q", key, err, want)
		}
	}
	if _, err := c.Put(ctx, "cilium/state/a", "2"); err == nil {
		t.Error("remote may write")
	}
	e.Raise(t)
	if _, err := e.Client().Put(ctx, "cilium/state/a", "2"); err == nil || !strings.Contains(err.Error(), "space") {
		t.Errorf("a write during the alarm: %v", err)
	}
	e.Disarm(t)
	e.Put(t, "cilium/state/a", "2")
}

func TestEtcdCluster(t *testing.T) {
	c := StartEtcdCluster(t, 3)
	first := c.Leader(t)
	first.Put(t, "a", "1")
	c.Isolate(first)
	Eventually(t, 10*time.Second, func() error {
		if next := c.Leader(t); next == first {
			return context.DeadlineExceeded
		}
		return nil
	})
	c.Leader(t).Put(t, "a", "2")
	c.Rejoin(t, first)
	if v, _ := first.Get(t, "a"); v != "2" {
		t.Errorf("the member that was apart says %q", v)
	}
	next := c.Leader(t)
	next.Stop(t)
	c.Leader(t).Put(t, "a", "3")
	next.Restart(t)
	if v, _ := next.Get(t, "a"); v != "3" {
		t.Errorf("the member that was stopped says %q", v)
	}
}

func TestEtcdProcess(t *testing.T) {
	e := StartEtcd34(t)
	e.Put(t, "a", "1")
	e.Kill(t)
	e.Restart(t)
	if v, _ := e.Get(t, "a"); v != "1" {
		t.Errorf("after the kill: %q", v)
	}
	s, err := e.Client().Status(t.Context(), e.Endpoint())
	if err != nil || !strings.HasPrefix(s.Version, "3.4.") {
		t.Errorf("version %v, %v", s, err)
	}
}

func TestGRPCProxy(t *testing.T) {
	e := StartEtcd(t)
	e.Put(t, "a", "1")
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{StartGRPCProxy(t, e.Endpoint())}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), etcdOpTimeout)
	defer cancel()
	watch := c.Watch(ctx, "a", clientv3.WithRev(1))
	if got := <-watch; len(got.Events) != 1 {
		t.Errorf("watched %+v", got)
	}
}
