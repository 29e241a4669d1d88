// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"time"
)

// KindOperatorStatus is the kind of an [OperatorStatus].
const KindOperatorStatus = "OperatorStatus"

// OperatorStatus is the state of one replica of the operator.
type OperatorStatus struct {
	Meta
	Version string    `json:"version"`
	Started time.Time `json:"started"`
	// Healthy is false if Problems has anything.
	Healthy  bool     `json:"healthy"`
	Problems []string `json:"problems"`

	Name    string       `json:"name"` // of the replica
	Cluster LocalCluster `json:"cluster"`
	// Election is how the replicas agree on a leader: kubernetes, etcd or none.
	Election string    `json:"election"`
	IsLeader bool      `json:"isLeader"`
	Since    time.Time `json:"since,omitzero"` // when it became the leader
	Terms    int       `json:"terms"`          // that it has had
	// Leader is the replica that began the last term, empty if that is not known yet.
	Leader      string           `json:"leader"`
	LeaderSince time.Time        `json:"leaderSince,omitzero"`
	LastError   string           `json:"lastError,omitempty"` // why it does not lead any more, or not yet
	LastErrorAt time.Time        `json:"lastErrorAt,omitzero"`
	KVStore     *KVStore         `json:"kvstore,omitempty"`
	Sources     []OperatorSource `json:"sources"`
	Duties      []OperatorDuty   `json:"duties"`
	Tasks       []Task           `json:"tasks"`
}

// OperatorSource is where the operator has from what it publishes.
type OperatorSource struct {
	Name     string   `json:"name"`
	Ready    bool     `json:"ready"` // all of it was read once
	Objects  int      `json:"objects"`
	Problems []string `json:"problems,omitempty"`
}

// OperatorDuty is something that the leader does.
type OperatorDuty struct {
	Name         string        `json:"name"`
	Running      bool          `json:"running"`
	Ready        bool          `json:"ready"` // its export is complete, its last round went well
	Runs         uint64        `json:"runs"`
	Errors       uint64        `json:"errors"`
	Deleted      uint64        `json:"deleted"`
	Keys         int           `json:"keys,omitempty"`
	Pending      int           `json:"pending,omitempty"`
	LastRun      time.Time     `json:"lastRun,omitzero"`
	LastDuration time.Duration `json:"lastDuration,omitempty"` // nanoseconds
	LastError    string        `json:"lastError,omitempty"`
	LastErrorAt  time.Time     `json:"lastErrorAt,omitzero"`
	Problems     []string      `json:"problems,omitempty"`
	Detail       string        `json:"detail,omitempty"`
}

// Assess finds the problems.
func (s *OperatorStatus) Assess() {
	s.Problems = []string{}
	add := func(format string, args ...any) { s.Problems = append(s.Problems, fmt.Sprintf(format, args...)) }
	if s.KVStore != nil && !s.KVStore.Connected {
		add("etcd: not connected: %s: see `weft troubleshoot kvstore --kvstore-config FILE`", orElse(s.KVStore.LastError, "no connection yet"))
	}
	switch {
	case s.Leader == "":
		add("no replica leads: %s: see whether an operator of the cluster runs, and reaches its etcd", orElse(s.LastError, "none has begun a term yet"))
	case s.LastError != "" && !s.IsLeader:
		add("this replica cannot lead: %s", s.LastError)
	}
	for _, source := range s.Sources {
		for _, p := range source.Problems {
			add("%s: %s", source.Name, p)
		}
	}
	for _, d := range s.Duties {
		for _, p := range d.Problems {
			add("%s: %s", d.Name, p)
		}
	}
	s.Healthy = len(s.Problems) == 0
}

// unready tells why the replica can neither lead nor take over.
func (s *OperatorStatus) unready() (problems []string) {
	if s.KVStore == nil || !s.KVStore.Connected {
		problems = append(problems, "etcd is not connected")
	}
	if s.Leader == "" {
		problems = append(problems, "it is not known who leads")
	}
	return problems
}

// Operator is what an [OperatorServer] shows.
type Operator struct {
	Version func() VersionInfo
	Status  func() OperatorStatus // does not block
	Metrics http.Handler
}

// OperatorServer answers for an operator as a [Server] does for an agent.
type OperatorServer struct {
	path     string
	operator Operator
	server   *Server
}

// NewOperatorServer assembles a server that will listen on the path of a unix socket.
func NewOperatorServer(path string, operator Operator, log *slog.Logger) *OperatorServer {
	return &OperatorServer{path: path, operator: operator, server: NewServer(path, Agent{}, log)}
}

func (s *OperatorServer) String() string { return "api" }

// Ready is closed once clients are answered.
func (s *OperatorServer) Ready() <-chan struct{} { return s.server.Ready() }

// Run serves until ctx ends, and then removes the socket. The error wraps [ErrInUse] if another operator has the socket.
func (s *OperatorServer) Run(ctx context.Context) error {
	socket, err := listen(s.path)
	if err != nil {
		return err
	}
	defer socket.remove()
	s.server.log.Info("api ready", "socket", s.path)
	if err := s.server.serve(ctx, socket, s.server.ready, s.operator.routes()); err != nil {
		return fmt.Errorf("api socket %s: %w", s.path, err)
	}
	return nil
}

func (o Operator) routes() http.Handler {
	mux, get := newMux()
	get("/v1/version", nil, func(w http.ResponseWriter, _ *http.Request) error { return write(w, o.Version()) })
	get("/v1/operator", nil, func(w http.ResponseWriter, _ *http.Request) error { return write(w, o.Status()) })
	o.health(get)
	return mux
}

// health adds what probes and Prometheus ask for, as those of an agent:
//
//	/livez    200 as long as the operator can look at itself
//	/readyz   200 while it leads, or could take over
//	/healthz  200 if `weft operator status` says ok, else 503 and the problems
//	/metrics  all metrics
func (o Operator) health(get getter) {
	get("/livez", nil, func(w http.ResponseWriter, _ *http.Request) error {
		o.Status()
		return verdict(w, nil)
	})
	get("/readyz", nil, func(w http.ResponseWriter, _ *http.Request) error {
		s := o.Status()
		return verdict(w, s.unready())
	})
	get("/healthz", nil, func(w http.ResponseWriter, _ *http.Request) error { return verdict(w, o.Status().Problems) })
	get("/metrics", nil, func(w http.ResponseWriter, r *http.Request) error {
		o.Metrics.ServeHTTP(w, r)
		return nil
	})
}

// NewOperatorMetricsServer assembles a [MetricsServer] for an operator.
func NewOperatorMetricsServer(at netip.AddrPort, operator Operator, log *slog.Logger) *MetricsServer {
	return &MetricsServer{at: at, server: NewServer("", Agent{}, log), health: operator.health, ready: make(chan struct{})}
}

// Operator asks an operator for its state.
func (c *Client) Operator(ctx context.Context) (OperatorStatus, error) {
	return ask[OperatorStatus](ctx, c, "/v1/operator")
}
