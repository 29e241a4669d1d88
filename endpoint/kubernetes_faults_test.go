// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/weftmesh/weft/internal/testutil"
)

// faultyKube stands between a source and the real server, passes on what is asked, and at times answers itself.
type faultyKube struct {
	*testutil.KubeProxy
	faulted atomic.Int64 // how often it did
}

// refuse has everything answered with an HTTP status, and waits until the source has met that.
func (f *faultyKube) refuse(t *testing.T, code int, reason string) {
	t.Helper()
	f.during(t, func(w http.ResponseWriter, _ *http.Request) bool {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		fmt.Fprint(w, status(code, reason))
		return true
	})
}

func status(code int, reason string) string {
	return fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","message":"fault of the test","reason":%q,"code":%d}`, reason, code)
}

// during has requests answered by the test, and waits until four have been.
func (f *faultyKube) during(t *testing.T, answer func(http.ResponseWriter, *http.Request) bool) {
	t.Helper()
	f.faulted.Store(0)
	f.Answer(func(w http.ResponseWriter, r *http.Request) bool {
		did := answer(w, r)
		if did {
			f.faulted.Add(1)
		}
		return did
	})
	testutil.Eventually(t, soon, func() error {
		if n := f.faulted.Load(); n < 4 {
			return fmt.Errorf("%d requests have met the fault", n)
		}
		return nil
	})
}

func (f *faultyKube) heal() { f.Answer(nil) }

// Whatever the server answers, what is known stays, and once it is well, what is known is what it holds.
func (b *kubeBench) testFaults(t *testing.T) {
	b.namespace(t, "faults", "")
	f := &faultyKube{KubeProxy: testutil.StartKubeProxy(t, b.server)}
	k := b.follow(t, "n4", f.Addr)
	b.pod(t, "faults/constant", container("n4"), running("10.4.0.1"))
	wantWorkloads(t, k, "faults/constant [10.4.0.1]")
	for i, fault := range []struct {
		name   string
		inject func()
	}{
		{"500", func() { f.refuse(t, http.StatusInternalServerError, "InternalError") }},
		{"429", func() { f.refuse(t, http.StatusTooManyRequests, "TooManyRequests") }},
		{"410", func() { f.refuse(t, http.StatusGone, "Expired") }},
		{"410 in the watch", func() {
			f.during(t, func(w http.ResponseWriter, r *http.Request) bool {
				if r.URL.Query().Get("watch") == "" {
					return false
				}
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprintf(w, "{\"type\":\"ERROR\",\"object\":%s}\n", status(http.StatusGone, "Expired"))
				return true
			})
		}},
		{"nonsense", func() {
			f.during(t, func(w http.ResponseWriter, _ *http.Request) bool {
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprint(w, "<html>\x1b[2J")
				return true
			})
		}},
	} {
		t.Run(fault.name, func(t *testing.T) {
			fault.inject()
			// Behind the back of the source, one pod goes and another comes.
			name := fmt.Sprintf("faults/passing-%d", i)
			b.pod(t, name, container("n4"), running(fmt.Sprintf("10.4.1.%d", i)))
			if i > 0 {
				b.server.Delete(t, podPath(fmt.Sprintf("faults/passing-%d", i-1)))
			}
			known := false
			for _, w := range k.Workloads() {
				known = known || w.Name == "constant"
			}
			if !known {
				t.Error("a fault of the server took a pod away")
			}
			f.heal() // and the watches begin anew
			wantWorkloads(t, k, "faults/constant [10.4.0.1]", fmt.Sprintf("%s [10.4.1.%d]", name, i))
			wantProblems(t, k)
		})
	}
}

