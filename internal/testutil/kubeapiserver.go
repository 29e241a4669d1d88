// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/kubeapiserver"
)

// kubeServices is where an API server of a test takes addresses of services from.
var kubeServices = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}

const (
	// kubeAPIServerStart is long: a loaded machine takes a minute.
	kubeAPIServerStart  = 4 * time.Minute
	kubeAPIServerBinary = ".cache/kube-apiserver"

	adminToken = "admin-of-the-test"
)

// KubeAPIServer is a real API server of Kubernetes as a process of its own, on loopback, with RBAC. Nothing else of
// Kubernetes runs: no pod starts, and what a kubelet would report the test writes. It is killed when the test ends. Its
// methods fail the test on any error and are for the test's own goroutine.
type KubeAPIServer struct {
	Addr string // host:port
	CA   *CA

	dir    string
	etcd   *Etcd
	client kubeapiserver.Client
	cmd    *exec.Cmd
	done   chan struct{} // closed when cmd has ended
}

// StartKubeAPIServer starts an API server that keeps its objects in etcd, and returns once it is ready.
// The binary is what `make kube-apiserver` builds, of a Go module of its own in test/kubeapiserver.
func StartKubeAPIServer(t testing.TB, etcd *Etcd) *KubeAPIServer {
	t.Helper()
	k := &KubeAPIServer{Addr: freePort(t), CA: NewCA(t, "kubernetes"), dir: t.TempDir(), etcd: etcd}
	if err := k.server().WriteFiles(k.CA.Authority, adminToken); err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(k.CA.PEM)
	k.client = kubeapiserver.Client{Addr: k.Addr, Token: adminToken, HTTP: &http.Client{
		Timeout:   30 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true},
	}}
	t.Cleanup(k.kill)
	k.start(t)
	return k
}

func (k *KubeAPIServer) file(name string) string { return filepath.Join(k.dir, name) }

func (k *KubeAPIServer) server() kubeapiserver.Server {
	return kubeapiserver.Server{Dir: k.dir, Addr: netip.MustParseAddrPort(k.Addr), Etcd: k.etcd.Endpoint(), Services: kubeServices}
}

// Stop kills the server.
func (k *KubeAPIServer) Stop(t testing.TB) {
	t.Helper()
	if k.cmd == nil {
		t.Fatalf("stop kube-apiserver at %s: it is not running", k.Addr)
	}
	k.kill()
}

// Restart starts the server again at the same address, killing it first if it runs.
func (k *KubeAPIServer) Restart(t testing.TB) {
	t.Helper()
	k.kill()
	k.start(t)
}

func (k *KubeAPIServer) start(t testing.TB) {
	t.Helper()
	log, err := os.Create(k.file("log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	k.cmd = exec.Command(KubeAPIServerPath(t), k.server().Args()...)
	k.cmd.Stdout, k.cmd.Stderr = log, log
	k.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := k.cmd.Start(); err != nil {
		k.cmd = nil
		t.Fatal(err)
	}
	k.done = make(chan struct{})
	go func() {
		defer close(k.done)
		_ = k.cmd.Wait() // it is killed, or the log says why it ended
	}()
	k.awaitReady(t)
}

func (k *KubeAPIServer) awaitReady(t testing.TB) {
	t.Helper()
	deadline := time.Now().Add(kubeAPIServerStart)
	for {
		_, err := k.request(kubeapiserver.Call{Method: http.MethodGet, Path: "/readyz"})
		if err == nil {
			return
		}
		select {
		case <-k.done:
			err = errors.New("it has ended")
			deadline = time.Time{}
		case <-time.After(100 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			k.kill()
			log, _ := os.ReadFile(k.file("log"))
			t.Fatalf("start kube-apiserver at %s: %v\n%s", k.Addr, err, log)
		}
	}
}

func (k *KubeAPIServer) kill() {
	if k.cmd == nil {
		return
	}
	if err := k.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		panic(err)
	}
	<-k.done
	k.cmd = nil
}

// KubeAPIServerPath is the binary in the root of the module, which holds go.mod and is above the directory of every test.
func KubeAPIServerPath(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
			continue
		}
		path := filepath.Join(dir, kubeAPIServerBinary)
		if _, err := os.Stat(path); err != nil {
			t.Fatalf("%v: run 'make kube-apiserver', which takes some minutes once", err)
		}
		return path
	}
	t.Fatal("no go.mod above the working directory")
	return ""
}

