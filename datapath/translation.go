// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/weftmesh/weft/bpf"
)

// TranslationStatus is the state of services for packets that come from no local socket. The counts begin when the programs
// were first loaded.
type TranslationStatus struct {
	Devices []DeviceStatus `json:"devices"`
	// Flows is how many the last sweep of the conntrack found, and MaxFlows how many there is room for: beyond it, those that
	// were silent for longest are forgotten.
	Flows    int    `json:"flows"`
	MaxFlows int    `json:"maxFlows"`
	Begun    uint64 `json:"begun"` // flows that were given a backend
	// Packets by what became of them: translated, there and back; ICMP errors about them; and dropped.
	Requests uint64 `json:"requests"`
	Replies  uint64 `json:"replies"`
	Errors   uint64 `json:"icmpErrors"`
	Refused  uint64 `json:"refused"` // the service has no backend
	Hairpin  uint64 `json:"hairpin"` // the only backend is the client itself
	Clashes  uint64 `json:"clashes"` // the client's port talks to each backend already, by another service
	Failed   uint64 `json:"failed"`  // the kernel had no memory for it
	// Answered is how many of the packets that are Refused or Hairpin were answered; ICMP errors are bounded.
	Answered uint64 `json:"answered"`
	// LastError is why the conntrack or the counts could not be read the last time.
	LastError string `json:"lastError,omitempty"`
}

// full reports whether flows are forgotten to make room for others. The kernel begins with that a little before the last entry
// is taken, as each CPU has some in advance.
func (s *TranslationStatus) full() bool { return s.Flows*10 >= s.MaxFlows*9 }

// translation is what translates packets to services. A nil one is that of a node without.
type translation struct {
	maps      mapSet // of its own; the others are those of services
	programs  []program
	conntrack *conntrackSweeper
	// wait: an earlier agent's programs go on where they run, with the table that they know, as long as ours is being filled.
	wait *atomic.Bool
}

// openTranslation takes over or makes the maps and programs, if they are wanted. It attaches nothing.
func (d *Datapath) openTranslation(dir *pinDir, s *services) (_ *translation, err error) {
	if s == nil || !d.cfg.ServiceTC {
		return nil, nil
	}
	spec, err := bpf.LoadTranslation()
	if err != nil {
		return nil, err
	}
	t := &translation{maps: mapSet{}, wait: new(atomic.Bool)}
	defer func() {
		if err != nil {
			t.Close()
		}
	}()
	all := mapSet{}
	for name, m := range spec.Maps {
		if shared := s.maps.mapSet[name]; shared != nil {
			all[name] = shared
			continue
		}
		if t.maps[name], err = openTranslationMap(dir.file(pinServicesDir, servicePins[name]), m, false, d.cfg.Log); err != nil {
			return nil, err
		}
		all[name] = t.maps[name]
	}
	flows := d.cfg.ServiceTCFlows
	if flows == 0 {
		flows = DefaultServiceTCFlows
	}
	if t.maps[bpf.MapConntrack], err = openConntrack(dir, t.maps[bpf.MapConntracks], flows, d.cfg.Log); err != nil {
		return nil, err
	}
	if t.programs, err = openPrograms(dir, wantedPrograms(roleService), spec, all); err != nil {
		return nil, err
	}
	t.wait.Store(!s.reconciler.show)
	for i := range t.programs {
		t.programs[i].wait = t.wait
	}
	t.conntrack = &conntrackSweeper{m: t.maps[bpf.MapConntrack], log: d.cfg.Log}
	s.reconciler.shown = func() { t.wait.Store(false) }
	d.mu.Lock()
	d.translate = t
	d.mu.Unlock()
	return t, nil
}

// closeTranslation lets go of everything: nobody may ask for its status any more.
func (d *Datapath) closeTranslation(t *translation) {
	d.mu.Lock()
	d.translate = nil
	d.mu.Unlock()
	t.Close()
}

