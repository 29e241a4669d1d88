// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"runtime/metrics"
	"runtime/pprof"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/mesh"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

const (
	// device is what the programs are attached to.
	device = "eth0"
	// maxEntries is the size of the kernel's map.
	maxEntries = 1 << 20
	// patience is how long an agent may take for anything.
	patience = 2 * time.Minute
)

// addDevice makes the device, once.
func addDevice(b *testing.B) {
	b.Helper()
	if _, err := netlink.LinkByName(device); err == nil {
		return
	}
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: device}, PeerName: device + "-peer"}
	if err := netlink.LinkAdd(veth); err != nil {
		b.Fatal(err)
	}
	if err := netlink.LinkSetUp(veth); err != nil {
		b.Fatal(err)
	}
}

// agent is that part of weft's agent which brings remote clusters into the kernel, in a process of its own.
type agent struct {
	*process
	place agentPlace
}

// agentPlace is what outlives an agent.
type agentPlace struct{ BPFFS, Dir string }

func newPlace(b *testing.B) agentPlace {
	b.Helper()
	addDevice(b)
	return agentPlace{BPFFS: testutil.MountBPFFS(b), Dir: b.TempDir()}
}

// startAgent returns when the agent is ready, as far as it is without the clusters whose configs are in its directory.
func startAgent(b *testing.B, place agentPlace) *agent {
	b.Helper()
	return startAgentAt(b, ordinary, place)
}

// startAgentAt is startAgent with another priority.
func startAgentAt(b *testing.B, p priority, place agentPlace) *agent {
	b.Helper()
	given, err := json.Marshal(place)
	if err != nil {
		b.Fatal(err)
	}
	a := &agent{process: startAt(b, p, "agent", string(given)), place: place}
	var ready agentFigures
	a.answer(b, &ready)
	return a
}

// join gives an agent there the config of a cluster, and returns when that was.
func (p agentPlace) join(b *testing.B, etcd *server, cluster string) time.Duration {
	b.Helper()
	at := clock()
	config := fmt.Appendf(nil, "endpoints:\n- %s\n", etcd.endpoint)
	if err := os.WriteFile(filepath.Join(p.Dir, cluster), config, 0o600); err != nil {
		b.Fatal(err)
	}
	return at
}

// leave takes the config away, and returns when that was.
func (a *agent) leave(b *testing.B, cluster string) time.Duration {
	b.Helper()
	at := clock()
	if err := os.Remove(filepath.Join(a.place.Dir, cluster)); err != nil {
		b.Fatal(err)
	}
	return at
}

// agentFigures are an agent's own.
type agentFigures struct {
	Error string
	At    time.Duration // by the clock
	// CPU is that of the process since its beginning.
	CPU time.Duration
	// Heap is that of Go in bytes, after a collection; only with "figures".
	Heap float64
	// Resident and Peak are the process's memory in MiB.
	Resident, Peak float64
	Map            datapath.MapStatus
}

// await waits until the agent has done something n times since its beginning: "written", "deleted" or "adopted" entries of
// the map, or is "listed" for n clusters.
func (a *agent) await(b *testing.B, what string, n int) agentFigures {
	b.Helper()
	return a.figures(b, order{Do: what, N: n})
}

// now returns the present figures, the heap's included.
func (a *agent) now(b *testing.B) agentFigures {
	b.Helper()
	return a.figures(b, order{Do: "figures"})
}

func (a *agent) figures(b *testing.B, o order) agentFigures {
	b.Helper()
	var f agentFigures
	if a.ask(b, o, &f); f.Error != "" {
		b.Fatal(f.Error)
	}
	return f
}

// rest waits until what the agent needed for its first lists is given back, which takes longer on a busy machine: until its memory
// has not become less for some seconds.
func (a *agent) rest(b *testing.B) agentFigures {
	b.Helper()
	const step, still, least = time.Second, 5, 6
	best := a.await(b, "written", 0)
	for n, same := 0, 0; n < least || same < still; n++ {
		time.Sleep(step)
		f := a.await(b, "written", 0)
		if same++; f.Resident < best.Resident-1 {
			best, same = f, 0
		}
	}
	return best
}

// running is an agent as seen from inside.
type running struct {
	mesh     *mesh.Mesh
	datapath *datapath.Datapath
	place    agentPlace
}

func serveAgent(given string, orders <-chan order, answer func(any)) error {
	r := &running{}
	if err := json.Unmarshal([]byte(given), &r.place); err != nil {
		return err
	}
	if err := r.assemble(); err != nil {
		return err
	}
	stop, err := profile()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	errs := make(chan error, 2)
	go func() { errs <- r.datapath.Run(ctx) }()
	go func() { errs <- r.mesh.Run(ctx) }()
	select {
	case <-r.datapath.Ready():
	case err := <-errs:
		return fmt.Errorf("ended early: %w", err)
	}
	answer(r.figures())
	for o := range orders {
		switch o.Do {
		case "figures":
			f := r.figures()
			f.Heap = heapInUse()
			answer(f)
		case "propagation":
			latencies, err := r.propagation(ctx, o)
			if err != nil {
				return err
			}
			answer(latencies)
		default:
			answer(r.await(o))
		}
	}
	stop()
	cancel()
	return errors.Join(<-errs, <-errs)
}

