// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
)

// pinServicesDir is where all pins of services are: maps, programs, and links, which have the name of their program and
// this suffix.
const (
	pinServicesDir   = "services"
	pinServiceSuffix = "-link"
)

// servicePins maps the name of each map of services to the name of its pin.
var servicePins = map[string]string{
	bpf.MapFrontends: "frontends",
	bpf.MapServices:  "services",
	bpf.MapSlots:     "slots",
	bpf.MapBackends:  "backends",
	bpf.MapAffinity:  "affinity",
	bpf.MapSockets:   "sockets",
	bpf.MapPeers:     "peers",
	bpf.MapReverse:   "reverse",
	bpf.MapRefusals:  "refusals",
	// Of translation:
	bpf.MapConntracks:  "conntracks",
	bpf.MapConntrack:   "conntrack",
	bpf.MapFragments:   "fragments",
	bpf.MapTranslated:  "translated",
	bpf.MapTranslation: "translation",
}

// serviceMaps is the pinned maps of services, and their memory.
type serviceMaps struct {
	mapSet
	serviceMemory
	mapped [][]byte
}

// openServiceMaps opens the pinned maps, or makes and pins all anew, if one is missing or another version's. What was there
// before lives on in the programs that work with it. adopted: they hold what an earlier agent wrote.
func openServiceMaps(dir *pinDir, specs map[string]*ebpf.MapSpec, log *slog.Logger) (_ *serviceMaps, adopted bool, err error) {
	set := &serviceMaps{mapSet: mapSet{}}
	defer func() {
		if err != nil {
			set.Close()
		}
	}()
	adopted = true
	for name, spec := range specs {
		path := dir.file(pinServicesDir, servicePins[name])
		m, err := ebpf.LoadPinnedMap(path, nil)
		if err == nil {
			set.mapSet[name] = m
			err = spec.Compatible(m)
		}
		if err != nil && adopted {
			adopted = false
			if !errors.Is(err, fs.ErrNotExist) {
				log.Info("tables of services made anew, to be filled before they are used", "pin", path, "because", oneLine(err))
			}
		}
	}
	if !adopted {
		set.mapSet.Close()
		for name, spec := range specs {
			path := dir.file(pinServicesDir, servicePins[name])
			if err := removePin(path); err != nil {
				return nil, false, err
			}
			if set.mapSet[name], err = createMap(path, spec); err != nil {
				return nil, false, err
			}
		}
	}
	return set, adopted, set.mapMemory(unix.PROT_READ | unix.PROT_WRITE)
}

// mapMemory maps the arrays into the process.
func (s *serviceMaps) mapMemory(protection int) (err error) {
	if s.services, err = mapArray[bpf.Service](s, bpf.MapServices, protection); err != nil {
		return err
	}
	if s.backends, err = mapArray[bpf.Backend](s, bpf.MapBackends, protection); err != nil {
		return err
	}
	s.slots, err = mapArray[uint32](s, bpf.MapSlots, protection)
	return err
}

// mapArray maps an array, of which T is an element or a part of one.
func mapArray[T any](s *serviceMaps, name string, protection int) ([]T, error) {
	var element T
	m := s.mapSet[name]
	size := int(m.ValueSize()) * int(m.MaxEntries())
	page := unix.Getpagesize()
	memory, err := unix.Mmap(m.FD(), 0, (size+page-1)/page*page, protection, unix.MAP_SHARED)
	if err != nil {
		return nil, explain("map "+name+" into memory", err)
	}
	s.mapped = append(s.mapped, memory)
	return unsafe.Slice((*T)(unsafe.Pointer(&memory[0])), size/int(unsafe.Sizeof(element))), nil
}

// Close closes the maps and leaves their pins.
func (s *serviceMaps) Close() {
	for _, memory := range s.mapped {
		_ = unix.Munmap(memory)
	}
	s.mapped, s.serviceMemory = nil, serviceMemory{}
	s.mapSet.Close()
}

// kernelFrontends is the pinned map of frontends.
type kernelFrontends struct{ m *ebpf.Map }

var _ frontendMap = kernelFrontends{}

func (k kernelFrontends) Put(key bpf.ServiceAddress, number uint32) error {
	return k.m.Put(&key, number)
}

func (k kernelFrontends) Delete(key bpf.ServiceAddress) error {
	if err := k.m.Delete(&key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

func (k kernelFrontends) All(yield func(bpf.ServiceAddress, uint32)) error {
	var (
		key     bpf.ServiceAddress
		number  uint32
		entries = k.m.Iterate()
	)
	for entries.Next(&key, &number) {
		yield(key, number)
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("read map %s: %w", bpf.MapFrontends, err)
	}
	return nil
}

// affinityMap is the pinned map of clients that keep a backend.
type affinityMap struct{ m *ebpf.Map }

// capacity is how many there can be.
func (a affinityMap) capacity() int { return int(a.m.MaxEntries()) }

// count counts them, those whose time is over too: the kernel keeps them until somebody asks or needs the room.
func (a affinityMap) count() (n int, err error) {
	err = dumpMap(a.m, bpf.MapAffinity, func(keys []bpf.AffinityKey, _ []bpf.Affinity) bool {
		n += len(keys)
		return true
	})
	return n, err
}

// gracePeriod waits for programs. The kernel does so before it returns from an update of a map of maps, so that whoever
// changed one knows that all programs use the new one: that is part of its interface since Linux 4.20.
type gracePeriod struct{ outer, inner *ebpf.Map }

func newGracePeriod() (*gracePeriod, error) {
	spec := &ebpf.MapSpec{Name: "weft_grace", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	inner, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, explain("create a map to wait with", err)
	}
	outer, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "weft_graces", Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: spec,
	})
	if err != nil {
		_ = inner.Close()
		return nil, explain("create a map of maps to wait with", err)
	}
	return &gracePeriod{outer, inner}, nil
}

// Wait returns when every program has ended that ran when it was called.
func (g *gracePeriod) Wait() error { return g.outer.Put(uint32(0), g.inner) }

func (g *gracePeriod) Close() {
	_ = g.outer.Close()
	_ = g.inner.Close()
}

// refusesProperly reports whether programs at sockets can say that a connection is refused, as since Linux 6.1.
func refusesProperly() bool {
	return features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnSetRetval) == nil
}
