// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/service"
)

// serviceHost is a host whose sockets, as far as they are opened in its cgroup, reach services. Backends are addresses of
// 127.0.0.0/8 and ::1, all of which are the host's, behind port 8080; every server answers with the address at which it was
// reached.
type serviceHost struct {
	*testHost
	cgroup *testutil.Cgroup
	table  *service.Table
	listed bool // under mu
}

// servicePort is where servers of serviceHost listen.
const servicePort = 8080

func newServiceHost(t *testing.T) *serviceHost {
	t.Helper()
	h := &serviceHost{testHost: newTestHost(t), cgroup: testutil.NewCgroup(t), table: service.NewTable(), listed: true}
	h.ip("addr add fd00:10:1:1::10/128 dev lo nodad")
	h.ip("addr add fd00:10:1:1::11/128 dev lo nodad")
	h.cfg.Services, h.cfg.ServiceCgroup, h.cfg.ServiceAlgorithm = h.table, h.cgroup.Path(), service.Random
	h.cfg.ServicesListed = func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.listed
	}
	h.serveTCP()
	h.serveUDP("udp4", "0.0.0.0")
	h.serveUDP("udp6", "fd00:10:1:1::10")
	h.serveUDP("udp6", "fd00:10:1:1::11")
	return h
}

func (h *serviceHost) setListed(listed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.listed = listed
}

func (h *serviceHost) serveTCP() {
	var listener net.Listener
	var err error
	h.ns.Do(h.t, func() { listener, err = net.Listen("tcp", fmt.Sprintf("[::]:%d", servicePort)) })
	if err != nil {
		h.t.Fatal(err)
	}
	var servers sync.WaitGroup
	ctx, end := context.WithCancel(context.Background())
	servers.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			servers.Go(func() {
				defer conn.Close()
				defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
				fmt.Fprintln(conn, conn.LocalAddr())
				_, _ = io.Copy(conn, conn) // until the client ends it
			})
		}
	})
	h.t.Cleanup(func() {
		end()
		listener.Close()
		servers.Wait()
	})
}

// serveUDP answers each datagram from the address to which it was sent.
func (h *serviceHost) serveUDP(network, addr string) {
	var conn *net.UDPConn
	var err error
	h.ns.Do(h.t, func() {
		if conn, err = net.ListenUDP(network, &net.UDPAddr{IP: net.ParseIP(addr), Port: servicePort}); err != nil {
			return
		}
		raw, rawErr := conn.SyscallConn()
		err = errors.Join(rawErr, raw.Control(func(fd uintptr) {
			if network == "udp4" {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
			}
		}))
	})
	if err != nil {
		h.t.Fatal(err)
	}
	var server sync.WaitGroup
	server.Go(func() {
		data, control := make([]byte, 256), make([]byte, 256)
		for {
			_, controls, _, from, err := conn.ReadMsgUDPAddrPort(data, control)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue // such as a refusal of an answer
			}
			to, reply := addr, []byte(nil)
			if network == "udp4" {
				// struct in_pktinfo behind its header: the index of the device, the local address, the one in the packet.
				info := control[unix.SizeofCmsghdr:controls]
				to = netip.AddrFrom4([4]byte(info[8:12])).String()
				reply = unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: [4]byte(info[8:12])})
			}
			_, _, _ = conn.WriteMsgUDPAddrPort([]byte(net.JoinHostPort(to, fmt.Sprint(servicePort))), reply, from)
		}
	})
	h.t.Cleanup(func() {
		conn.Close()
		server.Wait()
	})
}

// inside runs f in the network namespace and the cgroup of the host.
func (h *serviceHost) inside(f func()) {
	h.t.Helper()
	h.cgroup.Do(h.t, func() { h.ns.Do(h.t, f) })
}

// put makes a frontend such as "tcp 10.96.0.10:80" lead to backends. edit may change the service before.
func (h *serviceHost) put(frontend string, backends []string, edit ...func(*service.Local)) {
	h.t.Helper()
	f := parseFrontend(h.t, frontend)
	l := service.Local{
		Service: service.Name{Namespace: "test", Name: frontend}, Source: service.Files, Addrs: []netip.Addr{f.Addr},
		Ports: []service.NamedPort{{Name: "p", Protocol: f.Protocol, Port: f.Port}},
	}
	for _, b := range backends {
		l.Backends = append(l.Backends, service.Subset{
			Ports: []service.NamedPort{{Name: "p", Protocol: f.Protocol, Port: servicePort}}, Addrs: []netip.Addr{netip.MustParseAddr(b)},
		})
	}
	for _, e := range edit {
		e(&l)
	}
	h.table.PutLocal(l)
}

