// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"net/netip"
	"slices"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/node"
)

// nodes decodes the nodes of a cluster. Besides its place in the table of nodes, each has claims in the ipcache: for its
// addresses, its health and ingress endpoints and its pod CIDRs.
type nodes struct {
	table     *node.Table
	ips       *ipcache.Table
	layout    identity.Layout
	cluster   identity.ClusterID
	name      string
	local     string // the name of this node, if the cluster is our own
	source    ipcache.Source
	dualStack bool
	underlay6 bool
	remote    bool // the cluster is not our own
	prefer    node.Preference

	known map[string][]claimKey // by node
	batch batch
}

var _ decoder = (*nodes)(nil)

func (d *nodes) upsert(key, value []byte, revision int64) error {
	n, err := node.Parse(value)
	if err != nil {
		return refuse(reasonMalformed, err)
	}
	if err := n.Validate(string(key), d.name, uint32(d.cluster), uint32(d.layout.MaxCluster())); err != nil {
		return refuse(reasonMismatch, err)
	}
	if d.local != "" && n.Name == d.local {
		return errIgnored
	}
	n.Preference = d.prefer
	claims := d.claims(n, revision)
	d.known[n.Name] = d.replace(n.Name, claims)
	d.table.Upsert(n)
	return nil
}

func (d *nodes) remove(key []byte) {
	if _, ok := d.known[string(key)]; !ok {
		return
	}
	d.table.Delete(d.name, string(key))
	d.replace(string(key), nil)
	delete(d.known, string(key))
}

func (d *nodes) flush(arrived time.Time) { d.batch.apply(d.ips, arrival(d.cluster, arrived)) }

// replace adds to the batch what turns the claims of one node into others: first what is claimed now, then what no longer
// is, so that no address is without an owner in between. It returns what is claimed now.
func (d *nodes) replace(node string, claims []ipcache.Claim) []claimKey {
	now := make([]claimKey, len(claims))
	for i, c := range claims {
		now[i] = keyOf(c)
		d.batch.add(ipcache.Op{Claim: c})
	}
	for _, k := range d.known[node] {
		if !slices.Contains(now, k) {
			d.batch.add(ipcache.Op{Delete: true, Claim: ipcache.Claim{Prefix: k.prefix, CIDR: k.cidr, Owner: d.owner(node)}})
		}
	}
	return now
}

// owner is who makes the claims of a node.
func (d *nodes) owner(node string) ipcache.Owner {
	return ipcache.Owner{Cluster: d.cluster, Source: d.source, Object: "node/" + node}
}

// claimKey tells the claims of one owner apart.
type claimKey struct {
	prefix netip.Prefix
	cidr   bool
}

func keyOf(c ipcache.Claim) claimKey { return claimKey{c.Prefix, c.CIDR} }

// claims lists what a node contributes to the ipcache, each prefix once, the first mention counting.
func (d *nodes) claims(n node.Node, revision int64) []ipcache.Claim {
	var (
		claims []ipcache.Claim
		seen   = make(map[claimKey]bool)
		owner  = d.owner(n.Name)
		host   = n.IP(d.underlay6)
	)
	add := func(prefix netip.Prefix, cidr bool, entry ipcache.Entry) {
		if k := (claimKey{prefix, cidr}); prefix.IsValid() && !seen[k] {
			seen[k] = true
			claims = append(claims, ipcache.Claim{Prefix: prefix, CIDR: cidr, Owner: owner, Revision: revision, Entry: entry})
		}
	}
	for _, a := range n.Addresses {
		e := ipcache.Entry{Identity: identity.RemoteNode}
		// The address in the pod network is reached through the node's tunnel, the others are the underlay itself.
		if a.Type == node.CiliumInternalIP {
			e.Host = host
		}
		if d.remote {
			e.Flags = ipcache.FlagRemoteCluster
		}
		add(single(a.IP), false, e)
	}
	behind := ipcache.Entry{Host: host, EncryptKey: n.EncryptKey}
	for _, addr := range []netip.Addr{n.IPv4Health, n.IPv6Health} {
		behind.Identity = identity.Health
		add(single(addr), false, behind)
	}
	for _, addr := range []netip.Addr{n.IPv4Ingress, n.IPv6Ingress} {
		behind.Identity = identity.Ingress
		add(single(addr), false, behind)
	}
	for _, prefix := range n.PodCIDRs() {
		behind.Identity = identity.WorldOf(prefix.Addr(), d.dualStack)
		add(prefix, true, behind)
	}
	return claims
}

// single is the prefix of one address, invalid if addr is.
func single(addr netip.Addr) netip.Prefix {
	if !addr.IsValid() {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(addr, addr.BitLen())
}
