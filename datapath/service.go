// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf/ringbuf"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/service"
)

// ServiceStatus is the state of the services in the kernel. The counts begin with the agent, but for Chosen and Refused, which
// begin with what the frontends that it found have counted.
type ServiceStatus struct {
	Cgroup   string          `json:"cgroup"`
	Programs []ProgramStatus `json:"programs,omitempty"`
	// AttachError is why a program does not run, or has no pin; "" if all do and have.
	AttachError string `json:"attachError,omitempty"`

	Frontends    int `json:"frontends"`
	MaxFrontends int `json:"maxFrontends"`
	// Backends counts a backend once for each frontend that leads to it.
	Backends    int `json:"backends"`
	MaxBackends int `json:"maxBackends"`
	Slots       int `json:"slots"` // with the room to grow
	MaxSlots    int `json:"maxSlots"`
	// Affinities is how many clients keep a backend, at most ten seconds ago. Where there is no room, the oldest go.
	Affinities    int `json:"affinities"`
	MaxAffinities int `json:"maxAffinities"`
	// Full: there is no room for a frontend or a backend. An alarm.
	Full bool `json:"full"`
	// Pending is how many frontends are not as they should be; they are tried again.
	Pending int `json:"pending"`
	// Unclaimed is how many frontends, and backends of others, were found in the kernel that nobody has claimed yet.
	Unclaimed int `json:"unclaimed"`

	Chosen  uint64 `json:"chosen"`  // flows that were given a backend
	Refused uint64 `json:"refused"` // flows for which there was none

	Written   uint64 `json:"written"`   // words of memory that programs read
	Calls     uint64 `json:"calls"`     // to the kernel, for frontends
	Rebuilds  uint64 `json:"rebuilds"`  // changes of several backends of a service at once, or by Maglev
	Failures  uint64 `json:"failures"`  // changes that could not be made
	Destroyed uint64 `json:"destroyed"` // connected UDP sockets whose backend was gone
	Drift     uint64 `json:"drift"`     // frontends that somebody else changed
	// VerifiedAt is when the kernel was last compared with what is wanted as a whole.
	VerifiedAt time.Time `json:"verifiedAt,omitzero"`

	// LastError is the last failure of what is not right yet; "" if all is. DestroyError is why sockets whose backend was gone
	// could not be looked for or destroyed the last time.
	LastError    string    `json:"lastError,omitempty"`
	LastErrorAt  time.Time `json:"lastErrorAt,omitzero"`
	DestroyError string    `json:"destroyError,omitempty"`
	// Namespaces is in how many network namespaces they are looked for, our own included, as of the last time.
	Namespaces int `json:"namespaces"`

	// Translation is nil where packets that come from no local socket do not reach services.
	Translation *TranslationStatus `json:"translation,omitempty"`
}

// Problems are sentences about what is not well.
func (s *ServiceStatus) Problems() []string {
	var all []string
	if s.Pending > 0 {
		all = append(all, fmt.Sprintf("services: %d frontends are not as they should be: %s", s.Pending, s.LastError))
	}
	if s.AttachError != "" {
		all = append(all, "services: "+s.AttachError)
	}
	if s.DestroyError != "" {
		all = append(all, "services: "+s.DestroyError)
	}
	if t := s.Translation; t != nil && t.LastError != "" {
		all = append(all, "services: "+t.LastError)
	}
	if t := s.Translation; t != nil && t.full() {
		all = append(all, fmt.Sprintf("services: there is room for %d flows of packets, and there are %d: those that were silent for longest are forgotten: "+
			"restart with a larger --service-tc-flows", t.MaxFlows, t.Flows))
	}
	return all
}

// attached: all programs run.
func (s *ServiceStatus) attached() bool {
	return len(s.Programs) > 0 && s.AttachError == "" &&
		!slices.ContainsFunc(s.Programs, func(p ProgramStatus) bool { return !p.Attached })
}

// services is everything about services that runs. A nil one is that of a node without.
type services struct {
	maps       *serviceMaps
	programs   []program
	attacher   *serviceAttacher
	grace      *gracePeriod
	ender      *socketEnder
	refusals   *ringbuf.Reader
	reconciler *serviceReconciler
}