func parseFrontend(t testing.TB, text string) service.Frontend {
	t.Helper()
	protocol, at, _ := strings.Cut(text, " ")
	p, err := service.ParseProtocol(protocol)
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddrPort(at)
	return service.Frontend{Addr: addr.Addr(), Port: addr.Port(), Protocol: p}
}

// kernel reads the pinned maps: the backends of each frontend.
func (h *serviceHost) kernel() map[string][]string {
	h.t.Helper()
	m, err := OpenServices(h.cfg.BPFFS)
	if err != nil {
		h.t.Fatal(err)
	}
	defer m.Close()
	list, err := m.List()
	if err != nil {
		h.t.Fatal(err)
	}
	all := map[string][]string{}
	for _, s := range list {
		backends := []string{}
		for _, b := range s.Backends {
			backends = append(backends, b.Addr.String())
		}
		all[strings.ToLower(s.Frontend.Protocol.String())+" "+netip.AddrPortFrom(s.Frontend.Addr, s.Frontend.Port).String()] = backends
	}
	return all
}

// wantKernel waits until a frontend leads to backends, or is absent, if they are nil.
func (h *serviceHost) wantKernel(frontend string, backends ...string) {
	h.t.Helper()
	testutil.Eventually(h.t, 2*patience, func() error {
		if got, ok := h.kernel()[frontend]; !slices.Equal(got, backends) || ok != (backends != nil) {
			return fmt.Errorf("%s leads to %v, want %v", frontend, got, backends)
		}
		return nil
	})
}

// dial connects a socket of the cgroup and returns the address that answered.
func (h *serviceHost) dial(network, to string) (answered string, peer string, err error) {
	h.t.Helper()
	var conn net.Conn
	h.inside(func() { conn, err = net.Dial(network, to) })
	if err != nil {
		return "", "", err
	}
	defer conn.Close()
	answered, err = ask(conn)
	return answered, peerOfSocket(h.t, conn), err
}

// ask reads what a server says of the address at which it was reached.
func ask(conn net.Conn) (string, error) {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if strings.HasPrefix(conn.RemoteAddr().Network(), "udp") {
		if _, err := conn.Write([]byte("?")); err != nil {
			return "", err
		}
	}
	buf := make([]byte, 256)
	n, err := conn.Read(buf)
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(buf[:n])), nil
}

// peerOfSocket is what getpeername(2) says.
func peerOfSocket(t testing.TB, conn net.Conn) string {
	t.Helper()
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var peer unix.Sockaddr
	if err := errors.Join(raw.Control(func(fd uintptr) { peer, err = unix.Getpeername(int(fd)) }), err); err != nil {
		t.Fatal(err)
	}
	switch p := peer.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(p.Addr), uint16(p.Port)).String()
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(p.Addr), uint16(p.Port)).String()
	}
	t.Fatalf("peer %T", peer)
	return ""
}

// A socket that asks for a service gets to a backend, of the family and protocol that it asked for, and believes that it
// talks to the service.
func TestServiceIsReached(t *testing.T) {
	h := newServiceHost(t)
	h.put("tcp 10.96.0.10:80", []string{"127.1.1.10"})
	h.put("udp 10.96.0.10:80", []string{"127.1.1.11"})
	h.put("tcp [fd00:96::10]:80", []string{"fd00:10:1:1::10"})
	h.put("udp [fd00:96::10]:80", []string{"fd00:10:1:1::11"})
	h.start()
	h.wantKernel("udp [fd00:96::10]:80", "fd00:10:1:1::11")
	for _, tc := range []struct{ network, to, answered, peer string }{
		{"tcp4", "10.96.0.10:80", "127.1.1.10:8080", "10.96.0.10:80"},
		{"udp4", "10.96.0.10:80", "127.1.1.11:8080", "10.96.0.10:80"},
		{"tcp6", "[fd00:96::10]:80", "[fd00:10:1:1::10]:8080", "[fd00:96::10]:80"},
		{"udp6", "[fd00:96::10]:80", "fd00:10:1:1::11", "[fd00:96::10]:80"},
		{"tcp6", "[::ffff:10.96.0.10]:80", "127.1.1.10:8080", "[::ffff:10.96.0.10]:80"},
		{"udp6", "[::ffff:10.96.0.10]:80", "127.1.1.11:8080", "[::ffff:10.96.0.10]:80"},
		{"tcp4", "127.1.1.12:8080", "127.1.1.12:8080", "127.1.1.12:8080"}, // no service
	} {
		answered, peer, err := h.dialRaw(tc.network, tc.to)
		if err != nil || !strings.Contains(answered, tc.answered) || peer != tc.peer {
			t.Errorf("%s to %s: answered by %s, peer %s, %v; want %s and %s", tc.network, tc.to, answered, peer, err, tc.answered, tc.peer)
		}
	}
	// A socket outside of the cgroup is left alone.
	h.ns.Do(t, func() {
		if conn, err := net.DialTimeout("tcp", "10.96.0.10:80", 100*time.Millisecond); err == nil {
			t.Errorf("a socket outside of the cgroup reached %v", conn.RemoteAddr())
			conn.Close()
		}
	})
}

