// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// soundPatch is, for each minor version of etcd 3, the first patch level that
// keeps a client with a reader's role from what the role does not grant:
// CVE-2026-33343, CVE-2026-33413, CVE-2026-44283 and CVE-2026-73499. Of 3.4
// no release is known that has the fix for the last one.
var soundPatch = map[int]int{4: 44, 5: 33, 6: 14, 7: 1}

const oldestSound, newestKnown = 4, 7

// versionWarning says what is wrong with an etcd of this version, "3.5.12";
// "" if nothing is known.
func versionWarning(version string) string {
	major, minor, patch, ok := parseVersion(version)
	if !ok || major > 3 || major == 3 && minor > newestKnown {
		return ""
	}
	if major < 3 || minor < oldestSound {
		return fmt.Sprintf("etcd %s is no longer maintained: upgrade it to 3.%d.%d or later", version, newestKnown, soundPatch[newestKnown])
	}
	if patch < soundPatch[minor] {
		return fmt.Sprintf("etcd %s has known holes in its authorisation: upgrade it to 3.%d.%d or later", version, minor, soundPatch[minor])
	}
	return ""
}

// parseVersion reads a version as servers tell it; what follows the patch
// level, as in 3.6.0-rc.1, does not count.
func parseVersion(version string) (major, minor, patch int, ok bool) {
	version, _, _ = strings.Cut(version, "-")
	version, _, _ = strings.Cut(version, "+")
	parts := strings.Split(version, ".")
	if len(parts) != 3 {
		return 0, 0, 0, false
	}
	for i, n := range []*int{&major, &minor, &patch} {
		v, err := strconv.ParseUint(parts[i], 10, 16)
		if err != nil {
			return 0, 0, 0, false
		}
		*n = int(v)
	}
	return major, minor, patch, true
}

// prober has the version of the server behind each new connection asked for
// before the first call over it. Where the role must not ask, the version
// stays unknown; it is only for people.
type prober struct {
	probe func(context.Context) error
	due   atomic.Bool
}

// probeTimeout bounds by how much asking can delay a call.
const probeTimeout = 5 * time.Second

func (p *prober) ask(ctx context.Context, method string) {
	switch method {
	case etcdserverpb.Maintenance_Status_FullMethodName, etcdserverpb.Auth_Authenticate_FullMethodName:
		return // part of asking
	}
	if !p.due.CompareAndSwap(true, false) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	_ = p.probe(ctx) // another history fails the call itself
}

// unary is a grpc.UnaryClientInterceptor.
func (p *prober) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	p.ask(ctx, method)
	return invoke(ctx, method, req, reply, cc, opts...)
}

// stream is a grpc.StreamClientInterceptor.
func (p *prober) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	p.ask(ctx, method)
	return open(ctx, desc, cc, method, opts...)
}
