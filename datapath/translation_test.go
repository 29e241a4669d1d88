// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
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
	"github.com/weftmesh/weft/service"
)

// routerHost is a host whose pods, none of whose sockets is in the cgroup, reach services by its devices. Pod a is behind
// a veth, b behind a bridge. Backends are on the other node, peer, and in pod c.
type routerHost struct {
	*podHost
	services *serviceHost // of the same host
	c        *testHost
}

// Backends, IPv4 and IPv6: two on the other node, one in pod c.
const (
	far4, farther4, near4 = "10.2.1.10", "10.2.1.11", "10.1.1.12"
	far6, farther6, near6 = "fd00:10:2:2::10", "fd00:10:2:2::11", "fd00:10:1:1::12"
)

func newRouterHost(t *testing.T, withoutTCX bool) *routerHost {
	t.Helper()
	h := &routerHost{podHost: newPodHost(t, withoutTCX)}
	h.services = &serviceHost{testHost: h.testHost, cgroup: testutil.NewCgroup(t), table: service.NewTable(), listed: true}
	h.c = h.addPod("lxcc", "lxcc", near4, near6)
	h.pods.set(true, podA, podA6, podB, near4, near6)
	h.cfg.Services, h.cfg.ServiceCgroup, h.cfg.ServiceAlgorithm = h.services.table, h.services.cgroup.Path(), service.Random
	h.cfg.ServicesListed = func() bool { return true }
	h.cfg.ServiceTC = true
	for _, addr := range []string{far4 + "/32", farther4 + "/32", far6 + "/128", farther6 + "/128"} {
		h.ipIn(h.peer, "addr add "+addr+" dev lo nodad")
	}
	h.ip("route add 10.2.1.0/24 via 172.18.2.1")
	h.ip("route add fd00:10:2::/48 via fd00:18:2::1")
	h.ipIn(h.peer, "route add 10.1.1.0/24 via 172.18.1.1")
	h.ipIn(h.peer, "route add fd00:10:1::/48 via fd00:18:1::1")
	h.ipIn(h.peer, "route add 10.96.0.0/16 via 172.18.1.1")
	near := &serviceHost{testHost: h.c}
	far := &serviceHost{testHost: &testHost{t: t, ns: h.peer}}
	for server, addrs := range map[*serviceHost][]string{near: {near6}, far: {far6, farther6}} {
		server.serveTCP()
		server.serveUDP("udp4", "0.0.0.0")
		for _, addr := range addrs {
			server.serveUDP("udp6", addr)
		}
	}
	// The bridge and the neighbours get to know the pods.
	h.b.sendTo(podB, podA+":5678", []byte("hello"))
	return h
}

// startRouter starts an agent and waits until all pods have their programs.
func (h *routerHost) startRouter() *agent {
	h.t.Helper()
	a := h.start()
	testutil.Eventually(h.t, patience, func() error {
		if got := a.clientDevices(); !slices.Equal(got, []string{"lxca", "lxcb", "lxcc"}) {
			return fmt.Errorf("translation at %v; status %+v", got, a.Status().Services.Translation)
		}
		return nil
	})
	return a
}

// clientDevices are those with both programs that translate.
func (a *agent) clientDevices() (attached []string) {
	s := a.Status().Services
	if s == nil || s.Translation == nil {
		return nil
	}
	for _, d := range s.Translation.Devices {
		if len(d.Programs) == 2 && allAttached([]DeviceStatus{d}) {
			attached = append(attached, d.Name)
		}
	}
	slices.Sort(attached)
	return attached
}

// dial connects a socket in the namespace of a pod.
func (h *testHost) dialIn(network, to string) (conn net.Conn, err error) {
	h.t.Helper()
	h.ns.Do(h.t, func() { conn, err = net.DialTimeout(network, to, patience) })
	return conn, err
}

// askFrom is the address that answers what is asked from the namespace.
func (h *testHost) askFrom(network, to string) (string, error) {
	h.t.Helper()
	conn, err := h.dialIn(network, to)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return ask(conn)
}

