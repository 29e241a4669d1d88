// SPDX-License-Identifier: Apache-2.0

package test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
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

// A pod whose processes are in no cgroup of ours reaches a service by its address, over TCP and UDP; what it has open goes on
// while the agent is killed, away and back, and what it opens meanwhile is translated, too.
//
// mechanism: H1
func TestServiceOfAPodWithoutCgroup(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	h := newHost(t)
	pod, server := testutil.NewNetNS(t), testutil.NewNetNS(t)
	command(t, "ip", "link", "add", "pod-web", "type", "veth", "peer", "name", "eth0", "netns", pod.Path())
	command(t, "ip", "address", "add", "10.1.1.1/24", "dev", "pod-web")
	command(t, "ip", "link", "set", "pod-web", "up")
	command(t, "ip", "link", "set", "wire", "netns", server.Path())
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	pod.Do(t, func() {
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
	start := func() *agent {
		return h.start(t, "east", 1, "--service-lb", "--service-cgroup", cgroup, "--service-tc", "--services-dir", services)
	}
	a := start()
	h.awaitVerified(t)

	dial := func(network string) (conn net.Conn) {
		t.Helper()
		testutil.Eventually(t, patience, func() (err error) {
			pod.Do(t, func() { conn, err = net.DialTimeout(network, "10.96.1.20:5432", 3*time.Second) })
			if err == nil {
				err = said(conn, "hello")
			}
			return err
		})
		t.Cleanup(func() { conn.Close() })
		return conn
	}
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
	start()
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
