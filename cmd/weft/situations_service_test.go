// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// services is the directory of the files of services.
func (x *trouble) services() string { return filepath.Join(filepath.Dir(x.config), "services") }

// offering adds a file of a service, with an address and a backend if there is one.
func offering(name, address, backend string) func(*testing.T, *trouble) func() {
	return func(t *testing.T, x *trouble) func() {
		file := filepath.Join(x.services(), name+".yaml")
		if backend != "" {
			backend = "{ip: " + backend + "}"
		}
		testutil.MustWriteFile(t, file, fmt.Appendf(nil, "{name: %s, namespace: shop, global: true, addresses: [%s], ports: [{name: http, port: 80, target: 8080}], backends: [%s]}\n",
			name, address, backend))
		return func() {
			if err := os.Remove(file); err != nil {
				t.Error(err)
			}
		}
	}
}

// ofServices are asked about while the agent gives sockets backends, and south offers one, too.
var ofServices = []situation{
	{"all is well", func(*testing.T, *trouble) func() { return func() {} }, []question{
		{"explain 10.96.1.10", 0, "it is an address of a service: who connects to it gets a backend's in its place", "shop/web, port 80/TCP: 1 backend used: affinity"},
		{"service get shop/web", 0, "10.3.1.10:8080 south ready: affinity prefers others", "kernel: 1 backend"},
	}},
	{"no backends", offering("empty", "10.96.1.20", ""), []question{
		{"explain 10.96.1.20", 0, "service shop/empty has no backend, and refuses connections", "`weft service get shop/empty` shows what each cluster offers"},
		{"service get shop/empty", 0, "0 used: no backend", "Offers: own 0"},
	}},
	{"contested address", offering("other", "10.96.1.10", "10.1.1.11"), []question{
		{"explain 10.96.1.10", 0, "service shop/web does not get 10.96.1.10:80/TCP, as shop/other has it", "give one of the two another address or port"},
		{"service get shop/web", 0, "not ours: shop/other has it", "Offers: own 1"},
	}},
	{"lost cluster", func(t *testing.T, x *trouble) func() {
		x.line.Refuse()
		return x.line.Forward
	}, []question{
		{"explain 10.96.1.10", 0, "cluster south is away, and its backends are used only where there are no others", seeSouth},
		{"status", 1, "services: away for --service-withdraw-after: its backends are used only where there are no others", seeSouth},
		{"service get shop/web", 0, "south 1 (lost)", "10.3.1.10:8080 south ready lost"},
	}},
}

// An operator whose etcd is away says so, and so does everybody who is asked whether one leads.
func TestBrokenOperator(t *testing.T) {
	etcd := testutil.StartEtcd(t)
	line := testutil.StartProxy(t, etcd.Addr())
	line.Refuse()
	config, socket := filepath.Join(t.TempDir(), "etcd.yaml"), filepath.Join(t.TempDir(), "operator.sock")
	testutil.MustWriteFile(t, config, []byte("endpoints: ["+line.Endpoint()+"]\n"))
	signals, done, log := make(chan os.Signal, 1), make(chan int, 1), new(buffer)
	go func() {
		done <- run(environment{
			ctx: t.Context(), stdout: io.Discard, stderr: log, lookup: lookupIn(nil), now: time.Now, signals: func() <-chan os.Signal { return signals },
		}, strings.Fields("operator --cluster-name east --cluster-id 1 --kvstore-config "+config+" --operator-socket "+socket))
	}()
	t.Cleanup(func() {
		signals <- syscall.SIGTERM
		if code := <-done; code != exitOK {
			t.Errorf("the operator ends with %d\n%s", code, log)
		}
	})
	status := func(code int, want ...string) {
		t.Helper()
		testutil.Eventually(t, time.Minute, func() error {
			got, stdout, stderr := weft(t, map[string]string{"WEFT_OPERATOR_SOCKET": socket}, "operator", "status")
			if got != code {
				return fmt.Errorf("exit code %d, want %d\n%s%s", got, code, stdout, stderr)
			}
			return contains(stdout+stderr, want...)
		})
	}
	status(exitNot, "etcd: not connected: ", "connection refused", "see `weft troubleshoot kvstore --kvstore-config FILE`",
		"no replica leads: ", "see whether an operator of the cluster runs, and reaches its etcd")
	line.Forward()
	status(exitOK, "Leader: this replica")
}

// TestBrokenServices is TestBrokenSituations of services, and of an agent that starts while an etcd is down.
func TestBrokenServices(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	x := newTrouble(t)
	x.south.Put(t, "cilium/state/services/v1/south/shop/web", `{"cluster":"south","namespace":"shop","name":"web","frontends":{"10.96.3.10":{"http":{"Protocol":"TCP","Port":80}}},`+
		`"backends":{"10.3.1.10":{"http":{"Protocol":"TCP","Port":8080}}},"hostnames":{},"zones":{},"labels":{},"selector":{},"includeExternal":true,"shared":true,"clusterID":3}`)
	args := []string{
		"--config", x.config, "--clustermesh-config", x.clustermesh, "--routing-mode", "native", "--service-lb", "--service-withdraw-after", "1s",
		"--service-cgroup", testutil.NewCgroup(t).Path(),
	}
	agent := startAgent(t, args...)
	x.settle(t)
	x.try(t, ofServices)

	agent.stop()
	x.line.Refuse()
	agent = startAgent(t, args...)
	for _, q := range []question{
		{"status", 1, "cluster south is failed: no answer from etcd", seeSouth},
		{"explain 10.3.1.10", 0, "kept from before the agent's start, until its cluster has been heard", "it may be of cluster south, which is failed"},
		{"explain 10.3.1.10", 0, "Identity: 196865 ", "packets are identified as they were before"},
		{"verify", 1, "etcd south listed and followed failed", seeSouth},
	} {
		x.ask(t, q)
	}
	x.line.Forward()
	x.settle(t)
	x.ask(t, question{"explain 10.3.1.10", 0, "10.3.1.10/32 is the longest of 2 prefixes that contain it", "Identity: 196865 "})
	agent.stop()
}
