// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/service"
)

// sweepInterval is how often flows that are over are removed from the conntrack, and the others counted. Programs take no
// notice of them, and would make room themselves: it is for people, who want to see what there is.
const sweepInterval = 30 * time.Second

// ServiceFlow is a flow to a service whose packets are translated.
type ServiceFlow struct {
	Protocol service.Protocol
	Client   netip.AddrPort
	Frontend netip.AddrPort
	Backend  netip.AddrPort
	// Answered: the backend has sent something. Closed: both ends have ended the connection, or one has reset it.
	Answered, Closed bool
	Age              time.Duration // since its first packet
	Idle             time.Duration // since its last one, give or take a second
}

// ServiceFlows reads the pinned conntrack, whether an agent runs or not.
type ServiceFlows struct{ m *ebpf.Map }

// OpenServiceFlows opens the conntrack below a BPF file system. Close it after use. The error wraps [fs.ErrNotExist] if there is
// none, as without --service-tc.
func OpenServiceFlows(bpffs string) (*ServiceFlows, error) {
	spec, err := bpf.ConntrackSpec(DefaultServiceTCFlows)
	if err != nil {
		return nil, err
	}
	m, err := openPin(bpffs, pinServicesDir+"/"+servicePins[bpf.MapConntrack], spec, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	return &ServiceFlows{m}, nil
}

// Close closes the map; the pin stays.
func (f *ServiceFlows) Close() { _ = f.m.Close() }

// All yields the flows that are not over, in no order, until yield returns false. One that begins or ends meanwhile may be missed.
func (f *ServiceFlows) All(yield func(ServiceFlow) bool) error {
	now, err := monotonic()
	if err != nil {
		return err
	}
	return dumpConntrack(f.m, func(key *bpf.ConntrackKey, entry *bpf.Conntrack) bool {
		if key.Kind != bpf.ToBackend || entry.Over(key.Protocol, now) {
			return true
		}
		protocol := service.TCP
		if key.Protocol == bpf.ProtocolUDP {
			protocol = service.UDP
		}
		return yield(ServiceFlow{
			Protocol: protocol, Client: key.Source(), Frontend: key.Destination(), Backend: entry.Translation(*key),
			Answered: entry.Server != 0, Closed: entry.Closed(), Age: since(now, entry.SinceNS), Idle: since(now, entry.UsedNS),
		})
	})
}

// since is the time from a moment to another, 0 if that is before.
func since(now, ns uint64) time.Duration { return max(0, time.Duration(now-ns)) }

// monotonic is the clock of the programs.
func monotonic() (uint64, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return uint64(now.Nano()), nil
}

// dumpConntrack yields all entries until yield returns false. The pointers are valid during the call only. Where the map
// changes faster than it can be read, some are left out.
func dumpConntrack(m *ebpf.Map, yield func(*bpf.ConntrackKey, *bpf.Conntrack) bool) error {
	var (
		cursor ebpf.MapBatchCursor
		keys   = make([]bpf.ConntrackKey, dumpChunk)
		values = make([]bpf.Conntrack, dumpChunk)
	)
	for budget := 2 * (int(m.MaxEntries()) + dumpChunk); budget > 0; {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		end := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !end {
			return fmt.Errorf("read map %s: %w", bpf.MapConntrack, err)
		}
		for i := range n {
			if !yield(&keys[i], &values[i]) {
				return nil
			}
		}
		if end {
			return nil
		}
		budget -= n
	}
	return nil
}

// conntrackSweeper removes flows that are over. Its status is safe for concurrent use.
type conntrackSweeper struct {
	m   *ebpf.Map
	log *slog.Logger

	mu    sync.Mutex
	flows int
	err   error
}

// run sweeps at intervals until ctx ends.
func (c *conntrackSweeper) run(ctx context.Context) {
	ticker := time.NewTicker(sweepInterval)
	defer ticker.Stop()
	for {
		flows, err := c.sweep()
		if err != nil {
			c.log.Warn("sweep the flows to services", "err", err)
		}
		c.mu.Lock()
		c.flows, c.err = flows, err
		c.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// sweep removes the entries that are over, and returns how many flows are left.
func (c *conntrackSweeper) sweep() (flows int, err error) {
	now, err := monotonic()
	if err != nil {
		return 0, err
	}
	var over []bpf.ConntrackKey
	err = dumpConntrack(c.m, func(key *bpf.ConntrackKey, entry *bpf.Conntrack) bool {
		switch {
		case entry.Over(key.Protocol, now):
			over = append(over, *key)
		case key.Kind == bpf.ToBackend:
			flows++
		}
		return true
	})
	errs := []error{err}
	for i := range over {
		errs = append(errs, c.remove(&over[i], now))
	}
	return flows, errors.Join(errs...)
}

// remove removes an entry, unless its flow has begun anew.
func (c *conntrackSweeper) remove(key *bpf.ConntrackKey, now uint64) error {
	var was bpf.Conntrack
	err := c.m.LookupAndDelete(key, &was)
	switch {
	case errors.Is(err, ebpf.ErrNotSupported): // before Linux 5.14
		if err = c.m.Lookup(key, &was); err == nil && was.Over(key.Protocol, now) {
			err = c.m.Delete(key)
		}
	case err == nil && !was.Over(key.Protocol, now):
		// The next packet would find the same backend; this keeps the time at which it began.
		if err = c.m.Update(key, &was, ebpf.UpdateNoExist); errors.Is(err, ebpf.ErrKeyExist) {
			err = nil
		}
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove a flow that is over: %w", err)
	}
	return nil
}

func (c *conntrackSweeper) status() TranslationStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := TranslationStatus{Flows: c.flows, MaxFlows: int(c.m.MaxEntries()) / 2}
	if c.err != nil {
		s.LastError = oneLine(c.err)
	}
	return s
}
