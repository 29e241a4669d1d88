// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/internal/testutil"
)

// binaries is the directory of weft and weft-lab as these tests run them.
var binaries string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "weft-lab-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	const module = "github.com/weftmesh/weft"
	build := exec.Command("go", "build", "-o", dir+"/", module+"/cmd/weft", module+"/cmd/weft-lab")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n%s", build, err, out)
		return 1
	}
	binaries = dir
	return m.Run()
}

// testLab is a lab of one test, with a state directory and a prefix that no other lab has.
type testLab struct {
	t      *testing.T
	dir    string
	prefix string
}

// newTestLab returns a lab that is not up yet. The test fails if the lab leaves anything behind.
func newTestLab(t *testing.T) *testLab {
	testutil.RequireRoot(t)
	l := &testLab{t: t, dir: filepath.Join(t.TempDir(), "lab"), prefix: fmt.Sprintf("t%d", os.Getpid())}
	before := l.traces()
	t.Cleanup(func() {
		l.run("down")
		if diff := cmp.Diff(before, l.traces()); diff != "" {
			t.Errorf("the lab left something behind (-before +after):\n%s", diff)
		}
	})
	return l
}

// traces lists what the machine holds of the lab: its namespaces, mounts, processes and state.
func (l *testLab) traces() []string {
	var found []string
	namespaces, _ := filepath.Glob(filepath.Join(netNSDir, l.prefix+"-*"))
	found = append(found, namespaces...)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		l.t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, l.dir) || strings.Contains(line, "/"+l.prefix+"-") {
			found = append(found, line)
		}
	}
	for _, pid := range l.processes() {
		found = append(found, fmt.Sprint(pid, commandLine(pid)))
	}
	if _, err := os.Stat(l.dir); err == nil {
		found = append(found, l.dir)
	}
	return found
}

// processes lists the lab's processes, by their arguments.
func (l *testLab) processes() []int {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		l.t.Fatal(err)
	}
	var pids []int
	for _, dir := range dirs {
		var pid int
		fmt.Sscan(filepath.Base(dir), &pid)
		if slices.ContainsFunc(commandLine(pid), func(arg string) bool { return strings.HasPrefix(arg, l.dir+"/") }) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// command returns weft-lab with the lab's own directory and prefix.
func (l *testLab) command(args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	l.t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, filepath.Join(binaries, "weft-lab"), append([]string{"--state-dir", l.dir}, args...)...)
	if args[0] == "up" || args[0] == "demo" || args[0] == "down" {
		cmd.Args = append(cmd.Args, "--prefix", l.prefix)
	}
	return cmd
}

// run runs weft-lab and returns what it printed and its exit code.
func (l *testLab) run(args ...string) (stdout, stderr string, code int) {
	l.t.Helper()
	cmd := l.command(args...)
	var out, complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaint
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		l.t.Fatalf("%s: %v", cmd, err)
	}
	return out.String(), complaint.String(), cmd.ProcessState.ExitCode()
}

// must runs weft-lab, which has to end 0, and returns its standard output.
func (l *testLab) must(args ...string) string {
	l.t.Helper()
	stdout, stderr, code := l.run(args...)
	if code != 0 {
		l.t.Fatalf("weft-lab %s ended with %d:\n%s%s", strings.Join(args, " "), code, stdout, stderr)
	}
	return stdout
}

// fails runs weft-lab, which has to end with that code and a complaint that contains text.
func (l *testLab) fails(code int, text string, args ...string) {
	l.t.Helper()
	stdout, stderr, got := l.run(args...)
	if got != code || !strings.Contains(stderr, text) {
		l.t.Errorf("weft-lab %s ended with %d, want %d and %q:\n%s%s", strings.Join(args, " "), got, code, text, stdout, stderr)
	}
}

// status returns the lab's status and whether the command ended 0.
func (l *testLab) status() (labStatus, bool) {
	l.t.Helper()
	stdout, stderr, code := l.run("status", "-o", "json")
	var s labStatus
	if err := json.Unmarshal([]byte(stdout), &s); err != nil {
		l.t.Fatalf("status -o json: %v:\n%s%s", err, stdout, stderr)
	}
	return s, code == 0
}

// kill ends a process of the lab as a crash would.
func (l *testLab) kill(pid int) {
	l.t.Helper()
	if !slices.Contains(l.processes(), pid) {
		l.t.Fatalf("process %d is not one of the lab's", pid)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		l.t.Fatal(err)
	}
	testutil.Eventually(l.t, testPatience, func() error {
		if stat, err := readStat(pid); err == nil && stat.state != 'Z' {
			return fmt.Errorf("process %d is still there", pid)
		}
		return nil
	})
}

