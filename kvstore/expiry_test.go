// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// journal is a log that a test reads.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (j *journal) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(b)
}

func (j *journal) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(j, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// count returns how many lines hold all the texts.
func (j *journal) count(texts ...string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := 0
	for line := range strings.Lines(j.text.String()) {
		all := true
		for _, text := range texts {
			all = all && strings.Contains(line, text)
		}
		if all {
			n++
		}
	}
	return n
}

// has fails the test unless n lines hold all the texts.
func (j *journal) has(t *testing.T, n int, texts ...string) {
	t.Helper()
	if got := j.count(texts...); got != n {
		j.mu.Lock()
		defer j.mu.Unlock()
		t.Errorf("%d lines hold %q, want %d, of\n%s", got, texts, n, j.text.String())
	}
}

// lesson: T3
func TestExpiry(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	for _, step := range []struct {
		left  time.Duration
		level ExpiryLevel
		text  string
	}{
		{1000 * day, ExpiryFar, ""},
		{30*day + 1, ExpiryFar, ""},
		{30 * day, ExpiryMonth, "ends in 30 days, on 2026-12-21 12:00:00"},
		{7*day + 1, ExpiryMonth, "ends in 7 days"},
		{7 * day, ExpiryWeek, "ends in 7 days"},
		{day + 1, ExpiryWeek, "ends in 1 day"},
		{day, ExpiryDay, "ends in 1 day"},
		{time.Hour, ExpiryDay, "ends in 1h0m0s"},
		{0, Expired, "ended 0s ago"},
		{-400 * day, Expired, "ended 400 days ago"},
	} {
		for role, name := range map[CertificateRole]string{
			ClientCertificate: "client certificate /etc/x of CN=west",
			ServerCertificate: "certificate of server /etc/x, of CN=west,",
			CACertificate:     "certificate authority CN=west of /etc/x",
		} {
			c := Certificate{Role: role, Of: "/etc/x", Subject: "CN=west", NotAfter: now.Add(step.left)}
			level, text := c.Expiry(now)
			if level != step.level || step.text == "" && text != "" || !strings.HasPrefix(text, name+" "+step.text) && step.text != "" {
				t.Errorf("%s with %s left: level %d, %q", role, step.left, level, text)
			}
		}
	}
}

// What comes near its end while an agent runs for months is logged once a
// level, whether connections are made meanwhile or not.
// lesson: T3
func TestExpiryIsLoggedOncePerLevel(t *testing.T) {
	for name, reconnects := range map[string]bool{"one connection": false, "many connections": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { testExpiryLog(t, reconnects) })
		})
	}
}

func testExpiryLog(t *testing.T, reconnects bool) {
	var j journal
	var client atomic.Pointer[Certificate]
	client.Store(&Certificate{ClientCertificate, "client.crt", "CN=remote", time.Now().Add(40 * day)})
	server := Certificate{ServerCertificate, "west:2379", "CN=west", time.Now().Add(35 * day)}
	ca := Certificate{CACertificate, "ca.crt", "CN=ca", time.Now().Add(1000 * day)}
	x := &expiry{log: j.logger(), reread: client.Load}
	defer x.stop()
	x.presents(client.Load())
	x.shown("west:2379", []Certificate{server, ca})
	x.shown("west2:2379", []Certificate{server, ca}) // the same by another name
	pass := func(days int) {
		for range days {
			if reconnects {
				for range 10 {
					x.presents(client.Load())
					x.shown("west:2379", []Certificate{server, ca})
				}
			}
			time.Sleep(day)
			synctest.Wait()
		}
		time.Sleep(expiryInterval) // the check is at most that late
		synctest.Wait()
	}
	expect := func(clientLines, serverLines, warnings int) {
		t.Helper()
		j.has(t, clientLines, "client certificate client.crt")
		j.has(t, serverLines, "certificate of server west:2379")
		var s Status
		if x.report(&s); len(s.Warnings) != warnings || len(s.Certificates) != 3 {
			t.Errorf("status %+v", s)
		}
	}
	pass(4)
	expect(0, 0, 0)
	pass(1) // 35
	expect(0, 1, 1)
	pass(5) // 30 of the client's
	expect(1, 1, 2)
	pass(18) // 7 of the server's
	expect(1, 2, 2)
	pass(5) // 7 of the client's
	expect(2, 2, 2)
	pass(1) // 1 of the server's
	expect(2, 3, 2)
	pass(1) // the server's has ended
	expect(2, 4, 2)
	j.has(t, 1, "level=ERROR", "has expired", "west:2379")
	renewed := *client.Load()
	renewed.NotAfter = time.Now().Add(31 * day)
	client.Store(&renewed)
	pass(0)
	expect(2, 4, 1)
	pass(1)
	expect(3, 4, 2)
	j.has(t, 0, "certificate authority")
}

// Certificates that end soon, as real servers and clients have them.
// lesson: T3
func TestExpiryOfRealCertificates(t *testing.T) {
	t.Parallel()
	ca := testutil.NewCA(t, "mesh-ca")
	e := testutil.StartEtcd(t, testutil.WithTLS(ca))
	e.Present(t, ca, testutil.Certificate{CommonName: "west", NotAfter: time.Now().Add(6 * day)})
	p := testutil.StartProxy(t, e.Addr())
	var j journal
	c := secured(t, p, ca, testutil.Certificate{CommonName: "remote", NotAfter: time.Now().Add(20 * time.Hour)})
	c.expiry.log = j.logger() // nothing is connected yet
	testutil.Eventually(t, time.Minute, func() error {
		_, _, err := c.Get(t.Context(), "p/a") // on a busy machine a handshake can take longer than it may
		return err
	})
	s := c.Status()
	if len(s.Certificates) != 3 || len(s.Warnings) != 2 || !strings.Contains(s.Warnings[0], c.cfg.CertFile) || !strings.Contains(s.Warnings[1], "CN=west") {
		t.Fatalf("status %+v", s)
	}
	if c := s.Certificates[0]; c.Role != CACertificate || c.Subject != "CN=mesh-ca" || time.Until(c.NotAfter) < 3000*day {
		t.Errorf("authority %+v", c)
	}
	j.has(t, 1, "level=WARN", "of CN=remote ends in ", "advice=")
	j.has(t, 1, "level=WARN", "certificate of server", "ends in 5 days")
	impatient(c)
	p.Cut()
	cert, key := ca.Issue(t, testutil.Certificate{CommonName: "remote", NotAfter: time.Now().Add(100 * day)})
	testutil.MustWriteFile(t, c.cfg.KeyFile, key)
	testutil.MustWriteFile(t, c.cfg.CertFile, cert)
	testutil.Eventually(t, testTimeout, func() error {
		c.expiry.tick() // as every hour, or as with a connection
		if s := c.Status(); len(s.Warnings) != 1 || !strings.Contains(s.Warnings[0], "CN=west") {
			return fmt.Errorf("warnings %q", s.Warnings)
		}
		return nil
	})
	j.has(t, 2, "level=WARN")
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	c.expiry.tick() // one that was under way
	if _, _, err := c.Get(t.Context(), "p/a"); err == nil || errors.Is(err, ErrHistoryChanged) {
		t.Errorf("of a closed client: %v", err)
	}
}
