// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
)

func TestHealth(t *testing.T) {
	agent := fakeAgent()
	status := Status{Healthy: true, Datapath: Datapath{Ready: true}}
	agent.Status = func() Status { return status }
	at := startMetrics(t, agent)
	for _, tc := range []struct {
		harm               func()
		live, ready, whole string // beginnings of answers
	}{
		{func() {}, "200 ok", "200 ok", "200 ok"},
		{func() { status.Problems = []string{"cluster we\x1b[2Jst is stale"} }, "200 ok", "200 ok", `503 "cluster we\x1b[2Jst is stale"`},
		{func() { status.Datapath.Map = Map{Pending: 3, Error: "full"} }, "200 ok", `503 "datapath: 3 changes are not in the map: full"`, "503 "},
		{func() { status.Datapath = Datapath{} }, "200 ok", `503 "datapath: the kernel has not been brought in line yet"`, "503 "},
	} {
		tc.harm()
		for path, want := range map[string]string{"/livez": tc.live, "/readyz": tc.ready, "/healthz": tc.whole} {
			if got := request(t, http.MethodGet, "http://"+at+path, ""); !strings.HasPrefix(got, want) {
				t.Errorf("%s: %q, want %q", path, got, want)
			}
		}
	}
	if got := request(t, http.MethodGet, "http://"+at+"/metrics", ""); got != "200 weft_healthy 1\n" {
		t.Errorf("metrics: %q", got)
	}
}

// On TCP there is nothing but metrics and probes, to be read, and not by a page from elsewhere.
func TestMetricsServerIsStrict(t *testing.T) {
	at := startMetrics(t, fakeAgent())
	_, port, err := net.SplitHostPort(at)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ method, path, host, want string }{
		{http.MethodGet, "/metrics", "localhost:" + port, "200 "},
		{http.MethodGet, "/metrics", "127.0.0.2", "200 "},
		{http.MethodGet, "/metrics", "[::1]:1", "200 "},
		{http.MethodGet, "/metrics", "attacker.example:" + port, "403 "},
		{http.MethodGet, "/metrics", "localhost.attacker.example", "403 "},
		{http.MethodGet, "/metrics", "192.0.2.1", "403 "},
		{http.MethodPost, "/metrics", "", "405 "},
		{http.MethodGet, "/metrics?x=1", "", "400 "},
		{http.MethodGet, "/v1/status", "", "404 "},
		{http.MethodGet, "/v1/ip", "", "404 "},
		{http.MethodGet, "/", "", "404 "},
	} {
		if got := request(t, tc.method, "http://"+at+tc.path, tc.host); !strings.HasPrefix(got, tc.want) || strings.Contains(got, "Access-Control") {
			t.Errorf("%s %s of host %q: %q, want %s", tc.method, tc.path, tc.host, got, tc.want)
		}
	}
}

func TestMetricsAddress(t *testing.T) {
	for text, good := range map[string]bool{"127.0.0.1:9879": true, "[::1]:9879": true, "127.1.2.3:0": true, "0.0.0.0:9879": false, "[::]:1": false, "192.0.2.1:1": false} {
		if err := CheckMetricsAddress(netip.MustParseAddrPort(text)); (err == nil) != good || !good && !errors.Is(err, ErrNotLoopback) {
			t.Errorf("%s: %v", text, err)
		}
	}
	if err := CheckMetricsAddress(netip.AddrPort{}); err != nil {
		t.Errorf("none: %v", err)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	at := netip.MustParseAddrPort(taken.Addr().String())
	err = NewMetricsServer(at, fakeAgent(), slog.New(slog.DiscardHandler)).Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "choose another with --metrics-address") {
		t.Errorf("an address that is taken: %v", err)
	}
}

// startMetrics runs a server on a free port until the test ends.
func startMetrics(t *testing.T, agent Agent) (at string) {
	t.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at = free.Addr().String()
	free.Close()
	m := NewMetricsServer(netip.MustParseAddrPort(at), agent, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	select {
	case <-m.Ready():
	case err := <-done:
		done <- nil
		t.Fatalf("Run: %v", err)
	}
	return at
}

// request returns the status and the body of one answer.
func request(t *testing.T, method, url, host string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = host
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.Status[:4] + string(body)
}
