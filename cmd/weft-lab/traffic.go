// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
)

const (
	servicePort    = 8080
	requestTimeout = 10 * time.Second
)

// server answers over TCP and UDP who it is and whom it sees.
type server struct {
	name      string
	listeners []net.Listener
	packets   []net.PacketConn
}

// listen opens a server's sockets, both protocols on each address, in the network namespace of the caller's thread.
func (s *server) listen(addrs ...netip.Addr) error {
	for _, addr := range addrs {
		at := netip.AddrPortFrom(addr, servicePort).String()
		l, err := net.Listen("tcp", at)
		if err != nil {
			return errors.Join(err, s.close())
		}
		s.listeners = append(s.listeners, l)
		p, err := net.ListenPacket("udp", at)
		if err != nil {
			return errors.Join(err, s.close())
		}
		s.packets = append(s.packets, p)
	}
	return nil
}

func (s *server) close() error {
	var errs []error
	for _, l := range s.listeners {
		errs = append(errs, l.Close())
	}
	for _, p := range s.packets {
		errs = append(errs, p.Close())
	}
	s.listeners, s.packets = nil, nil
	return errors.Join(errs...)
}

// serve answers until ctx ends, and closes the sockets. One request at a time is enough for what the lab asks.
func (s *server) serve(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, l := range s.listeners {
		group.Go(func() error { return s.serveTCP(ctx, l) })
	}
	for _, p := range s.packets {
		group.Go(func() error { return s.serveUDP(ctx, p) })
	}
	group.Go(func() error {
		<-ctx.Done()
		return s.close()
	})
	return group.Wait()
}

func (s *server) answer(from net.Addr) string {
	return fmt.Sprintf("%s: hello %s\n", s.name, netip.MustParseAddrPort(from.String()).Addr())
}

func (s *server) serveTCP(ctx context.Context, l net.Listener) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return unlessDone(ctx, err)
		}
		if err := conn.SetDeadline(time.Now().Add(requestTimeout)); err == nil {
			// A client that is gone before its answer is not the server's trouble.
			if _, err := bufio.NewReader(conn).ReadString('\n'); err == nil {
				fmt.Fprint(conn, s.answer(conn.RemoteAddr()))
			}
		}
		conn.Close()
	}
}

func (s *server) serveUDP(ctx context.Context, p net.PacketConn) error {
	buf := make([]byte, 2048)
	for {
		_, from, err := p.ReadFrom(buf)
		if err != nil {
			return unlessDone(ctx, err)
		}
		if _, err := p.WriteTo([]byte(s.answer(from)), from); err != nil {
			return unlessDone(ctx, err)
		}
	}
}

// unlessDone returns nil for the error of a socket that was closed because ctx has ended.
func unlessDone(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// request sends one request, "tcp" or "udp", from the network namespace of the caller's thread and returns the answer.
func request(ctx context.Context, protocol string, to netip.AddrPort) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, protocol, to.String())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(conn, "hello"); err != nil {
		return "", err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return "", fmt.Errorf("no answer from %s over %s: %w", to, protocol, err)
	}
	return strings.TrimSpace(answer), nil
}

func newServeCommand(env *environment) *cobra.Command {
	s := &server{}
	cmd := &cobra.Command{
		Use:    "serve",
		Short:  "Answer requests over TCP and UDP on port 8080 until stopped (for `weft-lab exec`)",
		Args:   cobra.NoArgs,
		Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.listen(netip.IPv6Unspecified()); err != nil {
				return err
			}
			fmt.Fprintf(env.stdout, "%s answers on port %d\n", s.name, servicePort)
			return s.serve(cmd.Context())
		},
	}
	cmd.Flags().StringVar(&s.name, "name", "server", "how the server calls itself")
	return cmd
}

func newRequestCommand(env *environment) *cobra.Command {
	var every time.Duration
	cmd := &cobra.Command{
		Use:    "request tcp|udp ADDRESS[:PORT]",
		Short:  "Send a request to a server of `weft-lab serve`, or one after the other (for `weft-lab exec`)",
		Args:   cobra.ExactArgs(2),
		Hidden: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] != "tcp" && args[0] != "udp" {
				return usage(fmt.Errorf("protocol %q: give tcp or udp", args[0]))
			}
			to, err := parseTarget(args[1])
			if err != nil {
				return usage(err)
			}
			if every > 0 {
				return requestEvery(cmd.Context(), env.stdout, args[0], to, every)
			}
			answer, err := request(cmd.Context(), args[0], to)
			if err != nil {
				return err
			}
			fmt.Fprintln(env.stdout, answer)
			return nil
		},
	}
	cmd.Flags().DurationVar(&every, "every", 0,
		"send a request, each from a socket of its own, so often until stopped, and tell of each; ends 1 if one failed")
	return cmd
}

// parseTarget reads an address with or without a port, which is that of a server unless given.
func parseTarget(text string) (netip.AddrPort, error) {
	if to, err := netip.ParseAddrPort(text); err == nil {
		return to, nil
	}
	addr, err := netip.ParseAddr(text)
	return netip.AddrPortFrom(addr, servicePort), err
}

// failedPrefix begins the line of a request that was not answered.
const failedPrefix = "failed: "

// requestEvery sends one request after the other until ctx ends, the last of which it lets end, and writes a line for each.
func requestEvery(ctx context.Context, w io.Writer, protocol string, to netip.AddrPort, every time.Duration) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	failed := 0
	for {
		answer, err := request(context.WithoutCancel(ctx), protocol, to)
		if err != nil {
			failed++
			answer = failedPrefix + err.Error()
		}
		if _, err := fmt.Fprintln(w, answer); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			if failed > 0 {
				return fmt.Errorf("%d requests failed", failed)
			}
			return nil
		case <-tick.C:
		}
	}
}
