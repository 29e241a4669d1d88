// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/datapath"
)

// someAnswers is how many answers tell that something goes on.
const someAnswers = 50

// backends are the servers of the pods web of a cluster, which answer until they are stopped.
type backends struct {
	stop  context.CancelFunc
	group errgroup.Group
}

func startBackends(ctx context.Context, c clusterPlan) (*backends, error) {
	var b backends
	ctx, b.stop = context.WithCancel(ctx)
	for _, p := range c.webPods() {
		s := &server{name: p.path()}
		if err := inNetNS(p.NetNS, func() error { return s.listen(p.IPv4, p.IPv6) }); err != nil {
			return nil, errors.Join(err, b.end())
		}
		b.group.Go(func() error { return s.serve(ctx) })
	}
	return &b, nil
}

// end stops the servers. It may be called again.
func (b *backends) end() error {
	b.stop()
	return b.group.Wait()
}

// showService asks a global service of east while its backends there go and return.
func (d *demo) showService(ctx context.Context) (err error) {
	east, west := d.Clusters[0], d.Clusters[1]
	ours, err := startBackends(ctx, east)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ours.end()) }()
	theirs, err := startBackends(ctx, west)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, theirs.end()) }()
	if err := d.showServiceView(ctx); err != nil {
		return err
	}
	var askers []*asker
	defer func() {
		for _, a := range askers {
			err = errors.Join(err, a.stop())
		}
	}()
	from := d.db["east-1"]
	for _, client := range []struct {
		protocol string
		addr     netip.Addr
	}{{"tcp", east.Service4}, {"tcp", east.Service6}, {"udp", east.Service4}, {"udp", east.Service6}} {
		a, err := d.ask(from, client.protocol, netip.AddrPortFrom(client.addr, frontPort))
		if err != nil {
			return err
		}
		askers = append(askers, a)
	}
	d.say("  clients: in %s, TCP and UDP, IPv4 and IPv6, one request each %s", from.path(), askEvery)
	if err := d.moveBackends(ctx, askers, ours); err != nil {
		return err
	}
	return d.returnBackends(ctx, askers)
}

func (d *demo) showServiceView(ctx context.Context) error {
	d.command("weft-lab exec east-1 weft service list")
	text, err := d.outputIn(ctx, d.east1, d.weft, "service", "list")
	if err != nil {
		return err
	}
	d.quote(text)
	return nil
}

// moveBackends takes east's backends away, first from the service, then altogether.
func (d *demo) moveBackends(ctx context.Context, askers []*asker, ours *backends) error {
	east := d.Clusters[0]
	if err := answered(ctx, askers, "east", someAnswers); err != nil {
		return err
	}
	d.done("%d answers, all from east: with affinity local, the own backends come first", totalOf(askers))
	for _, a := range askers {
		if n := a.from("west"); n > 0 {
			return fmt.Errorf("%d answers came from west, although east has backends", n)
		}
	}
	file := east.web()
	file.Backends = nil
	if err := d.switchBackends(ctx, file, d.Clusters[1]); err != nil {
		return err
	}
	// Each client sends one request at a time: when one has been answered by west, none is on its way to east.
	if err := answered(ctx, askers, "west", someAnswers); err != nil {
		return err
	}
	if err := ours.end(); err != nil {
		return err
	}
	if err := answered(ctx, askers, "west", someAnswers); err != nil {
		return err
	}
	d.done("the servers of east are killed, and the requests go on: west answers")
	return nil
}

// returnBackends brings east's backends back, and tells what became of the requests.
func (d *demo) returnBackends(ctx context.Context, askers []*asker) (err error) {
	east := d.Clusters[0]
	again, err := startBackends(ctx, east)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, again.end()) }()
	if err := d.switchBackends(ctx, east.web(), east); err != nil {
		return err
	}
	if err := answered(ctx, askers, "east", someAnswers); err != nil {
		return err
	}
	for _, a := range askers {
		if err := a.stop(); err != nil {
			return err
		}
	}
	answers := map[string]int{}
	for _, a := range askers {
		for _, c := range d.Clusters {
			answers[c.Name] += a.from(c.Name)
		}
	}
	d.done("east is back. %d requests: %d answered by east, %d by west, none refused, none lost",
		totalOf(askers), answers["east"], answers["west"])
	return nil
}

// switchBackends declares the service of east anew, and measures when the kernel of east-1 leads to the pods of a cluster.
func (d *demo) switchBackends(ctx context.Context, s serviceFile, to clusterPlan) error {
	east := d.Clusters[0]
	start := time.Now()
	if err := d.declareService(east, s); err != nil {
		return err
	}
	d.say("  services/east/web.yaml now has %d backends", len(s.Backends))
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := poll(ctx, time.Millisecond, func() error {
		for _, frontend := range []netip.Addr{east.Service4, east.Service6} {
			if err := d.leads(d.east1, frontend, to); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return fmt.Errorf("the kernel of east-1 has not followed: %w", err)
	}
	d.done("the kernel of east-1 leads to %s after %.0f ms", to.Name, milliseconds(time.Since(start)))
	return nil
}

// leads checks that the kernel of a node gives those who ask a service the pods web of a cluster, all of them and no others,
// over TCP and UDP.
func (l *lab) leads(n nodePlan, frontend netip.Addr, to clusterPlan) error {
	var want []netip.Addr
	for _, p := range to.webPods() {
		addr := p.IPv4
		if frontend.Is6() {
			addr = p.IPv6
		}
		want = append(want, addr)
	}
	return l.leadsTo(n, frontend, want)
}

// leadsTo checks that the kernel of a node has those backends at a frontend, over TCP and UDP.
func (l *lab) leadsTo(n nodePlan, frontend netip.Addr, want []netip.Addr) error {
	table, err := datapath.OpenServices(l.bpffs(n.Name))
	if err != nil {
		return err
	}
	defer table.Close()
	list, err := table.List()
	if err != nil {
		return err
	}
	found := 0
	for _, s := range list {
		if s.Frontend.Addr != frontend {
			continue
		}
		found++
		var have []netip.Addr
		for _, b := range s.Backends {
			have = append(have, b.Addr)
		}
		if !slices.Equal(have, want) {
			return fmt.Errorf("%s leads to %v there, not to %v", frontend, have, want)
		}
	}
	if found != 2 {
		return fmt.Errorf("%s is there for %d protocols, not 2", frontend, found)
	}
	return nil
}

func totalOf(askers []*asker) int {
	n := 0
	for _, a := range askers {
		n += a.all()
	}
	return n
}
