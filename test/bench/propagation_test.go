// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"net/netip"
	"path"
	"runtime"
	"slices"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/test/load"
)

// latencies are the times from the arrival of an event at a bare watch to the change of the kernel's answer.
type latencies struct {
	P50, P99, Max time.Duration
	Samples, Lost int
	// Wake is the 99th percentile of how long a sleep of 5 µs took on the way: what the machine itself adds to everything.
	Wake time.Duration
	// CPU is what the process used meanwhile, the bare watch and the looking included.
	CPU time.Duration
}

// sighting is an event at the bare watch.
type sighting struct {
	at       time.Duration
	announce ipcache.Announcement
}

// lookup asks the kernel who is behind an address.
type lookup func(netip.Addr) (id identity.ID, ok bool, err error)

// propagation measures that of weft.
func (r *running) propagation(ctx context.Context, o order) (latencies, error) {
	kernel, err := datapath.OpenIPCache(r.place.BPFFS)
	if err != nil {
		return latencies{}, err
	}
	defer kernel.Close()
	return observe(ctx, o, func(addr netip.Addr) (identity.ID, bool, error) {
		entry, ok, err := kernel.Lookup(addr)
		return entry.Identity, ok, err
	})
}

// observe runs a bare watch beside that of who is measured for a while. Of what it sees, one event after the other is
// followed into the kernel: the next one that comes when the last is done.
func observe(ctx context.Context, o order, look lookup) (latencies, error) {
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{o.Endpoint}})
	if err != nil {
		return latencies{}, err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(ctx), o.Span)
	defer cancel()
	seen, done := make(chan sighting), make(chan latencies)
	go func() { done <- follow(look, seen) }()
	cpu := cpuTime()
	for resp := range client.Watch(ctx, o.Prefix, clientv3.WithPrefix()) {
		at := clock()
		for _, ev := range resp.Events {
			if ev.Type != clientv3.EventTypePut {
				continue
			}
			a, err := ipcache.ParseAnnouncement([]byte(path.Base(string(ev.Kv.Key))), ev.Kv.Value)
			if err != nil {
				return latencies{}, err
			}
			select {
			case seen <- sighting{at, a}:
			default:
			}
		}
	}
	cpu = cpuTime() - cpu
	close(seen)
	l := <-done
	l.CPU = cpu
	return l, nil
}

// follow looks for each event in the kernel until it is there. An entry that changes again before that is lost.
func follow(look lookup, seen <-chan sighting) latencies {
	const interval, limit = 5 * time.Microsecond, 100 * time.Millisecond
	// The finest timer, on a thread of its own: spinning would take one of few cores from who is measured.
	runtime.LockOSThread()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	var took, sleeps []time.Duration
	l := latencies{}
	for s := range seen {
		for {
			id, ok, err := look(s.announce.Prefix.Addr())
			passed := clock() - s.at
			if err == nil && ok && id == s.announce.Identity {
				took = append(took, passed)
				break
			}
			if passed > limit {
				l.Lost++
				break
			}
			pause, asleep := unix.NsecToTimespec(int64(interval)), clock()
			_ = unix.Nanosleep(&pause, nil)
			sleeps = append(sleeps, clock()-asleep)
		}
	}
	if len(took) == 0 {
		return l
	}
	if slices.Sort(sleeps); len(sleeps) > 0 {
		l.Wake = sleeps[len(sleeps)*99/100]
	}
	slices.Sort(took)
	l.Samples, l.P50, l.P99, l.Max = len(took), took[len(took)/2], took[len(took)*99/100], took[len(took)-1]
	return l
}

