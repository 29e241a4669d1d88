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
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

// agentEnv, if it is in the environment, names the BPF file system of the agent that this process is to be.
const agentEnv = "WEFT_TEST_AGENT_BPFFS"

// cgroupEnv names its cgroup.
const cgroupEnv = "WEFT_TEST_AGENT_CGROUP"

// Any user with two capabilities can run the agent, on links and on filters, and clean up behind it. Before Linux 5.11 it
// takes four.
func TestCapabilitiesSuffice(t *testing.T) {
	if bpffs := os.Getenv(agentEnv); bpffs != "" {
		if err := runUntilEOF(t, bpffs); err != nil {
			fmt.Println("result:", err)
		}
		return
	}
	modes := []string{"", "yes"}
	if !hasTCX() {
		modes = modes[1:]
	}
	capabilities := []uintptr{unix.CAP_BPF, unix.CAP_NET_ADMIN}
	if olderThan(kernelRelease(), "5.11") {
		// Without the first, the verifier forbids what the programs do with pointers; the second is for the memory of maps.
		capabilities = append(capabilities, unix.CAP_PERFMON, unix.CAP_SYS_RESOURCE)
	}
	for _, withoutTCX := range modes {
		h := newTestHost(t)
		h.filterMode = withoutTCX != ""
		if err := errors.Join(os.Chmod(filepath.Dir(h.cfg.BPFFS), 0o755), os.Chown(h.cfg.BPFFS, 65534, 65534)); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(copyOfThis(t), "-test.run=^TestCapabilitiesSuffice$", "-test.v")
		cmd.Dir = "/"
		cmd.Env = append(os.Environ(), agentEnv+"="+h.cfg.BPFFS, cgroupEnv+"="+testutil.NewCgroup(t).Path(), withoutTCXEnv+"="+withoutTCX)
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Credential:  &syscall.Credential{Uid: 65534, Gid: 65534},
			AmbientCaps: capabilities,
			Pdeathsig:   syscall.SIGKILL,
		}
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		h.ns.Do(t, func() { err = cmd.Start() })
		if err != nil {
			t.Fatal(err)
		}
		ready := h.cfg.BPFFS + "/weft/ipcache"
		failed := func() error {
			if _, err := os.Stat(ready); err != nil {
				return err
			}
			if len(h.entries()) != 1 || len(h.routes("119")) != 1 {
				return fmt.Errorf("entries %v, routes %v", h.entries(), h.routes("119"))
			}
			if _, err := os.Stat(h.cfg.BPFFS + "/weft/services/weft_connect4-link"); err != nil {
				return err
			}
			return nil
		}
		for deadline := time.Now().Add(patience); failed() != nil; {
			if time.Now().After(deadline) {
				in.Close()
				_ = cmd.Wait()
				t.Fatalf("as nobody with two capabilities: %v\n%s", failed(), out.String())
			}
			time.Sleep(10 * time.Millisecond)
		}
		h.wantLinks("eth0")
		before, p := h.seen(t), h.startProbe()
		p.wait(50)
		p.check(before, 131329)
		var st unix.Stat_t
		if err := unix.Stat(ready, &st); err != nil || st.Uid != 65534 || st.Mode&0o777 != 0o600 {
			t.Errorf("pin: uid %d mode %o, %v, want 65534 and 600", st.Uid, st.Mode, err)
		}
		in.Close()
		if err := cmd.Wait(); err != nil || strings.Contains(out.String(), "result:") {
			t.Errorf("as nobody with two capabilities: %v\n%s", err, out.String())
		}
		if _, err := os.Stat(h.cfg.BPFFS + "/weft"); err == nil {
			t.Error("cleanup as nobody left the pins")
		}
		if left := h.routes("119"); len(left) != 0 {
			t.Errorf("cleanup as nobody left %v", left)
		}
	}
}

// runUntilEOF runs a datapath in the namespace of the process until its standard input ends, then cleans up.
func runUntilEOF(t *testing.T, bpffs string) error {
	cfg := Config{
		BPFFS: bpffs, Devices: []string{"eth0"}, RoutingMode: RoutingNative, MaxEntries: 1000, DualStack: true,
		ClusterName: "east", NodeName: "east-1", NodeIPs: []netip.Addr{netip.MustParseAddr("172.18.1.1")},
		Layout: testLayout(t), IPs: ipcache.New(), Nodes: node.NewTable(), Log: slog.New(slog.DiscardHandler),
		Listed:   func(identity.ClusterID) bool { return true },
		Services: service.NewTable(), ServicesListed: func() bool { return true }, ServiceCgroup: os.Getenv(cgroupEnv),
		withoutTCX: os.Getenv(withoutTCXEnv) != "",
	}
	cfg.IPs.Apply([]ipcache.Op{upsert("172.18.2.1/32", 131329)})
	cfg.Nodes.Upsert(testNode("west", 2, "west-1", []string{"172.18.2.1"}, "10.2.1.0/24"))
	d, err := New(cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	if err := d.Run(ctx); err != nil {
		return err
	}
	found, err := Cleanup(bpffs, false)
	for _, r := range found {
		if r.Kept != "" {
			return fmt.Errorf("%+v is left", r)
		}
	}
	return err
}
