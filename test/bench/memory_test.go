// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weftmesh/weft/bpf"
)

// BenchmarkMemory tells how much kernel memory an entry takes, with a million hosts of a family and the CIDRs around them:
// as the kernel accounts for it, without what its allocators round up to.
//
//	B/trie     bytes of the map ipcache for each of its entries
//	B/table    bytes of the table in front of it for each host
func BenchmarkMemory(b *testing.B) {
	const hosts = 1_000_000
	for _, family := range []bpf.Family{bpf.FamilyIPv4, bpf.FamilyIPv6} {
		b.Run(family.String(), func(b *testing.B) {
			a := addresses{family, hosts}
			for b.Loop() {
				k := newLookupKernel(b)
				before := memoryOf(b, k.Maps[bpf.MapIPCache])
				k.fill(b, a)
				entries := hosts + lookupCIDRs + hosts/podsPerCIDR
				trie := float64(memoryOf(b, k.Maps[bpf.MapIPCache])-before) / float64(entries)
				what := fmt.Sprintf("kernel memory, %v, 1,000k hosts: ", family)
				measured(b, "B/trie", trie, goal{what: what + "trie, an entry", unit: "B"})
				table, err := bpf.HostsSpec(family, hosts)
				if err != nil {
					b.Fatal(err)
				}
				measured(b, "B/table", float64(table.MaxEntries)*bpf.HostsLineBytes/hosts, goal{what: what + "table, a host", unit: "B"})
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// memoryOf is what the kernel says that a map takes.
func memoryOf(b *testing.B, m *ebpf.Map) uint64 {
	b.Helper()
	content, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", m.FD()))
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(content)) {
		if value, ok := strings.CutPrefix(line, "memlock:"); ok {
			bytes, err := strconv.ParseUint(strings.TrimSpace(value), 10, 64)
			if err != nil {
				b.Fatal(err)
			}
			return bytes
		}
	}
	b.Fatalf("this kernel does not tell what a map takes:\n%s", content)
	return 0
}
