// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"embed"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
)

// pageFiles are the page, as it is served: nothing is built or fetched when the agent runs.
//
//go:embed page
var pageFiles embed.FS

// pagePolicy lets the page load and ask nothing but what the agent itself serves, and nobody put it into a frame.
const pagePolicy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; " +
	"form-action 'none'; base-uri 'none'; frame-ancestors 'none'"

// page adds the page that shows the mesh. It reads /v1 as any client does.
func (s *Server) page(get getter) {
	for path, file := range map[string]struct{ name, contentType string }{
		"/{$}":         {"index.html", "text/html; charset=utf-8"},
		"/page.css":    {"page.css", "text/css; charset=utf-8"},
		"/page.js":     {"page.js", "text/javascript; charset=utf-8"},
		"/mesh.js":     {"mesh.js", "text/javascript; charset=utf-8"},
		"/services.js": {"services.js", "text/javascript; charset=utf-8"},
		"/flows.js":    {"flows.js", "text/javascript; charset=utf-8"},
		"/answer.js":   {"answer.js", "text/javascript; charset=utf-8"},
	} {
		get(path, nil, func(w http.ResponseWriter, _ *http.Request) error {
			body, err := pageFiles.ReadFile("page/" + file.name)
			if err != nil {
				return err
			}
			h := w.Header()
			h.Set("Content-Type", file.contentType)
			h.Set("Content-Security-Policy", pagePolicy)
			h.Set("X-Content-Type-Options", "nosniff")
			h.Set("Referrer-Policy", "no-referrer")
			h.Set("Cache-Control", "no-cache")
			_, _ = w.Write(body) // a reader that is gone needs no answer
			return nil
		})
	}
}

// CheckPageAddress refuses an address that a [PageServer] does not listen on. The zero AddrPort is none.
func CheckPageAddress(at netip.AddrPort) error { return CheckMetricsAddress(at) }

// PageServer answers the page that shows the mesh, and what of /v1 the page reads, on a TCP address of the loopback device, to
// those who know its URL. Nobody can write.
type PageServer struct {
	at     netip.AddrPort
	server *Server
	key    pageKey
	url    string // set before ready is closed
	ready  chan struct{}
}

// NewPageServer assembles a server for the agent. The address must have passed [CheckPageAddress].
func NewPageServer(at netip.AddrPort, agent Agent, log *slog.Logger) *PageServer {
	return &PageServer{at: at, server: NewServer("", agent, log), key: newPageKey(), ready: make(chan struct{})}
}

func (p *PageServer) String() string { return "page" }

// Ready is closed once the address is listened on.
func (p *PageServer) Ready() <-chan struct{} { return p.ready }

// URL is where a browser of this machine finds the page, with the token that it needs; ok is false before the page is ready. It is
// a secret.
func (p *PageServer) URL() (url string, ok bool) {
	select {
	case <-p.ready:
		return p.url, true
	default:
		return "", false
	}
}

// Run serves until ctx ends.
func (p *PageServer) Run(ctx context.Context) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", p.at.String())
	if err != nil {
		return fmt.Errorf("%w: choose another with --page-address", err)
	}
	mux, get := newMux()
	p.server.page(get)
	p.server.shown(get)
	base := "http://" + listener.Addr().String() + "/"
	p.url = base + "?token=" + p.key.token
	p.server.log.Info("page ready, `weft page` prints its address with the token", "url", base)
	return p.server.serve(ctx, listener, p.ready, guard(p.key.demand(mux), isLoopback))
}

// guard refuses requests that a page of somebody else's makes a browser send: those for a host that is not ours, which is a
// name that an attacker made resolve to the loopback device, and those that come from another origin. No header ever allows
// another origin to read an answer.
func guard(next http.Handler, ours func(host string) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if host := hostOf(r.Host); !ours(host) {
			writeError(w, refuse(http.StatusForbidden, "host %q: want localhost or an address of the loopback device", host))
			return
		}
		if origin := r.Header.Get("Origin"); origin != "" {
			if from, err := url.Parse(origin); err != nil || from.Scheme != "http" || from.Host != r.Host {
				writeError(w, refuse(http.StatusForbidden, "origin %q: other pages may not ask here", origin))
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

func hostOf(hostport string) string {
	host, _, err := net.SplitHostPort(hostport)
	if err != nil {
		return strings.Trim(hostport, "[]")
	}
	return host
}

// isLoopback accepts the names of the loopback device.
func isLoopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}

// isLocalName accepts the names of the loopback device, and those that the DNS of nobody else answers: clients of a socket
// have to name some host, and write http://weft/.
func isLocalName(host string) bool {
	return isLoopback(host) || host != "" && !strings.ContainsAny(host, ".:")
}
