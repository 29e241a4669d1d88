// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"iter"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/mesh"
	"github.com/weftmesh/weft/node"
)

// explainer answers for one address, from one look at the agent.
type explainer struct {
	*agent
	names   map[identity.ClusterID]string
	remotes map[identity.ClusterID]*mesh.RemoteStatus
	all     []mesh.RemoteStatus
}

// explain tells all that is known of an address.
func (a *agent) explain(addr netip.Addr) api.Explanation {
	x := &explainer{agent: a, names: a.clusterNames(), remotes: make(map[identity.ClusterID]*mesh.RemoteStatus)}
	x.all = a.mesh.Status()
	for _, r := range x.all {
		if r.ClusterID != 0 && r.ClusterID <= uint32(a.cfg.layout.MaxCluster()) {
			x.remotes[identity.ClusterID(r.ClusterID)] = &r
		}
	}
	return x.explain(addr)
}

func (x *explainer) explain(addr netip.Addr) api.Explanation {
	e := api.Explanation{Meta: api.MetaOf(api.KindExplanation), Address: addr, Claims: []api.Claim{}}
	var prefixes [][]ipcache.Claim // the longest first
	for bits := addr.BitLen(); bits >= 0; bits-- {
		prefix, _ := addr.Prefix(bits)
		claims := x.ips.Claims(prefix)
		if len(claims) == 0 {
			continue
		}
		prefixes = append(prefixes, claims)
		for i := range claims {
			shown := x.claim(&claims[i])
			shown.Wins = i == 0
			e.Claims = append(e.Claims, shown)
		}
	}
	for _, c := range x.mesh.Waiting(addr) {
		e.Waiting = append(e.Waiting, x.claim(&c))
	}
	e.Refused = refused(addr, x.all)
	e.Services = x.frontends(addr)
	e.Why = why(prefixes)
	if len(prefixes) == 0 && len(e.Services) > 0 {
		e.Why = "it is an address of a service: who connects to it gets a backend's in its place"
	}
	id := identity.WorldOf(addr, x.dualStack())
	var winner *ipcache.Claim
	if len(prefixes) > 0 {
		winner = &prefixes[0][0]
		id = winner.Entry.Identity
		e.Node = x.node(winner)
		if r := x.remotes[winner.Owner.Cluster]; r != nil {
			cluster := makeCluster(r)
			cluster.Rejections = nil
			e.Cluster = &cluster
		}
	}
	found := datapath.Explain(x.cfg.bpffs, addr)
	e.Kernel = makeKernel(x.cfg.bpffs, &found)
	x.compare(&e.Kernel, &found, winner)
	if e.Kernel.Kept && winner == nil {
		id = found.Entry.Identity
		e.Why = "nobody has claimed it since the agent started, but its cluster has not been heard yet: packets are identified as they were before"
	}
	labels, known := x.identities.Labels(id)
	e.Identity, e.LabelsKnown = x.makeIdentity(id, labels, x.names), known
	s := x.status()
	e.Advice = advice(&e, &s)
	return e
}

// frontends are those of services that have the address.
func (x *explainer) frontends(addr netip.Addr) (found []api.ExplainedService) {
	for v := range x.services.All() {
		for i := range v.Fronts {
			if f := &v.Fronts[i]; f.Addr == addr {
				found = append(found, api.ExplainedService{Namespace: v.Namespace, Name: v.Name.Name, ServiceFrontend: x.makeFrontend(f, false)})
			}
		}
	}
	return found
}

// refused finds the last refusals of announcements for an address, or for prefixes around it, each key once. They are those
// that weft clusters rejected shows.
func refused(addr netip.Addr, remotes []mesh.RemoteStatus) []api.Refused {
	var found []api.Refused
	for i := range remotes {
		seen := make(map[string]bool)
		for _, rej := range slices.Backward(remotes[i].LastRejections) {
			if rej.Kind != "ip" || seen[rej.Key] || !covers(rej.Key, addr) {
				continue
			}
			seen[rej.Key] = true
			found = append(found, api.Refused{
				Cluster: remotes[i].Name, Rejection: api.Rejection{Kind: rej.Kind, Key: rej.Key, Reason: rej.Reason, At: rej.At},
			})
		}
	}
	slices.SortStableFunc(found, func(a, b api.Refused) int { return b.At.Compare(a.At) })
	return found
}

