// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"maps"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
)

// Names of the maps of translation, in the specs and in the kernel. Its programs share those of services but for MapSockets
// and MapReverse.
const (
	MapConntracks  = ToBackendMapWeftConntracks  // ConntrackNow and ConntrackBefore to a conntrack
	MapConntrack   = "weft_conntrack"            // ConntrackKey to Conntrack, two for each flow: an element of MapConntracks
	MapFragments   = ToBackendMapWeftFragments   // FragmentKey to Fragment
	MapTranslated  = ToBackendMapWeftTranslated  // 0 to Translated, per CPU
	MapTranslation = ToBackendMapWeftTranslation // what a CPU knows of the packet at hand; of the programs alone
)

// Places of MapConntracks: the conntrack, and the one before, whose flows are taken over where they are met.
const (
	ConntrackNow    uint32 = 0
	ConntrackBefore uint32 = 1
)

// ConntrackSpec is the spec of a conntrack with room for so many flows.
func ConntrackSpec(flows uint32) (*ebpf.MapSpec, error) {
	spec, err := LoadToBackend()
	if err != nil {
		return nil, err
	}
	inner := spec.Maps[MapConntracks].InnerMap.Copy()
	inner.Name, inner.MaxEntries = MapConntrack, 2*flows
	return inner, nil
}

// TranslationPrograms are those of devices that lead to clients: they change packets to services into packets to backends,
// and the answers. They refuse or drop what no backend can be found for, and leave the fate of all else to the next program. They
// expect devices whose frames begin with an Ethernet header.
var TranslationPrograms = [...]Program{
	{Name: ToBackendProgWeftToBackend, Attach: ebpf.AttachTCXIngress, Behind: true},
	{Name: ToClientProgWeftToClient, Attach: ebpf.AttachTCXEgress, Behind: true},
}

// DevicePrograms are all that may run at devices.
func DevicePrograms() []Program { return append(AllPrograms(), TranslationPrograms[:]...) }

// LoadTranslation returns the specs of TranslationPrograms and of their maps. The spec is the caller's to change.
func LoadTranslation() (*ebpf.CollectionSpec, error) {
	spec, err := LoadToBackend()
	if err != nil {
		return nil, err
	}
	more, err := LoadToClient()
	if err != nil {
		return nil, err
	}
	maps.Copy(spec.Programs, more.Programs)
	maps.Copy(spec.Maps, more.Maps)
	return spec, nil
}

// ConntrackKind says which way the packets of an entry go.
type ConntrackKind uint8

// The kinds.
const (
	ToBackend ConntrackKind = 0 // from the client
	ToClient  ConntrackKind = 1 // from the backend
)

// ConntrackKey is what a packet of a flow has before it is translated: struct conntrack_key in lib/conntrack.h.
type ConntrackKey struct {
	SrcIP, DstIP     [16]byte // network order; IPv4 in the first four bytes
	SrcPort, DstPort [2]byte  // network order
	Protocol         uint8    // ProtocolTCP or ProtocolUDP
	Family           Family
	Kind             ConntrackKind
	Pad              uint8
}

// Source returns the source's address and port.
func (k ConntrackKey) Source() netip.AddrPort { return addrPort(k.Family, k.SrcIP, k.SrcPort) }

// Destination returns the destination's address and port.
func (k ConntrackKey) Destination() netip.AddrPort { return addrPort(k.Family, k.DstIP, k.DstPort) }

func addrPort(family Family, ip [16]byte, port [2]byte) netip.AddrPort {
	return ServiceAddress{Addr: ip, Port: port, Family: family}.AddrPort()
}

// Seen are bits of what one end of a flow has sent.
type Seen uint8

// The bits.
const (
	SeenPacket Seen = 1
	SeenFIN    Seen = 2
	SeenRST    Seen = 4
)

// Conntrack is what a packet is changed to, and the state of its flow: struct conntrack in lib/conntrack.h.
type Conntrack struct {
	Addr       [16]byte // in place of the frontend's; of a reply, of the backend's
	Port       [2]byte  // network order
	Client     Seen
	Server     Seen
	Service    uint32 // its number, or what was its number
	Backend    uint32 // likewise
	Generation uint32 // of the backend
	UsedNS     uint64 // CLOCK_MONOTONIC of the last packet, less at most a second
	SinceNS    uint64 // CLOCK_MONOTONIC
}

// Translation returns what the address in question is changed to; key is the entry's.
func (c Conntrack) Translation(key ConntrackKey) netip.AddrPort {
	return addrPort(key.Family, c.Addr, c.Port)
}

// Closed reports whether the connection was reset, or ended by both ends.
func (c Conntrack) Closed() bool {
	return (c.Client|c.Server)&SeenRST != 0 || c.Client&c.Server&SeenFIN != 0
}

// How long a flow is remembered after its last packet: as in lib/conntrack.h.
const (
	ConntrackUnanswered = time.Minute // nobody has answered
	ConntrackUDP        = 2 * time.Minute
	ConntrackClosed     = 30 * time.Second // TCP, see Closed
	ConntrackTCP        = 6 * time.Hour
)

// Lifetime is how long the flow is remembered after its last packet.
func (c Conntrack) Lifetime(protocol uint8) time.Duration {
	switch {
	case c.Closed():
		return ConntrackClosed
	case c.Server == 0:
		return ConntrackUnanswered
	case protocol == ProtocolTCP:
		return ConntrackTCP
	}
	return ConntrackUDP
}

// Over reports whether the programs have forgotten the flow at a time of CLOCK_MONOTONIC.
func (c Conntrack) Over(protocol uint8, nowNS uint64) bool {
	return int64(nowNS-c.UsedNS) > int64(c.Lifetime(protocol))
}

// FragmentKey names a datagram that comes in fragments: struct fragment_key in lib/conntrack.h.
type FragmentKey struct {
	SrcIP, DstIP [16]byte
	ID           [4]byte // as in the packet
	Protocol     uint8   // 0 for IPv6
	Family       Family
	Kind         ConntrackKind
	Pad          uint8
}

// Fragment is where fragments behind the first go: struct fragment in lib/conntrack.h.
type Fragment struct {
	Addr    [16]byte
	SinceNS uint64 // CLOCK_MONOTONIC
}

// Translated is what one CPU did: struct translated in lib/flow.h. A packet is one socket buffer.
type Translated struct {
	Requests  uint64 // packets to a backend
	Replies   uint64 // packets back to a client
	Errors    uint64 // ICMP errors about either
	Fragments uint64 // of the packets, those behind the first of a datagram
	Begun     uint64 // flows that were given a backend
	Refused   uint64 // packets refused, as the service has no backend
	Hairpin   uint64 // packets refused, as the only backend is the client itself
	Clashes   uint64 // packets dropped, as the client's port talks to each backend already
	Failed    uint64 // packets dropped, as the kernel had no memory for it
	Answered  uint64 // of Refused and Hairpin, those whose client was told
}

// SumTranslated adds up the values of all CPUs.
func SumTranslated(perCPU []Translated) Translated {
	var sum Translated
	for _, t := range perCPU {
		sum.Requests += t.Requests
		sum.Replies += t.Replies
		sum.Errors += t.Errors
		sum.Fragments += t.Fragments
		sum.Begun += t.Begun
		sum.Refused += t.Refused
		sum.Hairpin += t.Hairpin
		sum.Clashes += t.Clashes
		sum.Failed += t.Failed
		sum.Answered += t.Answered
	}
	return sum
}
