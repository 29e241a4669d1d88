// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

// BenchmarkServiceConnect measures how many connections a second one thread makes to ten backends, over loopback, by their own
// addresses and without programs, and by that of one of 1,000 services with ten backends each; then what the kernel's table is
// written when one backend of 5,000 comes or goes.
//
//	x-direct  connections/s through a service / connections/s without programs, of the median of many short rounds
//	words     words of the table for one backend of 5,000
func BenchmarkServiceConnect(b *testing.B) {
	const services, connections, rounds = 1000, 300, 101
	h := newServiceBench(b)
	for n := range services {
		h.put(n, 10)
	}
	h.put(services, 5000)
	h.want(b, services+1, 10*services+5000)
	port := h.listen(b)
	for b.Loop() {
		var direct, through []time.Duration
		for round := range rounds { // taken in turn, against the machine's moods
			direct = append(direct, h.connect(b, connections, func(i int) unix.Sockaddr { return loopback(port, 1+i%10) }))
			h.cgroup.Do(b, func() {
				through = append(through, h.connect(b, connections, func(i int) unix.Sockaddr {
					at := frontendOf((round*connections + i) % services)
					return &unix.SockaddrInet4{Addr: at.As4(), Port: 80}
				}))
			})
		}
		slices.Sort(direct)
		slices.Sort(through)
		without, with := direct[rounds/2].Seconds(), through[rounds/2].Seconds()
		progress(b, "%d connections, median of %d rounds: %.1f ms direct, %.1f ms through services", connections, rounds, 1000*without, 1000*with)
		measured(b, "x-direct", without/with, goal{what: "connect() through a service: rate / without", atLeast: 0.95})
		measured(b, "conns/s", connections/with, goal{what: "connect() through a service", unit: "connections/s"})
		before := h.status().Written
		h.put(services, 4999)
		h.want(b, services+1, 10*services+4999)
		measured(b, "words", float64(h.status().Written-before), goal{what: "one backend of 5,000 goes: words written", atMost: 8})
		h.put(services, 5000)
		h.want(b, services+1, 10*services+5000)
	}
	b.ReportMetric(0, "ns/op")
}

// serviceBench is a node whose only task is services.
type serviceBench struct {
	ns       *testutil.NetNS
	cgroup   *testutil.Cgroup
	table    *service.Table
	datapath *datapath.Datapath
}

func newServiceBench(b *testing.B) *serviceBench {
	b.Helper()
	h := &serviceBench{ns: testutil.NewNetNS(b), cgroup: testutil.NewCgroup(b), table: service.NewTable()}
	layout, err := identity.NewLayout(255)
	if err != nil {
		b.Fatal(err)
	}
	h.ns.Do(b, func() {
		err = netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth1"})
	})
	if err != nil {
		b.Fatal(err)
	}
	h.datapath, err = datapath.New(datapath.Config{
		BPFFS: testutil.MountBPFFS(b), Devices: []string{"eth0"}, RoutingMode: datapath.RoutingNone, MaxEntries: 1000, Layout: layout,
		IPs: ipcache.New(), Nodes: node.NewTable(), Listed: func(identity.ClusterID) bool { return true },
		Services: h.table, ServicesListed: func() bool { return true }, ServiceCgroup: h.cgroup.Path(), ServiceAlgorithm: service.Random,
		Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	tasks.Go(func() {
		h.ns.Do(b, func() {
			if err := h.datapath.Run(ctx); err != nil {
				b.Error(err)
			}
		})
	})
	b.Cleanup(func() {
		cancel()
		tasks.Wait()
	})
	return h
}

func (h *serviceBench) status() datapath.ServiceStatus {
	if s := h.datapath.Status().Services; s != nil {
		return *s
	}
	return datapath.ServiceStatus{}
}

// want waits until the kernel has so much.
func (h *serviceBench) want(b *testing.B, frontends, backends int) {
	b.Helper()
	testutil.Eventually(b, time.Minute, func() error {
		s := h.status()
		if s.Frontends != frontends || s.Backends != backends || len(s.Programs) == 0 {
			return fmt.Errorf("status %+v, want %d frontends and %d backends", s, frontends, backends)
		}
		return nil
	})
}

func frontendOf(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)}) }

func loopback(port, n int) *unix.SockaddrInet4 {
	return &unix.SockaddrInet4{Addr: [4]byte{127, 0, byte(n >> 8), byte(n)}, Port: port}
}

// benchPort is where all backends listen.
const benchPort = 8080

// put gives a service its backends: addresses of loopback.
func (h *serviceBench) put(n, backends int) {
	ports := []service.NamedPort{{Name: "p", Protocol: service.TCP, Port: benchPort}}
	subset := service.Subset{Ports: ports}
	for i := range backends {
		subset.Addrs = append(subset.Addrs, netip.AddrFrom4(loopback(0, 1+i).Addr))
	}
	h.table.PutLocal(service.Local{
		Service: service.Name{Namespace: "bench", Name: fmt.Sprint(n)}, Source: service.Files, Addrs: []netip.Addr{frontendOf(n)},
		Ports: []service.NamedPort{{Name: "p", Protocol: service.TCP, Port: 80}}, Backends: []service.Subset{subset},
	})
}

// listen accepts connections, and closes them, on all addresses.
func (h *serviceBench) listen(b *testing.B) (port int) {
	b.Helper()
	var fd int
	var err error
	h.ns.Do(b, func() {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err == nil {
			err = errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Port: benchPort}), unix.Listen(fd, 4096))
		}
	})
	if err != nil {
		b.Fatal(err)
	}
	var server sync.WaitGroup
	server.Go(func() {
		for {
			conn, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
			switch {
			case err == nil:
				_ = unix.Close(conn)
			case !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.EINTR):
				return
			}
		}
	})
	b.Cleanup(func() {
		_ = unix.Shutdown(fd, unix.SHUT_RDWR)
		server.Wait()
		_ = unix.Close(fd)
	})
	return benchPort
}

// connect makes connections, one after the other, and returns the time that it took.
func (h *serviceBench) connect(b *testing.B, n int, to func(int) unix.Sockaddr) (took time.Duration) {
	b.Helper()
	h.ns.Do(b, func() {
		start := time.Now()
		for i := range n {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err == nil {
				// A reset, so that no port waits for late segments.
				err = errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}), unix.Connect(fd, to(i)))
			}
			if err == nil {
				err = unix.Close(fd)
			}
			if err != nil {
				b.Fatalf("connection %d: %v", i, err)
			}
		}
		took = time.Since(start)
	})
	return took
}
