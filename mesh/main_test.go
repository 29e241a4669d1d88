// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// soon bounds what these tests wait for; nothing takes nearly so long on a machine that is not overloaded.
const soon = 20 * time.Second

// testTiming has a rescan interval that no test lives to see: changes of the directory must be notified.
var testTiming = timing{
	quiet: 5 * time.Millisecond, settle: 300 * time.Millisecond, rescan: time.Hour, poll: 20 * time.Millisecond,
	probe: 40 * time.Millisecond, request: 2 * time.Second, silence: 30 * time.Second,
	retryMin: 5 * time.Millisecond, retryMax: 100 * time.Millisecond,
}

// world is a mesh with its tables and its directory of configs.
type world struct {
	*Mesh
	t      *testing.T
	dir    string
	log    *logBuffer
	timing timing
	stop   func() // ends Run and waits for it

	changes int // made by propagation
}

// newWorld runs the mesh of cluster "here" (id 9), node "here-1". Options change its config, and may fill its directory,
// before that.
func newWorld(t *testing.T, options ...func(*Config)) *world {
	t.Helper()
	return newWorldAt(t, testTiming, options...)
}

// newWorldAt is newWorld with other intervals.
func newWorldAt(t *testing.T, at timing, options ...func(*Config)) *world {
	t.Helper()
	w := &world{t: t, dir: filepath.Join(t.TempDir(), "clustermesh"), log: &logBuffer{}, timing: at}
	if err := os.Mkdir(w.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	cfg := testConfig(t)
	cfg.Dir = w.dir
	cfg.Log = slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	for _, option := range options {
		option(&cfg)
	}
	w.run(cfg)
	return w
}

func (w *world) run(cfg Config) {
	w.t.Helper()
	m, err := newMesh(cfg, w.timing)
	if err != nil {
		w.t.Fatal(err)
	}
	w.Mesh = m
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- m.Run(ctx) }()
	w.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("Run = %v, want nil", err)
		}
	})
	w.t.Cleanup(func() {
		w.stop()
		if w.t.Failed() {
			w.t.Logf("log:\n%s", w.log)
		}
	})
}

func testConfig(t *testing.T) Config {
	t.Helper()
	layout, err := identity.NewLayout(255)
	if err != nil {
		t.Fatal(err)
	}
	// The clusters of most tests announce addresses without publishing the nodes that these are behind: the tests of limits
	// have the defaults.
	limits := DefaultLimits(0)
	limits.Default.AnyHost = true
	return Config{
		ClusterName: "here", ClusterID: 9, NodeName: "here-1", Layout: layout, Limits: &limits,
		IPs: ipcache.New(), Nodes: node.NewTable(), Identities: identity.NewTable(), Services: service.NewTable(),
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
}

// withConfig is an option by which a cluster's config is in the directory from the start.
func withConfig(c *cluster) func(*Config) {
	return func(cfg *Config) { c.etcd.WriteConfig(c.t, filepath.Join(cfg.Dir, c.name)) }
}

// logBuffer is a log that tests can read while it is being written.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func newTextLog(w io.Writer) *slog.Logger { return slog.New(slog.NewTextHandler(w, nil)) }

// file is the path of a cluster's config.
func (w *world) file(cluster string) string { return filepath.Join(w.dir, cluster) }

// remove deletes a cluster's config.
func (w *world) remove(cluster string) {
	w.t.Helper()
	if err := os.Remove(w.file(cluster)); err != nil {
		w.t.Fatal(err)
	}
}

// remote returns the status of one cluster.
func (w *world) remote(name string) (RemoteStatus, bool) {
	for _, s := range w.Status() {
		if s.Name == name {
			return s, true
		}
	}
	return RemoteStatus{}, false
}

// await waits until a cluster's status fulfils cond.
func (w *world) await(name, what string, cond func(RemoteStatus) bool) RemoteStatus {
	w.t.Helper()
	return w.awaitWithin(soon, name, what, cond)
}

func (w *world) awaitWithin(bound time.Duration, name, what string, cond func(RemoteStatus) bool) RemoteStatus {
	w.t.Helper()
	var s RemoteStatus
	testutil.Eventually(w.t, bound, func() error {
		var ok bool
		if s, ok = w.remote(name); !ok {
			return fmt.Errorf("cluster %s, awaited %s: not there", name, what)
		}
		if !cond(s) {
			return fmt.Errorf("cluster %s, awaited %s: is %+v", name, what, s)
		}
		return nil
	})
	return s
}

func (w *world) awaitState(name string, want State) RemoteStatus {
	w.t.Helper()
	return w.await(name, string(want), func(s RemoteStatus) bool { return s.State == want })
}

// awaitGone waits until a cluster is not there any more.
func (w *world) awaitGone(name string) {
	w.t.Helper()
	testutil.Eventually(w.t, soon, func() error {
		if s, ok := w.remote(name); ok {
			return fmt.Errorf("cluster %s is still there: %+v", name, s)
		}
		return nil
	})
}

// awaitIPs waits until the ipcache holds exactly these winners, each in the form of claimText.
func (w *world) awaitIPs(want ...string) {
	w.t.Helper()
	slices.Sort(want)
	testutil.Eventually(w.t, soon, func() error {
		if diff := cmp.Diff(want, w.ips(), cmpopts.EquateEmpty()); diff != "" {
			return errors.New("ipcache (-want +got):\n" + diff)
		}
		return nil
	})
}

// awaitIP waits until the winner of one prefix is as given; empty: there is none.
func (w *world) awaitIP(prefix, want string) {
	w.t.Helper()
	testutil.Eventually(w.t, soon, func() error {
		var got string
		for _, text := range w.ips() {
			if strings.HasPrefix(text, prefix+" ") {
				got = text
			}
		}
		if got != want {
			return fmt.Errorf("ipcache has %q, want %q", got, want)
		}
		return nil
	})
}

// never watches cond for a while and fails as soon as it holds.
func (w *world) never(what string, cond func() bool) {
	w.t.Helper()
	for end := time.Now().Add(10 * testTiming.probe); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if cond() {
			w.t.Fatalf("%s; status %+v", what, w.Status())
		}
	}
}

