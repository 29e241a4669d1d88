// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"
)

// KubeFault is how a request to an API server fares.
type KubeFault string

// What may befall a request.
const (
	KubeWell     KubeFault = ""
	KubeTooMany  KubeFault = "too many requests" // 429, with a second in which not to come again
	KubeBroken   KubeFault = "broken"            // 500
	KubeUnknown  KubeFault = "unknown"           // 404, as of what the server has no kind of
	KubeSlow     KubeFault = "slow"              // of a list: it comes late
	KubeExpired  KubeFault = "expired"           // of a watch: the server has forgotten where it was to begin
	KubeBookmark KubeFault = "bookmark"          // of a watch: it tells that there is no news, and ends
	KubeRepeat   KubeFault = "repeat"            // of a watch: what is added or changed is told twice, and what goes as it was at first
	KubeCut      KubeFault = "cut"               // of a watch: it ends after an event
)

// KubeProxy stands before an API server, and misbehaves as a server may that has too much to do. Its methods are safe for
// concurrent use.
type KubeProxy struct {
	Addr string // host:port

	kube    *KubeAPIServer
	forward *httputil.ReverseProxy
	client  *http.Client
	server  *http.Server

	mu     sync.Mutex
	fault  func(*http.Request) KubeFault                     // nil: none
	answer func(w http.ResponseWriter, r *http.Request) bool // nil: none
	done   map[KubeFault]int
	cut    chan struct{} // closed and replaced when watches are to end
}

// StartKubeProxy starts a proxy, with a certificate of the server's own authority. It ends with the test.
func StartKubeProxy(t testing.TB, kube *KubeAPIServer) *KubeProxy {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(kube.CA.PEM)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DisableCompression: true}
	quiet := log.New(io.Discard, "", 0) // of connections that a fault, or the server's end, has cut
	forward := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "https", Host: kube.Addr})
	forward.Transport, forward.FlushInterval, forward.ErrorLog = transport, -1, quiet
	p := &KubeProxy{kube: kube, forward: forward, client: &http.Client{Transport: transport}, done: make(map[KubeFault]int), cut: make(chan struct{})}
	certPEM, keyPEM := kube.CA.Issue(t, Certificate{CommonName: "kube-apiserver", Hosts: []string{"127.0.0.1"}})
	cert, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p.Addr = listener.Addr().String()
	p.server = &http.Server{Handler: p, ErrorLog: quiet, TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}}}
	served := make(chan error, 1)
	go func() { served <- p.server.ServeTLS(listener, "", "") }()
	t.Cleanup(func() {
		_ = p.server.Close()
		<-served
		transport.CloseIdleConnections()
	})
	return p
}

// Misbehave asks fault of each request from now on; nil: all fare well. A fault that is of a watch or a list alone leaves others be.
func (p *KubeProxy) Misbehave(fault func(*http.Request) KubeFault) {
	p.mu.Lock()
	p.fault = fault
	p.mu.Unlock()
	p.EndWatches()
}

// Answer has requests answered by the test from now on, but for those of which answer returns false; nil: none.
func (p *KubeProxy) Answer(answer func(w http.ResponseWriter, r *http.Request) bool) {
	p.mu.Lock()
	p.answer = answer
	p.mu.Unlock()
	p.EndWatches()
}

// EndWatches ends all watches that are under way, as a server does from time to time, so that new ones are asked for.
func (p *KubeProxy) EndWatches() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.cut)
	p.cut = make(chan struct{})
}

// Done returns how many requests each fault has befallen.
func (p *KubeProxy) Done() map[KubeFault]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.done)
}

// watches reports whether a request is for a watch.
func watches(r *http.Request) bool {
	watch := r.URL.Query().Get("watch")
	return watch == "true" || watch == "1"
}

// choose returns what befalls a request, and what ends it if it is a watch. A list may come as a watch that begins with all
// there is.
func (p *KubeProxy) choose(r *http.Request) (KubeFault, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fault == nil {
		return KubeWell, p.cut
	}
	fault := p.fault(r)
	if lists := !watches(r) || r.URL.Query().Get("sendInitialEvents") == "true"; !fault.befalls(r, lists) {
		return KubeWell, p.cut
	}
	p.done[fault]++
	return fault, p.cut
}

