// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/service"
)

// errServicesFull indicates that there is no room for another frontend or backend.
var errServicesFull = errors.New("the kernel's table of services is full")

// serviceMemory is the maps of services that are written through memory. Programs read them meanwhile.
type serviceMemory struct {
	services []bpf.Service
	slots    []uint32
	backends []bpf.Backend
}

// frontendMap is what a serviceTable needs of the map of frontends.
type frontendMap interface {
	Put(bpf.ServiceAddress, uint32) error
	// Delete removes a frontend; an absent one is fine.
	Delete(bpf.ServiceAddress) error
	// All yields every frontend with the number of its service.
	All(func(bpf.ServiceAddress, uint32)) error
}

// serviceTable is the kernel's table of services, written as lib/service.h asks for. One backend more or less costs two
// words of memory, however many there are; more at once are written aside and shown by one word. Either way a program sees
// what was before a change, or what is after it.
//
// Numbers and ranges that were given up are used again after a grace period, for which the table waits when it has run out
// of others.
//
// It is for one goroutine.
type serviceTable struct {
	serviceMemory
	frontends frontendMap
	grace     func() error // returns when all programs have ended that run now

	all       map[service.Frontend]*kernelService
	numbers   numbers // of services
	members   numbers // of backends
	spans     spans
	abandoned []abandoned // of UDP, given up since the last call of takeAbandoned

	counts serviceCounts
	gone   flowCounts // of frontends that were removed
	wrote  func()     // after each word; nil but in tests
}

// serviceCounts is what a serviceTable did.
type serviceCounts struct {
	Words    uint64 // of memory that programs may have been reading, or that were then shown to them
	Calls    uint64 // to the kernel
	Rebuilds uint64 // changes that were written aside
	Graces   uint64
}

// serviceSettings is what there is to a service besides backends.
type serviceSettings struct {
	affinity uint32 // seconds
	maglev   bool
}

// kernelService is one frontend.
type kernelService struct {
	number   uint32
	settings serviceSettings
	ids      []uint32                   // of its backends; where chance decides, in the order of the slots
	where    map[service.Backend]uint32 // indices of ids; nil while there are few
	span     span
	// unclaimed are backends that were found in the kernel, and of which nobody has said anything yet.
	unclaimed map[service.Backend]struct{}
	// broken: what was found in the kernel is not what this version would have written.
	broken bool
}

// fewBackends is how many are looked through one by one.
const fewBackends = 32

func newServiceTable(memory serviceMemory, frontends frontendMap, grace func() error) *serviceTable {
	return &serviceTable{
		serviceMemory: memory, frontends: frontends, grace: grace,
		all:     map[service.Frontend]*kernelService{},
		numbers: newNumbers(len(memory.services), nil),
		members: newNumbers(len(memory.backends), nil),
		spans:   newSpans(uint32(len(memory.slots))),
	}
}

func frontendAddress(f service.Frontend) bpf.ServiceAddress {
	return bpf.MakeServiceAddress(f.Addr, f.Port, uint8(f.Protocol))
}

func frontendOf(a bpf.ServiceAddress) service.Frontend {
	at := a.AddrPort()
	return service.Frontend{Addr: at.Addr(), Port: at.Port(), Protocol: service.Protocol(a.Protocol)}
}

// backend is that of a number.
func (t *serviceTable) backend(id uint32) service.Backend {
	at := t.backends[id].At.AddrPort()
	return service.Backend{Addr: at.Addr(), Port: at.Port()}
}

// list returns the backends of a service, sorted.
func (t *serviceTable) list(s *kernelService) []service.Backend {
	all := make([]service.Backend, len(s.ids))
	for i, id := range s.ids {
		all[i] = t.backend(id)
	}
	slices.SortFunc(all, service.Backend.Compare)
	return all
}

// find returns the index of a backend in ids.
func (t *serviceTable) find(s *kernelService, b service.Backend) (int, bool) {
	if len(s.ids) > fewBackends && s.where == nil {
		s.where = make(map[service.Backend]uint32, len(s.ids))
		for i, id := range s.ids {
			s.where[t.backend(id)] = uint32(i)
		}
	}
	if s.where != nil {
		i, ok := s.where[b]
		return int(i), ok
	}
	i := slices.IndexFunc(s.ids, func(id uint32) bool { return t.backend(id) == b })
	return i, i >= 0
}