// ips lists the winners of the ipcache.
func (w *world) ips() []string { return tableText(w.cfg.IPs) }

func tableText(table *ipcache.Table) []string {
	all := []string{}
	for c := range table.All() {
		all = append(all, claimText(c))
	}
	slices.Sort(all)
	return all
}

// claimText is "10.2.1.10/32 131329 via 172.18.2.1 key 3 remote shop/pod-1 by 2 ip".
func claimText(c ipcache.Claim) string {
	text := fmt.Sprintf("%s %d", c.Prefix, uint32(c.Entry.Identity))
	if c.Entry.Host.IsValid() {
		text += " via " + c.Entry.Host.String()
	}
	if c.Entry.EncryptKey != 0 {
		text += fmt.Sprintf(" key %d", c.Entry.EncryptKey)
	}
	if c.Entry.Flags&ipcache.FlagRemoteCluster != 0 {
		text += " remote"
	}
	if c.Entry.Pod != "" {
		text += " " + c.Entry.Namespace + "/" + c.Entry.Pod
	}
	return text + fmt.Sprintf(" by %d %s", c.Owner.Cluster, c.Owner.Object)
}

// nodeNames lists the table of nodes as "cluster/name".
func (w *world) nodeNames() []string {
	all, _ := w.cfg.Nodes.Snapshot()
	names := []string{}
	for _, n := range all {
		names = append(names, n.Cluster+"/"+n.Name)
	}
	return names
}

// identityIDs lists the table of identities.
func (w *world) identityIDs() []identity.ID {
	ids := []identity.ID{}
	for id := range w.cfg.Identities.All() {
		ids = append(ids, id)
	}
	return ids
}

// cluster writes the state of one remote cluster into an etcd.
type cluster struct {
	t    *testing.T
	etcd *testutil.Etcd
	name string
	id   int
}

// newCluster starts the etcd of a cluster that has no data yet, but says so with every canary.
func newCluster(t *testing.T, name string, id int) *cluster {
	t.Helper()
	c := &cluster{t: t, etcd: testutil.StartEtcd(t), name: name, id: id}
	c.config(fmt.Sprintf(`{"id":%d,"capabilities":{"syncedCanaries":true,"maxConnectedClusters":255}}`, id))
	c.canaries("state")
	return c
}

func (c *cluster) config(value string) {
	c.t.Helper()
	c.etcd.Put(c.t, "cilium/cluster-config/"+c.name, value)
}

// canaries declares the four kinds of a tree complete.
func (c *cluster) canaries(tree string) {
	c.t.Helper()
	for _, kind := range []string{"nodes", "services", "identities", "ip"} {
		c.etcd.Put(c.t, fmt.Sprintf("cilium/synced/%s/cilium/%s/%s/v1", c.name, tree, kind), "2026-11-20T22:37:21Z")
	}
}

func (c *cluster) ipKey(key string) string { return "cilium/state/ip/v1/default/" + key }

// ip announces an address of a pod with the nth identity of the cluster, behind a node.
func (c *cluster) ip(addr string, n int, host string) {
	c.t.Helper()
	c.etcd.Put(c.t, c.ipKey(addr), ipValue(addr, c.id<<16+n, host))
}

func ipValue(addr string, id int, host string) string {
	return fmt.Sprintf(`{"IP":%q,"Mask":null,"HostIP":%q,"ID":%d,"Key":0,"Metadata":""}`, addr, host, id)
}

// node publishes a node with one address and, if that is not empty, a pod CIDR 10.x.y.0/24.
func (c *cluster) node(name, addr, podCIDR string) {
	c.t.Helper()
	cidr := "null"
	if podCIDR != "" {
		cidr = fmt.Sprintf(`{"IP":%q,"Mask":"////AA=="}`, podCIDR)
	}
	c.etcd.Put(c.t, "cilium/state/nodes/v1/"+c.name+"/"+name, fmt.Sprintf(
		`{"Name":%q,"Cluster":%q,"IPAddresses":[{"Type":"InternalIP","IP":%q}],"IPv4AllocCIDR":%s,"ClusterID":%d}`,
		name, c.name, addr, cidr, c.id))
}

// identity publishes the nth identity of the cluster.
func (c *cluster) identity(n int, app string) {
	c.t.Helper()
	c.etcd.Put(c.t, fmt.Sprintf("cilium/state/identities/v1/id/%d", c.id<<16+n),
		fmt.Sprintf("k8s:app=%s;k8s:io.cilium.k8s.policy.cluster=%s;", app, c.name))
}

// service publishes a service without backends.
func (c *cluster) service(namespace, name string) {
	c.t.Helper()
	c.etcd.Put(c.t, fmt.Sprintf("cilium/state/services/v1/%s/%s/%s", c.name, namespace, name),
		fmt.Sprintf(`{"cluster":%q,"namespace":%q,"name":%q,"shared":true,"clusterID":%d}`, c.name, namespace, name, c.id))
}
