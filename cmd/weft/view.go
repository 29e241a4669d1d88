// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"iter"
	"net/netip"
	"strconv"
	"strings"

	"github.com/weftmesh/weft/api"
	"github.com/weftmesh/weft/bpf"
	"github.com/weftmesh/weft/datapath"
	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// view is what the agent shows of itself: its tables and tasks in the terms of the API.
func (a *agent) view() api.Agent {
	return api.Agent{
		Version: versionInfo, Status: a.fullStatus, IPs: a.listIPs, IP: a.findIP, Nodes: a.listNodes,
		Identities: a.listIdentities, Identity: a.findIdentity, Describe: a.describe, Flows: a.flows,
		Services: func() iter.Seq[api.Service] { return a.listServices }, Service: a.findService, Explain: a.explain, Conflicts: a.listConflicts, Metrics: a.metrics(),
		Verify: a.verify, Endpoints: addedEndpoints{a.added},
		Config: a.options, LogLevel: a.level,
	}
}

// clusterNames maps the ids of all clusters that are known now to their names.
func (a *agent) clusterNames() map[identity.ClusterID]string {
	names := map[identity.ClusterID]string{identity.ClusterID(a.cfg.clusterID): a.cfg.clusterName}
	for _, r := range a.mesh.Status() {
		if r.ClusterID != 0 && r.ClusterID <= uint32(a.cfg.layout.MaxCluster()) {
			names[identity.ClusterID(r.ClusterID)] = r.Name
		}
	}
	return names
}

func (a *agent) listIPs() iter.Seq[api.IP] {
	names := a.clusterNames()
	return func(yield func(api.IP) bool) {
		for claim := range a.ips.All() {
			if !yield(makeIP(&claim, names)) {
				return
			}
		}
	}
}

func makeIP(c *ipcache.Claim, names map[identity.ClusterID]string) api.IP {
	ip := api.IP{
		Prefix: c.Prefix, Identity: uint32(c.Entry.Identity), Cluster: uint16(c.Owner.Cluster), ClusterName: names[c.Owner.Cluster],
		Source: c.Owner.Source.String(), Owner: c.Owner.Object, Revision: c.Revision, Host: c.Entry.Host,
		EncryptKey: c.Entry.EncryptKey, Namespace: c.Entry.Namespace, Pod: c.Entry.Pod,
	}
	if flags := bpf.IPCacheFlags(c.Entry.Flags); flags != 0 {
		ip.Flags = strings.Split(flags.String(), ",")
	}
	return ip
}

func (a *agent) findIP(addr netip.Addr) (api.IPDetail, bool) {
	winner, ok := a.ips.Lookup(addr)
	if !ok {
		return api.IPDetail{}, false
	}
	names := a.clusterNames()
	detail := api.IPDetail{Meta: api.MetaOf(api.KindIP), Address: addr, IP: makeIP(&winner, names)}
	detail.IP.Labels = a.labels(winner.Entry.Identity)
	for _, claim := range a.ips.Claims(winner.Prefix) {
		if claim.Owner != winner.Owner || claim.CIDR != winner.CIDR {
			detail.Shadowed = append(detail.Shadowed, makeIP(&claim, names))
		}
	}
	return detail, true
}

func (a *agent) labels(id identity.ID) []string {
	labels, _ := a.identities.Labels(id)
	return texts(labels)
}

func (a *agent) listNodes() []api.Node {
	nodes, _ := a.nodes.Snapshot()
	list := make([]api.Node, 0, len(nodes))
	for i := range nodes {
		n := &nodes[i]
		shown := api.Node{
			Name: n.Name, Cluster: n.Cluster, ClusterID: n.ClusterID, PodCIDRs: present(n.PodCIDRs()), EncryptKey: n.EncryptKey,
			Addresses: []api.NodeAddress{}, Labels: n.Labels, Local: n.Cluster == a.cfg.clusterName && n.Name == a.cfg.nodeName,
		}
		for _, address := range n.Addresses {
			shown.Addresses = append(shown.Addresses, api.NodeAddress{Type: address.Type, IP: address.IP})
		}
		list = append(list, shown)
	}
	return list
}

