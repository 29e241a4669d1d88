// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	packetsPerSecond = 1000
	blockSize        = 1024
	blocksPerSecond  = 200
	// settleTime bounds how long a receiver waits for what was sent last.
	settleTime = 10 * time.Second
)

// packetStream sends numbered UDP packets from one pod to another and counts which arrive.
type packetStream struct {
	from, to podPlan
	out      net.Conn
	in       net.PacketConn
	sent     atomic.Uint64
	received atomic.Uint64 // each number counts once
}

// blockStream sends blocks over one TCP connection to a pod that sends them back, and checks what returns.
type blockStream struct {
	from, to podPlan
	listener net.Listener
	out      net.Conn
	sent     atomic.Uint64
	returned atomic.Uint64
}

// openPacketStream opens both ends in the pods' network namespaces.
func openPacketStream(ctx context.Context, from, to podPlan, port uint16) (*packetStream, error) {
	s := &packetStream{from: from, to: to}
	addr := netip.AddrPortFrom(to.IPv4, port).String()
	if err := inNetNS(to.NetNS, func() (err error) {
		s.in, err = (&net.ListenConfig{Control: makeRoom}).ListenPacket(ctx, "udp", addr)
		return err
	}); err != nil {
		return nil, err
	}
	var err error
	if s.out, err = dialIn(ctx, from.NetNS, "udp", addr); err != nil {
		return nil, errors.Join(err, s.in.Close())
	}
	return s, nil
}

// makeRoom gives a socket room for the packets of some seconds: a receiver that a busy machine keeps waiting must not lose any.
func makeRoom(_, _ string, c syscall.RawConn) error {
	const room = 4 << 20
	var err error
	if control := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, room) }); control != nil {
		return control
	}
	return os.NewSyscallError("setsockopt SO_RCVBUFFORCE", err)
}

func (s *packetStream) close() error { return errors.Join(s.out.Close(), s.in.Close()) }

// run sends until ctx ends, then waits a little for what is still on its way.
func (s *packetStream) run(ctx context.Context) error {
	var group errgroup.Group
	group.Go(s.receive)
	group.Go(func() error {
		err := paced(ctx, packetsPerSecond, func() error {
			packet := binary.BigEndian.AppendUint64(nil, s.sent.Load())
			if _, err := s.out.Write(packet); err != nil {
				return fmt.Errorf("send from %s to %s: %w", s.from.path(), s.to.path(), err)
			}
			s.sent.Add(1)
			return nil
		})
		settle, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
		defer cancel()
		_ = poll(settle, 5*time.Millisecond, func() error { return s.lost() })
		return errors.Join(err, s.in.Close())
	})
	return group.Wait()
}

func (s *packetStream) receive() error {
	seen := make(map[uint64]bool)
	buf := make([]byte, 64)
	for {
		n, _, err := s.in.ReadFrom(buf)
		switch {
		case errors.Is(err, net.ErrClosed):
			return nil
		case err != nil:
			return fmt.Errorf("receive in %s: %w", s.to.path(), err)
		case n != 8:
			return fmt.Errorf("receive in %s: a packet of %d bytes, not 8", s.to.path(), n)
		}
		if number := binary.BigEndian.Uint64(buf); !seen[number] {
			seen[number] = true
			s.received.Add(1)
		}
	}
}

// lost returns an error when not every packet has arrived.
func (s *packetStream) lost() error {
	sent, received := s.sent.Load(), s.received.Load()
	if sent != received {
		return fmt.Errorf("UDP from %s to %s: %d packets sent, %d received", s.from.path(), s.to.path(), sent, received)
	}
	return nil
}

// openBlockStream opens the connection in the pods' network namespaces, over IPv6.
func openBlockStream(ctx context.Context, from, to podPlan, port uint16) (*blockStream, error) {
	s := &blockStream{from: from, to: to}
	addr := netip.AddrPortFrom(to.IPv6, port).String()
	if err := inNetNS(to.NetNS, func() (err error) {
		s.listener, err = new(net.ListenConfig).Listen(ctx, "tcp", addr)
		return err
	}); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var err error
	if s.out, err = dialIn(ctx, from.NetNS, "tcp", addr); err != nil {
		return nil, errors.Join(err, s.listener.Close())
	}
	return s, nil
}

func (s *blockStream) close() error { return errors.Join(s.out.Close(), s.listener.Close()) }

// run sends until ctx ends, then closes its direction and reads what is still to return.
func (s *blockStream) run(ctx context.Context) error {
	var group errgroup.Group
	group.Go(s.echo)
	group.Go(s.check)
	group.Go(func() error {
		err := paced(ctx, blocksPerSecond, func() error {
			if _, err := s.out.Write(block(s.sent.Load())); err != nil {
				return fmt.Errorf("send from %s to %s: %w", s.from.path(), s.to.path(), err)
			}
			s.sent.Add(1)
			return nil
		})
		return errors.Join(err,
			s.out.SetDeadline(time.Now().Add(settleTime)),
			s.out.(*net.TCPConn).CloseWrite(),
			s.listener.Close())
	})
	return group.Wait()
}

// echo is the far end: it sends back what it gets on one connection.
func (s *blockStream) echo() error {
	conn, err := s.listener.Accept()
	if err != nil {
		return fmt.Errorf("accept in %s: %w", s.to.path(), err)
	}
	defer conn.Close()
	if _, err := io.Copy(conn, conn); err != nil {
		return fmt.Errorf("echo in %s: %w", s.to.path(), err)
	}
	return nil
}

// check reads what returns and compares each block with the one that was sent.
func (s *blockStream) check() error {
	got := make([]byte, blockSize)
	for {
		_, err := io.ReadFull(s.out, got)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("TCP from %s to %s broke after %d blocks: %w", s.from.path(), s.to.path(), s.returned.Load(), err)
		}
		number := s.returned.Load()
		if string(got) != string(block(number)) {
			return fmt.Errorf("TCP from %s to %s: block %d returned changed", s.from.path(), s.to.path(), number)
		}
		s.returned.Add(1)
	}
}

// lost returns an error when not every block has come back.
func (s *blockStream) lost() error {
	sent, returned := s.sent.Load(), s.returned.Load()
	if sent != returned {
		return fmt.Errorf("TCP from %s to %s: %d blocks sent, %d came back", s.from.path(), s.to.path(), sent, returned)
	}
	return nil
}

// block returns the content of the block with that number: the number, over and over.
func block(number uint64) []byte {
	var b []byte
	for len(b) < blockSize {
		b = binary.BigEndian.AppendUint64(b, number)
	}
	return b
}

// paced calls send at the given rate until ctx ends; after a delay it catches up, so that the rate holds over time.
func paced(ctx context.Context, perSecond int, send func() error) error {
	tick := time.NewTicker(time.Second / time.Duration(perSecond))
	defer tick.Stop()
	start, count := time.Now(), 0
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		for due := int(time.Since(start).Seconds() * float64(perSecond)); count < due; count++ {
			if err := send(); err != nil {
				return err
			}
		}
	}
}
