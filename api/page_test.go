// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// servePage runs a page server of an agent that knows one of everything, and returns its address.
func servePage(t *testing.T) (string, *PageServer) { return servePageOf(t, fakeAgent()) }

func servePageOf(t *testing.T, agent Agent) (string, *PageServer) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := listener.Addr().(*net.TCPAddr).AddrPort()
	listener.Close()
	p := NewPageServer(at, agent, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	select {
	case <-p.Ready():
	case err := <-ended:
		t.Fatal(err)
	}
	return at.String(), p
}

// The page can be read from this machine's own names only, by no other page, and nothing can be written through it.
func TestPageIsGuarded(t *testing.T) {
	at, p := servePage(t)
	_, port, err := net.SplitHostPort(at)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		method, path, host, origin string
		want                       int
	}{
		{"GET", "/", "", "", 200},
		{"HEAD", "/", "", "", 200},
		{"GET", "/page.js", "localhost:" + port, "", 200},
		{"GET", "/mesh.js", "[::1]:" + port, "", 200},
		{"GET", "/v1/status", "localhost", "", 200},
		{"GET", "/v1/status", at, "http://" + at, 200},
		{"GET", "/v1/node", "", "", 200},
		{"GET", "/v1/service", "", "", 200},
		{"GET", "/v1/version", "", "", 200},
		{"GET", "/v1/explain/10.2.1.10", "", "", 200},
		{"GET", "/v1/explain/nonsense", "", "", 400},
		{"GET", "/v1/status", "weft.example:" + port, "", 403}, // a name that somebody made resolve to 127.0.0.1
		{"GET", "/", "agent:" + port, "", 403},
		{"GET", "/", "192.0.2.1", "", 403},
		{"GET", "/v1/status", at, "http://localhost:1", 403},
		{"GET", "/v1/status", at, "https://" + at, 403},
		{"GET", "/v1/status", at, "null", 403},
		{"GET", "/v1/status", at, "http://%zz", 403},
		{"POST", "/", "", "", 405},
		{"PUT", "/v1/status", "", "", 405},
		{"POST", "/v1/endpoint", "", "", 404}, // what the socket lets root do
		{"GET", "/v1/ip", "", "", 404},
		{"GET", "/v1/verify", "", "", 404},
		{"GET", "/metrics", "", "", 404},
		{"GET", "/page/page.js", "", "", 404},
		{"GET", "/page.go", "", "", 404},
	} {
		request, err := http.NewRequestWithContext(t.Context(), tc.method, "http://"+at+tc.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Close = true
		request.Host = tc.host
		request.AddCookie(&http.Cookie{Name: p.key.cookie, Value: p.key.token})
		if tc.origin != "" {
			request.Header.Set("Origin", tc.origin)
		}
		response, err := http.DefaultTransport.RoundTrip(request)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		if response.StatusCode != tc.want {
			t.Errorf("%s %s, host %q, origin %q: %d, want %d: %s", tc.method, tc.path, tc.host, tc.origin, response.StatusCode, tc.want, body)
		}
		for name := range response.Header {
			if strings.HasPrefix(name, "Access-Control") {
				t.Errorf("%s: answers with %s", tc.path, name)
			}
		}
		if tc.want == 200 && !strings.HasPrefix(tc.path, "/v1") && response.Header.Get("Content-Security-Policy") != pagePolicy {
			t.Errorf("%s: Content-Security-Policy %q", tc.path, response.Header.Get("Content-Security-Policy"))
		}
	}
}

// The socket is reached from a browser where somebody forwards a port to it: it is guarded as the page is, whoever writes
// included, and serves the page itself.
func TestSocketIsGuarded(t *testing.T) {
	path := socketPath(t)
	serve(t, path, fakeAgent())
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}}
	for _, tc := range []struct {
		method, url, origin string
		want                int
	}{
		{"GET", "http://weft/", "", 200},
		{"GET", "http://localhost:9880/", "", 200},
		{"GET", "http://localhost:9880/v1/status", "http://localhost:9880", 200},
		{"GET", "http://weft.example:9880/v1/status", "", 403},
		{"GET", "http://localhost:9880/v1/status", "http://weft.example", 403},
		{"POST", "http://localhost:9880/v1/endpoint", "http://weft.example", 403},
		{"POST", "http://localhost:9880/v1/verify", "null", 403},
	} {
		request, err := http.NewRequestWithContext(t.Context(), tc.method, tc.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		if tc.origin != "" {
			request.Header.Set("Origin", tc.origin)
		}
		response, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != tc.want {
			t.Errorf("%s %s, origin %q: %d, want %d", tc.method, tc.url, tc.origin, response.StatusCode, tc.want)
		}
	}
}

func TestPageAddressInUse(t *testing.T) {
	at, _ := servePage(t)
	err := NewPageServer(netip.MustParseAddrPort(at), fakeAgent(), slog.New(slog.DiscardHandler)).Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "choose another with --page-address") {
		t.Errorf("Run: %v", err)
	}
}

