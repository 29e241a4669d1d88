// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/node"
)

const (
	// checkInterval is how often devices, routes and pins are looked at when nothing tells of a change.
	checkInterval = 25 * time.Second
	// glanceInterval is how often that of which the kernel tells nobody is glanced at: pins, and links that are detached.
	glanceInterval = time.Second
	// troubleInterval is the same while something is not as wanted.
	troubleInterval = 5 * time.Second
	// pruneInterval is the same while routes wait for their sources to be heard completely.
	pruneInterval = time.Second
	// settleTime is how long a burst of changes is waited for. After a check that took long, as where the machine has very
	// many routes of its own that never rest, it is four times as long as the check, up to settleMax.
	settleTime = 50 * time.Millisecond
	settleMax  = time.Second
)

// keeper keeps links and routes right. It is for one goroutine, on a thread in the network namespace that it serves.
type keeper struct {
	datapath *Datapath
	dir      *pinDir
	maps     mapSet
	host     *host
	programs []program
	attacher attacher
	achieved func()

	changed    chan struct{}  // of capacity one: there may be something to do
	neighbours *neighbourNews // nil without pods

	swept   bool // with routing mode none: old routes of ours are gone
	overlay int  // the index of the overlay's device; 0: there is none

	// What the last check left, so that the next one can tell what somebody else changed meanwhile.
	leftRoutes map[netip.Prefix]route
	leftPods   map[bpf.PodKey]bool
	waited     bool // programs that were to wait
}

// drifted counts what somebody else changed.
func (k *keeper) drifted(kind string, n int) { k.datapath.drifted(kind, n) }

// drifted counts what somebody else changed.
func (d *Datapath) drifted(kind string, n int) {
	if n == 0 {
		return
	}
	d.cfg.Log.Warn("somebody else changed what is weft's in the kernel", "kind", kind, "objects", n)
	d.note(func(s *Status) {
		s.Drift = maps.Clone(s.Drift)
		if s.Drift == nil {
			s.Drift = map[string]uint64{}
		}
		s.Drift[kind] += uint64(n)
	})
}

// run checks everything at once, then at every change that the kernel or the table of nodes tells of, and at intervals.
// It returns an error where waiting cannot help: the kernel lacks a feature, or this process a privilege.
func (k *keeper) run(ctx context.Context) error {
	changed := k.changed
	broken := make(chan error, 1)
	var stop func()
	defer func() {
		if stop != nil {
			stop()
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		var watchErr error
		if stop == nil {
			stop, watchErr = k.startWatch(ctx, broken)
		}
		nodes := k.datapath.cfg.Nodes.Changed()
		var pods <-chan struct{} // nil: never
		if of := k.datapath.cfg.Pods; of != nil {
			pods = of.Changed()
		}
		select { // what was told so far is about to be read
		case <-changed:
		default:
		}
		began := time.Now()
		next, err := k.check(watchErr)
		if errors.Is(err, ErrKernel) || errors.Is(err, ErrPrivileges) {
			return err
		}
		if err == nil {
			k.achieved()
		}
		pause := min(max(settleTime, 4*time.Since(began)), settleMax)
		timer.Reset(next)
		if err := k.wait(ctx, signals{timer.C, nodes, pods, changed, broken}); err != nil {
			k.datapath.cfg.Log.Warn("netlink subscription broke, will subscribe again", "err", err)
			stop()
			stop = nil
		}
		timer.Reset(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
	}
	return nil
}

// signals are what ends the wait for the next check.
type signals struct {
	due                  <-chan time.Time
	nodes, pods, changed <-chan struct{}
	broken               <-chan error
}

// wait returns when there may be something to do, with the error that broke the subscription, if that is it.
func (k *keeper) wait(ctx context.Context, on signals) error {
	glance := time.NewTicker(glanceInterval)
	defer glance.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-on.due:
			return nil
		case <-on.nodes:
			return nil
		case <-on.pods:
			return nil
		case <-on.changed:
			return nil
		case err := <-on.broken:
			return err
		case c := <-k.datapath.compareHost:
			report, err := k.verify(c.repair)
			c.reply <- comparisonResult{report, err}
		case <-glance.C:
			if !k.intact() {
				return nil
			}
		}
	}
}

// intact glances at what the kernel tells nobody about.
func (k *keeper) intact() bool {
	for name := range k.maps {
		if _, err := os.Lstat(k.dir.file(pins[name])); err != nil {
			return false
		}
	}
	for _, p := range k.programs {
		if _, err := os.Lstat(k.dir.file(pinProgramsDir, p.Name)); err != nil {
			return false
		}
	}
	waits := slices.ContainsFunc(k.programs, program.waits)
	return k.waited == waits && k.attacher.intact()
}

// startWatch subscribes to changes in the network namespace of the calling thread. stop ends the subscription and waits
// for its goroutine.
func (k *keeper) startWatch(ctx context.Context, broken chan<- error) (stop func(), err error) {
	w, err := openWatch(k.neighbours)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := w.run(ctx, k.changed); err != nil {
			broken <- err
		}
	}()
	return func() {
		cancel()
		w.Close()
		<-done
	}, nil
}