func (r *running) assemble() (err error) {
	layout, err := identity.NewLayout(255)
	if err != nil {
		return err
	}
	ips, nodes, log := ipcache.New(), node.NewTable(), slog.New(slog.DiscardHandler)
	r.mesh, err = mesh.New(mesh.Config{
		Dir: r.place.Dir, ClusterName: "east", ClusterID: 1, NodeName: "east-1", Layout: layout,
		IPs: ips, Nodes: nodes, Identities: identity.NewTable(), Services: service.NewTable(), Log: log,
	})
	if err != nil {
		return err
	}
	r.datapath, err = datapath.New(datapath.Config{
		BPFFS: r.place.BPFFS, Devices: []string{device}, RoutingMode: datapath.RoutingNone, MaxEntries: maxEntries,
		ClusterName: "east", NodeName: "east-1", Layout: layout, IPs: ips, Nodes: nodes, Listed: r.mesh.Listed, Log: log,
	})
	return err
}

func (r *running) figures() agentFigures {
	f := agentFigures{At: clock(), CPU: cpuTime(), Map: r.datapath.Status().IPCache}
	f.Resident, f.Peak = memory()
	return f
}

func (r *running) await(o order) agentFigures {
	const look = 500 * time.Microsecond
	for begun := clock(); ; time.Sleep(look) {
		s, got := r.datapath.Status().IPCache, 0
		switch o.Do {
		case "written":
			got = int(s.Written)
		case "deleted":
			got = int(s.Deleted)
		case "adopted":
			got = int(s.Adopted)
		case "listed":
			for _, c := range r.mesh.Status() {
				if c.Synced == (mesh.Synced{Nodes: true, IPs: true, Identities: true, Services: true}) {
					got++
				}
			}
			time.Sleep(20 * look) // its status is not free
		}
		if got >= o.N {
			return r.figures()
		}
		if clock()-begun > patience {
			return agentFigures{Error: fmt.Sprintf("%s: %d after %s, want %d; status %+v", o.Do, got, patience, o.N, s)}
		}
	}
}

func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func heapInUse() float64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// memory returns what this process has of the machine's now, and had at most, in MiB.
func memory() (resident, peak float64) {
	content, err := os.ReadFile("/proc/self/status")
	if err != nil {
		panic(err)
	}
	return parseMemory(content)
}

// memoryOfProcess is memory of another process.
func memoryOfProcess(b *testing.B, pid int) (resident, peak float64) {
	b.Helper()
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		b.Fatal(err)
	}
	return parseMemory(content)
}

func parseMemory(status []byte) (resident, peak float64) {
	for line := range bytes.Lines(status) {
		var kib float64
		if n, _ := fmt.Sscanf(string(line), "VmRSS: %f kB", &kib); n == 1 {
			resident = kib / 1024
		}
		if n, _ := fmt.Sscanf(string(line), "VmHWM: %f kB", &kib); n == 1 {
			peak = kib / 1024
		}
	}
	return resident, peak
}

// profileEnv names a directory in which each agent leaves the profiles of its life: CPU, and heap and goroutines at its
// end.
const profileEnv = "WEFT_BENCH_PROFILE"

// profile starts the CPU profile; stop writes the rest.
func profile() (stop func(), err error) {
	dir := os.Getenv(profileEnv)
	if dir == "" {
		return func() {}, nil
	}
	create := func(kind string) (*os.File, error) {
		return os.Create(filepath.Join(dir, fmt.Sprintf("agent-%d.%s", os.Getpid(), kind)))
	}
	cpu, err := create("cpu")
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(cpu); err != nil {
		return nil, err
	}
	return func() {
		pprof.StopCPUProfile()
		_ = cpu.Close()
		for kind, write := range map[string]func(io.Writer) error{
			"memory":    writeMemory,
			"heap":      func(w io.Writer) error { return pprof.Lookup("heap").WriteTo(w, 0) },
			"goroutine": func(w io.Writer) error { return pprof.Lookup("goroutine").WriteTo(w, 0) },
		} {
			if f, err := create(kind); err == nil {
				_ = write(f)
				_ = f.Close()
			}
		}
	}, nil
}

// writeMemory writes what the process's memory consists of, as the kernel and as Go's runtime tell it.
func writeMemory(w io.Writer) error {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	for line := range bytes.Lines(status) {
		if bytes.HasPrefix(line, []byte("Rss")) {
			fmt.Fprintf(w, "%s", line)
		}
	}
	var classes []metrics.Sample
	for _, d := range metrics.All() {
		if strings.HasPrefix(d.Name, "/memory/classes/") || d.Name == "/sched/goroutines:goroutines" {
			classes = append(classes, metrics.Sample{Name: d.Name})
		}
	}
	metrics.Read(classes)
	for _, c := range classes {
		fmt.Fprintf(w, "%-50s %9d\n", c.Name, c.Value.Uint64())
	}
	return nil
}
