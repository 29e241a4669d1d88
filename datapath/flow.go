// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
)

const (
	// flowBatch is how many flows are handed on at once, at most.
	flowBatch = 256
	// flowQueue is how many batches wait for a slow subscriber.
	flowQueue = 16
)

// Flow is one sampled packet and what its lookups said. Fields that the packet does not have are zero.
type Flow struct {
	Time                time.Time
	Device              string // "" if the device is gone
	IfIndex             uint32
	Direction           bpf.Direction // ingress: the peer is the source; egress: the destination
	Mode                bpf.Mode
	SrcIP               netip.Addr
	DstIP               netip.Addr
	Proto               uint8 // IANA number
	SrcPort             uint16
	DstPort             uint16
	TCPFlags            uint8
	Length              uint32      // bytes, with the Ethernet header
	Source, Destination identity.ID // 0 if the verdict gives none
	Verdict             bpf.Verdict // about the peer
}

// flows hands sampled packets on. It is safe for concurrent use.
type flows struct {
	mu          sync.Mutex
	subscribers map[chan []Flow]struct{}
	devices     map[uint32]string // names by index; replaced, never changed
	counts      FlowStatus
}

func newFlows() *flows { return &flows{subscribers: map[chan []Flow]struct{}{}} }

// Flows delivers flows as they come, in batches, until ctx ends, and then returns nil. deliver runs on the caller's
// goroutine and may keep the batch, but not write to it. A subscriber that is too slow misses flows; [Status] counts
// them. It is safe for concurrent use, also before and after Run.
func (d *Datapath) Flows(ctx context.Context, deliver func([]Flow)) error {
	batches := make(chan []Flow, flowQueue)
	d.flows.subscribe(batches)
	defer d.flows.unsubscribe(batches)
	for {
		select {
		case <-ctx.Done():
			return nil
		case batch := <-batches:
			deliver(batch)
		}
	}
}

func (f *flows) subscribe(c chan []Flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.subscribers[c] = struct{}{}
}

func (f *flows) unsubscribe(c chan []Flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.subscribers, c)
}

func (f *flows) status() FlowStatus {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts
}

// name tells the names of the devices by their index.
func (f *flows) name(devices map[uint32]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.devices = devices
}

// publish hands a batch to every subscriber that has room. The batch is theirs from then on.
func (f *flows) publish(batch []Flow, invalid int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts.Received += uint64(len(batch))
	f.counts.Invalid += uint64(invalid)
	for i := range batch {
		batch[i].Device = f.devices[batch[i].IfIndex]
	}
	if len(batch) == 0 {
		return
	}
	for c := range f.subscribers {
		select {
		case c <- batch:
		default:
			f.counts.Dropped += uint64(len(batch))
		}
	}
}

// read publishes what the programs put into the ring buffer until reader is closed.
func (f *flows) read(reader *ringbuf.Reader) {
	var record ringbuf.Record
	for {
		batch, invalid := make([]Flow, 0, 1), 0
		for len(batch)+invalid < flowBatch {
			if err := reader.ReadInto(&record); err != nil {
				f.publish(batch, invalid)
				if !errors.Is(err, os.ErrClosed) {
					f.mu.Lock()
					f.counts.LastError = err.Error()
					f.mu.Unlock()
				}
				return
			}
			if event, err := bpf.ParseEvent(record.RawSample); err == nil {
				batch = append(batch, makeFlow(event))
			} else {
				invalid++
			}
			if record.Remaining == 0 {
				break
			}
		}
		f.publish(batch, invalid)
	}
}

// makeFlow returns what an event says, its time by the clock of the wall.
func makeFlow(e bpf.Event) Flow {
	return Flow{
		Time:        wallTime(e.KtimeNS),
		IfIndex:     e.IfIndex,
		Direction:   e.Direction,
		SrcIP:       e.Source(),
		DstIP:       e.Destination(),
		Proto:       e.Protocol,
		SrcPort:     e.SrcPort,
		DstPort:     e.DstPort,
		TCPFlags:    e.TCPFlags,
		Length:      e.Length,
		Source:      identity.ID(e.SrcIdentity),
		Destination: identity.ID(e.DstIdentity),
		Mode:        e.Mode,
		Verdict:     e.Verdict,
	}
}

// Peer is the identity of the end that the verdict is about.
func (f Flow) Peer() identity.ID { return peerOf(f.Direction, f.Source, f.Destination) }

// wallTime converts nanoseconds of CLOCK_MONOTONIC.
func wallTime(monotonic uint64) time.Time {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return time.Time{}
	}
	return time.Now().Round(0).Add(-time.Duration(now.Nano() - int64(monotonic)))
}
