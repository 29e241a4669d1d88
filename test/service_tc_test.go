// SPDX-License-Identifier: Apache-2.0

package test

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weftmesh/weft/internal/testutil"
)

// echo answers what it is sent, over TCP and UDP, until the test ends.
func echo(t *testing.T, ns *testutil.NetNS, address string) {
	t.Helper()
	var tcp net.Listener
	var udp net.PacketConn
	var errTCP, errUDP error
	ns.Do(t, func() {
		tcp, errTCP = net.Listen("tcp", address)
		udp, errUDP = net.ListenPacket("udp", address)
	})
	if errTCP != nil || errUDP != nil {
		t.Fatal(errTCP, errUDP)
	}
	t.Cleanup(func() { tcp.Close(); udp.Close() })
	go func() {
		for {
			conn, err := tcp.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(conn, conn); conn.Close() }()
		}
	}()
	go func() {
		buffer := make([]byte, 1500)
		for {
			n, from, err := udp.ReadFrom(buffer)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo(buffer[:n], from)
		}
	}()
}

// said sends something and wants it back: of datagrams, one of a few.
func said(conn net.Conn, what string) error {
	var err error
	for range 10 {
		if _, err = conn.Write([]byte(what)); err != nil {
			return err
		}
		_ = conn.SetReadDeadline(time.Now().Add(3 * time.Second))
		answer := make([]byte, len(what))
		if _, err = io.ReadFull(conn, answer); err == nil {
			if string(answer) != what {
				return fmt.Errorf("sent %q, got %q", what, answer)
			}
			return nil
		}
		if conn.RemoteAddr().Network() == "tcp" {
			return err
		}
	}
	return err
}

// cgrouplessPod is a pod of a node, none of whose processes are in a cgroup of ours, and the service 10.96.1.20:5432, whose backend is
// another machine.
type cgrouplessPod struct {
	host
	ns    *testutil.NetNS
	flags []string // of the agent
}

func newCgrouplessPod(t *testing.T) *cgrouplessPod {
	t.Helper()
	h := &cgrouplessPod{host: newHost(t), ns: testutil.NewNetNS(t)}
	server := testutil.NewNetNS(t)
	command(t, "ip", "link", "add", "pod-web", "type", "veth", "peer", "name", "eth0", "netns", h.ns.Path())
	command(t, "ip", "address", "add", "10.1.1.1/24", "dev", "pod-web")
	command(t, "ip", "link", "set", "pod-web", "up")
	command(t, "ip", "link", "set", "wire", "netns", server.Path())
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	h.ns.Do(t, func() {
		command(t, "ip", "address", "add", "10.1.1.10/24", "dev", "eth0")
		command(t, "ip", "link", "set", "eth0", "up")
		command(t, "ip", "route", "add", "default", "via", "10.1.1.1")
	})
	server.Do(t, func() {
		command(t, "ip", "address", "add", "172.18.1.9/16", "dev", "wire")
		command(t, "ip", "link", "set", "wire", "up")
		command(t, "ip", "route", "add", "10.1.1.0/24", "via", "172.18.1.1")
	})
	echo(t, server, "172.18.1.9:8080")
	h.declare(t, "web.yaml", "{name: web, namespace: shop, ip: 10.1.1.10, identity: 65793, labels: {app: web}}\n")
	services := t.TempDir()
	testutil.MustWriteFile(t, filepath.Join(services, "db.yaml"), []byte(`
name: db
namespace: shop
addresses: [10.96.1.20]
ports: [{name: t, port: 5432, target: 8080, protocol: TCP}, {name: u, port: 5432, target: 8080, protocol: UDP}]
backends: [{ip: 172.18.1.9}]
`))
	cgroup := testutil.NewCgroup(t).Path() // in which nobody is
	h.flags = []string{"--service-lb", "--service-cgroup", cgroup, "--service-tc", "--services-dir", services}
	return h
}

// startTC starts the node's agent.
func (h *cgrouplessPod) startTC(t *testing.T, flags ...string) *agent {
	t.Helper()
	return h.start(t, "east", 1, append(slices.Clone(h.flags), flags...)...)
}

