// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/service"
)

// serviceIDs are the kernel's numbers of all pins of services.
func (h *serviceHost) serviceIDs() map[string]string {
	h.t.Helper()
	dir := &pinDir{path: filepath.Join(h.cfg.BPFFS, pinDirName)}
	ids := map[string]string{}
	for _, name := range listDir(h.t, dir.file(pinServicesDir)) {
		path := dir.file(pinServicesDir, name)
		switch kindOfServicePin(name) {
		case "map":
			id, err := mapAt(path)
			if err != nil {
				h.t.Fatal(err)
			}
			ids[name] = fmt.Sprint("map ", id)
		case "program":
			id, err := programAt(path)
			if err != nil {
				h.t.Fatal(err)
			}
			ids[name] = fmt.Sprint("program ", id)
		default:
			l, err := link.LoadPinnedLink(path, nil)
			if err != nil {
				h.t.Fatal(err)
			}
			info, err := l.Info()
			l.Close()
			if err != nil {
				h.t.Fatal(err)
			}
			ids[name] = fmt.Sprintf("link %d at %d runs program %d", info.ID, info.Cgroup().CgroupId, info.Program)
		}
	}
	return ids
}

// A restarted agent takes everything over as it is and writes nothing; connections and counts go on. What it has not heard
// of stays until all have been heard who may know of it.
//
// invariant 1
func TestServicesSurviveRestart(t *testing.T) {
	h := newServiceHost(t)
	const frontend = "tcp 10.96.0.10:80"
	h.put(frontend, []string{"127.1.1.10", "127.1.1.11"})
	h.put("tcp 10.96.0.11:80", []string{"127.1.1.12"})
	h.put("tcp 10.96.0.12:80", []string{"127.1.1.12"}, func(l *service.Local) { l.Algorithm = service.Maglev })
	a := h.start()
	h.wantKernel("tcp 10.96.0.12:80", "127.1.1.12")
	var conn net.Conn
	h.inside(func() {
		var err error
		if conn, err = net.Dial("tcp", "10.96.0.10:80"); err != nil {
			t.Fatal(err)
		}
	})
	defer conn.Close()
	before := h.serviceIDs()
	a.stop()
	if _, _, err := h.dial("tcp", "10.96.0.11:80"); err != nil {
		t.Errorf("without an agent: %v", err)
	}

	a = h.start()
	if s := a.Status().Services; s.Written+s.Calls != 0 || s.Chosen != 2 {
		t.Errorf("after a restart %+v, want nothing written and the flows of before", s)
	}
	if diff := cmp.Diff(before, h.serviceIDs()); diff != "" {
		t.Errorf("kernel objects (-before +after the restart):\n%s", diff)
	}
	if answered, err := ask(conn); err != nil || !strings.HasPrefix(answered, "127.1.1.1") {
		t.Errorf("the connection of before: %s, %v", answered, err)
	}
	a.stop()

	// This time little is known at first, and a backend is another one.
	h.setListed(false)
	h.table = service.NewTable()
	h.cfg.Services = h.table
	h.put(frontend, []string{"127.1.1.11", "127.1.1.13"})
	a = h.start()
	h.wantKernel(frontend, "127.1.1.10", "127.1.1.11", "127.1.1.13")
	h.wantKernel("tcp 10.96.0.11:80", "127.1.1.12")
	if s := a.Status().Services; s.Unclaimed != 3 {
		t.Errorf("%d are unclaimed, want a backend and two frontends", s.Unclaimed)
	}
	h.put(frontend, []string{"127.1.1.11"}) // what has been claimed may go at once
	h.wantKernel(frontend, "127.1.1.10", "127.1.1.11")
	h.setListed(true)
	h.wantKernel(frontend, "127.1.1.11")
	h.wantKernel("tcp 10.96.0.11:80")
}

// A table of another version is made anew, and the programs of before go on with theirs until all is in it.
func TestServicesOfAnotherVersion(t *testing.T) {
	h := newServiceHost(t)
	h.put("tcp 10.96.0.10:80", []string{"127.1.1.10"})
	a := h.start()
	h.wantKernel("tcp 10.96.0.10:80", "127.1.1.10")
	a.stop()
	path := filepath.Join(h.cfg.BPFFS, pinDirName, pinServicesDir, servicePins[bpf.MapSlots])
	other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 7})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := errors.Join(os.Remove(path), other.Pin(path)); err != nil {
		t.Fatal(err)
	}
	h.setListed(false)
	h.table = service.NewTable()
	h.cfg.Services = h.table
	links := h.serviceIDs()["weft_connect4-link"]
	a = h.start()
	reached := func(want string) {
		t.Helper()
		if answered, _, err := h.dial("tcp", "10.96.0.10:80"); err != nil || answered != want {
			t.Errorf("%s answered, %v, want %s", answered, err, want)
		}
	}
	reached("127.1.1.10:8080")
	if got := h.serviceIDs()["weft_connect4-link"]; got != links {
		t.Errorf("%s before all is known, want %s", got, links)
	}
	h.put("tcp 10.96.0.10:80", []string{"127.1.1.11"})
	h.wantKernel("tcp 10.96.0.10:80", "127.1.1.11")
	reached("127.1.1.10:8080")
	h.setListed(true)
	testutil.Eventually(t, 2*patience, func() error {
		if s := a.Status().Services; !s.attached() {
			return fmt.Errorf("status %+v", s)
		}
		return nil
	})
	reached("127.1.1.11:8080")
}

