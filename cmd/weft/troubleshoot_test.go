// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
	recorded "github.com/weftmesh/weft/internal/testutil/golden"
	"github.com/weftmesh/weft/kvstore"
)

// securedWest is the etcd of cluster west, with TLS and authentication, and a directory with a config to read it.
type securedWest struct {
	etcd *testutil.Etcd
	ca   *testutil.CA
	dir  string
}

func newSecuredWest(t *testing.T) *securedWest {
	t.Helper()
	ca := testutil.NewCA(t, "mesh-ca")
	w := &securedWest{etcd: testutil.StartEtcd(t, testutil.WithTLS(ca), testutil.WithAuth("west")), ca: ca, dir: t.TempDir()}
	w.etcd.Load(t, recorded.Path(t, "kvstore-state-west.jsonl"))
	w.etcd.Put(t, "cilium/.heartbeat", testNow.Add(-30*time.Second).Format(time.RFC3339))
	testutil.MustWriteFile(t, w.path("ca.crt"), ca.PEM)
	nextYear := time.Now().AddDate(1, 0, 1)
	w.etcd.Present(t, ca, testutil.Certificate{NotAfter: nextYear})
	w.client(t, ca, testutil.Certificate{CommonName: "remote", NotAfter: nextYear})
	w.config(t, "west")
	return w
}

func (w *securedWest) path(name string) string { return filepath.Join(w.dir, name) }

// client makes another client certificate.
func (w *securedWest) client(t *testing.T, ca *testutil.CA, c testutil.Certificate) {
	t.Helper()
	cert, key := ca.Issue(t, c)
	testutil.MustWriteFile(t, w.path("client.crt"), cert)
	testutil.MustWriteFile(t, w.path("client.key"), key)
}

// config writes the config of a cluster, as Cilium's is, changed by pairs of what to replace by what.
func (w *securedWest) config(t *testing.T, name string, changes ...string) {
	t.Helper()
	_, port, err := net.SplitHostPort(w.etcd.Addr())
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("endpoints:\n- https://west.mesh.cilium.io:%s\ntrusted-ca-file: %s\ncert-file: %s\nkey-file: %s\n"+
		"cilium-host-aliases:\n- hostname: west.mesh.cilium.io\n  ips: [127.0.0.1]\n",
		port, w.path("ca.crt"), w.path("client.crt"), w.path("client.key"))
	testutil.MustWriteFile(t, w.path(name), []byte(strings.NewReplacer(changes...).Replace(text)))
}

// diagnose troubleshoots the etcds and returns the steps of the first.
func (w *securedWest) diagnose(t *testing.T, args ...string) (code int, d diagnosis) {
	t.Helper()
	env := map[string]string{"WEFT_CLUSTERMESH_CONFIG": w.dir, "WEFT_TIMEOUT": "5s"}
	code, stdout, stderr := weft(t, env, append([]string{"troubleshoot", "kvstore", "-o", "json"}, args...)...)
	var result troubleshooting
	if err := json.Unmarshal([]byte(stdout), &result); err != nil || len(result.Items) == 0 || stderr != "" {
		t.Fatalf("exit code %d, stdout %q, stderr %q: %v", code, stdout, stderr, err)
	}
	if result.Healthy != (code == 0) {
		t.Errorf("exit code %d, healthy %v", code, result.Healthy)
	}
	return code, result.Items[0]
}

func stepsOf(d diagnosis) []string {
	var steps []string
	for _, s := range d.Steps {
		steps = append(steps, s.Name)
	}
	return slices.Compact(steps)
}

// mustFail checks which step failed, that it is the last but for those about the client's certificate, and what it says.
func mustFail(t *testing.T, d diagnosis, step, message, advice string) {
	t.Helper()
	for _, s := range d.Steps {
		if s.Outcome != kvstore.StepFailed {
			continue
		}
		if s.Name != step || !strings.Contains(s.Message, message) || !strings.Contains(s.Advice, advice) {
			t.Errorf("step %q failed: %q, advice %q\nwant %q: %q, %q", s.Name, s.Message, s.Advice, step, message, advice)
		}
		return
	}
	t.Errorf("nothing failed, want step %q: %q\n%v", step, message, d.Steps)
}

