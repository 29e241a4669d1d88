// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
)

// KindEndpointChange is the kind of an [EndpointChange].
const KindEndpointChange = "EndpointChange"

// ErrRefused indicates a request that makes no sense, whatever the state of the agent.
var ErrRefused = errors.New("refused")

// maxEndpoint bounds what an endpoint is given with.
const maxEndpoint = 64 << 10

// EndpointSpec is an endpoint as somebody adds it: an entry of an endpoints file.
type EndpointSpec struct {
	Name           string            `json:"name"`
	Namespace      string            `json:"namespace,omitempty"`
	ServiceAccount string            `json:"serviceAccount,omitempty"`
	ID             uint16            `json:"id,omitempty"`
	IPs            []netip.Addr      `json:"ips"`
	Identity       string            `json:"identity,omitempty"`
	Labels         map[string]string `json:"labels,omitempty"`
	Ports          []EndpointPort    `json:"ports,omitempty"`
}

// EndpointPort is a named port of an endpoint.
type EndpointPort struct {
	Name     string `json:"name"`
	Port     uint16 `json:"port"`
	Protocol string `json:"protocol,omitempty"`
}

// EndpointChange says what has become of an endpoint.
type EndpointChange struct {
	Meta
	Change string `json:"change"` // added, changed or removed
}

// EndpointStore keeps the endpoints that were added through the API. When it returns nil, the change outlives the agent.
// Errors that wrap [ErrRefused] and [ErrNotFound] are the caller's, others the agent's.
type EndpointStore interface {
	// PutEndpoint adds the endpoint that an entry of an endpoints file describes, in JSON, or replaces the one of its name.
	PutEndpoint(entry []byte) (added bool, err error)
	RemoveEndpoint(namespace, name string) error
}

// PutEndpoint adds an endpoint of the agent's node, or replaces the one of its name.
func (c *Client) PutEndpoint(ctx context.Context, spec EndpointSpec) (EndpointChange, error) {
	body, err := json.Marshal(spec)
	if err != nil {
		return EndpointChange{}, err
	}
	return c.change(ctx, http.MethodPut, "/v1/endpoint", body)
}

// RemoveEndpoint takes an endpoint back that was added. The error wraps [ErrNotFound] if it was not.
func (c *Client) RemoveEndpoint(ctx context.Context, namespace, name string) (EndpointChange, error) {
	return c.change(ctx, http.MethodDelete, "/v1/endpoint/"+url.PathEscape(namespace)+"/"+url.PathEscape(name), nil)
}

func (c *Client) change(ctx context.Context, method, path string, body []byte) (answer EndpointChange, err error) {
	response, err := c.send(ctx, method, path, body)
	if err != nil {
		return answer, err
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return answer, fmt.Errorf("answer of the agent at %s: %w", c.path, err)
	}
	return answer, nil
}

// endpoints adds the paths that change endpoints.
func (s *Server) endpoints(mux *http.ServeMux) {
	for pattern, change := range map[string]func(*http.Request) (string, error){
		"PUT /v1/endpoint": s.putEndpoint, "DELETE /v1/endpoint/{namespace}/{name}": s.removeEndpoint,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			err := checkParameters(r, nil)
			if err == nil {
				r.Body = http.MaxBytesReader(w, r.Body, maxEndpoint)
				var made string
				if made, err = change(r); err == nil {
					err = write(w, EndpointChange{Meta: MetaOf(KindEndpointChange), Change: made})
				}
			}
			if err != nil {
				writeError(w, blame(err))
			}
		})
	}
}

// blame gives an error the HTTP status of whose it is.
func blame(err error) error {
	switch {
	case errors.Is(err, ErrRefused):
		return refuse(http.StatusBadRequest, "%v", err)
	case errors.Is(err, ErrNotFound):
		return refuse(http.StatusNotFound, "%v", err)
	}
	return err
}

func (s *Server) putEndpoint(r *http.Request) (change string, err error) {
	entry, err := io.ReadAll(r.Body)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrRefused, err)
	}
	added, err := s.agent.Endpoints.PutEndpoint(entry)
	if added {
		return "added", err
	}
	return "changed", err
}

func (s *Server) removeEndpoint(r *http.Request) (change string, err error) {
	return "removed", s.agent.Endpoints.RemoveEndpoint(r.PathValue("namespace"), r.PathValue("name"))
}
