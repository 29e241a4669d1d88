// SPDX-License-Identifier: Apache-2.0

package ipcache

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/weftmesh/weft/identity"
)

const (
	// StatePrefix is where clusters announce the addresses of their workloads.
	StatePrefix = "cilium/state/ip/v1"
	// DefaultSpace is the address space under [StatePrefix], the same in every cluster.
	DefaultSpace = "default"
)

// ErrNoAddress indicates an announcement that names no address and is to be passed over without complaint.
var ErrNoAddress = errors.New("announcement without an address")

// Announcement is what a cluster publishes of one address or prefix of its workloads.
type Announcement struct {
	// Prefix is masked. CIDR tells a prefix of full length from a single address.
	Prefix netip.Prefix
	CIDR   bool
	// Host is the address of the node behind which it lives; the zero Addr if unknown.
	Host       netip.Addr
	Identity   identity.ID
	EncryptKey uint8
	// Metadata is free text by which the writer recognises its own.
	Metadata                       string
	Namespace, Pod, ServiceAccount string
	NamedPorts                     NamedPorts
}

// wireAnnouncement is the JSON of an announcement, in the order in which writers emit it. Names are matched without
// regard to case.
type wireAnnouncement struct {
	IP                string
	Mask              []byte
	HostIP            string
	ID                uint32
	Key               uint8
	Metadata          string
	K8sNamespace      string     `json:",omitempty"`
	K8sPodName        string     `json:",omitempty"`
	K8sServiceAccount string     `json:",omitempty"`
	NamedPorts        NamedPorts `json:",omitempty"`
}

// ParseAnnouncement decodes value, found under key (the last part of the whole key: "10.2.1.10" or "192.0.2.16/28"), which
// must be the canonical text of what value announces. Strings of the result may alias value, which therefore must not
// change as long as they are in use. The error is [ErrNoAddress] where nothing is announced.
func ParseAnnouncement(key, value []byte) (Announcement, error) {
	var w wireAnnouncement
	if !scanAnnouncement(value, &w) {
		var err error
		if w, err = decodeAnnouncement(value); err != nil {
			return Announcement{}, err
		}
	}
	a := Announcement{
		Identity: identity.ID(w.ID), EncryptKey: w.Key, CIDR: w.Mask != nil, Metadata: w.Metadata,
		Namespace: w.K8sNamespace, Pod: w.K8sPodName, ServiceAccount: w.K8sServiceAccount, NamedPorts: w.NamedPorts,
	}
	if w.IP == "" {
		if string(key) == noAddressKey {
			return Announcement{}, ErrNoAddress
		}
		return Announcement{}, fmt.Errorf("IP address does not match key: expected %q, got none", key)
	}
	addr, err := parseAddr(w.IP)
	if err != nil {
		return Announcement{}, err
	}
	if w.HostIP != "" {
		if a.Host, err = parseAddr(w.HostIP); err != nil {
			return Announcement{}, fmt.Errorf("host: %w", err)
		}
	}
	if a.Prefix, err = prefixOf(addr, w.Mask); err != nil {
		return Announcement{}, err
	}
	var text [64]byte
	if got := a.appendKey(text[:0]); string(got) != string(key) {
		return Announcement{}, fmt.Errorf("IP address does not match key: expected %q, got %q", key, string(got))
	}
	return a, nil
}

// decodeAnnouncement is the general decoder. It stands apart so that only what comes here pays for reflection.
func decodeAnnouncement(value []byte) (wireAnnouncement, error) {
	var w wireAnnouncement
	if err := json.Unmarshal(value, &w); err != nil {
		return wireAnnouncement{}, fmt.Errorf("ip: %w", err)
	}
	return w, nil
}

// noAddressKey is how writers print a missing address into a key.
const noAddressKey = "<nil>"

func parseAddr(s string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(s)
	if err != nil || addr.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("invalid IP address: %q", s)
	}
	return addr.Unmap(), nil
}

// prefixOf joins address and mask, of which nil means the whole address. An address with bits beyond its mask is refused:
// two keys could then announce one prefix.
func prefixOf(addr netip.Addr, mask []byte) (netip.Prefix, error) {
	length := addr.BitLen()
	if mask != nil {
		ones, size := net.IPMask(mask).Size()
		if size != addr.BitLen() {
			return netip.Prefix{}, fmt.Errorf("invalid mask %x for %s", mask, addr)
		}
		length = ones
	}
	p := netip.PrefixFrom(addr, length)
	if p.Masked() != p {
		return netip.Prefix{}, fmt.Errorf("%s has bits beyond its mask", p)
	}
	return p, nil
}

func (a Announcement) appendKey(b []byte) []byte {
	if a.CIDR {
		return a.Prefix.AppendTo(b)
	}
	return a.Prefix.Addr().AppendTo(b)
}

// Key is the whole key under which the announcement is published.
func (a Announcement) Key() string {
	return string(a.appendKey([]byte(StatePrefix + "/" + DefaultSpace + "/")))
}

// Marshal encodes the announcement as peers expect it.
func (a Announcement) Marshal() ([]byte, error) {
	w := wireAnnouncement{
		IP: a.Prefix.Addr().String(), ID: uint32(a.Identity), Key: a.EncryptKey, Metadata: a.Metadata,
		K8sNamespace: a.Namespace, K8sPodName: a.Pod, K8sServiceAccount: a.ServiceAccount, NamedPorts: a.NamedPorts,
	}
	if a.CIDR {
		w.Mask = net.CIDRMask(a.Prefix.Bits(), a.Prefix.Addr().BitLen())
	}
	if a.Host.IsValid() {
		w.HostIP = a.Host.String()
	}
	value, err := json.Marshal(w)
	if err != nil {
		return nil, fmt.Errorf("ip %s: %w", a.Prefix, err)
	}
	return value, nil
}
