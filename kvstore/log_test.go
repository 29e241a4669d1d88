// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// dialLogging returns a client that logs into j.
func dialLogging(t testing.TB, j *journal, cfg Config) *Client {
	t.Helper()
	c, err := Dial(cfg, j.logger())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// awaits waits until a line of the log holds all the texts.
func (j *journal) awaits(t testing.TB, texts ...string) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		if j.count(texts...) == 0 {
			return fmt.Errorf("no line of the log holds %q", texts)
		}
		return nil
	})
}

// Files that are not there yet are waited for, and those that are not good any
// more are done without; either is logged once, however often they are read.
// mechanism: C4, R2
func TestMissingFilesAreLogged(t *testing.T) {
	t.Parallel()
	ca, dir := testutil.NewCA(t, "ca"), t.TempDir()
	e := testutil.StartEtcd(t, testutil.WithTLS(ca))
	p := testutil.StartProxy(t, e.Addr())
	cfg := Config{Endpoints: []string{"https://" + p.Addr()}, CAFile: filepath.Join(dir, "ca.crt"),
		CertFile: filepath.Join(dir, "client.crt"), KeyFile: filepath.Join(dir, "client.key")}
	var j journal
	c := dialLogging(t, &j, cfg)
	impatient(c)
	get := func() error { _, _, err := c.Get(t.Context(), "p/a"); return err }
	start(t, func(ctx context.Context) error { return NewWatcher("p/", func([]Event) {}).Run(ctx, c) })
	j.awaits(t, "level=WARN", "waiting for TLS files", "ca.crt")
	testutil.MustWriteFile(t, cfg.CAFile, ca.PEM)
	j.awaits(t, "level=WARN", "waiting for TLS files", "client.crt", "client.key")
	cert, key := ca.Issue(t, testutil.Certificate{CommonName: "remote"})
	testutil.MustWriteFile(t, cfg.KeyFile, key)
	testutil.MustWriteFile(t, cfg.CertFile, cert)
	if err := get(); err != nil {
		t.Fatal(err)
	}
	j.awaits(t, "level=INFO", "TLS files can be used again")

	testutil.MustWriteFile(t, cfg.CAFile, []byte("nothing"))
	for range 5 {
		p.Cut()
		testutil.Eventually(t, testTimeout, get)
	}
	j.awaits(t, "those before stay", "ca.crt: no PEM certificate")
	for _, file := range []string{"waiting for TLS files\" err=\"certificate authorities", "those before stay"} {
		j.has(t, 1, file)
	}
}

// The leases of the keys and of the locks are two, and the log names them.
// mechanism: C7, R2
func TestLeasesAreLogged(t *testing.T) {
	t.Parallel()
	e := testutil.StartEtcd(t)
	var j journal
	c := dialLogging(t, &j, Config{Endpoints: []string{e.Endpoint()}})
	w, _ := mustWrite(t, c, WriterConfig{Log: j.logger()})
	w.Set("p/a", []byte("1"))
	holds(t, e, map[string]string{"a": "1"})
	lock, err := c.Lock(t.Context(), lockPath)
	if err != nil {
		t.Fatal(err)
	}
	keys, _ := leaseOf(t, e, "p/a")
	j.has(t, 1, "level=INFO", "etcd lease granted", "lease="+LeaseID(keys).String(), "ttl=15m0s")
	j.has(t, 1, "level=INFO", "etcd lease granted", "lease="+lock.lease.Lease().String(), "ttl=25s")
	revoke(t, e, keys)
	w.Set("p/b", []byte("1"))
	holds(t, e, map[string]string{"a": "1", "b": "1"})
	j.awaits(t, "level=WARN", "etcd lease lost", "lease="+LeaseID(keys).String())
	if err := lock.Unlock(t.Context()); err != nil {
		t.Error(err)
	}
}

