// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
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
	Endpoints []string // as configured
	Endpoint  string   // address of the server that answered last, "" before
	Connected bool     // a connection is up now

	ServerVersion string // "" until a list or Probe asked for it
	EtcdClusterID uint64 // 0 before the first answer
	Revision      int64  // highest revision that an answer carried

	LastContact time.Time // of the last answer
	LastError   error     // of the last dial, handshake or call that failed, also when all is well again
	LastErrorAt time.Time
}

// Status returns the present state, without any network traffic.
func (c *Client) Status() Status {
	s := c.status.get()
	s.Endpoints = slices.Clone(c.cfg.Endpoints)
	s.Connected = c.etcd.ActiveConnection().GetState() == connectivity.Ready
	return s
}

// clientStatus collects a Client's Status from all its parts. Safe for
// concurrent use.
type clientStatus struct {
	mu sync.Mutex
	s  Status
}

var _ observer = (*clientStatus)(nil)

func (c *clientStatus) get() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.s
}

// connected tells of a new connection, whose server may be another version.
func (c *clientStatus) connected() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.ServerVersion = ""
}

func (c *clientStatus) versionIs(version string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.ServerVersion = version
}

func (c *clientStatus) answered(address string, header *etcdserverpb.ResponseHeader) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.Endpoint, c.s.LastContact = address, now
	if id := header.GetClusterId(); id != 0 && id != c.s.EtcdClusterID {
		c.s.EtcdClusterID, c.s.Revision = id, 0
	}
	c.s.Revision = max(c.s.Revision, header.GetRevision())
}

func (c *clientStatus) failed(err error) {
	if status.Code(err) == codes.Unimplemented {
		return // an older server, which is no fault
	}
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.LastError, c.s.LastErrorAt = err, now
}

func (c *clientStatus) lastError() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.s.LastError
}
