// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"net/netip"
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

	known map[string][]ipcache.Claim // by node
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
	d.replace(d.known[n.Name], claims)
	d.known[n.Name] = claims
	d.table.Upsert(n)
	return nil
}

func (d *nodes) remove(key []byte) {
	claims, ok := d.known[string(key)]
	if !ok {
		return
	}
	d.table.Delete(d.name, string(key))
	d.replace(claims, nil)
	delete(d.known, string(key))
}

func (d *nodes) flush(arrived time.Time) { d.batch.apply(d.ips, arrival(d.cluster, arrived)) }

// replace adds to the batch what turns the claims of one node into others: first what is claimed now, then what no longer
// is, so that no address is without an owner in between.
func (d *nodes) replace(old, claims []ipcache.Claim) {
	stays := make(map[claimKey]bool, len(claims))
	for _, c := range claims {
		stays[keyOf(c)] = true
		d.batch.add(ipcache.Op{Claim: c})
	}
	for _, c := range old {
		if !stays[keyOf(c)] {
			d.batch.add(ipcache.Op{Delete: true, Claim: c})
		}
	}
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
		owner  = ipcache.Owner{Cluster: d.cluster, Source: d.source, Object: "node/" + n.Name}
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