// BenchmarkPropagation measures the time from the arrival of an event at a bare watch, in the agent's own process, until
// the kernel answers by it, on an idle server (200 changes/s) and under load; and the same of a bare writer, which watches
// with the plain client and puts each event into a map, with nothing in between. Either goes ahead of etcd and of who writes to it.
//
//	p50-us, p99-us  in microseconds
//	bare-p50-us, bare-p99-us  those of the bare writer
//	wake-p99-us     the same of a sleep of 5 µs during that: what the machine itself adds
//	cpu-percent     CPU time of the agent's process, bare watch and lookups included, in percent of one core
//
// lesson: L2 L3
func BenchmarkPropagation(b *testing.B) {
	const span = 5 * time.Second
	cluster := load.Cluster{Name: "west", ID: 2, Workloads: 50_000, Identities: 5000, Seed: 1}
	etcd := startServerAt(b, second)
	etcd.fill(b, cluster)
	measure := func(b *testing.B, p *process, who string, rate int) (l latencies) {
		p.order(b, order{Do: "propagation", Endpoint: etcd.endpoint, Prefix: cluster.WorkloadPrefix(), Span: span + time.Second})
		etcd.order(b, order{Do: "churn", Cluster: &cluster, Rate: rate, Span: span})
		puts := etcd.done(b)
		if p.answer(b, &l); l.Samples < 100 {
			b.Fatalf("%s: only %d samples, %d lost", who, l.Samples, l.Lost)
		}
		progress(b, "%s: %.0f changes/s, %d samples (%d lost), p50 %s, p99 %s, max %s; a sleep of 5 µs: p99 %s", who,
			float64(puts)/span.Seconds(), l.Samples, l.Lost, l.P50, l.P99, l.Max, l.Wake)
		return l
	}
	for _, v := range []struct {
		rate     int
		p50, p99 float64
	}{{200, 100, 500}, {2000, 0, 0}, {8000, 0, 2000}} {
		b.Run(fmt.Sprint(v.rate), func(b *testing.B) {
			for b.Loop() {
				p := startAt(b, first, "bare", "")
				bare := measure(b, p, "bare", v.rate)
				p.end()
				a := startAgentAt(b, first, newPlace(b))
				a.place.join(b, etcd, cluster.Name)
				a.await(b, "listed", 1)
				sameAsEtcd(b, etcd, a, cluster)
				settle(b)
				l := measure(b, a.process, "weft", v.rate)
				sameAsEtcd(b, etcd, a, cluster)
				a.end()
				what := fmt.Sprintf("propagation at %d changes/s", v.rate)
				measured(b, "p50-us", float64(l.P50.Microseconds()), goal{what: what + ", p50", unit: "µs", atMost: v.p50})
				measured(b, "p99-us", float64(l.P99.Microseconds()), goal{what: what + ", p99", unit: "µs", atMost: v.p99})
				b.ReportMetric(100*l.CPU.Seconds()/(span+time.Second).Seconds(), "cpu-percent")
				measured(b, "x-p99", l.P99.Seconds()/bare.P99.Seconds(), goal{what: what + ", p99 / bare writer's"})
				measured(b, "bare-p50-us", float64(bare.P50.Microseconds()), goal{what: what + ", bare writer's p50", unit: "µs"})
				measured(b, "bare-p99-us", float64(bare.P99.Microseconds()), goal{what: what + ", bare writer's p99", unit: "µs"})
				b.ReportMetric(float64(l.Wake.Microseconds()), "wake-p99-us")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkBurst measures how long 100k puts of new workloads, and their 100k deletions, take until all are in the kernel,
// against the time until a bare watch of another process has seen them.
//
//	x-watch  time of weft / time of the bare watch
func BenchmarkBurst(b *testing.B) {
	const burst = 100_000
	cluster := load.Cluster{Name: "west", ID: 2, Workloads: 2 * burst, Identities: 500, Seed: 1}
	etcd := startServer(b)
	etcd.fill(b, cluster)
	plain := dial(b, etcd.endpoint)
	a := startAgent(b, newPlace(b))
	a.place.join(b, etcd, cluster.Name)
	f := a.await(b, "written", cluster.Entries())
	for _, v := range []struct {
		do, name, await string
		count           func(agentFigures) int
	}{
		{"delete workloads", "deletes", "deleted", func(f agentFigures) int { return int(f.Map.Deleted) }},
		{"put workloads", "puts", "written", func(f agentFigures) int { return int(f.Map.Written) }},
	} {
		// Each is a benchmark of its own, and the deletes go first so that the puts are of new keys.
		b.Run(v.name, func(b *testing.B) {
			for b.Loop() {
				settle(b)
				bare := watchBare(b, plain, cluster.WorkloadPrefix())
				f = a.now(b)
				begun, start := time.Now(), clock()
				etcd.order(b, order{Do: v.do, Cluster: &cluster, First: burst, N: burst})
				f = a.await(b, v.await, v.count(f)+burst)
				took, bareTook := f.At-start, bare.await(b, burst).Sub(begun)
				etcd.done(b)
				bare.stop()
				progress(b, "weft %s, bare watch %s", took, bareTook)
				measured(b, "x-watch", took.Seconds()/bareTook.Seconds(),
					goal{what: "burst of 100k " + v.name + ": weft / bare watch", atMost: 1.3})
				b.ReportMetric(burst/took.Seconds(), "changes/s")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
	sameAsEtcd(b, etcd, a, cluster)
}

// BenchmarkChurn measures steady changes, 5,000 a second, one in ten a deletion; WEFT_BENCH_LONG makes it a minute.
//
//	cpu-percent   CPU time of the agent's process, in percent of one core
//	growth-MiB    by how much its memory grew after a first warm-up
//
// lesson: L6
func BenchmarkChurn(b *testing.B) {
	const rate = 5000
	span := 10 * time.Second
	if long {
		span = time.Minute
	}
	cluster := load.Cluster{Name: "west", ID: 2, Workloads: 100_000, Identities: 500, Seed: 1}
	etcd := startServer(b)
	etcd.fill(b, cluster)
	a := startAgent(b, newPlace(b))
	a.place.join(b, etcd, cluster.Name)
	a.await(b, "written", cluster.Entries())
	churn := func(span time.Duration) int {
		etcd.order(b, order{Do: "churn", Cluster: &cluster, Rate: rate, Span: span})
		return etcd.done(b)
	}
	for b.Loop() {
		progress(b, "%d changes/s for %s", rate, span)
		churn(5 * time.Second) // and no collection after it: both figures are of a heap between two of them
		before := a.figures(b, order{Do: "written"})
		changes := churn(span)
		after := a.figures(b, order{Do: "written"})
		sameAsEtcd(b, etcd, a, cluster)
		measured(b, "cpu-percent", 100*(after.CPU-before.CPU).Seconds()/(after.At-before.At).Seconds(),
			goal{what: "churn of 5,000 changes/s: CPU", unit: "% of a core", atMost: 35})
		measured(b, "growth-MiB", after.Resident-before.Resident, goal{what: "churn: growth of resident memory", unit: "MiB", atMost: 16})
		b.ReportMetric(float64(changes)/span.Seconds(), "changes/s")
	}
	b.ReportMetric(0, "ns/op")
}

// sameAsEtcd fails unless the kernel's map holds the workloads that etcd does, and nothing else in their place.
func sameAsEtcd(b *testing.B, etcd *server, a *agent, cluster load.Cluster) {
	b.Helper()
	resp, err := dial(b, etcd.endpoint).Get(b.Context(), cluster.WorkloadPrefix(), clientv3.WithPrefix())
	if err != nil {
		b.Fatal(err)
	}
	want := make(map[string]identity.ID, len(resp.Kvs))
	for _, kv := range resp.Kvs {
		announced, err := ipcache.ParseAnnouncement([]byte(path.Base(string(kv.Key))), kv.Value)
		if err != nil {
			b.Fatal(err)
		}
		want[announced.Prefix.String()] = announced.Identity
	}
	kernel, err := datapath.OpenIPCache(a.place.BPFFS)
	if err != nil {
		b.Fatal(err)
	}
	defer kernel.Close()
	const attempts, pause = 50, 100 * time.Millisecond
	for attempt := range attempts {
		if err = differ(kernel, want); err == nil {
			return
		}
		if attempt < attempts-1 {
			time.Sleep(pause)
		}
	}
	b.Fatalf("at rest the kernel's map is not what etcd holds: %v", err)
}

func differ(kernel *datapath.IPCache, want map[string]identity.ID) error {
	right, wrong := 0, 0
	err := kernel.All(func(e datapath.MapEntry) bool {
		if id, ok := want[e.Prefix.String()]; ok && id == e.Identity {
			right++
		} else if e.Prefix.IsSingleIP() && !e.Identity.Reserved() {
			wrong++
		}
		return true
	})
	if err == nil && (right != len(want) || wrong > 0) {
		err = fmt.Errorf("%d of %d entries are right, and %d others should not be there", right, len(want), wrong)
	}
	return err
}