// dialRaw is dial with the very family that the network names: net.Dial takes v4-mapped addresses for IPv4 ones.
func (h *serviceHost) dialRaw(network, to string) (answered, peer string, err error) {
	h.t.Helper()
	at := netip.MustParseAddrPort(to)
	typ := unix.SOCK_STREAM
	if strings.HasPrefix(network, "udp") {
		typ = unix.SOCK_DGRAM
	}
	var fd int
	h.inside(func() {
		if strings.HasSuffix(network, "4") {
			if fd, err = unix.Socket(unix.AF_INET, typ|unix.SOCK_CLOEXEC, 0); err == nil {
				err = unix.Connect(fd, &unix.SockaddrInet4{Addr: at.Addr().As4(), Port: int(at.Port())})
			}
			return
		}
		if fd, err = unix.Socket(unix.AF_INET6, typ|unix.SOCK_CLOEXEC, 0); err == nil {
			err = unix.Connect(fd, &unix.SockaddrInet6{Addr: at.Addr().As16(), Port: int(at.Port())})
		}
	})
	if err != nil {
		unix.Close(fd)
		return "", "", err
	}
	file := newFile(fd)
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return "", "", err
	}
	defer conn.Close()
	answered, err = ask(conn)
	return answered, peerOfSocket(h.t, conn), err
}

