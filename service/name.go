// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
)

// Name is the name of a service, the same in all clusters that share it.
type Name struct{ Namespace, Name string }

// String returns "namespace/name".
func (n Name) String() string { return n.Namespace + "/" + n.Name }

// ParseName reads "namespace/name".
func ParseName(text string) (Name, error) {
	namespace, name, ok := strings.Cut(text, "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
		return Name{}, fmt.Errorf("%q is not the name of a service: want namespace/name", text)
	}
	return Name{namespace, name}, nil
}

// Compare orders names by namespace, then name.
func (n Name) Compare(m Name) int {
	return cmp.Or(cmp.Compare(n.Namespace, m.Namespace), cmp.Compare(n.Name, m.Name))
}

// Protocol is an IANA protocol number. The zero Protocol is none that a service can have.
type Protocol uint8

// The protocols of services.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

var protocolNames = map[Protocol]string{TCP: "TCP", UDP: "UDP", SCTP: "SCTP"}

// String returns the name that Kubernetes gives the protocol.
func (p Protocol) String() string {
	if name, ok := protocolNames[p]; ok {
		return name
	}
	return fmt.Sprintf("protocol %d", uint8(p))
}

// ParseProtocol reads the name of a protocol, in any case.
func ParseProtocol(text string) (Protocol, error) {
	switch {
	case text == "TCP":
		return TCP, nil
	case text == "UDP":
		return UDP, nil
	}
	for p, name := range protocolNames {
		if strings.EqualFold(name, text) {
			return p, nil
		}
	}
	return 0, fmt.Errorf("protocol %q is none of TCP, UDP and SCTP", text)
}

// MarshalText gives the name.
func (p Protocol) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads the name of a protocol.
func (p *Protocol) UnmarshalText(text []byte) (err error) {
	*p, err = ParseProtocol(string(text))
	return err
}

// Frontend is one address at which a local service is reached. Its address is never a v4-mapped one.
type Frontend struct {
	Addr     netip.Addr
	Port     uint16
	Protocol Protocol
}

// String returns "address:port/protocol".
func (f Frontend) String() string {
	return netip.AddrPortFrom(f.Addr, f.Port).String() + "/" + f.Protocol.String()
}

// Compare orders frontends by address, port and protocol.
func (f Frontend) Compare(g Frontend) int {
	return cmp.Or(f.Addr.Compare(g.Addr), cmp.Compare(f.Port, g.Port), cmp.Compare(f.Protocol, g.Protocol))
}

// Backend is where what is sent to a frontend goes: an address of the frontend's family, and a port of its protocol.
type Backend struct {
	Addr netip.Addr
	Port uint16
}

// String returns "address:port".
func (b Backend) String() string { return netip.AddrPortFrom(b.Addr, b.Port).String() }

// Compare orders backends by address and port.
func (b Backend) Compare(c Backend) int {
	return cmp.Or(b.Addr.Compare(c.Addr), cmp.Compare(b.Port, c.Port))
}
