// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/service"
)

// fakeFrontends is a map of frontends in memory.
type fakeFrontends struct {
	all  map[bpf.ServiceAddress]uint32
	fail error // of the next Put or Delete
}

func (f *fakeFrontends) Put(key bpf.ServiceAddress, number uint32) error {
	if f.fail != nil {
		return f.fail
	}
	f.all[key] = number
	return nil
}

func (f *fakeFrontends) Delete(key bpf.ServiceAddress) error {
	if f.fail != nil {
		return f.fail
	}
	delete(f.all, key)
	return nil
}

func (f *fakeFrontends) All(yield func(bpf.ServiceAddress, uint32)) error {
	for key, number := range f.all {
		yield(key, number)
	}
	return nil
}

// tableHost is a table in memory of the test's own. What programs would see is looked at after each word that is written
// where they look, and between any two.
type tableHost struct {
	t         *testing.T
	memory    serviceMemory
	frontends *fakeFrontends
	table     *serviceTable
}

func newTableHost(t *testing.T, services, slots, backends int) *tableHost {
	t.Helper()
	h := &tableHost{
		t: t, frontends: &fakeFrontends{all: map[bpf.ServiceAddress]uint32{}},
		memory: serviceMemory{
			services: make([]bpf.Service, services), slots: make([]uint32, slots), backends: make([]bpf.Backend, backends),
		},
	}
	h.table = newServiceTable(h.memory, h.frontends, func() error { return nil })
	return h
}

// seen is what a program that asks for a frontend now may be given, as a set; false if it is no frontend.
func (h *tableHost) seen(f service.Frontend) (map[service.Backend]bool, bool) {
	h.t.Helper()
	number, ok := h.frontends.all[frontendAddress(f)]
	if !ok {
		return nil, false
	}
	record := &h.memory.services[number]
	if record.Frontend != frontendAddress(f) {
		h.t.Fatalf("frontend %v leads to the service of %v", f, record.Frontend.AddrPort())
	}
	place, count, _ := bpf.SplitChoice(record.Choice)
	set := map[service.Backend]bool{}
	for i := range count {
		id := h.memory.slots[place+i]
		b := &h.memory.backends[id]
		if b.Service != number {
			h.t.Fatalf("frontend %v: slot %d leads to backend %d, which is one of service %d, not %d", f, i, id, b.Service, number)
		}
		at := b.At.AddrPort()
		set[service.Backend{Addr: at.Addr(), Port: at.Port()}] = true
	}
	return set, true
}

func setOf(backends []service.Backend) map[service.Backend]bool {
	set := map[service.Backend]bool{}
	for _, b := range backends {
		set[b] = true
	}
	return set
}

var sameAddress = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })

func backendNumber(i int) service.Backend {
	return service.Backend{Addr: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), Port: 8080}
}

func frontendNumber(i int) service.Frontend {
	f := service.Frontend{Addr: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), Port: 80, Protocol: service.TCP}
	if i%3 == 0 {
		f.Protocol = service.UDP
	}
	return f
}

