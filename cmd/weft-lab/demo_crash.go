// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
)

// Ports of the traffic under which the agent is killed.
const (
	packetPort = 9000
	blockPort  = 9001
)

// traffic is what flows between east-1 and west-1 while the agent of east-1 is killed and started again.
type traffic struct {
	out, in *packetStream // UDP over IPv4, as east-1 sees it
	blocks  *blockStream  // TCP over IPv6
	stop    context.CancelFunc
	group   *errgroup.Group
}

// startTraffic opens the streams and starts sending. The pods web send UDP and nothing else, so that the kernel's
// count of their identity is the count of these packets; the pods db carry the TCP stream.
func (d *demo) startTraffic(ctx context.Context) (*traffic, error) {
	var t traffic
	var err error
	if t.out, err = openPacketStream(ctx, d.web["east-1"], d.web["west-1"], packetPort); err != nil {
		return nil, err
	}
	if t.in, err = openPacketStream(ctx, d.web["west-1"], d.web["east-1"], packetPort); err != nil {
		return nil, errors.Join(err, t.out.close())
	}
	if t.blocks, err = openBlockStream(ctx, d.db["east-1"], d.db["west-1"], blockPort); err != nil {
		return nil, errors.Join(err, t.out.close(), t.in.close())
	}
	ctx, t.stop = context.WithCancel(ctx)
	t.group, ctx = errgroup.WithContext(ctx)
	t.group.Go(func() error { return t.out.run(ctx) })
	t.group.Go(func() error { return t.in.run(ctx) })
	t.group.Go(func() error { return t.blocks.run(ctx) })
	return &t, nil
}

// end stops sending, waits for what is on its way and closes the sockets.
func (t *traffic) end() error {
	t.stop()
	err := t.group.Wait()
	// Closing again what the streams have closed is no error to tell.
	_, _, _ = t.out.close(), t.in.close(), t.blocks.close()
	return err
}

// flowsFor lets traffic flow until another n packets have arrived in each direction.
func (t *traffic) flowsFor(ctx context.Context, n uint64) error {
	out, in := t.out.received.Load()+n, t.in.received.Load()+n
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return poll(ctx, 10*time.Millisecond, func() error {
		if t.out.received.Load() < out || t.in.received.Load() < in {
			return fmt.Errorf("UDP stands: %d packets have arrived in west-1 and %d in east-1",
				t.out.received.Load(), t.in.received.Load())
		}
		return nil
	})
}

// peerCount names one of a kernel's counts: of the packets from (ingress) or to (egress) peers with an identity.
type peerCount struct {
	id        identity.ID
	direction bpf.Direction
}

// countIdentified returns how many packets a node's kernel has identified, by peer and direction.
func (l *lab) countIdentified(node string) (map[peerCount]uint64, error) {
	counters, err := datapath.OpenCounters(l.bpffs(node))
	if err != nil {
		return nil, err
	}
	defer counters.Close()
	all, err := counters.List()
	if err != nil {
		return nil, err
	}
	counts := make(map[peerCount]uint64)
	for _, c := range all {
		if c.Verdict == bpf.Identified {
			counts[peerCount{c.Peer(), c.Direction}] += c.Packets
		}
	}
	return counts, nil
}

// showCrash kills the agent of east-1 under traffic in both directions, starts it again, and compares what was sent with
// what arrived and with what the kernel identified.
func (d *demo) showCrash(ctx context.Context) error {
	objects, err := d.readPinned(ctx, "east-1")
	if err != nil {
		return err
	}
	before, err := d.countIdentified("east-1")
	if err != nil {
		return err
	}
	t, err := d.startTraffic(ctx)
	if err != nil {
		return err
	}
	d.say("  traffic: UDP between east-1/web and west-1/web, %d packets/s each way;", packetsPerSecond)
	d.say("           TCP from east-1/db to west-1/db and back, %d KiB/s", blockSize*blocksPerSecond/1024)
	crash := d.crash(ctx, t)
	if err := errors.Join(crash, t.end()); err != nil {
		return err
	}
	after, err := d.countIdentified("east-1")
	if err != nil {
		return err
	}
	if err := d.adopted(ctx, objects); err != nil {
		return err
	}
	return d.showCounts(t, before, after)
}

// crash kills the agent while packets flow, and starts it again while they flow.
func (d *demo) crash(ctx context.Context, t *traffic) error {
	if err := t.flowsFor(ctx, packetsPerSecond/2); err != nil {
		return err
	}
	agent, ok := d.agentDaemon(d.east1).running()
	if !ok {
		return errors.New("the agent of east-1 is not running")
	}
	if err := agent.kill(ctx); err != nil {
		return err
	}
	d.done("process %d, the agent of east-1, has got SIGKILL and is gone", agent.PID)
	if err := t.flowsFor(ctx, 2*packetsPerSecond); err != nil {
		return err
	}
	d.done("%d packets later there is still no agent, and they still flow", 2*packetsPerSecond)
	start := time.Now()
	if _, err := d.agentDaemon(d.east1).start(); err != nil {
		return err
	}
	if err := d.waitAgent(ctx, d.east1); err != nil {
		return err
	}
	d.done("a new agent is ready after %.1f s", time.Since(start).Seconds())
	return t.flowsFor(ctx, packetsPerSecond/2)
}

// adopted checks that the new agent took over what the old one had pinned.
func (d *demo) adopted(ctx context.Context, before pinnedObjects) error {
	after, err := d.readPinned(ctx, "east-1")
	if err != nil {
		return err
	}
	if !maps.Equal(before, after) {
		return fmt.Errorf("the new agent made kernel objects of its own: before %v, after %v", before, after)
	}
	d.done("it has adopted what was pinned: map %d and %d links are the same kernel objects", after["ipcache"], len(after)-1)
	return nil
}

// showCounts compares what was sent with what arrived and with what the kernel of east-1 identified.
func (d *demo) showCounts(t *traffic, before, after map[peerCount]uint64) error {
	web := identity.ID(d.web["west-1"].Identity)
	for _, s := range []struct {
		stream    *packetStream
		direction bpf.Direction
	}{{t.out, bpf.Egress}, {t.in, bpf.Ingress}} {
		if err := s.stream.lost(); err != nil {
			return err
		}
		key := peerCount{web, s.direction}
		sent, identified := s.stream.sent.Load(), after[key]-before[key]
		if identified != sent {
			return fmt.Errorf("UDP from %s to %s: %d packets sent, but the kernel of east-1 identified %d",
				s.stream.from.path(), s.stream.to.path(), sent, identified)
		}
		d.done("UDP %s → %s: %d sent, %d received, %d identified: none lost, none unknown",
			s.stream.from.path(), s.stream.to.path(), sent, s.stream.received.Load(), identified)
	}
	if err := t.blocks.lost(); err != nil {
		return err
	}
	d.done("TCP %s → %s and back: %d blocks sent, %d returned unchanged, on one connection",
		t.blocks.from.path(), t.blocks.to.path(), t.blocks.sent.Load(), t.blocks.returned.Load())
	return nil
}