// wantAnswer asks a service until the backend answers, and fails if another one does.
func (h *testHost) wantAnswer(network, to, backend string) {
	h.t.Helper()
	answered, err := h.askFrom(network, to)
	if host, _, splitErr := net.SplitHostPort(answered); splitErr == nil {
		answered = host
	}
	if err != nil || answered != backend {
		h.t.Errorf("%s to %s: answered by %q, %v, want %s", network, to, answered, err, backend)
	}
}

// exchange sends so many bytes to a server that sends them back, and wants the same.
func exchange(conn net.Conn, size int) error {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	sent := bytes.Repeat([]byte("0123456789abcde\n"), size/16)
	wrote := make(chan error, 1)
	go func() {
		_, err := conn.Write(sent)
		wrote <- err
	}()
	got := make([]byte, len(sent))
	_, err := io.ReadFull(conn, got)
	if err = errors.Join(err, <-wrote); err == nil && !bytes.Equal(sent, got) {
		err = errors.New("what came back is not what was sent")
	}
	return err
}

// Pods reach services without our cgroup, by TCP and UDP, IPv4 and IPv6, on the other node and on this one, small and large.
// A client that is routed through the node does, too, at a named device.
func TestTranslation(t *testing.T) {
	for name, withoutTCX := range podModes() {
		t.Run(name, func(t *testing.T) {
			h := newRouterHost(t, withoutTCX)
			h.cfg.ServiceTCDevices = []string{"eth0", "lxca"}
			for _, s := range []struct{ frontend, backend string }{
				{"tcp 10.96.0.10:80", far4}, {"udp 10.96.0.10:80", farther4}, {"tcp [fd00:96::10]:80", far6}, {"udp [fd00:96::10]:80", farther6},
				{"tcp 10.96.0.11:80", near4}, {"udp 10.96.0.11:80", near4}, {"tcp [fd00:96::11]:80", near6}, {"udp [fd00:96::11]:80", near6},
			} {
				h.services.put(s.frontend, []string{s.backend})
			}
			h.cfg.IPs.Apply([]ipcache.Op{upsert(far4+"/32", 131329)})
			a := h.start()
			testutil.Eventually(t, patience, func() error {
				if got := a.clientDevices(); !slices.Equal(got, []string{"eth0", "lxca", "lxcb", "lxcc"}) {
					return fmt.Errorf("translation at %v", got)
				}
				return nil
			})
			h.services.wantKernel("udp [fd00:96::11]:80", near6)
			h.wantEntries(map[string]identity.ID{podA + "/32": idA, podA6 + "/128": idA, podB + "/32": idB, far4 + "/32": 131329})

			for _, f := range h.diagnose(Diagnosis{BPFFS: h.cfg.BPFFS, Devices: []string{"eth0"}, ServiceCgroup: h.cfg.ServiceCgroup}) {
				if strings.Contains(f.Detail, "somebody else") {
					t.Errorf("weft's own are taken for somebody else's: %+v", f)
				}
			}

			h.a.wantAnswer("tcp4", "10.96.0.10:80", far4)
			h.a.wantAnswer("udp4", "10.96.0.10:80", farther4)
			h.a.wantAnswer("tcp6", "[fd00:96::10]:80", far6)
			h.a.wantAnswer("udp6", "[fd00:96::10]:80", farther6)
			h.a.wantAnswer("tcp4", "10.96.0.11:80", near4)
			h.a.wantAnswer("udp4", "10.96.0.11:80", near4)
			h.a.wantAnswer("tcp6", "[fd00:96::11]:80", near6)
			h.a.wantAnswer("udp6", "[fd00:96::11]:80", near6)
			h.b.wantAnswer("tcp4", "10.96.0.10:80", far4)
			h.b.wantAnswer("tcp4", "10.96.0.11:80", near4)
			(&testHost{t: t, ns: h.peer}).wantAnswer("tcp4", "10.96.0.11:80", near4) // routed through eth0
			h.a.wantAnswer("tcp4", far4+":8080", far4)                               // no service
			for _, to := range []string{"10.96.0.10:80", "[fd00:96::10]:80", "10.96.0.11:80", "[fd00:96::11]:80"} {
				conn, err := h.a.dialIn("tcp", to)
				if err != nil {
					t.Fatal(err)
				}
				if peer := peerOfSocket(t, conn); peer != to {
					t.Errorf("the peer of a connection to %s is %s", to, peer)
				}
				if _, err := ask(conn); err != nil {
					t.Errorf("%s: %v", to, err)
				}
				if err := exchange(conn, 4<<20); err != nil {
					t.Errorf("%s: %v", to, err)
				}
				conn.Close()
			}
			if got := a.verify(false); len(got) != 0 {
				t.Errorf("differences where there are none: %v", got)
			}
			s := a.Status().Services.Translation
			if s.Begun < 15 || s.Requests == 0 || s.Replies == 0 || s.Refused+s.Hairpin+s.Clashes+s.Failed != 0 || s.LastError != "" {
				t.Errorf("status %+v, want at least 15 flows begun and nothing dropped", s)
			}
			flows, err := OpenServiceFlows(h.cfg.BPFFS)
			if err != nil {
				t.Fatal(err)
			}
			defer flows.Close()
			open, err := h.a.dialIn("tcp", "10.96.0.10:80") // those of before are over some time after their end
			if err != nil {
				t.Fatal(err)
			}
			defer open.Close()
			if _, err := ask(open); err != nil {
				t.Fatal(err)
			}
			want := fmt.Sprintf("TCP %v 10.96.0.10:80 10.2.1.10:8080 true false", open.LocalAddr())
			var listed []string
			if err := flows.All(func(f ServiceFlow) bool {
				listed = append(listed, fmt.Sprintf("%v %v %v %v %v %v", f.Protocol, f.Client, f.Frontend, f.Backend, f.Answered, f.Closed))
				return true
			}); err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(listed, want) {
				t.Errorf("flows %q, want %s", listed, want)
			}

			// Without it, the programs go, and the rest stays.
			a.stop()
			h.cfg.ServiceTC, h.cfg.ServiceTCDevices = false, nil
			a = h.start()
			a.wantPodDevices("lxca", "lxcb", "lxcc")
			if got := a.verify(false); len(got) != 0 {
				t.Errorf("differences without translation: %v", got)
			}
			h.wantNoTranslation("eth0", "lxca", "lxcb", "lxcc")
			a.stop()
			if found, err := h.cleanup(false); err != nil || len(found) == 0 {
				t.Fatalf("cleanup found %v, %v", found, err)
			}
			if _, err := os.Stat(h.cfg.BPFFS + "/weft"); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("cleanup left the pins: %v", err)
			}
		})
	}
}

