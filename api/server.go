// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// stopTimeout bounds how long a stopping server waits for answers under way.
const stopTimeout = 2 * time.Second

// Agent is what the server shows: functions that answer from the agent's present state. All are safe for concurrent use
// and do not block, but for Verify.
type Agent struct {
	Version    func() VersionInfo
	Status     func() Status
	IPs        func() iter.Seq[IP]
	IP         func(netip.Addr) (IPDetail, bool)
	Nodes      func() []Node
	Identities func() iter.Seq[Identity]
	Identity   func(id uint32) (Identity, bool)
	Services   func() iter.Seq[Service]
	Service    func(namespace, name string) (Service, bool)
	Explain    func(netip.Addr) Explanation
	Conflicts  func() iter.Seq[Conflict]
	Metrics    http.Handler // answers with all metrics
	// Page is where the page is on TCP, with its token; ok is false before it is ready. Nil where it is on the socket alone.
	Page func() (url string, ok bool)
	// Verify compares the kernel with the tables, and may take seconds. It tells meanwhile how many entries are compared, and of
	// how many; tell does not block, and may be called from any goroutine.
	Verify    func(ctx context.Context, repair bool, tell func(done, total int)) (Verification, error)
	Endpoints EndpointStore
	Config    func() Config
	LogLevel  LogLevelSetter
	// Describe completes flows from the log with what would be too much to keep there.
	Describe func([]Flow)
	Flows    *FlowLog
}

// Server answers on a unix socket.
type Server struct {
	path  string
	agent Agent
	log   *slog.Logger
	ready chan struct{}
}

// NewServer assembles a server that will listen on the path of a unix socket.
func NewServer(path string, agent Agent, log *slog.Logger) *Server {
	return &Server{path: path, agent: agent, log: log, ready: make(chan struct{})}
}

func (s *Server) String() string { return "api" }

// Ready is closed once clients are answered.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Run serves until ctx ends, and then removes the socket. The error wraps [ErrInUse] if another agent has the socket.
func (s *Server) Run(ctx context.Context) error {
	socket, err := listen(s.path)
	if err != nil {
		return err
	}
	defer socket.remove()
	s.log.Info("api ready", "socket", s.path)
	if err := s.serve(ctx, socket, s.ready, guard(s.routes(), isLocalName)); err != nil {
		return fmt.Errorf("api socket %s: %w", s.path, err)
	}
	return nil
}

// serve answers on a listener until ctx ends, and closes it. ready is closed once it does.
func (s *Server) serve(ctx context.Context, listener net.Listener, ready chan struct{}, handler http.Handler) error {
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	close(ready)
	select {
	case err := <-failed:
		server.Close()
		return err
	case <-ctx.Done():
	}
	// Requests carry ctx, so streams are ending by themselves; ctx itself is of no use for waiting.
	wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	if err := server.Shutdown(wait); err != nil {
		server.Close()
	}
	<-failed
	return nil
}

func (s *Server) routes() http.Handler {
	mux, get := newMux()
	s.page(get)
	s.shown(get)
	get("/v1/page", nil, s.where)
	get("/v1/ip", nil, func(w http.ResponseWriter, r *http.Request) error { return writeList(w, r, KindIPList, s.agent.IPs()) })
	get("/v1/ip/{address}", nil, s.ip)
	get("/v1/service/{namespace}/{name}", nil, s.service)
	get("/v1/identity", nil, func(w http.ResponseWriter, r *http.Request) error {
		return writeList(w, r, KindIdentityList, s.agent.Identities())
	})
	get("/v1/identity/{id}", nil, s.identity)
	get("/v1/conflict", nil, func(w http.ResponseWriter, r *http.Request) error {
		return writeList(w, r, KindConflictList, s.agent.Conflicts())
	})
	mux.HandleFunc("/v1/verify", s.verify)
	s.endpoints(mux)
	s.admin(mux, get)
	s.health(get)
	return mux
}

// shown adds what the page shows.
func (s *Server) shown(get getter) {
	get("/v1/version", nil, func(w http.ResponseWriter, _ *http.Request) error { return write(w, s.agent.Version()) })
	get("/v1/status", nil, func(w http.ResponseWriter, _ *http.Request) error { return write(w, s.agent.Status()) })
	get("/v1/node", nil, func(w http.ResponseWriter, _ *http.Request) error {
		return write(w, List[Node]{Meta: MetaOf(KindNodeList), Items: s.agent.Nodes()})
	})
	get("/v1/service", nil, func(w http.ResponseWriter, r *http.Request) error {
		return writeList(w, r, KindServiceList, s.agent.Services())
	})
	get("/v1/explain/{address}", nil, s.explain)
	get("/v1/flows", []string{"follow", "last"}, s.flows)
}

// getter adds a path that can be read, with the parameters that it knows.
type getter func(path string, parameters []string, answer func(http.ResponseWriter, *http.Request) error)

// newMux returns a mux that refuses what no path was added for.
func newMux() (*http.ServeMux, getter) {
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, refuse(http.StatusNotFound, "no such path: %s", r.URL.Path))
	})
	return mux, func(path string, parameters []string, answer func(http.ResponseWriter, *http.Request) error) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			if err := errors.Join(checkMethod(w, r), checkParameters(r, parameters)); err != nil {
				writeError(w, err)
				return
			}
			if err := answer(w, r); err != nil {
				writeError(w, err)
			}
		})
	}
}