// wait lets everything that was given up be used again.
func (t *serviceTable) wait() error {
	for _, number := range t.numbers.retired {
		t.outdate(number)
	}
	if err := t.grace(); err != nil {
		return fmt.Errorf("wait for programs to end: %w", err)
	}
	t.counts.Graces++
	t.numbers.recycle()
	t.members.recycle()
	t.spans.recycle()
	return nil
}

// outdate makes sockets forget a service that they are connected to: from the next grace period on, its record may be another's.
func (t *serviceTable) outdate(number uint32) {
	if record := &t.services[number]; record.Generation&1 == 0 {
		atomic.StoreUint32(&record.Generation, record.Generation+1)
		t.wroteWord()
	}
}

func (t *serviceTable) wroteWord() {
	t.counts.Words++
	if t.wrote != nil {
		t.wrote()
	}
}

// takeNumber takes one of either kind, after a grace period if there is none before it.
func (t *serviceTable) takeNumber(of *numbers) (uint32, error) {
	if number, ok := of.take(); ok {
		return number, nil
	}
	if len(of.retired) > 0 {
		if err := t.wait(); err != nil {
			return 0, err
		}
		if number, ok := of.take(); ok {
			return number, nil
		}
	}
	return 0, errServicesFull
}

func (t *serviceTable) takeSpan(slots int) (span, error) {
	if s, ok := t.spans.take(slots); ok {
		return s, nil
	}
	if len(t.spans.retired) > 0 {
		if err := t.wait(); err != nil {
			return span{}, err
		}
		if s, ok := t.spans.take(slots); ok {
			return s, nil
		}
	}
	return span{}, errServicesFull
}

// change gives a frontend settings, and backends more and less. One that it has already, or has not, is fine. A frontend
// that the kernel does not have yet appears when all of it is there. After an error nothing has changed.
func (t *serviceTable) change(f service.Frontend, settings serviceSettings, add, remove []service.Backend) error {
	s := t.all[f]
	fresh := s == nil
	if fresh {
		number, err := t.takeNumber(&t.numbers)
		if err != nil {
			return err
		}
		s = &kernelService{number: number, settings: settings}
		record := &t.services[number]
		*record = bpf.Service{
			Choice: bpf.MakeChoice(0, 0, settings.maglev), Frontend: frontendAddress(f), Generation: (record.Generation + 1) &^ 1,
		}
	}
	undo := func(added []uint32) {
		for _, id := range added {
			t.retireMember(id)
		}
		if fresh {
			t.numbers.retire(s.number)
		}
	}
	gone := map[int]struct{}{}
	for _, b := range remove {
		if i, ok := t.find(s, b); ok {
			gone[i] = struct{}{}
		}
	}
	added, err := t.write(s, f, add)
	if err == nil {
		err = t.show(s, settings, added, slices.Sorted(maps.Keys(gone)))
	}
	if err != nil {
		undo(added)
		return err
	}
	if !fresh {
		return nil
	}
	t.counts.Calls++
	if err := t.frontends.Put(frontendAddress(f), s.number); err != nil {
		undo(s.ids)
		t.spans.retire(s.span)
		if isFull(err) {
			return errServicesFull
		}
		return err
	}
	t.all[f] = s
	return nil
}

// write makes records of the backends that the service does not have yet. Nothing refers to them so far.
func (t *serviceTable) write(s *kernelService, f service.Frontend, add []service.Backend) (ids []uint32, err error) {
	for _, b := range add {
		if _, ok := t.find(s, b); ok {
			continue
		}
		id, err := t.takeNumber(&t.members)
		if err != nil {
			return ids, err
		}
		record := &t.backends[id]
		record.At = bpf.MakeServiceAddress(b.Addr, b.Port, uint8(f.Protocol))
		atomic.StoreUint32(&record.Service, s.number)
		t.wroteWord()
		ids = append(ids, id)
	}
	return ids, nil
}

// retireMember gives up the number of a backend. Flows that keep it find that it is not what it was.
func (t *serviceTable) retireMember(id uint32) {
	record := &t.backends[id]
	atomic.AddUint32(&record.Generation, 1)
	atomic.StoreUint32(&record.Service, 0)
	t.wroteWord()
	t.members.retire(id)
}

