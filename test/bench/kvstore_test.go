// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/kvstore"
)

// unlimited is a rate that never limits: what is measured is how fast the client can be.
const unlimited = 1 << 30

func dialKVStore(b *testing.B, endpoint string) *kvstore.Client {
	b.Helper()
	client, err := kvstore.Dial(kvstore.Config{
		Endpoints: []string{endpoint}, QPS: unlimited, BootstrapQPS: unlimited,
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = client.Close() })
	if err := client.Probe(b.Context()); err != nil {
		b.Fatal(err)
	}
	return client
}

// BenchmarkKVStoreList measures the first list of 500k keys through a Watcher, which remembers each of them, against the
// fastest bare range of the plain client from the same server: streamed from etcd 3.7, in large pages or in one from 3.4.
//
//	keys/s      through the Watcher
//	x-range     time of the bare range / time of the Watcher; 1 is as fast as only reading the keys
//	allocs/key  of this process while the Watcher lists; that of gRPC and protobuf included
//	cpu-us      CPU time of this process for a key, user and system, in microseconds
//	heap-B      Go heap for a key when the list is complete
func BenchmarkKVStoreList(b *testing.B) {
	const keys = 500_000
	for _, version := range []string{"3.7", "3.4"} {
		b.Run(version, func(b *testing.B) {
			endpoint, ways := listServer(b, version, keys)
			plain, ours := dial(b, endpoint), dialKVStore(b, endpoint)
			var bare, all, cpu, heap, allocs float64
			rounds := 0
			for b.Loop() {
				for range 3 { // taken in turn, against the machine's moods
					rounds++
					fastest := time.Duration(0)
					for _, way := range ways {
						if took := way(b, plain, keys); fastest == 0 || took < fastest {
							fastest = took
						}
					}
					bare += fastest.Seconds()
					r := listWatched(b, ours, keys)
					all, cpu, heap, allocs = all+r.took.Seconds(), cpu+r.cpu.Seconds(), heap+r.heap, allocs+r.allocs
				}
			}
			n := float64(keys * rounds)
			b.ReportMetric(n/all, "keys/s")
			what := "kvstore: list of 500k keys from etcd " + version + ": "
			measured(b, "x-range", bare/all, goal{what: what + "rate / bare range", atLeast: 0.8})
			measured(b, "allocs/key", allocs/n, goal{what: what + "allocations a key", atMost: 4})
			measured(b, "cpu-us", cpu*1e6/n, goal{what: what + "CPU a key", unit: "µs"})
			b.ReportMetric(heap/n, "heap-B")
			b.ReportMetric(0, "ns/op")
		})
	}
}

type bareRange func(b *testing.B, client *clientv3.Client, keys int) time.Duration

// listServer starts a server, fills p/, and returns the bare ways to read it.
func listServer(b *testing.B, version string, keys int) (endpoint string, ways []bareRange) {
	b.Helper()
	pages := func(size int64) bareRange {
		return func(b *testing.B, client *clientv3.Client, keys int) time.Duration {
			return readPages(b, client, keys, size)
		}
	}
	if version == "3.4" {
		etcd := testutil.StartEtcd34(b)
		if err := putKeys(b.Context(), etcd.Client(), "p/", keys); err != nil {
			b.Fatal(err)
		}
		return etcd.Endpoint(), []bareRange{pages(50_000)}
	}
	etcd := startServer(b)
	etcd.put(b, "p/", keys)
	etcd.done(b)
	return etcd.endpoint, []bareRange{readStream, pages(50_000)}
}

func readStream(b *testing.B, client *clientv3.Client, keys int) time.Duration {
	b.Helper()
	start, n := time.Now(), 0
	stream, err := client.GetStream(b.Context(), "p/", clientv3.WithPrefix())
	if err != nil {
		b.Fatal(err)
	}
	for part := range stream {
		if err := part.Err(); err != nil {
			b.Fatal(err)
		}
		n += len(part.Kvs)
	}
	if n != keys {
		b.Fatalf("%d keys, want %d", n, keys)
	}
	return time.Since(start)
}