// openServices takes over or makes the maps and programs of services, if they are wanted. It attaches nothing.
func (d *Datapath) openServices(dir *pinDir) (_ *services, err error) {
	if d.cfg.Services == nil {
		return nil, nil
	}
	s := &services{}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	cgroup := d.cfg.ServiceCgroup
	if cgroup == "" {
		if cgroup, err = DefaultCgroup(); err != nil {
			return nil, err
		}
	}
	if file, _, err := openCgroup(cgroup); err != nil {
		return nil, err
	} else if err := file.Close(); err != nil {
		return nil, err
	}
	if err := ownDirectory(dir.file(pinServicesDir)); err != nil {
		return nil, err
	}
	spec, err := bpf.LoadServices(refusesProperly())
	if err != nil {
		return nil, err
	}
	var adopted bool
	if s.maps, adopted, err = openServiceMaps(dir, spec.Maps, d.cfg.Log); err != nil {
		return nil, err
	}
	if s.programs, err = openServicePrograms(dir, spec, s.maps.mapSet); err != nil {
		return nil, err
	}
	if s.grace, err = newGracePeriod(); err != nil {
		return nil, err
	}
	if s.ender, err = newSocketEnder(s.maps.mapSet[bpf.MapReverse], d.cfg.ServiceNetNSDir); err != nil {
		return nil, err
	}
	if s.refusals, err = ringbuf.NewReader(s.maps.mapSet[bpf.MapRefusals]); err != nil {
		return nil, explain("read refusals", err)
	}
	s.attacher = newServiceAttacher(dir, cgroup, s.programs)
	runs, err := s.attacher.attached()
	if err != nil {
		return nil, err
	}
	s.reconciler = &serviceReconciler{
		source:   d.cfg.Services,
		table:    newServiceTable(s.maps.serviceMemory, kernelFrontends{s.maps.mapSet[bpf.MapFrontends]}, s.grace.Wait),
		attacher: s.attacher, listed: d.cfg.ServicesListed, abandoned: s.ender.add, drifted: d.drifted,
		affinities: affinityMap{s.maps.mapSet[bpf.MapAffinity]}, algorithm: d.cfg.ServiceAlgorithm, log: d.cfg.Log,
		requests: d.compareServices, pace: d.cfg.comparePace(),
		began: time.Now(), failed: map[service.Frontend]error{},
		state: ServiceStatus{Cgroup: cgroup},
	}
	if err := s.reconciler.adopt(); err != nil {
		return nil, explain("read the services in the kernel", err)
	}
	// Programs that run with a table which is not this one go on with it until this one has what that has.
	s.reconciler.show = adopted || !runs
	if !s.reconciler.show {
		s.reconciler.settled = false
	}
	d.mu.Lock()
	d.services = s.reconciler
	d.mu.Unlock()
	return s, nil
}

// start begins to work. What it starts ends with ctx, and after stopReading.
func (s *services) start(ctx context.Context, tasks *sync.WaitGroup, d *Datapath) {
	if s == nil {
		return
	}
	refusals := s.refusals // which stopReading takes away, perhaps before the goroutine has begun
	tasks.Go(func() { d.flows.read(refusals) })
	reconciling, ended := context.WithCancel(context.WithoutCancel(ctx))
	tasks.Go(func() {
		defer ended()
		s.reconciler.run(ctx, sync.OnceFunc(d.achieved))
	})
	tasks.Go(func() { s.ender.run(reconciling, s.reconciler.ended) })
}

// stopReading ends the reading of refusals.
func (s *services) stopReading() {
	if s != nil && s.refusals != nil {
		_ = s.refusals.Close()
		s.refusals = nil
	}
}

// Close lets go of everything and leaves it at work.
func (s *services) Close() {
	if s == nil {
		return
	}
	s.stopReading()
	if s.attacher != nil {
		s.attacher.Close()
	}
	if s.ender != nil {
		s.ender.Close()
	}
	if s.grace != nil {
		s.grace.Close()
	}
	closePrograms(s.programs)
	if s.maps != nil {
		s.maps.Close()
	}
}

// flowCounts are what became of flows.
type flowCounts struct{ chosen, refused uint64 }

func (c *flowCounts) add(record *bpf.Service) {
	c.chosen += atomic.LoadUint64(&record.Chosen)
	c.refused += atomic.LoadUint64(&record.Refused)
}

// flowCounts sums the flows of all frontends, of those that are gone too.
func (t *serviceTable) flowCounts() flowCounts {
	sum := t.gone
	for _, s := range t.all {
		sum.add(&t.services[s.number])
	}
	return sum
}