func TestTroubleshootHealthy(t *testing.T) {
	w := newSecuredWest(t)
	code, d := w.diagnose(t)
	want := []string{
		"config", "resolve", "connect", "TLS", "accepted authorities", "client certificate", "version", "authenticate",
		"read", "cluster-config", "canaries", "read", "server", "heartbeat",
	}
	if got := stepsOf(d); code != 0 || d.Name != "west" || !slices.Equal(got, want) {
		t.Errorf("exit code %d, cluster %q, steps %q\nwant %q", code, d.Name, got, want)
	}
	code, stdout, stderr := weft(t, map[string]string{"WEFT_CLUSTERMESH_CONFIG": w.dir}, "troubleshoot", "kvstore", "west")
	if code != 0 || stderr != "" {
		t.Errorf("exit code %d, stderr %q", code, stderr)
	}
	for _, want := range []string{
		"cluster west (" + w.path("west") + ")\n",
		"\n  ✓ resolve: west.mesh.cilium.io is 127.0.0.1, by cilium-host-aliases\n",
		"\n  ✓ connect: TCP to " + w.etcd.Addr() + "\n",
		"\n      subject CN=clustermesh-apiserver.kube-system.svc, issuer CN=mesh-ca, for *.mesh.cilium.io localhost 127.0.0.1 ::1, valid ",
		"(365 days left), ECDSA P-256\n",
		"\n  ✓ accepted authorities: CN=mesh-ca\n",
		"\n  ✓ version: etcd 3.7.",
		"\n  ✓ client certificate: certificate of CN=remote, which fits its key\n",
		"\n  ✓ authenticate: etcd answers to the client certificate of \"remote\"\n",
		"\n  ✓ cluster-config: cluster id 2, of 255 at most, cached=false, canaries=true\n",
		"\n  ✓ read: cilium/state/ip/v1/default/ may be read; the first key is cilium/state/ip/v1/default/10.",
		"\n  ✓ heartbeat: written 30s ago\n1 config, all can be read\n",
	} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
}

// lesson: T2
func TestTroubleshootCertificates(t *testing.T) {
	w := newSecuredWest(t)
	other := testutil.NewCA(t, "other-ca")
	now := time.Now()
	for _, tc := range []struct {
		name                  string
		server                testutil.Certificate
		step, message, advice string
		client                testutil.Certificate
		clientCA, serverCA    *testutil.CA
		changes               []string // of the config
	}{
		{name: "unknown authority", serverCA: other, step: "TLS", message: "unknown authority", advice: "put the authority that signed the certificate, CN=other-ca, into"},
		{name: "wrong name", server: testutil.Certificate{Hosts: []string{"east.example.net"}}, step: "TLS", message: "not west.mesh.cilium.io", advice: "the certificate is for east.example.net"},
		{name: "expired", server: testutil.Certificate{NotBefore: now.AddDate(0, 0, -9), NotAfter: now.AddDate(0, 0, -3)}, step: "TLS", message: "expired", advice: "renew the server's certificate"},
		{name: "not yet", server: testutil.Certificate{NotBefore: now.Add(time.Hour), NotAfter: now.Add(2 * time.Hour)}, step: "TLS", message: "not yet valid", advice: "clocks"},
		{name: "not for servers", server: testutil.Certificate{Usage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, step: "TLS", message: "incompatible key usage", advice: "serverAuth"},
		{name: "no authority file", changes: []string{"ca.crt", "none.crt"}, step: "TLS", message: "none.crt", advice: "correct trusted-ca-file"},
		{name: "client unknown to the server", clientCA: other, step: "client certificate", message: "none of the accepted authorities", advice: "signed by an authority that the server trusts"},
		{name: "client expired", client: testutil.Certificate{NotBefore: now.AddDate(0, 0, -9), NotAfter: now.AddDate(0, 0, -3)}, step: "client certificate", message: "ended 3 days ago", advice: "renew it"},
		{name: "client not for clients", client: testutil.Certificate{Usage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}, step: "client certificate", message: "not for clients", advice: "clientAuth"},
		{name: "other key", changes: []string{"client.key", "other.key"}, step: "client certificate", message: "does not match", advice: "its own key"},
		{name: "none", changes: []string{"cert-file: ", "x: ", "key-file: ", "y: "}, step: "version", message: "certificate required", advice: "the server lets in nobody without a client certificate"},
		{name: "unknown user", client: testutil.Certificate{CommonName: "stranger"}, step: "heartbeat", message: "permission denied", advice: "give the user's role the right to read cilium/.heartbeat"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.client.CommonName == "" {
				tc.client.CommonName = "remote"
			}
			w.etcd.Present(t, orCA(tc.serverCA, w.ca), tc.server)
			w.client(t, orCA(tc.clientCA, w.ca), tc.client)
			_, key := w.ca.Issue(t, testutil.Certificate{})
			testutil.MustWriteFile(t, w.path("other.key"), key)
			w.config(t, "west", tc.changes...)
			code, d := w.diagnose(t)
			if code != 1 {
				t.Errorf("exit code %d", code)
			}
			mustFail(t, d, tc.step, tc.message, tc.advice)
			if i := slices.IndexFunc(d.Steps, func(s kvstore.Step) bool { return s.Name == "TLS" }); i < 0 || len(d.Steps[i].Details) != 1 {
				t.Errorf("the server's certificate is not shown: %+v", d.Steps)
			}
		})
	}
}

