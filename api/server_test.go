// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/weftmesh/weft/internal/testutil"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	fakeIP      = IP{Prefix: netip.MustParsePrefix("10.2.1.10/32"), Identity: 131329, Cluster: 2, ClusterName: "west", Source: "clustermesh", Host: netip.MustParseAddr("172.18.2.1")}
	fakeNode    = Node{Name: "west-n1", Cluster: "west", ClusterID: 2, Addresses: []NodeAddress{{"InternalIP", netip.MustParseAddr("172.18.2.1")}}}
	fakeService = Service{Namespace: "shop", Name: "web", Clusters: []ServiceCluster{{Cluster: "west", Ready: 2}}, Frontends: []ServiceFrontend{{IP: netip.MustParseAddr("10.96.1.10"), Port: 80, Protocol: "TCP"}}}
	fakeID      = Identity{ID: 131329, Cluster: 2, ClusterName: "west", Labels: []string{"k8s:app=web"}}
)

// fakeAgent knows one of everything.
func fakeAgent() Agent {
	return Agent{
		Version:    func() VersionInfo { return VersionInfo{Meta: MetaOf(KindVersion), Version: "v0"} },
		Status:     func() Status { return Status{Meta: MetaOf(KindStatus), Version: "v0", Healthy: true} },
		IPs:        func() iter.Seq[IP] { return slices.Values([]IP{fakeIP, fakeIP}) },
		Nodes:      func() []Node { return []Node{fakeNode} },
		Identities: func() iter.Seq[Identity] { return slices.Values([]Identity{fakeID}) },
		IP: func(a netip.Addr) (IPDetail, bool) {
			return IPDetail{Meta: MetaOf(KindIP), Address: a, IP: fakeIP}, fakeIP.Prefix.Contains(a)
		},
		Identity: func(id uint32) (Identity, bool) { return fakeID, id == fakeID.ID },
		Describe: func(flows []Flow) {
			for i := range flows {
				flows[i].Source.Labels = []string{"k8s:app=web"}
			}
		},
		Flows:    NewFlowLog(),
		Services: func() iter.Seq[Service] { return slices.Values([]Service{fakeService}) },
		Service:  func(namespace, name string) (Service, bool) { return fakeService, namespace+"/"+name == "shop/web" },
		Explain: func(a netip.Addr) Explanation {
			return Explanation{Meta: MetaOf(KindExplanation), Address: a, Why: "so"}
		},
		Conflicts: func() iter.Seq[Conflict] {
			return slices.Values([]Conflict{{Prefix: fakeIP.Prefix, Winner: fakeIP, Shadowed: []IP{fakeIP}, Why: "so"}})
		},
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "weft_healthy 1") }),
	}
}

// serve runs a server until the test ends, or stop is called, which returns Run's error.
func serve(t *testing.T, path string, agent Agent) (stop func() error) {
	t.Helper()
	s := NewServer(path, agent, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	var err error
	go func() {
		err = s.Run(ctx)
		close(ended)
	}()
	select {
	case <-s.Ready():
	case <-ended:
		t.Fatalf("Run: %v", err)
	}
	stop = func() error {
		cancel()
		<-ended
		return err
	}
	t.Cleanup(func() { _ = stop() })
	return stop
}

func socketPath(t *testing.T) string { return filepath.Join(t.TempDir(), "run", "weft.sock") }

func TestClientAndServer(t *testing.T) {
	path := socketPath(t)
	serve(t, path, fakeAgent())
	c, ctx := NewClient(path), t.Context()
	check := func(what string, want, got any, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got)\n%s", what, diff)
		}
	}
	version, err := c.Version(ctx)
	check("version", VersionInfo{Meta: MetaOf(KindVersion), Version: "v0"}, version, err)
	status, err := c.Status(ctx)
	check("status", Status{Meta: MetaOf(KindStatus), Version: "v0", Healthy: true}, status, err)
	ips, err := c.IPs(ctx)
	check("ips", []IP{fakeIP, fakeIP}, ips, err)
	ip, err := c.IP(ctx, netip.MustParseAddr("::ffff:10.2.1.10"))
	check("ip", IPDetail{Meta: MetaOf(KindIP), Address: netip.MustParseAddr("10.2.1.10"), IP: fakeIP}, ip, err)
	nodes, err := c.Nodes(ctx)
	check("nodes", []Node{fakeNode}, nodes, err)
	ids, err := c.Identities(ctx)
	check("identities", []Identity{fakeID}, ids, err)
	id, err := c.Identity(ctx, fakeID.ID)
	check("identity", fakeID, id, err)

	explanation, err := c.Explain(ctx, netip.MustParseAddr("::ffff:10.2.1.10"))
	check("explain", Explanation{Meta: MetaOf(KindExplanation), Address: netip.MustParseAddr("10.2.1.10"), Why: "so"}, explanation, err)
	services, err := c.Services(ctx)
	check("services", []Service{fakeService}, services, err)
	found, err := c.Service(ctx, "shop", "web")
	check("service", ServiceDetail{Meta: MetaOf(KindService), Service: fakeService}, found, err)
	if _, err := c.Service(ctx, "shop", "a/b"); !errors.Is(err, ErrNotFound) {
		t.Errorf("unknown service: %v", err)
	}
	conflicts, err := c.Conflicts(ctx)
	check("conflicts", []Conflict{{Prefix: fakeIP.Prefix, Winner: fakeIP, Shadowed: []IP{fakeIP}, Why: "so"}}, conflicts, err)

	if _, err := c.IP(ctx, netip.MustParseAddr("10.0.0.1")); !errors.Is(err, ErrNotFound) || err.Error() != "no prefix contains 10.0.0.1: not found" {
		t.Errorf("unknown address: %v", err)
	}
	if _, err := c.Identity(ctx, 7); !errors.Is(err, ErrNotFound) {
		t.Errorf("unknown identity: %v", err)
	}
}