// befalls reports whether a fault makes sense for a request.
func (f KubeFault) befalls(r *http.Request, lists bool) bool {
	switch f {
	case KubeSlow:
		return lists
	case KubeExpired, KubeBookmark:
		return !lists && kubeKind(r) != ""
	case KubeRepeat, KubeCut:
		return watches(r)
	}
	return f != KubeWell
}

// ServeHTTP answers a request, or forwards it.
func (p *KubeProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	answer := p.answer
	p.mu.Unlock()
	if answer != nil && answer(w, r) {
		return
	}
	switch fault, cut := p.choose(r); fault {
	case KubeTooMany:
		w.Header().Set("Retry-After", "1")
		kubeStatus(w, http.StatusTooManyRequests, "TooManyRequests")
	case KubeBroken:
		kubeStatus(w, http.StatusInternalServerError, "InternalError")
	case KubeUnknown:
		kubeStatus(w, http.StatusNotFound, "NotFound")
	case KubeSlow:
		select {
		case <-time.After(300 * time.Millisecond):
		case <-r.Context().Done():
		}
		p.pass(w, r, fault, cut)
	case KubeExpired:
		kubeEvent(w, "ERROR", json.RawMessage(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410,"message":"too old resource version"}`))
	case KubeBookmark:
		kubeEvent(w, "BOOKMARK", json.RawMessage(fmt.Sprintf(`{%s,"metadata":{"resourceVersion":%q}}`, kubeKind(r), r.URL.Query().Get("resourceVersion"))))
	default:
		p.pass(w, r, fault, cut)
	}
}

// pass forwards a request, and of a watch event by event.
func (p *KubeProxy) pass(w http.ResponseWriter, r *http.Request, fault KubeFault, cut <-chan struct{}) {
	if !watches(r) {
		p.forward.ServeHTTP(w, r)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	go func() {
		select {
		case <-cut:
			cancel()
		case <-ctx.Done():
		}
	}()
	p.retell(w, r.Clone(ctx), fault)
}

// retell forwards a watch until it ends.
func (p *KubeProxy) retell(w http.ResponseWriter, out *http.Request, fault KubeFault) {
	out.RequestURI, out.URL.Scheme, out.URL.Host = "", "https", p.kube.Addr
	out.Header.Set("Accept", "application/json") // which has a line for each event
	response, err := p.client.Do(out)
	if err != nil {
		kubeStatus(w, http.StatusBadGateway, "InternalError")
		return
	}
	defer response.Body.Close()
	w.Header().Set("Content-Type", response.Header.Get("Content-Type"))
	w.WriteHeader(response.StatusCode)
	if f, ok := w.(http.Flusher); ok {
		f.Flush()
	}
	first := make(map[string]json.RawMessage) // objects as they were first told, by UID
	for lines := bufio.NewReader(response.Body); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		var e struct {
			Type   string
			Object json.RawMessage
		}
		var o struct{ Metadata struct{ UID string } }
		if json.Unmarshal(line, &e) != nil || json.Unmarshal(e.Object, &o) != nil {
			return
		}
		switch uid := o.Metadata.UID; {
		case fault == KubeCut || uid == "":
		case e.Type == "DELETED" && first[uid] != nil:
			e.Object = first[uid]
		case e.Type != "DELETED":
			if first[uid] == nil {
				first[uid] = bytes.Clone(e.Object)
			}
			kubeEvent(w, e.Type, e.Object)
		}
		kubeEvent(w, e.Type, e.Object)
		if fault == KubeCut {
			return
		}
	}
}

// kubeEvent sends an event of a watch.
func kubeEvent(w http.ResponseWriter, kind string, object json.RawMessage) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = fmt.Fprintf(w, "{\"type\":%q,\"object\":%s}\n", kind, object) // who watches may be gone
	if f, ok := w.(http.Flusher); ok {
		f.Flush()
	}
}

func kubeStatus(w http.ResponseWriter, code int, reason string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"code":%d,"message":"as the test wants it"}`, reason, code)
}

// kubeKind is the kind of what a request watches, as its objects name it.
func kubeKind(r *http.Request) string {
	kinds := map[string]string{
		"services": `"kind":"Service","apiVersion":"v1"`, "namespaces": `"kind":"Namespace","apiVersion":"v1"`,
		"nodes": `"kind":"Node","apiVersion":"v1"`, "endpointslices": `"kind":"EndpointSlice","apiVersion":"discovery.k8s.io/v1"`,
	}
	return kinds[r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]]
}