func TestLifecycle(t *testing.T) {
	l := newTestLab(t)
	l.fails(1, "no lab is up", "status")
	l.fails(1, "no lab is up", "exec", "east-1", "true")
	if out := l.must("down"); !strings.Contains(out, "No lab is up") {
		t.Errorf("down with no lab:\n%s", out)
	}

	l.must("up")
	s, well := l.status()
	if !well || len(s.Nodes) != 4 || len(s.Etcds) != 2 || len(s.Operators) != 2 || s.Prefix != l.prefix {
		t.Errorf("status after up: well %t, %+v", well, s)
	}
	if table := l.must("status"); !strings.Contains(table, "west-2/db") || !strings.Contains(table, "ready") {
		t.Errorf("status table:\n%s", table)
	}

	l.testExec()
	l.testPod()
	l.testRepair()

	l.must("down")
	if traces := l.traces(); len(traces) > 0 {
		t.Errorf("after down there is still: %q", traces)
	}
	if out := l.must("down"); !strings.Contains(out, "No lab is up") {
		t.Errorf("a second down:\n%s", out)
	}
}

func (l *testLab) testExec() {
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"east-1", "ip", "-o", "-4", "address", "show", "eth0"}, "172.18.1.1/16"},
		{[]string{"west-2/db", "ip", "-o", "-6", "address", "show", "eth0"}, "fd00:10:2:2::11/128"},
		{[]string{"east-1", "weft", "status"}, "east-1"},
		{[]string{"west-1", "weft", "operator", "status"}, "west"},
		{[]string{"east-1/web", "grep", "0::", "/proc/self/cgroup"}, "/" + l.prefix + "-east-1\n"},
		{[]string{"east-2", "weft", "bpf", "ipcache", "list"}, "10.2.1.10"},
		{[]string{"east-1/web", "sh", "-c", "echo $WEFT_LAB_PLACE $WEFT_BPFFS"}, "east-1/web " + l.dir + "/nodes/east-1/bpf"},
	} {
		if out := l.must(append([]string{"exec"}, test.args...)...); !strings.Contains(out, test.want) {
			l.t.Errorf("exec %q printed %q, want %q in it", test.args, out, test.want)
		}
	}
	l.fails(7, "", "exec", "east-1", "sh", "-c", "exit 7")
	l.fails(1, "there are east-1, east-2, west-1, west-2", "exec", "north-1", "true")
	l.fails(1, "no network namespace", "exec", "east-1/none", "true")
	l.fails(1, "pod name", "exec", "east-1/../x", "true")
	l.fails(1, "not found in PATH", "exec", "east-1", "no-such-program")
	l.fails(2, "requires at least 2 arg", "exec", "east-1")
	l.fails(2, "give table or json", "status", "-o", "yaml")
	l.fails(2, "unknown flag", "up", "--nonsense")
}

func (l *testLab) testPod() {
	l.must("pod", "add", "west-1", "cache", "--app", "redis")
	redis := identityOf(2, "redis")
	testutil.Eventually(l.t, testPatience, func() error {
		out, stderr, code := l.run("exec", "east-1", "weft", "bpf", "ipcache", "get", "10.2.1.12")
		if code != 0 || !strings.Contains(out, fmt.Sprint(redis)) {
			return fmt.Errorf("east-1 does not know 10.2.1.12 as %d: %s%s", redis, out, stderr)
		}
		return nil
	})
	l.fails(1, "has a pod cache already", "pod", "add", "west-1", "cache")
	l.fails(1, "pod name", "pod", "add", "west-1", "no_name")
	l.fails(1, "no node", "pod", "add", "west-9", "cache")
	l.must("pod", "remove", "west-1", "cache")
	l.fails(1, "no pod cache", "pod", "remove", "west-1", "cache")
	testutil.Eventually(l.t, testPatience, func() error {
		if out := l.must("exec", "east-1", "weft", "bpf", "ipcache", "list"); strings.Contains(out, "10.2.1.12/32") {
			return errors.New("east-1 still knows 10.2.1.12")
		}
		return nil
	})
}

// testRepair checks that a second `up` starts what is dead and leaves the rest as it is.
func (l *testLab) testRepair() {
	before, _ := l.status()
	if out := l.must("up"); !strings.Contains(out, "already up") || !strings.Contains(out, "as before") {
		l.t.Errorf("up on a running lab:\n%s", out)
	}
	after, _ := l.status()
	if diff := cmp.Diff(before, after); diff != "" {
		l.t.Errorf("up on a running lab changed it (-before +after):\n%s", diff)
	}
	l.kill(before.Nodes[0].PID)
	l.kill(before.Etcds[1].PID)
	l.kill(before.Operators[0].PID)
	broken, well := l.status()
	if well || broken.Nodes[0].State != stateDead || broken.Etcds[1].State != stateDead || broken.Operators[0].State != stateDead {
		l.t.Errorf("status of a broken lab: well %t, %s is %s, etcd of %s is %s, operator of %s is %s", well,
			broken.Nodes[0].Name, broken.Nodes[0].State, broken.Etcds[1].Cluster, broken.Etcds[1].State,
			broken.Operators[0].Cluster, broken.Operators[0].State)
	}
	l.must("up")
	repaired, well := l.status()
	if !well {
		l.t.Errorf("the lab is not well after a repair: %+v", repaired)
	}
	if repaired.Nodes[1].PID != before.Nodes[1].PID || repaired.Etcds[0].PID != before.Etcds[0].PID ||
		repaired.Operators[1].PID != before.Operators[1].PID {
		l.t.Error("the repair replaced processes that were alive")
	}
}

