// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"errors"
	"fmt"
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
	ground    *ground
	gate      *gate // nil for our own cluster, which may claim anything

	known map[string]knownNode
	batch batch
}

// knownNode is a node that is in use. What is used of it stands in the table of nodes, and its claims follow from that.
type knownNode struct {
	revision int64
	said     *node.Node // by the cluster, where not all of that is used
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
	if !plainName(n.Name) {
		return refuse(reasonMalformed, fmt.Errorf("node name %q is none: want up to %d plain characters", n.Name, longestName))
	}
	if d.local != "" && n.Name == d.local {
		return errIgnored
	}
	n.Preference = d.prefer
	used, err := d.admit(n)
	if err != nil && !isPartial(err) {
		return err
	}
	claims := d.claims(used, revision)
	if err := d.spend(len(claims) - len(d.inForce(n.Name))); err != nil {
		return err
	}
	d.put(nodeUpdate{said: n, used: used, claims: claims, revision: revision, cut: err != nil, grace: true})
	return err
}

// admit returns what of a node is used: with a partial refusal, not all of it, with another one, nothing.
func (d *nodes) admit(n node.Node) (node.Node, error) {
	if d.gate == nil {
		return n, nil
	}
	var cut error
	taken := make(map[netip.Prefix]bool)
	for _, p := range nodePrefixes(&n) {
		err := d.gate.prefix(p.prefix, p.use, true)
		var refused *refusal
		switch {
		case err == nil:
		case errors.As(err, &refused) && refused.reason == reasonForeignPrefix:
			taken[p.prefix] = true
			cut = partly(err)
		default:
			return n, err
		}
	}
	if cut != nil {
		n = without(n, taken)
	}
	return n, cut
}

// spend finds whether the quota leaves room for so many more entries.
func (d *nodes) spend(more int) error {
	if d.gate == nil || more <= 0 {
		return nil
	}
	most := d.gate.rules().limits.MaxEntries
	if most == 0 || d.gate.entriesLeft()-d.batch.len() >= more {
		return nil
	}
	d.flush(time.Time{})
	if d.gate.entriesLeft() < more {
		return limited(reasonQuota, fmt.Errorf("the cluster has its %d entries; raise its max-entries in the limits if it should have more", most))
	}
	return nil
}

// nodeUpdate is what a node comes to.
type nodeUpdate struct {
	said, used node.Node
	claims     []ipcache.Claim // of used
	revision   int64
	cut        bool // used is not all that is said
	grace      bool // for addresses that the node had before: see hosts
}

// put makes u what is in use of its node.
func (d *nodes) put(u nodeUpdate) {
	before, _ := d.table.Get(d.name, u.said.Name)
	d.replace(u.said.Name, u.claims)
	k := knownNode{revision: u.revision}
	if u.cut {
		said := u.said // or every update would be kept on the heap
		k.said = &said
	}
	d.known[u.said.Name] = k
	d.ground.declare(d.cluster, u.said.Name, prefixesOf(&u.said))
	if d.gate != nil {
		d.gate.hosts.replace(addressesOf(&before), addressesOf(&u.used), u.grace)
	}
	d.table.Upsert(u.used)
}

func (d *nodes) remove(key []byte) { d.drop(string(key), true) }

func (d *nodes) drop(name string, grace bool) {
	if _, ok := d.known[name]; !ok {
		return
	}
	before, _ := d.table.Get(d.name, name)
	d.replace(name, nil)
	d.table.Delete(d.name, name)
	d.ground.declare(d.cluster, name, nil)
	if d.gate != nil {
		d.gate.hosts.replace(addressesOf(&before), nil, grace)
	}
	delete(d.known, name)
}

func (d *nodes) withdraw(key []byte) { d.remove(key) }

// rejudge looks at all nodes again.
func (d *nodes) rejudge(_ []ipcache.Claim, report func(key []byte, err error)) {
	for name, k := range d.known {
		said, _ := d.table.Get(d.name, name)
		if k.said != nil {
			said = *k.said
		}
		used, err := d.admit(said)
		if err != nil && !isPartial(err) {
			d.drop(name, false)
			report([]byte(name), err)
			continue
		}
		if err == nil && k.said == nil {
			continue
		}
		claims := d.claims(used, k.revision)
		if slices.EqualFunc(claims, d.inForce(name), func(a, b ipcache.Claim) bool { return keyOf(a) == keyOf(b) }) {
			continue
		}
		d.put(nodeUpdate{said: said, used: used, claims: claims, revision: k.revision, cut: err != nil})
		report([]byte(name), err)
	}
}

func (d *nodes) flush(arrived time.Time) { d.batch.apply(d.ips, arrival(d.cluster, arrived)) }

// replace adds to the batch what turns the claims of one node into others: first what is claimed now, then what no longer
// is, so that no address is without an owner in between. The table of nodes has the node as it was before.
func (d *nodes) replace(node string, claims []ipcache.Claim) {
	for _, c := range claims {
		d.batch.add(ipcache.Op{Claim: c})
	}
	for _, old := range d.inForce(node) {
		if !slices.ContainsFunc(claims, func(c ipcache.Claim) bool { return keyOf(c) == keyOf(old) }) {
			d.batch.add(ipcache.Op{Delete: true, Claim: ipcache.Claim{Prefix: old.Prefix, CIDR: old.CIDR, Owner: old.Owner}})
		}
	}
}

// inForce lists what a node claims now.
func (d *nodes) inForce(node string) []ipcache.Claim {
	k, ok := d.known[node]
	if !ok {
		return nil
	}
	used, _ := d.table.Get(d.name, node)
	return d.claims(used, k.revision)
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