// wantNoTranslation waits until devices have no program that translates.
func (h *routerHost) wantNoTranslation(devices ...string) {
	h.t.Helper()
	for _, p := range bpf.TranslationPrograms {
		for name := range h.links() {
			if strings.HasSuffix(name, "-"+p.Name) {
				h.t.Errorf("link %s is left", name)
			}
		}
		for _, device := range devices {
			for _, filter := range h.filters(device) {
				if strings.Contains(fmt.Sprint(filter), p.Name) {
					h.t.Errorf("filter %v is left at %s", filter, device)
				}
			}
		}
	}
}

// Connections go on while the agent is away, and when it comes back, which touches nothing; new ones begin meanwhile.
func TestTranslationOutlivesTheAgent(t *testing.T) {
	for name, withoutTCX := range podModes() {
		t.Run(name, func(t *testing.T) {
			h := newRouterHost(t, withoutTCX)
			h.services.put("tcp 10.96.0.10:80", []string{far4, farther4, near4})
			a := h.startRouter()
			h.services.wantKernel("tcp 10.96.0.10:80", near4, far4, farther4)
			var conns []net.Conn
			begin := func() {
				conn, err := h.a.dialIn("tcp", "10.96.0.10:80")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { conn.Close() })
				if _, err := ask(conn); err != nil {
					t.Fatal(err)
				}
				conns = append(conns, conn)
			}
			goOn := func(when string) {
				t.Helper()
				for _, conn := range conns {
					if err := exchange(conn, 64<<10); err != nil {
						t.Errorf("%s: %v", when, err)
					}
				}
			}
			begin()
			begin()
			before := h.kernelIDs()
			a.stop()
			goOn("without an agent")
			begin()
			a = h.startRouter()
			goOn("after a restart")
			if diff := cmp.Diff(before, h.kernelIDs()); diff != "" {
				t.Errorf("kernel objects (-before +after the restart):\n%s", diff)
			}
			if s := a.Status().Services.Translation; s.Begun != 3 {
				t.Errorf("%d flows begun, want 3", s.Begun)
			}
			// A conntrack of another version is made anew; each connection finds its backend again.
			a.stop()
			path := h.cfg.BPFFS + "/weft/services/conntrack"
			other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.LRUHash, KeySize: 40, ValueSize: 56, MaxEntries: 100})
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			if err := errors.Join(os.Remove(path), other.Pin(path)); err != nil {
				t.Fatal(err)
			}
			h.startRouter()
			goOn("with another conntrack")
		})
	}
}

