// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// claimed makes workloads of one source of lines "namespace/name address...".
func claimed(source string, lines ...string) []Workload {
	var all []Workload
	for _, line := range lines {
		fields := strings.Fields(line)
		w := Workload{Source: source}
		w.Namespace, w.Name, _ = strings.Cut(fields[0], "/")
		for _, ip := range fields[1:] {
			w.IPs = append(w.IPs, netip.MustParseAddr(ip))
		}
		all = append(all, w)
	}
	return all
}

func TestPrecedence(t *testing.T) {
	type step struct {
		kubernetes, api, file []string
		want                  string // "source namespace/name addresses" of all
		conflicts             []string
	}
	for name, steps := range map[string][]step{
		"the first source wins what comes at once": {{
			kubernetes: []string{"s/pod 10.0.0.1"}, api: []string{"s/vm 10.0.0.1"}, file: []string{"s/host 10.0.0.1"},
			want:      "kubernetes s/pod [10.0.0.1]",
			conflicts: []string{"s/vm of api: ip 10.0.0.1 belongs already to s/pod, from kubernetes", "s/host of file: ip 10.0.0.1 belongs already to s/pod"},
		}},
		"the holder keeps it until it is gone": {
			{file: []string{"s/host 10.0.0.1"}, want: "file s/host [10.0.0.1]"},
			{
				kubernetes: []string{"s/pod 10.0.0.1"}, file: []string{"s/host 10.0.0.1"}, want: "file s/host [10.0.0.1]",
				conflicts: []string{"s/pod of kubernetes: ip 10.0.0.1 belongs already to s/host, from file"},
			},
			{kubernetes: []string{"s/pod 10.0.0.1"}, want: "kubernetes s/pod [10.0.0.1]"},
			{
				kubernetes: []string{"s/pod 10.0.0.1"}, file: []string{"s/host 10.0.0.1"}, want: "kubernetes s/pod [10.0.0.1]",
				conflicts: []string{"s/host of file"},
			},
		},
		"within a source its order counts": {
			{file: []string{"s/b 10.0.0.1"}, want: "file s/b [10.0.0.1]"},
			{file: []string{"s/a 10.0.0.1", "s/b 10.0.0.1"}, want: "file s/a [10.0.0.1]", conflicts: []string{"s/b of file: ip"}},
			{file: []string{"s/b 10.0.0.1"}, want: "file s/b [10.0.0.1]"},
		},
		"one lost address is not all": {{
			kubernetes: []string{"s/pod 10.0.0.1"}, api: []string{"s/vm 10.0.0.1 fd00::1"},
			want: "kubernetes s/pod [10.0.0.1], api s/vm [fd00::1]", conflicts: []string{"s/vm of api: ip 10.0.0.1"},
		}},
		"a name is had by one": {
			{api: []string{"s/web 10.0.0.2"}, want: "api s/web [10.0.0.2]"},
			{
				kubernetes: []string{"s/web 10.0.0.1"}, api: []string{"s/web 10.0.0.2"}, file: []string{"s/x 10.0.0.1"},
				want:      "api s/web [10.0.0.2], file s/x [10.0.0.1]",
				conflicts: []string{"s/web of kubernetes: there is already one of that name, from api"},
			},
			{
				kubernetes: []string{"s/web 10.0.0.1"}, file: []string{"s/x 10.0.0.1"}, want: "file s/x [10.0.0.1]",
				conflicts: []string{"s/web of kubernetes: ip 10.0.0.1 belongs already to s/x"},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var p precedence
			for i, s := range steps {
				sources := [][]Workload{claimed("kubernetes", s.kubernetes...), claimed("api", s.api...), claimed("file", s.file...)}
				for range 2 { // asked again, it says the same
					accepted, conflicts := p.settle(sources)
					if diff := cmp.Diff(s.want, describe(accepted)); diff != "" {
						t.Errorf("step %d (-want +got)\n%s", i, diff)
					}
					ok := len(conflicts) == len(s.conflicts)
					for j := 0; ok && j < len(conflicts); j++ {
						ok = strings.Contains(conflicts[j].Error(), s.conflicts[j])
					}
					if !ok {
						t.Errorf("step %d: conflicts %q, want those with %q", i, conflicts, s.conflicts)
					}
				}
			}
		})
	}
}

func describe(all []Workload) string {
	var texts []string
	for i := range all {
		texts = append(texts, fmt.Sprintf("%s %s %v", all[i].Source, all[i].key(), all[i].IPs))
	}
	return strings.Join(texts, ", ")
}

// Whatever comes and goes: no name and no address is had twice, none that is claimed by a workload of its name is had by
// nobody, and no source loses one that it had and still claims.
func TestPrecedenceInvariants(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	var p precedence
	before := make(map[netip.Addr]string)
	for step := range 5000 {
		sources := make([][]Workload, 3)
		for i, name := range []string{"kubernetes", "api", "file"} {
			for range random.IntN(4) {
				w := Workload{Source: name, Namespace: "s", Name: string(rune('a' + random.IntN(12)))}
				for range 1 + random.IntN(2) {
					w.IPs = append(w.IPs, netip.AddrFrom4([4]byte{10, 0, 0, byte(random.IntN(4))}))
				}
				sources[i] = append(sources[i], w)
			}
		}
		accepted, _ := p.settle(sources)
		names, addrs := make(map[string]bool), make(map[netip.Addr]string)
		for i := range accepted {
			w := &accepted[i]
			if names[w.key()] {
				t.Fatalf("seed %d step %d: two of the name %s", seed, step, w.key())
			}
			names[w.key()] = true
			for _, ip := range w.IPs {
				if other, ok := addrs[ip]; ok && other != w.Source {
					t.Fatalf("seed %d step %d: %s is had by %s and %s", seed, step, ip, other, w.Source)
				}
				addrs[ip] = w.Source
			}
		}
		for _, all := range sources {
			for i := range all {
				for _, ip := range all[i].IPs {
					held := before[ip] == all[i].Source && p.names[all[i].key()] == all[i].Source && count(all, all[i].key()) == 1
					if held && addrs[ip] != all[i].Source {
						t.Fatalf("seed %d step %d: %s lost %s, which it claims, to %q", seed, step, all[i].Source, ip, addrs[ip])
					}
				}
			}
		}
		before = addrs
	}
}

func count(all []Workload, key string) (n int) {
	for i := range all {
		if all[i].key() == key {
			n++
		}
	}
	return n
}
