// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"cmp"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// expiryInterval is how often certificates are looked at while a connection
// lasts, which may be for months.
const expiryInterval = time.Hour

// expiry keeps the certificates that a Client depends on, and logs once of each
// when it comes near its end. It runs on a timer that begins with the first
// certificate and ends with stop. Safe for concurrent use.
type expiry struct {
	log *slog.Logger
	// reread reads the client's certificate, which may be another than that
	// of the last handshake; nil where there is none.
	reread func() *Certificate

	mu      sync.Mutex
	timer   *time.Timer
	client  *Certificate
	servers map[string][]Certificate    // by endpoint
	logged  map[Certificate]ExpiryLevel // up to which it was told
	stopped bool
}

// presents takes the client's certificate, nil if there is none.
func (x *expiry) presents(c *Certificate) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.client = c
	x.check()
}

// shown takes what the server at an endpoint has shown.
func (x *expiry) shown(endpoint string, certificates []Certificate) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.servers == nil {
		x.servers = make(map[string][]Certificate)
	}
	x.servers[endpoint] = certificates
	x.check()
}

// tick is what the timer does.
func (x *expiry) tick() { x.presents(x.reread()) }

// check logs what has come nearer its end, and sets the timer. The caller holds
// mu.
func (x *expiry) check() {
	if x.stopped {
		return
	}
	now, logged := time.Now(), make(map[Certificate]ExpiryLevel)
	for _, c := range x.held() {
		level, text := c.Expiry(now)
		switch {
		case level <= x.logged[c]:
			level = x.logged[c] // the clock went back
		case level == Expired:
			x.log.Error("certificate has expired: "+text, "advice", c.renewal())
		default:
			x.log.Warn("certificate expires soon: "+text, "advice", c.renewal())
		}
		logged[c] = level
	}
	x.logged = logged
	if x.timer == nil {
		x.timer = time.AfterFunc(expiryInterval, x.tick)
	}
	x.timer.Reset(expiryInterval)
}

// held returns the certificates, each once. The caller holds mu.
func (x *expiry) held() []Certificate {
	var all []Certificate
	if x.client != nil {
		all = append(all, *x.client)
	}
	for _, certificates := range x.servers {
		all = append(all, certificates...)
	}
	slices.SortFunc(all, func(a, b Certificate) int {
		return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(a.Of, b.Of), a.NotAfter.Compare(b.NotAfter), cmp.Compare(a.Subject, b.Subject))
	})
	return slices.Compact(all)
}

// report fills in what Status tells of certificates.
func (x *expiry) report(s *Status) {
	x.mu.Lock()
	defer x.mu.Unlock()
	now := time.Now()
	s.Certificates = x.held()
	for _, c := range s.Certificates {
		if _, text := c.Expiry(now); text != "" {
			s.Warnings = append(s.Warnings, text+": "+c.renewal())
		}
		switch {
		case c.Role == ClientCertificate:
			s.CertNotAfter = c.NotAfter
		case c.Role == ServerCertificate && (s.ServerCertNotAfter.IsZero() || c.NotAfter.Before(s.ServerCertNotAfter)):
			s.ServerCertNotAfter = c.NotAfter
		}
	}
}

func (x *expiry) stop() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.stopped = true
	if x.timer != nil {
		x.timer.Stop()
	}
}
