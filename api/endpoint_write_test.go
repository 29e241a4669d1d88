// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// fakeStore remembers what it was asked, and fails if it is told to.
type fakeStore struct {
	asked []string
	added bool
	err   error
}

func (f *fakeStore) PutEndpoint(entry []byte) (bool, error) {
	f.asked = append(f.asked, "put "+string(entry))
	return f.added, f.err
}

func (f *fakeStore) RemoveEndpoint(namespace, name string) error {
	f.asked = append(f.asked, "remove "+namespace+" "+name)
	return f.err
}

func TestEndpointChanges(t *testing.T) {
	path := socketPath(t)
	store := &fakeStore{added: true}
	agent := fakeAgent()
	agent.Endpoints = store
	serve(t, path, agent)
	client := NewClient(path)
	spec := EndpointSpec{
		Name: "a", IPs: []netip.Addr{netip.MustParseAddr("10.1.1.1")}, Labels: map[string]string{"app": "1.0"},
		Ports: []EndpointPort{{Name: "http", Port: 80}},
	}
	for _, want := range []string{"added", "changed"} {
		got, err := client.PutEndpoint(t.Context(), spec)
		if err != nil || got != (EndpointChange{Meta: MetaOf(KindEndpointChange), Change: want}) {
			t.Errorf("%+v, %v, want %s", got, err, want)
		}
		store.added = false
	}
	if got, err := client.RemoveEndpoint(t.Context(), "shop", "a/../b"); err != nil || got.Change != "removed" {
		t.Errorf("%+v, %v", got, err)
	}
	const put = `put {"name":"a","ips":["10.1.1.1"],"labels":{"app":"1.0"},"ports":[{"name":"http","port":80}]}`
	if diff := cmp.Diff([]string{put, put, "remove shop a/../b"}, store.asked); diff != "" {
		t.Errorf("asked (-want +got)\n%s", diff)
	}
	for _, tc := range []struct {
		cause, kind error
		want        string
	}{
		{fmt.Errorf("%w: no", ErrRefused), nil, "agent at " + path + ": refused: no"},
		{ErrNotFound, ErrNotFound, "not found: not found"},
		{errors.New("no space left on device"), nil, "agent at " + path + ": no space left on device"},
	} {
		store.err = tc.cause
		_, err := client.RemoveEndpoint(t.Context(), "shop", "a")
		if err == nil || err.Error() != tc.want || (tc.kind != nil && !errors.Is(err, tc.kind)) {
			t.Errorf("error %v, want %q", err, tc.want)
		}
	}
}

// What is too large, or not asked as it must be, never comes as far as the store.
func TestEndpointBadRequests(t *testing.T) {
	path := socketPath(t)
	store := new(fakeStore)
	agent := fakeAgent()
	agent.Endpoints = store
	serve(t, path, agent)
	raw := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}}
	for _, tc := range []struct {
		method, path, body string
		code               int
		want               string
	}{
		{"PUT", "/v1/endpoint", strings.Repeat("x", maxEndpoint+1), 400, "request body too large"},
		{"PUT", "/v1/endpoint?force=1", "{}", 400, `unknown parameter`},
		{"DELETE", "/v1/endpoint/shop/a?x=1", "", 400, `unknown parameter`},
		{"PATCH", "/v1/endpoint/shop/a", "", 404, "no such path"},
	} {
		request, err := http.NewRequestWithContext(t.Context(), tc.method, "http://agent"+tc.path, strings.NewReader(tc.body))
		if err != nil {
			t.Fatal(err)
		}
		response, err := raw.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != tc.code || !strings.Contains(string(body), tc.want) {
			t.Errorf("%s %s: %d %s, want %d with %q", tc.method, tc.path, response.StatusCode, body, tc.code, tc.want)
		}
	}
	if len(store.asked) > 0 {
		t.Errorf("the store was asked %q", store.asked)
	}
}