// dial opens a connection to the service that works.
func (h *cgrouplessPod) dial(t *testing.T, network string) (conn net.Conn) {
	t.Helper()
	testutil.Eventually(t, patience, func() (err error) {
		h.ns.Do(t, func() { conn, err = net.DialTimeout(network, "10.96.1.20:5432", 3*time.Second) })
		if err == nil {
			err = said(conn, "hello")
		}
		return err
	})
	t.Cleanup(func() { conn.Close() })
	return conn
}

// A pod whose processes are in no cgroup of ours reaches a service by its address, over TCP and UDP; what it has open goes on
// while the agent is killed, away and back, and what it opens meanwhile is translated, too.
//
// mechanism: H1
func TestServiceOfAPodWithoutCgroup(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	h := newCgrouplessPod(t)
	a := h.startTC(t)
	h.awaitVerified(t)
	dial := func(network string) net.Conn { return h.dial(t, network) }
	conns := []net.Conn{dial("tcp"), dial("udp")}
	all := func(when string) {
		t.Helper()
		for _, conn := range conns {
			if err := said(conn, when); err != nil {
				t.Errorf("%s, %s: %v", when, conn.LocalAddr().Network(), err)
			}
		}
	}
	a.stop(t, syscall.SIGKILL)
	all("the agent is gone")
	conns = append(conns, dial("tcp"), dial("udp"))
	h.startTC(t)
	h.awaitVerified(t)
	all("the agent is back")

	var list struct {
		Items []struct{ Protocol, Client, Frontend, Backend, State string }
	}
	if out := command(t, os.Getenv(weftEnv), "bpf", "conntrack", "list", "-o", "json", "--bpffs", h.bpffs); json.Unmarshal(out, &list) != nil {
		t.Fatalf("weft bpf conntrack list: %s", out)
	}
	for _, conn := range conns {
		if !slices.ContainsFunc(list.Items, func(f struct{ Protocol, Client, Frontend, Backend, State string }) bool {
			return f.Client == conn.LocalAddr().String() && f.Frontend == "10.96.1.20:5432" && f.Backend == "172.18.1.9:8080" && f.State == "answered"
		}) {
			t.Errorf("conntrack has no flow of %s %s: %+v", conn.LocalAddr().Network(), conn.LocalAddr(), list.Items)
		}
	}
}

// While a pod talks to a service by its packets, over TCP and UDP, its node's agent is killed at any instant and started again, each
// time with room for another number of flows: nothing that is said is lost. WEFT_TEST_FAULTS makes it many times.
func TestServiceOfAPodWithoutCgroupSurvivesKills(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	kills := 4
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		kills = 100
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	h := newCgrouplessPod(t)
	a := h.startTC(t)
	h.awaitVerified(t)
	var talks sync.WaitGroup
	stop := make(chan struct{})
	exchanges := new(atomic.Uint64)
	errs := make(chan error, 16)
	for i := range 8 {
		network := []string{"tcp", "udp"}[i%2]
		conn := h.dial(t, network)
		talks.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				case <-time.After(2 * time.Millisecond): // the others need the machine, too
				}
				if err := once(conn, fmt.Sprintf("%s %d", network, n)); err != nil {
					errs <- fmt.Errorf("%s from %v, exchange %d: %w", network, conn.LocalAddr(), n, err)
					return
				}
				exchanges.Add(1)
			}
		})
	}
	for range kills {
		time.Sleep(time.Duration(rng.IntN(1000)) * time.Millisecond) // any instant of a start, or later
		a.stop(t, syscall.SIGKILL)
		a = h.startTC(t, "--service-tc-flows", fmt.Sprint(1024+rng.IntN(8)*512))
	}
	h.awaitVerified(t)
	close(stop)
	talks.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	t.Logf("%d kills, %d exchanges", kills, exchanges.Load())
	if exchanges.Load() == 0 {
		t.Error("nothing was said")
	}
}

// once sends something, once, and wants it back.
func once(conn net.Conn, what string) error {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte(what)); err != nil {
		return err
	}
	answer := make([]byte, len(what))
	if _, err := io.ReadFull(conn, answer); err != nil {
		return err
	}
	if string(answer) != what {
		return fmt.Errorf("sent %q, got %q", what, answer)
	}
	return nil
}