func TestStrictRoutes(t *testing.T) {
	path := socketPath(t)
	serve(t, path, fakeAgent())
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}
	for _, tc := range []struct {
		method, path string
		code         int
		body         string
	}{
		{"GET", "/v1/version", 200, `{"apiVersion":"weft/v1","kind":"Version","version":"v0","go":"","platform":""}`},
		{"GET", "/v1/ip", 200, `{"apiVersion":"weft/v1","kind":"IPList","items":[{"prefix":"10.2.1.10/32",`},
		{"HEAD", "/v1/status", 200, ""},
		{"GET", "/page", 404, `{"apiVersion":"weft/v1","kind":"Error","code":404,"message":"no such path: /page"}`},
		{"GET", "/v2/status", 404, "no such path: /v2/status"},
		{"GET", "/v1/status/", 404, "no such path"},
		{"POST", "/v1/status", 405, "method POST: this path can only be read"},
		{"DELETE", "/v1/ip/10.0.0.1", 405, "method DELETE"},
		{"GET", "/v1/status?verbose=1", 400, `unknown parameter \"verbose\"`},
		{"GET", "/v1/flows?fellow=1", 400, `unknown parameter \"fellow\"`},
		{"GET", "/v1/flows?follow=maybe", 400, "follow: want true or false"},
		{"GET", "/v1/flows?last=-1", 400, "last: want a number"},
		{"GET", "/v1/ip/10.0.0.0%2F8", 400, `\"10.0.0.0/8\" is not an IP address`},
		{"GET", "/v1/ip/fe80::1%25eth0", 400, "is not an IP address"},
		{"GET", "/v1/identity/x", 400, "is not the number of an identity"},
		{"GET", "/v1/identity/4294967296", 400, "is not the number of an identity"},
	} {
		request, err := http.NewRequest(tc.method, "http://agent"+tc.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil || response.StatusCode != tc.code || !strings.Contains(string(body), tc.body) {
			t.Errorf("%s %s: %d %s %v; want %d with %s", tc.method, tc.path, response.StatusCode, body, err, tc.code, tc.body)
		}
	}
}

func flow(n int) Flow { return Flow{Device: fmt.Sprint(n), Protocol: "TCP"} }

