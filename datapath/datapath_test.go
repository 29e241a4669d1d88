// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
)

func listDir(t testing.TB, dir string) []string {
	t.Helper()
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range files {
		names = append(names, f.Name())
	}
	return names
}

func interfaceIndex(device string) (int, error) {
	i, err := net.InterfaceByName(device)
	if err != nil {
		return 0, err
	}
	return i.Index, nil
}

// wantEntries waits until the pinned map holds exactly these.
func (h *testHost) wantEntries(want map[string]identity.ID) {
	h.t.Helper()
	testutil.Eventually(h.t, patience, func() error {
		if diff := cmp.Diff(want, h.entries()); diff != "" {
			return fmt.Errorf("map (-want +got):\n%s", diff)
		}
		return nil
	})
}

func TestMapEqualsTable(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	a := h.start()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	model := map[string]identity.ID{}
	for range 30 {
		var ops []ipcache.Op
		for range 300 {
			addr := netip.AddrFrom4([4]byte{10, byte(rng.IntN(4)), byte(rng.IntN(4)), byte(rng.IntN(64))})
			if rng.IntN(2) == 0 {
				addr = netip.AddrFrom16([16]byte{0: 0xfd, 9: byte(rng.IntN(4)), 15: byte(rng.IntN(64))})
			}
			p, _ := addr.Prefix(addr.BitLen() - []int{0, 0, 0, 2, 8, 24}[rng.IntN(6)])
			if rng.IntN(3) == 0 {
				ops = append(ops, remove(p.String()))
				delete(model, p.String())
				continue
			}
			id := identity.ID(131072 + rng.IntN(1000))
			ops = append(ops, upsert(p.String(), id))
			model[p.String()] = id
		}
		h.cfg.IPs.Apply(ops)
		h.wantEntries(model)
	}
	testutil.Eventually(t, patience, func() error {
		if s := a.Status().IPCache; s.Entries != len(model) || s.Pending != 0 || s.Failures != 0 {
			return fmt.Errorf("status %+v, want %d entries and no failures", s, len(model))
		}
		return nil
	})
	a.stop()
	h.wantEntries(model)
}

// The whole entry reaches the map, and the reader of the pin understands it, agent or not.
func TestIPCacheReader(t *testing.T) {
	h := newTestHost(t)
	a := h.start()
	host := netip.MustParseAddr("172.18.2.1")
	op := upsert("10.2.1.0/24", 131329)
	op.Claim.Entry.Host, op.Claim.Entry.EncryptKey, op.Claim.Entry.Flags = host, 255, ipcache.FlagRemoteCluster
	h.cfg.IPs.Apply([]ipcache.Op{op})
	h.wantEntries(map[string]identity.ID{"10.2.1.0/24": 131329})
	a.stop()

	m, err := OpenIPCache(h.cfg.BPFFS)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	want := MapEntry{
		Prefix: netip.MustParsePrefix("10.2.1.7/32"), Identity: 131329, TunnelEndpoint: host, EncryptKey: 255,
		Flags: bpf.FlagHasTunnelEndpoint | bpf.FlagRemoteCluster,
	}
	got, ok, err := m.Lookup(netip.MustParseAddr("::ffff:10.2.1.7"))
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); err != nil || !ok || diff != "" {
		t.Errorf("lookup: ok %v, err %v (-want +got):\n%s", ok, err, diff)
	}
	if _, ok, err := m.Lookup(netip.MustParseAddr("10.3.0.1")); ok || err != nil {
		t.Errorf("lookup of an unknown address: ok %v, err %v, want false, nil", ok, err)
	}
	if _, err := OpenIPCache(testutil.MountBPFFS(t)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("open where no agent ran: %v, want that it does not exist", err)
	}
	if _, err := OpenCounters(t.TempDir()); !errors.Is(err, ErrBPFFS) {
		t.Errorf("open without BPF file system: %v, want ErrBPFFS", err)
	}
}