// openTranslationMap opens a pinned map, of its size or of any, or makes and pins it. One of another version is made anew: what was in it can be
// done without, since a flow that is not known gets the backend that it had.
func openTranslationMap(path string, spec *ebpf.MapSpec, anySize bool, log *slog.Logger) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err == nil {
		like := spec.Copy()
		if anySize {
			like.MaxEntries = m.MaxEntries()
		}
		if err = like.Compatible(m); err == nil {
			return m, nil
		}
		_ = m.Close()
	}
	if !errors.Is(err, fs.ErrNotExist) {
		log.Info("map made anew, without its content", "pin", path, "because", oneLine(err))
	}
	if err := removePin(path); err != nil {
		return nil, err
	}
	return createMap(path, spec)
}

// Close lets go of everything and leaves it at work.
func (t *translation) Close() {
	if t == nil {
		return
	}
	closePrograms(t.programs)
	t.maps.Close()
}

// status reads the counts.
func (t *translation) status() TranslationStatus {
	s := t.conntrack.status()
	var perCPU []bpf.Translated
	if err := t.maps[bpf.MapTranslated].Lookup(uint32(0), &perCPU); err != nil {
		s.LastError = fmt.Sprintf("read the counts of translated packets: %v", err)
	}
	sum := bpf.SumTranslated(perCPU)
	s.Begun, s.Requests, s.Replies, s.Errors = sum.Begun, sum.Requests, sum.Replies, sum.Errors
	s.Refused, s.Hairpin, s.Clashes, s.Failed, s.Answered = sum.Refused, sum.Hairpin, sum.Clashes, sum.Failed, sum.Answered
	return s
}

// start begins to work, until ctx ends.
func (t *translation) start(ctx context.Context, tasks *sync.WaitGroup) {
	if t != nil {
		tasks.Go(func() { t.conntrack.run(ctx) })
	}
}

// with adds to the programs of devices those that translate, if there are any.
func (t *translation) with(programs []program) []program {
	if t == nil {
		return programs
	}
	return append(slices.Clone(programs), t.programs...)
}

// withClients adds to the devices that are to have programs, and to those that keep them, the ones that lead to clients of
// services: those of pods, and those that are named.
func (k *keeper) withClients(wanted, sticky, existing []device) (_, _ []device) {
	cfg := &k.datapath.cfg
	if !cfg.ServiceTC {
		return wanted, sticky
	}
	clients := func(of []device) (all []device) {
		for _, dev := range of {
			if dev.Role == rolePod {
				dev.Role = roleService
				all = append(all, dev)
			}
		}
		return all
	}
	added := clients(wanted)
	for _, dev := range namedDevices(cfg.ServiceTCDevices, existing) {
		if dev.Role = roleService; !slices.Contains(added, dev) {
			added = append(added, dev)
		}
	}
	return slices.Concat(wanted, added), slices.Concat(sticky, clients(sticky))
}

// publishClients splits the devices that lead to clients of services from the others, and puts them into the status.
func (k *keeper) publishClients(devices []DeviceStatus) (others []DeviceStatus) {
	if !k.datapath.cfg.ServiceTC || devices == nil {
		return devices
	}
	others, clients := []DeviceStatus{}, []DeviceStatus{}
	for _, d := range devices {
		if d.Role == roleService.String() {
			clients = append(clients, d)
		} else {
			others = append(others, d)
		}
	}
	k.datapath.note(func(whole *Status) { whole.clients = clients })
	return others
}

// allServiceMaps are the maps of services and those of translation alone, by their names.
func allServiceMaps() (map[string]*ebpf.MapSpec, error) {
	services, err := bpf.LoadServices(true)
	if err != nil {
		return nil, err
	}
	translation, err := bpf.LoadTranslation()
	if err != nil {
		return nil, err
	}
	maps.Copy(services.Maps, translation.Maps)
	services.Maps[bpf.MapConntrack], err = bpf.ConntrackSpec(DefaultServiceTCFlows)
	return services.Maps, err
}