// In a lab with an overlay, pods of two clusters talk through it, and both nodes tell their identities.
func TestTunnel(t *testing.T) {
	l := newTestLab(t)
	l.fails(2, "give native or tunnel", "up", "--routing-mode", "pigeon")
	l.must("up", "--routing-mode", "tunnel")
	if s, well := l.status(); !well {
		t.Errorf("the lab is not well: %+v", s)
	}
	l.fails(1, "has the routing mode tunnel", "up", "--routing-mode", "native")
	if out := l.must("exec", "east-1", "ip", "route", "show", "proto", "119"); !strings.Contains(out, "10.2.1.0/24 dev weft_vxlan") {
		t.Errorf("routes of east-1:\n%s", out)
	}
	self := filepath.Join(binaries, "weft-lab")
	server := l.command("exec", "west-1/web", self, "serve", "--name", "web of west-1")
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = server.Process.Signal(syscall.SIGTERM)
		_ = server.Wait() // that it was ended is no error of the test
	})
	for _, request := range [][]string{{"tcp", "10.2.1.10"}, {"udp", "10.2.1.10"}, {"tcp", "fd00:10:2:1::10"}} {
		testutil.Eventually(t, testPatience, func() error {
			out, stderr, code := l.run(append([]string{"exec", "east-1/web", self, "request"}, request...)...)
			if code != 0 || !strings.Contains(out, "web of west-1") {
				return fmt.Errorf("request %q: %s%s", request, out, stderr)
			}
			return nil
		})
	}
	for _, node := range []string{"east-1", "west-1"} {
		out := l.must("exec", node, "weft", "bpf", "counters", "list", "-o", "tsv")
		for _, mode := range []string{"overlay", "pod"} {
			if !strings.Contains(out, mode) {
				t.Errorf("%s has counted nothing with mode %s:\n%s", node, mode, out)
			}
		}
		if strings.Contains(out, "spoofed") || strings.Contains(out, "wrong-") {
			t.Errorf("%s found something wrong:\n%s", node, out)
		}
	}
}

// A crash leaves processes, mounts, namespaces and pid files in any combination; up and down must cope.
func TestCrashLeftovers(t *testing.T) {
	l := newTestLab(t)
	l.must("up")
	first, _ := l.status()
	for _, n := range first.Nodes[1:] {
		l.kill(n.PID)
	}
	if err := deleteNetNS(l.prefix + "-west-1"); err != nil {
		t.Fatal(err)
	}
	// A pid file that names someone else's process.
	stranger := startSleep(t, "1000.5")
	pidFile := filepath.Join(l.dir, "nodes", "east-2", "agent.pid")
	if err := os.WriteFile(pidFile, fmt.Appendf(nil, "%d %d\n", stranger.PID, stranger.Start), 0o644); err != nil {
		t.Fatal(err)
	}
	// What is left of `ip netns add` interrupted half-way: a name without a namespace.
	if err := os.WriteFile(filepath.Join(netNSDir, l.prefix+"-west-1"), nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if out := l.must("up"); !strings.Contains(out, "left behind") {
		t.Errorf("up after a crash:\n%s", out)
	}
	second, well := l.status()
	if !well || second.Nodes[0].PID == first.Nodes[0].PID {
		t.Errorf("up after a crash: well %t, agent of %s is process %d as before", well, second.Nodes[0].Name, second.Nodes[0].PID)
	}
	if !stranger.alive() {
		t.Error("up ended a process that is not the lab's")
	}
	// The same, with the state cut short: the manifest says that building was under way.
	if err := os.WriteFile(filepath.Join(l.dir, "lab.json"), []byte(`{"prefix":"`+l.prefix+`"`), 0o644); err != nil {
		t.Fatal(err)
	}
	l.must("down")
	if traces := l.traces(); len(traces) > 0 {
		t.Errorf("after down there is still: %q", traces)
	}
}

// Neither a mistaken directory nor a mistaken prefix may take down what is not the lab's.
func TestForeignState(t *testing.T) {
	l := newTestLab(t)
	foreign := filepath.Join(t.TempDir(), "precious")
	if err := os.MkdirAll(filepath.Join(foreign, "nodes"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"up", "down", "demo"} {
		l.fails(1, "holds nodes and no lab", command, "--state-dir", foreign)
	}
	if _, err := os.Stat(filepath.Join(foreign, "nodes")); err != nil {
		t.Error(err)
	}

	l.must("up")
	other := filepath.Join(t.TempDir(), "other")
	for _, command := range []string{"up", "down", "demo"} {
		l.fails(1, "belong to the lab in "+l.dir, command, "--state-dir", other)
	}
	l.fails(1, `has the prefix "`+l.prefix+`"`, "status", "--prefix", "other")
	dir, err := os.Open(l.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := syscall.Flock(int(dir.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	l.fails(1, "another weft-lab is at work", "down")
	if s, well := l.status(); !well {
		t.Errorf("the lab is not well after all this: %+v", s)
	}
}