// An etcd that has never answered is told of after a while, once and with what
// to do, and followed when it comes. One that answers, and one that nobody asks,
// are not.
// mechanism: C8, R2
func TestInitialTimeoutIsLogged(t *testing.T) {
	t.Parallel()
	e := testutil.StartEtcd(t)
	want := fill(t, e, 3)
	p := testutil.StartProxy(t, e.Addr())
	p.Refuse()
	cfg := Config{Endpoints: []string{p.Endpoint()}, InitialTimeout: 500 * time.Millisecond}
	var j, well, unused journal
	c := dialLogging(t, &j, cfg)
	c.status.failed(syscall.ECONNREFUSED) // as the first attempt will find, if it comes before the time is over
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	run := start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
	at := cfg
	at.Endpoints = []string{e.Endpoint()}
	o, answered := newRecorder(), dialLogging(t, &well, at)
	if _, _, err := answered.Get(t.Context(), "p/a"); err != nil { // however slow the machine, before the clock runs
		t.Fatal(err)
	}
	o.awaitStart(t, NewWatcher("p/", o.deliver), answered, want)
	dialLogging(t, &unused, cfg)
	j.awaits(t, "level=ERROR", "timed out while waiting for etcd", p.Endpoint(), "see that it runs", "connection refused")
	p.Forward()
	testutil.Eventually(t, time.Minute, live(w))
	r.is(t, want)
	if err := run.stop(); err != nil {
		t.Error(err)
	}
	j.has(t, 1, "timed out")
	well.has(t, 0, "timed out")
	unused.has(t, 0, "timed out")
}

// Errors wait for nobody to read them: the last one is in the status.
// mechanism: C5
func TestErrorsBlockNobody(t *testing.T) {
	t.Parallel()
	e := testutil.StartEtcd(t)
	e.Stop(t)
	c := dialAt(t, []string{e.Endpoint()})
	impatient(c)
	var told sync.WaitGroup
	for i := range 1_000 {
		told.Go(func() { c.status.failed(fmt.Errorf("error %d", i)) })
	}
	told.Wait()
	last := errors.New("the last one")
	c.status.failed(last)
	if s := c.Status(); s.State != Failed || !errors.Is(s.LastError, last) || time.Since(s.LastErrorAt) > time.Minute {
		t.Errorf("status %+v", s)
	}
	e.Restart(t)
	if _, _, err := c.Get(t.Context(), "p/a"); err != nil {
		t.Error(err)
	}
}

// At the end the keys' lease is given back before the client closes, and a
// lease that cannot be given back is told of. A client that never had an
// answer closes as well.
// mechanism: C12
func TestCloseRevokesThenEnds(t *testing.T) {
	t.Parallel()
	e := testutil.StartEtcd(t)
	c := dialAt(t, []string{e.Endpoint()})
	w, run := mustWrite(t, c, WriterConfig{RevokeOnClose: true})
	w.Set("p/a", []byte("1"))
	holds(t, e, map[string]string{"a": "1"})
	locker := dialAt(t, []string{e.Endpoint()})
	lock, err := locker.Lock(t.Context(), lockPath)
	if err == nil {
		err = lock.Unlock(t.Context())
	}
	if err == nil {
		err = errors.Join(run.stop(), locker.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	holds(t, e, map[string]string{})
	if leases, err := c.Leases(t.Context()); err != nil || len(leases) != 0 || c.Status().Leases != 0 {
		t.Errorf("leases %v are left, %d of them of the writer's, %v", leases, c.Status().Leases, err)
	}

	w, run = mustWrite(t, c, WriterConfig{RevokeOnClose: true})
	w.Set("p/a", []byte("1"))
	holds(t, e, map[string]string{"a": "1"})
	settled(t, w)
	e.Stop(t)
	if err := run.stop(); err == nil {
		t.Error("a lease that could not be revoked is not told of")
	}
	never, err := Dial(Config{Endpoints: []string{e.Endpoint()}}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Close(), never.Close()); err != nil {
		t.Error(err)
	}
}
