// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// ErrLeaseLost indicates a lease that etcd does not have any more, or may not
// have: it was revoked, or was not renewed in its time. The keys under it are
// gone with it, or will be.
var ErrLeaseLost = errors.New("the lease is lost")

// LeaseID names a lease of one etcd. 0 is no lease.
type LeaseID int64

// String returns the id in hexadecimal, as in the keys of locks.
func (id LeaseID) String() string { return strconv.FormatInt(int64(id), 16) }

// LeaseInfo is what etcd tells of a lease, whoever has it.
type LeaseInfo struct {
	ID      LeaseID
	TTL     time.Duration // what is left, in whole seconds
	Granted time.Duration // what each renewal makes of it
	Keys    []string      // that are deleted with it
}

// Grant makes a lease, and returns its id and the TTL that etcd gave it: the
// one asked for in whole seconds, or, where that is too short to live through
// an election, etcd's least (2 s by etcd's default settings). Nothing renews
// it; that is for a Session or a Writer.
func (c *Client) Grant(ctx context.Context, ttl time.Duration) (LeaseID, time.Duration, error) {
	l, err := c.grant(ctx, ttl)
	return l.id, l.ttl, err
}

// Revoke ends a lease and deletes the keys under it. It returns ErrLeaseLost
// if there is no such lease.
func (c *Client) Revoke(ctx context.Context, id LeaseID) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := c.etcd.Revoke(ctx, clientv3.LeaseID(id))
	return c.leaseError("revoke", id, err)
}

// TimeToLive asks what etcd knows of a lease, with the keys under it. It
// returns ErrLeaseLost if there is no such lease.
func (c *Client) TimeToLive(ctx context.Context, id LeaseID) (LeaseInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.etcd.TimeToLive(ctx, clientv3.LeaseID(id), clientv3.WithAttachedKeys())
	if err == nil && resp.TTL < 0 {
		err = rpctypes.ErrLeaseNotFound
	}
	if err != nil {
		return LeaseInfo{}, c.leaseError("read", id, err)
	}
	info := LeaseInfo{ID: id, TTL: seconds(resp.TTL), Granted: seconds(resp.GrantedTTL)}
	for _, key := range resp.Keys {
		info.Keys = append(info.Keys, string(key))
	}
	return info, nil
}

// KeepAliveOnce renews a lease and returns how long it lives now. It returns
// ErrLeaseLost if there is no such lease.
func (c *Client) KeepAliveOnce(ctx context.Context, id LeaseID) (time.Duration, error) {
	l := lease{id: id}
	err := c.renew(ctx, &l)
	return l.ttl, err
}

// Leases returns the ids of all leases, of whoever has them.
func (c *Client) Leases(ctx context.Context) ([]LeaseID, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	resp, err := c.etcd.Leases(ctx)
	if err != nil {
		return nil, fmt.Errorf("list leases: %w", c.explain(err))
	}
	ids := make([]LeaseID, len(resp.Leases))
	for i, l := range resp.Leases {
		ids[i] = LeaseID(l.ID)
	}
	return ids, nil
}

// lease is a lease as who renews it knows it.
type lease struct {
	id  LeaseID
	ttl time.Duration
	// renewed is when the last request was made that gave the lease its whole
	// TTL. etcd counts from a later moment, so that it never ends the lease
	// sooner than expiry says. The time is that of the monotonic clock, which
	// nobody sets.
	renewed time.Time
}

// renewAt is when the lease is to be renewed.
func (l *lease) renewAt() time.Time { return l.renewed.Add(l.ttl / 3) }

// expiry is the moment from which on etcd may have ended the lease.
func (l *lease) expiry() time.Time { return l.renewed.Add(l.ttl) }

// grant gets a lease.
func (c *Client) grant(ctx context.Context, ttl time.Duration) (lease, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	begun := time.Now()
	resp, err := c.etcd.Grant(ctx, int64(math.Ceil(ttl.Seconds())))
	if err != nil {
		return lease{}, fmt.Errorf("grant a lease: %w", c.explain(err))
	}
	return lease{id: LeaseID(resp.ID), ttl: seconds(resp.TTL), renewed: begun}, nil
}

// renew gives a lease its whole TTL again. It returns ErrLeaseLost if etcd
// does not have it. The method of clientv3 would repeat itself without a pause
// while etcd has no leader.
func (c *Client) renew(ctx context.Context, l *lease) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	begun := time.Now()
	stream, err := etcdserverpb.NewLeaseClient(c.etcd.ActiveConnection()).LeaseKeepAlive(ctx, c.callOptions()...)
	if err != nil {
		return c.leaseError("renew", l.id, err)
	}
	// An error of Send is told, and better, by Recv.
	_ = stream.Send(&etcdserverpb.LeaseKeepAliveRequest{ID: int64(l.id)})
	resp, err := stream.Recv()
	if err == nil && resp.TTL <= 0 {
		err = rpctypes.ErrLeaseNotFound
	}
	if err != nil {
		return c.leaseError("renew", l.id, err)
	}
	l.ttl, l.renewed = seconds(resp.TTL), begun
	return nil
}

// leaseError says what was tried with which lease, and makes etcd's not
// knowing it ErrLeaseLost.
func (c *Client) leaseError(what string, id LeaseID, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(rpctypes.Error(err), rpctypes.ErrLeaseNotFound):
		return fmt.Errorf("%s lease %s: %w", what, id, ErrLeaseLost)
	}
	return fmt.Errorf("%s lease %s: %w", what, id, c.explain(err))
}

func seconds(n int64) time.Duration { return time.Duration(n) * time.Second }
