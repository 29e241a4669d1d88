// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"time"
)

// Errors of a [Client].
var (
	// ErrUnreachable indicates that no agent answers on the socket.
	ErrUnreachable = errors.New("agent unreachable")
	// ErrNotFound indicates that the agent answers, but does not know what was asked for.
	ErrNotFound = errors.New("not found")
)

// requestTimeout bounds the wait for the beginning of an answer, except of streams.
const requestTimeout = 10 * time.Second

// Client asks an agent. It is safe for concurrent use.
type Client struct {
	path    string
	daemon  string // that answers: agent or operator
	http    *http.Client
	patient *http.Client // waits for as long as its context lasts
}

// NewClient returns a client for the agent on the unix socket at path.
func NewClient(path string) *Client { return newClient(path, "agent") }

// NewOperatorClient returns a client for the operator on the unix socket at path, which answers Operator, Version and
// Metrics.
func NewOperatorClient(path string) *Client { return newClient(path, "operator") }

func newClient(path, daemon string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
		if err != nil {
			return nil, &unreachableError{path: path, daemon: daemon, cause: err}
		}
		return conn, nil
	}
	return &Client{
		path: path, daemon: daemon,
		http: &http.Client{Transport: &http.Transport{
			DialContext: dial, DisableKeepAlives: true, ResponseHeaderTimeout: requestTimeout,
		}},
		patient: &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}},
	}
}

// unreachableError says on which socket nobody answers.
type unreachableError struct {
	path   string
	daemon string
	cause  error
}

func (e *unreachableError) Error() string {
	cause := e.cause
	var op *net.OpError
	if errors.As(cause, &op) {
		cause = op.Err // the path and the word "dial" stand there already
	}
	if errors.Is(cause, fs.ErrPermission) {
		return fmt.Sprintf("%s unreachable at %s: %v: be root, or in the group of the socket", e.daemon, e.path, cause)
	}
	if isTimeout(cause) {
		return fmt.Sprintf("%s unreachable at %s: it accepts connections, but has not answered for %s: see the log of `weft %s`, and restart it if "+
			"it hangs: traffic goes on meanwhile", e.daemon, e.path, requestTimeout, e.daemon)
	}
	return fmt.Sprintf("%s unreachable at %s: %v: is `weft %s` running?", e.daemon, e.path, cause, e.daemon)
}

func isTimeout(err error) bool {
	var network net.Error
	return errors.As(err, &network) && network.Timeout()
}

func (e *unreachableError) Unwrap() []error { return []error{ErrUnreachable, e.cause} }

// Version asks which build the agent is.
func (c *Client) Version(ctx context.Context) (VersionInfo, error) {
	return ask[VersionInfo](ctx, c, "/v1/version")
}

// Status asks for the agent's state.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return ask[Status](ctx, c, "/v1/status")
}

// IPs lists every known prefix, in no order.
func (c *Client) IPs(ctx context.Context) ([]IP, error) {
	list, err := ask[List[IP]](ctx, c, "/v1/ip")
	return list.Items, err
}

// IP asks what an address is. The error wraps [ErrNotFound] if no known prefix contains it.
func (c *Client) IP(ctx context.Context, addr netip.Addr) (IPDetail, error) {
	return ask[IPDetail](ctx, c, "/v1/ip/"+url.PathEscape(addr.String()))
}

// Explain asks for all that is known of an address.
func (c *Client) Explain(ctx context.Context, addr netip.Addr) (Explanation, error) {
	return ask[Explanation](ctx, c, "/v1/explain/"+url.PathEscape(addr.String()))
}

// Conflicts lists the prefixes that several claim, by prefix.
func (c *Client) Conflicts(ctx context.Context) ([]Conflict, error) {
	list, err := ask[List[Conflict]](ctx, c, "/v1/conflict")
	return list.Items, err
}

// Metrics returns the agent's metrics in the text format of Prometheus. The caller closes them.
func (c *Client) Metrics(ctx context.Context) (io.ReadCloser, error) {
	response, err := c.get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	return response.Body, nil
}

