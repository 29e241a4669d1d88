// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/encoding/protowire"
)

// Slice is what one cluster publishes of a part of the backends of one service: those of one address family that are reached
// at the same ports.
type Slice struct {
	Cluster   string
	ClusterID uint32
	Service   Name
	Name      string // of the slice, alone in the service's namespace
	Endpoints []SliceEndpoint
	Ports     []NamedPort
}

// SliceEndpoint is one address of a [Slice].
type SliceEndpoint struct {
	Addr                        netip.Addr
	Ready, Serving, Terminating bool
	Hostname, Node, Zone        string // empty: not known
	ForZones                    []string
}

// SliceWriter encodes slices. It is safe for concurrent use, by one at a time.
type SliceWriter struct{ zstd *zstd.Encoder }

// NewSliceWriter returns a writer of slices.
func NewSliceWriter() (*SliceWriter, error) {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithLowerEncoderMem(true),
		zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(largestSlice))
	if err != nil {
		return nil, fmt.Errorf("encoder of slices: %w", err)
	}
	return &SliceWriter{e}, nil
}

// Marshal encodes a slice as [SliceReader] decodes it. Alike slices are alike byte for byte.
func (w *SliceWriter) Marshal(s *Slice) ([]byte, error) {
	if s.Name == "" || s.Service.Name == "" || len(s.Endpoints) == 0 {
		return nil, errors.New("slice: it needs a name, a service and endpoints")
	}
	message := s.message()
	if len(message) > largestSlice {
		return nil, fmt.Errorf("slice: it takes %d bytes, and readers take %d", len(message), largestSlice)
	}
	return w.zstd.EncodeAll(message, nil), nil
}

// message is the message of protobuf (format.md, A.10). What it names is written also where it is empty or false, as Kubernetes
// does; what is not known is left out.
func (s *Slice) message() []byte {
	var m []byte
	m = appendText(m, 1, s.Cluster)
	m = appendNumber(m, 2, uint64(s.ClusterID))
	m = appendText(m, 3, s.Service.Namespace)
	m = appendText(m, 4, s.Name)
	m = appendMessage(m, 5, appendText(appendText(nil, 1, nameLabel), 2, s.Service.Name))
	addressType := "IPv4"
	if s.Endpoints[0].Addr.Is6() {
		addressType = "IPv6"
	}
	m = appendText(m, 7, addressType)
	for i := range s.Endpoints {
		m = appendMessage(m, 8, s.Endpoints[i].message())
	}
	for _, p := range s.Ports {
		m = appendMessage(m, 9, appendNumber(appendText(appendText(nil, 1, p.Name), 2, p.Protocol.String()), 3, uint64(p.Port)))
	}
	return m
}

func (e *SliceEndpoint) message() []byte {
	m := appendText(nil, 1, e.Addr.String())
	conditions := appendNumber(nil, 1, protowire.EncodeBool(e.Ready))
	conditions = appendNumber(conditions, 2, protowire.EncodeBool(e.Serving))
	m = appendMessage(m, 2, appendNumber(conditions, 3, protowire.EncodeBool(e.Terminating)))
	for _, known := range []struct {
		n    protowire.Number
		text string
	}{{3, e.Hostname}, {6, e.Node}, {7, e.Zone}} {
		if known.text != "" {
			m = appendText(m, known.n, known.text)
		}
	}
	var hints []byte
	for _, zone := range e.ForZones {
		hints = appendMessage(hints, 1, appendText(nil, 1, zone))
	}
	if len(hints) > 0 {
		m = appendMessage(m, 8, hints)
	}
	return m
}

func appendText(m []byte, n protowire.Number, text string) []byte {
	return protowire.AppendString(protowire.AppendTag(m, n, protowire.BytesType), text)
}

func appendNumber(m []byte, n protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(m, n, protowire.VarintType), v)
}

func appendMessage(m []byte, n protowire.Number, inner []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(m, n, protowire.BytesType), inner)
}
