// SPDX-License-Identifier: Apache-2.0

package kvstore

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
)

// Of three members the leader dies again and again: what is written after each
// death is seen within 5 s, and nothing is deleted that was not.
// lesson: E8
func TestFaultLeaderKilled(t *testing.T) {
	t.Parallel()
	cluster := testutil.StartEtcdCluster(t, 3)
	want := fillMany(t, cluster.Leader(t), 100, "v")
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	r.awaitStart(t, w, dialAt(t, cluster.Endpoints()), want)
	r.take()
	var slowest time.Duration
	for i := range figure(2, 50) {
		old := cluster.Leader(t)
		old.Stop(t)
		leader := cluster.Leader(t)
		want["new"] = fmt.Sprint(i)
		leader.Put(t, "p/new", want["new"])
		slowest = max(slowest, eventually(t, allowed(5*time.Second), func() error { return r.equals(want) }))
		r.noDeletes(t, "after the leader's death")
		old.Restart(t)
		time.Sleep(figure(0, 4*time.Second))
	}
	t.Logf("converged after %v at most", slowest)
}

// A member that is cut off from the majority is not believed: neither its reads
// nor its silence. Who may ask the others follows them within 5 s.
// lesson: E8
func TestFaultMinority(t *testing.T) {
	t.Parallel()
	cluster := testutil.StartEtcdCluster(t, 3)
	leader := cluster.Leader(t)
	want := fillMany(t, leader, 100, "v")
	apart := leader
	stuck, free := newRecorder(), newRecorder()
	there, anywhere := NewWatcher("p/", stuck.deliver), NewWatcher("p/", free.deliver)
	alone := dialAt(t, []string{apart.Endpoint()})
	stuck.awaitStart(t, there, alone, want)
	free.awaitStart(t, anywhere, dialAt(t, cluster.Endpoints()), want)

	cluster.Isolate(apart)
	testutil.Eventually(t, testTimeout, func() error {
		if cluster.Leader(t) == apart {
			return errors.New("the member that is apart still leads")
		}
		return nil
	})
	before := maps.Clone(want)
	want["new"] = "1"
	cluster.Leader(t).Put(t, "p/new", "1")
	took := eventually(t, allowed(5*time.Second), func() error { return free.equals(want) })
	eventually(t, allowed(10*time.Second), dead(there))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if kv, ok, err := alone.Get(ctx, "p/new"); err == nil {
		t.Errorf("a stale read: %+v, %v", kv, ok)
	}
	if err := stuck.equals(before); err != nil {
		t.Errorf("of the member that is apart: %v", err)
	}
	cluster.Rejoin(t, apart)
	stuck.is(t, want)
	t.Logf("the majority was followed after %v", took)
}

// writerEnv tells a process of the test binary that it is to write keys to the
// etcd of that endpoint.
const writerEnv = "WEFT_TEST_WRITER"

const suspendedTTL = 2 * time.Second