// check looks at everything and makes it right. It returns when to do so again even if nothing changes. The error joins
// all that belongs to no device or route, and stands in the status too, as does watchErr.
func (k *keeper) check(watchErr error) (time.Duration, error) {
	k.waited = slices.ContainsFunc(k.programs, program.waits)
	cfg := &k.datapath.cfg
	mapPins, mapsErr := k.maps.repin(k.dir)
	programPins, programsErr := repinPrograms(k.dir, k.programs)
	k.drifted(KindPin, mapPins)
	k.drifted(KindProgram, programPins)
	errs := []error{watchErr, mapsErr, programsErr}
	errs = append(errs, k.checkSettings(), k.checkOverlay())
	existing, err := k.host.devices()
	if err != nil {
		errs = append(errs, err)
		return k.publish(nil, nil, false, errors.Join(errs...))
	}
	names := map[uint32]string{}
	for _, dev := range existing {
		names[uint32(dev.Index)] = dev.Name
	}
	k.datapath.flows.name(names)

	// Asked before the nodes are read, so that what is complete is in what is read.
	prune := cfg.routeless() || cfg.Listed(0)
	claims, revision := k.claims()
	wantsPrefix := map[netip.Prefix]bool{}
	for _, c := range claims {
		wantsPrefix[c.Prefix] = true
	}
	routes, defaults, routesErr := k.routes(func(p netip.Prefix) bool { return wantsPrefix[p] })
	errs = append(errs, routesErr)

	devices, lost, err := k.checkDevices(existing, defaults)
	errs = append(errs, err)
	var states []RouteStatus
	waiting := false
	if routesErr == nil {
		states, waiting, err = k.checkRoutes(claims, routes, prune, names)
		errs = append(errs, err)
		k.swept = k.swept || err == nil
	}
	next, err := k.publish(devices, states, waiting, errors.Join(errs...))
	if routesErr == nil {
		k.datapath.note(func(*Status) { k.datapath.carriedNodes = revision })
	}
	if lost {
		next = min(next, troubleInterval)
	}
	return next, err
}

// checkSettings tells the programs again what somebody else has told them otherwise.
func (k *keeper) checkSettings() error {
	want := k.datapath.cfg.settings()
	have, err := k.settings()
	if err != nil || have == want {
		return err
	}
	if err := k.maps[bpf.MapConfig].Put(uint32(0), &want); err != nil {
		return explain("write settings of the programs", err)
	}
	k.drifted(KindSettings, 1)
	return nil
}

// settings is what the programs are told.
func (k *keeper) settings() (have bpf.Config, err error) {
	if err = k.maps[bpf.MapConfig].Lookup(uint32(0), &have); err != nil {
		err = explain("read settings of the programs", err)
	}
	return have, err
}

// claims are the wishes for routes, none where no routes are ours to set, and of which revision of the nodes.
func (k *keeper) claims() ([]routeClaim, node.Revision) {
	nodes, revision := k.datapath.cfg.Nodes.Snapshot()
	if k.datapath.cfg.routeless() {
		return nil, revision
	}
	return planRoutes(nodes, k.datapath.local()), revision
}

// routes reads the kernel's, unless nothing depends on them.
func (k *keeper) routes(pick func(netip.Prefix) bool) ([]kernelRoute, map[int]bool, error) {
	cfg := &k.datapath.cfg
	if cfg.routeless() && k.swept && len(cfg.Devices) > 0 {
		return nil, nil, nil
	}
	return k.host.routes(pick)
}

// choose says which devices are to have programs, and which keep those that they have.
func (k *keeper) choose(existing []device, defaults map[int]bool) (wanted, sticky []device, err error) {
	cfg := &k.datapath.cfg
	if len(cfg.Devices) > 0 {
		return k.withOverlay(namedDevices(cfg.Devices, existing), existing), nil, nil
	}
	addresses, err := k.host.addresses()
	return k.withOverlay(uplinks(existing, defaults, addresses, cfg.NodeIPs), existing), existing, err
}

// checkDevices gives the devices their programs. lost: pods are missing theirs, and are to be looked for again.
func (k *keeper) checkDevices(existing []device, defaults map[int]bool) (devices []DeviceStatus, lost bool, err error) {
	wanted, sticky, err := k.choose(existing, defaults)
	wanted, sticky, pods, podsErr := k.wantedPods(wanted, sticky, existing)
	err = errors.Join(err, podsErr)
	wanted, sticky = k.withClients(wanted, sticky, existing)
	attachErr := k.checkPods(pods, func() (err error) {
		devices, err = k.attacher.sync(wanted, sticky)
		return err
	})
	k.drifted(KindLink, k.attacher.drifted())
	uplink := func(d DeviceStatus) bool { return d.Role == roleUplink.String() }
	if err == nil && attachErr == nil && !slices.ContainsFunc(devices, uplink) {
		err = errors.New("no Ethernet device has a default route or an address of this node: name one with --devices")
	}
	if attachErr == nil && allAttached(devices) && !k.waited { // what waits is replaced later
		attachErr = dropReplaced(k.dir, k.programs)
	}
	lost = len(pods.missing) > 0 || troubled(devices, nil)
	return k.publishClients(k.publishPods(pods, devices)), lost, errors.Join(err, attachErr)
}