// refusal is an error with the HTTP status that it means.
type refusal struct {
	code    int
	message string
}

func (r *refusal) Error() string { return r.message }

func refuse(code int, format string, args ...any) error {
	return &refusal{code: code, message: fmt.Sprintf(format, args...)}
}

func checkMethod(w http.ResponseWriter, r *http.Request) error {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return nil
	}
	w.Header().Set("Allow", "GET, HEAD")
	return refuse(http.StatusMethodNotAllowed, "method %s: this path can only be read", r.Method)
}

func checkParameters(r *http.Request, known []string) error {
	for name := range r.URL.Query() {
		if !strings.Contains(" "+strings.Join(known, " ")+" ", " "+name+" ") {
			return refuse(http.StatusBadRequest, "unknown parameter %q", name)
		}
	}
	return nil
}

// address reads the address that a path names.
func address(r *http.Request) (netip.Addr, error) {
	addr, err := netip.ParseAddr(r.PathValue("address"))
	if err != nil || addr.Zone() != "" {
		return netip.Addr{}, refuse(http.StatusBadRequest, "%q is not an IP address", r.PathValue("address"))
	}
	return addr.Unmap(), nil
}

func (s *Server) explain(w http.ResponseWriter, r *http.Request) error {
	addr, err := address(r)
	if err != nil {
		return err
	}
	return write(w, s.agent.Explain(addr))
}

func (s *Server) ip(w http.ResponseWriter, r *http.Request) error {
	addr, err := address(r)
	if err != nil {
		return err
	}
	detail, ok := s.agent.IP(addr)
	if !ok {
		return refuse(http.StatusNotFound, "no prefix contains %s", addr)
	}
	return write(w, detail)
}

func (s *Server) identity(w http.ResponseWriter, r *http.Request) error {
	id, err := strconv.ParseUint(r.PathValue("id"), 10, 32)
	if err != nil {
		return refuse(http.StatusBadRequest, "%q is not the number of an identity", r.PathValue("id"))
	}
	found, ok := s.agent.Identity(uint32(id))
	if !ok {
		return refuse(http.StatusNotFound, "identity %d is not known", id)
	}
	return write(w, IdentityDetail{Meta: MetaOf(KindIdentity), Identity: found})
}

// flows writes flows as lines: the last ones first, and, if followed, all that come.
func (s *Server) flows(w http.ResponseWriter, r *http.Request) error {
	follow, err := strconv.ParseBool(orElse(r.URL.Query().Get("follow"), "false"))
	if err != nil {
		return refuse(http.StatusBadRequest, "follow: want true or false")
	}
	last, err := strconv.ParseUint(orElse(r.URL.Query().Get("last"), strconv.Itoa(flowLogSize)), 10, 31)
	if err != nil {
		return refuse(http.StatusBadRequest, "last: want a number")
	}
	w.Header().Set("Content-Type", lines)
	encoder := json.NewEncoder(w)
	buf := make([]Flow, 0, 256)
	for at := s.agent.Flows.Last(int(last)); ; {
		changed := s.agent.Flows.Changed()
		flows, next, lost := s.agent.Flows.Since(at, buf)
		at = next
		if lost > 0 {
			if encoder.Encode(FlowEvent{Meta: MetaOf(KindFlowsLost), Lost: lost}) != nil {
				return nil // the reader is gone
			}
		}
		s.agent.Describe(flows)
		for i := range flows {
			if encoder.Encode(FlowEvent{Meta: MetaOf(KindFlow), Flow: &flows[i]}) != nil {
				return nil
			}
		}
		if len(flows) == cap(buf) {
			continue
		}
		if !follow {
			return nil
		}
		if http.NewResponseController(w).Flush() != nil {
			return nil
		}
		select {
		case <-r.Context().Done():
			return nil
		case <-changed:
		}
	}
}

func orElse(value, missing string) string {
	if value == "" {
		return missing
	}
	return value
}

func write(w http.ResponseWriter, object any) error {
	body, err := json.Marshal(object)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(body, '\n')) // a reader that is gone needs no answer
	return nil
}

// writeList streams a list, which may be of a million elements, without holding it.
func writeList[T any](w http.ResponseWriter, r *http.Request, kind string, items iter.Seq[T]) error {
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"apiVersion":%q,"kind":%q,"items":[`, Version, kind)
	separator := ""
	for item := range items {
		body, err := json.Marshal(item)
		if err == nil {
			_, err = fmt.Fprintf(w, "%s%s", separator, body)
		}
		if err != nil || r.Context().Err() != nil {
			// Cut off, so that half a list is not taken for a whole one.
			panic(http.ErrAbortHandler)
		}
		separator = ",\n"
	}
	fmt.Fprint(w, "]}\n")
	return nil
}

func writeError(w http.ResponseWriter, err error) {
	e := Error{Meta: MetaOf(KindError), Code: http.StatusInternalServerError, Message: err.Error()}
	var r *refusal
	if errors.As(err, &r) {
		e.Code, e.Message = r.code, r.message
	}
	body, err := json.Marshal(e)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.Code)
	_, _ = w.Write(append(body, '\n'))
}
