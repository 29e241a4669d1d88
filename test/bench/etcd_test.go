// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"go.etcd.io/etcd/server/v3/embed"

	"github.com/weftmesh/weft/internal/testutil"
)

// etcdEnv makes this binary an etcd server with its data below the directory named: a process of its own, so that the
// heap and the CPU time of the measured one are its own.
const etcdEnv = "WEFT_BENCH_ETCD"

// device is what the programs are attached to.
const device = "eth0"

func TestMain(m *testing.M) {
	if dir := os.Getenv(etcdEnv); dir != "" {
		if err := serveEtcd(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(testutil.IsolateMain(m))
}

// addDevice makes the device, once.
func addDevice(b *testing.B) {
	b.Helper()
	if _, err := netlink.LinkByName(device); err == nil {
		return
	}
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: device}, PeerName: device + "-peer"}
	if err := netlink.LinkAdd(veth); err != nil {
		b.Fatal(err)
	}
	if err := netlink.LinkSetUp(veth); err != nil {
		b.Fatal(err)
	}
}

// startEtcd starts a server that ends with the benchmark, and returns its endpoint.
func startEtcd(b *testing.B) string {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), etcdEnv+"="+b.TempDir())
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
	endpoint, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		b.Fatalf("etcd did not start: %v", err)
	}
	return strings.TrimSpace(endpoint)
}

// serveEtcd serves until its standard input ends.
func serveEtcd(dir string) error {
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel, cfg.UnsafeNoFsync = dir, "fatal", true
	cfg.InitialClusterToken = dir
	any := url.URL{Scheme: "http", Host: "127.0.0.1:0"}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{any}, []url.URL{any}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{any}, []url.URL{any}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.QuotaBackendBytes = 8 << 30
	server, err := embed.StartEtcd(cfg)
	if err != nil {
		return fmt.Errorf("start etcd: %w", err)
	}
	defer server.Close()
	<-server.Server.ReadyNotify()
	fmt.Printf("http://%s\n", server.Clients[0].Addr())
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}
