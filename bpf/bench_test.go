// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"testing"
	"time"
)

// BenchmarkProgram measures the programs alone, per packet, with PROG_RUN. One hot address stays in the caches: the
// figures tell of parsing, counting and sampling, not of what a lookup in a large ipcache costs.
func BenchmarkProgram(b *testing.B) {
	ip4 := ethernet(ethTypeIPv4, ipv4(ProtocolTCP, tcp()))
	for _, c := range []struct {
		name   string
		frame  []byte
		sample uint32
	}{
		{"arp", ethernet(0x0806, make([]byte, 28)), 0},
		{"ipv4", ip4, 0},
		{"ipv4-world", plain("198.51.100.7"), 0},
		{"ipv4-qinq", longOptions(), 0},
		{"ipv4-sample-100", ip4, 100},
		{"ipv4-sample-1", ip4, 1},
		{"ipv6", ethernet(ethTypeIPv6, ipv6(ProtocolTCP, tcp())), 0},
		{"ipv6-extensions", longChain(), 0},
	} {
		b.Run(c.name, func(b *testing.B) {
			k := loadKernel(b)
			k.configure(b, MakeConfig(c.sample, false))
			const repeat = 10_000
			var spent time.Duration
			for b.Loop() {
				_, each, err := k.program(Ingress).Benchmark(c.frame, repeat, nil)
				if err != nil {
					b.Fatal(err)
				}
				spent += each
				// The ring buffer holds the events of one round: none is lost.
				k.drain(b)
			}
			b.ReportMetric(float64(spent.Nanoseconds())/float64(b.N), "ns/packet")
		})
	}
}