// While a client connects again and again, backends come and go: no connection is refused as long as there is one. Without
// any, each is refused at once; then it gets through.
func TestTranslationFallsOver(t *testing.T) {
	h := newRouterHost(t, !hasTCX())
	const frontend = "tcp 10.96.0.10:80"
	all := []string{near4, far4, farther4}
	h.services.put(frontend, all)
	a := h.startRouter()
	h.services.wantKernel(frontend, all...)
	kept, err := h.a.dialIn("tcp", "10.96.0.10:80")
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	first, err := ask(kept)
	if err != nil {
		t.Fatal(err)
	}
	for round := range 12 {
		left := all[round%3 : round%3+1]
		h.services.put(frontend, left)
		h.services.wantKernel(frontend, left...)
		for range 5 {
			h.a.wantAnswer("tcp", "10.96.0.10:80", left[0])
		}
		if err := exchange(kept, 4096); err != nil {
			t.Fatalf("the connection to %s: %v", first, err)
		}
	}
	h.services.put(frontend, nil)
	h.services.wantKernel(frontend, []string{}...)
	if _, err := h.a.askFrom("tcp", "10.96.0.10:80"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a connection without backends: %v, want it refused", err)
	}
	testutil.Eventually(t, patience, func() error {
		if s := a.Status().Services; s.Translation.Refused == 0 || s.Refused == 0 {
			return fmt.Errorf("nothing refused: %+v", s.Translation)
		}
		return nil
	})
	h.services.put(frontend, []string{far4})
	h.services.wantKernel(frontend, far4)
	h.a.wantAnswer("tcp", "10.96.0.10:80", far4)
	if err := exchange(kept, 4096); err != nil {
		t.Errorf("the connection to %s in the end: %v", first, err)
	}
}

// A packet that is too big for the way to the backend is told of in terms of the service, and what follows fits.
func TestTranslationPathMTU(t *testing.T) {
	h := newRouterHost(t, !hasTCX())
	h.services.put("tcp 10.96.0.10:80", []string{far4})
	h.services.put("tcp [fd00:96::10]:80", []string{far6})
	h.services.put("udp 10.96.0.10:80", []string{far4})
	// At both ends of the wire: a device drops what comes over it and is larger, and nobody is told. The servers do not say in
	// their first segment what their device takes.
	h.ip("link set eth0 mtu 1400")
	h.ipIn(h.peer, "link set eth0 mtu 1400")
	h.ipIn(h.peer, "route replace 10.1.1.0/24 via 172.18.1.1 advmss 1460")
	h.ipIn(h.peer, "route replace fd00:10:1::/48 via fd00:18:1::1 advmss 1440")
	a := h.startRouter()
	h.services.wantKernel("udp 10.96.0.10:80", far4)
	for _, to := range []string{"10.96.0.10:80", "[fd00:96::10]:80"} {
		conn, err := h.a.dialIn("tcp", to)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := ask(conn); err != nil {
			t.Fatal(err)
		}
		if err := exchange(conn, 1<<20); err != nil {
			t.Errorf("%s: %v", to, err)
		}
		if mtu := pathMTU(t, conn, strings.HasPrefix(to, "[")); mtu != 1400 {
			t.Errorf("%s: the path has an MTU of %d, want 1400", to, mtu)
		}
	}
	if s := a.Status().Services.Translation; s.Errors == 0 {
		t.Errorf("no ICMP errors in %+v", s)
	}
	// A datagram that needs fragments, as the client's own device makes them.
	conn, err := h.a.dialIn("udp4", "10.96.0.10:80")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 256)
	_, err = conn.Write(make([]byte, 5000))
	if err == nil {
		_, err = conn.Read(buf)
	}
	if s := a.Status().Services.Translation; err != nil || s.Failed != 0 {
		t.Errorf("a datagram in fragments: %v; status %+v", err, s)
	}
}