// invariant 1
// lesson: A2
// lesson: X4
// lesson: X10
func TestRestartChangesNothing(t *testing.T) {
	h := newTestHost(t)
	a := h.start()
	claims := []ipcache.Op{upsert("10.2.1.10/32", 131329), upsert("10.2.1.11/32", 131330), upsert("10.3.1.10/32", 3<<16),
		upsert("10.2.1.0/24", identity.World), upsert("172.18.2.1/32", identity.RemoteNode)}
	h.cfg.IPs.Apply(claims)
	all := map[string]identity.ID{"10.2.1.10/32": 131329, "10.2.1.11/32": 131330, "10.3.1.10/32": 3 << 16,
		"10.2.1.0/24": identity.World, "172.18.2.1/32": identity.RemoteNode}
	h.wantEntries(all)
	a.stop()
	before := h.kernelIDs()
	wantIDs := len(pins) + 2*len(bpf.Programs)
	if h.filterMode {
		wantIDs -= len(bpf.Programs) // no links
	}
	if len(before) != wantIDs {
		t.Fatalf("pinned: %v, want %d maps, %d programs and as many links", before, len(pins), len(bpf.Programs))
	}

	h.cfg.IPs = ipcache.New() // the tables begin empty
	a = h.start()
	if diff := cmp.Diff(before, h.kernelIDs()); diff != "" {
		t.Errorf("restart changed kernel objects (-before +after):\n%s", diff)
	}
	h.wantEntries(all)
	h.cfg.IPs.Apply(claims[:1])
	testutil.Eventually(t, patience, func() error {
		if s := a.Status().IPCache; s.Adopted != 1 || s.Written != 0 || s.Unclaimed != 4 {
			return fmt.Errorf("status %+v, want 1 adopted, none written, 4 unclaimed", s)
		}
		return nil
	})
	h.wantEntries(all)

	h.hear(2)
	delete(all, "10.2.1.11/32")
	h.wantEntries(all)
	h.hear(3)
	delete(all, "10.3.1.10/32")
	h.wantEntries(all)
	h.hear(0)
	h.wantEntries(map[string]identity.ID{"10.2.1.10/32": 131329})
	a.stop()
	if diff := cmp.Diff(before, h.kernelIDs()); diff != "" {
		t.Errorf("kernel objects changed (-before +after):\n%s", diff)
	}
}

// lesson: K1
func TestKernelMapFull(t *testing.T) {
	h := newTestHost(t)
	h.cfg.MaxEntries = 4
	a := h.start()
	want := map[string]identity.ID{}
	for i := range 4 {
		prefix := fmt.Sprintf("10.2.1.%d/32", i)
		h.cfg.IPs.Apply([]ipcache.Op{upsert(prefix, identity.ID(131330+i))})
		want[prefix] = identity.ID(131330 + i)
	}
	h.wantEntries(want)
	h.cfg.IPs.Apply([]ipcache.Op{upsert("10.2.2.1/32", 131400), upsert("10.2.2.2/32", 131401), upsert("10.2.1.0/32", 131500)})
	want["10.2.1.0/32"] = 131500
	h.wantEntries(want)
	testutil.Eventually(t, patience, func() error {
		if s := a.Status().IPCache; !s.Full || s.Pending != 2 || s.Entries != 4 || !strings.Contains(s.LastError, "full") {
			return fmt.Errorf("status %+v, want full, 2 pending, 4 entries and an error that says so", s)
		}
		return nil
	})
	h.cfg.IPs.Apply([]ipcache.Op{remove("10.2.1.1/32"), remove("10.2.1.2/32")})
	delete(want, "10.2.1.1/32")
	delete(want, "10.2.1.2/32")
	want["10.2.2.1/32"], want["10.2.2.2/32"] = 131400, 131401
	h.wantEntries(want)
	testutil.Eventually(t, patience, func() error {
		if s := a.Status().IPCache; s.Full || s.Pending != 0 || s.LastError != "" {
			return fmt.Errorf("status %+v, want that all is well", s)
		}
		return nil
	})
}

