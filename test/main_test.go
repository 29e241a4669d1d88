// SPDX-License-Identifier: Apache-2.0

// Package test runs the real agent, as a process, on the real kernel, against a real etcd, and looks at what comes out with
// the tools that its users have.
package test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/internal/testutil"
)

// weftEnv names the agent's binary, for the tests and the processes that they isolate themselves in.
const weftEnv = "WEFT_TEST_BINARY"

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Getenv(weftEnv) == "" {
		dir, err := os.MkdirTemp("", "weft-test-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		if err := os.Chmod(dir, 0o755); err != nil { // for agents of other users
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		bin := filepath.Join(dir, "weft")
		build := exec.Command("go", "build", "-o", bin, "../cmd/weft")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build weft: %v\n%s", err, out)
			return 1
		}
		if err := os.Setenv(weftEnv, bin); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return m.Run()
}

// host is a node for one agent: its directories, its bpffs, and eth0 with the address 172.18.1.1.
type host struct {
	clustermesh, endpoints, bpffs, socket string
	nodeIP                                string
	uid                                   int // of the agent
}

func newHost(t *testing.T) host {
	t.Helper()
	h := newNeighbour(t, "172.18.1.1")
	command(t, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "wire")
	command(t, "ip", "address", "add", "172.18.1.1/16", "dev", "eth0")
	command(t, "ip", "link", "set", "eth0", "up")
	command(t, "ip", "link", "set", "wire", "up")
	return h
}

// newNeighbour is a node whose agent shares the network of another one.
func newNeighbour(t *testing.T, nodeIP string) host {
	t.Helper()
	dir := t.TempDir()
	h := host{
		clustermesh: filepath.Join(dir, "clustermesh"), endpoints: filepath.Join(dir, "endpoints"),
		bpffs: testutil.MountBPFFS(t), socket: filepath.Join(dir, "weft.sock"), nodeIP: nodeIP,
	}
	for _, d := range []string{h.clustermesh, h.endpoints} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

// command runs a program that must succeed, and returns what it printed.
func command(t *testing.T, name string, args ...string) []byte {
	t.Helper()
	var stderr bytes.Buffer
	cmd := exec.Command(name, args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, stderr.Bytes())
	}
	return out
}

// agent is a running agent, or an operator.
type agent struct {
	cmd *exec.Cmd
	log *os.File
}

// start runs an agent of cluster on the host; it ends with the test.
func (h host) start(t *testing.T, cluster string, id int, flags ...string) *agent {
	t.Helper()
	return startWeft(t, h.uid, append([]string{
		"agent", "--cluster-name", cluster, "--cluster-id", fmt.Sprint(id), "--node-name", cluster + "-n1",
		"--node-ip", h.nodeIP, "--clustermesh-config", h.clustermesh, "--endpoints-dir", h.endpoints, "--state-dir", h.endpoints + ".state",
		"--bpffs", h.bpffs, "--api-socket", h.socket, "--devices", "eth0", "--routing-mode", "none",
	}, flags...)...)
}

// startWeft runs an agent or an operator, as root or as another user with the agent's capabilities; it ends with the test.
func startWeft(t *testing.T, uid int, args ...string) *agent {
	t.Helper()
	log, err := os.CreateTemp(t.TempDir(), args[0]+".log")
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{log: log, cmd: exec.Command(os.Getenv(weftEnv), args...)}
	a.cmd.Stdout, a.cmd.Stderr = log, log
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if uid != 0 {
		a.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}
		a.cmd.SysProcAttr.AmbientCaps = []uintptr{unix.CAP_BPF, unix.CAP_NET_ADMIN}
	}
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		a.stop(t, syscall.SIGTERM)
		if t.Failed() {
			content, _ := os.ReadFile(log.Name())
			t.Logf("log of weft %s:\n%s", args[0], content)
		}
	})
	return a
}

// stop ends the agent, if it runs, and waits for its end.
func (a *agent) stop(t *testing.T, signal syscall.Signal) {
	t.Helper()
	if a.cmd.ProcessState != nil {
		return
	}
	if err := a.cmd.Process.Signal(signal); err != nil {
		t.Error(err)
	}
	kill := time.AfterFunc(20*time.Second, func() { _ = a.cmd.Process.Signal(syscall.SIGQUIT) }) // which tells what hangs
	defer kill.Stop()
	err := a.cmd.Wait()
	if signal == syscall.SIGTERM && err != nil {
		t.Errorf("%s: %v", a.cmd.Args[1], err)
	}
}
