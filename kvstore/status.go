// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"errors"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
)

// Status is what a Client knows of its connection and of the server.
type Status struct {
	State State
	Since time.Time // when State began

	Endpoints []string // as configured
	Endpoint  string   // address of the server that answered last, "" before
	Connected bool     // a connection is up now

	ServerVersion string // "" until the second call over a connection
	Warning       string // what is wrong with a server of this version, "" if nothing is known
	EtcdClusterID uint64 // 0 before the first answer
	Revision      int64  // highest revision that an answer carried
	Leases        int    // granted through this Client, and not known to be gone

	// Lag is by how many revisions the Watcher furthest behind trails
	// Revision: what etcd has done and the Watcher has not delivered, or not
	// been told that it need not. As an idle Watcher asks that every 10 s, and
	// believes the answer before the last, it is 0 only where all is at rest.
	Lag int64

	// Certificates are those that the connections depend on, sorted by role:
	// the client's as its file has it, those of each server and its authority
	// as of the last TLS handshake. Warnings says of each that comes near its
	// end how near.
	Certificates []Certificate
	Warnings     []string
	// CertNotAfter and ServerCertNotAfter are until when the client's and the
	// first of the servers' certificates are good; zero: there is none.
	CertNotAfter, ServerCertNotAfter time.Time

	// Calls counts requests, and openings of streams, that were sent.
	Calls uint64
	// Listed counts the keys that lists have delivered.
	Listed uint64
	// FailedDials counts attempts to connect that ended before etcd could be
	// asked anything.
	FailedDials uint64

	LastContact time.Time // of the last answer
	LastError   error     // of the last dial, handshake or call that failed, also when all is well again
	LastErrorAt time.Time
}

// Status returns the present state, without any network traffic.
func (c *Client) Status() Status {
	s := c.status.get()
	c.expiry.report(&s)
	s.Endpoints = slices.Clone(c.cfg.Endpoints)
	s.Calls, s.Listed = c.limiter.calls.Load(), c.listed.Load()
	s.Connected = c.etcd.ActiveConnection().GetState() == connectivity.Ready
	return s
}

// clientStatus collects a Client's Status from all its parts. Safe for
// concurrent use.
type clientStatus struct {
	mu     sync.Mutex
	s      Status
	health health
	leases map[int64]bool
}

var _ observer = (*clientStatus)(nil)

func newClientStatus() *clientStatus {
	return &clientStatus{
		s:      Status{State: Connecting, Since: time.Now()},
		health: health{conns: make(map[connection]bool), watchers: make(map[*Watcher]phase)},
		leases: make(map[int64]bool),
	}
}

func (c *clientStatus) get() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.s
	s.Leases = len(c.leases)
	for w := range c.health.watchers {
		if at := w.Revision(); at > 0 {
			s.Lag = max(s.Lag, s.Revision-at)
		}
	}
	return s
}

// observe brings the state up to date. The caller holds mu.
func (c *clientStatus) observe() {
	if state := c.health.observe(); state != c.s.State {
		c.s.State, c.s.Since = state, time.Now()
	}
}

// connected tells of a new connection, whose server may be another version.
func (c *clientStatus) connected(conn connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.ServerVersion, c.s.Warning = "", ""
	c.health.conns[conn] = false
}

func (c *clientStatus) disconnected(conn connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.health.conns, conn)
	c.observe()
}

func (c *clientStatus) versionIs(version string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.ServerVersion, c.s.Warning = version, versionWarning(version)
}

func (c *clientStatus) answered(conn connection, header *etcdserverpb.ResponseHeader) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.Endpoint, c.s.LastContact = conn.remote, now
	if id := header.GetClusterId(); id != 0 && id != c.s.EtcdClusterID {
		c.s.EtcdClusterID, c.s.Revision = id, 0
	}
	c.s.Revision = max(c.s.Revision, header.GetRevision())
	// An answer may be read after its connection was closed.
	if before, open := c.health.conns[conn]; open && !before {
		c.health.conns[conn] = true
		c.observe()
	}
}

// leased takes from an answer what became of a lease.
func (c *clientStatus) leased(request, answer any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch m := answer.(type) {
	case *etcdserverpb.LeaseGrantResponse:
		c.leases[m.ID] = true
	case *etcdserverpb.LeaseRevokeResponse:
		if r, ok := request.(*etcdserverpb.LeaseRevokeRequest); ok {
			delete(c.leases, r.ID)
		}
	case *etcdserverpb.LeaseKeepAliveResponse:
		if m.TTL <= 0 {
			delete(c.leases, m.ID)
		}
	}
}

// failed tells of a dial, a handshake or a call that failed.
func (c *clientStatus) failed(err error) {
	if status.Code(err) == codes.Unimplemented {
		return // an older server, which is no fault
	}
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.LastError, c.s.LastErrorAt = err, now
	c.health.failed = true
	if errors.Is(err, ErrHistoryChanged) {
		c.health.foreign = true
	}
	c.observe()
}

// unconnected tells of an attempt to connect that failed.
func (c *clientStatus) unconnected(err error) {
	c.mu.Lock()
	c.s.FailedDials++
	c.mu.Unlock()
	c.failed(err)
}

// repinned tells that the history that answers next is accepted.
func (c *clientStatus) repinned() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.health.foreign = false
	clear(c.leases)
	c.observe()
}

// follows tells how far a Watcher of the Client has come.
func (c *clientStatus) follows(w *Watcher, p phase) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p == phaseEnded {
		delete(c.health.watchers, w)
	} else {
		c.health.watchers[w] = p
	}
	c.observe()
}

// heartbeat tells whether the heartbeat is late.
func (c *clientStatus) heartbeat(late bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.health.late = late
	c.observe()
}

func (c *clientStatus) lastError() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.s.LastError
}
