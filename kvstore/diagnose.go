// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"syscall"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
)

// Outcome is how a Step ended.
type Outcome string

const (
	StepPassed  Outcome = "passed"
	StepWarning Outcome = "warning" // it works, and may not for long, or not safely
	StepFailed  Outcome = "failed"
)

// Step is one thing that was tried on the way to an etcd.
type Step struct {
	Endpoint string   `json:"endpoint,omitempty"` // as configured; empty where it is not about one
	Name     string   `json:"step"`
	Outcome  Outcome  `json:"outcome"`
	Message  string   `json:"message"`           // what was found, in one line
	Details  []string `json:"details,omitempty"` // more of it, such as the certificates
	Advice   string   `json:"advice,omitempty"`  // what to do, unless StepPassed
}

// Diagnosis says what to diagnose.
type Diagnosis struct {
	Config Config
	// Key is the first one read. It need not exist, nor be allowed: that it is
	// refused tells that the reader was recognised.
	Key string
	// Timeout bounds each step.
	Timeout time.Duration
	// Report is called with each step once it has ended.
	Report func(Step)
}

// Diagnose goes the way that a Client goes, one step at a time, to each
// endpoint: it resolves the name, connects, shakes hands, lets itself be
// recognised and reads. What it finds it reports. It returns a Client of the
// first endpoint that did all that, which the caller has to close, and nil if
// none did.
func Diagnose(ctx context.Context, d Diagnosis) *Client {
	d.Config = d.Config.withDefaults()
	var first *Client
	for _, endpoint := range d.Config.Endpoints {
		c := (&trial{Diagnosis: d, endpoint: endpoint}).run(ctx)
		switch {
		case c == nil:
		case first == nil:
			first = c
		default:
			d.compare(first, c)
			_ = c.Close()
		}
	}
	return first
}

// compare reports two endpoints that do not lead to the same etcd.
func (d Diagnosis) compare(a, b *Client) {
	one, other := a.Status().EtcdClusterID, b.Status().EtcdClusterID
	if one != 0 && other != 0 && one != other {
		d.Report(Step{
			Name: "one etcd", Outcome: StepFailed,
			Message: fmt.Sprintf("%s is etcd cluster %x, %s is %x", a.cfg.Endpoints[0], one, b.cfg.Endpoints[0], other),
			Advice:  "endpoints must be members of one etcd: remove those that are not from the config",
		})
	}
}

// trial tries one endpoint.
type trial struct {
	Diagnosis
	endpoint   string
	host, port string
	reached    string // address that accepted a connection, host:port
	files      files  // of the config, as they are now
	user       string // as whom etcd knows us, as far as can be told
}

func (t *trial) report(name string, o Outcome, message, advice string, details ...string) {
	t.Report(Step{Endpoint: t.endpoint, Name: name, Outcome: o, Message: message, Advice: advice, Details: details})
}

// run returns a client if the endpoint passed.
func (t *trial) run(ctx context.Context) *Client {
	secure, err := t.Config.secureEndpoint(t.endpoint)
	if err != nil {
		t.report("endpoint", StepFailed, err.Error(), "correct it in the config")
		return nil
	}
	_, rest, ok := strings.Cut(t.endpoint, "://")
	if !ok {
		rest = t.endpoint
	}
	u, err := url.Parse("//" + rest)
	if err != nil { // which secureEndpoint has found already
		return nil
	}
	t.host, t.port = u.Hostname(), u.Port()
	addresses := t.resolve(ctx)
	if len(addresses) == 0 {
		return nil
	}
	conn := t.connect(ctx, addresses)
	if conn == nil {
		return nil
	}
	if secure {
		ok = t.secure(ctx, conn)
	} else {
		_ = conn.Close()
		t.plain()
		ok = true
	}
	if !ok || !t.version(ctx, secure) {
		return nil
	}
	return t.authenticate(ctx)
}

