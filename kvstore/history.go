// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
)

// history sees to it that a Client reads one etcd only. Every answer of etcd
// carries the id of its cluster: the first one is pinned, and an answer with
// another one, and all after it, become ErrHistoryChanged before anything can
// be made of them.
//
// One kind of message has no id: the parts of a streamed range before the
// last. They are let through only on a connection over which the pinned id has
// already come; on another one they become errUnverified.
type history struct {
	observer observer

	mu       sync.Mutex
	pinned   uint64              // cluster id, 0 before the first answer
	changed  error               // set once another id was seen
	verified map[connection]bool // live connections that have shown the pinned id
}

// observer is told of every answer and of every error, for Status.
type observer interface {
	answered(conn connection, header *etcdserverpb.ResponseHeader)
	leased(request, answer any)
	failed(err error)
	repinned()
}

// connection names a TCP connection while it lives.
type connection struct{ local, remote string }

func connectionOf(local, remote net.Addr) connection {
	var c connection
	if local != nil {
		c.local = local.String()
	}
	if remote != nil {
		c.remote = remote.String()
	}
	return c
}

// maxVerified bounds the connections remembered. A Client has one per
// endpoint; those beyond are dead, and forgetting a live one costs a probe.
const maxVerified = 64

// headered is any answer of etcd but RangeStreamResponse.
type headered interface {
	GetHeader() *etcdserverpb.ResponseHeader
}

// connected forgets what an earlier connection between the same two addresses
// has shown.
func (h *history) connected(conn connection) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.verified, conn)
}

// repin accepts the history that answers next. Who calls it has given up what
// it believed of the old one.
func (h *history) repin() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pinned, h.changed = 0, nil
	clear(h.verified)
	h.observer.repinned()
}

// check judges one answer that came over the connection of p.
func (h *history) check(p *peer.Peer, answer any) error {
	header, streamed := headerOf(answer)
	if header.GetClusterId() == 0 && !streamed {
		return nil // a proxy in between; nothing to compare
	}
	conn := connection{}
	if p != nil {
		conn = connectionOf(p.LocalAddr, p.Addr)
	}
	if err := h.judge(conn, header.GetClusterId()); err != nil {
		return err
	}
	h.observer.answered(conn, header)
	return nil
}

func (h *history) judge(conn connection, id uint64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.changed != nil:
		return h.changed
	case id == 0 && !h.verified[conn]:
		return errUnverified
	case id == 0:
		return nil
	case h.pinned == 0:
		h.pinned = id
	case h.pinned != id:
		h.changed = fmt.Errorf("%w: cluster id %x, before %x", ErrHistoryChanged, id, h.pinned)
		h.observer.failed(h.changed)
		return h.changed
	}
	if h.verified == nil || len(h.verified) >= maxVerified {
		h.verified = make(map[connection]bool)
	}
	h.verified[conn] = true
	return nil
}

// headerOf returns the header of an answer, nil if it has none, and whether it
// is a part of a streamed range.
func headerOf(answer any) (header *etcdserverpb.ResponseHeader, streamed bool) {
	switch m := answer.(type) {
	case *etcdserverpb.RangeStreamResponse:
		return m.GetRangeResponse().GetHeader(), true
	case headered:
		return m.GetHeader(), false
	}
	return nil, false
}

// unary is a grpc.UnaryClientInterceptor.
func (h *history) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	var p peer.Peer
	if err := invoke(ctx, method, req, reply, cc, append(opts, grpc.Peer(&p))...); err != nil {
		if ctx.Err() == nil && method != etcdserverpb.Maintenance_Status_FullMethodName { // which some roles must not ask
			h.observer.failed(err)
		}
		return err
	}
	if err := h.check(&p, reply); err != nil {
		return err
	}
	h.observer.leased(req, reply)
	return nil
}

// stream is a grpc.StreamClientInterceptor.
func (h *history) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := open(ctx, desc, cc, method, opts...)
	if err != nil {
		return nil, err
	}
	return &checkedStream{ClientStream: s, history: h}, nil
}

type checkedStream struct {
	grpc.ClientStream
	history *history
}

// RecvMsg implements grpc.ClientStream.
func (s *checkedStream) RecvMsg(m any) error {
	if err := s.ClientStream.RecvMsg(m); err != nil {
		if !errors.Is(err, io.EOF) && s.Context().Err() == nil {
			s.history.observer.failed(err)
		}
		return err
	}
	p, _ := peer.FromContext(s.Context())
	if err := s.history.check(p, m); err != nil {
		return err
	}
	if renewed, ok := m.(*etcdserverpb.LeaseKeepAliveResponse); ok {
		s.history.observer.leased(nil, renewed)
	}
	return nil
}