// lesson: A7
func TestSecondAgentIsRefused(t *testing.T) {
	h := newTestHost(t)
	a := h.start()
	before := h.kernelIDs()
	if err := h.refuse(); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), h.cfg.BPFFS) {
		t.Errorf("second agent: %v, want ErrInUse with the path", err)
	}
	if diff := cmp.Diff(before, h.kernelIDs()); diff != "" {
		t.Errorf("second agent changed the first one's objects (-before +after):\n%s", diff)
	}
	a.stop()
	h.start() // the lock goes with the first
}

// lesson: X11
// lesson: A6
func TestBadBPFFS(t *testing.T) {
	h := newTestHost(t)
	mounted := h.cfg.BPFFS
	for name, tc := range map[string]struct {
		prepare func() string // returns the BPF file system to configure
		want    string
	}{
		"missing": {func() string { return "/nonexistent/bpf" }, "mount -t bpf bpf /nonexistent/bpf"},
		"other":   {t.TempDir, "mount -t bpf bpf "},
		"read-only": {func() string {
			dir := testutil.MountBPFFS(t)
			if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
				t.Fatal(err)
			}
			return dir
		}, "read-only"},
		"owner": {func() string {
			dir := testutil.MountBPFFS(t)
			if err := errors.Join(os.Mkdir(dir+"/weft", 0o755), os.Chown(dir+"/weft", 65534, 0)); err != nil {
				t.Fatal(err)
			}
			return dir
		}, "belongs to uid 65534"},
	} {
		h.cfg.BPFFS = tc.prepare()
		if err := h.refuse(); !errors.Is(err, ErrBPFFS) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want ErrBPFFS that says %q", name, err, tc.want)
		}
	}
	h.cfg.BPFFS = mounted
	h.start()
	for _, sub := range []string{"", pinLinksDir, pinProgramsDir} {
		info, err := os.Stat(filepath.Join(mounted, pinDirName, sub))
		if err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("directory %q: mode %v, err %v, want 0700", sub, info.Mode(), err)
		}
	}
	for _, pin := range pins {
		info, err := os.Stat(filepath.Join(mounted, pinDirName, pin))
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("pin %s: mode %v, err %v, want 0600", pin, info.Mode(), err)
		}
	}
}

// lesson: A6
func TestIncompatiblePins(t *testing.T) {
	h := newTestHost(t)
	h.start().stop()
	for name, pin := range map[string]func(path string) error{
		"other map": func(path string) error {
			m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 10000})
			if err != nil {
				return err
			}
			defer m.Close()
			return m.Pin(path)
		},
		"program": func(path string) error {
			p, err := ebpf.LoadPinnedProgram(h.cfg.BPFFS+"/weft/programs/weft_to_netdev", nil)
			if err != nil {
				return err
			}
			defer p.Close()
			return errors.Join(p.Unpin(), p.Pin(path))
		},
	} {
		path := h.cfg.BPFFS + "/weft/ipcache"
		if err := errors.Join(os.Remove(path), pin(path)); err != nil {
			t.Fatal(err)
		}
		if err := h.refuse(); !errors.Is(err, ErrIncompatible) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s at the pin of the map: %v, want ErrIncompatible with the path", name, err)
		}
	}
}

// lesson: K2
func TestRemovedPinComesBack(t *testing.T) {
	h := newTestHost(t)
	h.start()
	h.cfg.IPs.Apply([]ipcache.Op{upsert("10.2.1.10/32", 131329)})
	h.wantEntries(map[string]identity.ID{"10.2.1.10/32": 131329})
	before := h.kernelIDs()
	if err := os.Remove(h.cfg.BPFFS + "/weft/ipcache"); err != nil {
		t.Fatal(err)
	}
	h.ip("link add x0 type veth peer name x1") // any event
	testutil.Eventually(t, patience, func() error {
		_, err := os.Stat(h.cfg.BPFFS + "/weft/ipcache")
		return err
	})
	if diff := cmp.Diff(before, h.kernelIDs()); diff != "" {
		t.Errorf("objects (-before +after):\n%s", diff)
	}
}

