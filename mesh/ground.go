// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/weftmesh/weft/identity"
)

// ground knows which prefixes the nodes of each cluster, ours included, say are theirs: their addresses and pod CIDRs. From
// what all of them say now, whatever came first, follows what a cluster may not claim because it is another's. It is safe
// for concurrent use.
type ground struct {
	own identity.ClusterID

	mu       sync.Mutex
	declared map[declarer][]netip.Prefix
	stale    bool          // the map is not what follows from declared
	changed  chan struct{} // holds an element when stale has become true

	now atomic.Pointer[plots]
}

type declarer struct {
	cluster identity.ClusterID
	node    string
}

func newGround(own identity.ClusterID) *ground {
	g := &ground{own: own, declared: make(map[declarer][]netip.Prefix), changed: make(chan struct{}, 1)}
	g.now.Store(new(plots{{}}))
	return g
}

// declare notes that a node has these prefixes now; none: that it is gone. It counts from the next publish on.
func (g *ground) declare(c identity.ClusterID, node string, prefixes []netip.Prefix) {
	g.mu.Lock()
	defer g.mu.Unlock()
	by := declarer{c, node}
	if slices.Equal(g.declared[by], prefixes) {
		return
	}
	if len(prefixes) == 0 {
		delete(g.declared, by)
	} else {
		g.declared[by] = prefixes
	}
	g.stale = true
	select {
	case g.changed <- struct{}{}:
	default:
	}
}

// publish makes what has been declared so far count, and reports whether that is news.
func (g *ground) publish() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.stale {
		return false
	}
	g.stale = false
	g.now.Store(new(divide(g.declared)))
	return true
}

// plot is the points from first on, up to the next plot's, that the same clusters have declared.
type plot struct {
	first   point
	holders []identity.ClusterID // ascending
}

// plots divide all points: the first one begins at the first point.
type plots []plot

// edge is a point at which a declared span begins, or before which one has ended.
type edge struct {
	at      point
	by      identity.ClusterID
	entered int // 1 or -1
}

func divide(declared map[declarer][]netip.Prefix) plots {
	var edges []edge
	for by, prefixes := range declared {
		for _, p := range prefixes {
			s := spanOf(p)
			edges = append(edges, edge{s.first, by.cluster, 1})
			if s.last != lastPoint {
				edges = append(edges, edge{s.last.next(), by.cluster, -1})
			}
		}
	}
	slices.SortFunc(edges, func(a, b edge) int { return a.at.compare(b.at) })
	all := plots{{}}
	inside := make(map[identity.ClusterID]int)
	for i := 0; i < len(edges); {
		at := edges[i].at
		for ; i < len(edges) && edges[i].at == at; i++ {
			if inside[edges[i].by] += edges[i].entered; inside[edges[i].by] == 0 {
				delete(inside, edges[i].by)
			}
		}
		all = all.begin(at, inside)
	}
	return all
}

// begin adds a plot of the clusters inside, unless the one before it is theirs already.
func (all plots) begin(at point, inside map[identity.ClusterID]int) plots {
	var holders []identity.ClusterID
	for c := range inside {
		holders = append(holders, c)
	}
	slices.Sort(holders)
	last := &all[len(all)-1]
	switch {
	case slices.Equal(last.holders, holders):
		return all
	case last.first == at:
		last.holders = holders
		return all
	}
	return append(all, plot{at, holders})
}

// span returns the points of plot i.
func (all plots) span(i int) span {
	s := span{all[i].first, lastPoint}
	if i+1 < len(all) {
		s.last = all[i+1].first.before()
	}
	return s
}

// stranger returns a cluster whose ground s would intrude upon if c claimed it, 0 if there is none, and, if s lies in one
// plot, that plot's span.
//
// A point that c's own nodes have declared, or are just about to, is only the ground of clusters with a lower id, one that they
// have not is that of every cluster whose nodes have. Our own ground is always a stranger's.
func (all plots) stranger(s span, c, own identity.ClusterID, declares bool) (of identity.ClusterID, whole span) {
	i, found := slices.BinarySearchFunc(all, s.first, func(p plot, at point) int { return p.first.compare(at) })
	if !found {
		i--
	}
	whole = all.span(i)
	for ; i < len(all) && !s.last.less(all[i].first); i++ {
		holders := all[i].holders
		if len(holders) == 0 {
			continue
		}
		if slices.Contains(holders, own) {
			return own, whole
		}
		declared := declares || slices.Contains(holders, c)
		for _, h := range holders {
			if h != c && (!declared || h < c) {
				of = cmp.Or(of, h)
			}
		}
	}
	return of, whole
}
