// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// The map gets another size while packets pass: its content stays, although nobody claims it yet, and every packet is
// identified.
//
// lesson: A3, K1
func TestMapChangesSize(t *testing.T) {
	h := newTestHost(t)
	a := h.start()
	want := map[string]identity.ID{"172.18.2.1/32": 131329}
	ops := []ipcache.Op{upsert("172.18.2.1/32", 131329)}
	for i := range 50 {
		prefix := fmt.Sprintf("10.2.1.%d/32", i)
		want[prefix] = identity.ID(131400 + i)
		ops = append(ops, upsert(prefix, want[prefix]))
	}
	h.cfg.IPs.Apply(ops)
	h.wantEntries(want)
	before, p := h.seen(t), h.startProbe()
	for _, size := range []uint32{20000, 60, 10000} {
		p.wait(50)
		a.stop()
		h.cfg.IPs = ipcache.New()
		h.cfg.MaxEntries = size
		a = h.start()
		m, err := OpenIPCache(h.cfg.BPFFS)
		if err != nil {
			t.Fatal(err)
		}
		if got := m.MaxEntries(); got != size {
			t.Errorf("the map has room for %d, want %d", got, size)
		}
		m.Close()
		if diff := cmp.Diff(want, h.entries()); diff != "" {
			t.Errorf("content at size %d (-want +got):\n%s", size, diff)
		}
		h.wantLinks("eth0")
		if s := a.Status().IPCache; s.MaxEntries != size || s.Unclaimed != len(want) {
			t.Errorf("status %+v, want %d unclaimed of at most %d", s, len(want), size)
		}
		p.wait(50)
	}
	p.check(before, 131329)
	h.wantProgramsUse(pinIPCache)
	a.stop()

	// What does not fit is not lost: the agent says so, and all stays as it is.
	ids := h.kernelIDs()
	h.cfg.MaxEntries = 20
	err := h.refuse()
	for _, text := range []string{"20", "--max-ipcache-entries", h.cfg.BPFFS + "/weft/ipcache"} {
		if !errors.Is(err, ErrIncompatible) || !strings.Contains(err.Error(), text) {
			t.Errorf("too small: %v, want ErrIncompatible that says %q", err, text)
		}
	}
	if diff := cmp.Diff(ids, h.kernelIDs()); diff != "" {
		t.Errorf("the refused agent changed objects (-before +after):\n%s", diff)
	}
	if _, err := os.Stat(h.cfg.BPFFS + "/weft/ipcache-new"); err == nil {
		t.Error("the refused agent left the map that it began")
	}
}

// wantProgramsUse checks that the program of every pinned link reads the map at the pin.
func (h *testHost) wantProgramsUse(pin string) {
	h.t.Helper()
	m, err := ebpf.LoadPinnedMap(h.cfg.BPFFS+"/weft/"+pin, nil)
	if err != nil {
		h.t.Fatal(err)
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		h.t.Fatal(err)
	}
	id, _ := info.ID()
	for _, p := range bpf.Programs {
		prog, err := ebpf.LoadPinnedProgram(h.cfg.BPFFS+"/weft/programs/"+p.Name, nil)
		if err != nil {
			h.t.Fatal(err)
		}
		info, err := prog.Info()
		prog.Close()
		if err != nil {
			h.t.Fatal(err)
		}
		maps, _ := info.MapIDs()
		programID, _ := info.ID()
		if !slices.Contains(maps, id) {
			h.t.Errorf("%s works on maps %v, want %d among them", p.Name, maps, id)
		}
		if l := h.links()[linkPinName("eth0", p.Name)]; l != nil && l.Program != programID {
			h.t.Errorf("the link of %s runs program %d, want %d", p.Name, l.Program, programID)
		}
	}
}

