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

	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/internal/testutil"
	"github.com/weftmesh/weft/ipcache"
)

// benchEntries is how many addresses the benchmarks write, in pod CIDRs of 250.
const benchEntries = 200_000

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

// BenchmarkTableToKernel is the way of a whole table into an empty map; its bound is BenchmarkBareBatch.
func BenchmarkTableToKernel(b *testing.B) {
	table := benchTable()
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		kernel := benchMap(b)
		b.StartTimer()
		reconcileOnce(b, table, kernel)
		b.StopTimer()
		kernel.m.Close()
		b.StartTimer()
	}
	reportRate(b)
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
	keys, values := make([]bpf.IPCacheKey, 4096), make([]bpf.IPCacheValue, 4096)
	for b.Loop() {
		b.StopTimer()
		kernel := benchMap(b)
		b.StartTimer()
		for at := 0; at < benchEntries; at += len(keys) {
			n := min(len(keys), benchEntries-at)
			for i := range n {
				keys[i] = bpf.MakeIPCacheKey(netip.PrefixFrom(benchAddr(at+i), 32))
				values[i] = bpf.IPCacheValue{Identity: 131072}
			}
			if _, err := kernel.m.BatchUpdate(keys[:n], values[:n], nil); err != nil {
				b.Fatal(err)
			}
		}
		b.StopTimer()
		kernel.m.Close()
		b.StartTimer()
	}
	reportRate(b)
}

func reconcileOnce(b *testing.B, table *ipcache.Table, kernel prefixMap) *reconciler {
	b.Helper()
	layout, err := identity.NewLayout(255)
	if err != nil {
		b.Fatal(err)
	}
	r := newReconciler(&Config{
		IPs: table, Layout: layout, MaxEntries: DefaultMaxEntries, Log: slog.New(slog.DiscardHandler),
		Listed: func(identity.ClusterID) bool { return true },
	}, kernel)
	if err := r.pass(context.Background(), time.Now()); err != nil {
		b.Fatal(err)
	}
	return r
}