// allAttached reports whether every device that exists runs the present programs.
func allAttached(devices []DeviceStatus) bool {
	return !slices.ContainsFunc(devices, func(d DeviceStatus) bool {
		return slices.ContainsFunc(d.Programs, func(p ProgramStatus) bool { return !p.Attached })
	})
}

// checkRoutes makes the kernel's routes equal the claims. waiting: some of ours that nobody claims may not go yet.
func (k *keeper) checkRoutes(claims []routeClaim, have []kernelRoute, prune bool, names map[uint32]string) (
	_ []RouteStatus, waiting bool, err error,
) {
	wanted, keep := k.resolve(claims)
	changes := diffRoutes(wanted, keep, have, prune)
	failed := map[netip.Prefix]error{}
	for prefix, foreign := range changes.conflicts {
		owner := routeOwner(foreign.Protocol)
		failed[prefix] = fmt.Errorf("a route of protocol %s has this prefix already and is left alone: remove it if weft is to route there: `ip route del %v proto %s`",
			owner, prefix, owner)
	}
	drift := 0
	for _, c := range changes.set {
		if was, ok := k.leftRoutes[c.Prefix]; ok && was == c.route {
			drift++
		}
		if err := k.setRoute(c); err != nil {
			failed[c.Prefix] = fmt.Errorf("set route: %w", err)
		}
	}
	var errs []error
	for _, r := range changes.remove {
		if err := k.host.remove(r); err != nil {
			errs = append(errs, fmt.Errorf("remove route %v: %w", r.Prefix, err))
		}
	}
	k.drifted(KindRoute, drift)
	k.leftRoutes = maps.Clone(wanted)
	for prefix := range failed {
		delete(k.leftRoutes, prefix)
	}
	states := make([]RouteStatus, len(claims))
	for i, c := range claims {
		if c.Err == nil {
			c.Err = failed[c.Prefix]
		}
		states[i] = RouteStatus{Prefix: c.Prefix, Gateway: c.Gateway, Node: c.Node.String(), Installed: c.Err == nil}
		if c.Err != nil {
			states[i].Error = c.Err.Error()
			continue
		}
		states[i].Device = names[uint32(wanted[c.Prefix].IfIndex)]
	}
	return states, changes.waiting > 0, errors.Join(errs...)
}

func (k *keeper) setRoute(c routeChange) error {
	if refuse := k.datapath.cfg.refuseRoute; refuse != nil {
		if err := refuse(c.Prefix); err != nil {
			return err
		}
	}
	return k.host.set(c)
}

// resolve finds the devices of the claims that are granted, and notes an error at those that have none. keep are prefixes
// of which the kernel gave no verdict: a route of theirs stays.
func (k *keeper) resolve(claims []routeClaim) (wanted map[netip.Prefix]route, keep map[netip.Prefix]bool) {
	wanted, keep = map[netip.Prefix]route{}, map[netip.Prefix]bool{}
	type answer struct {
		index int
		err   error
	}
	answers := map[netip.Addr]answer{}
	for i := range claims {
		c := &claims[i]
		if c.Err != nil {
			continue
		}
		gateway := c.Gateway
		if c.Tunnel {
			gateway = netip.Addr{} // one for all
		}
		a, ok := answers[gateway]
		if !ok {
			if c.Tunnel {
				a.index, a.err = k.overlayIndex()
			} else {
				if a.index, a.err = k.host.directDevice(c.Gateway); a.err != nil {
					a.err = fmt.Errorf("node %w", a.err)
				}
			}
			answers[gateway] = a
		}
		if c.Err = a.err; c.Err != nil {
			keep[c.Prefix] = !errors.Is(a.err, errNotReachable)
			continue
		}
		wanted[c.Prefix] = route{Prefix: c.Prefix, Gateway: gateway, IfIndex: a.index, Metric: defaultMetric(c.Prefix)}
	}
	return wanted, keep
}

// publish puts the outcome of a check into the status, and says when to check again. A list that was not made is nil, and
// the last one stays.
func (k *keeper) publish(devices []DeviceStatus, routes []RouteStatus, waiting bool, err error) (time.Duration, error) {
	k.datapath.note(func(s *Status) {
		s.Errors = nil
		if err != nil {
			s.Errors = strings.Split(err.Error(), "\n")
		}
		if devices != nil {
			s.Devices = devices
		}
		if routes != nil {
			s.Routes = routes
		}
	})
	switch {
	case waiting:
		return pruneInterval, err
	case err != nil || troubled(devices, routes):
		return troubleInterval, err
	}
	return checkInterval, err
}

// troubled reports whether a device or route is not as wanted.
func troubled(devices []DeviceStatus, routes []RouteStatus) bool {
	for _, d := range devices {
		if d.Error != "" {
			return true
		}
		for _, p := range d.Programs {
			if p.Error != "" {
				return true
			}
		}
	}
	return slices.ContainsFunc(routes, func(r RouteStatus) bool { return r.Error != "" })
}