// present makes an empty list of none: JSON tells the two apart.
func present[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

func (a *agent) listIdentities() iter.Seq[api.Identity] {
	names, references := a.clusterNames(), a.references()
	return func(yield func(api.Identity) bool) {
		for id, labels := range a.identities.All() {
			shown := a.makeIdentity(id, labels, names)
			shown.References = a.referencesOf(id, references)
			if !yield(shown) {
				return
			}
		}
	}
}

func (a *agent) makeIdentity(id identity.ID, labels identity.Labels, names map[identity.ClusterID]string) api.Identity {
	shown := api.Identity{ID: uint32(id), Labels: texts(labels)}
	if id.Reserved() {
		shown.Name = id.String()
		return shown
	}
	cluster := a.cfg.layout.Cluster(id)
	shown.Cluster, shown.ClusterName = uint16(cluster), names[cluster]
	return shown
}

func (a *agent) findIdentity(number uint32) (api.Identity, bool) {
	id := identity.ID(number)
	labels, ok := a.identities.Labels(id)
	if !ok {
		return api.Identity{}, false
	}
	shown := a.makeIdentity(id, labels, a.clusterNames())
	shown.References = a.referencesOf(id, a.references())
	return shown, true
}

// references counts the workloads of this node by identity.
func (a *agent) references() map[identity.ID]int {
	count := make(map[identity.ID]int)
	for _, e := range a.endpoints.Status().Endpoints {
		count[e.Identity]++
	}
	return count
}

// referencesOf is how many workloads of this node have an identity of our own cluster; nil for others, whose workloads are
// elsewhere.
func (a *agent) referencesOf(id identity.ID, references map[identity.ID]int) *int {
	if id.Reserved() || a.cfg.layout.Cluster(id) != identity.ClusterID(a.cfg.clusterID) {
		return nil
	}
	n := references[id]
	return &n
}

// flow is a packet with the identities that the kernel found for its ends.
func (a *agent) flow(f *datapath.Flow) api.Flow {
	shown := api.Flow{
		Time: f.Time, Device: f.Device, Direction: f.Direction.String(), Verdict: f.Verdict.String(),
		Source: api.Peer{IP: f.SrcIP, Port: f.SrcPort}, Destination: api.Peer{IP: f.DstIP, Port: f.DstPort},
		Mode: f.Mode.String(), Protocol: protocolName(f.Proto), Length: f.Length,
	}
	if shown.Device == "" {
		shown.Device = strconv.FormatUint(uint64(f.IfIndex), 10)
	}
	switch f.Proto {
	case bpf.ProtocolTCP:
		shown.TCPFlags = tcpFlags(f.TCPFlags)
	case bpf.ProtocolICMP, bpf.ProtocolICMPv6:
		shown.ICMP = fmt.Sprintf("%d/%d", f.SrcPort, f.DstPort)
		shown.Source.Port, shown.Destination.Port = 0, 0
	}
	a.identify(&shown.Source, f.Source)
	a.identify(&shown.Destination, f.Destination)
	return shown
}

// identify notes whose a side is. The cluster of a reserved identity is the one that claims the address.
func (a *agent) identify(p *api.Peer, id identity.ID) {
	if !p.IP.IsValid() {
		return
	}
	p.Identity = uint32(id)
	if !id.Reserved() {
		p.Cluster = uint16(a.cfg.layout.Cluster(id))
		return
	}
	p.Name = id.String()
	if claim, ok := a.ips.Lookup(p.IP); ok && claim.Entry.Identity == id {
		p.Cluster = uint16(claim.Owner.Cluster)
	}
}

// describe adds names and labels, as they are now.
func (a *agent) describe(flows []api.Flow) {
	names := a.clusterNames()
	for i := range flows {
		for _, p := range []*api.Peer{&flows[i].Source, &flows[i].Destination} {
			if p.IP.IsValid() {
				p.Labels = a.labels(identity.ID(p.Identity))
			}
			if p.Cluster != 0 {
				p.ClusterName = names[identity.ClusterID(p.Cluster)]
			}
		}
	}
}

func protocolName(number uint8) string {
	switch number {
	case bpf.ProtocolTCP:
		return "TCP"
	case bpf.ProtocolUDP:
		return "UDP"
	case bpf.ProtocolICMP:
		return "ICMP"
	case bpf.ProtocolICMPv6:
		return "ICMPv6"
	case bpf.ProtocolSCTP:
		return "SCTP"
	}
	return strconv.Itoa(int(number))
}

// tcpFlagNames are those of the bits of a TCP header, from the lowest on (RFC 9293, section 3.1).
var tcpFlagNames = []string{"FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"}

func tcpFlags(bits uint8) string {
	var names []string
	for i, name := range tcpFlagNames {
		if bits&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}