// readPages reads page after page at one revision; size 0 is one answer.
func readPages(b *testing.B, client *clientv3.Client, keys int, size int64) time.Duration {
	b.Helper()
	start, n := time.Now(), 0
	key, end, rev := "p/", clientv3.GetPrefixRangeEnd("p/"), int64(0)
	for {
		resp, err := client.Get(b.Context(), key, clientv3.WithRange(end), clientv3.WithLimit(size), clientv3.WithRev(rev))
		if err != nil {
			b.Fatal(err)
		}
		n += len(resp.Kvs)
		if !resp.More {
			break
		}
		rev = resp.Header.Revision
		key = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
	if n != keys {
		b.Fatalf("%d keys, want %d", n, keys)
	}
	return time.Since(start)
}

type listResult struct {
	result
	allocs float64
}

// listWatched runs a new Watcher until its first list is complete.
func listWatched(b *testing.B, client *kvstore.Client, keys int) listResult {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	synced := make(chan time.Time, 1)
	watcher := kvstore.NewWatcher("p/", func(events []kvstore.Event) {
		if events[len(events)-1].Kind == kvstore.Synced {
			synced <- time.Now()
		}
	})
	var before, after runtime.MemStats
	heap := heapInUse()
	runtime.ReadMemStats(&before)
	cpu, start := cpuTime(), time.Now()
	ended := run(ctx, watcher, client)
	at := <-synced
	r := listResult{result: result{took: at.Sub(start), cpu: cpuTime() - cpu}}
	runtime.ReadMemStats(&after)
	r.allocs, r.heap = float64(after.Mallocs-before.Mallocs), heapInUse()-heap
	if watcher.Len() != keys {
		b.Fatalf("%d keys, want %d", watcher.Len(), keys)
	}
	cancel()
	if err := <-ended; err != nil {
		b.Fatal(err)
	}
	return r
}

func run(ctx context.Context, w *kvstore.Watcher, client *kvstore.Client) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx, client) }()
	return ended
}

// watched is a watch, of whichever client, that tells when what it sees.
type watched struct {
	events atomic.Int64
	last   atomic.Int64 // when the last of them was seen, by the monotonic clock
	more   chan struct{}
	begun  time.Time
	stop   func()
}

func newWatched() *watched { return &watched{more: make(chan struct{}, 1), begun: time.Now()} }

func (w *watched) saw(n int) {
	w.last.Store(int64(time.Since(w.begun)))
	w.events.Add(int64(n))
	select {
	case w.more <- struct{}{}:
	default:
	}
}

// await returns when the last of n events was seen.
func (w *watched) await(b *testing.B, n int) time.Time {
	b.Helper()
	deadline := time.After(time.Minute)
	for w.events.Load() < int64(n) {
		select {
		case <-w.more:
		case <-deadline:
			b.Fatalf("%d events, want %d", w.events.Load(), n)
		}
	}
	return w.begun.Add(time.Duration(w.last.Load()))
}

// watchBare watches with the plain client.
func watchBare(b *testing.B, client *clientv3.Client, prefix string) *watched {
	b.Helper()
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(b.Context()))
	w := newWatched()
	events := client.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	if resp := <-events; !resp.Created {
		b.Fatalf("watch: %v", resp.Err())
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for resp := range events {
			if len(resp.Events) > 0 {
				w.saw(len(resp.Events))
			}
		}
	}()
	w.stop = func() {
		cancel()
		<-done
	}
	b.Cleanup(w.stop)
	return w
}

