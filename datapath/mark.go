// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
)

// Mark says how packets that come in are marked with the identity of their source, for filters and routing rules of the
// kernel to see. The zero Mark is none. Bits outside the mask are never written.
type Mark struct {
	Kind  bpf.Mark
	Mask  uint32 // of bpf.MarkShifted
	Shift uint8  // of bpf.MarkShifted: where bit 0 of the identity goes
}

// Validate refuses what could not be read back.
func (m Mark) Validate() error {
	switch {
	case m.Kind == bpf.MarkNone || m.Kind == bpf.MarkCilium:
		if m.Mask != 0 || m.Shift != 0 {
			return errors.New("mark: mask and shift go with a mark of their own alone")
		}
	case m.Kind != bpf.MarkShifted:
		return fmt.Errorf("mark: kind %d is unknown", m.Kind)
	case m.Mask == 0:
		return errors.New("mark: a shift needs a mask")
	case m.Shift > 31:
		return fmt.Errorf("mark: shift %d: want at most 31", m.Shift)
	case bits.TrailingZeros32(m.Mask) < int(m.Shift):
		return fmt.Errorf("mark: mask %#x has bits below the shift %d, which no identity reaches", m.Mask, m.Shift)
	}
	return nil
}

// CheckMarkCluster refuses Cilium's mark on a node of a cluster whose number collides with it: its bit 7 would stand in a
// bit of the mark by which Cilium's programs and kube-proxy know other things, and packets of the cluster would be taken
// for what they are not.
func CheckMarkCluster(m Mark, cluster identity.ClusterID) error {
	if m.Kind == bpf.MarkCilium && cluster&0x80 != 0 {
		return fmt.Errorf("the mark of Cilium cannot tell cluster %d: it has another use for the bit that the numbers 128 to 255 and "+
			"384 to 511 set: give the cluster another number, or a mark with a mask of its own", cluster)
	}
	return nil
}
