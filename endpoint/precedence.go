// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"fmt"
	"net/netip"
)

// precedence decides between workloads that have one name or one address. Within a source the first in its order has it;
// between sources, the one that has it already, for as long as it claims it; else the first in the order of the sources.
// So a conflict is decided the same way after every restart, and while it lasts the outcome never goes back and forth.
//
// A precedence is not safe for concurrent use.
type precedence struct {
	names map[string]string     // which source has a namespace/name
	addrs map[netip.Addr]string // and which an address
}

// settle takes the workloads of all sources, in the order of those, and returns what is to be in force, with the addresses
// that each has, and what is wrong about the rest. A workload that has none of its addresses is not in force.
func (p *precedence) settle(sources [][]Workload) (accepted []Workload, conflicts []SourceError) {
	names := winners(sources, p.names, func(w *Workload, claim func(string)) { claim(w.key()) })
	// Who does not have its name claims no address.
	named := make([][]Workload, len(sources))
	for i, all := range sources {
		for j := range all {
			w := &all[j]
			if owner := names[w.key()]; owner != w {
				conflicts = append(conflicts, w.problem("there is already one of that name, from %s", owner.place()))
				continue
			}
			named[i] = append(named[i], *w)
		}
	}
	addrs := winners(named, p.addrs, func(w *Workload, claim func(netip.Addr)) {
		for _, ip := range w.IPs {
			claim(ip)
		}
	})
	for _, all := range named {
		for j := range all {
			w := &all[j]
			won := *w
			won.IPs = nil
			for _, ip := range w.IPs {
				if owner := addrs[ip]; owner != w {
					conflicts = append(conflicts, w.problem("ip %s belongs already to %s, from %s", ip, owner.key(), owner.place()))
					continue
				}
				won.IPs = append(won.IPs, ip)
			}
			if len(won.IPs) > 0 {
				accepted = append(accepted, won)
			}
		}
	}
	p.names, p.addrs = holders(names), holders(addrs)
	return accepted, conflicts
}

// winners says which workload has each thing that workloads claim.
func winners[K comparable](sources [][]Workload, held map[K]string, claims func(*Workload, func(K))) map[K]*Workload {
	winner := make(map[K]*Workload)
	for i := range sources {
		for j := range sources[i] {
			w := &sources[i][j]
			claims(w, func(key K) {
				now, taken := winner[key]
				if !taken || (held[key] == w.Source && now.Source != w.Source) {
					winner[key] = w
				}
			})
		}
	}
	return winner
}

func holders[K comparable](winner map[K]*Workload) map[K]string {
	held := make(map[K]string, len(winner))
	for key, w := range winner {
		held[key] = w.Source
	}
	return held
}

func (w *Workload) key() string { return w.Namespace + "/" + w.Name }

// place tells somebody where a workload comes from.
func (w *Workload) place() string {
	if w.Origin == "" {
		return w.Source
	}
	return w.Source + " " + w.Origin
}

func (w *Workload) problem(format string, args ...any) SourceError {
	return SourceError{Message: fmt.Sprintf("endpoint %s of %s: ", w.key(), w.place()) + fmt.Sprintf(format, args...)}
}