// A certificate that ends soon is a warning, and no failure.
// lesson: T3
func TestTroubleshootExpiry(t *testing.T) {
	w := newSecuredWest(t)
	inSixDays := time.Now().AddDate(0, 0, 6).Add(time.Hour)
	w.etcd.Present(t, w.ca, testutil.Certificate{NotAfter: inSixDays})
	w.client(t, w.ca, testutil.Certificate{CommonName: "remote", NotAfter: inSixDays})
	code, d := w.diagnose(t)
	if code != 0 {
		t.Errorf("exit code %d", code)
	}
	var warned []string
	for _, s := range d.Steps {
		if s.Outcome == kvstore.StepWarning && strings.Contains(s.Message, "ends in 6 days") {
			warned = append(warned, s.Name)
		}
	}
	if want := []string{"TLS", "client certificate"}; !slices.Equal(warned, want) {
		t.Errorf("warned of %q, want %q", warned, want)
	}
}

// A server of TLS 1.2 is refused, and accepted where the config says so.
func TestTroubleshootOldTLS(t *testing.T) {
	w := newSecuredWest(t)
	cert, key := w.ca.Issue(t, testutil.Certificate{CommonName: "old", Hosts: testutil.ServerHosts})
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	old := httptest.NewUnstartedServer(http.NotFoundHandler())
	old.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MaxVersion: tls.VersionTLS12}
	old.StartTLS()
	defer old.Close()
	_, port, _ := net.SplitHostPort(w.etcd.Addr())
	_, oldPort, _ := net.SplitHostPort(old.Listener.Addr().String())
	w.config(t, "west", port, oldPort)
	_, d := w.diagnose(t, "--timeout", "1s")
	mustFail(t, d, "TLS", "the server speaks TLS 1.2 at most", "tls-min-version")
	w.config(t, "west", port, oldPort, "trusted-ca-file", "tls-min-version: \"1.2\"\ntrusted-ca-file")
	_, d = w.diagnose(t, "--timeout", "1s")
	mustFail(t, d, "authenticate", "", "")
	if i := slices.IndexFunc(d.Steps, func(s kvstore.Step) bool { return s.Name == "version" }); i < 0 || d.Steps[i].Outcome != kvstore.StepWarning {
		t.Errorf("a server without /version: %+v", d.Steps)
	}
}

func orCA(ca, otherwise *testutil.CA) *testutil.CA {
	if ca == nil {
		return otherwise
	}
	return ca
}

func TestTroubleshootConnection(t *testing.T) {
	w := newSecuredWest(t)
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, closedPort, _ := net.SplitHostPort(closed.Addr().String())
	_ = closed.Close()
	_, port, _ := net.SplitHostPort(w.etcd.Addr())
	plain := testutil.StartEtcd(t)
	_, plainPort, _ := net.SplitHostPort(plain.Addr())
	silent := testutil.StartProxy(t, w.etcd.Addr())
	silent.Pause()
	_, silentPort, _ := net.SplitHostPort(silent.Addr())
	for _, tc := range []struct {
		name                  string
		changes               []string
		step, message, advice string
	}{
		{"bad yaml", []string{"endpoints:\n", "endpoints: {\n"}, "config", "parse", "correct the file"},
		{"no scheme known", []string{"https://", "ftp://"}, "config", `scheme "ftp"`, "correct the file"},
		{"unknown name", []string{"https://west.mesh.cilium.io", "https://west.invalid"}, "resolve", "", "cilium-host-aliases"},
		{"closed port", []string{port, closedPort}, "connect", "connection refused", "nothing listens at this port"},
		{"not TLS", []string{port, plainPort}, "TLS", "handshake: EOF", "name it http://"},
		{"silent", []string{port, silentPort}, "TLS", "deadline exceeded", "something accepts connections there and does not answer"},
		{"TLS expected", []string{"https://", "http://"}, "version", "", "something accepts connections there that is no etcd"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w.config(t, "west", tc.changes...)
			code, d := w.diagnose(t, "--timeout", "1s")
			if code != 1 {
				t.Errorf("exit code %d", code)
			}
			mustFail(t, d, tc.step, tc.message, tc.advice)
		})
	}
}