// show lets programs see what a service is from now on: with added backends, and without those at some indices, which are
// sorted.
func (t *serviceTable) show(s *kernelService, settings serviceSettings, added []uint32, gone []int) error {
	var err error
	switch {
	case settings.maglev || settings.maglev != s.settings.maglev || s.broken:
		if len(added)+len(gone) > 0 || settings.maglev != s.settings.maglev || s.broken {
			err = t.rebuild(s, settings.maglev, added, gone)
		}
	case len(added)+len(gone) == 0:
	case len(gone) == 0 && len(s.ids)+len(added) <= int(s.span.room):
		t.appendSlots(s, added)
	case len(gone) == 1 && len(added) <= 1:
		t.replaceSlot(s, gone[0], added)
	default:
		err = t.rebuild(s, false, added, gone)
	}
	if err != nil {
		return err
	}
	if record := &t.services[s.number]; record.Affinity != settings.affinity {
		atomic.StoreUint32(&record.Affinity, settings.affinity)
		t.wroteWord()
	}
	s.settings = settings
	return nil
}

func (t *serviceTable) setSlot(at, id uint32) {
	atomic.StoreUint32(&t.slots[at], id)
	t.wroteWord()
}

func (t *serviceTable) setChoice(s *kernelService, slots int, maglev bool) {
	atomic.StoreUint64(&t.services[s.number].Choice, bpf.MakeChoice(s.span.place, uint32(slots), maglev))
	t.wroteWord()
}

// appendSlots fills slots behind those that programs look at, then lets them look at all.
func (t *serviceTable) appendSlots(s *kernelService, added []uint32) {
	for _, id := range added {
		t.setSlot(s.span.place+uint32(len(s.ids)), id)
		t.place(s, len(s.ids), id)
		s.ids = append(s.ids, id)
	}
	t.setChoice(s, len(s.ids), false)
}

// replaceSlot writes one slot: the added backend, or else the last one, takes the place of one that goes. In between, the
// last one is there twice.
func (t *serviceTable) replaceSlot(s *kernelService, index int, added []uint32) {
	old := s.ids[index]
	t.abandon(s, old)
	last := len(s.ids) - 1
	id := s.ids[last]
	if len(added) == 1 {
		id = added[0]
	}
	if id != old {
		s.ids[index] = id
		t.place(s, index, id)
		t.setSlot(s.span.place+uint32(index), id)
	}
	if len(added) == 0 {
		s.ids = s.ids[:last]
		t.setChoice(s, last, false)
	}
	t.retireMember(old)
}

// place notes where a backend is.
func (t *serviceTable) place(s *kernelService, index int, id uint32) {
	if s.where != nil {
		s.where[t.backend(id)] = uint32(index)
	}
}

// abandon notes that a service gives a backend up.
func (t *serviceTable) abandon(s *kernelService, id uint32) {
	b := t.backend(id)
	delete(s.where, b)
	delete(s.unclaimed, b)
	if at := t.backends[id].At; at.Protocol == bpf.ProtocolUDP {
		t.abandoned = append(t.abandoned, abandoned{t.services[s.number].Frontend, at})
	}
}

// rebuild writes the slots aside, and shows them by one word.
func (t *serviceTable) rebuild(s *kernelService, maglev bool, added []uint32, gone []int) error {
	ids := make([]uint32, 0, len(s.ids)+len(added)-len(gone))
	for i, id := range s.ids {
		if _, goes := slices.BinarySearch(gone, i); !goes {
			ids = append(ids, id)
		}
	}
	ids = append(ids, added...)
	slots := ids
	if maglev && len(ids) > 0 {
		slots = t.maglevSlots(ids)
	}
	var fresh span
	if len(slots) > 0 {
		var err error
		if fresh, err = t.takeSpan(len(slots)); err != nil {
			return err
		}
	}
	for i, id := range slots {
		t.setSlot(fresh.place+uint32(i), id)
	}
	for _, i := range gone {
		t.abandon(s, s.ids[i])
	}
	before := s.ids
	t.spans.retire(s.span)
	s.span, s.ids, s.where, s.broken = fresh, ids, nil, false
	t.services[s.number].Room = fresh.room
	t.setChoice(s, len(slots), maglev)
	for _, i := range gone {
		t.retireMember(before[i])
	}
	t.counts.Rebuilds++
	return nil
}

// maglevSlots is the table of Maglev, of numbers of backends. It sorts ids.
func (t *serviceTable) maglevSlots(ids []uint32) []uint32 {
	slices.SortFunc(ids, func(a, b uint32) int { return t.backend(a).Compare(t.backend(b)) })
	addrs := make([]netip.AddrPort, len(ids))
	for i, id := range ids {
		addrs[i] = t.backends[id].At.AddrPort()
	}
	slots := maglevTable(addrs)
	for i, at := range slots {
		slots[i] = ids[at]
	}
	return slots
}