func TestFlows(t *testing.T) {
	path := socketPath(t)
	agent := fakeAgent()
	stop := serve(t, path, agent)
	agent.Flows.Append([]Flow{flow(0), flow(1), flow(2)})
	c := NewClient(path)
	collect := func(q FlowQuery) (devices []string) {
		t.Helper()
		if err := c.Flows(t.Context(), q, func(e FlowEvent) error {
			if e.Kind != KindFlow || !slices.Equal(e.Source.Labels, []string{"k8s:app=web"}) {
				t.Errorf("event %+v", e)
			}
			devices = append(devices, e.Device)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return devices
	}
	if got := collect(FlowQuery{Last: -1}); !slices.Equal(got, []string{"0", "1", "2"}) {
		t.Errorf("all flows: %q", got)
	}
	if got := collect(FlowQuery{Last: 1}); !slices.Equal(got, []string{"2"}) {
		t.Errorf("the last flow: %q", got)
	}

	// A follower sees what comes, and ends with the agent.
	seen := make(chan string, 10)
	ended := make(chan error, 1)
	go func() {
		ended <- c.Flows(t.Context(), FlowQuery{Last: 1, Follow: true}, func(e FlowEvent) error {
			seen <- e.Device
			return nil
		})
	}()
	if got := <-seen; got != "2" {
		t.Errorf("first flow %q", got)
	}
	agent.Flows.Append([]Flow{flow(3)})
	if got := <-seen; got != "3" {
		t.Errorf("followed flow %q", got)
	}
	if err := stop(); err != nil {
		t.Errorf("Run: %v", err)
	}
	if err := <-ended; err != nil {
		t.Errorf("Flows: %v", err)
	}
}

func TestFlowLogLosesTheOldest(t *testing.T) {
	l := NewFlowLog()
	changed := l.Changed()
	for i := range flowLogSize + 10 {
		l.Append([]Flow{flow(i)})
	}
	<-changed
	flows, next, lost := l.Since(3, make([]Flow, 0, 2))
	if lost != 7 || next != 12 || len(flows) != 2 || flows[0].Device != "10" {
		t.Errorf("Since(3): %d flows from %q, next %d, lost %d", len(flows), flows[0].Device, next, lost)
	}
	if got := l.Last(5); got != flowLogSize+5 {
		t.Errorf("Last(5) = %d", got)
	}
	if got := l.Last(1 << 20); got != 10 {
		t.Errorf("Last(all) = %d", got)
	}
}

func TestSocket(t *testing.T) {
	path := socketPath(t)
	stop := serve(t, path, fakeAgent())
	info, err := os.Lstat(path)
	if err != nil || info.Mode() != os.ModeSocket|0o660 {
		t.Fatalf("socket: %v %v, want mode 0660", info.Mode(), err)
	}
	dir, err := os.Stat(filepath.Dir(path))
	if err != nil || dir.Mode().Perm()&0o022 != 0 {
		t.Errorf("directory: %v %v, want it writable by its owner alone", dir.Mode(), err)
	}

	second := NewServer(path, fakeAgent(), slog.New(slog.DiscardHandler))
	if err := second.Run(t.Context()); !errors.Is(err, ErrInUse) {
		t.Errorf("a second agent: %v, want ErrInUse", err)
	}
	if _, err := NewClient(path).Version(t.Context()); err != nil {
		t.Errorf("after a second agent tried: %v", err)
	}

	// What a killed agent leaves is replaced, and a stopping agent does not take away its successor's socket.
	if err := os.Rename(path, path+".killed"); err != nil {
		t.Fatal(err)
	}
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	dead.Close()
	stopSuccessor := serve(t, path, fakeAgent())
	if err := stop(); err != nil {
		t.Errorf("Run: %v", err)
	}
	if _, err := NewClient(path).Version(t.Context()); err != nil {
		t.Errorf("after the first agent ended: %v", err)
	}
	if err := stopSuccessor(); err != nil {
		t.Errorf("Run: %v", err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left behind: %v", err)
	}
}

func TestSocketRefusals(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		file:                               "exists and is not a socket",
		filepath.Join(file, "x"):           "not a directory",
		"/tmp/" + strings.Repeat("x", 110): "longer than 103 bytes",
	} {
		err := NewServer(path, fakeAgent(), slog.New(slog.DiscardHandler)).Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
	if _, err := os.Stat(file); err != nil {
		t.Errorf("the file in the way is gone: %v", err)
	}
}

func TestUnreachable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none.sock")
	_, err := NewClient(path).Status(t.Context())
	want := "agent unreachable at " + path + ": connect: no such file or directory: is `weft agent` running?"
	if !errors.Is(err, ErrUnreachable) || err.Error() != want {
		t.Errorf("error %q\nwant  %q", err, want)
	}
}

// An answer that breaks off is no answer.
func TestCutOffList(t *testing.T) {
	path := socketPath(t)
	agent := fakeAgent()
	agent.IPs = func() iter.Seq[IP] {
		return func(yield func(IP) bool) {
			yield(fakeIP)
			panic(http.ErrAbortHandler)
		}
	}
	serve(t, path, agent)
	if ips, err := NewClient(path).IPs(t.Context()); err == nil {
		t.Errorf("half a list was taken for a whole one: %v", ips)
	}
}

// A reader that does not read holds up neither others nor the end of the server.
func TestStuckReader(t *testing.T) {
	path := socketPath(t)
	agent := fakeAgent()
	stop := serve(t, path, agent)
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "GET /v1/flows?follow=true HTTP/1.1\r\nHost: agent\r\n\r\n")
	for i := range 4 * flowLogSize {
		agent.Flows.Append([]Flow{flow(i)})
	}
	testutil.Eventually(t, 30*time.Second, func() error {
		_, err := NewClient(path).Version(t.Context())
		return err
	})
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	select {
	case err := <-stopped:
		if err != nil {
			t.Errorf("Run: %v", err)
		}
	case <-time.After(10 * stopTimeout):
		t.Error("the server does not stop")
	}
}
