// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
)

// health adds what probes and Prometheus ask for. All answer in plain text.
//
//	/livez    200 as long as the agent can look at itself: a part that holds its locks for ever makes the probe time out
//	/readyz   200 once the kernel is what the agent knows, and while it is kept so
//	/healthz  200 if `weft status` says ok, else 503 and the problems
//	/metrics  all metrics
func (s *Server) health(get getter) {
	get("/livez", nil, func(w http.ResponseWriter, _ *http.Request) error {
		s.agent.Status()
		return verdict(w, nil)
	})
	get("/readyz", nil, func(w http.ResponseWriter, _ *http.Request) error {
		status := s.agent.Status()
		return verdict(w, status.Unready())
	})
	get("/healthz", nil, func(w http.ResponseWriter, _ *http.Request) error { return verdict(w, s.agent.Status().Problems) })
	get("/metrics", nil, func(w http.ResponseWriter, r *http.Request) error {
		s.agent.Metrics.ServeHTTP(w, r)
		return nil
	})
}

// verdict answers with what is wrong, a line each.
func verdict(w http.ResponseWriter, problems []string) error {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	if len(problems) == 0 {
		_, _ = fmt.Fprintln(w, "ok") // a reader that is gone needs no answer
		return nil
	}
	w.WriteHeader(http.StatusServiceUnavailable)
	for _, problem := range problems {
		// Most of it may come from other clusters.
		_, _ = fmt.Fprintf(w, "%q\n", problem)
	}
	return nil
}

// ErrNotLoopback indicates an address that others than this machine could reach.
var ErrNotLoopback = errors.New("want an address of the loopback device and a port, such as 127.0.0.1:9879")

// CheckMetricsAddress refuses an address that a [MetricsServer] does not listen on. The zero AddrPort is none.
func CheckMetricsAddress(at netip.AddrPort) error {
	if at.IsValid() && !at.Addr().IsLoopback() {
		return fmt.Errorf("%s: %w", at, ErrNotLoopback)
	}
	return nil
}

// MetricsServer answers /metrics, /healthz, /readyz and /livez, and nothing else, on a TCP address of the loopback device.
// Whoever can reach it may read; a page in a browser cannot, as it names another host.
type MetricsServer struct {
	at     netip.AddrPort
	server *Server
	health func(getter) // adds what is answered
	ready  chan struct{}
}

// NewMetricsServer assembles a server for the agent. The address must have passed [CheckMetricsAddress].
func NewMetricsServer(at netip.AddrPort, agent Agent, log *slog.Logger) *MetricsServer {
	server := NewServer("", agent, log)
	return &MetricsServer{at: at, server: server, health: server.health, ready: make(chan struct{})}
}

func (m *MetricsServer) String() string { return "metrics" }

// Ready is closed once the address is listened on.
func (m *MetricsServer) Ready() <-chan struct{} { return m.ready }

// Run serves until ctx ends.
func (m *MetricsServer) Run(ctx context.Context) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", m.at.String())
	if err != nil {
		return fmt.Errorf("%w: choose another with --metrics-address", err)
	}
	mux, get := newMux()
	m.health(get)
	m.server.log.Info("metrics ready", "address", listener.Addr().String())
	return m.server.serve(ctx, listener, m.ready, guard(mux, isLoopback))
}
