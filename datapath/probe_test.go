// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
)

// probe is a stream of a thousand packets a second from the peer to the host.
type probe struct {
	h              *testHost
	sent, received atomic.Uint64
	stop           func()
}

// startProbe sends until stop, which waits for what is under way.
func (h *testHost) startProbe() *probe { return h.probeBetween("172.18.2.1", "172.18.1.1") }

// probeBetween is startProbe with an address of the peer and one of the host.
func (h *testHost) probeBetween(from, to string) *probe { return h.probeFrom(h.peer, from, h.ns, to) }

// probeFrom is startProbe from one network namespace to another.
func (h *testHost) probeFrom(source *testutil.NetNS, from string, destination *testutil.NetNS, to string) *probe {
	h.t.Helper()
	if !h.cfg.DualStack {
		h.t.Fatal("the families are to be told apart")
	}
	p := &probe{h: h}
	var (
		in  *net.UDPConn
		out net.Conn
		err error
	)
	destination.Do(h.t, func() { in, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(to), Port: 7777}) })
	if err != nil {
		h.t.Fatal(err)
	}
	dialer := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(from)}}
	source.Do(h.t, func() { out, err = dialer.Dial("udp", net.JoinHostPort(to, "7777")) })
	if err != nil {
		h.t.Fatal(err)
	}
	done := make(chan struct{})
	var sender, receiver sync.WaitGroup
	sender.Go(func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			if _, err := out.Write([]byte("probe")); err == nil {
				p.sent.Add(1)
			}
		}
	})
	receiver.Go(func() {
		buf := make([]byte, 64)
		for {
			if _, err := in.Read(buf); err != nil {
				return
			}
			p.received.Add(1)
		}
	})
	p.stop = sync.OnceFunc(func() {
		close(done)
		sender.Wait() // what it sends last counts, too
		for deadline := time.Now().Add(patience); p.received.Load() < p.sent.Load() && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		in.Close()
		out.Close()
		receiver.Wait()
	})
	h.t.Cleanup(p.stop)
	return p
}

// startStream opens a TCP connection from one network namespace to another, and writes to it every millisecond until finish, which
// wants that all of it came.
func (h *testHost) startStream(source *testutil.NetNS, from string, destination *testutil.NetNS, to string) (finish func()) {
	h.t.Helper()
	var listener net.Listener
	var err error
	destination.Do(h.t, func() { listener, err = net.Listen("tcp", net.JoinHostPort(to, "7778")) })
	if err != nil {
		h.t.Fatal(err)
	}
	defer listener.Close()
	var out net.Conn
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: patience}
	source.Do(h.t, func() { out, err = dialer.Dial("tcp", net.JoinHostPort(to, "7778")) })
	if err != nil {
		h.t.Fatal(err)
	}
	in, err := listener.Accept()
	if err != nil {
		h.t.Fatal(err)
	}
	var written, read int64
	var writeErr, readErr error
	done := make(chan struct{})
	var both sync.WaitGroup
	both.Go(func() {
		defer out.Close()
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for chunk := make([]byte, 1000); writeErr == nil; {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			var n int
			n, writeErr = out.Write(chunk)
			written += int64(n)
		}
	})
	both.Go(func() {
		defer in.Close()
		read, readErr = io.Copy(io.Discard, in)
	})
	stop := sync.OnceFunc(func() {
		close(done)
		both.Wait()
	})
	h.t.Cleanup(stop)
	return func() {
		h.t.Helper()
		stop()
		h.t.Logf("stream: %d bytes written, %d read", written, read)
		if written == 0 || read != written || writeErr != nil || readErr != nil {
			h.t.Errorf("stream: %d bytes written (%v), %d read (%v)", written, writeErr, read, readErr)
		}
	}
}

// wait lets n more packets pass.
func (p *probe) wait(n uint64) {
	p.h.t.Helper()
	until := p.received.Load() + n
	for deadline := time.Now().Add(patience); p.received.Load() < until; {
		if time.Now().After(deadline) {
			p.h.t.Fatalf("%d packets were sent and %d came", p.sent.Load(), p.received.Load())
		}
		time.Sleep(time.Millisecond)
	}
}

// seen sums the packets that the program on ingress saw, by identity; 0 is what it did not identify. Left out is what the
// kernels say to each other by themselves: ARP, and IPv6 from link-local addresses.
func (h *testHost) seen(t testing.TB) map[identity.ID]uint64 {
	t.Helper()
	counters, err := OpenCounters(h.cfg.BPFFS)
	if err != nil {
		t.Fatal(err)
	}
	defer counters.Close()
	list, err := counters.List()
	if err != nil {
		t.Fatal(err)
	}
	sums := map[identity.ID]uint64{}
	for _, c := range list {
		switch {
		case c.Direction != bpf.Ingress || c.Verdict == bpf.NotIP || c.Peer() == identity.WorldIPv6:
		case c.Verdict == bpf.Identified:
			sums[c.Peer()] += c.Packets
		default:
			sums[0] += c.Packets
		}
	}
	return sums
}

// check ends the probe: each packet came, and the program saw each with the identity.
func (p *probe) check(before map[identity.ID]uint64, id identity.ID) {
	p.h.t.Helper()
	p.stop()
	after := p.h.seen(p.h.t)
	sent, received := p.sent.Load(), p.received.Load()
	identified, not := after[id]-before[id], after[0]-before[0]
	p.h.t.Logf("%d packets sent, %d received, %d identified, %d not", sent, received, identified, not)
	if sent == 0 || received != sent || identified != sent || not != 0 {
		p.h.t.Errorf("%d packets sent, %d received, %d identified as %d, %d not: want all and none", sent, received, identified, id, not)
	}
}
