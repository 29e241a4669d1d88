// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

// agentEnv, if it is in the environment, names the BPF file system of the agent that this process is to be.
const agentEnv = "WEFT_TEST_AGENT_BPFFS"

// cgroupEnv names its cgroup, and without it there are no services; podsEnv says that it has pods.
const (
	cgroupEnv = "WEFT_TEST_AGENT_CGROUP"
	podsEnv   = "WEFT_TEST_AGENT_PODS"
	// overlayEnv says that it is east of an overlayPair.
	overlayEnv = "WEFT_TEST_AGENT_OVERLAY"
)

// Any user with two capabilities can run the agent, on links and on filters, and clean up behind it. Before Linux 5.11 it
// takes four.
func TestCapabilitiesSuffice(t *testing.T) {
	if bpffs := os.Getenv(agentEnv); bpffs != "" {
		if err := runUntilEOF(t, bpffs); err != nil {
			fmt.Println("result:", err)
		}
		return
	}
	for mode, withoutTCX := range podModes() {
		t.Run(mode, func(t *testing.T) {
			h := newTestHost(t)
			n := h.startNobody(t, withoutTCX, cgroupEnv+"="+testutil.NewCgroup(t).Path())
			n.await(1)
			h.wantLinks("eth0")
			before, p := h.seen(t), h.startProbe()
			p.wait(50)
			p.check(before, 131329)
			var st unix.Stat_t
			if err := unix.Stat(h.cfg.BPFFS+"/weft/ipcache", &st); err != nil || st.Uid != 65534 || st.Mode&0o777 != 0o600 {
				t.Errorf("pin: uid %d mode %o, %v, want 65534 and 600", st.Uid, st.Mode, err)
			}
			n.in.Close()
			if err := n.cmd.Wait(); err != nil || strings.Contains(n.out.String(), "result:") {
				t.Errorf("as nobody with two capabilities: %v\n%s", err, n.out.String())
			}
			if _, err := os.Stat(h.cfg.BPFFS + "/weft"); err == nil {
				t.Error("cleanup as nobody left the pins")
			}
			if left := h.routes("119"); len(left) != 0 {
				t.Errorf("cleanup as nobody left %v", left)
			}
		})
	}
}

// Root cleans up behind an agent of another user, who can trick him into nothing: what the user has no right to stays.
//
// lesson: A8
func TestRootCleansUpBehindAnyUser(t *testing.T) {
	for mode, withoutTCX := range podModes() {
		t.Run(mode, func(t *testing.T) {
			h := newTestHost(t)
			h.ip("link add eth1 type veth peer name x1")
			if err := os.Chown(h.cfg.BPFFS, 65534, 65534); err != nil {
				t.Fatal(err)
			}
			before := h.snapshot()
			n := h.startNobody(t, withoutTCX, cgroupEnv+"="+testutil.NewCgroup(t).Path())
			n.await(1)
			if _, err := h.cleanup(false); !errors.Is(err, ErrInUse) {
				t.Errorf("while an agent runs: %v, want ErrInUse", err)
			}
			wantFinding(t, h.diagnose(Diagnosis{BPFFS: h.cfg.BPFFS}), Fine, "bpffs", "of uid 65534, an agent runs")
			if err := n.cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = n.cmd.Wait() // it was killed
			wantFinding(t, h.diagnose(Diagnosis{BPFFS: h.cfg.BPFFS}), Fine, "bpffs", "of uid 65534, no agent runs")

			weft, roots := h.cfg.BPFFS+"/weft", h.cfg.BPFFS+"/roots"
			if err := errors.Join(os.Mkdir(roots, 0o700), os.Rename(weft+"/programs", roots+"/programs"),
				os.Symlink(roots+"/programs", weft+"/programs"), os.Chown(roots, 0, 0)); err != nil {
				t.Fatal(err)
			}
			if _, err := h.cleanup(false); !errors.Is(err, ErrPrivileges) {
				t.Errorf("with a link to where the user may not go: %v, want ErrPrivileges", err)
			}
			if left := listDir(t, roots+"/programs"); len(left) != 2 {
				t.Errorf("of what the user may not reach %v is left, want two programs", left)
			}
			if err := errors.Join(os.Remove(weft+"/programs"), os.Rename(roots+"/programs", weft+"/programs"), os.Remove(roots)); err != nil {
				t.Fatal(err)
			}

			shown, err := h.cleanup(true)
			if err != nil {
				t.Fatal(err)
			}
			removed, err := h.cleanup(false)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(shown, removed); diff != "" || len(removed) == 0 {
				t.Errorf("shown and removed (-shown +removed):\n%s", diff)
			}
			testutil.Eventually(t, patience, func() error { // the kernel detaches links whose last pin went in its own time
				if diff := cmp.Diff(before, h.snapshot()); diff != "" {
					return fmt.Errorf("left or lost (-before +after):\n%s", diff)
				}
				return nil
			})
		})
	}
}

// nobody is an agent in a process of uid 65534, which ends with its standard input.
type nobody struct {
	h   *testHost
	cmd *exec.Cmd
	in  io.Closer
	out strings.Builder // read after the end
}

