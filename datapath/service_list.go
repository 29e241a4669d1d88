// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/service"
)

// KernelService is a frontend as the kernel has it.
type KernelService struct {
	Frontend service.Frontend
	Backends []service.Backend // sorted
	Affinity uint32            // seconds for which a client keeps its backend; 0: for none
	Maglev   bool
	Chosen   uint64 // flows that were given a backend since the frontend is there
	Refused  uint64 // flows for which there was none
}

// Algorithm is how backends are chosen.
func (s *KernelService) Algorithm() service.Algorithm {
	if s.Maglev {
		return service.Maglev
	}
	return service.Random
}

// Services reads the pinned table of services, whether an agent runs or not. It is for one goroutine at a time.
type Services struct{ maps *serviceMaps }

// OpenServices opens the table below a BPF file system, of which it writes nothing. Close it after use.
func OpenServices(bpffs string) (_ *Services, err error) {
	spec, err := bpf.LoadServices(true)
	if err != nil {
		return nil, err
	}
	s := &Services{maps: &serviceMaps{mapSet: mapSet{}}}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	for _, name := range []string{bpf.MapFrontends, bpf.MapServices, bpf.MapSlots, bpf.MapBackends} {
		// Kernels let nobody look at the memory of a map who has opened it to read it only.
		m, err := openPin(bpffs, pinServicesDir+"/"+servicePins[name], spec.Maps[name], nil)
		if err != nil {
			return nil, err
		}
		s.maps.mapSet[name] = m
	}
	return s, s.maps.mapMemory(unix.PROT_READ)
}

// Close closes the maps; the pins stay.
func (s *Services) Close() { s.maps.Close() }

// List returns all frontends, sorted. While an agent writes, one that changes may be missed.
func (s *Services) List() ([]KernelService, error) {
	found, _, err := s.maps.read(kernelFrontends{s.maps.mapSet[bpf.MapFrontends]})
	if err != nil {
		return nil, err
	}
	all := make([]KernelService, 0, len(found))
	for i := range found {
		all = append(all, s.describe(&found[i]))
	}
	slices.SortFunc(all, func(a, b KernelService) int { return a.Frontend.Compare(b.Frontend) })
	return all, nil
}

// Get returns one frontend. While an agent writes, one that changes may be missed.
func (s *Services) Get(at service.Frontend) (KernelService, bool, error) {
	var number uint32
	key := frontendAddress(at)
	switch err := s.maps.mapSet[bpf.MapFrontends].Lookup(&key, &number); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return KernelService{}, false, nil
	case err != nil:
		return KernelService{}, false, fmt.Errorf("read map %s: %w", bpf.MapFrontends, err)
	case int(number) >= len(s.maps.services) || s.maps.services[number].Frontend != key:
		return KernelService{}, false, nil
	}
	return s.describe(&foundService{at, s.maps.readService(number)}), true, nil
}

func (s *Services) describe(f *foundService) KernelService {
	record, table := &s.maps.services[f.number], serviceTable{serviceMemory: s.maps.serviceMemory}
	return KernelService{
		Frontend: f.frontend, Backends: table.list(&f.kernelService), Affinity: f.settings.affinity, Maglev: f.settings.maglev,
		Chosen: atomic.LoadUint64(&record.Chosen), Refused: atomic.LoadUint64(&record.Refused),
	}
}