// TestServiceTableOracle makes random changes beside a map of sets, and looks at what programs would see. An agent that
// starts over what another left behind has nothing to write.
func TestServiceTableOracle(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	h := newTableHost(t, 40, 1<<16, 1500) // small, so that records are used again
	want := map[service.Frontend]map[service.Backend]bool{}
	settings := map[service.Frontend]serviceSettings{}
	for step := range 2000 {
		f := frontendNumber(random.IntN(30))
		switch {
		case random.IntN(12) == 0:
			if err := h.table.remove(f); err != nil {
				t.Fatal(err)
			}
			delete(want, f)
		case random.IntN(200) == 0:
			if err := h.table.adopt(); err != nil {
				t.Fatal(err)
			}
		default:
			s := serviceSettings{affinity: uint32(random.IntN(2)), maglev: random.IntN(8) == 0}
			var add, remove []service.Backend
			for range random.IntN(4) {
				if b := backendNumber(random.IntN(60)); !slices.Contains(add, b) {
					add = append(add, b)
				}
			}
			for range random.IntN(4) {
				if b := backendNumber(random.IntN(60)); !slices.Contains(add, b) {
					remove = append(remove, b)
				}
			}
			if err := h.table.change(f, s, add, remove); err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
			if want[f] == nil {
				want[f] = map[service.Backend]bool{}
			}
			for _, b := range remove {
				delete(want[f], b)
			}
			for _, b := range add {
				want[f][b] = true
			}
			settings[f] = s
		}
		got, ok := h.seen(f)
		if w := want[f]; ok != (w != nil) || ok && !cmp.Equal(got, w, sameAddress) {
			t.Fatalf("step %d: %v leads to %v, want %v", step, f, got, w)
		}
	}
	h.compare(want, settings)
	before, outdated := h.table.counts, len(h.table.numbers.retired)
	h.table = newServiceTable(h.memory, h.frontends, func() error { return nil })
	if err := h.table.adopt(); err != nil {
		t.Fatal(err)
	}
	h.compare(want, settings)
	for f := range want {
		if err := h.table.change(f, settings[f], h.table.list(h.table.all[f]), nil); err != nil {
			t.Fatal(err)
		}
	}
	// Of the frontends that were removed last, sockets may still know.
	if n := h.table.counts; n.Words > uint64(outdated) || n.Calls != 0 {
		t.Errorf("after a start over the same, %+v was written, want nothing but %d generations", n, outdated)
	}
	if before.Graces == 0 {
		t.Error("no record was used again: the test is too small")
	}
	if used := h.table.members.used(); used != countAll(want) {
		t.Errorf("%d backends are in use, want %d", used, countAll(want))
	}
}

func countAll(want map[service.Frontend]map[service.Backend]bool) (n int) {
	for _, set := range want {
		n += len(set)
	}
	return n
}

// compare looks at all frontends, in memory and in the table's own mind.
func (h *tableHost) compare(want map[service.Frontend]map[service.Backend]bool, settings map[service.Frontend]serviceSettings) {
	h.t.Helper()
	if len(h.table.all) != len(want) || len(h.frontends.all) != len(want) {
		h.t.Errorf("the table has %d frontends, the kernel %d, want %d", len(h.table.all), len(h.frontends.all), len(want))
	}
	for f, w := range want {
		got, _ := h.seen(f)
		if !cmp.Equal(got, w, sameAddress) {
			h.t.Errorf("%v leads to %v, want %v", f, got, w)
		}
		s := h.table.all[f]
		if s == nil || !cmp.Equal(setOf(h.table.list(s)), w, sameAddress) {
			h.t.Errorf("%v: the table has %+v, want %v", f, s, w)
			continue
		}
		if s.settings.affinity != settings[f].affinity || len(w) > 0 && s.settings != settings[f] {
			h.t.Errorf("%v has %+v, want %+v", f, s.settings, settings[f])
		}
	}
}