// What somebody else removes or changes is put right: at once where it can be seen at a glance, else by a comparison.
//
// lesson: K2
func TestServicesAreRepaired(t *testing.T) {
	h := newServiceHost(t)
	h.put("tcp 10.96.0.10:80", []string{"127.1.1.10"})
	h.put("tcp 10.96.0.11:80", []string{"127.1.1.11", "127.1.1.12"})
	a := h.start()
	h.wantKernel("tcp 10.96.0.10:80", "127.1.1.10")
	h.wantKernel("tcp 10.96.0.11:80", "127.1.1.11", "127.1.1.12")
	dir := filepath.Join(h.cfg.BPFFS, pinDirName, pinServicesDir)
	before := h.serviceIDs()
	for _, name := range []string{"weft_connect4-link", "weft_connect4"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	testutil.Eventually(t, 2*patience, func() error {
		if diff := cmp.Diff(before, h.serviceIDs()); diff != "" {
			return fmt.Errorf("pins (-before +after):\n%s", diff)
		}
		return nil
	})
	l, err := link.LoadPinnedLink(filepath.Join(dir, "weft_connect4-link"), nil)
	if err != nil {
		t.Fatal(err)
	}
	err = l.Detach()
	l.Close()
	if err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, 2*patience, func() error {
		_, _, err := h.dial("tcp", "10.96.0.10:80")
		return err
	})
	s := a.Status()
	if len(s.Services.Problems()) != 0 {
		t.Errorf("problems %v", s.Services.Problems())
	}
	if want := map[string]uint64{KindLink: 2, KindProgram: 1}; !maps.Equal(s.Drift, want) {
		t.Errorf("drift %v, want %v: a link without its pin, one detached, a program without its pin", s.Drift, want)
	}

	m, err := OpenServices(h.cfg.BPFFS)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	frontends := kernelFrontends{m.maps.mapSet[bpf.MapFrontends]}
	astray := bpf.MakeServiceAddress(netip.MustParseAddr("10.96.0.99"), 80, bpf.ProtocolTCP)
	if err := errors.Join(
		frontends.Delete(bpf.MakeServiceAddress(netip.MustParseAddr("10.96.0.10"), 80, bpf.ProtocolTCP)), frontends.Put(astray, 77),
	); err != nil {
		t.Fatal(err)
	}
	report, err := a.Verify(t.Context(), false)
	if err != nil || len(report.Differences) != 2 || report.Differences[0].Kind != KindService {
		t.Errorf("verify: %+v, %v, want two services", report, err)
	}
	report, err = a.Verify(t.Context(), true)
	if err != nil || len(report.Differences) != 2 || !report.Differences[0].Repaired || !report.Differences[1].Repaired {
		t.Errorf("verify and repair: %+v, %v, want two services", report, err)
	}
	h.wantKernel("tcp 10.96.0.10:80", "127.1.1.10")
	h.wantKernel("tcp 10.96.0.99:80")
	if _, _, err := h.dial("tcp", "10.96.0.10:80"); err != nil {
		t.Error(err)
	}
	if s := a.Status().Services; s.Drift != 4 { // it was found twice
		t.Errorf("drift %d, want 4", s.Drift)
	}
	if report, err := a.Verify(t.Context(), false); err != nil || len(report.Differences) != 0 {
		t.Errorf("then %+v, %v", report, err)
	}
}

