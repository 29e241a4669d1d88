// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"go.uber.org/goleak"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// withoutTCXEnv, if it is in the environment, makes all tests that can treat the kernel as one without tcx.
const withoutTCXEnv = "WEFT_TEST_WITHOUT_TCX"

// patience bounds everything that a test waits for.
const patience = 30 * time.Second

// testHost is a network namespace with a BPF file system: what a node is to its datapath. eth0 has 172.18.1.1/16 and
// fd00:18:1::1/32; its other end, with the addresses .2.1, is in the namespace peer.
type testHost struct {
	t        *testing.T
	ns, peer *testutil.NetNS
	// filterMode: the kernel has no tcx, or is treated like one.
	filterMode bool
	cfg        Config

	mu    sync.Mutex
	heard map[identity.ClusterID]bool
}

func newTestHost(t *testing.T) *testHost {
	t.Helper()
	h := &testHost{t: t, ns: testutil.NewNetNS(t), peer: testutil.NewNetNS(t), heard: map[identity.ClusterID]bool{}}
	h.ip("link add eth0 type veth peer name eth0 netns " + h.peer.Path())
	h.setUp(h.ns, "172.18.1.1/16", "fd00:18:1::1/32")
	h.setUp(h.peer, "172.18.2.1/16", "fd00:18:2::1/32")
	testutil.Eventually(t, patience, func() error { // the kernel adds it when the wire is up
		if routes := h.ip("-6 route show table local"); !strings.Contains(routes, "fd00:18:1::1") {
			return fmt.Errorf("the host has not got its address yet:\n%s", routes)
		}
		return nil
	})
	h.filterMode = !hasTCX() || os.Getenv(withoutTCXEnv) != ""
	h.cfg = Config{
		withoutTCX: h.filterMode, compareEvery: DefaultVerifyInterval, // who changes something wants to see it
		BPFFS: testutil.MountBPFFS(t), Devices: []string{"eth0"}, RoutingMode: RoutingNone, MaxEntries: 10000,
		ClusterName: "east", NodeName: "east-1",
		NodeIPs:       []netip.Addr{netip.MustParseAddr("172.18.1.1"), netip.MustParseAddr("fd00:18:1::1")},
		LocalPodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.1.0/24")},
		DualStack:     true,
		Layout:        testLayout(t), IPs: ipcache.New(), Nodes: node.NewTable(), Log: slog.New(slog.DiscardHandler),
		Listed: func(id identity.ClusterID) bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			return h.heard[id]
		},
	}
	return h
}

func (h *testHost) setUp(ns *testutil.NetNS, addrs ...string) {
	h.t.Helper()
	for _, addr := range addrs {
		h.ipIn(ns, "addr add "+addr+" dev eth0 nodad")
	}
	h.ipIn(ns, "link set eth0 up")
}

// ip runs the ip command in the host's namespace and returns what it prints.
func (h *testHost) ip(args string) string {
	h.t.Helper()
	return h.ipIn(h.ns, args)
}

func (h *testHost) ipIn(ns *testutil.NetNS, args string) string {
	h.t.Helper()
	if strings.Contains(args, ":") && !strings.HasPrefix(args, "-") {
		args = "-6 " + args
	}
	var (
		out []byte
		err error
	)
	cmd := exec.Command("ip", strings.Fields(args)...)
	ns.Do(h.t, func() { out, err = cmd.CombinedOutput() })
	if err != nil {
		h.t.Fatalf("%v: %v: %s", cmd.Args, err, out)
	}
	return string(out)
}

// hear says that a cluster, or with 0 every cluster, has been heard completely.
func (h *testHost) hear(id identity.ClusterID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.heard[id] = true
}

// agent is a datapath that runs.
type agent struct {
	*Datapath
	h     *testHost
	stop  func() // and wait
	ended <-chan struct{}
}

// start runs a datapath until the test ends or stop is called, and waits for it to be ready.
func (h *testHost) start() *agent {
	h.t.Helper()
	a := h.startUnready()
	select {
	case <-a.Ready():
	case <-a.ended:
		h.t.Fatal("run ended before it was ready")
	case <-time.After(patience):
		h.t.Fatalf("not ready; status %+v", a.Status())
	}
	return a
}

