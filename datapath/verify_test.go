// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// verify runs a comparison and returns its differences as lines "kind object: have, want".
func (a *agent) verify(repair bool) []string {
	a.h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	report, err := a.Verify(ctx, repair)
	if err != nil {
		a.h.t.Fatal(err)
	}
	var lines []string
	for _, d := range report.Differences {
		lines = append(lines, fmt.Sprintf("%s %s: want %s, have %s", d.Kind, d.Object, d.Want, d.Have))
		if d.Repaired != repair {
			a.h.t.Errorf("%+v: repaired %t, want %t", d, d.Repaired, repair)
		}
	}
	if report.Compared == 0 {
		a.h.t.Error("nothing was compared")
	}
	slices.Sort(lines)
	return lines
}

// What somebody else changes in the map is told, counted, and repaired if asked.
//
// lesson: K2, K9
func TestVerifyMap(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	h.hear(2)
	a := h.start()
	h.cfg.IPs.Apply([]ipcache.Op{upsert("10.2.1.10/32", 131329), upsert("10.2.1.11/32", 131330), upsert("10.2.1.0/24", identity.World)})
	want := map[string]identity.ID{"10.2.1.10/32": 131329, "10.2.1.11/32": 131330, "10.2.1.0/24": identity.World}
	h.wantEntries(want)
	if got := a.verify(false); len(got) != 0 {
		t.Errorf("differences where there are none: %v", got)
	}
	m, err := ebpf.LoadPinnedMap(h.cfg.BPFFS+"/weft/ipcache", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	entry := func(prefix string, id identity.ID) (bpf.IPCacheKey, bpf.IPCacheValue) {
		c := upsert(prefix, id).Claim
		return underlay{}.encode(c.Prefix, c.Entry)
	}
	gone, _ := entry("10.2.1.10/32", 0)
	changed, wrong := entry("10.2.1.11/32", 999)
	extra, stray := entry("10.2.9.9/32", 131400)
	unheard, other := entry("10.3.9.9/32", 3<<16) // whose cluster has not been heard: it may yet be claimed
	if err := errors.Join(m.Delete(&gone), m.Put(&changed, &wrong), m.Put(&extra, &stray), m.Put(&unheard, &other)); err != nil {
		t.Fatal(err)
	}
	told := []string{"map 10.2.1.10/32: want identity=131329", "map 10.2.1.11/32: want identity=131330", "map 10.2.9.9/32: want absent"}
	for _, repair := range []bool{false, true} {
		got := a.verify(repair)
		if len(got) != len(told) {
			t.Fatalf("differences %v, want %v", got, told)
		}
		for i := range told {
			if !strings.HasPrefix(got[i], told[i]) {
				t.Errorf("difference %q, want %q", got[i], told[i])
			}
		}
	}
	if got := a.verify(false); len(got) != 0 {
		t.Errorf("differences after repair: %v", got)
	}
	want["10.3.9.9/32"] = 3 << 16
	if diff := cmp.Diff(want, h.entries()); diff != "" {
		t.Errorf("map (-want +got):\n%s", diff)
	}
	if s := a.Status().IPCache; s.Drift != 6 || s.VerifiedAt.IsZero() {
		t.Errorf("status %+v, want a drift of 2 times 3", s)
	}
}

// Pins that somebody replaces, and links that somebody detaches, are told of; nobody waits for the next regular check.
//
// lesson: K2
func TestVerifyHost(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	h.native(testNode("west", 2, "west-1", []string{"172.18.2.1"}, "10.2.1.0/24", "10.2.2.0/24"))
	a := h.start()
	route := []string{"10.2.1.0/24 via 172.18.2.1 dev eth0", "10.2.2.0/24 via 172.18.2.1 dev eth0"}
	h.wantRoutes("119", route...)
	if got := a.verify(false); len(got) != 0 {
		t.Errorf("differences where there are none: %v", got)
	}
	// A foreign route in the place of ours stays, and is told of again and again. It comes in one step: the agent would
	// be faster than a second one.
	h.ip("route replace 10.2.2.0/24 via 172.18.7.7 dev eth0 proto static")
	testutil.Eventually(t, patience, func() error {
		report, err := a.Verify(t.Context(), true)
		if err != nil || len(report.Differences) != 1 || report.Differences[0].Repaired || !strings.Contains(report.Differences[0].Have, "left alone") {
			return fmt.Errorf("differences %+v, err %v, want the route that is left alone", report, err)
		}
		return nil
	})
	h.ip("route del 10.2.2.0/24 proto static")
	h.wantRoutes("119", route...)

	pin := h.cfg.BPFFS + "/weft/counters"
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	before := h.kernelIDs()
	if err := errors.Join(os.Remove(pin), m.Pin(pin)); err != nil {
		t.Fatal(err)
	}
	if got := a.verify(true); len(got) > 1 || len(got) == 1 && !strings.HasPrefix(got[0], "pin "+pin) {
		t.Errorf("differences %v, want the pin at most", got) // the agent may have been faster
	}
	if diff := cmp.Diff(before, h.kernelIDs()); diff != "" {
		t.Errorf("objects (-before +after):\n%s", diff)
	}
}

// Tables in front of the map that somebody else has changed are a difference, and are made anew at once.
//
// lesson: K2
func TestVerifyFastPath(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	a := h.start()
	h.cfg.IPs.Apply([]ipcache.Op{upsert("10.2.1.10/32", 131329)})
	h.wantEntries(map[string]identity.ID{"10.2.1.10/32": 131329})
	m, err := ebpf.LoadPinnedMap(h.cfg.BPFFS+"/weft/hosts", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	testutil.Eventually(t, patience, func() error { return m.Delete(uint32(0)) }) // it comes after the entry
	want := []string{"fast-path weft_hosts: want the identities of the map, have others"}
	if diff := cmp.Diff(want, a.verify(true)); diff != "" {
		t.Errorf("differences (-want +got):\n%s", diff)
	}
	var table uint32
	if err := m.Lookup(uint32(0), &table); err != nil {
		t.Errorf("the table of IPv4: %v", err)
	}
	if got := a.verify(false); len(got) != 0 {
		t.Errorf("differences after repair: %v", got)
	}
}

// What the programs are told is told them again when somebody else tells them otherwise.
//
// lesson: K2
func TestVerifySettings(t *testing.T) {
	h := newTestHost(t)
	h.hear(0)
	a := h.start()
	pin := h.cfg.BPFFS + "/weft/config"
	m, err := ebpf.LoadPinnedMap(pin, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var want, have bpf.Config
	if err := m.Lookup(uint32(0), &want); err != nil {
		t.Fatal(err)
	}
	other := want
	other.OverlayLax, other.DualStack = 1, 1-want.DualStack
	if err := m.Put(uint32(0), &other); err != nil {
		t.Fatal(err)
	}
	got := a.verify(true)
	if len(got) > 1 || len(got) == 1 && !strings.HasPrefix(got[0], "settings "+pin) { // a regular check may have been faster
		t.Errorf("differences %v, want the settings at most", got)
	}
	if err := m.Lookup(uint32(0), &have); err != nil || have != want {
		t.Errorf("settings %+v, %v, want %+v", have, err, want)
	}
	if s := a.Status(); s.Drift[KindSettings] != 1 {
		t.Errorf("drift %v, want 1 of the settings", s.Drift)
	}
}

// A link whose pin is removed goes on, and has its pin back within 2 seconds; one that is detached is attached again as
// fast. No packet passes unseen in the first case.
//
// lesson: K2
func TestLinkPinRemoved(t *testing.T) {
	h := newTestHost(t)
	a := h.start()
	h.cfg.IPs.Apply([]ipcache.Op{upsert("172.18.2.1/32", 131329)})
	h.wantEntries(map[string]identity.ID{"172.18.2.1/32": 131329})
	before := h.kernelIDs()
	counted, p := h.seen(t), h.startProbe()
	dir := h.cfg.BPFFS + "/weft/"
	for _, pin := range []string{"links/eth0-weft_from_netdev", "links/eth0-weft_to_netdev", "programs/weft_from_netdev", "events"} {
		if err := os.Remove(dir + pin); err != nil {
			t.Fatal(err)
		}
		testutil.Eventually(t, patience, func() error {
			_, err := os.Stat(dir + pin)
			return err
		})
	}
	p.check(counted, 131329)
	if diff := cmp.Diff(before, h.kernelIDs()); diff != "" {
		t.Errorf("objects (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]uint64{KindLink: 2, KindProgram: 1, KindPin: 1}, a.Status().Drift); diff != "" {
		t.Errorf("drift (-want +got):\n%s", diff)
	}
	l, err := link.LoadPinnedLink(dir+"links/eth0-weft_from_netdev", nil)
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(l.Detach(), l.Close())
	if err != nil {
		t.Fatal(err)
	}
	h.wantLinks("eth0")
	if d := a.device("eth0"); !d.Programs[0].Attached {
		t.Errorf("status %+v, want that it is attached", d)
	}
}

// A map that is full is a difference that cannot be repaired; it is no drift.
//
// invariant 7
// lesson: K1
func TestVerifyFullMap(t *testing.T) {
	kernel := newRecorder()
	kernel.max = 1
	b := newReconcilerBench(t, kernel)
	b.apply(upsert("10.2.1.10/32", 131329), upsert("10.2.1.11/32", 131330))
	b.step(0)
	report, err := b.verify(t.Context(), true, nil)
	if err != nil || len(report.Differences) != 1 || report.Differences[0].Repaired || !strings.Contains(report.Differences[0].Have, "--max-ipcache-entries") {
		t.Errorf("report %+v, err %v, want the entry that does not fit", report, err)
	}
	if s := b.status(); s.Drift != 0 || s.Entries != 1 || s.Pending != 1 {
		t.Errorf("status %+v, want no drift", s)
	}
}

// Of very many differences some are described, all counted and repaired.
func TestVerifyWipedMap(t *testing.T) {
	b := newReconcilerBench(t, newRecorder())
	for i := range 3000 {
		b.apply(upsert(fmt.Sprintf("10.2.%d.%d/32", i/250, i%250), 131329))
	}
	b.step(0)
	b.kernel.wipe()
	var told [][2]int
	report, err := b.verify(t.Context(), true, func(done, total int) { told = append(told, [2]int{done, total}) })
	if last := told[len(told)-1]; told[0] != [2]int{0, 3000} || last != [2]int{3000, 3000} {
		t.Errorf("told of %v, want the 3000 of the table", told)
	}
	if err != nil || len(report.Differences) != shownDifferences || report.More != 3000-shownDifferences || report.Compared != 3000 {
		t.Errorf("%d differences and %d more of %d, err %v", len(report.Differences), report.More, report.Compared, err)
	}
	if len(b.kernel.entries) != 3000 || b.status().Drift != 3000 {
		t.Errorf("%d entries, drift %d, want 3000", len(b.kernel.entries), b.status().Drift)
	}
}

// wipe empties the map and returns how many entries it had.
func (m *recorder) wipe() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	defer clear(m.entries)
	m.sorted = nil
	return len(m.entries)
}

// Nobody needs to ask: the map is compared at about every interval, within half a minute while that takes little.
//
// lesson: K2
func TestVerifyByItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newReconcilerBench(t, newRecorder())
		b.pace = comparePace{compareInterval, DefaultVerifyInterval}
		b.apply(upsert("10.2.1.10/32", 131329))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { b.run(ctx, func() {}); close(done) }()
		synctest.Wait()
		for range 3 {
			b.kernel.wipe()
			time.Sleep(30*time.Second + time.Millisecond)
			synctest.Wait()
			if b.kernel.wipe() != 1 {
				t.Error("the entry did not come back")
			}
		}
		cancel()
		<-done
		if s := b.status(); s.Drift != 3 {
			t.Errorf("status %+v, want a drift of 3", s)
		}
	})
}

// What takes long is done less often, and never less often than configured.
func TestComparePace(t *testing.T) {
	p := comparePace{20 * time.Second, 5 * time.Minute}
	for took, want := range map[time.Duration]time.Duration{
		0: 20 * time.Second, time.Second: 20 * time.Second, 10 * time.Second: 100 * time.Second, time.Minute: 5 * time.Minute,
	} {
		for range 100 {
			if got := p.next(took); got < want*8/10 || got > want*12/10 {
				t.Errorf("after %v: %v, want about %v", took, got, want)
			}
		}
	}
	if got := (comparePace{20 * time.Second, 10 * time.Second}).next(0); got > 12*time.Second {
		t.Errorf("%v, want at most about 10s", got)
	}
}