func TestMissingCapabilities(t *testing.T) {
	full := ^uint64(0)
	for _, tc := range []struct {
		name      string
		effective uint64
		want      []string
	}{
		{"all", full, nil},
		{"none", 0, []string{"CAP_BPF", "CAP_NET_ADMIN"}},
		{"no CAP_BPF", 1 << unix.CAP_NET_ADMIN, []string{"CAP_BPF"}},
		{"no CAP_NET_ADMIN", 1 << unix.CAP_BPF, []string{"CAP_NET_ADMIN"}},
		{"CAP_SYS_ADMIN for CAP_BPF", 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_SYS_ADMIN, nil},
	} {
		err := missingCapabilities(tc.effective)
		if (err == nil) != (tc.want == nil) || err != nil && !errors.Is(err, ErrPrivileges) {
			t.Errorf("%s: %v", tc.name, err)
			continue
		}
		for _, name := range tc.want {
			if !strings.Contains(err.Error(), name) {
				t.Errorf("%s: %v, want that it names %s", tc.name, err, name)
			}
		}
	}
}

// asNobody, if it is in the environment, makes TestWithoutPrivileges the process that has none.
const asNobody = "WEFT_TEST_BPFFS"

func TestWithoutPrivileges(t *testing.T) {
	if bpffs := os.Getenv(asNobody); bpffs != "" {
		fmt.Println("result:", runBare(t, bpffs))
		return
	}
	testutil.RequireRoot(t)
	file := copyOfThis(t)
	cmd := exec.Command(file, "-test.run=^TestWithoutPrivileges$")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), asNobody+"="+testutil.MountBPFFS(t))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	for _, want := range []string{"CAP_BPF and CAP_NET_ADMIN", "run weft as root"} {
		if err != nil || !strings.Contains(string(out), want) {
			t.Errorf("as nobody: err %v, want %q in: %s", err, want, out)
		}
	}
}

// copyOfThis is this test binary where everybody can start it.
func copyOfThis(t *testing.T) string {
	t.Helper()
	exe, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join("/tmp", fmt.Sprintf("weft-datapath-test-%d-%s", os.Getpid(), strings.ReplaceAll(t.Name(), "/", "-")))
	if err := os.WriteFile(file, exe, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(file) })
	return file
}

// runBare runs a datapath on empty tables in the namespace of the process and returns its error.
func runBare(t *testing.T, bpffs string) error {
	d, err := New(Config{
		BPFFS: bpffs, RoutingMode: RoutingNone, Layout: testLayout(t), IPs: ipcache.New(), Nodes: node.NewTable(),
		Listed: func(identity.ClusterID) bool { return false }, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return d.Run(ctx)
}

func TestNewRefusesNonsense(t *testing.T) {
	good := Config{
		BPFFS: "/sys/fs/bpf", RoutingMode: RoutingNative, Layout: testLayout(t), IPs: ipcache.New(), Nodes: node.NewTable(),
		Listed: func(identity.ClusterID) bool { return false }, Log: slog.New(slog.DiscardHandler),
	}
	d, err := New(good)
	if err != nil {
		t.Fatal(err)
	}
	if got := d.Status().IPCache.MaxEntries; got != DefaultMaxEntries {
		t.Errorf("default size %d, want %d", got, DefaultMaxEntries)
	}
	for name, spoil := range map[string]func(*Config){
		"no bpffs":        func(c *Config) { c.BPFFS = "" },
		"tunnel routing":  func(c *Config) { c.RoutingMode = "tunel" },
		"no routing mode": func(c *Config) { c.RoutingMode = "" },
		"no layout":       func(c *Config) { c.Layout = identity.Layout{} },
		"no tables":       func(c *Config) { c.IPs = nil },
	} {
		cfg := good
		spoil(&cfg)
		if _, err := New(cfg); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
