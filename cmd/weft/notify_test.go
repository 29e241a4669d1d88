// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/internal/testutil"
)

// serviceManager is the other end of sd_notify(3).
type serviceManager struct {
	t    testing.TB
	conn *net.UnixConn
	path string
}

func newServiceManager(t testing.TB) *serviceManager {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &serviceManager{t: t, conn: conn, path: path}
}

// next returns the next message, its assignments as a list.
func (m *serviceManager) next() []string {
	m.t.Helper()
	if err := m.conn.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
		m.t.Fatal(err)
	}
	b := make([]byte, 4096)
	n, err := m.conn.Read(b)
	if err != nil {
		m.t.Fatalf("no message: %v", err)
	}
	return strings.Split(string(b[:n]), "\n")
}

// partTask is a part of an agent that is ready when its channel is closed.
type partTask struct {
	name  string
	ready chan struct{}
}

func (p partTask) Run(context.Context) error { return nil }
func (p partTask) Ready() <-chan struct{}    { return p.ready }
func (p partTask) String() string            { return p.name }

// The service manager hears what the agent waits for, that it is ready no sooner than all its parts are, how it is, signs of
// life, and that it stops.
func TestNotify(t *testing.T) {
	m := newServiceManager(t)
	looked := make(chan struct{}) // each look at the agent takes one
	status := func() string {
		<-looked
		return agentLine(api.Status{
			Clusters: []api.Cluster{{Name: "west", Ready: true}, {Name: "north"}, {Name: "east", Own: true, Ready: true}},
			Tables:   api.Tables{IPs: 7}, Problems: []string{"cluster north:\nis not ready", "another"},
		})
	}
	lookup := lookupIn(map[string]string{
		"NOTIFY_SOCKET": m.path, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": strconv.Itoa(os.Getpid()),
	})
	task := newNotifyTask(lookup, status, slog.New(slog.DiscardHandler))
	first, second := partTask{"datapath", make(chan struct{})}, partTask{"api", make(chan struct{})}
	task.after = append(task.after, first, second)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- task.Run(ctx) }()

	want := func(want ...string) {
		t.Helper()
		if diff := cmp.Diff(want, m.next()); diff != "" {
			t.Fatalf("message (-want +got)\n%s", diff)
		}
	}
	const line = "STATUS=1 of 2 clusters ready, 7 prefixes; 2 not well: cluster north: is not ready"
	want("STATUS=starting: waits for datapath")
	close(first.ready)
	want("STATUS=starting: waits for api")
	close(second.ready)
	looked <- struct{}{}
	want("READY=1", line)
	// A sign of life stands for a look at the agent, each for its own: where the agent hangs, none comes.
	for range 3 {
		looked <- struct{}{}
		want(line, "WATCHDOG=1")
	}
	cancel()
	close(looked) // a look may be under way
	for message := m.next(); message[0] != "STOPPING=1"; message = m.next() {
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestOperatorLine(t *testing.T) {
	for want, s := range map[string]api.OperatorStatus{
		"waits for a leader; 1 not well: no etcd": {Problems: []string{"no etcd"}},
		"leads cluster east":                      {IsLeader: true, Leader: "a", Cluster: api.LocalCluster{Name: "east"}},
		"stands by; the leader is a":              {Leader: "a"},
	} {
		if got := operatorLine(s); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// What the variables of the service manager ask for.
func TestNotifyVariables(t *testing.T) {
	pid := strconv.Itoa(os.Getpid())
	for name, tt := range map[string]struct {
		env      map[string]string
		none     bool
		watchdog time.Duration
	}{
		"no manager":       {env: map[string]string{"WATCHDOG_USEC": "1000"}, none: true},
		"empty":            {env: map[string]string{"NOTIFY_SOCKET": ""}, none: true},
		"no watchdog":      {env: map[string]string{"NOTIFY_SOCKET": "@weft"}},
		"watchdog":         {env: map[string]string{"NOTIFY_SOCKET": "@weft", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": pid}, watchdog: 30 * time.Second},
		"another's":        {env: map[string]string{"NOTIFY_SOCKET": "@weft", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}},
		"no number":        {env: map[string]string{"NOTIFY_SOCKET": "@weft", "WATCHDOG_USEC": "soon"}},
		"zero":             {env: map[string]string{"NOTIFY_SOCKET": "@weft", "WATCHDOG_USEC": "0"}},
		"beyond all sense": {env: map[string]string{"NOTIFY_SOCKET": "@weft", "WATCHDOG_USEC": "99999999999999999999"}},
	} {
		task := newNotifyTask(lookupIn(tt.env), nil, slog.New(slog.DiscardHandler))
		if (task == nil) != tt.none {
			t.Errorf("%s: task %v", name, task)
		} else if task != nil && task.watchdog != tt.watchdog {
			t.Errorf("%s: watchdog %s, want %s", name, task.watchdog, tt.watchdog)
		}
	}
}

// A manager that is not there is said once, and holds nothing up.
func TestNotifyNobody(t *testing.T) {
	log := new(buffer)
	task := newNotifyTask(lookupIn(map[string]string{"NOTIFY_SOCKET": filepath.Join(t.TempDir(), "none")}),
		func() string { return "well" }, slog.New(slog.NewTextHandler(log, nil)))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- task.Run(ctx) }()
	<-task.Ready()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := strings.Count(log.String(), "\n"); n != 1 {
		t.Errorf("%d lines, want 1:\n%s", n, log)
	}
}

// The agent as a service of Type=notify: it is ready once the kernel is right and the API answers.
func TestAgentNotifies(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	m := newServiceManager(t)
	s := newSite(t)
	a := startAgentIn(t, map[string]string{"NOTIFY_SOCKET": m.path, "WATCHDOG_USEC": "200000"}, "--config", s.config)
	for message := m.next(); message[0] != "READY=1"; message = m.next() {
		if !strings.HasPrefix(message[0], "STATUS=starting: waits for ") {
			t.Fatalf("message %q before the agent is ready", message)
		}
	}
	s.cli(t, exitOK, "bpf ipcache get 172.18.1.1")
	s.cli(t, exitOK, "version --agent")
	for message := m.next(); len(message) < 2 || message[1] != "WATCHDOG=1"; message = m.next() {
	}
	a.stop()
	for {
		switch message := m.next(); {
		case message[0] == "STOPPING=1":
			return
		case !strings.HasPrefix(message[0], "STATUS="):
			t.Fatalf("message %q while the agent stops", message)
		}
	}
}
