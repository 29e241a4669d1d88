// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"

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
	return startServer(b).endpoint
}

// server is an etcd in a process of its own.
type server struct {
	endpoint string
	orders   io.Writer
	answers  *bufio.Reader
}

func startServer(b *testing.B) *server {
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
	s := &server{orders: stdin, answers: bufio.NewReader(stdout)}
	s.endpoint = s.answer(b)
	return s
}

func (s *server) answer(b *testing.B) string {
	b.Helper()
	line, err := s.answers.ReadString('\n')
	if err != nil {
		b.Fatalf("etcd has ended: %v", err)
	}
	return strings.TrimSpace(line)
}

// put has the server itself put n keys under a prefix, so that it costs this process nothing. It does not wait for it.
func (s *server) put(b *testing.B, prefix string, n int) {
	b.Helper()
	if _, err := fmt.Fprintln(s.orders, prefix, n); err != nil {
		b.Fatal(err)
	}
}

// serveEtcd serves, and puts what it is told to, until its standard input ends.
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
	client := v3client.New(server.Server)
	defer client.Close()
	for orders := bufio.NewScanner(os.Stdin); orders.Scan(); {
		var prefix string
		var n int
		if _, err := fmt.Sscan(orders.Text(), &prefix, &n); err != nil {
			return fmt.Errorf("order %q: %w", orders.Text(), err)
		}
		if err := putKeys(context.Background(), client, prefix, n); err != nil {
			return err
		}
		fmt.Println("done")
	}
	return nil
}

// putKeys puts n keys of the size of an endpoint's announcement, in transactions of 100.
func putKeys(ctx context.Context, client *clientv3.Client, prefix string, n int, options ...clientv3.OpOption) error {
	const batch = 100
	ops := make([]clientv3.Op, 0, batch)
	for i := range n {
		ops = append(ops, clientv3.OpPut(prefix+strconv.Itoa(i), announcement(i), options...))
		if len(ops) < batch && i < n-1 {
			continue
		}
		if _, err := client.Txn(ctx).Then(ops...).Commit(); err != nil {
			return err
		}
		ops = ops[:0]
	}
	return nil
}

func announcement(i int) string {
	return fmt.Sprintf(`{"IP":"10.%d.%d.%d","Mask":null,"HostIP":"172.18.1.1","ID":%d,"Key":0,"Metadata":"","K8sNamespace":"shop","K8sPodName":"web-%d"}`,
		i>>16, i>>8&0xff, i&0xff, 65536+i%1000, i)
}
