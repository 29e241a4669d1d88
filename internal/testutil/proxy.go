// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"errors"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Proxy is a TCP relay in front of a server, on a loopback port that stays the same, which misbehaves as told: one fault
// at a time, at any speed and delay. It starts forwarding. Its methods are safe for concurrent use; they return when the
// fault is in force.
type Proxy struct {
	addr string
	line line
	wg   sync.WaitGroup

	switching sync.Mutex // held while one fault takes another's place
	listener  *net.TCPListener
	plugs     []net.Conn // fill the listener's queue during a black hole
	accepting sync.Mutex // held while a connection is accepted, and for the length of a black hole

	mu       sync.Mutex
	changed  chan struct{}   // closed and replaced when fault or closed change
	plugged  map[string]bool // local addresses of plugs
	links    map[*link]bool
	accepted []time.Time
	target   string
	fault    fault
	closed   bool
}

type fault uint8

const (
	forwarding fault = iota
	pausing
	blackHole
	resetting
	refusing
)

// StartProxy starts a relay to target, host:port, which nothing needs to serve yet. It ends with the test.
func StartProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	p := &Proxy{
		addr: anyPort, target: target,
		changed: make(chan struct{}), links: make(map[*link]bool), plugged: make(map[string]bool),
	}
	if err := p.listen(); err != nil {
		t.Fatal(err)
	}
	p.addr = p.listener.Addr().String()
	t.Cleanup(p.stop)
	return p
}

// Addr is the host:port that the proxy serves.
func (p *Proxy) Addr() string { return p.addr }

// Endpoint is the URL of Addr, of plain HTTP.
func (p *Proxy) Endpoint() string { return "http://" + p.addr }

// Forward ends any fault. Connections that a pause or a black hole held go on, and lack nothing.
func (p *Proxy) Forward() { p.become(forwarding) }

// Pause accepts connections and passes nothing on, in either direction: a server that hangs.
func (p *Proxy) Pause() { p.become(pausing) }

// BlackHole loses everything, as a firewall that drops does: open connections are silent, even when one side closes, and
// the packets that ask for new ones are ignored. The operating system repeats those after 1 s, 3 s, 7 s and so on.
func (p *Proxy) BlackHole() { p.become(blackHole) }

// Reset breaks every connection by an RST, and each new one as soon as it is accepted.
func (p *Proxy) Reset() { p.become(resetting) }

// Refuse closes every connection, and has new ones refused: a server that is not there.
func (p *Proxy) Refuse() { p.become(refusing) }

// Cut closes every connection once; new ones are welcome.
func (p *Proxy) Cut() { p.breakAll(false) }

// SwapTarget has new connections go to another server. Open ones stay: see Cut.
func (p *Proxy) SwapTarget(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// Throttle bounds the bytes per second of each direction, of all connections together; 0 means no bound.
func (p *Proxy) Throttle(bytesPerSecond int) { p.line.throttle(bytesPerSecond) }

// Delay holds back each piece of data for d, more or less by up to jitter, without reordering; a round trip takes twice
// that. lossy is the share of the pieces that come 200 ms later still, as a lost packet does.
func (p *Proxy) Delay(d, jitter time.Duration, lossy float64) { p.line.hold(d, jitter, lossy) }

// Connects returns when each connection was accepted, since the proxy started or ForgetConnects was called. Refused and
// black-holed ones are never accepted.
func (p *Proxy) Connects() []time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]time.Time(nil), p.accepted...)
}

// ForgetConnects begins a new count.
func (p *Proxy) ForgetConnects() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.accepted = nil
}

// Open returns how many connections there are.
func (p *Proxy) Open() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

func (p *Proxy) become(f fault) {
	p.switching.Lock()
	defer p.switching.Unlock()
	p.mu.Lock()
	before := p.fault
	p.fault = f
	p.announce()
	p.mu.Unlock()
	switch {
	case f == before:
		return
	case before == refusing:
		p.relisten()
	case before == blackHole:
		p.unplug()
	}
	switch f {
	case blackHole:
		p.plug()
	case resetting:
		p.breakAll(true)
	case refusing:
		p.listener.Close()
		p.breakAll(false)
	}
}

// listen opens the port, and serves it.
func (p *Proxy) listen() error {
	l, err := net.Listen("tcp", p.addr)
	if err != nil {
		return err
	}
	listener := l.(*net.TCPListener)
	p.listener = listener
	p.wg.Go(func() { p.serve(listener) })
	return nil
}

// relisten opens the port again. Another process may hold it for an instant as the local end of a connection.
func (p *Proxy) relisten() {
	var err error
	for range 100 {
		if err = p.listen(); err == nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	panic(err)
}

// plug stops accepting, shortens the listener's queue and fills it up, whereupon the kernel ignores whoever else wants
// to connect.
func (p *Proxy) plug() {
	_ = p.listener.SetDeadline(time.Now())
	p.accepting.Lock()
	p.queue(0)
	for {
		c, err := net.DialTimeout("tcp", p.addr, 50*time.Millisecond)
		if err != nil {
			return
		}
		p.plugs = append(p.plugs, c)
		p.mu.Lock()
		p.plugged[c.LocalAddr().String()] = true
		p.mu.Unlock()
	}
}

func (p *Proxy) unplug() {
	p.queue(unix.SOMAXCONN)
	for _, c := range p.plugs {
		c.Close()
	}
	p.plugs = nil
	_ = p.listener.SetDeadline(time.Time{})
	p.accepting.Unlock()
}

func (p *Proxy) queue(length int) {
	raw, err := p.listener.SyscallConn()
	if err == nil {
		cerr := raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), length) })
		err = errors.Join(err, cerr)
	}
	if err != nil {
		panic(err)
	}
}

// serve accepts connections until the listener is closed.
func (p *Proxy) serve(l *net.TCPListener) {
	for {
		p.accepting.Lock()
		in, err := l.AcceptTCP()
		p.accepting.Unlock()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case err != nil:
			return
		default:
			p.wg.Go(func() { p.relay(in) })
		}
	}
}

// announce wakes who awaits another fault. The caller holds mu.
func (p *Proxy) announce() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// await blocks until the fault is one that pass wants, and reports whether the proxy is still open.
func (p *Proxy) await(pass func(fault) bool) bool {
	for {
		p.mu.Lock()
		f, closed, changed := p.fault, p.closed, p.changed
		p.mu.Unlock()
		if closed || pass(f) {
			return !closed
		}
		<-changed
	}
}

// moving reports that data may pass.
func moving(f fault) bool { return f != pausing && f != blackHole }

// relay passes on one connection until either side or the test ends it.
func (p *Proxy) relay(in *net.TCPConn) {
	l := &link{proxy: p, in: in}
	p.mu.Lock()
	if from := in.RemoteAddr().String(); p.plugged[from] {
		delete(p.plugged, from)
		p.mu.Unlock()
		in.Close()
		return
	}
	p.accepted = append(p.accepted, time.Now())
	p.links[l] = true
	f, closed, target := p.fault, p.closed, p.target
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.links, l)
	}()
	if closed || f == resetting || f == refusing {
		l.hangUp(f == resetting)
		return
	}
	l.run(target)
}

func (p *Proxy) breakAll(reset bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.hangUp(reset)
	}
}

func (p *Proxy) stop() {
	p.become(forwarding)
	p.mu.Lock()
	p.closed = true
	p.announce()
	p.mu.Unlock()
	p.listener.Close()
	p.breakAll(false)
	p.wg.Wait()
}