// pathMTU is what a connected socket knows of its path.
func pathMTU(t *testing.T, conn net.Conn, v6 bool) int {
	t.Helper()
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	level, option := unix.IPPROTO_IP, unix.IP_MTU
	if v6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU
	}
	mtu := 0
	if err := errors.Join(raw.Control(func(fd uintptr) { mtu, err = unix.GetsockoptInt(int(fd), level, option) }), err); err != nil {
		t.Fatal(err)
	}
	return mtu
}

// While a table that was made anew is being filled, the programs of before go on with theirs.
func TestTranslationOfAnotherVersion(t *testing.T) {
	for name, withoutTCX := range podModes() {
		t.Run(name, func(t *testing.T) {
			h := newRouterHost(t, withoutTCX)
			const frontend = "tcp 10.96.0.10:80"
			h.services.put(frontend, []string{far4})
			a := h.startRouter()
			h.services.wantKernel(frontend, far4)
			a.stop()
			path := h.cfg.BPFFS + "/weft/services/slots"
			other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 7})
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			if err := errors.Join(os.Remove(path), other.Pin(path)); err != nil {
				t.Fatal(err)
			}
			h.services.setListed(false)
			h.services.table = service.NewTable()
			h.cfg.Services, h.cfg.ServicesListed = h.services.table, func() bool {
				h.services.mu.Lock()
				defer h.services.mu.Unlock()
				return h.services.listed
			}
			a = h.startRouter()
			h.a.wantAnswer("tcp", "10.96.0.10:80", far4)
			h.services.put(frontend, []string{farther4})
			h.services.wantKernel(frontend, farther4)
			h.a.wantAnswer("tcp", "10.96.0.10:80", far4)
			for _, d := range a.verify(false) { // those of sockets are told
				if strings.Contains(d, "weft_to_backend") || strings.Contains(d, "weft_to_client") {
					t.Errorf("a difference while the table is filled: %s", d)
				}
			}
			h.services.setListed(true)
			testutil.Eventually(t, patience, func() error {
				for _, d := range a.Status().Services.Translation.Devices {
					for i, p := range d.Programs {
						if want := a.programs(t)[i]; p.ProgramID != want {
							return fmt.Errorf("%s runs program %d, want %d", d.Name, p.ProgramID, want)
						}
					}
				}
				return nil
			})
			h.a.wantAnswer("tcp", "10.96.0.10:80", farther4)
			if s := a.Status(); s.Drift[KindLink] != 0 {
				t.Errorf("drift %v, and nobody else was there", s.Drift)
			}
		})
	}
}

// programs are the numbers of the pinned programs that translate.
func (a *agent) programs(t *testing.T) (ids [len(bpf.TranslationPrograms)]uint32) {
	t.Helper()
	for i, p := range bpf.TranslationPrograms {
		id, err := programAt(a.h.cfg.BPFFS + "/weft/programs/" + p.Name)
		if err != nil {
			t.Fatal(err)
		}
		ids[i] = id
	}
	return ids
}
