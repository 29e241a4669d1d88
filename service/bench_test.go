// SPDX-License-Identifier: Apache-2.0

package service

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"runtime"
	"testing"
)

func podAddr(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
}

// manyPods are addresses from the first one on.
func manyPods(first, n int) []netip.Addr {
	all := make([]netip.Addr, n)
	for i := range all {
		all[i] = podAddr(first + i)
	}
	return all
}

// published is the value of a service with so many backends, as a cluster writes it.
func published(t testing.TB, name string, first, n int) []byte {
	t.Helper()
	s := Service{
		Cluster: "west", ClusterID: 2, Namespace: "shop", Name: name, Shared: true, IncludeExternal: true,
		Frontends: map[netip.Addr]Ports{netip.MustParseAddr("10.96.1.10"): {"http": {"TCP", 80}}}, Backends: make(map[netip.Addr]Ports),
		Labels: map[string]string{"app": name}, Selector: map[string]string{"app": name},
	}
	for _, addr := range manyPods(first, n) {
		s.Backends[addr] = Ports{"http": {"TCP", 8080}}
	}
	value, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	return value
}

// BenchmarkUpdateOneOf5000 changes one of 5,000 backends of a global service, and has a reader take the difference: by
// slices of 100, as whole offers that are decoded already, as values of etcd, and as values beside the ones before.
func BenchmarkUpdateOneOf5000(b *testing.B) {
	const pods = 5000
	heap := make([]byte, 64<<20) // about an agent's: collections are no more frequent than there
	defer runtime.KeepAlive(heap)
	read := func(b *testing.B, table *Table, at Revision) Revision {
		batch, next, full := table.Changes(at, 16)
		if len(batch) != 1 || full || batch[0].Whole || len(batch[0].Added)+len(batch[0].Removed) > 4 {
			b.Fatalf("full %v, %d changes", full, len(batch))
		}
		return next
	}
	ports := []NamedPort{{"http", TCP, 8080}}
	b.Run("slices", func(b *testing.B) {
		table := NewTable()
		table.PutLocal(webLocal(Settings{Global: true}))
		slice := func(i, first, n int) Offer {
			return Offer{Service: web, Cluster: "west", Shared: true, Slice: fmt.Sprint("web-", i), Backends: []Subset{{Ports: ports, Addrs: manyPods(first, n)}}}
		}
		for i := range pods / 100 {
			table.Put(slice(i, 100*i, 100))
		}
		_, at, _ := table.Changes(Revision{}, 16)
		full, less := slice(7, 700, 100), slice(7, 701, 99)
		for i := 0; b.Loop(); i++ {
			o := full
			if i%2 == 0 {
				o = less
			}
			table.Put(o)
			at = read(b, table, at)
		}
	})
	b.Run("whole", func(b *testing.B) {
		table := NewTable()
		table.PutLocal(webLocal(Settings{Global: true}))
		offers := [2]Offer{}
		for i := range offers {
			offers[i] = webOffer("west", 2)
			offers[i].Backends = []Subset{{Ports: ports, Addrs: manyPods(i, pods)}}
		}
		table.Put(offers[1])
		_, at, _ := table.Changes(Revision{}, 16)
		for i := 0; b.Loop(); i++ {
			table.Put(offers[i%2])
			at = read(b, table, at)
		}
	})
	b.Run("previous", func(b *testing.B) {
		table := NewTable()
		table.PutLocal(webLocal(Settings{Global: true}))
		values := [2][]byte{published(b, "web", 0, pods), published(b, "web", 1, pods)}
		o, previous, err := DecodeOffer(values[1])
		if err != nil || previous == nil {
			b.Fatal(err)
		}
		table.Put(o)
		_, at, _ := table.Changes(Revision{}, 16)
		b.SetBytes(int64(len(values[0])))
		for i := 0; b.Loop(); i++ {
			removed, added, ok := previous.Next(values[i%2])
			if !ok || !table.Revise("west", web, removed, added) {
				b.Fatal("not read where it differs")
			}
			at = read(b, table, at)
		}
	})
	b.Run("value", func(b *testing.B) {
		table := NewTable()
		table.PutLocal(webLocal(Settings{Global: true}))
		values := [2][]byte{published(b, "web", 0, pods), published(b, "web", 1, pods)}
		put := func(value []byte) {
			o, err := ParseOffer(value)
			if err != nil {
				b.Fatal(err)
			}
			table.Put(o)
		}
		put(values[1])
		_, at, _ := table.Changes(Revision{}, 16)
		b.SetBytes(int64(len(values[0])))
		for i := 0; b.Loop(); i++ {
			put(values[i%2])
			at = read(b, table, at)
		}
	})
}

// BenchmarkDecode5000 decodes a value of 5,000 backends, and, for comparison, with the general decoder, and does less with it
// than any decoder can: copies it, as who receives it does, and looks at each byte.
func BenchmarkDecode5000(b *testing.B) {
	value := published(b, "web", 0, 5000)
	b.Run("scan", func(b *testing.B) {
		b.SetBytes(int64(len(value)))
		for b.Loop() {
			if _, ok := scanOffer(value); !ok {
				b.Fatal("not scanned")
			}
		}
	})
	b.Run("copy", func(b *testing.B) {
		b.SetBytes(int64(len(value)))
		to := make([]byte, len(value))
		for b.Loop() {
			copy(to, value)
		}
	})
	b.Run("look", func(b *testing.B) {
		b.SetBytes(int64(len(value)))
		quotes := 0
		for b.Loop() {
			for _, c := range value {
				if c == '"' {
					quotes++
				}
			}
		}
		if quotes == 0 {
			b.Error("no quotes")
		}
	})
	b.Run("general", func(b *testing.B) {
		b.SetBytes(int64(len(value)))
		for b.Loop() {
			if _, _, err := decodeOffer(value); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// heapOf is what the heap holds more of after fill than before.
func heapOf(fill func()) uint64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&before)
	fill()
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&after)
	return after.HeapAlloc - before.HeapAlloc
}

// BenchmarkHeap prints what 40,000 offers of 10 backends take in the table, each: of services that our cluster does not have,
// and of services that it has, in four clusters.
func BenchmarkHeap(b *testing.B) {
	const services, clusters, pods = 10_000, 4, 10
	for _, local := range []bool{false, true} {
		b.Run(fmt.Sprintf("local=%v", local), func(b *testing.B) {
			for b.Loop() {
				table := NewTable()
				size := heapOf(func() {
					for i := range services {
						name := fmt.Sprint("service-", i)
						if local {
							table.PutLocal(Local{
								Service: Name{"shop", name}, Settings: Settings{Global: true}, Addrs: []netip.Addr{podAddr(1<<20 + i)}, Ports: []NamedPort{{"http", TCP, 80}},
							})
						}
						for c := range clusters {
							o, err := ParseOffer(published(b, name, (i*clusters+c)*pods, pods))
							if err != nil {
								b.Fatal(err)
							}
							o.Cluster = []string{"a", "b", "c", "d"}[c]
							table.Put(o)
						}
					}
				})
				b.ReportMetric(float64(size)/(services*clusters), "B/offer")
				runtime.KeepAlive(table)
			}
		})
	}
}
