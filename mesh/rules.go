// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/weftmesh/weft/identity"
)

// special are the prefixes that are nobody's to claim: what means "this host", "this link" or "many" wherever it is seen.
var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("255.255.255.255/32"),
	netip.MustParsePrefix("::/127"), netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
}

var specialSpans = spansOf(special...)

// use is what an address is claimed for.
type use uint8

const (
	usePod  use = iota // a workload's
	useNode            // a node's
	useVIP             // a service's: of no pod or node, and so in no list of allowed ones
)

// rules are the limits of one cluster in the form in which they are checked. They do not change.
type rules struct {
	limits  ClusterLimits
	own     spans
	allowed [useVIP + 1]spans // by use; the prefixes that are nobody's left out
	denied  spans
	aside   spans // for other clusters
	// reserved has a bit for each reserved identity that may be used.
	reserved [4]uint64
}

// rulesFor compiles the limits of one cluster. Ours are prefixes of our own beside those in the limits.
func rulesFor(l *Limits, cluster string, ours []netip.Prefix) *rules {
	c := l.of(cluster)
	r := &rules{
		limits: c, own: spansOf(slices.Concat(ours, l.OwnPrefixes)...), denied: spansOf(c.DeniedPrefixes...),
		aside: spansOf(l.setAside(cluster)...).minus(spansOf(c.aside...)),
	}
	for u, allow := range map[use][]netip.Prefix{usePod: c.PodPrefixes, useNode: c.NodePrefixes, useVIP: nil} {
		set := spans{everything}
		if len(allow) > 0 {
			set = spansOf(allow...)
		}
		r.allowed[u] = set.minus(specialSpans).minus(r.own).minus(r.denied).minus(r.aside)
	}
	for _, id := range c.ReservedIdentities {
		r.reserved[id/64] |= 1 << (id % 64)
	}
	return r
}

// prefix checks a prefix against what the limits say of it.
func (r *rules) prefix(p netip.Prefix, u use) error {
	shortest := r.limits.ShortestIPv4
	if p.Addr().Is6() {
		shortest = r.limits.ShortestIPv6
	}
	if p.Bits() < shortest {
		return limited(reasonPrefixLength, fmt.Errorf("%s is shorter than /%d, the shortest prefix that is allowed", p, shortest))
	}
	s := spanOf(p)
	if _, ok := r.allowed[u].around(s); ok {
		return nil
	}
	switch {
	case specialSpans.overlap(s):
		return limited(reasonSpecialPrefix, fmt.Errorf("%s is loopback, link-local, multicast, broadcast or unspecified", p))
	case r.own.overlap(s):
		return limited(reasonOwnPrefix, fmt.Errorf("%s overlaps a prefix of our own", p))
	case r.denied.overlap(s):
		return limited(reasonDeniedPrefix, fmt.Errorf("%s overlaps one of the cluster's denied-prefixes", p))
	case r.aside.overlap(s):
		return limited(reasonDeniedPrefix, fmt.Errorf("%s overlaps what the limits set aside for another cluster", p))
	}
	list := "pod-prefixes"
	if u == useNode {
		list = "node-prefixes"
	}
	return limited(reasonDeniedPrefix, fmt.Errorf("%s is outside the cluster's %s", p, list))
}

// mayReserved reports whether addresses may have a reserved identity.
func (r *rules) mayReserved(id identity.ID) bool { return r.reserved[id/64]&(1<<(id%64)) != 0 }
