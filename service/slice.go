// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/encoding/protowire"
)

// SlicePrefix, joined with cluster, namespace and name, is where a cluster publishes a slice of the backends of a service.
const SlicePrefix = "cilium/state/endpointslices/v1"

// nameLabel is the label by which a slice names its service.
const nameLabel = "kubernetes.io/service-name"

const (
	// largestSlice bounds what a value may unpack to, in bytes: a slice of Kubernetes has at most 1000 endpoints.
	largestSlice = 1 << 20
	// largestWindow bounds how far back a frame may refer; writers in Go ask for so much whatever the size of what they write.
	largestWindow = 8 << 20
)

// SliceReader decodes slices. It is safe for concurrent use, by one at a time; all who need one share it, since what it
// works in is larger than what it reads.
type SliceReader struct{ zstd *zstd.Decoder }

// NewSliceReader returns a reader of slices.
func NewSliceReader() (*SliceReader, error) {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxMemory(largestSlice), zstd.WithDecoderMaxWindow(largestWindow))
	if err != nil {
		return nil, fmt.Errorf("decoder of slices: %w", err)
	}
	return &SliceReader{d}, nil
}

// Parse decodes a slice: a zstd frame around a message of protobuf (format.md, A.10). Its service is the one that it names
// in a label. An error that wraps [ErrPartial] says what of the offer is left out.
func (r *SliceReader) Parse(value []byte) (Offer, error) {
	message, err := r.zstd.DecodeAll(value, nil)
	if err != nil {
		return Offer{}, fmt.Errorf("slice: unpack: %w", err)
	}
	return parseSlice(message)
}

// sliceMessage is what is being read of a slice.
type sliceMessage struct {
	offer       Offer
	addressType string
	ports       []NamedPort
	byState     [len(stateNames)][]netip.Addr
	strange     int // ports and addresses that cannot be used
}

// parseSlice decodes the message of a slice.
func parseSlice(message []byte) (Offer, error) {
	var m sliceMessage
	m.offer.Shared, m.offer.IncludeExternal = true, true
	if err := fields(message, m.field); err != nil {
		return Offer{}, fmt.Errorf("slice: %w", err)
	}
	o := m.offer
	switch {
	case o.Slice == "":
		return Offer{}, errors.New("slice: it has no name")
	case o.Service.Name == "":
		return Offer{}, fmt.Errorf("slice: it has no label %s, which would name its service", nameLabel)
	case m.addressType != "IPv4" && m.addressType != "IPv6":
		return Offer{}, fmt.Errorf("slice: address type %q is neither IPv4 nor IPv6", m.addressType)
	}
	for state, addrs := range m.byState {
		fit := addrs[:0]
		for _, addr := range addrs {
			if addr.Is6() == (m.addressType == "IPv6") {
				fit = append(fit, addr)
			}
		}
		m.strange += len(addrs) - len(fit)
		o.Backends = append(o.Backends, Subset{Ports: m.ports, State: State(state), Addrs: fit})
	}
	o.Backends = normalize(o.Backends)
	if m.strange > 0 {
		return o, fmt.Errorf("slice: %w: %d ports or addresses are of another kind than they should be", ErrPartial, m.strange)
	}
	return o, nil
}

var errWire = errors.New("it is no message of protobuf, or not that of a slice")

// fields calls read for each field of a message: number has the value of a varint, bytes that of a length-delimited field.
// Fields of other types are passed over.
func fields(message []byte, read func(n protowire.Number, kind protowire.Type, number uint64, bytes []byte) error) error {
	for len(message) > 0 {
		n, kind, size := protowire.ConsumeTag(message)
		if size < 0 {
			return errWire
		}
		message = message[size:]
		var (
			number uint64
			bytes  []byte
		)
		switch kind {
		case protowire.VarintType:
			number, size = protowire.ConsumeVarint(message)
		case protowire.BytesType:
			bytes, size = protowire.ConsumeBytes(message)
		default:
			size = protowire.ConsumeFieldValue(n, kind, message)
		}
		if size < 0 {
			return errWire
		}
		message = message[size:]
		if err := read(n, kind, number, bytes); err != nil {
			return err
		}
	}
	return nil
}

func (m *sliceMessage) field(n protowire.Number, kind protowire.Type, number uint64, bytes []byte) error {
	switch {
	case n == 2 && kind == protowire.VarintType:
		m.offer.ClusterID = uint32(number)
		if number>>32 != 0 {
			return fmt.Errorf("cluster ID %d has more than 32 bits", number)
		}
		return nil
	case kind != protowire.BytesType:
		return nil
	}
	switch n {
	case 1:
		m.offer.Cluster = string(bytes)
	case 3:
		m.offer.Service.Namespace = string(bytes)
	case 4:
		m.offer.Slice = string(bytes)
	case 5:
		return m.label(bytes)
	case 7:
		m.addressType = string(bytes)
	case 8:
		return m.endpoint(bytes)
	case 9:
		return m.port(bytes)
	}
	return nil
}

// label reads an entry of the map of labels.
func (m *sliceMessage) label(message []byte) error {
	var entry [2][]byte
	err := fields(message, func(n protowire.Number, kind protowire.Type, _ uint64, bytes []byte) error {
		if kind == protowire.BytesType && (n == 1 || n == 2) {
			entry[n-1] = bytes
		}
		return nil
	})
	if string(entry[0]) == nameLabel {
		m.offer.Service.Name = string(entry[1])
	}
	return err
}

// endpoint reads an endpoint. Where it does not say whether it is ready it is, and where it does not say whether it serves
// that is so if it is ready, as in Kubernetes.
func (m *sliceMessage) endpoint(message []byte) error {
	ready, serving, said := true, false, false
	var addrs [][]byte
	err := fields(message, func(n protowire.Number, kind protowire.Type, _ uint64, bytes []byte) error {
		switch {
		case n == 1 && kind == protowire.BytesType:
			addrs = append(addrs, bytes)
		case n == 2 && kind == protowire.BytesType:
			return fields(bytes, func(n protowire.Number, kind protowire.Type, number uint64, _ []byte) error {
				switch {
				case n == 1 && kind == protowire.VarintType:
					ready = number != 0
				case n == 2 && kind == protowire.VarintType:
					serving, said = number != 0, true
				}
				return nil
			})
		}
		return nil
	})
	state := Ready
	switch {
	case err != nil:
		return err
	case !ready && !(said && serving):
		return nil
	case !ready:
		state = Draining
	}
	for _, text := range addrs {
		addr, err := netip.ParseAddr(string(text))
		if err != nil || addr.Zone() != "" {
			return fmt.Errorf("invalid IP address: %q", text)
		}
		m.byState[state] = append(m.byState[state], addr.Unmap())
	}
	return nil
}

// port reads a port.
func (m *sliceMessage) port(message []byte) error {
	name, protocol, number := "", "TCP", int64(0)
	err := fields(message, func(n protowire.Number, kind protowire.Type, value uint64, bytes []byte) error {
		switch {
		case n == 1 && kind == protowire.BytesType:
			name = string(bytes)
		case n == 2 && kind == protowire.BytesType:
			protocol = string(bytes)
		case n == 3 && kind == protowire.VarintType:
			number = int64(int32(value))
		}
		return nil
	})
	if err != nil {
		return err
	}
	p, err := ParseProtocol(protocol)
	if err != nil || number < 1 || number > 65535 {
		m.strange++
		return nil
	}
	m.ports = append(m.ports, NamedPort{name, p, uint16(number)})
	return nil
}
