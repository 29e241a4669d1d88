// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"bytes"
	"context"
	"errors"
	"os/exec"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// etcd34 is the server of Debian's package etcd-server.
const etcd34 = "/usr/bin/etcd"

// EtcdProcess is an etcd server as a process of its own, which can die and be suspended as processes do. It listens on
// loopback only and is killed when the test ends.
type EtcdProcess struct {
	etcdKeys
	dir string
	cmd *exec.Cmd
	log bytes.Buffer // of the present process; read it when that has ended
}

// StartEtcd34 starts Debian's etcd 3.4, empty, and returns once it serves.
func StartEtcd34(t testing.TB) *EtcdProcess {
	t.Helper()
	e := &EtcdProcess{dir: t.TempDir()}
	e.addr, e.scheme = freePort(t), "http"
	t.Cleanup(e.kill)
	e.start(t)
	return e
}

// Kill ends the server as kill -9 does.
func (e *EtcdProcess) Kill(t testing.TB) {
	t.Helper()
	if e.cmd == nil {
		t.Fatalf("kill etcd at %s: it is not running", e.addr)
	}
	e.kill()
}

// Restart starts the server again, killing it first if it runs, with the same data and at the same address.
func (e *EtcdProcess) Restart(t testing.TB) {
	t.Helper()
	e.kill()
	e.start(t)
}

// Suspend stops the server without its connections being told.
func (e *EtcdProcess) Suspend(t testing.TB) { e.signal(t, syscall.SIGSTOP) }

// Continue ends what Suspend began.
func (e *EtcdProcess) Continue(t testing.TB) { e.signal(t, syscall.SIGCONT) }

func (e *EtcdProcess) signal(t testing.TB, s syscall.Signal) {
	t.Helper()
	if err := e.cmd.Process.Signal(s); err != nil {
		t.Fatalf("send %v to etcd at %s: %v", s, e.addr, err)
	}
}

func (e *EtcdProcess) start(t testing.TB) {
	t.Helper()
	e.log.Reset()
	e.cmd = exec.Command(etcd34, "--data-dir", e.dir, "--logger", "zap", "--log-level", "error",
		"--listen-client-urls", e.Endpoint(), "--advertise-client-urls", e.Endpoint(),
		"--listen-peer-urls", "http://"+anyPort, "--initial-advertise-peer-urls", "http://"+anyPort,
		"--initial-cluster", "default=http://"+anyPort, "--initial-cluster-token", e.dir,
		"--heartbeat-interval", "10", "--election-timeout", "100", "--bcrypt-cost", "4")
	e.cmd.Stdout, e.cmd.Stderr = &e.log, &e.log
	e.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := e.cmd.Start(); err != nil {
		e.cmd = nil
		t.Fatalf("%v: it is of the package etcd-server: run 'make deps'", err)
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{e.Endpoint()}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	e.client = client
	deadline := time.Now().Add(etcdStartTimeout)
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		_, err := client.Get(ctx, "\x00", clientv3.WithCountOnly())
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			e.kill()
			t.Fatalf("start etcd at %s: %v\n%s", e.addr, err, e.log.String())
		}
	}
}

func (e *EtcdProcess) kill() {
	if e.cmd == nil {
		return
	}
	err := e.cmd.Process.Kill()
	if werr := e.cmd.Wait(); werr != nil && !errors.As(werr, new(*exec.ExitError)) {
		err = errors.Join(err, werr)
	}
	if err != nil {
		panic(err)
	}
	if e.client != nil {
		e.client.Close()
	}
	e.cmd, e.client = nil, nil
}