// covers reports whether the key of an announcement, of an address or a prefix, says something of addr.
func covers(key string, addr netip.Addr) bool {
	if p, err := netip.ParsePrefix(key); err == nil {
		return p.Contains(addr)
	}
	a, err := netip.ParseAddr(key)
	return err == nil && a.Unmap() == addr
}

// claim is a claim with all that tells where it comes from.
func (x *explainer) claim(c *ipcache.Claim) api.Claim {
	shown := api.Claim{IP: makeIP(c, x.names), CIDR: c.CIDR}
	shown.Key, shown.File = x.key(c), x.file(c)
	if c.Revision != 0 {
		shown.Since, shown.Exactly = x.mesh.SeenAt(c.Owner.Cluster, c.Revision)
	}
	return shown
}

const (
	nodeObject     = "node/"
	endpointObject = "endpoint/"
)

// key is the key under which the claim stands in its cluster's etcd. What this node says itself stands there once it is
// published.
func (x *explainer) key(c *ipcache.Claim) string {
	cached := false
	switch r := x.remotes[c.Owner.Cluster]; {
	case c.Owner.Source == ipcache.Local && x.writer == nil:
		return ""
	case r != nil:
		cached = r.Cached
	}
	if name, ok := strings.CutPrefix(c.Owner.Object, nodeObject); ok {
		return stateKey(node.StatePrefix, x.names[c.Owner.Cluster], cached) + "/" + name
	}
	space, name := ipcache.DefaultSpace, c.Prefix.String()
	if cached {
		space = x.names[c.Owner.Cluster]
	}
	if !c.CIDR && c.Prefix.IsSingleIP() {
		name = c.Prefix.Addr().String()
	}
	return stateKey(ipcache.StatePrefix, space, cached) + "/" + name
}

// stateKey is where a kind of objects stands: in the cluster's own tree, or in a copy of it.
func stateKey(kind, space string, cached bool) string {
	if cached {
		kind = identity.CachePrefix(kind)
	}
	return kind + "/" + space
}

// file declares a workload of this node.
func (x *explainer) file(c *ipcache.Claim) string {
	name, ok := strings.CutPrefix(c.Owner.Object, endpointObject)
	if !ok || c.Owner.Source != ipcache.Local {
		return ""
	}
	for _, e := range x.endpoints.Status().Endpoints {
		if e.Namespace+"/"+e.Name == name {
			return e.Origin
		}
	}
	return ""
}

// node is the machine that the claim is about: the one whose address it is, or behind which the workload lives.
func (x *explainer) node(c *ipcache.Claim) *api.ExplainedNode {
	name, isNode := strings.CutPrefix(c.Owner.Object, nodeObject)
	nodes, _ := x.nodes.Snapshot()
	var found *api.ExplainedNode
	for i := range nodes {
		n := &nodes[i]
		same := identity.ClusterID(n.ClusterID) == c.Owner.Cluster
		if isNode && (!same || n.Name != name) || !isNode && !hasAddress(n, c.Entry.Host) {
			continue
		}
		// Where two clusters give an address to a node each, the claim's own cluster knows best.
		if found == nil || same {
			via := c.Entry.Host
			if tunnel := x.datapath.Wanted(c.Prefix, c.Entry).TunnelEndpoint; tunnel.IsValid() {
				via = tunnel
			}
			found = &api.ExplainedNode{Name: n.Name, Cluster: n.Cluster, ClusterID: n.ClusterID, Via: via}
		}
	}
	return found
}

func hasAddress(n *node.Node, addr netip.Addr) bool {
	return slices.ContainsFunc(n.Addresses, func(a node.Address) bool { return a.IP == addr })
}

