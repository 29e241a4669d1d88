// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// abandoned is a backend that a service gave up.
type abandoned struct{ frontend, backend bpf.ServiceAddress }

// socketDestroyer ends connected UDP sockets whose backend is gone: to receive fails with ECONNABORTED then and to send with
// EDESTADDRREQ, and who uses them connects again, to another backend. No program runs when such a socket sends, so that nothing else could move it.
// TCP needs none of it: its connections end with their peers, or go on with those that only take no new ones.
//
// It sees the sockets of the network namespace in which it was opened, and needs CONFIG_INET_DIAG_DESTROY. It is for one
// goroutine, on any thread.
type socketDestroyer struct {
	reverse *ebpf.Map
	handle  *netlink.Handle
	sockets map[int]*nl.SocketHandle
}

var (
	// errNoUDPDiag and errNoDestroy indicate that the kernel does not list, or end, UDP sockets.
	errNoUDPDiag = errors.New("the kernel has no udp_diag: connected UDP sockets stay with backends that are gone: modprobe udp_diag")
	errNoDestroy = errors.New("the kernel has no CONFIG_INET_DIAG_DESTROY: connected UDP sockets stay with backends that are gone")
)

// tryDestroy ends a socket of its own. Its error wraps errNoUDPDiag or errNoDestroy where that cannot be done.
func tryDestroy() error {
	d, err := newSocketDestroyer(nil)
	if err != nil {
		return err
	}
	defer d.Close()
	own, err := net.ListenUDP("udp4", nil)
	if err != nil {
		return err
	}
	defer own.Close()
	sockets, err := d.list(unix.AF_INET)
	if err != nil {
		return err
	}
	port := own.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	for _, s := range sockets {
		if s.ID.SourcePort == port {
			return d.end(s)
		}
	}
	return fmt.Errorf("a UDP socket that has port %d is not listed", port)
}

// newSocketDestroyer opens the network namespace of the calling thread. reverse tells which sockets are ours to end.
func newSocketDestroyer(reverse *ebpf.Map) (*socketDestroyer, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_INET_DIAG)
	if err != nil {
		return nil, explain("open a socket to look for sockets", err)
	}
	if err := handle.SetSocketTimeout(hostTimeout); err != nil {
		handle.Close()
		return nil, fmt.Errorf("socket to look for sockets: %w", err)
	}
	socket, err := nl.Subscribe(unix.NETLINK_INET_DIAG)
	if err != nil {
		handle.Close()
		return nil, explain("open a socket to end sockets", err)
	}
	return &socketDestroyer{
		reverse: reverse, handle: handle,
		sockets: map[int]*nl.SocketHandle{unix.NETLINK_INET_DIAG: {Socket: socket}},
	}, nil
}

func (d *socketDestroyer) Close() {
	d.handle.Close()
	for _, s := range d.sockets {
		s.Close()
	}
}

// destroy ends the sockets that were given one of the backends by its frontend, and returns how many.
func (d *socketDestroyer) destroy(gone []abandoned) (n int, err error) {
	if len(gone) == 0 {
		return 0, nil
	}
	by := make(map[netip.AddrPort][]abandoned, len(gone))
	for _, a := range gone {
		at := a.backend.AddrPort()
		by[at] = append(by[at], a)
	}
	var errs []error
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		sockets, err := d.list(family)
		if errors.Is(err, errNoUDPDiag) {
			return n, err
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, s := range sockets {
			remote, ok := netip.AddrFromSlice(s.ID.Destination)
			if !ok || !d.ours(s, by[netip.AddrPortFrom(remote.Unmap(), s.ID.DestinationPort)]) {
				continue
			}
			switch err := d.end(s); {
			case errors.Is(err, unix.ENOENT): // it has ended by itself
			case errors.Is(err, errNoDestroy):
				return n, err
			case err != nil:
				errs = append(errs, fmt.Errorf("end a UDP socket: %w", err))
			default:
				n++
			}
		}
	}
	return n, errors.Join(errs...)
}

// list returns the UDP sockets of a family.
func (d *socketDestroyer) list(family uint8) (sockets []*netlink.Socket, err error) {
	err = dump("list UDP sockets", func() (err error) {
		sockets, err = d.handle.SocketDiagUDP(family)
		return err
	})
	if errors.Is(err, unix.ENOENT) {
		err = errNoUDPDiag
	}
	return sockets, err
}

// ours reports whether a socket got one of the backends from us.
func (d *socketDestroyer) ours(s *netlink.Socket, gone []abandoned) bool {
	cookie := uint64(s.ID.Cookie[0]) | uint64(s.ID.Cookie[1])<<32
	for _, a := range gone {
		var frontend bpf.ServiceAddress
		key := bpf.ReverseKey{Socket: cookie, Backend: a.backend}
		if d.reverse.Lookup(&key, &frontend) == nil && frontend == a.frontend {
			return true
		}
	}
	return false
}

func (d *socketDestroyer) end(s *netlink.Socket) error {
	req := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
	req.Sockets = d.sockets
	req.AddData(diagRequest{s})
	_, err := req.Execute(unix.NETLINK_INET_DIAG, 0)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = errNoDestroy
	}
	return err
}

// diagRequest is a struct inet_diag_req_v2 that names one socket.
type diagRequest struct{ socket *netlink.Socket }

func (r diagRequest) Len() int { return 56 }

func (r diagRequest) Serialize() []byte {
	b := make([]byte, r.Len())
	id := &r.socket.ID
	b[0], b[1] = r.socket.Family, unix.IPPROTO_UDP
	binary.NativeEndian.PutUint32(b[4:], 0xffffffff) // whatever its state
	binary.BigEndian.PutUint16(b[8:], id.SourcePort)
	binary.BigEndian.PutUint16(b[10:], id.DestinationPort)
	source, destination := id.Source.To16(), id.Destination.To16()
	if r.socket.Family == unix.AF_INET {
		source, destination = id.Source.To4(), id.Destination.To4()
	}
	copy(b[12:28], source)
	copy(b[28:44], destination)
	binary.NativeEndian.PutUint32(b[44:], id.Interface)
	binary.NativeEndian.PutUint32(b[48:], id.Cookie[0])
	binary.NativeEndian.PutUint32(b[52:], id.Cookie[1])
	return b
}