// Nodes lists the nodes of every cluster, by cluster and name.
func (c *Client) Nodes(ctx context.Context) ([]Node, error) {
	list, err := ask[List[Node]](ctx, c, "/v1/node")
	return list.Items, err
}

// Identities lists the known identities by number.
func (c *Client) Identities(ctx context.Context) ([]Identity, error) {
	list, err := ask[List[Identity]](ctx, c, "/v1/identity")
	return list.Items, err
}

// Identity asks what a number stands for. The error wraps [ErrNotFound] if the agent does not know.
func (c *Client) Identity(ctx context.Context, id uint32) (Identity, error) {
	detail, err := ask[IdentityDetail](ctx, c, "/v1/identity/"+strconv.FormatUint(uint64(id), 10))
	return detail.Identity, err
}

// FlowQuery chooses flows.
type FlowQuery struct {
	Last   int  // how many of those that the agent remembers; negative: all
	Follow bool // go on with those that come, until the context or the agent ends
}

// Flows delivers flows, oldest first. It ends with deliver's error, or with nil once there are no more.
func (c *Client) Flows(ctx context.Context, q FlowQuery, deliver func(FlowEvent) error) error {
	query := url.Values{"follow": {strconv.FormatBool(q.Follow)}}
	if q.Last >= 0 {
		query.Set("last", strconv.Itoa(q.Last))
	}
	response, err := c.get(ctx, "/v1/flows?"+query.Encode())
	if err != nil {
		return err
	}
	defer response.Body.Close()
	for decoder := json.NewDecoder(response.Body); ; {
		var event FlowEvent
		err := decoder.Decode(&event)
		switch {
		case errors.Is(err, io.EOF) || ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("flows of the agent at %s: %w", c.path, err)
		}
		if err := deliver(event); err != nil {
			return err
		}
	}
}

func ask[T any](ctx context.Context, c *Client, path string) (answer T, err error) {
	response, err := c.get(ctx, path)
	if err != nil {
		return answer, err
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return answer, fmt.Errorf("answer of the %s at %s: %w", c.daemon, c.path, err)
	}
	return answer, nil
}

// get returns a response with status 200; others become errors.
func (c *Client) get(ctx context.Context, path string) (*http.Response, error) {
	return c.exchange(ctx, c.http, http.MethodGet, path, nil, "")
}

// do is get for what takes longer, or changes something.
func (c *Client) do(ctx context.Context, method, path string) (*http.Response, error) {
	return c.exchange(ctx, c.patient, method, path, nil, "")
}

// send is do with a body.
func (c *Client) send(ctx context.Context, method, path string, body []byte) (*http.Response, error) {
	return c.exchange(ctx, c.patient, method, path, body, "")
}

// exchange returns a response with status 200, of the type that is accepted if one is; others become errors.
func (c *Client) exchange(ctx context.Context, by *http.Client, method, path string, body []byte, accept string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if accept != "" {
		request.Header.Set("Accept", accept)
	}
	response, err := by.Do(request)
	if err != nil {
		var unreachable *unreachableError
		var request *url.Error
		switch {
		case errors.As(err, &unreachable):
			return nil, unreachable
		case errors.As(err, &request) && ctx.Err() == nil:
			return nil, &unreachableError{path: c.path, daemon: c.daemon, cause: request.Err} // it listens, but does not answer
		}
		return nil, err
	}
	if response.StatusCode == http.StatusOK {
		return response, nil
	}
	defer response.Body.Close()
	var e Error
	if err := json.NewDecoder(io.LimitReader(response.Body, 1<<20)).Decode(&e); err != nil || e.Kind != KindError {
		return nil, fmt.Errorf("%s at %s: unexpected answer %s", c.daemon, c.path, response.Status)
	}
	if e.Code == http.StatusNotFound {
		return nil, fmt.Errorf("%s: %w", e.Message, ErrNotFound)
	}
	return nil, fmt.Errorf("%s at %s: %s", c.daemon, c.path, e.Message)
}