// Create makes an object, as JSON, in the collection at path, such as /api/v1/namespaces, and returns it as it is then.
func (k *KubeAPIServer) Create(t testing.TB, path, object string) []byte {
	t.Helper()
	return k.must(t, http.MethodPost, path, object)
}

// Apply makes the object at path what a manifest says, as `kubectl apply --server-side` does; fields that the server does
// not know are errors.
func (k *KubeAPIServer) Apply(t testing.TB, path, manifest string) {
	t.Helper()
	_, err := k.request(kubeapiserver.Apply(path, manifest, "test"))
	if err != nil {
		t.Error(err)
	}
}

// Patch merges JSON into the object at path.
func (k *KubeAPIServer) Patch(t testing.TB, path, merge string) {
	t.Helper()
	k.must(t, http.MethodPatch, path, merge)
}

// Delete deletes the object at path. A pod goes at once.
func (k *KubeAPIServer) Delete(t testing.TB, path string) {
	t.Helper()
	k.must(t, http.MethodDelete, path, `{"kind":"DeleteOptions","apiVersion":"v1","gracePeriodSeconds":0}`)
}

// DeleteGracefully asks a pod at path to end. It stays until a kubelet, or Delete, says that it has.
func (k *KubeAPIServer) DeleteGracefully(t testing.TB, path string) {
	t.Helper()
	k.must(t, http.MethodDelete, path, "")
}

// Read returns the object at path, as JSON.
func (k *KubeAPIServer) Read(t testing.TB, path string) []byte {
	t.Helper()
	return k.must(t, http.MethodGet, path, "")
}

// Exists returns nil if there is an object at path.
func (k *KubeAPIServer) Exists(path string) error {
	_, err := k.request(kubeapiserver.Call{Method: http.MethodGet, Path: path})
	return err
}

// MustRefuse fails the test unless who has the token is forbidden something.
func (k *KubeAPIServer) MustRefuse(t testing.TB, method, path, token string) {
	t.Helper()
	_, err := k.request(kubeapiserver.Call{Method: method, Path: path, Token: token})
	if err == nil || !strings.Contains(err.Error(), "403 Forbidden") {
		t.Errorf("%s %s: want it to be forbidden, got %v", method, path, err)
	}
}

func (k *KubeAPIServer) must(t testing.TB, method, path, body string) []byte {
	t.Helper()
	answer, err := k.request(kubeapiserver.Call{Method: method, Path: path, Body: body})
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

func (k *KubeAPIServer) request(call kubeapiserver.Call) ([]byte, error) {
	return k.client.Do(context.Background(), call)
}

// ServiceAccountToken returns a token with which to be a service account.
func (k *KubeAPIServer) ServiceAccountToken(t testing.TB, namespace, name string) string {
	t.Helper()
	var token struct{ Status struct{ Token string } }
	answer := k.Create(t, "/api/v1/namespaces/"+namespace+"/serviceaccounts/"+name+"/token",
		`{"kind":"TokenRequest","apiVersion":"authentication.k8s.io/v1","spec":{}}`)
	if err := json.Unmarshal(answer, &token); err != nil {
		t.Fatal(err)
	}
	return token.Status.Token
}

// WriteKubeconfig writes a file for a client that is to reach the server at addr, with a token; the server's own address
// and the administrator's token unless given.
func (k *KubeAPIServer) WriteKubeconfig(t testing.TB, file, addr, token string) {
	t.Helper()
	if addr == "" {
		addr = k.Addr
	}
	if token == "" {
		token = adminToken
	}
	MustWriteFile(t, file, kubeapiserver.Kubeconfig(addr, k.CA.PEM, token))
}