// Cleanup takes the programs off the cgroup, and leaves nothing behind but what is not weft's.
func TestServicesAreCleanedUp(t *testing.T) {
	h := newServiceHost(t)
	h.put("tcp 10.96.0.10:80", []string{"127.1.1.10"})
	a := h.start()
	h.wantKernel("tcp 10.96.0.10:80", "127.1.1.10")
	a.stop()
	foreign := filepath.Join(h.cfg.BPFFS, pinDirName, pinServicesDir, "affinity")
	other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := errors.Join(os.Remove(foreign), other.Pin(foreign)); err != nil {
		t.Fatal(err)
	}
	clean := func() (kept []string) {
		var found []Remnant
		h.ns.Do(t, func() { found, err = Cleanup(t.Context(), h.cfg.BPFFS, false, func(int) {}) })
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range found {
			if r.Kept != "" {
				kept = append(kept, r.Object)
			}
		}
		return kept
	}
	if kept := clean(); len(kept) == 0 || kept[0] != foreign {
		t.Errorf("kept %v, want %s and where it is", kept, foreign)
	}
	cgroup, _, err := openCgroup(h.cgroup.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer cgroup.Close()
	for _, p := range bpf.ServicePrograms {
		found, err := link.QueryPrograms(link.QueryOptions{Target: int(cgroup.Fd()), Attach: p.Attach})
		if err != nil || len(found.Programs) != 0 {
			t.Errorf("%s: %v, %v, want nothing attached", p.Name, found, err)
		}
	}
	if err := os.Remove(foreign); err != nil {
		t.Fatal(err)
	}
	if kept := clean(); len(kept) != 0 {
		t.Errorf("kept %v", kept)
	}
	if _, err := os.Stat(filepath.Join(h.cfg.BPFFS, pinDirName)); err == nil {
		t.Error("the directory of pins is left")
	}
}

// A directory that is no cgroup is named in one sentence.
func TestServicesNeedACgroup(t *testing.T) {
	h := newServiceHost(t)
	for dir, want := range map[string]string{
		t.TempDir():    "none of the unified hierarchy",
		"/nonexistent": "no such file",
	} {
		h.cfg.ServiceCgroup = dir
		d, err := New(h.cfg)
		if err != nil {
			t.Fatal(err)
		}
		h.ns.Do(t, func() { err = d.Run(t.Context()) })
		if !errors.Is(err, ErrCgroup) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "--service-cgroup") {
			t.Errorf("%s: %v, want an ErrCgroup that says %q", dir, err, want)
		}
	}
}

// A client keeps its backend while it has affinity, until that is gone or time has passed.
func TestServiceAffinity(t *testing.T) {
	h := newServiceHost(t)
	const frontend = "tcp 10.96.0.10:80"
	all := []string{"127.1.1.10", "127.1.1.11", "127.1.1.12", "127.1.1.13"}
	sticky := func(l *service.Local) { l.ClientAffinity = 10800 }
	h.put(frontend, all, sticky)
	a := h.start()
	h.wantKernel(frontend, all...)
	ask := func() string {
		t.Helper()
		answered, _, err := h.dial("tcp", "10.96.0.10:80")
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSuffix(answered, ":8080")
	}
	// With chance, 40 flows keep to one of four once in 4^39 times.
	first := ask()
	for range 39 {
		if again := ask(); again != first {
			t.Fatalf("%s after %s", again, first)
		}
	}
	var left []string
	for _, b := range all {
		if b != first {
			left = append(left, b)
		}
	}
	h.put(frontend, left, sticky)
	h.wantKernel(frontend, left...)
	second := ask()
	for range 20 {
		if again := ask(); again != second || again == first {
			t.Fatalf("%s after %s, and %s is gone", again, second, first)
		}
	}
	a.stop()
	a = h.start() // which counts at once
	testutil.Eventually(t, 2*patience, func() error {
		if s := a.Status().Services; s.Affinities != 1 || s.MaxAffinities != 65536 {
			return fmt.Errorf("%d of %d clients keep a backend, want 1", s.Affinities, s.MaxAffinities)
		}
		return nil
	})
	// The clock is not waited for: what is remembered is made old.
	m, err := ebpf.LoadPinnedMap(filepath.Join(h.cfg.BPFFS, pinDirName, pinServicesDir, servicePins[bpf.MapAffinity]), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	chosen := map[string]bool{}
	for range 100 {
		var key bpf.AffinityKey
		var value bpf.Affinity
		entries := m.Iterate()
		if !entries.Next(&key, &value) {
			t.Fatalf("no client is remembered: %v", entries.Err())
		}
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			t.Fatal(err)
		}
		value.UsedNS = uint64(now.Nano() - int64(10801*time.Second)) // may be before the machine started
		if err := m.Put(&key, &value); err != nil {
			t.Fatal(err)
		}
		chosen[ask()] = true
		if len(chosen) == len(left) {
			return
		}
	}
	t.Errorf("after its time, a client got %v of %v", chosen, left)
}

