// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// gate decides what one remote cluster may claim, by its limits, by what all clusters say is theirs, and by which nodes it
// has. It is safe for concurrent use. A nil gate lets everything pass: that of our own cluster.
type gate struct {
	cluster identity.ClusterID
	lo, hi  identity.ID // the cluster's own identities
	name    string
	policy  *policy
	ground  *ground
	now     atomic.Pointer[compiled] // of policy
	hosts   *hosts
	table   *ipcache.Table
	held    atomic.Int64 // announcements that wait
	bytes   atomic.Int64 // of nodes, services and identities in use
	pace    pace
}

func (m *Mesh) newGate(name string, id identity.ClusterID) *gate {
	lo, hi := m.cfg.Layout.Range(id)
	return &gate{
		name: name, cluster: id, lo: lo, hi: hi, policy: m.policy, ground: m.ground, hosts: newHosts(), table: m.cfg.IPs,
	}
}

// compiled are the rules that follow from limits.
type compiled struct {
	from  *Limits
	rules *rules
}

// rules returns what the limits say now.
func (g *gate) rules() *rules {
	l := g.policy.now.Load()
	c := g.now.Load()
	if c == nil || c.from != l {
		c = &compiled{l, rulesFor(l, g.name, g.policy.ours)}
		g.now.Store(c)
	}
	return c.rules
}

// prefix checks whether the cluster may claim p, which its nodes have declared to be theirs if declares.
func (g *gate) prefix(p netip.Prefix, u use, declares bool) error {
	r := g.rules()
	if err := r.prefix(p, u); err != nil {
		return err
	}
	_, err := g.onGround(r, p, declares)
	return err
}

func (g *gate) onGround(r *rules, p netip.Prefix, declares bool) (span, error) {
	of, whole := g.ground.now.Load().stranger(spanOf(p), g.cluster, g.ground.own, declares)
	switch {
	case of == 0, of != g.ground.own && r.limits.Overlaps:
		return whole, nil
	case of == g.ground.own:
		return whole, limited(reasonOwnPrefix, fmt.Errorf("%s overlaps what a node of our own cluster has", p))
	}
	return whole, limited(reasonForeignPrefix, fmt.Errorf("%s overlaps what nodes of the cluster with id %d have", p, of))
}

// identity returns the identity that an address announced with id gets here. The cluster's host is a remote node to us.
// Identity 0 stands for none, and an address needs one.
func (g *gate) identity(id identity.ID) (identity.ID, error) {
	switch {
	case g.lo <= id && id <= g.hi:
		return id, nil
	case id == identity.Host:
		id = identity.RemoteNode
	case id == identity.Invalid || !id.Reserved():
		return 0, refuse(reasonForeign, fmt.Errorf("identity %d is neither reserved nor in the cluster's range %d to %d",
			uint32(id), uint32(g.lo), uint32(g.hi)))
	}
	if !g.rules().mayReserved(id) {
		return 0, limited(reasonReserved, fmt.Errorf("identity %d (%s) is reserved, and the cluster may not use it", uint32(id), id))
	}
	return id, nil
}

// host checks the host behind which an address is announced. It reports wait for one that may yet turn out to be a node of
// the cluster.
func (g *gate) host(addr netip.Addr) (wait bool, err error) {
	if !addr.IsValid() || g.hosts.has(addr) {
		return false, nil
	}
	if err := g.prefix(single(addr), useNode, false); err != nil {
		return false, limited(reasonForeignHost, fmt.Errorf("host %s is no node of the cluster: %w", addr, err))
	}
	return !g.rules().limits.AnyHost, nil
}

// judge checks the announcements of one cluster. It remembers where the last ones lay, since those of one node come
// together. Not safe for concurrent use.
type judge struct {
	*gate
	r     *rules
	plots *plots
	free  span // all of it may be claimed for pods, by r and plots
	some  bool // free is set

	host  netip.Addr // known to be a node
	hosts uint64     // when that was known
}

// announcement checks one announcement, whose identity is the one that it is to get.
func (j *judge) announcement(p netip.Prefix, id identity.ID, host netip.Addr) (wait bool, err error) {
	u := usePod
	if id == identity.RemoteNode {
		u = useNode
	}
	if err := j.place(p, u); err != nil {
		return false, err
	}
	generation := j.gate.hosts.generation.Load()
	if host == j.host && generation == j.hosts && host.IsValid() {
		return false, nil
	}
	wait, err = j.gate.host(host)
	if err == nil && !wait && j.gate.hosts.has(host) {
		j.host, j.hosts = host, generation
	}
	return wait, err
}

func (j *judge) place(p netip.Prefix, u use) error {
	r, now := j.gate.rules(), j.gate.ground.now.Load()
	if r != j.r || now != j.plots {
		j.r, j.plots, j.some = r, now, false
	}
	s := spanOf(p)
	if j.some && u == usePod && p.IsSingleIP() && j.free.contains(s) {
		return nil
	}
	if err := r.prefix(p, u); err != nil {
		return err
	}
	whole, err := j.gate.onGround(r, p, false)
	if err != nil || u != usePod || !whole.contains(s) {
		return err
	}
	allowed, _ := r.allowed[usePod].around(s)
	j.free, j.some = allowed.within(whole), true
	return nil
}

// hosts are the addresses of the nodes of one cluster. One that its last node has given up stays for a while: a node whose
// key is lost for a moment, as by an expired lease, must not take its workloads with it.
type hosts struct {
	generation atomic.Uint64 // of known

	mu    sync.Mutex
	known map[netip.Addr]int // how many nodes have it
	gone  map[netip.Addr]time.Time
}

func newHosts() *hosts {
	return &hosts{known: make(map[netip.Addr]int), gone: make(map[netip.Addr]time.Time)}
}

func (h *hosts) has(addr netip.Addr) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ok := h.known[addr]
	return ok
}

// replace notes that one node has other addresses than before. With grace, those that no node has any more stay for a while.
func (h *hosts) replace(before, after []netip.Addr, grace bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, addr := range after {
		h.known[addr]++
		delete(h.gone, addr)
	}
	for _, addr := range before {
		if h.known[addr]--; h.known[addr] > 0 {
			continue
		}
		if grace {
			h.gone[addr] = time.Now()
			continue
		}
		delete(h.known, addr)
		h.generation.Add(1)
	}
}

// expire forgets the addresses that no node has had for so long, and reports whether there were any.
func (h *hosts) expire(now time.Time, keep time.Duration) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	found := false
	for addr, since := range h.gone {
		if now.Sub(since) >= keep {
			delete(h.gone, addr)
			delete(h.known, addr)
			found = true
		}
	}
	if found {
		h.generation.Add(1)
	}
	return found
}

// pace holds back a cluster whose changes come faster than they may. What is held back waits at the watcher, which joins
// the changes of a key, and then at the cluster's etcd.
type pace struct {
	mu     sync.Mutex
	tokens float64
	at     time.Time // when there were so many
	held   atomic.Uint64
}

// take charges for n events that have been taken, and returns how long to take no more.
func (p *pace) take(n int, l *ClusterLimits, now time.Time) time.Duration {
	if l.MaxEventsPerSecond == 0 {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	burst, rate := float64(max(l.BurstEvents, 1)), float64(l.MaxEventsPerSecond)
	if p.at.IsZero() {
		p.tokens = burst
	} else {
		p.tokens = min(burst, p.tokens+rate*now.Sub(p.at).Seconds())
	}
	p.at = now
	p.tokens -= float64(n)
	if p.tokens >= 0 {
		return 0
	}
	p.held.Add(1)
	return time.Duration(-p.tokens / rate * float64(time.Second))
}
