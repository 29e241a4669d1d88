// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// Names of the maps of services, in the specs and in the kernel.
const (
	MapFrontends = SockMapWeftFrontends // ServiceAddress to the number of its Service, 4 bytes
	MapServices  = SockMapWeftServices  // array of Service, in memory
	MapSlots     = SockMapWeftSlots     // array of numbers of backends, two an element, in memory
	MapBackends  = SockMapWeftBackends  // array of Backend, in memory
	MapAffinity  = SockMapWeftAffinity  // client and service to the backend that it was given last
	MapSockets   = SockMapWeftSockets   // for UDP, what a socket was given last; it lives as long as the socket
	MapPeers     = SockMapWeftPeers     // array of what sockets of TCP are connected to, by their cookies
	MapReverse   = SockMapWeftReverse   // ReverseKey to the ServiceAddress of the frontend, for UDP
	MapRefusals  = SockMapWeftRefusals  // ring buffer of Event
)

// ServicePrograms are those of cgroups: they change the addresses that sockets are connected to, and no packets.
var ServicePrograms = [...]Program{
	{Name: SockProgWeftConnect4, Attach: ebpf.AttachCGroupInet4Connect},
	{Name: SockProgWeftConnect6, Attach: ebpf.AttachCGroupInet6Connect},
	{Name: SockProgWeftSendmsg4, Attach: ebpf.AttachCGroupUDP4Sendmsg},
	{Name: SockProgWeftSendmsg6, Attach: ebpf.AttachCGroupUDP6Sendmsg},
	{Name: SockProgWeftRecvmsg4, Attach: ebpf.AttachCGroupUDP4Recvmsg},
	{Name: SockProgWeftRecvmsg6, Attach: ebpf.AttachCGroupUDP6Recvmsg},
	{Name: SockProgWeftPeer4, Attach: ebpf.AttachCgroupInet4GetPeername},
	{Name: SockProgWeftPeer6, Attach: ebpf.AttachCgroupInet6GetPeername},
}

// LoadServices returns the specs of ServicePrograms and of their maps. Where the kernel has no bpf_set_retval for these
// programs, as before Linux 6.1, setRetval is false, and what they refuse fails with EPERM instead of ECONNREFUSED.
func LoadServices(setRetval bool) (*ebpf.CollectionSpec, error) {
	spec, err := LoadSock()
	if err != nil || setRetval {
		return spec, err
	}
	for _, p := range spec.Programs {
		for i := range p.Instructions {
			ins := &p.Instructions[i]
			if ins.IsBuiltinCall() && asm.BuiltinFunc(ins.Constant) == asm.FnSetRetval {
				*ins = asm.Mov.Imm(asm.R0, 0).WithMetadata(ins.Metadata)
			}
		}
	}
	return spec, nil
}

// ServiceAddress is where a service or a backend listens: struct service_address in lib/service.h. It is comparable.
type ServiceAddress struct {
	Addr     [16]byte // network order; IPv4 in the first four bytes, the rest 0
	Port     [2]byte  // network order
	Protocol uint8    // ProtocolTCP or ProtocolUDP
	Family   Family
	Pad      uint32
}

// MakeServiceAddress is the inverse of AddrPort. A v4-mapped address is an IPv4 one, as it is to the programs.
func MakeServiceAddress(addr netip.Addr, port uint16, protocol uint8) ServiceAddress {
	a := ServiceAddress{Protocol: protocol}
	a.Family, a.Addr = split(addr.Unmap())
	binary.BigEndian.PutUint16(a.Port[:], port)
	return a
}

// AddrPort returns address and port; the zero AddrPort if the family is none.
func (a ServiceAddress) AddrPort() netip.AddrPort {
	return netip.AddrPortFrom(a.Family.addr(a.Addr), binary.BigEndian.Uint16(a.Port[:]))
}

// Service is what programs know of a service: struct service in lib/service.h. Number 0 is no service's.
type Service struct {
	Choice     uint64 // see MakeChoice; it changes at once
	Frontend   ServiceAddress
	Affinity   uint32 // seconds for which a client keeps its backend; 0: for none
	Generation uint32 // changes with the frontend; odd: it may change now
	Room       uint32 // for how many slots there is room at the place that Choice names
	Flags      uint32 // 0
	Pad        [2]uint64
	Chosen     uint64 // flows that were given a backend
	Refused    uint64 // flows for which there was none
	ToldNS     uint64 // CLOCK_MONOTONIC of the last event of a refusal
	Pad2       [5]uint64
}

// Backend is one backend of one service: struct backend in lib/service.h. Number 0 is no backend's.
type Backend struct {
	At         ServiceAddress
	Generation uint32 // changes when the service gives the backend up
	Service    uint32 // the number of the service; 0: of none
}

// ReverseKey is the key of MapReverse: struct reverse_key in lib/service.h.
type ReverseKey struct {
	Socket  uint64 // cookie
	Backend ServiceAddress
}

// AffinityKey is the key of MapAffinity: struct affinity_key in lib/service.h.
type AffinityKey struct {
	Client     uint64 // cookie of the network namespace, or hash of the address
	Service    uint32
	Generation uint32 // of the service
}

// Affinity is the value of MapAffinity: struct affinity in lib/service.h.
type Affinity struct {
	Backend    uint32
	Generation uint32 // of the backend
	UsedNS     uint64 // CLOCK_MONOTONIC
}

// MaxPeers is how many elements MapPeers has.
const MaxPeers = 1 << 20

// SocketState is the value of MapSockets: struct socket_state in lib/service.h.
type SocketState struct {
	Frontend, Backend ServiceAddress
	Service           uint32
	BackendID         uint32
	Generation        uint32 // of the backend
	Connected         uint32 // 1: Backend is the peer that the socket is connected to
}

// MaxChoice is how many slots a service can have.
const MaxChoice = 1<<24 - 1

const (
	choiceCountShift = 32
	choiceMaglev     = 1 << 56
)

// MakeChoice packs the place and number of a service's slots into Service.Choice. With maglev, they are a table in which a
// hash is looked up; else any of them is as good as any other.
func MakeChoice(place, slots uint32, maglev bool) uint64 {
	c := uint64(place) | uint64(slots&MaxChoice)<<choiceCountShift
	if maglev {
		c |= choiceMaglev
	}
	return c
}

// SplitChoice is the inverse of MakeChoice.
func SplitChoice(c uint64) (place, slots uint32, maglev bool) {
	return uint32(c), uint32(c>>choiceCountShift) & MaxChoice, c&choiceMaglev != 0
}