// While the server is away nothing goes. What goes meanwhile, its history does not tell when it is back: it answers that it
// does not reach back so far, and the source lists anew.
func (b *kubeBench) testOutage(t *testing.T) {
	b.namespace(t, "outage", "")
	var log syncedBuffer
	admin := *b
	admin.token = "" // a server that has just started forbids all others everything for an instant, which would be another fault
	k := admin.followLogged(t, "n5", "", slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))
	b.pod(t, "outage/stays", container("n5"), running("10.5.0.1"))
	b.pod(t, "outage/goes", container("n5"), running("10.5.0.2"))
	wantWorkloads(t, k, "outage/goes [10.5.0.2]", "outage/stays [10.5.0.1]")
	b.server.Stop(t)
	wantProblems(t, k, "namespaces cannot be followed, what was known of them stays in force", "pods cannot be followed")
	wantWorkloads(t, k, "outage/goes [10.5.0.2]", "outage/stays [10.5.0.1]")
	b.etcd.Delete(t, "/registry/pods/outage/goes")
	b.etcd.Compact(t)
	log.reset()
	b.server.Restart(t)
	b.pod(t, "outage/comes", container("n5"), running("10.5.0.3"))
	wantWorkloads(t, k, "outage/comes [10.5.0.3]", "outage/stays [10.5.0.1]")
	wantProblems(t, k)
	if !strings.Contains(log.String(), "too old resource version") {
		t.Errorf("the server never told that its history is too short:\n%s", log.String())
	}
	if strings.Contains(log.String(), "Response Body") {
		t.Errorf("messages of the server stand in the log:\n%s", log.String())
	}
}

// syncedBuffer may be written and read at once.
type syncedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncedBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncedBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func (s *syncedBuffer) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.b.Reset()
}

// A source that starts while no server is there waits, and says for what.
func TestKubernetesAway(t *testing.T) {
	b := &kubeBench{server: &testutil.KubeAPIServer{Addr: "127.0.0.1:1", CA: testutil.NewCA(t, "kubernetes")}}
	k := b.follow(t, "n1", "")
	wantProblems(t, k, "127.0.0.1:1: connect: connection refused", "pods cannot be followed")
	select {
	case <-k.Ready():
		t.Error("ready without a server")
	default:
	}
}

func TestKubernetesOptions(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for file, want := range map[string]string{
		"":                  "outside of a pod, name a kubeconfig file",
		"/nonexistent/file": "kubeconfig /nonexistent/file: stat /nonexistent/file: no such file",
	} {
		_, err := NewKubernetes(KubernetesConfig{Kubeconfig: file, NodeName: "n", Log: slog.New(slog.DiscardHandler)})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

// Events may come twice, and the object of a deletion may be an old one. Nobody is woken for nothing.
func TestKubernetesEvents(t *testing.T) {
	s := newPods()
	podAt := func(ip string) *corev1.Pod {
		p := &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip}}
		p.Namespace, p.Name, p.ResourceVersion = "shop", "web", ip
		return p
	}
	var n corev1.Namespace
	n.Name = "shop"
	for _, step := range []struct {
		name string
		do   func()
		wake bool
		want string
	}{
		{"pod before its namespace", func() { s.put(podAt("10.0.0.1")) }, true, "[]"},
		{"namespace", func() { s.putNamespace(&n) }, true, "[web 10.0.0.1]"},
		{"namespace again", func() { s.putNamespace(&n) }, false, "[web 10.0.0.1]"},
		{"namespace without pods", func() { s.putNamespace(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "empty"}}) }, false, "[web 10.0.0.1]"},
		{"added twice", func() { s.put(podAt("10.0.0.1")) }, false, "[web 10.0.0.1]"},
		{"another address", func() { s.put(podAt("10.0.0.2")) }, true, "[web 10.0.0.2]"},
		{"bad address", func() { s.put(podAt("10.0.0.")) }, true, "[]"},
		{"address of no workload", func() { s.put(podAt("127.0.0.1")) }, true, "[]"},
		{"good again", func() { s.put(podAt("10.0.0.2")) }, true, "[web 10.0.0.2]"},
		{"same list", func() { s.replace([]*corev1.Pod{podAt("10.0.0.2")}) }, false, "[web 10.0.0.2]"},
		{"deleted, told with its first state", func() { s.remove(podAt("10.0.0.1")) }, true, "[]"},
		{"deleted twice", func() { s.remove(podAt("10.0.0.1")) }, false, "[]"},
	} {
		before := s.changed
		step.do()
		if woken := before != s.changed; woken != step.wake {
			t.Errorf("%s: woken %t, want %t", step.name, woken, step.wake)
		}
		got := []string{}
		all, problems := s.workloads()
		for _, w := range all {
			got = append(got, w.Name+" "+w.IPs[0].String())
		}
		if fmt.Sprint(got) != step.want {
			t.Errorf("%s: workloads %v, want %s (problems %v)", step.name, got, step.want, problems)
		}
		if bad := strings.Contains(step.name, "address of no") || strings.HasPrefix(step.name, "bad"); bad && len(problems) != 1 {
			t.Errorf("%s: problems %v", step.name, problems)
		}
	}
}