// A cluster that calls itself, its nodes and its labels what a browser would run is shown as it wrote it, and nothing of it
// runs; every state of a cluster is shown; what is lost is said.
func TestPageInBrowser(t *testing.T) {
	const evil = `<img src=x onerror="document.title='owned'">`
	agent := fakeAgent()
	states := []string{"ready", "syncing", "stale", "failed", "conflict"}
	agent.Status = func() Status {
		s := Status{
			Meta: MetaOf(KindStatus), Version: evil, Problems: []string{evil}, Cluster: LocalCluster{Name: "east", ID: 1},
			Node: LocalNode{Name: "east-n1"}, Clusters: []Cluster{{
				Name: evil, ID: 200, State: "failed", LastError: evil, Rejected: map[string]uint64{evil: 3}, Rejections: []Rejection{{Kind: evil, Key: evil, Reason: evil}},
			}},
		}
		for i, state := range states {
			s.Clusters = append(s.Clusters, Cluster{Name: "c-" + state, ID: uint32(i + 2), State: state, Ready: state == "ready", Counts: Counts{Nodes: i}})
		}
		return s
	}
	agent.Nodes = func() []Node {
		return []Node{{Name: evil, Cluster: "c-ready"}, {Name: "east-n1", Cluster: "east", Local: true}}
	}
	agent.Explain = func(a netip.Addr) Explanation {
		return Explanation{
			Meta: MetaOf(KindExplanation), Address: a, Identity: Identity{ID: 131329, Labels: []string{evil}}, Why: evil,
			Claims: []Claim{{IP: fakeIP, Wins: true, Key: evil}}, Refused: []Refused{{Cluster: evil, Rejection: Rejection{Kind: "ip", Key: evil, Reason: evil}}},
		}
	}
	agent.Describe = func(flows []Flow) {
		for i := range flows {
			flows[i].Source.Labels = []string{evil}
		}
	}
	agent.Services = func() iter.Seq[Service] {
		return slices.Values([]Service{
			{Namespace: "shop", Name: "web", Local: &LocalService{Global: true, Affinity: "local", Ready: 2, Draining: 1},
				Clusters:  []ServiceCluster{{Cluster: "c-ready", Shared: true, Ready: 3}, {Cluster: "c-stale", Shared: true, Ready: 4, Lost: true}},
				Frontends: []ServiceFrontend{{IP: netip.MustParseAddr("fd00::1"), Port: 80, Protocol: "TCP", Used: 2, Why: "affinity"}}},
			{Namespace: "shop", Name: evil, Clusters: []ServiceCluster{{Cluster: evil, Ready: 1}}},
			{Namespace: "shop", Name: "own", Local: &LocalService{Ready: 1}},
		})
	}
	agent.Flows.Append([]Flow{{Device: evil, Verdict: evil, Protocol: "TCP", Source: Peer{IP: netip.MustParseAddr("10.2.1.10"), Port: 80, Identity: 131329}, Destination: Peer{IP: netip.MustParseAddr("10.1.1.10"), Name: "world"}}})
	_, p := servePageOf(t, agent)
	url, _ := p.URL()

	b := testutil.StartBrowser(t)
	b.Open(t, url+"#10.2.1.10")
	awaitText(t, b, "#rows", append(states, evil)...)
	awaitText(t, b, "#problems", evil)
	awaitText(t, b, "#answer", "10.2.1.10 is "+evil, "131329", "in force", "10.2.1.10/32")
	awaitText(t, b, "#servicerows", "shop/web", "[fd00::1]:80/TCP", "own 2+1 draining, c-ready 3, c-stale 4 (lost)", "2: affinity", evil+" 1 (not shared)", "no service of the name")
	if shown := b.Text(t, "#servicerows"); strings.Contains(shown, "shop/own") {
		t.Errorf("a service that is its own cluster's alone is shown: %q", shown)
	}
	awaitText(t, b, "#pairrows", evil, "world")
	awaitText(t, b, "#flowrows", evil, "10.2.1.10:80")
	awaitText(t, b, "#health", "1 problem")
	b.Run(t, `document.querySelector("#rows tr").click()`, nil)
	awaitText(t, b, "#detail", evil+": 3")
	var seen struct {
		Title  string
		Images int
		Groups int
	}
	b.Run(t, `return {title: document.title, images: document.images.length, groups: document.querySelectorAll("#picture g[role=button]").length}`, &seen)
	if seen.Title != "✗ east-n1 · weft" || seen.Images != 0 || seen.Groups != len(states)+1 {
		t.Errorf("the page is %+v", seen)
	}
	for _, complaint := range b.Complaints(t) {
		t.Errorf("the browser complains: %s", complaint)
	}
}

// awaitText waits until an element shows all of the texts.
func awaitText(t *testing.T, b *testutil.Browser, selector string, texts ...string) {
	t.Helper()
	testutil.Eventually(t, 30*time.Second, func() error {
		shown := b.Text(t, selector)
		for _, text := range texts {
			if !strings.Contains(shown, text) {
				return fmt.Errorf("%s shows %q, want %q", selector, shown, text)
			}
		}
		return nil
	})
}
