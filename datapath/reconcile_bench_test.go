// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"encoding/binary"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// benchEntries is how many addresses the benchmarks write, in pod CIDRs of 250.
const benchEntries = 1_000_000

func benchAddr(i int) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], 10<<24+uint32(i/250)<<8+uint32(i%250))
	return netip.AddrFrom4(b)
}

func benchKey(i int) bpf.IPCacheKey { return bpf.MakeIPCacheKey(netip.PrefixFrom(benchAddr(i), 32)) }

func benchMap(b *testing.B) *kernelMap {
	b.Helper()
	testutil.RequireRoot(b)
	spec, err := bpf.Load()
	if err != nil {
		b.Fatal(err)
	}
	spec.Maps[bpf.MapIPCache].MaxEntries = benchEntries
	m, err := ebpf.NewMap(spec.Maps[bpf.MapIPCache])
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { m.Close() })
	return &kernelMap{m: m}
}

func benchTable() *ipcache.Table {
	table := ipcache.New()
	ops := make([]ipcache.Op, 0, 1000)
	for i := range benchEntries {
		ops = append(ops, ipcache.Op{Claim: ipcache.Claim{
			Prefix: netip.PrefixFrom(benchAddr(i), 32),
			Owner:  ipcache.Owner{Cluster: 2, Source: ipcache.ClusterMesh, Object: "ip"},
			Entry:  ipcache.Entry{Identity: identity.ID(131072 + i%1000), Host: netip.AddrFrom4([4]byte{172, 18, 2, byte(i / 250)})},
		}})
		if len(ops) == cap(ops) {
			table.Apply(ops)
			ops = ops[:0]
		}
	}
	table.Apply(ops)
	return table
}

func reportRate(b *testing.B) {
	b.ReportMetric(float64(benchEntries)*float64(b.N)/b.Elapsed().Seconds(), "entries/s")
}

// cpuTime is what this process has used. Where others work on the machine, it tells more than the time that went by.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func reportCPU(b *testing.B, cpu time.Duration) {
	b.ReportMetric(float64(cpu)/float64(benchEntries)/float64(b.N), "cpu-ns/entry")
}

// benchFastPath puts host tables in front of a map.
func benchFastPath(b *testing.B, kernel *kernelMap, table *ipcache.Table) *fastPath {
	b.Helper()
	spec, err := bpf.Load()
	if err != nil {
		b.Fatal(err)
	}
	maps := map[string]*ebpf.Map{}
	for _, name := range []string{bpf.MapHosts, bpf.MapFast, bpf.MapNetworks} {
		if maps[name], err = ebpf.NewMap(spec.Maps[name]); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { maps[name].Close() })
	}
	fast, err := openFastMaps(maps)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(fast.Close)
	return newFastPath(kernel, fast, kernel.m.MaxEntries(), table.Len)
}

// BenchmarkTableToKernel is the way of a whole table into an empty map, with the fast path in front of it and without; its
// bound is BenchmarkBareBatch.
func BenchmarkTableToKernel(b *testing.B) {
	table := benchTable()
	for _, fast := range []bool{true, false} {
		b.Run(map[bool]string{true: "fast-path", false: "map-alone"}[fast], func(b *testing.B) {
			b.ReportAllocs()
			var cpu time.Duration
			for b.Loop() {
				b.StopTimer()
				kernel := benchMap(b)
				var to prefixMap = kernel
				path := benchFastPath(b, kernel, table)
				if fast {
					to = path
				}
				before := cpuTime(b)
				b.StartTimer()
				reconcileOnce(b, table, to)
				b.StopTimer()
				cpu += cpuTime(b) - before
				path.Close()
				kernel.m.Close()
				b.StartTimer()
			}
			reportRate(b)
			reportCPU(b, cpu)
		})
	}
}

// BenchmarkTakeover is a restart with a full map and a full table: reading, comparing, writing nothing.
func BenchmarkTakeover(b *testing.B) {
	table, kernel := benchTable(), benchMap(b)
	reconcileOnce(b, table, kernel)
	b.ReportAllocs()
	for b.Loop() {
		if r := reconcileOnce(b, table, kernel); r.status().Written != 0 {
			b.Fatalf("status %+v, want nothing written", r.status())
		}
	}
	reportRate(b)
}

