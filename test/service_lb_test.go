// SPDX-License-Identifier: Apache-2.0

package test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/internal/testutil"
)

// backends listens on all addresses, says to who connects where that was, and answers with what it is sent.
func backends(t *testing.T) {
	t.Helper()
	listener, err := net.Listen("tcp4", "0.0.0.0:8080")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				fmt.Fprintf(conn, "%-32s", conn.LocalAddr())
				_, _ = io.Copy(conn, conn)
				conn.Close()
			}()
		}
	}()
}

// customer is a connection through a service.
type customer struct {
	net.Conn
	backend netip.Addr
}

// connect opens a connection through the service from within the cgroup.
func connect(t *testing.T, cgroup *testutil.Cgroup, frontend string) (c customer, err error) {
	t.Helper()
	cgroup.Do(t, func() { c.Conn, err = net.DialTimeout("tcp4", frontend, patience) })
	if err != nil {
		return c, err
	}
	t.Cleanup(func() { c.Close() })
	said := make([]byte, 32)
	if err = c.SetReadDeadline(time.Now().Add(patience)); err == nil {
		_, err = io.ReadFull(c, said)
	}
	if err != nil {
		return c, fmt.Errorf("the backend does not speak: %w", err)
	}
	at, err := netip.ParseAddrPort(strings.TrimSpace(string(said)))
	c.backend = at.Addr()
	return c, err
}

// ask sends something and wants it back.
func (c customer) ask(what string) error {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	answer := make([]byte, len(what))
	if _, err := c.Write([]byte(what)); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, answer); err != nil {
		return err
	}
	if string(answer) != what {
		return fmt.Errorf("sent %q, got %q", what, answer)
	}
	return nil
}

// peer is what getpeername(2) says.
func (c customer) peer(t *testing.T) netip.AddrPort {
	t.Helper()
	raw, err := c.Conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var at unix.Sockaddr
	if err := errors.Join(raw.Control(func(fd uintptr) { at, err = unix.Getpeername(int(fd)) }), err); err != nil {
		t.Fatal(err)
	}
	in4 := at.(*unix.SockaddrInet4)
	return netip.AddrPortFrom(netip.AddrFrom4(in4.Addr), uint16(in4.Port))
}

// Agents are killed at any moment, while the backends of a service change: connections go on, believe that they talk to the
// service, and whoever connects meanwhile gets a backend that it has or had just before. The next agent takes over what it
// finds, and the kernel comes to have what is declared.
//
// mechanism: H1
func TestServiceSurvivesKills(t *testing.T) {
	if !testutil.Isolate(t) {
		return
	}
	h := newHost(t)
	backends(t)
	cgroup := testutil.NewCgroup(t)
	files := t.TempDir()
	const frontend = "10.96.1.10:80"
	declare := func(round int) (is []netip.Addr) {
		t.Helper()
		var items []string
		for i := range 3 {
			addr := netip.AddrFrom4([4]byte{127, 1, byte(round), byte(1 + i)})
			if i == 0 {
				addr = netip.MustParseAddr("127.1.200.1") // stays
			}
			is = append(is, addr)
			items = append(items, fmt.Sprintf("{ip: %s}", addr))
		}
		slices.SortFunc(is, netip.Addr.Compare)
		testutil.MustWriteFile(t, filepath.Join(files, "web.yaml"), fmt.Appendf(nil,
			"name: web\nnamespace: shop\naddresses: [10.96.1.10]\nports: [{name: http, port: 80, target: 8080}]\nbackends: [%s]\n", strings.Join(items, ", ")))
		return is
	}
	start := func() *agent {
		return h.start(t, "east", 1, "--service-lb", "--service-cgroup", cgroup.Path(), "--services-dir", files)
	}
	has := func() (all []netip.Addr, err error) {
		var list struct {
			Items []struct {
				Address  string           `json:"address"`
				Backends []netip.AddrPort `json:"backends"`
			} `json:"items"`
		}
		out := command(t, os.Getenv(weftEnv), "bpf", "service", "list", "-o", "json", "--bpffs", h.bpffs)
		if err := json.Unmarshal(out, &list); err != nil {
			return nil, fmt.Errorf("weft bpf service list: %w: %s", err, out)
		}
		for _, s := range list.Items {
			if s.Address == frontend {
				for _, b := range s.Backends {
					all = append(all, b.Addr())
				}
			}
		}
		slices.SortFunc(all, netip.Addr.Compare)
		return all, nil
	}
	leadsTo := func(want []netip.Addr) {
		t.Helper()
		testutil.Eventually(t, patience, func() error {
			got, err := has()
			if err == nil && !slices.Equal(got, want) {
				err = fmt.Errorf("the kernel leads to %v, want %v", got, want)
			}
			return err
		})
	}
	before := declare(0)
	a := start()
	h.awaitVerified(t)
	leadsTo(before)
	var all []customer
	come := func(allowed ...netip.Addr) {
		t.Helper()
		c, err := connect(t, cgroup, frontend)
		switch {
		case err != nil:
			t.Fatalf("connect: %v", err)
		case !slices.Contains(allowed, c.backend):
			t.Errorf("a connection got %s, want one of %v", c.backend, allowed)
		}
		all = append(all, c)
	}
	for range 8 {
		come(before...)
	}
	for round := 1; round <= 6; round++ {
		now := declare(round)
		time.Sleep(time.Duration(rand.IntN(int(600 * time.Millisecond)))) // any moment will do: files are read after up to half a second
		a.stop(t, syscall.SIGKILL)
		for range 4 {
			come(slices.Concat(before, now)...) // there is no agent
		}
		a = start()
		for range 4 {
			come(slices.Concat(before, now)...) // there is one, which may be taking over
		}
		leadsTo(now)
		for range 4 {
			come(now...)
		}
		before = now
	}
	h.awaitVerified(t)
	for i, c := range all {
		if err := c.ask("still here"); err != nil {
			t.Errorf("connection %d, to %s: %v", i, c.backend, err)
		}
		if peer := c.peer(t); peer != netip.MustParseAddrPort(frontend) {
			t.Errorf("connection %d believes to talk to %s, want the service", i, peer)
		}
	}
}
