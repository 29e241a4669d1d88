// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// passwordAuth adds the token that etcd gives for a name and a password to
// every call. etcd's own client fetches the first token while it is made and
// so blocks until a server answers; this one fetches it with the first call,
// and anew when the server no longer knows it.
type passwordAuth struct {
	username, password string

	// lock, of capacity 1, guards what follows. It is held during the call
	// that asks for a token, hence no mutex: who waits can give up.
	lock  chan struct{}
	known bool   // token is what the server last gave
	token string // empty where the server asks for none
}

func newPasswordAuth(username, password string) *passwordAuth {
	return &passwordAuth{username: username, password: password, lock: make(chan struct{}, 1)}
}

// authorize returns ctx with the token, asking for one over cc if need be.
func (a *passwordAuth) authorize(ctx context.Context, cc *grpc.ClientConn) (context.Context, error) {
	select {
	case a.lock <- struct{}{}:
		defer func() { <-a.lock }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if !a.known {
		req := &etcdserverpb.AuthenticateRequest{Name: a.username, Password: a.password}
		resp, err := etcdserverpb.NewAuthClient(cc).Authenticate(ctx, req, grpc.WaitForReady(true))
		switch {
		case err == nil:
			a.token = resp.Token
		case errors.Is(rpctypes.Error(err), rpctypes.ErrAuthNotEnabled):
			a.token = ""
		default:
			return nil, err
		}
		a.known = true
	}
	if a.token == "" {
		return ctx, nil
	}
	return metadata.AppendToOutgoingContext(ctx, rpctypes.TokenFieldNameGRPC, a.token), nil
}

// refused forgets the token if err says that it is no longer good, and
// reports whether it did.
func (a *passwordAuth) refused(err error) bool {
	err = rpctypes.Error(err)
	if !errors.Is(err, rpctypes.ErrInvalidAuthToken) && !errors.Is(err, rpctypes.ErrUserEmpty) && !errors.Is(err, rpctypes.ErrAuthOldRevision) {
		return false
	}
	a.lock <- struct{}{}
	a.known = false
	<-a.lock
	return true
}

// unary is a grpc.UnaryClientInterceptor.
func (a *passwordAuth) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	if method == etcdserverpb.Auth_Authenticate_FullMethodName {
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	for attempt := 0; ; attempt++ {
		authorized, err := a.authorize(ctx, cc)
		if err != nil {
			return err
		}
		err = invoke(authorized, method, req, reply, cc, opts...)
		if err == nil || !a.refused(err) || attempt > 0 {
			return err
		}
	}
}

// stream is a grpc.StreamClientInterceptor. A stream whose token is refused
// ends with that error; the next one has a new token.
func (a *passwordAuth) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	authorized, err := a.authorize(ctx, cc)
	if err != nil {
		return nil, err
	}
	s, err := open(authorized, desc, cc, method, opts...)
	if err != nil {
		a.refused(err)
		return nil, err
	}
	return &authorizedStream{ClientStream: s, auth: a}, nil
}

type authorizedStream struct {
	grpc.ClientStream
	auth *passwordAuth
}

// RecvMsg implements grpc.ClientStream.
func (s *authorizedStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err != nil {
		s.auth.refused(err)
	}
	return err
}