func BenchmarkBareBatch(b *testing.B) {
	var cpu time.Duration
	for b.Loop() {
		b.StopTimer()
		kernel := benchMap(b)
		before := cpuTime(b)
		b.StartTimer()
		bareBatch(b, kernel)
		b.StopTimer()
		cpu += cpuTime(b) - before
		kernel.m.Close()
		b.StartTimer()
	}
	reportRate(b)
	reportCPU(b, cpu)
}

// bareBatch writes what the table holds as fast as the kernel takes it.
func bareBatch(b *testing.B, kernel *kernelMap) {
	b.Helper()
	keys, values := make([]bpf.IPCacheKey, 4096), make([]bpf.IPCacheValue, 4096)
	for at := 0; at < benchEntries; at += len(keys) {
		n := min(len(keys), benchEntries-at)
		for i := range n {
			keys[i] = benchKey(at + i)
			values[i] = bpf.IPCacheValue{Identity: 131072}
		}
		if _, err := kernel.m.BatchUpdate(keys[:n], values[:n], nil); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkMillion prints the figures that are promised of a million entries: how fast they go from the table into the
// kernel, as a part of the bare batch of the same run (0.85); how long a restart with all of them takes to be ready, which
// writes none (3 s); the processor's time to compare them; and what an entry takes of the kernel's memory.
func BenchmarkMillion(b *testing.B) {
	table := benchTable()
	var bare, written, restart, compared time.Duration
	var memory uint64
	for b.Loop() {
		plain := benchMap(b)
		bare += timed(func() { bareBatch(b, plain) })
		plain.m.Close()
		kernel := benchMap(b)
		written += timed(func() { reconcileOnce(b, table, kernel) })
		var r *reconciler
		restart += timed(func() { r = reconcileOnce(b, table, kernel) })
		compared -= cpuTime(b)
		report, err := r.verify(context.Background(), false, nil)
		if err != nil || report.Compared != benchEntries || len(report.Differences) != 0 {
			b.Fatalf("compare: %+v, %v", report, err)
		}
		compared += cpuTime(b)
		if s := r.status(); s.Written != 0 || s.Adopted != benchEntries {
			b.Fatalf("status after a restart %+v, want that all is adopted", s)
		}
		info, err := kernel.m.Info()
		if err != nil {
			b.Fatal(err)
		}
		memory, _ = info.Memlock()
		kernel.m.Close()
	}
	n := float64(b.N)
	b.ReportMetric(float64(bare)/float64(written), "of-bare-batch")
	b.ReportMetric(restart.Seconds()/n, "s/restart")
	b.ReportMetric(compared.Seconds()/n, "cpu-s/compare")
	b.ReportMetric(float64(memory)/benchEntries, "kernel-B/entry")
}

// BenchmarkScrub is what it costs to compare a million entries over and over, with the fast path in front of them: the part of a
// core, in percent.
func BenchmarkScrub(b *testing.B) {
	table, kernel := benchTable(), benchMap(b)
	r := reconcileOnce(b, table, benchFastPath(b, kernel, table))
	r.pace = comparePace{compareInterval, DefaultVerifyInterval}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { r.run(ctx, func() {}); close(done) }()
	var cpu, took time.Duration
	for b.Loop() {
		before := cpuTime(b)
		took += timed(func() { time.Sleep(compareInterval) })
		cpu += cpuTime(b) - before
	}
	cancel()
	<-done
	b.ReportMetric(100*cpu.Seconds()/took.Seconds(), "%-of-core")
}

func timed(act func()) time.Duration {
	began := time.Now()
	act()
	return time.Since(began)
}

func reconcileOnce(b *testing.B, table *ipcache.Table, kernel prefixMap) *reconciler {
	b.Helper()
	layout, err := identity.NewLayout(255)
	if err != nil {
		b.Fatal(err)
	}
	r := newReconciler(&Config{
		IPs: table, Layout: layout, MaxEntries: benchEntries, Log: slog.New(slog.DiscardHandler),
		Listed: func(identity.ClusterID) bool { return true },
	}, kernel)
	if err := r.pass(context.Background(), time.Now()); err != nil {
		b.Fatal(err)
	}
	return r
}
