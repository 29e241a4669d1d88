// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
)

// Counter is how many packets the programs saw between two identities with one verdict since the map was made. It survives
// the agent.
type Counter struct {
	Source, Destination identity.ID // 0 if the verdict gives none
	Direction           bpf.Direction
	Verdict             bpf.Verdict
	Mode                bpf.Mode
	Packets             uint64 // a super-packet of GSO or GRO counts once
	Bytes               uint64 // with the Ethernet header
}

// Peer is the identity of the end that the verdict is about: the other node's.
func (c Counter) Peer() identity.ID { return peerOf(c.Direction, c.Source, c.Destination) }

func peerOf(d bpf.Direction, source, destination identity.ID) identity.ID {
	if d == bpf.Egress {
		return destination
	}
	return source
}

// Counters reads the pinned counters, whether an agent runs or not. It is safe for concurrent use.
type Counters struct {
	counters, front, missed *ebpf.Map
}

// Missed is what the counters and the ring buffer had no room for, by direction.
type Missed struct {
	Direction bpf.Direction
	// Packets and Bytes are counted here because the counters had no room for a new key.
	Packets, Bytes uint64
	// Events is how many sampled packets the ring buffer did not take.
	Events uint64
}

// OpenCounters opens the counters below a BPF file system, read-only. Close them after use.
func OpenCounters(bpffs string) (*Counters, error) {
	counters, err := openPinReadOnly(bpffs, pinCounters, bpf.MapCounters)
	if err != nil {
		return nil, err
	}
	front, err := openPinReadOnly(bpffs, pinFront, bpf.MapFront)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // which an agent of another version may not have
		return nil, errors.Join(err, counters.Close())
	}
	missed, err := openPinReadOnly(bpffs, pinMissed, bpf.MapMissed)
	if err != nil {
		return nil, errors.Join(err, counters.Close(), front.Close())
	}
	return &Counters{counters: counters, front: front, missed: missed}, nil
}

// Close closes the maps; the pins stay.
func (c *Counters) Close() error {
	return errors.Join(c.counters.Close(), c.front.Close(), c.missed.Close())
}

// List returns all counters, ordered by direction, the peer, the other end, verdict and mode.
func (c *Counters) List() ([]Counter, error) {
	sums, err := bpf.ReadCounters(c.counters, c.front)
	if err != nil {
		return nil, err
	}
	all := make([]Counter, 0, len(sums))
	for key, sum := range sums {
		all = append(all, Counter{
			Source: identity.ID(key.SrcIdentity), Destination: identity.ID(key.DstIdentity),
			Direction: key.Direction, Verdict: key.Verdict, Mode: key.Mode,
			Packets: sum.Packets, Bytes: sum.Bytes,
		})
	}
	slices.SortFunc(all, func(a, b Counter) int {
		return cmp.Or(
			cmp.Compare(a.Direction, b.Direction),
			cmp.Compare(a.Peer(), b.Peer()),
			cmp.Compare(a.Source, b.Source),
			cmp.Compare(a.Destination, b.Destination),
			cmp.Compare(a.Verdict, b.Verdict),
			cmp.Compare(a.Mode, b.Mode),
		)
	})
	return all, nil
}

// Missed returns what had no room, for both directions.
func (c *Counters) Missed() ([]Missed, error) {
	var values []bpf.Missed
	if err := c.missed.Lookup(uint32(0), &values); err != nil {
		return nil, fmt.Errorf("read missed counters: %w", err)
	}
	sum := bpf.SumMissed(values)
	var all []Missed
	for _, d := range []bpf.Direction{bpf.Ingress, bpf.Egress} {
		all = append(all, Missed{
			Direction: d, Packets: sum.Counts[d].Packets, Bytes: sum.Counts[d].Bytes, Events: sum.Events[d].Packets,
		})
	}
	return all, nil
}

// openPinReadOnly opens the pin of the map that the specs call name, after checking that it is one of that kind. Its size
// may be any.
func openPinReadOnly(bpffs, pin, name string) (*ebpf.Map, error) {
	spec, err := bpf.Load()
	if err != nil {
		return nil, err
	}
	return openPin(bpffs, pin, spec.Maps[name], &ebpf.LoadPinOptions{ReadOnly: true})
}

// openPin is openPinReadOnly for a map of any spec, and whatever it is opened for.
func openPin(bpffs, pin string, spec *ebpf.MapSpec, opts *ebpf.LoadPinOptions) (*ebpf.Map, error) {
	if err := checkBPFFS(bpffs); err != nil {
		return nil, err
	}
	path := filepath.Join(bpffs, pinDirName, pin)
	m, err := ebpf.LoadPinnedMap(path, opts)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%s does not exist: no agent has run with --bpffs %s: %w", path, bpffs, err)
	case err != nil:
		return nil, explain("open "+path, err)
	}
	want := spec.Copy()
	want.MaxEntries = m.MaxEntries()
	if err := want.Compatible(m); err != nil {
		_ = m.Close()
		return nil, fmt.Errorf("%w: %s was made by another version of weft: %w", ErrIncompatible, path, err)
	}
	return m, nil
}