// A record is given to another frontend only when sockets that know it by its generation have forgotten it, and all programs
// have ended that may not know that yet: by an agent that goes on, and by one that starts.
func TestServiceTableOutdates(t *testing.T) {
	h := newTableHost(t, 2, 64, 64) // room for one frontend
	record := &h.memory.services[1]
	var waited []uint32
	grace := func() error {
		waited = append(waited, record.Generation)
		return nil
	}
	h.table.grace = grace
	generations := map[uint32]bool{}
	for i := range 20 {
		f := frontendNumber(i)
		if err := h.table.change(f, serviceSettings{}, []service.Backend{backendNumber(1)}, nil); err != nil {
			t.Fatal(err)
		}
		if g := record.Generation; g&1 != 0 || generations[g] {
			t.Fatalf("frontend %d: generation %d, want another one, even: %v", i, g, generations)
		}
		generations[record.Generation] = true
		if i > 0 && (len(waited) == 0 || !slices.ContainsFunc(waited, func(g uint32) bool { return g&1 == 1 })) {
			t.Fatalf("frontend %d: all programs have ended with generations %v, of which one must be odd", i, waited)
		}
		if err := h.table.remove(f); err != nil {
			t.Fatal(err)
		}
		if waited = nil; i%2 == 0 {
			h.table = newServiceTable(h.memory, h.frontends, grace)
			if err := h.table.adopt(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// One backend more or less of 5,000 is a handful of words, and one that takes another's place, too.
func TestServiceTableChangeIsSmall(t *testing.T) {
	h := newTableHost(t, 8, 1<<16, 6000)
	f := frontendNumber(1)
	var all []service.Backend
	for i := range 5000 {
		all = append(all, backendNumber(i))
	}
	if err := h.table.change(f, serviceSettings{}, all, nil); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ add, remove []service.Backend }{
		"more":    {[]service.Backend{backendNumber(5001)}, nil},
		"less":    {nil, all[1234:1235]},
		"another": {[]service.Backend{backendNumber(5002)}, all[7:8]},
		"last":    {nil, all[4998:4999]},
	} {
		before := h.table.counts
		if err := h.table.change(f, serviceSettings{}, c.add, c.remove); err != nil {
			t.Fatal(err)
		}
		after := h.table.counts
		if words := after.Words - before.Words; words > 4 || after.Calls != before.Calls || after.Rebuilds != before.Rebuilds {
			t.Errorf("%s: %d words and %d calls, %d rebuilds; want at most 4, 0 and 0", name, words, after.Calls-before.Calls, after.Rebuilds-before.Rebuilds)
		}
	}
}

// Whatever moment an agent is killed at, the next one finds a table that is right, or makes it so, and flows do not stay
// with backends that nobody has any more.
func TestServiceTableSurvivesDeathAnywhere(t *testing.T) {
	f, other := frontendNumber(1), frontendNumber(2)
	var all []service.Backend
	for i := range 5 {
		all = append(all, backendNumber(i))
	}
	for name, c := range map[string]struct {
		maglev      bool
		step        int // every so many words
		add, remove []service.Backend
	}{
		"removed":  {step: 1, remove: all[1:2]},
		"added":    {step: 1, add: []service.Backend{backendNumber(9)}},
		"replaced": {step: 1, add: []service.Backend{backendNumber(9)}, remove: all[2:3]},
		"rebuilt":  {step: 1, add: []service.Backend{backendNumber(9), backendNumber(10)}, remove: all[:3]},
		"maglev":   {step: 2047, maglev: true, remove: all[:1]}, // the 4093 entries are written aside
	} {
		t.Run(name, func(t *testing.T) {
			want := setOf(all)
			for _, b := range c.remove {
				delete(want, b)
			}
			for _, b := range c.add {
				want[b] = true
			}
			settings := serviceSettings{maglev: c.maglev}
			for died := 1; ; died += c.step {
				h := newTableHost(t, 8, 1<<14, 64)
				if err := errors.Join(h.table.change(f, settings, all, nil), h.table.change(other, settings, all, nil)); err != nil {
					t.Fatal(err)
				}
				ids := slices.Clone(h.table.all[f].ids)
				if !h.dieAt(died, func() { _ = h.table.change(f, settings, c.add, c.remove) }) {
					if died < 3 {
						t.Fatalf("it was over after %d words", died)
					}
					return
				}
				seen, ok := h.seen(f)
				if before := cmp.Equal(seen, setOf(all), sameAddress); !ok || !before && !cmp.Equal(seen, want, sameAddress) {
					t.Fatalf("killed at word %d: programs see %v, which is neither before nor after", died, seen)
				}
				h.table = newServiceTable(h.memory, h.frontends, func() error { return nil })
				if err := h.table.adopt(); err != nil {
					t.Fatal(err)
				}
				have := h.table.list(h.table.all[f])
				add, remove := differ(have, sorted(want))
				if err := h.table.change(f, settings, add, remove); err != nil {
					t.Fatalf("killed at word %d: %v", died, err)
				}
				seen, _ = h.seen(f)
				others, _ := h.seen(other)
				if !cmp.Equal(seen, want, sameAddress) || !cmp.Equal(others, setOf(all), sameAddress) {
					t.Fatalf("killed at word %d: then %v, want %v; the other has %v", died, seen, want, others)
				}
				for _, id := range ids {
					if b := h.table.backend(id); !want[b] && h.memory.backends[id].Service != 0 {
						t.Fatalf("killed at word %d: a flow would stay with %v", died, b)
					}
				}
			}
		})
	}
}

func sorted(set map[service.Backend]bool) []service.Backend {
	var all []service.Backend
	for b := range set {
		all = append(all, b)
	}
	slices.SortFunc(all, service.Backend.Compare)
	return all
}

// dieAt runs f until it writes its n-th word, and reports whether it came to that.
func (h *tableHost) dieAt(n int, f func()) (died bool) {
	h.table.wrote = func() {
		if n--; n == 0 {
			panic(errKilled)
		}
	}
	defer func() {
		if r := recover(); r != nil {
			if r != errKilled {
				panic(r)
			}
			died = true
		}
	}()
	f()
	return false
}

var errKilled = errors.New("killed")

// A table without room keeps what it has, gives up what goes, and takes more when there is room again; a kernel that
// refuses a frontend loses nothing.
func TestServiceTableFull(t *testing.T) {
	h := newTableHost(t, 3, 16, 7) // two frontends, 16 slots, six backends
	var all []service.Backend
	for i := range 8 {
		all = append(all, backendNumber(i))
	}
	f := frontendNumber(1)
	if err := h.table.change(f, serviceSettings{}, all[:6], nil); err != nil {
		t.Fatal(err)
	}
	if err := h.table.change(f, serviceSettings{}, all[6:8], nil); !errors.Is(err, errServicesFull) {
		t.Fatalf("a seventh backend: %v, want errServicesFull", err)
	}
	if seen, _ := h.seen(f); !cmp.Equal(seen, setOf(all[:6]), sameAddress) {
		t.Errorf("then there are %v", seen)
	}
	if err := h.table.change(f, serviceSettings{}, nil, all[:2]); err != nil {
		t.Fatal(err)
	}
	if err := h.table.change(f, serviceSettings{}, all[6:8], nil); err != nil {
		t.Errorf("where two went: %v", err)
	}
	if seen, _ := h.seen(f); !cmp.Equal(seen, setOf(all[2:8]), sameAddress) {
		t.Errorf("then there are %v", seen)
	}
	h.frontends.fail = errors.New("refused")
	if err := h.table.change(frontendNumber(2), serviceSettings{}, nil, nil); err == nil {
		t.Error("a frontend that the kernel refuses is accepted")
	}
	if err := h.table.remove(f); err == nil {
		t.Error("a frontend that the kernel keeps is removed")
	}
	h.frontends.fail = nil
	if err := h.table.change(frontendNumber(2), serviceSettings{}, nil, nil); err != nil {
		t.Errorf("after it was refused: %v", err)
	}
	if err := h.table.change(frontendNumber(3), serviceSettings{}, nil, nil); !errors.Is(err, errServicesFull) {
		t.Errorf("a third frontend: %v, want errServicesFull", err)
	}
	if err := h.table.remove(f); err != nil {
		t.Fatal(err)
	}
	if err := h.table.change(frontendNumber(3), serviceSettings{}, all[:6], nil); err != nil {
		t.Errorf("a third frontend in the place of the first: %v", err)
	}
}

// Nonsense in the kernel's memory does no harm: what leads nowhere goes, what is half right is written anew.
func TestServiceTableAdoptsNonsense(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 2))
	for range 150 {
		h := newTableHost(t, 8, 1<<15, 64)
		var all []service.Backend
		for i := range 6 {
			all = append(all, backendNumber(i))
		}
		for i := 1; i < 5; i++ {
			if err := h.table.change(frontendNumber(i), serviceSettings{maglev: i == 4}, all, nil); err != nil {
				t.Fatal(err)
			}
		}
		for range 1 + random.IntN(6) {
			switch random.IntN(5) {
			case 0:
				h.memory.services[random.IntN(8)].Choice = random.Uint64()
			case 1:
				h.memory.services[random.IntN(8)].Room = random.Uint32()
			case 2:
				h.memory.slots[random.IntN(32)] = random.Uint32N(100)
			case 3:
				h.memory.backends[random.IntN(64)].Service = random.Uint32N(10)
			case 4:
				h.frontends.all[frontendAddress(frontendNumber(random.IntN(8)))] = random.Uint32N(10)
			}
		}
		h.table = newServiceTable(h.memory, h.frontends, func() error { return nil })
		if err := h.table.adopt(); err != nil {
			t.Fatal(err)
		}
		for i := 1; i < 5; i++ {
			f := frontendNumber(i)
			var add, remove []service.Backend
			if s := h.table.all[f]; s != nil {
				add, remove = differ(h.table.list(s), all)
			} else {
				add = all
			}
			if err := h.table.change(f, serviceSettings{maglev: i == 4}, add, remove); err != nil {
				t.Fatal(err)
			}
			if seen, _ := h.seen(f); !cmp.Equal(seen, setOf(all), sameAddress) {
				t.Fatalf("%v leads to %v, want %v", f, seen, all)
			}
		}
	}
}

// Nodes that know the same backends have the same table; all backends get about as much of it; and where one goes, few
// flows of the others move.
func TestMaglev(t *testing.T) {
	var all []netip.AddrPort
	for i := range 100 {
		b := backendNumber(i)
		all = append(all, netip.AddrPortFrom(b.Addr, b.Port))
	}
	table := maglevTable(all)
	if !slices.Equal(table, maglevTable(slices.Clone(all))) {
		t.Error("two tables of the same backends differ")
	}
	shares := make([]int, len(all))
	for _, i := range table {
		shares[i]++
	}
	if least, most := slices.Min(shares), slices.Max(shares); least < len(table)/len(all) || most > len(table)/len(all)+1 {
		t.Errorf("backends have %d to %d entries of %d", least, most, len(table))
	}
	without := maglevTable(slices.Delete(slices.Clone(all), 50, 51))
	moved := 0
	for i, was := range table {
		is := without[i]
		if is >= 50 {
			is++
		}
		if was != 50 && is != was {
			moved++
		}
	}
	if moved*100 > len(table)*5 {
		t.Errorf("without one of %d backends, %d of %d entries of the others moved", len(all), moved, len(table))
	}
	for _, n := range []int{1, 2, 205, 5000, 20000} {
		if size := maglevSize(n); size < n || size > maglevSizes[len(maglevSizes)-1] {
			t.Errorf("%d backends: a table of %d", n, size)
		}
	}
}

// Ranges never overlap, and all of the space can be had again.
func TestSpans(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 3))
	const size = 1 << 12
	s := newSpans(size)
	owner := make([]int, size)
	var held []span
	for step := 1; step < 5000; step++ {
		if random.IntN(2) == 0 {
			if r, ok := s.take(1 + random.IntN(100)); ok {
				for i := r.place; i < r.place+r.room; i++ {
					if owner[i] != 0 {
						t.Fatalf("slot %d is given twice", i)
					}
					owner[i] = step
				}
				held = append(held, r)
			}
			continue
		}
		if len(held) > 0 {
			i := random.IntN(len(held))
			r := held[i]
			held = slices.Delete(held, i, i+1)
			for i := r.place; i < r.place+r.room; i++ {
				owner[i] = 0
			}
			s.retire(r)
			s.recycle()
		}
	}
	other := newSpans(size)
	for _, r := range held {
		if !other.reserve(r) || other.reserve(r) {
			t.Fatalf("range %+v can be reserved not at all, or twice", r)
		}
	}
	for _, r := range held {
		other.retire(r)
	}
	other.recycle()
	if _, ok := other.take(size); !ok {
		t.Error("with all given back, the whole cannot be had")
	}
	for _, r := range []span{{1, 4}, {0, 3}, {0, 2}, {size, 4}, {0, 2 * size}, {4, 8}} {
		if fresh := newSpans(size); fresh.reserve(r) {
			t.Errorf("%+v is no range, and was reserved", r)
		}
	}
}
