// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil/golden"
	"github.com/weftmesh/weft/internal/yamldir"
	"github.com/weftmesh/weft/ipcache"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// recorder is a Publisher that notes what it is told and holds what would be in etcd.
type recorder struct {
	calls []string
	keys  map[string]string
}

func newRecorder() *recorder { return &recorder{keys: make(map[string]string)} }

func (r *recorder) Set(key string, value []byte) {
	r.calls = append(r.calls, "set "+key)
	r.keys[key] = string(value)
}

func (r *recorder) Create(key string, value []byte) {
	r.calls = append(r.calls, "create "+key)
	r.keys[key] = string(value)
}

func (r *recorder) Release(key string) { r.calls = append(r.calls, "release "+key) }

func (r *recorder) Delete(key string) {
	r.calls = append(r.calls, "delete "+key)
	delete(r.keys, key)
}

// take returns the calls since it was last called.
func (r *recorder) take() []string {
	calls := r.calls
	r.calls = nil
	return calls
}

// bench is a registry of node east-n1 over a directory of its own.
type bench struct {
	*Registry
	files *Files
	t     testing.TB
	dir   string
	etcd  *recorder
}

func newBench(t testing.TB, change ...func(*Config)) *bench {
	t.Helper()
	return newBenchOver(t, t.TempDir(), change...)
}

func newBenchOver(t testing.TB, dir string, change ...func(*Config)) *bench {
	t.Helper()
	etcd := newRecorder()
	cfg := Config{
		ClusterName: "east", ClusterID: 1, NodeName: "east-n1",
		HostIP: netip.MustParseAddr("172.18.1.1"), IPs: ipcache.New(), Identities: identity.NewTable(),
		Publisher: etcd, Log: slog.New(slog.DiscardHandler),
	}
	for _, c := range change {
		c(&cfg)
	}
	files := newFiles(t, dir)
	cfg.Sources = append(cfg.Sources, files)
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &bench{Registry: r, files: files, t: t, dir: dir, etcd: etcd}
}

func newFiles(t testing.TB, dir string) *Files {
	return NewFiles(FilesConfig{Dir: dir, ClusterName: "east", ClusterID: 1, Layout: mustLayout(t)})
}

// scan has the files looked at, and what they declare put in force.
func (b *bench) scan(thorough bool) {
	if b.files.dir.Scan(thorough, b.files.cluster.parse) {
		b.files.take()
	}
	b.update(true)
}

// Run runs the source and the registry.
func (b *bench) Run(ctx context.Context) error {
	var group errgroup.Group
	group.Go(func() error { return b.files.Run(ctx) })
	group.Go(func() error { return b.Registry.Run(ctx) })
	return group.Wait()
}

func (b *bench) write(name, content string) {
	b.t.Helper()
	if err := os.WriteFile(filepath.Join(b.dir, name), []byte(content), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) remove(name string) {
	b.t.Helper()
	if err := os.Remove(filepath.Join(b.dir, name)); err != nil {
		b.t.Fatal(err)
	}
}

// settle scans often enough for every change to be taken.
func (b *bench) settle() {
	b.scan(false)
	b.scan(false)
}

// wantIPs compares the whole table of addresses: "address identity owner".
func (b *bench) wantIPs(want ...string) {
	b.t.Helper()
	var got []string
	for c := range b.cfg.IPs.All() {
		got = append(got, fmt.Sprintf("%s %s %s", c.Prefix.Addr(), c.Entry.Identity, strings.TrimPrefix(c.Owner.Object, "endpoint/")))
	}
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		b.t.Fatalf("addresses (-want +got)\n%s", diff)
	}
}

// wantErrors compares the errors in the status by their beginnings.
func (b *bench) wantErrors(want ...string) {
	b.t.Helper()
	got := b.Status().Errors
	ok := len(got) == len(want)
	for i := 0; ok && i < len(got); i++ {
		ok = strings.Contains(got[i].Error(), want[i])
	}
	if !ok {
		b.t.Fatalf("errors %q, want those with %q", got, want)
	}
}

const (
	pod1 = "name: pod-1\nnamespace: shop\nid: 101\nip: 10.1.1.10\nidentity: 65793\nlabels: {app: web}\n" +
		"ports:\n- {name: metrics, port: 9100, protocol: udp}\n- {name: http, port: 8080}\n"
	pod2 = "name: pod-2\nnamespace: shop\nid: 102\nip: 10.1.2.10\nidentity: 65794\nlabels: {app: db}\n"
)

