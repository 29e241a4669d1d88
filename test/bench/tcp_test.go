// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/internal/testutil"
)

// tcpEnd is one end of a veth, in a network namespace of its own.
type tcpEnd struct {
	ns   *testutil.NetNS
	addr netip.Addr
}

// tcpEnds makes a veth between two namespaces, whose ends have addresses of hosts.
func tcpEnds(b *testing.B, a addresses) [2]tcpEnd {
	b.Helper()
	ends := [2]tcpEnd{{testutil.NewNetNS(b), a.host(0)}, {testutil.NewNetNS(b), a.host(1)}}
	other, err := os.Open(ends[1].ns.Path())
	if err != nil {
		b.Fatal(err)
	}
	defer other.Close()
	for i, end := range ends {
		end.ns.Do(b, func() {
			veth := &netlink.Veth{
				LinkAttrs: netlink.LinkAttrs{Name: device}, PeerName: device, PeerNamespace: netlink.NsFd(int(other.Fd())),
			}
			if i == 0 {
				err = netlink.LinkAdd(veth)
			}
			if err != nil {
				return
			}
			var nic netlink.Link
			if nic, err = netlink.LinkByName(device); err != nil {
				return
			}
			addr := &netlink.Addr{IPNet: &net.IPNet{IP: end.addr.AsSlice(), Mask: net.CIDRMask(24, 32)}}
			if err = netlink.AddrAdd(nic, addr); err == nil {
				err = netlink.LinkSetUp(nic)
			}
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	return ends
}

// connected returns both ends of a connection.
func connected(b *testing.B, ends [2]tcpEnd) (client, server net.Conn) {
	b.Helper()
	var listener net.Listener
	var err error
	ends[1].ns.Do(b, func() { listener, err = net.Listen("tcp4", netip.AddrPortFrom(ends[1].addr, 0).String()) })
	if err != nil {
		b.Fatal(err)
	}
	defer listener.Close()
	ends[0].ns.Do(b, func() { client, err = net.DialTimeout("tcp4", listener.Addr().String(), 20*time.Second) })
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = client.Close() })
	if server, err = listener.Accept(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = server.Close() })
	return client, server
}

// spent is what a stream took.
type spent struct {
	wall time.Duration
	cpu  time.Duration // of this process, which is both ends
}

// stream sends a number of bytes and returns what it took until all had been received.
func stream(b *testing.B, client, server net.Conn, bytes int64) spent {
	b.Helper()
	received := make(chan error, 1)
	start, cpu := time.Now(), cpuTime()
	go func() {
		buf := make([]byte, 1<<18)
		_, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, io.LimitReader(server, bytes), buf)
		received <- err
	}()
	chunk := make([]byte, 1<<18)
	for left := bytes; left > 0; {
		n, err := client.Write(chunk[:min(left, int64(len(chunk)))])
		if err != nil {
			b.Fatal(err)
		}
		left -= int64(n)
	}
	if err := <-received; err != nil {
		b.Fatal(err)
	}
	return spent{time.Since(start), cpuTime() - cpu}
}

// attach attaches programs to the end's device, and returns what takes them off.
func (e tcpEnd) attach(b *testing.B, coll *ebpf.Collection, programs []bpf.Program) (detach func()) {
	b.Helper()
	var links []link.Link
	e.ns.Do(b, func() {
		nic, err := netlink.LinkByName(device)
		if err != nil {
			b.Error(err)
			return
		}
		for _, p := range programs {
			l, err := link.AttachTCX(link.TCXOptions{Interface: nic.Attrs().Index, Program: coll.Programs[p.Name], Attach: p.Attach})
			if err != nil {
				b.Error(err)
				return
			}
			links = append(links, l)
		}
	})
	return func() {
		for _, l := range links {
			_ = l.Close()
		}
	}
}

// BenchmarkTCP streams over a veth between two namespaces, with the programs that ship on both directions of both ends and
// without, in turn.
//
//	MB/s         with the programs
//	x-without    the median, over all rounds, of the rate with / the rate without
//	x-cpu        the same of the bytes for the same CPU time, which tells more where others work on the machine
func BenchmarkTCP(b *testing.B) {
	const bytes, rounds = 1 << 29, 21
	a := addresses{bpf.FamilyIPv4, 100_000}
	k := newLookupKernel(b)
	k.fill(b, a)
	coll := shipping(b, k, true, nil)
	ends := tcpEnds(b, a)
	client, server := connected(b, ends)
	stream(b, client, server, bytes)
	for b.Loop() {
		var ratios, rates, costs []float64
		for i := range rounds {
			var with, without spent
			for _, attached := range []bool{i%2 == 0, i%2 != 0} { // who is first has no advantage
				if !attached {
					without = stream(b, client, server, bytes)
					continue
				}
				detach := [...]func(){ends[0].attach(b, coll, bpf.Programs[:]), ends[1].attach(b, coll, bpf.Programs[:])}
				with = stream(b, client, server, bytes)
				detach[0]()
				detach[1]()
			}
			ratios = append(ratios, without.wall.Seconds()/with.wall.Seconds())
			rates = append(rates, bytes/1e6/with.wall.Seconds())
			costs = append(costs, without.cpu.Seconds()/with.cpu.Seconds())
		}
		for _, figures := range [][]float64{ratios, rates, costs} {
			slices.Sort(figures)
		}
		const what = "TCP over a veth, programs on both ends: "
		measured(b, "MB/s", rates[rounds/2], goal{what: what + "rate", unit: "MB/s"})
		measured(b, "x-without", ratios[rounds/2], goal{what: what + "rate / without programs", atLeast: 0.97})
		measured(b, "x-cpu", costs[rounds/2], goal{what: what + "bytes for the same CPU time / without programs"})
	}
	if identified(b, coll) == 0 {
		b.Fatal("the programs saw no packet")
	}
	b.ReportMetric(0, "ns/op")
}
