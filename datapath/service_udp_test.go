// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/internal/testutil"
)

func newFile(fd int) *os.File { return os.NewFile(uintptr(fd), "socket") }

// listen hands on flows until the test ends.
func (h *testHost) listen(a *agent, deliver func(Flow)) {
	ctx, cancel := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	tasks.Go(func() {
		_ = a.Flows(ctx, func(batch []Flow) {
			for _, f := range batch {
				deliver(f)
			}
		})
	})
	h.t.Cleanup(func() {
		cancel()
		tasks.Wait()
	})
	testutil.Eventually(h.t, patience, func() error {
		a.flows.mu.Lock()
		defer a.flows.mu.Unlock()
		if len(a.flows.subscribers) == 0 {
			return errors.New("nobody is subscribed")
		}
		return nil
	})
}

// udpSocket is a socket of the cgroup that is not connected.
type udpSocket struct {
	h    *serviceHost
	conn *net.UDPConn
}

func (h *serviceHost) udp(network string) *udpSocket {
	h.t.Helper()
	s := &udpSocket{h: h}
	var err error
	h.inside(func() { s.conn, err = net.ListenUDP(network, nil) })
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { s.conn.Close() })
	return s
}

func (s *udpSocket) send(to string) error {
	_, err := s.conn.WriteToUDPAddrPort([]byte("?"), netip.MustParseAddrPort(to))
	return err
}

// ask sends a datagram and returns who answered, by its own word and by the address from which the answer came.
func (s *udpSocket) ask(to string) (answered, from string) {
	s.h.t.Helper()
	if err := s.send(to); err != nil {
		s.h.t.Fatalf("send to %s: %v", to, err)
	}
	if err := s.conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		s.h.t.Fatal(err)
	}
	buf := make([]byte, 256)
	n, source, err := s.conn.ReadFromUDPAddrPort(buf)
	if err != nil {
		s.h.t.Fatalf("no answer from %s: %v", to, err)
	}
	return string(buf[:n]), netip.AddrPortFrom(source.Addr().Unmap(), source.Port()).String()
}

// A socket that is not connected stays with the backend that it was given, hears it as the service, and goes on to another
// one when the service gives that up; others stay where they are.
func TestServiceUnconnectedUDP(t *testing.T) {
	h := newServiceHost(t)
	const frontend = "udp 10.96.0.10:53"
	all := []string{"127.1.1.10", "127.1.1.11", "127.1.1.12", "127.1.1.13"}
	h.put(frontend, all)
	h.start()
	h.wantKernel(frontend, all...)
	for _, network := range []string{"udp4", "udp"} { // the latter is one of IPv6, for both
		var sockets []*udpSocket
		first := map[*udpSocket]string{}
		for range 8 {
			s := h.udp(network)
			sockets = append(sockets, s)
			answered, from := s.ask("10.96.0.10:53")
			if from != "10.96.0.10:53" {
				t.Errorf("%s: the answer came from %s, want the service", network, from)
			}
			first[s] = answered
			for range 10 {
				if again, _ := s.ask("10.96.0.10:53"); again != answered {
					t.Fatalf("%s: %s answered after %s", network, again, answered)
				}
			}
		}
		gone := first[sockets[0]]
		left := slices.DeleteFunc(slices.Clone(all), func(b string) bool { return strings.HasPrefix(gone, b+":") })
		h.put(frontend, left)
		h.wantKernel(frontend, left...)
		for _, s := range sockets {
			answered, from := s.ask("10.96.0.10:53")
			if answered == gone || first[s] != gone && answered != first[s] || from != "10.96.0.10:53" {
				t.Errorf("%s: without %s, %s answered as %s; it was %s before", network, gone, answered, from, first[s])
			}
		}
		h.put(frontend, all)
		h.wantKernel(frontend, all...)
	}
}

// A socket that talks to several services at once hears each of them as what it sent to, and what is no service's as
// itself.
func TestServiceUDPInTurns(t *testing.T) {
	h := newServiceHost(t)
	h.put("udp 10.96.0.10:53", []string{"127.1.1.10", "127.1.1.11"})
	h.put("udp 10.96.0.11:53", []string{"127.1.1.12"})
	h.start()
	h.wantKernel("udp 10.96.0.11:53", "127.1.1.12")
	s := h.udp("udp4")
	for range 20 {
		for to, want := range map[string]string{
			"10.96.0.10:53": "127.1.1.1", "10.96.0.11:53": "127.1.1.12:8080", "127.1.1.13:8080": "127.1.1.13:8080",
		} {
			if answered, from := s.ask(to); !strings.HasPrefix(answered, want) || from != to {
				t.Fatalf("sent to %s: %s answered as %s", to, answered, from)
			}
		}
	}
}

// A connected socket whose backend the service gives up ends, so that who uses it connects again; one that was connected to
// the backend itself is left alone, and so are those with other backends.
func TestServiceConnectedUDPMovesOn(t *testing.T) {
	h := newServiceHost(t)
	const frontend = "udp 10.96.0.10:53"
	h.put(frontend, []string{"127.1.1.10"})
	h.put("udp 10.96.0.11:53", []string{"127.1.1.10"})
	a := h.start()
	h.wantKernel(frontend, "127.1.1.10")
	h.wantKernel("udp 10.96.0.11:53", "127.1.1.10")
	conns := map[string]net.Conn{}
	for _, to := range []string{"10.96.0.10:53", "10.96.0.11:53", "127.1.1.10:8080"} {
		h.inside(func() {
			conn, err := net.Dial("udp", to)
			if err != nil {
				t.Fatal(err)
			}
			conns[to] = conn
		})
		defer conns[to].Close()
		if answered, err := ask(conns[to]); err != nil || answered != "127.1.1.10:8080" {
			t.Fatalf("%s: %s, %v", to, answered, err)
		}
	}
	h.put(frontend, []string{"127.1.1.11"})
	h.wantKernel(frontend, "127.1.1.11")
	able := true
	testutil.Eventually(t, 2*patience, func() error {
		switch s := a.Status().Services; {
		case strings.HasPrefix(s.DestroyError, "the kernel has no "):
			able = false
		case s.Destroyed != 1 || s.DestroyError != "":
			return fmt.Errorf("%d sockets ended, want 1: %s", s.Destroyed, s.DestroyError)
		}
		return nil
	})
	if !able { // then that is said, and new sockets alone move
		if answered, _, err := h.dial("udp", "10.96.0.10:53"); err != nil || answered != "127.1.1.11:8080" {
			t.Errorf("a new socket: %s, %v", answered, err)
		}
		return
	}
	if _, err := conns["10.96.0.10:53"].Write([]byte("?")); !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.EDESTADDRREQ) {
		t.Errorf("after its backend is gone: %v, want ECONNABORTED or EDESTADDRREQ", err)
	}
	for _, to := range []string{"10.96.0.11:53", "127.1.1.10:8080"} {
		if answered, err := ask(conns[to]); err != nil || answered != "127.1.1.10:8080" {
			t.Errorf("%s: %s, %v", to, answered, err)
		}
	}
	if answered, _, err := h.dial("udp", "10.96.0.10:53"); err != nil || answered != "127.1.1.11:8080" {
		t.Errorf("a new socket: %s, %v", answered, err)
	}
}