// startNobody runs this binary as an agent of uid 65534 on the host, that of runUntilEOF.
func (h *testHost) startNobody(t *testing.T, withoutTCX bool, env ...string) *nobody {
	t.Helper()
	h.filterMode = withoutTCX
	if err := errors.Join(os.Chmod(filepath.Dir(h.cfg.BPFFS), 0o755), os.Chown(h.cfg.BPFFS, 65534, 65534)); err != nil {
		t.Fatal(err)
	}
	capabilities := []uintptr{unix.CAP_BPF, unix.CAP_NET_ADMIN}
	if olderThan(kernelRelease(), "5.11") {
		// Without the first, the verifier forbids what the programs do with pointers; the second is for the memory of maps.
		capabilities = append(capabilities, unix.CAP_PERFMON, unix.CAP_SYS_RESOURCE)
	}
	n := &nobody{h: h, cmd: exec.Command(copyOfThis(t), "-test.run=^TestCapabilitiesSuffice$", "-test.v")}
	n.cmd.Dir = "/"
	n.cmd.Env = append(append(os.Environ(), agentEnv+"="+h.cfg.BPFFS), env...)
	if withoutTCX {
		n.cmd.Env = append(n.cmd.Env, withoutTCXEnv+"=yes")
	}
	n.cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: 65534, Gid: 65534},
		AmbientCaps: capabilities,
		Pdeathsig:   syscall.SIGKILL,
	}
	var err error
	if n.in, err = n.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	n.cmd.Stdout, n.cmd.Stderr = &n.out, &n.out
	h.ns.Do(t, func() { err = n.cmd.Start() })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // before the BPF file system goes
		n.in.Close()
		if n.cmd.ProcessState == nil {
			_ = n.cmd.Process.Kill()
			_ = n.cmd.Wait()
		}
		if t.Failed() {
			t.Logf("the agent of nobody said:\n%s", n.out.String())
		}
	})
	return n
}

// await waits until the kernel has what the agent brings: so many entries, a route, and, with a cgroup, its programs.
func (n *nobody) await(entries int) {
	n.h.t.Helper()
	pins := []string{"ipcache"}
	if slices.ContainsFunc(n.cmd.Env, func(v string) bool { return strings.HasPrefix(v, cgroupEnv+"=") }) {
		pins = append(pins, "services/weft_connect4-link")
	}
	testutil.Eventually(n.h.t, patience, func() error {
		for _, pin := range pins {
			if _, err := os.Stat(n.h.cfg.BPFFS + "/weft/" + pin); err != nil {
				return err
			}
		}
		if len(n.h.entries()) != entries || len(n.h.routes("119")) != 1 {
			return fmt.Errorf("entries %v, routes %v", n.h.entries(), n.h.routes("119"))
		}
		return nil
	})
}

// runUntilEOF runs a datapath in the namespace of the process until its standard input ends, then cleans up.
func runUntilEOF(t *testing.T, bpffs string) error {
	cfg := Config{
		BPFFS: bpffs, Devices: []string{"eth0"}, RoutingMode: RoutingNative, MaxEntries: 1000, DualStack: true,
		ClusterName: "east", NodeName: "east-1", NodeIPs: []netip.Addr{netip.MustParseAddr("172.18.1.1")},
		Layout: testLayout(t), IPs: ipcache.New(), Nodes: node.NewTable(), Log: slog.New(slog.DiscardHandler),
		Listed:     func(identity.ClusterID) bool { return true },
		withoutTCX: os.Getenv(withoutTCXEnv) != "",
	}
	if cgroup := os.Getenv(cgroupEnv); cgroup != "" {
		cfg.Services, cfg.ServicesListed, cfg.ServiceCgroup = service.NewTable(), func() bool { return true }, cgroup
	}
	pods := &fakePods{}
	if os.Getenv(podsEnv) != "" {
		pods.set(false)
		cfg.Pods = pods
		cfg.IPs.Apply([]ipcache.Op{upsert(podA+"/32", idA), upsert(podB+"/32", idB)})
	}
	cfg.IPs.Apply([]ipcache.Op{upsert("172.18.2.1/32", 131329)})
	cfg.Nodes.Upsert(testNode("west", 2, "west-1", []string{"172.18.2.1"}, "10.2.1.0/24"))
	if os.Getenv(overlayEnv) != "" {
		east, west := &testHost{t: t}, &testHost{t: t, cfg: Config{NodeIPs: []netip.Addr{netip.MustParseAddr("172.18.2.1")}}}
		cfg.RoutingMode, cfg.IPs, cfg.Nodes = RoutingTunnel, ipcache.New(), node.NewTable()
		east.cfg = cfg
		(&overlayPair{t, east, west}).tell(east)
	}
	d, err := New(cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer cancel()
	if cfg.Pods != nil {
		waiting.Go(func() {
			select {
			case <-d.Ready():
				pods.set(true, podA, podB)
			case <-ctx.Done():
			}
		})
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	if err := d.Run(ctx); err != nil {
		return err
	}
	found, err := Cleanup(t.Context(), bpffs, false, func(int) {})
	for _, r := range found {
		if r.Kept != "" {
			return fmt.Errorf("%+v is left", r)
		}
	}
	return err
}