// 1,000 services change while clients connect, and one of 5,000 backends: each connection gets to a backend of the service that
// it asked for, and none is refused, as each service has one at any time. With WEFT_TEST_FAULTS, for a minute at 100 changes a second.
func TestServiceChurn(t *testing.T) {
	const services, large = 1000, 5000
	changes, pause := 1500, time.Duration(0)
	if os.Getenv("WEFT_TEST_FAULTS") != "" {
		changes, pause = 6000, 10*time.Millisecond
	}
	h := newServiceHost(t)
	// The n-th service has backends in 127.x.y.0/24, of which x and y are its number; the last one has 5,000 in 127.200.0.0/16.
	frontend := func(n int) string { return fmt.Sprintf("tcp 10.96.%d.%d:80", n>>8, n&255) }
	backend := func(n, i int) string {
		if n == services {
			return fmt.Sprintf("127.200.%d.%d", i/250, 1+i%250)
		}
		return fmt.Sprintf("127.%d.%d.%d", 1+n>>8, n&255, 1+i)
	}
	network := func(n int) string {
		if n == services {
			return "127.200."
		}
		return strings.TrimSuffix(backend(n, 0), "1")
	}
	for n := range services {
		h.put(frontend(n), []string{backend(n, 0), backend(n, 1)})
	}
	var many []string
	for i := range large {
		many = append(many, backend(services, i))
	}
	// putMany gives the large service all backends but one.
	putMany := func(but int) {
		var addrs []netip.Addr
		for i, b := range many {
			if i != but {
				addrs = append(addrs, netip.MustParseAddr(b))
			}
		}
		h.put(frontend(services), nil, func(l *service.Local) {
			l.Backends = []service.Subset{{Ports: []service.NamedPort{{Name: "p", Protocol: service.TCP, Port: servicePort}}, Addrs: addrs}}
		})
	}
	putMany(-1)
	a := h.start()
	testutil.Eventually(t, 2*patience, func() error {
		if s := a.Status().Services; s.Frontends != services+1 || s.Backends != 2*services+large {
			return fmt.Errorf("%d frontends, %d backends", s.Frontends, s.Backends)
		}
		return nil
	})
	var (
		done   atomic.Bool
		dials  atomic.Int64
		failed = make(chan error, 3)
	)
	client := func() (err error) {
		for !done.Load() {
			n := rand.IntN(services)
			if rand.IntN(10) == 0 {
				n = services
			}
			var conn net.Conn
			if conn, err = net.Dial("tcp4", strings.TrimPrefix(frontend(n), "tcp ")); err != nil {
				return fmt.Errorf("service %d: %w", n, err)
			}
			answered, err := ask(conn)
			// A reset spares the port its time of waiting.
			_ = conn.(*net.TCPConn).SetLinger(0)
			conn.Close()
			if want := network(n); err != nil || !strings.HasPrefix(answered, want) {
				return fmt.Errorf("service %d: %s answered, %v, want one of %s0", n, answered, err, want)
			}
			dials.Add(1)
		}
		return nil
	}
	h.inside(func() {
		// Goroutines run on threads of their own, outside of the namespace but in the cgroup.
		for range cap(failed) {
			go func() {
				var err error
				h.ns.Do(t, func() { err = client() })
				failed <- err
			}()
		}
		for change := range changes {
			time.Sleep(pause) // the rate of the long form; nothing waits for it
			if change%20 == 0 {
				putMany(rand.IntN(large))
			}
			n := rand.IntN(services)
			var some []string
			for i := range 8 {
				if rand.IntN(3) == 0 {
					some = append(some, backend(n, i))
				}
			}
			if some == nil {
				some = []string{backend(n, rand.IntN(8))}
			}
			h.put(frontend(n), some, func(l *service.Local) {
				if rand.IntN(4) == 0 {
					l.Algorithm = service.Maglev
				}
			})
			// A connection, at least, for each change: which of the two is the slower decides the pace.
			for before := dials.Load(); dials.Load() == before && len(failed) == 0; {
				time.Sleep(100 * time.Microsecond)
			}
		}
		done.Store(true)
		for range cap(failed) {
			if err := <-failed; err != nil {
				t.Error(err)
			}
		}
	})
	report, err := a.Verify(t.Context(), false)
	if err != nil || len(report.Differences)+report.More != 0 {
		t.Errorf("in the end: %+v, %v", report, err)
	}
	t.Logf("%d connections; %+v", dials.Load(), a.Status().Services)
}

// An agent that is told to end before all that it starts has begun ends as at any other time.
func TestServicesEndBeforeTheyBegin(t *testing.T) {
	h := newServiceHost(t)
	for range 10 {
		h.startUnready().stop()
	}
	a := h.start()
	a.stop()
}