// watchOurs watches with a Watcher.
func watchOurs(b *testing.B, client *kvstore.Client, prefix string) *watched {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	w := newWatched()
	watcher := kvstore.NewWatcher(prefix, func(events []kvstore.Event) {
		if events[len(events)-1].Kind == kvstore.Synced {
			events = events[:len(events)-1]
		}
		if len(events) > 0 {
			w.saw(len(events))
		}
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := watcher.Run(ctx, client); err != nil {
			b.Error(err)
		}
	}()
	w.stop = func() {
		cancel()
		<-done
	}
	b.Cleanup(w.stop)
	testutil.Eventually(b, 10*time.Second, func() error {
		if !watcher.Live() {
			return fmt.Errorf("not live: %v", watcher.LastError())
		}
		return nil
	})
	return w
}

// BenchmarkKVStoreWatch measures how fast a burst of 200k new keys, put by the server itself, is seen through a Watcher,
// against a watch of the plain client.
//
//	events/s  through the Watcher
//	x-watch   time of the plain client / time of the Watcher
//	cpu-us    CPU time of this process for an event through the Watcher, in microseconds
//	x-cpu     that of the plain client / that of the Watcher
func BenchmarkKVStoreWatch(b *testing.B) {
	const keys = 200_000
	etcd := startServer(b)
	plain, ours := dial(b, etcd.endpoint), dialKVStore(b, etcd.endpoint)
	burst := func(w *watched, prefix string) (took, cpu float64) {
		defer w.stop()
		before, start := cpuTime(), time.Now()
		etcd.put(b, prefix, keys)
		took = w.await(b, keys).Sub(start).Seconds()
		cpu = (cpuTime() - before).Seconds()
		etcd.done(b)
		return took, cpu
	}
	var bare, all, bareCPU, cpu float64
	rounds := 0
	for b.Loop() {
		for range 3 {
			rounds++
			prefix := fmt.Sprintf("bare-%d/", rounds)
			took, used := burst(watchBare(b, plain, prefix), prefix)
			bare, bareCPU = bare+took, bareCPU+used
			prefix = fmt.Sprintf("ours-%d/", rounds)
			took, used = burst(watchOurs(b, ours, prefix), prefix)
			all, cpu = all+took, cpu+used
		}
	}
	n := float64(keys * rounds)
	b.ReportMetric(n/all, "events/s")
	measured(b, "x-watch", bare/all, goal{what: "kvstore: watch of 200k events: rate / plain client", atLeast: 0.8})
	b.ReportMetric(cpu*1e6/n, "cpu-us")
	b.ReportMetric(bareCPU/cpu, "x-cpu")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkKVStoreLatency measures the time from a put to its event, through a watch of the plain client and through a
// Watcher, in turn on an idle server.
//
//	bare-p50-us, bare-p99-us    through the plain client, in microseconds
//	added-p50-us, added-p99-us  what the Watcher adds to that
func BenchmarkKVStoreLatency(b *testing.B) {
	const inTurn, turns = 100, 30
	etcd := startServer(b)
	plain := dial(b, etcd.endpoint)
	bare, ours := watchBare(b, plain, "bare/"), watchOurs(b, dialKVStore(b, etcd.endpoint), "ours/")
	var bareTook, oursTook []time.Duration
	sample := func(w *watched, prefix string, took []time.Duration) []time.Duration {
		for range inTurn {
			n := len(took)
			start := time.Now()
			if _, err := plain.Put(b.Context(), fmt.Sprintf("%s%d", prefix, n), announcement(n)); err != nil {
				b.Fatal(err)
			}
			took = append(took, w.await(b, n+1).Sub(start))
		}
		return took
	}
	for b.Loop() {
		for range turns {
			bareTook, oursTook = sample(bare, "bare/", bareTook), sample(ours, "ours/", oursTook)
		}
	}
	us := func(took []time.Duration, percent int) float64 {
		slices.Sort(took)
		return took[len(took)*percent/100].Seconds() * 1e6
	}
	b.ReportMetric(us(bareTook, 50), "bare-p50-us")
	b.ReportMetric(us(bareTook, 99), "bare-p99-us")
	what := "kvstore: latency of an event added to a bare watch's, "
	measured(b, "added-p50-us", us(oursTook, 50)-us(bareTook, 50), goal{what: what + "p50", unit: "µs", atMost: 100})
	measured(b, "added-p99-us", us(oursTook, 99)-us(bareTook, 99), goal{what: what + "p99", unit: "µs", atMost: 500})
	b.ReportMetric(0, "ns/op")
}

// BenchmarkKVStoreWriter measures how fast a Writer, which compares before it writes, puts 50k keys under leases, against
// bare transactions of 100 puts under leases of 1,000 keys.
//
//	puts/s  through the Writer
//	x-txn   time of the bare transactions / time of the Writer
//	cpu-us  CPU time of this process for a key, in microseconds
func BenchmarkKVStoreWriter(b *testing.B) {
	const keys, perLease = 50_000, 1000
	etcd := startServer(b)
	plain, client := dial(b, etcd.endpoint), dialKVStore(b, etcd.endpoint)
	var bare, all, cpu float64
	rounds := 0
	for b.Loop() {
		for range 3 {
			rounds++
			start := time.Now()
			for i := range keys / perLease {
				lease, err := plain.Grant(b.Context(), 900)
				if err != nil {
					b.Fatal(err)
				}
				if err := putKeys(b.Context(), plain, fmt.Sprintf("bare-%d/%d/", rounds, i), perLease, clientv3.WithLease(lease.ID)); err != nil {
					b.Fatal(err)
				}
			}
			bare += time.Since(start).Seconds()
			r := writeKeys(b, client, fmt.Sprintf("ours-%d/", rounds), keys)
			all, cpu = all+r.took.Seconds(), cpu+r.cpu.Seconds()
		}
	}
	n := float64(keys * rounds)
	b.ReportMetric(n/all, "puts/s")
	measured(b, "x-txn", bare/all, goal{what: "kvstore: writes, rate / bare transactions"})
	b.ReportMetric(cpu*1e6/n, "cpu-us")
	b.ReportMetric(0, "ns/op")
}

func writeKeys(b *testing.B, client *kvstore.Client, prefix string, keys int) result {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	writer := kvstore.NewWriter(client, kvstore.WriterConfig{})
	cpu, start := cpuTime(), time.Now()
	for i := range keys {
		writer.Set(fmt.Sprintf("%s%d", prefix, i), []byte(announcement(i)))
	}
	ended := make(chan error, 1)
	go func() { ended <- writer.Run(ctx) }()
	select {
	case <-writer.Ready():
	case err := <-ended:
		b.Fatalf("writer: %v", err)
	}
	r := result{took: time.Since(start), cpu: cpuTime() - cpu}
	if s := writer.Status(); s.Pending != 0 || len(s.Errors) > 0 {
		b.Fatalf("%d keys pending, errors %v", s.Pending, s.Errors)
	}
	cancel()
	if err := <-ended; err != nil {
		b.Fatal(err)
	}
	return r
}

// BenchmarkKVStoreUnreachable measures what 100 clusters cost whose etcds refuse connections, four Watchers each.
//
//	cpu-percent  CPU time of this process, in percent of one core, from the 10th second of the outage to the 30th
func BenchmarkKVStoreUnreachable(b *testing.B) {
	const clusters, settled, span = 100, 10 * time.Second, 20 * time.Second
	var used, passed float64
	for b.Loop() {
		ctx, cancel := context.WithCancel(b.Context())
		var ended []<-chan error
		for range clusters {
			client, err := kvstore.Dial(kvstore.Config{Endpoints: []string{"http://127.0.0.1:1"}}, slog.New(slog.DiscardHandler))
			if err != nil {
				b.Fatal(err)
			}
			defer client.Close()
			for _, kind := range strings.Fields("nodes/ ip/ identities/ services/") {
				ended = append(ended, run(ctx, kvstore.NewWatcher(kind, func([]kvstore.Event) {}), client))
			}
		}
		<-time.After(settled)
		before, start := cpuTime(), time.Now()
		<-time.After(span)
		used, passed = used+(cpuTime()-before).Seconds(), passed+time.Since(start).Seconds()
		cancel()
		for _, e := range ended {
			if err := <-e; err != nil {
				b.Fatal(err)
			}
		}
	}
	measured(b, "cpu-percent", 100*used/passed, goal{what: "kvstore: 100 clusters that cannot be reached: CPU", unit: "% of a core", atMost: 2})
	b.ReportMetric(0, "ns/op")
}