func TestTroubleshootAuthorisation(t *testing.T) {
	w := newSecuredWest(t)
	// The etcd is that of another cluster than the file says: west's certificate may not see it.
	w.config(t, "north")
	code, d := w.diagnose(t, "north")
	if code != 1 {
		t.Errorf("exit code %d", code)
	}
	mustFail(t, d, "cluster-config", "permission denied", "etcdctl role grant-permission ROLE read cilium/cluster-config/north")

	plain := testutil.StartEtcd(t, testutil.WithAuth("south"))
	plain.Put(t, "cilium/cluster-config/south", `{"id":3,"capabilities":{"cached":true}}`)
	for _, tc := range []struct {
		name, file, user      string
		step, message, advice string
	}{
		{"wrong password", "south", "username: remote\npassword: guess\n", "authenticate", "authentication failed", "correct username and password"},
		{"no user", "south", "", "authenticate", "user name is empty", "this etcd must know who reads"},
		{"another cluster", "north", "username: root\npassword: " + testutil.Password, "cluster-config", "does not exist", "this etcd holds cilium/cluster-config/south"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			testutil.MustWriteFile(t, w.path(tc.file), []byte("endpoints:\n- "+plain.Endpoint()+"\n"+tc.user))
			code, d := w.diagnose(t, tc.file)
			if code != 1 {
				t.Errorf("exit code %d", code)
			}
			mustFail(t, d, tc.step, tc.message, tc.advice)
		})
	}
	testutil.MustWriteFile(t, w.path("south"), []byte("endpoints:\n- "+plain.Endpoint()+"\nusername: admin-south\npassword: "+testutil.Password))
	code, d = w.diagnose(t, "south")
	if last := d.Steps[len(d.Steps)-1]; code != 0 || last.Name != "server" {
		t.Errorf("exit code %d, %+v", code, d.Steps)
	}
	for _, want := range []string{"cilium/cache/nodes/v1/south/", "cilium/cache/identities/v1/south/id/", "cilium/cache/ip/v1/south/", "cilium/cache/services/v1/south/"} {
		if !slices.ContainsFunc(d.Steps, func(s kvstore.Step) bool { return s.Message == want+" may be read; it is empty" }) {
			t.Errorf("%s was not tried: %+v", want, d.Steps)
		}
	}
}

func TestTroubleshootAll(t *testing.T) {
	w := newSecuredWest(t)
	east, file := testutil.StartEtcd(t), filepath.Join(t.TempDir(), "kvstore.yaml")
	east.WriteConfig(t, file)
	testutil.MustWriteFile(t, w.path("EVIL\x1b[2J"), []byte("endpoints:\n- http://127.0.0.1:1\n"))
	testutil.MustWriteFile(t, w.path("gone"), []byte("endpoints:\n- http://127.0.0.1:1\n- http://127.0.0.1:2\n"))
	env := map[string]string{"WEFT_CLUSTERMESH_CONFIG": w.dir, "WEFT_KVSTORE_CONFIG": file}
	code, stdout, stderr := weft(t, env, "troubleshoot", "kvstore")
	if code != 1 || stderr != "" || strings.Contains(stdout, "\x1b") {
		t.Errorf("exit code %d, stderr %q, stdout %q", code, stderr, stdout)
	}
	for _, want := range []string{
		"own cluster (" + file + ")\n", "  ! heartbeat: cilium/.heartbeat may be read; it does not exist\n    → see whether",
		"  ✗ config: ", "    → rename the file to the cluster's name",
		"  http://127.0.0.1:1\n", "  http://127.0.0.1:2\n",
		"\n4 configs, not well: EVIL\\x1b[2J, gone\n",
	} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
	for _, tc := range []struct {
		env  map[string]string
		args string
		code int
		want string
	}{
		{nil, "", 2, "weft: no etcd is named, and no agent answers that has some: "},
		{map[string]string{"WEFT_CLUSTERMESH_CONFIG": t.TempDir()}, "", 1, "weft: no etcd client config in "},
		{map[string]string{"WEFT_CLUSTERMESH_CONFIG": "/nonexistent"}, "", 2, "weft: --clustermesh-config: open /nonexistent"},
		{env, "--timeout -1s", 2, "weft: --timeout -1s"},
		{env, "nowhere", 1, ""},
		{nil, file, 0, ""},
	} {
		code, _, stderr := weft(t, tc.env, append([]string{"troubleshoot", "kvstore"}, strings.Fields(tc.args)...)...)
		if code != tc.code || !strings.HasPrefix(stderr, tc.want) || tc.want == "" && stderr != "" {
			t.Errorf("%q: exit code %d, stderr %q, want %d, %q", tc.args, code, stderr, tc.code, tc.want)
		}
	}
}

// Endpoints of different etcds in one config are found.
func TestTroubleshootTwoEtcds(t *testing.T) {
	a, b := testutil.StartEtcd(t), testutil.StartEtcd(t)
	file := filepath.Join(t.TempDir(), "both.yaml")
	testutil.MustWriteFile(t, file, []byte("endpoints:\n- "+a.Endpoint()+"\n- "+b.Endpoint()+"\n"))
	code, stdout, _ := weft(t, nil, "troubleshoot", "kvstore", file)
	if want := "  ✗ one etcd: " + a.Endpoint() + " is etcd cluster "; code != 1 || !strings.Contains(stdout, want) {
		t.Errorf("exit code %d, no %q in\n%s", code, want, stdout)
	}
}
