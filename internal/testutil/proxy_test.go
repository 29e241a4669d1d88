// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"
)

// echo serves connections that answer what they are sent, after a greeting,
// and returns its address.
func echo(t *testing.T, greeting string) string {
	l, err := net.Listen("tcp", anyPort)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.WriteString(c, greeting)
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	return l.Addr().String()
}

func dialProxy(t *testing.T, p *Proxy) net.Conn {
	t.Helper()
	c, err := net.DialTimeout("tcp", p.Addr(), 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// says reads as much as want from c, and compares.
func says(c net.Conn, want string, within time.Duration) error {
	_ = c.SetReadDeadline(time.Now().Add(within))
	got := make([]byte, len(want))
	n, err := io.ReadFull(c, got)
	if err == nil && string(got) != want {
		err = fmt.Errorf("it says %q, want %q", got[:n], want)
	}
	return err
}

func mustSay(t *testing.T, c net.Conn, want string) {
	t.Helper()
	if err := says(c, want, 5*time.Second); err != nil {
		t.Error(err)
	}
}

func send(t *testing.T, c net.Conn, what string) {
	t.Helper()
	if _, err := io.WriteString(c, what); err != nil {
		t.Error(err)
	}
}

func timedOut(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}

func TestProxyForwardsAndSwaps(t *testing.T) {
	p := StartProxy(t, echo(t, "one"))
	c := dialProxy(t, p)
	mustSay(t, c, "one")
	p.SwapTarget(echo(t, "two"))
	send(t, c, "still")
	mustSay(t, c, "still")
	mustSay(t, dialProxy(t, p), "two")
	p.Cut()
	if err := says(c, "x", 5*time.Second); !errors.Is(err, io.EOF) {
		t.Errorf("after the cut: %v", err)
	}
	mustSay(t, dialProxy(t, p), "two")
	if n := len(p.Connects()); n != 3 {
		t.Errorf("%d connections are counted, of 3", n)
	}
}

func TestProxyPauses(t *testing.T) {
	p := StartProxy(t, echo(t, "hello"))
	old := dialProxy(t, p)
	mustSay(t, old, "hello")
	p.Pause()
	send(t, old, "wait")
	fresh := dialProxy(t, p)
	for _, c := range []net.Conn{old, fresh} {
		if err := says(c, "x", 50*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("during the pause: %v", err)
		}
	}
	p.Forward()
	mustSay(t, old, "wait")
	mustSay(t, fresh, "hello")
}

func TestProxyBlackHole(t *testing.T) {
	p := StartProxy(t, echo(t, "hello"))
	c := dialProxy(t, p)
	mustSay(t, c, "hello")
	p.BlackHole()
	send(t, c, "lost?")
	if err := says(c, "x", 50*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("in the black hole: %v", err)
	}
	for range 3 {
		if _, err := net.DialTimeout("tcp", p.Addr(), 50*time.Millisecond); !timedOut(err) {
			t.Errorf("a connection into the black hole: %v", err)
		}
	}
	p.Forward()
	mustSay(t, c, "lost?")
	mustSay(t, dialProxy(t, p), "hello")
	if n := len(p.Connects()); n < 2 {
		t.Errorf("%d connections are counted", n)
	}
}

func TestProxyResetsAndRefuses(t *testing.T) {
	p := StartProxy(t, echo(t, "hello"))
	c := dialProxy(t, p)
	mustSay(t, c, "hello")
	p.Reset()
	if err := says(c, "x", 5*time.Second); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after the reset: %v", err)
	}
	// A new one is reset as soon as it is accepted, which its dial may be told already.
	c, err := net.Dial("tcp", p.Addr())
	if err == nil {
		err = says(c, "x", 5*time.Second)
		c.Close()
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a new connection after the reset: %v", err)
	}
	p.Forward()
	c = dialProxy(t, p)
	mustSay(t, c, "hello")
	p.Refuse()
	if err := says(c, "x", 5*time.Second); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after the refusal: %v", err)
	}
	if _, err := net.Dial("tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a refused connection: %v", err)
	}
	p.Forward()
	mustSay(t, dialProxy(t, p), "hello")
	Eventually(t, 5*time.Second, func() error {
		if n := p.Open(); n != 1 {
			return fmt.Errorf("%d connections are open, of 1", n)
		}
		return nil
	})
}

func TestProxyThrottlesAndDelays(t *testing.T) {
	p := StartProxy(t, echo(t, ""))
	c := dialProxy(t, p)
	took := func(n int) time.Duration {
		begin := time.Now()
		text := string(make([]byte, n))
		go func() { _, _ = io.WriteString(c, text) }()
		mustSay(t, c, text)
		return time.Since(begin)
	}
	p.Delay(50*time.Millisecond, 10*time.Millisecond, 0)
	if d := took(1); d < 80*time.Millisecond || d > time.Second {
		t.Errorf("a round trip of 100 ms ± 20 ms took %v", d)
	}
	p.Delay(0, 0, 1)
	if d := took(1); d < 2*retransmission {
		t.Errorf("a round trip that loses all its packets took %v", d)
	}
	p.Delay(0, 0, 0)
	p.Throttle(100_000)
	if d := took(20_000); d < 180*time.Millisecond || d > 2*time.Second {
		t.Errorf("20 kB at 100 kB/s took %v", d)
	}
}