// startUnready is start without the wait.
func (h *testHost) startUnready() *agent {
	h.t.Helper()
	d, err := New(h.cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	var result error // read after ended is closed
	go func() {
		defer close(ended)
		h.ns.Do(h.t, func() { result = d.Run(ctx) })
	}()
	stop := sync.OnceFunc(func() {
		cancel()
		select {
		case <-ended:
			if result != nil {
				h.t.Errorf("run: %v", result)
			}
		case <-time.After(patience):
			h.t.Error("run does not end")
		}
	})
	h.t.Cleanup(stop)
	return &agent{Datapath: d, h: h, stop: stop, ended: ended}
}

// refuse runs a datapath that is expected to give up at once and returns its error.
func (h *testHost) refuse() error {
	h.t.Helper()
	d, err := New(h.cfg)
	if err != nil {
		h.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	h.ns.Do(h.t, func() { err = d.Run(ctx) })
	if err == nil {
		h.t.Fatal("run ended without error")
	}
	if strings.Contains(err.Error(), "\n") {
		h.t.Errorf("error has more than one line: %q", err)
	}
	return err
}

// entries reads the pinned map: identities by prefix.
func (h *testHost) entries() map[string]identity.ID {
	h.t.Helper()
	m, err := OpenIPCache(h.cfg.BPFFS)
	if err != nil {
		h.t.Fatal(err)
	}
	defer m.Close()
	all := map[string]identity.ID{}
	err = m.All(func(e MapEntry) bool {
		all[e.Prefix.String()] = e.Identity
		return true
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return all
}

// kernelIDs are the kernel's numbers of everything that is pinned, by pin.
func (h *testHost) kernelIDs() map[string]string {
	h.t.Helper()
	dir := &pinDir{path: h.cfg.BPFFS + "/" + pinDirName}
	ids := map[string]string{}
	for _, pin := range pins {
		m, err := ebpf.LoadPinnedMap(dir.file(pin), nil)
		if err != nil {
			h.t.Fatal(err)
		}
		info, err := m.Info()
		m.Close()
		if err != nil {
			h.t.Fatal(err)
		}
		id, _ := info.ID()
		ids[pin] = fmt.Sprint("map ", id)
	}
	for _, p := range bpf.Programs {
		prog, err := ebpf.LoadPinnedProgram(dir.file(pinProgramsDir, p.Name), nil)
		if err != nil {
			h.t.Fatal(err)
		}
		info, err := prog.Info()
		prog.Close()
		if err != nil {
			h.t.Fatal(err)
		}
		id, _ := info.ID()
		ids[p.Name] = fmt.Sprint("program ", id)
	}
	for name, l := range h.links() {
		ids[name] = fmt.Sprintf("link %d at %d runs program %d", l.ID, l.TCX().Ifindex, l.Program)
	}
	return ids
}

// links reads the pinned links, by the name of the pin.
func (h *testHost) links() map[string]*link.Info {
	h.t.Helper()
	all := map[string]*link.Info{}
	dir := h.cfg.BPFFS + "/" + pinDirName + "/" + pinLinksDir
	for _, name := range listDir(h.t, dir) {
		l, err := link.LoadPinnedLink(dir+"/"+name, nil)
		if err != nil {
			continue // removed since
		}
		info, err := l.Info()
		l.Close()
		if err != nil {
			h.t.Fatal(err)
		}
		all[name] = info
	}
	return all
}

// attached returns how many links each hook of a device has, and fails if one of ours is not among them.
func (h *testHost) attached(device string) (ids map[string][]link.ID, err error) {
	ids = map[string][]link.ID{}
	h.ns.Do(h.t, func() {
		index := 0
		if index, err = interfaceIndex(device); err != nil {
			return
		}
		for _, p := range bpf.Programs {
			var result *link.QueryResult
			if result, err = link.QueryPrograms(link.QueryOptions{Target: index, Attach: p.Attach}); err != nil {
				return
			}
			for _, a := range result.Programs {
				id, _ := a.LinkID()
				ids[p.Name] = append(ids[p.Name], id)
			}
		}
	})
	return ids, err
}