// compare says whether the map is what the table makes it.
func (x *explainer) compare(k *api.Kernel, found *datapath.Explanation, winner *ipcache.Claim) {
	switch {
	case found.EntryErr != nil:
	case x.keeps(found, winner):
		k.Equal, k.Kept = true, true
	case winner == nil:
		if k.Equal = !found.Found; !k.Equal {
			k.Wanted = "nothing"
		}
	default:
		want := x.datapath.Wanted(winner.Prefix, winner.Entry)
		if k.Equal = found.Found && found.Entry.Says(want); !k.Equal {
			k.Wanted = want.String()
		}
	}
}

// keeps reports whether what the kernel has is from before the agent's start, and stays until its cluster has been heard completely.
func (x *explainer) keeps(found *datapath.Explanation, winner *ipcache.Claim) bool {
	if !found.Found || winner != nil && found.Entry.Says(x.datapath.Wanted(winner.Prefix, winner.Entry)) {
		return false
	}
	return !x.listed(x.cfg.layout.Cluster(found.Entry.Identity))
}

// why tells which claim is in force, and what it has before the others.
func why(prefixes [][]ipcache.Claim) string {
	if len(prefixes) == 0 {
		return "nobody claims a prefix that contains it, so it is the world's"
	}
	first := prefixes[0]
	text := fmt.Sprintf("%s is the only prefix that contains it", first[0].Prefix)
	if len(prefixes) > 1 {
		text = fmt.Sprintf("%s is the longest of %d prefixes that contain it", first[0].Prefix, len(prefixes))
	}
	if len(first) == 1 {
		return text + ", and has one claim"
	}
	return fmt.Sprintf("%s; of its %d claims the winner has %s", text, len(first), precedence(&first[0], &first[1]))
}

// precedence says by what the first claim, the winner, goes before the next one for the same prefix. It follows
// [ipcache.Claim.Compare].
func precedence(winner, next *ipcache.Claim) string {
	a, b := winner.Owner, next.Owner
	switch {
	case winner.CIDR != next.CIDR:
		return "a host entry before an equal CIDR"
	case a.Source != b.Source:
		return fmt.Sprintf("source %s before %s", a.Source, b.Source)
	case a.Cluster != b.Cluster:
		return fmt.Sprintf("the lowest cluster id, %d before %d", a.Cluster, b.Cluster)
	case winner.Revision != next.Revision:
		return fmt.Sprintf("the later statement, revision %d before %d", winner.Revision, next.Revision)
	}
	return fmt.Sprintf("the first name, %s before %s", a.Object, b.Object)
}

// makeKernel is what the kernel has said.
func makeKernel(bpffs string, found *datapath.Explanation) api.Kernel {
	k := api.Kernel{Pin: filepath.Join(bpffs, "weft", "ipcache"), Error: errorText(found.EntryErr), RouteError: errorText(found.RouteErr)}
	if found.Found {
		shown := makeMapEntry(found.Entry)
		k.Entry = &api.KernelEntry{
			Identity: shown.Identity, TunnelEndpoint: shown.TunnelEndpoint, EncryptKey: shown.EncryptKey, Flags: shown.Flags,
		}
	}
	if r := found.Route; found.RouteErr == nil {
		k.Route = &api.KernelRoute{
			Type: r.Type, Device: r.Device, Gateway: r.Gateway, Source: r.Source, Table: r.Table, Protocol: r.Protocol,
		}
	}
	return k
}

// listConflicts yields the prefixes that several claim, each for something else.
func (a *agent) listConflicts() iter.Seq[api.Conflict] {
	names := a.clusterNames()
	return func(yield func(api.Conflict) bool) {
		for claims := range a.ips.Conflicts(netip.Prefix{}) {
			c := api.Conflict{Prefix: claims[0].Prefix, Winner: makeIP(&claims[0], names), Why: precedence(&claims[0], &claims[1])}
			for i := range claims[1:] {
				c.Shadowed = append(c.Shadowed, makeIP(&claims[i+1], names))
			}
			if !yield(c) {
				return
			}
		}
	}
}