// A connection's peer is the service for as long as the kernel remembers that, and then its backend; never another service.
func TestServicePeer(t *testing.T) {
	h := newServiceHost(t)
	h.put("tcp 10.96.0.10:80", []string{"127.1.1.10"})
	h.put("tcp 10.96.0.11:80", []string{"127.1.1.10"})
	a := h.start()
	h.wantKernel("tcp 10.96.0.11:80", "127.1.1.10")
	peers, err := ebpf.LoadPinnedMap(filepath.Join(h.cfg.BPFFS, "weft", pinServicesDir, servicePins[bpf.MapPeers]), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer peers.Close()
	connect := func(to string) net.Conn {
		t.Helper()
		var conn net.Conn
		h.inside(func() { conn, err = net.Dial("tcp4", to) })
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	want := func(what string, conn net.Conn, want string) {
		t.Helper()
		if got := peerOfSocket(t, conn); got != want {
			t.Errorf("%s: the peer is %s, want %s", what, got, want)
		}
	}
	first, second := connect("10.96.0.10:80"), connect("10.96.0.11:80")
	want("the first", first, "10.96.0.10:80")
	want("the second, of the same backend", second, "10.96.0.11:80")
	want("none of a service", connect("127.1.1.10:8080"), "127.1.1.10:8080")

	// The socket goes elsewhere.
	raw, err := connect("10.96.0.10:80").(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var at unix.Sockaddr
	err = errors.Join(raw.Control(func(fd uintptr) {
		_, _, errno := unix.Syscall(unix.SYS_CONNECT, fd, uintptr(unsafe.Pointer(&unix.RawSockaddr{Family: unix.AF_UNSPEC})), unix.SizeofSockaddrInet4)
		if err = nil; errno != 0 {
			err = errno
		}
		to := &unix.SockaddrInet4{Addr: [4]byte{127, 1, 1, 10}, Port: servicePort}
		if err = errors.Join(err, connectAgain(int(fd), to)); err == nil {
			at, err = unix.Getpeername(int(fd))
		}
	}), err)
	if p, ok := at.(*unix.SockaddrInet4); err != nil || !ok || p.Addr != [4]byte{127, 1, 1, 10} {
		t.Errorf("a socket that went on to the backend itself has the peer %+v, %v", at, err)
	}

	// Another socket takes its place.
	cookie := cookieOf(t, first)
	place := uint32(cookie % bpf.MaxPeers)
	var peer uint64
	if err := peers.Lookup(&place, &peer); err != nil || peer == 0 {
		t.Fatalf("nothing is known of the socket: %#x, %v", peer, err)
	}
	if err := peers.Put(&place, peer+1<<40); err != nil {
		t.Fatal(err)
	}
	want("one that was forgotten", first, "127.1.1.10:8080")
	if err := peers.Put(&place, peer); err != nil {
		t.Fatal(err)
	}
	want("one that is remembered again", first, "10.96.0.10:80")

	// The service goes, and with the next agent, its record is another's.
	h.table.DeleteLocal(service.Files, service.Name{Namespace: "test", Name: "tcp 10.96.0.10:80"})
	h.wantKernel("tcp 10.96.0.10:80")
	want("one whose service is gone", first, "10.96.0.10:80")
	a.stop()
	h.put("tcp 10.96.0.12:80", []string{"127.1.1.10"})
	h.start()
	h.wantKernel("tcp 10.96.0.12:80", "127.1.1.10")
	want("one whose service's record is another's", first, "127.1.1.10:8080")
	want("one whose service stayed", second, "10.96.0.11:80")
	if _, err := fmt.Fprintln(first, "on"); err != nil {
		t.Errorf("the connection did not survive: %v", err)
	}
}

// connectAgain connects a socket that does not block.
func connectAgain(fd int, to unix.Sockaddr) error {
	err := unix.Connect(fd, to)
	if !errors.Is(err, unix.EINPROGRESS) {
		return err
	}
	ready := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	if _, err := unix.Poll(ready, int(patience.Milliseconds())); err != nil {
		return err
	}
	return nil
}

// cookieOf is what the kernel knows a socket by.
func cookieOf(t testing.TB, conn net.Conn) (cookie uint64) {
	t.Helper()
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(raw.Control(func(fd uintptr) {
		cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE)
	}), err); err != nil {
		t.Fatal(err)
	}
	return cookie
}

// A service without backends refuses at once, is counted, and is told of; with one, it does not any more.
func TestServiceWithoutBackendsRefuses(t *testing.T) {
	h := newServiceHost(t)
	h.put("tcp 10.96.0.10:80", nil)
	h.put("udp 10.96.0.10:80", nil)
	a := h.start()
	heard := make(chan Flow, 16)
	h.listen(a, func(f Flow) { heard <- f })
	want := error(unix.ECONNREFUSED)
	if !refusesProperly() {
		want = unix.EPERM
	}
	for _, network := range []string{"tcp4", "udp4"} {
		if _, _, err := h.dialRaw(network, "10.96.0.10:80"); !errors.Is(err, want) {
			t.Errorf("%s: connect: %v, want %v", network, err, want)
		}
	}
	s := h.udp("udp4")
	if err := s.send("10.96.0.10:80"); !errors.Is(err, want) {
		t.Errorf("send: %v, want %v", err, want)
	}
	seen := map[uint8]bool{}
	for len(seen) < 2 {
		select {
		case f := <-heard:
			if f.Verdict != bpf.NoBackend || f.DstIP != netip.MustParseAddr("10.96.0.10") || f.DstPort != 80 {
				t.Errorf("heard of %+v", f)
			}
			seen[f.Proto] = true
		case <-time.After(2 * patience):
			t.Fatalf("heard of refusals of protocols %v", seen)
		}
	}
	testutil.Eventually(t, 2*patience, func() error {
		if s := a.Status().Services; s.Refused != 3 || s.Chosen != 0 {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	h.put("tcp 10.96.0.10:80", []string{"127.1.1.10"})
	h.wantKernel("tcp 10.96.0.10:80", "127.1.1.10")
	if answered, _, err := h.dial("tcp4", "10.96.0.10:80"); err != nil || !strings.Contains(answered, "127.1.1.10") {
		t.Errorf("with a backend: %s, %v", answered, err)
	}
	h.table.DeleteLocal(service.Files, service.Name{Namespace: "test", Name: "tcp 10.96.0.10:80"})
	h.wantKernel("tcp 10.96.0.10:80")
	testutil.Eventually(t, 2*patience, func() error { // what a frontend has counted outlives it
		if s := a.Status().Services; s.Refused != 3 || s.Chosen != 1 {
			return fmt.Errorf("%d flows refused, %d not, want 3 and 1", s.Refused, s.Chosen)
		}
		return nil
	})
}