// recorded is the state of the etcd of a real cluster.
func recorded(t testing.TB) map[string]string {
	t.Helper()
	keys := make(map[string]string)
	for _, kv := range golden.Lines[struct{ Key, Value string }](t, "kvstore-state-east.jsonl") {
		keys[kv.Key] = kv.Value
	}
	return keys
}

// What is published must be, byte for byte, what Cilium published for the same pods.
func TestPublishesAsCilium(t *testing.T) {
	want := recorded(t)
	for node, tc := range map[string]struct{ host, declaration, ip string }{
		"east-n1": {"172.18.1.1", pod1, "10.1.1.10"},
		"east-n2": {"172.18.1.2", pod2, "10.1.2.10"},
	} {
		t.Run(node, func(t *testing.T) {
			b := newBench(t, func(c *Config) { c.NodeName, c.HostIP = node, netip.MustParseAddr(tc.host) })
			b.write("pods.yaml", tc.declaration)
			b.scan(true)
			b.wantErrors()
			if len(b.etcd.keys) != 3 {
				t.Errorf("published %d keys, want 3: %v", len(b.etcd.keys), b.etcd.keys)
			}
			for key, got := range b.etcd.keys {
				// The recording has its slave keys from one node.
				if diff := cmp.Diff(want[strings.Replace(key, "/172.18.1.2", "/172.18.1.1", 1)], got); diff != "" {
					t.Errorf("%s (-want +got)\n%s", key, diff)
				}
			}
			if _, ok := b.etcd.keys["cilium/state/ip/v1/default/"+tc.ip]; !ok {
				t.Errorf("%s is not announced", tc.ip)
			}
		})
	}
}

func TestFilesComeChangeAndGo(t *testing.T) {
	b := newBench(t)
	b.scan(true)
	b.wantIPs()
	b.wantErrors()

	b.write("a.yaml", pod1)
	b.write("ignored.txt", pod2)
	b.write(".hidden.yaml", pod2)
	b.scan(false)
	b.wantIPs() // not before it has looked the same twice
	b.scan(false)
	b.wantIPs("10.1.1.10 65793 shop/pod-1")
	const slave1 = "cilium/state/identities/v1/value/k8s:app=web;k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop;" +
		"k8s:io.cilium.k8s.policy.cluster=east;k8s:io.cilium.k8s.policy.serviceaccount=default;k8s:io.kubernetes.pod.namespace=shop;/172.18.1.1"
	if diff := cmp.Diff([]string{
		"create cilium/state/identities/v1/id/65793", "set " + slave1, "set cilium/state/ip/v1/default/10.1.1.10",
	}, b.etcd.take()); diff != "" {
		t.Errorf("calls (-want +got)\n%s", diff)
	}
	if labels, ok := b.cfg.Identities.Labels(65793); !ok || !strings.HasPrefix(labels.String(), "k8s:app=web;") {
		t.Errorf("labels of 65793: %v, %v", labels, ok)
	}

	// One address moves, one comes; the identity is used by two and then by one.
	b.write("a.yaml", strings.Replace(pod1, "ip: 10.1.1.10", "ips: [10.1.1.11, 'fd00::11']", 1))
	b.write("b.yml", "- {name: pod-3, namespace: shop, ip: 10.1.1.13, identity: 65793, labels: {app: web}}\n")
	b.settle()
	b.wantIPs("10.1.1.11 65793 shop/pod-1", "10.1.1.13 65793 shop/pod-3", "fd00::11 65793 shop/pod-1")
	b.remove("a.yaml")
	b.settle()
	b.wantIPs("10.1.1.13 65793 shop/pod-3")
	b.etcd.take()
	b.remove("b.yml")
	b.settle()
	b.wantIPs()
	if diff := cmp.Diff([]string{
		"release cilium/state/identities/v1/id/65793", "delete cilium/state/ip/v1/default/10.1.1.13", "delete " + slave1}, b.etcd.take()); diff != "" {
		t.Errorf("calls (-want +got)\n%s", diff)
	}
	if got := slices.Collect(mapKeys(b.etcd.keys)); !slices.Equal(got, []string{"cilium/state/identities/v1/id/65793"}) {
		t.Errorf("left in etcd: %q, want the master key alone", got)
	}
}