// Versions before and after this one may have longer or shorter values: what they have in common goes on, up and down.
// An agent that died amid such a change is no hindrance.
//
// lesson: A3
func TestMapOfAnotherVersion(t *testing.T) {
	h := newTestHost(t)
	path := h.cfg.BPFFS + "/weft/ipcache"
	for _, size := range []uint32{32, 8, 24} {
		h.otherVersion(path, size, 300)
		h.otherVersion(path+pinNewSuffix, 40, 1)
		h.hear(0)
		h.cfg.IPs = ipcache.New()
		want := map[string]identity.ID{}
		var ops []ipcache.Op
		for i := range 300 {
			prefix := fmt.Sprintf("10.2.%d.%d/32", i/250, i%250)
			want[prefix] = identity.ID(131072 + i)
			ops = append(ops, upsert(prefix, want[prefix]))
		}
		h.cfg.IPs.Apply(ops)
		a := h.start()
		if diff := cmp.Diff(want, h.entries()); diff != "" {
			t.Errorf("content after values of %d bytes (-want +got):\n%s", size, diff)
		}
		if s := a.Status().IPCache; s.Adopted != 300 || s.Written != 0 {
			t.Errorf("status %+v, want that all is adopted", s)
		}
		if _, err := os.Stat(path + pinNewSuffix); err == nil {
			t.Error("the leftover of a dead agent is still there")
		}
		h.wantProgramsUse(pinIPCache)
		a.stop()
	}
	// Maps whose content nobody needs are just made anew.
	counters := h.cfg.BPFFS + "/weft/counters"
	if err := os.Remove(counters); err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.PerCPUHash, KeySize: 8, ValueSize: 32, MaxEntries: 10, Flags: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Pin(counters); err != nil {
		t.Fatal(err)
	}
	h.start()
	h.wantProgramsUse(pinCounters)
}

// otherVersion pins an ipcache whose values have another size; they begin with the identity, which is all that the entries
// say.
func (h *testHost) otherVersion(path string, valueSize uint32, entries int) {
	h.t.Helper()
	spec, err := bpf.Load()
	if err != nil {
		h.t.Fatal(err)
	}
	s := spec.Maps[bpf.MapIPCache]
	s.ValueSize, s.Key, s.Value, s.MaxEntries = valueSize, nil, nil, h.cfg.MaxEntries
	m, err := ebpf.NewMap(s)
	if err != nil {
		h.t.Fatal(err)
	}
	defer m.Close()
	for i := range entries {
		key, _ := underlay{}.encode(upsert(fmt.Sprintf("10.2.%d.%d/32", i/250, i%250), 0).Claim.Prefix, ipcache.Entry{})
		value := make([]byte, valueSize)
		value[0], value[1], value[2] = byte(i), byte(i>>8), 2
		if err := m.Put(&key, value); err != nil {
			h.t.Fatal(err)
		}
	}
	if _, err := openPinDirForTest(h.cfg.BPFFS); err != nil {
		h.t.Fatal(err)
	}
	if err := errors.Join(removePin(path), m.Pin(path)); err != nil {
		h.t.Fatal(err)
	}
}

// openPinDirForTest makes the directories of the pins as an agent does.
func openPinDirForTest(bpffs string) (string, error) {
	dir, err := openPinDir(bpffs)
	if err != nil {
		return "", err
	}
	return dir.path, dir.Close()
}

// A million entries (a tenth of them unless WEFT_TEST_FAULTS is set) move within the time that a restart may take.
//
// lesson: A3
func TestMigrationOfAMillion(t *testing.T) {
	testutil.RequireRoot(t)
	entries := 100_000
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		entries = 1_000_000
	}
	dir := testutil.MountBPFFS(t)
	spec, err := bpf.Load()
	if err != nil {
		t.Fatal(err)
	}
	small, large := spec.Maps[bpf.MapIPCache].Copy(), spec.Maps[bpf.MapIPCache].Copy()
	small.MaxEntries, large.MaxEntries = uint32(entries), uint32(2*entries)
	m, err := createMap(dir+"/ipcache", small)
	if err != nil {
		t.Fatal(err)
	}
	kernel := kernelMap{m: m}
	keys, values := make([]bpf.IPCacheKey, 0, reconcileChunk), make([]bpf.IPCacheValue, reconcileChunk)
	for i := range entries {
		if keys = append(keys, benchKey(i)); len(keys) == cap(keys) || i == entries-1 {
			if _, err := kernel.Update(keys, values[:len(keys)]); err != nil {
				t.Fatal(err)
			}
			keys = keys[:0]
		}
	}
	began := time.Now()
	grown, err := migrate(dir+"/ipcache", m, large)
	if err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	if err := m.Close(); err != nil { // the last reference: the kernel frees it in the background
		t.Fatal(err)
	}
	closed := time.Since(began) - took
	defer grown.Close()
	n := 0
	if err := dumpIPCache(grown, func(keys []bpf.IPCacheKey, _ []bpf.IPCacheValue) bool { n += len(keys); return true }); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d entries moved in %v, the old map let go in %v", n, took, closed)
	if n != entries || took > 15*time.Second || closed > time.Second {
		t.Errorf("%d entries moved in %v, the old map let go in %v: want %d within 15s, and at once", n, took, closed, entries)
	}
}