func (t *trial) resolve(ctx context.Context) []netip.Addr {
	const step = "resolve"
	for _, a := range t.Config.HostAliases {
		if strings.EqualFold(a.Hostname, t.host) {
			t.report(step, StepPassed, fmt.Sprintf("%s is %s, by cilium-host-aliases", t.host, joined(a.IPs)), "")
			return a.IPs
		}
	}
	if ip, err := netip.ParseAddr(t.host); err == nil {
		t.report(step, StepPassed, t.host+" is an address", "")
		return []netip.Addr{ip}
	}
	ctx, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	addresses, err := net.DefaultResolver.LookupNetIP(ctx, "ip", t.host)
	var unknown *net.DNSError
	switch {
	case errors.As(err, &unknown) && unknown.IsNotFound:
		t.report(step, StepFailed, fmt.Sprintf("no name server knows %s", t.host),
			"correct the name, or give it addresses under cilium-host-aliases")
		return nil
	case err != nil:
		t.report(step, StepFailed, err.Error(), "see whether /etc/resolv.conf names a server that answers, or give the name addresses under cilium-host-aliases")
		return nil
	}
	for i := range addresses {
		addresses[i] = addresses[i].Unmap()
	}
	t.report(step, StepPassed, fmt.Sprintf("%s is %s", t.host, joined(addresses)), "")
	return addresses
}

func joined(addresses []netip.Addr) string {
	texts := make([]string, 0, len(addresses))
	for _, a := range addresses {
		texts = append(texts, a.String())
	}
	return strings.Join(texts, ", ")
}

// connect returns a connection to the first address that accepts one.
func (t *trial) connect(ctx context.Context, addresses []netip.Addr) net.Conn {
	const step = "connect"
	ctx, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	var refused []string
	var last error
	for i, a := range addresses {
		// An address that swallows packets must leave time for the others.
		each, cancel := context.WithTimeout(ctx, t.Timeout/time.Duration(len(addresses)-i))
		address := net.JoinHostPort(a.String(), t.port)
		conn, err := new(net.Dialer).DialContext(each, "tcp", address)
		cancel()
		if err != nil {
			refused, last = append(refused, err.Error()), err
			continue
		}
		t.reached = address
		if len(refused) > 0 {
			t.report(step, StepWarning, "TCP to "+address+", after other addresses of the name did not answer",
				"have the name lead to addresses that answer only: a client may try the others first", refused...)
		} else {
			t.report(step, StepPassed, "TCP to "+address, "")
		}
		return conn
	}
	if len(refused) == 1 {
		refused = nil
	}
	t.report(step, StepFailed, last.Error(), connectAdvice(last), refused...)
	return nil
}

func connectAdvice(err error) string {
	var timeout net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "the machine answers and nothing listens at this port: see whether etcd runs there, and whether the port is right"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return "there is no route to this address: see `ip route get`"
	case errors.As(err, &timeout) && timeout.Timeout():
		return "packets get lost on the way: see whether a firewall between here and there lets this port pass, and whether the address is right"
	}
	return "see whether the address is right and can be reached from here"
}

// authenticate sends the first request of etcd's own protocol.
func (t *trial) authenticate(ctx context.Context) *Client {
	const step = "authenticate"
	cfg := t.Config
	cfg.Endpoints = []string{t.endpoint}
	c, err := Dial(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.report(step, StepFailed, err.Error(), "correct the config")
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	_, _, err = c.Get(ctx, t.Key)
	if err == nil || Denied(err) {
		// Some roles must not ask; the version is not what this step is about.
		_ = c.Probe(ctx)
		t.report(step, StepPassed, "etcd answers "+t.as(), "")
		return c
	}
	t.report(step, StepFailed, err.Error(), t.authAdvice(err))
	_ = c.Close()
	return nil
}

// Denied reports whether etcd knows who asked, and does not allow it.
func Denied(err error) bool {
	var e rpctypes.EtcdError
	return errors.As(err, &e) && e.Code() == codes.PermissionDenied
}

// as says as whom etcd takes us.
func (t *trial) as() string {
	switch {
	case t.Config.Username != "":
		return fmt.Sprintf("to user %q with password", t.Config.Username)
	case t.user != "":
		return fmt.Sprintf("to the client certificate of %q", t.user)
	}
	return "to a client without a name"
}

func (t *trial) authAdvice(err error) string {
	switch {
	case errors.Is(err, rpctypes.ErrAuthFailed):
		return "correct username and password in the config"
	case errors.Is(err, rpctypes.ErrUserEmpty):
		return "this etcd must know who reads: give username and password, or a client certificate whose common name is an etcd user's"
	case errors.Is(err, rpctypes.ErrUserNotFound):
		return "add the user to that etcd: its name is the client certificate's common name"
	case errors.Is(err, rpctypes.ErrNoLeader), errors.Is(err, rpctypes.ErrTimeoutDueToLeaderFail):
		return "that etcd has lost its majority: see `etcdctl endpoint status --cluster` there"
	case errors.Is(err, context.DeadlineExceeded):
		return "etcd accepts connections and does not answer: see its log and its load"
	}
	return "see the log of that etcd"
}