func mapKeys(m map[string]string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

func TestBadFileKeepsItsLastGoodVersion(t *testing.T) {
	b := newBench(t)
	b.write("a.yaml", pod1)
	b.write("b.yaml", pod2)
	b.scan(true)
	b.write("a.yaml", "name: [unterminated\n")
	b.settle()
	b.wantIPs("10.1.1.10 65793 shop/pod-1", "10.1.2.10 65794 shop/pod-2")
	b.wantErrors("its last good version stays in force")

	b.write("c.yaml", "\tnot yaml")
	b.settle()
	b.wantErrors("a.yaml: ", "c.yaml: yaml: ")

	if err := os.Truncate(filepath.Join(b.dir, "c.yaml"), yamldir.MaxFileSize+1); err != nil {
		t.Fatal(err)
	}
	b.remove("a.yaml")
	b.settle()
	b.wantIPs("10.1.2.10 65794 shop/pod-2")
	b.wantErrors("is larger than 4194304 bytes")

	// Once the file is good again, nothing of the error remains.
	b.write("c.yaml", pod1)
	b.settle()
	b.wantErrors()
	b.wantIPs("10.1.1.10 65793 shop/pod-1", "10.1.2.10 65794 shop/pod-2")
}

func TestBadEntryRejectsItselfAlone(t *testing.T) {
	b := newBench(t)
	b.write("a.yaml", "- {name: x, ip: nonsense, identity: 65793}\n- {name: y, ip: 10.1.1.1, identity: 65793}\n")
	b.scan(true)
	b.wantIPs("10.1.1.1 65793 default/y")
	b.wantErrors(`a.yaml:1: endpoint default/x: ip "nonsense" is not an IP address`)
}

func TestUnreadableDirectoryTakesNothingAway(t *testing.T) {
	b := newBench(t)
	b.write("a.yaml", pod1)
	b.scan(true)
	if err := os.Rename(b.dir, b.dir+".away"); err != nil {
		t.Fatal(err)
	}
	b.settle()
	b.wantIPs("10.1.1.10 65793 shop/pod-1")
	b.wantErrors("no such file or directory")
	if err := os.Rename(b.dir+".away", b.dir); err != nil {
		t.Fatal(err)
	}
	b.settle()
	b.wantIPs("10.1.1.10 65793 shop/pod-1")
	b.wantErrors()
}

func TestDirectoryThatComesLater(t *testing.T) {
	b := newBenchOver(t, filepath.Join(t.TempDir(), "later"))
	b.scan(true)
	b.wantErrors("no such file or directory")
	if b.files.dir.Scan(false, b.files.cluster.parse) {
		t.Error("a directory that is still not there is taken for a change")
	}
	if err := os.Mkdir(b.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	b.write("a.yaml", pod1)
	b.settle()
	b.wantIPs("10.1.1.10 65793 shop/pod-1")
	b.wantErrors()
}

// The first by file and place wins, whatever order the files came in, and the other follows when it is gone.
func TestOneAddressOneEndpoint(t *testing.T) {
	b := newBench(t)
	b.write("b.yaml", "- {name: second, ip: 10.1.1.1, identity: 65793}\n- {name: third, ip: 10.1.1.1, identity: 65793}\n")
	b.scan(true)
	b.wantIPs("10.1.1.1 65793 default/second")
	b.wantErrors("b.yaml:2: ip 10.1.1.1 belongs already to default/second, from file ")
	b.write("a.yaml", "- {name: first, ip: 10.1.1.1, identity: 65794}\n")
	b.settle()
	b.wantIPs("10.1.1.1 65794 default/first")
	b.wantErrors("default/second", "default/third")
	b.etcd.take()
	for range 5 {
		b.settle()
		b.scan(true)
	}
	if calls := b.etcd.take(); len(calls) > 0 {
		t.Errorf("nothing changed, but %q", calls)
	}
	b.remove("a.yaml")
	b.settle()
	b.wantIPs("10.1.1.1 65793 default/second")
	if got, ok := b.etcd.keys["cilium/state/ip/v1/default/10.1.1.1"]; !ok || !strings.Contains(got, `"ID":65793`) {
		t.Errorf("the address that changed hands is announced as %q", got)
	}
}

func TestConflicts(t *testing.T) {
	b := newBench(t)
	b.write("a.yaml", "- {name: x, ip: 10.1.1.1, identity: 65793, labels: {app: web}}\n"+
		"- {name: x, ip: 10.1.1.2, identity: 65793, labels: {app: web}}\n"+
		"- {name: y, ip: 10.1.1.3, identity: 65793, labels: {app: db}}\n"+
		"- {name: z, ip: 172.18.1.1, identity: 65793, labels: {app: web}}\n")
	b.scan(true)
	b.wantIPs("10.1.1.1 65793 default/x")
	b.wantErrors("there is already one of that name, from file ", "identity 65793 stands already for the labels",
		"ip 172.18.1.1 is the address of this node")
}

func TestWithoutPublisher(t *testing.T) {
	b := newBench(t, func(c *Config) { c.Publisher = nil })
	b.write("a.yaml", pod1)
	b.scan(true)
	b.wantIPs("10.1.1.10 65793 shop/pod-1")
	b.remove("a.yaml")
	b.settle()
	b.wantIPs()
	if n := b.cfg.Identities.Len(); n != 0 {
		t.Errorf("%d identities left behind", n)
	}
}

func TestStatusAndEndpointIDs(t *testing.T) {
	b := newBench(t)
	b.write("a.yaml", pod1+"---\nname: auto\nip: 10.1.1.12\nidentity: 65793\nlabels: {app: web}\nnamespace: shop\n")
	b.scan(true)
	got := b.Status().Endpoints
	if len(got) != 2 || got[0].Name != "auto" || got[1].Name != "pod-1" || got[1].ID != 101 || !strings.HasSuffix(got[0].Origin, "a.yaml:11") {
		t.Fatalf("status: %+v", got)
	}
	if auto := got[0].ID; auto <= 65535 || auto >= 1<<31 {
		t.Errorf("id %d was made up, want one above those that can be given", auto)
	}
	again := newBench(t)
	again.write("other.yaml", "name: auto\nip: 10.1.1.12\nidentity: 65793\nnamespace: shop\n")
	again.scan(true)
	if id := again.Status().Endpoints[0].ID; id != got[0].ID {
		t.Errorf("the id of shop/auto is once %d and once %d", got[0].ID, id)
	}
}

func TestRun(t *testing.T) {
	b := newBench(t)
	b.write("a.yaml", pod1)
	synctest.Test(t, func(t *testing.T) {
		r := newBenchOver(t, b.dir, func(c *Config) { c.IPs = b.cfg.IPs })
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		<-r.Ready()
		b.wantIPs("10.1.1.10 65793 shop/pod-1")
		b.write("b.yaml", pod2)
		time.Sleep(time.Second)
		synctest.Wait()
		b.wantIPs("10.1.1.10 65793 shop/pod-1", "10.1.2.10 65794 shop/pod-2")
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		// A stop takes nothing away.
		b.wantIPs("10.1.1.10 65793 shop/pod-1", "10.1.2.10 65794 shop/pod-2")
	})
}

// A writer that truncates and rewrites a file all the time, as an editor might, never makes an endpoint flicker.
func TestRewritesDoNotFlicker(t *testing.T) {
	dir := t.TempDir()
	newBenchOver(t, dir).write("a.yaml", pod1)
	synctest.Test(t, func(t *testing.T) {
		b := newBenchOver(t, dir)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- b.Run(ctx) }()
		<-b.Ready()
		b.write("b.yaml", pod2) // which shows that the directory is looked at meanwhile
		for i := range 100 {    // no two versions have the same size: clocks of file systems are coarse
			for _, content := range []string{"#" + strings.Repeat("-", i), pod1 + strings.Repeat("\n", i+1)} {
				b.write("a.yaml", content)
				time.Sleep(37 * time.Millisecond)
				synctest.Wait()
				if _, ok := b.cfg.IPs.Lookup(netip.MustParseAddr("10.1.1.10")); !ok {
					t.Fatalf("the endpoint was taken away, %q", content)
				}
			}
		}
		b.wantIPs("10.1.1.10 65793 shop/pod-1", "10.1.2.10 65794 shop/pod-2")
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}