// TestSuspendedWriter is the process that TestFaultWriterSuspended suspends.
func TestSuspendedWriter(t *testing.T) {
	endpoint := os.Getenv(writerEnv)
	if endpoint == "" {
		return
	}
	c, err := Dial(Config{Endpoints: []string{endpoint}}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	w := NewWriter(c, WriterConfig{TTL: suspendedTTL})
	for i := range 20 {
		w.Set(fmt.Sprintf("p/k%02d", i), []byte("v"))
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
		cancel()
	}()
	if err := w.Run(ctx); err != nil {
		t.Fatal(err)
	}
}

// A writer that was suspended beyond the life of its lease puts all its keys
// again when it goes on, and a reader sees each of them go and come once.
// lesson: E9
func TestFaultWriterSuspended(t *testing.T) {
	t.Parallel()
	e := testutil.StartEtcd(t)
	cmd := exec.Command(os.Args[0], "-test.run", "^TestSuspendedWriter$", "-test.count=1")
	cmd.Env = append(os.Environ(), writerEnv+"="+e.Endpoint())
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	signal := func(s syscall.Signal) {
		t.Helper()
		if err := cmd.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
	}
	want := make(map[string]string)
	for i := range 20 {
		want[fmt.Sprintf("k%02d", i)] = "v"
	}
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	r.awaitStart(t, w, dialAt(t, []string{e.Endpoint()}), want)
	r.take()
	signal(syscall.SIGSTOP)
	r.is(t, map[string]string{})
	time.Sleep(figure(0, 10*time.Second))
	signal(syscall.SIGCONT)
	took := eventually(t, allowed(suspendedTTL), func() error { return r.equals(want) })
	time.Sleep(figure(time.Second, 10*time.Second))
	r.is(t, want)
	// On a busy machine the writer may lose its lease once more.
	if events := r.take(); len(events) != 2*len(want) && (fullFaults || len(events) < 2*len(want)) {
		t.Errorf("%d events for %d keys: %q", len(events), len(want), events)
	}
	t.Logf("the keys were back after %v", took)
}

// What the server refuses is told, asked again at growing intervals, and works
// as soon as it is allowed.
// lesson: E10
func TestFaultRefusedByServer(t *testing.T) {
	t.Parallel()
	t.Run("role narrowed and user gone", testRoleNarrowed)
	t.Run("no space", testNoSpace)
	t.Run("too many requests", testTooManyRequests)
}

// told waits until an error with the text is in the watcher's or the client's
// status.
func told(t *testing.T, w *Watcher, c *Client, text string) {
	t.Helper()
	testutil.Eventually(t, testTimeout, func() error {
		err := errors.Join(w.LastError(), c.Status().LastError)
		if err == nil || !strings.Contains(err.Error(), text) {
			return fmt.Errorf("the status tells %v, want %q", err, text)
		}
		return nil
	})
}

func testRoleNarrowed(t *testing.T) {
	t.Parallel()
	e := testutil.StartEtcd(t, testutil.WithAuth("east"))
	p := testutil.StartProxy(t, e.Addr())
	e.Put(t, "cilium/state/nodes/v1/east/a", "1")
	r := newRecorder()
	w := NewWatcher("cilium/state/nodes/v1/east/", r.deliver)
	c := dialThrough(t, p, func(c *Config) { c.Username, c.Password = "remote", testutil.Password })
	want := map[string]string{"a": "1"}
	r.awaitStart(t, w, c, want)
	admin := e.Client()
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	prefix := "cilium/state/"
	end := clientv3.GetPrefixRangeEnd(prefix)
	must(admin.RoleRevokePermission(t.Context(), "remote", prefix, end))
	p.Cut()
	told(t, w, c, "permission denied")
	must(admin.RoleGrantPermission(t.Context(), "remote", prefix, end, clientv3.PermissionType(clientv3.PermRead)))
	want["b"] = "2"
	e.Put(t, "cilium/state/nodes/v1/east/b", "2")
	r.is(t, want)
	eventually(t, testTimeout, live(w))
	must(admin.UserDelete(t.Context(), "remote"))
	p.Cut()
	told(t, w, c, "authentication failed")
	if w.Len() != len(want) {
		t.Errorf("%d keys are known, of %d", w.Len(), len(want))
	}
}

func testNoSpace(t *testing.T) {
	t.Parallel()
	e := testutil.StartEtcd(t)
	w, _ := mustWrite(t, dialAt(t, []string{e.Endpoint()}), WriterConfig{})
	w.Set("p/a", []byte("1"))
	holds(t, e, map[string]string{"a": "1"})
	e.Raise(t)
	w.Set("p/a", []byte("2"))
	testutil.Eventually(t, testTimeout, func() error {
		if err := w.Status().LastError; err == nil || !strings.Contains(err.Error(), "space exceeded") {
			return fmt.Errorf("the status tells %v", err)
		}
		return nil
	})
	e.Disarm(t)
	holds(t, e, map[string]string{"a": "2"})
}

func testTooManyRequests(t *testing.T) {
	t.Parallel()
	e := testutil.StartEtcd(t)
	i := startInjector(t, e.Addr())
	i.refusing(rpctypes.ErrGRPCRequestTooManyRequests)
	want := fill(t, e, 10)
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	c := dialAt(t, []string{"http://" + i.addr})
	start(t, func(ctx context.Context) error { return w.Run(ctx, c) })
	told(t, w, c, "too many requests")
	time.Sleep(figure(time.Second, 10*time.Second))
	begin := time.Now()
	i.called()
	time.Sleep(figure(time.Second, 20*time.Second))
	n := i.called()
	if span := time.Since(begin); float64(n) > 5*span.Seconds() {
		t.Errorf("%d calls in %v of a server that has too many", n, span)
	}
	i.refusing(nil)
	eventually(t, time.Minute, func() error { return r.equals(want) })
}

// A watch whose events come twice, late, in another order, from the past or
// never leads to what etcd holds by the next comparison, and meanwhile no key
// ever goes back.
// lesson: E12
func TestFaultUnreliableWatch(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	e := testutil.StartEtcd(t)
	i := startInjector(t, e.Addr())
	r := newRecorder()
	w := NewWatcher("p/", r.deliver)
	want := fill(t, e, 20)
	c := dialAt(t, []string{"http://" + i.addr}, unlimited, func(c *Config) {
		c.CompareInterval, c.LivenessTimeout = 500*time.Millisecond, 900*time.Millisecond
	})
	r.awaitStart(t, w, c, want)
	bad := &unreliable{random: rand.New(rand.NewPCG(seed, 1))}
	i.mangling(bad.mangle)
	for end := time.Now().Add(figure(2*time.Second, 30*time.Second)); time.Now().Before(end); {
		for range random.IntN(50) {
			key := fmt.Sprintf("p/k%04d", random.IntN(30))
			if random.IntN(3) == 0 {
				e.Delete(t, key)
			} else {
				e.Put(t, key, fmt.Sprint(random.Int()))
			}
		}
		r.is(t, stored(t, e))
	}
	t.Logf("%+v", w.Status())
}

// No behaviour depends on the wall clock: nothing here asks a time for anything
// but differences, which are monotonic, except when certificates end.
// lesson: E11
func TestFaultNoWallClock(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	wall := []string{
		"Unix", "UnixMilli", "UnixMicro", "UnixNano", "Round", "Truncate", "UTC", "In", "AddDate", "Date", "Clock",
		"Year", "Month", "Day", "Hour", "Minute", "Weekday", "YearDay", "MarshalText", "MarshalJSON",
	}
	excepted := []string{"certificate.go", "diagnose_tls.go"}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") || slices.Contains(excepted, file) {
			continue
		}
		set := token.NewFileSet()
		parsed, err := parser.ParseFile(set, file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			method, ok := call.Fun.(*ast.SelectorExpr)
			if ok && slices.Contains(wall, method.Sel.Name) {
				t.Errorf("%s: %s is of the wall clock", set.Position(call.Pos()), method.Sel.Name)
			}
			return true
		})
	}
}