// remove takes a frontend away: what asks for it is left alone from then on. An absent one is fine.
func (t *serviceTable) remove(f service.Frontend) error {
	s := t.all[f]
	if s == nil {
		return nil
	}
	t.counts.Calls++
	if err := t.frontends.Delete(frontendAddress(f)); err != nil {
		return err
	}
	delete(t.all, f)
	t.gone.add(&t.services[s.number])
	for _, id := range s.ids {
		t.abandon(s, id)
		t.retireMember(id)
	}
	t.spans.retire(s.span)
	t.numbers.retire(s.number)
	return nil
}

// takeAbandoned returns the backends of UDP that services gave up since the last call.
func (t *serviceTable) takeAbandoned() []abandoned {
	a := t.abandoned
	t.abandoned = nil
	return a
}

// foundService is a service as it stands in the kernel.
type foundService struct {
	frontend service.Frontend
	kernelService
}

// read returns what the kernel has, ordered by number, and the frontends that lead nowhere. It writes nothing.
func (m *serviceMemory) read(frontends frontendMap) (found []foundService, astray []bpf.ServiceAddress, err error) {
	err = frontends.All(func(key bpf.ServiceAddress, number uint32) {
		if number == 0 || int(number) >= len(m.services) || m.services[number].Frontend != key {
			astray = append(astray, key)
			return
		}
		found = append(found, foundService{frontendOf(key), m.readService(number)})
	})
	slices.SortFunc(found, func(a, b foundService) int { return cmp.Compare(a.number, b.number) })
	return found, astray, err
}

func (m *serviceMemory) readService(number uint32) kernelService {
	record := &m.services[number]
	place, count, maglev := bpf.SplitChoice(atomic.LoadUint64(&record.Choice))
	s := kernelService{
		number: number, span: span{place, record.Room},
		settings: serviceSettings{affinity: atomic.LoadUint32(&record.Affinity), maglev: maglev},
	}
	if count > record.Room || uint64(place)+uint64(count) > uint64(len(m.slots)) {
		s.broken, count = true, 0
	}
	seen := make(map[uint32]struct{}, min(count, 1024))
	for i := range count {
		id := atomic.LoadUint32(&m.slots[place+i])
		_, again := seen[id]
		switch {
		case again && maglev:
		case again, id == 0, int(id) >= len(m.backends), m.backends[id].Service != number:
			s.broken = true
		default:
			seen[id] = struct{}{}
			s.ids = append(s.ids, id)
		}
	}
	return s
}

// adopt takes over what the kernel holds, of this life of the agent or an earlier one. Nothing that is in use changes;
// frontends that lead nowhere go, and records that nothing refers to are free.
func (t *serviceTable) adopt() error {
	found, astray, err := t.read(t.frontends)
	if err != nil {
		return err
	}
	for _, key := range astray {
		t.counts.Calls++
		if err := t.frontends.Delete(key); err != nil {
			return err
		}
	}
	t.all = make(map[service.Frontend]*kernelService, len(found))
	t.spans = newSpans(uint32(len(t.slots)))
	services, members := map[uint32]struct{}{}, map[uint32]struct{}{}
	for i := range found {
		s := &found[i].kernelService
		if s.span.room > 0 && !t.spans.reserve(s.span) {
			s.broken, s.span = true, span{} // somebody else's, or nobody's: it is left as it is
		}
		s.unclaimed = make(map[service.Backend]struct{}, len(s.ids))
		for _, id := range s.ids {
			members[id] = struct{}{}
			s.unclaimed[t.backend(id)] = struct{}{}
		}
		services[s.number] = struct{}{}
		t.all[found[i].frontend] = s
	}
	t.numbers, t.members = newNumbers(len(t.services), services), newNumbers(len(t.backends), members)
	for number := range t.services {
		if _, used := services[uint32(number)]; !used && t.services[number].Frontend != (bpf.ServiceAddress{}) {
			t.outdate(uint32(number))
		}
	}
	for id := range t.backends {
		if _, used := members[uint32(id)]; !used && t.backends[id].Service != 0 {
			atomic.AddUint32(&t.backends[id].Generation, 1)
			atomic.StoreUint32(&t.backends[id].Service, 0)
			t.wroteWord()
		}
	}
	return t.grace()
}
