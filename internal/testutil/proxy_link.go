// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

const (
	// pieceBytes bounds what is read at once, small enough that a throttled
	// line does not go in jerks.
	pieceBytes = 4 << 10
	// piecesUnderWay is how many pieces a delay holds back before the sender
	// is.
	piecesUnderWay = 4096
	// retransmission is what a lost packet costs: Linux's least timeout.
	retransmission = 200 * time.Millisecond
)

// link is one connection through a Proxy.
type link struct {
	proxy *Proxy
	in    *net.TCPConn

	mu     sync.Mutex
	out    *net.TCPConn // nil until the target has answered
	hungUp bool
}

// run passes data in both directions until one of them ends.
func (l *link) run(target string) {
	defer l.hangUp(false)
	// What hangs does not ask the target either.
	if !l.proxy.await(moving) {
		return
	}
	out, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	l.mu.Lock()
	l.out = out.(*net.TCPConn)
	gone := l.hungUp
	l.mu.Unlock()
	if gone {
		out.Close()
		return
	}
	var up sync.WaitGroup
	up.Go(func() { l.pass(l.in, l.out, 0) })
	l.pass(l.out, l.in, 1)
	up.Wait()
}

// hangUp closes both sides; with reset, by RST.
func (l *link) hangUp(reset bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hungUp = true
	for _, c := range []*net.TCPConn{l.in, l.out} {
		if c == nil {
			continue
		}
		if reset {
			_ = c.SetLinger(0)
		}
		c.Close()
	}
}

// piece is some data and when it arrives at the other end.
type piece struct {
	data []byte
	due  time.Time
}

// pass carries one direction. When its source ends, so does the link, as soon as the line lets that through.
func (l *link) pass(from, to *net.TCPConn, direction int) {
	pieces := make(chan piece, piecesUnderWay)
	var sending sync.WaitGroup
	sending.Go(func() {
		ok := true
		for p := range pieces {
			ok = ok && l.send(to, p, direction)
		}
		l.proxy.await(moving)
		l.hangUp(false)
	})
	var last time.Time
	for {
		data := make([]byte, pieceBytes)
		n, err := from.Read(data)
		if n > 0 {
			due := l.proxy.line.arrival()
			if due.Before(last) {
				due = last
			}
			last = due
			pieces <- piece{data[:n], due}
		}
		if err != nil {
			break
		}
	}
	close(pieces)
	sending.Wait()
}

func (l *link) send(to *net.TCPConn, p piece, direction int) bool {
	time.Sleep(time.Until(p.due))
	time.Sleep(time.Until(l.proxy.line.turn(direction, len(p.data))))
	if !l.proxy.await(moving) {
		return false
	}
	_, err := to.Write(p.data)
	if err != nil {
		l.hangUp(false)
	}
	return err == nil
}

// line is the speed and the delay of a Proxy. Safe for concurrent use.
type line struct {
	mu     sync.Mutex
	rate   int // bytes per second, 0 for any
	delay  time.Duration
	jitter time.Duration
	lossy  float64
	free   [2]time.Time // when each direction has passed on all that it took
}

func (l *line) throttle(rate int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rate = rate
}

func (l *line) hold(delay, jitter time.Duration, lossy float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delay, l.jitter, l.lossy = delay, jitter, lossy
}

// arrival returns when a piece read now has gone all the way.
func (l *line) arrival() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := l.delay + time.Duration((2*rand.Float64()-1)*float64(l.jitter))
	if rand.Float64() < l.lossy {
		d += retransmission
	}
	return time.Now().Add(max(d, 0))
}

// turn returns when n bytes may pass.
func (l *line) turn(direction, n int) time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if l.rate <= 0 {
		return now
	}
	if l.free[direction].Before(now) {
		l.free[direction] = now
	}
	l.free[direction] = l.free[direction].Add(time.Duration(n) * time.Second / time.Duration(l.rate))
	return l.free[direction]
}
