// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// desired is all that follows from the endpoints of a node: what this node's tables are to hold, and what others are to
// know. Two of them are compared to find what to do.
type desired struct {
	claims     map[claimKey]ipcache.Claim
	identities map[identity.ID]identity.Labels
	masters    map[string][]byte // etcd keys that bind identities to labels: they outlive this node
	slaves     map[string][]byte // etcd keys that say that this node uses an identity
	ips        map[string][]byte // etcd keys that announce addresses
	waiting    map[string]bool   // etcd keys that will announce addresses whose identity is not found, or not certain, yet
}

type claimKey struct {
	prefix netip.Prefix
	object string
}

// desire works out what follows from the endpoints.
func (r *Registry) desire(accepted []resolved) (desired, error) {
	w := desired{
		claims: make(map[claimKey]ipcache.Claim), identities: make(map[identity.ID]identity.Labels),
		masters: make(map[string][]byte), slaves: make(map[string][]byte), ips: make(map[string][]byte),
		waiting: make(map[string]bool),
	}
	for i := range accepted {
		d := &accepted[i]
		if d.id != identity.Init {
			w.identities[d.id] = d.labels
		}
		for _, ip := range d.IPs {
			claim := r.claim(d, ip)
			w.claims[claimKey{claim.Prefix, claim.Owner.Object}] = claim
		}
		if r.cfg.Publisher == nil {
			continue
		}
		if d.id == identity.Init || d.restored() {
			for _, ip := range d.IPs {
				a := r.announcement(d, ip)
				w.waiting[a.Key()] = true
			}
			continue
		}
		w.masters[identity.MasterKey(d.id)] = []byte(d.text)
		w.slaves[identity.SlaveKey(d.labels, r.cfg.HostIP)] = strconv.AppendUint(nil, uint64(d.id), 10)
		for _, ip := range d.IPs {
			a := r.announcement(d, ip)
			value, err := a.Marshal()
			if err != nil {
				return desired{}, fmt.Errorf("endpoint %s: %w", d.key(), err)
			}
			w.ips[a.Key()] = value
		}
	}
	return w, nil
}

func (r *Registry) claim(d *resolved, ip netip.Addr) ipcache.Claim {
	return ipcache.Claim{
		Prefix: netip.PrefixFrom(ip, ip.BitLen()),
		Owner:  ipcache.Owner{Cluster: r.cfg.ClusterID, Source: ipcache.Local, Object: "endpoint/" + d.key()},
		Entry: ipcache.Entry{
			Identity: d.id, Host: r.cfg.HostIP, Namespace: d.Namespace, Pod: d.Name,
			ServiceAccount: d.ServiceAccount, NamedPorts: ipcache.NewNamedPorts(d.Ports),
		},
	}
}

func (r *Registry) announcement(d *resolved, ip netip.Addr) ipcache.Announcement {
	return ipcache.Announcement{
		Prefix: netip.PrefixFrom(ip, ip.BitLen()), Host: r.cfg.HostIP, Identity: d.id,
		Metadata:  metadataOf(r.cfg.NodeName) + strconv.FormatUint(uint64(d.endpointID()), 10),
		Namespace: d.Namespace, Pod: d.Name, ServiceAccount: d.ServiceAccount, NamedPorts: ipcache.NewNamedPorts(d.Ports),
	}
}

// apply makes next be in force. The labels of an identity come before the addresses that carry it and go after them, so
// that no reader sees an address whose identity means nothing.
func (r *Registry) apply(next desired) {
	for id, labels := range next.identities {
		if !slices.Equal(r.inForce.identities[id], labels) {
			r.cfg.Identities.Upsert(id, labels)
		}
	}
	r.cfg.IPs.Apply(claimOps(r.inForce.claims, next.claims))
	if r.cfg.Publisher != nil {
		r.publish(next)
	} else {
		// Published labels stay in etcd for other nodes and in the table for as long; unpublished ones have no other owner.
		for id := range r.inForce.identities {
			if _, ok := next.identities[id]; !ok {
				r.cfg.Identities.Delete(id)
			}
		}
	}
	r.inForce = next
}

// claimOps are the operations from one set of claims to another, upserts first: an address that passes from one endpoint
// to another is never without a claim.
func claimOps(from, to map[claimKey]ipcache.Claim) []ipcache.Op {
	var ops []ipcache.Op
	for key, claim := range to {
		if old, ok := from[key]; !ok || old != claim {
			ops = append(ops, ipcache.Op{Claim: claim})
		}
	}
	for key, claim := range from {
		if _, ok := to[key]; !ok {
			ops = append(ops, ipcache.Op{Delete: true, Claim: claim})
		}
	}
	return ops
}

func (r *Registry) publish(next desired) {
	each(r.inForce.masters, next.masters, r.cfg.Publisher.Create)
	each(r.inForce.slaves, next.slaves, r.cfg.Publisher.Set)
	each(r.inForce.ips, next.ips, r.cfg.Publisher.Set)
	for key := range r.inForce.masters {
		if _, ok := next.masters[key]; !ok {
			r.cfg.Publisher.Release(key)
		}
	}
	for _, keys := range []struct{ from, to map[string][]byte }{{r.inForce.ips, next.ips}, {r.inForce.slaves, next.slaves}} {
		for _, key := range slices.Sorted(maps.Keys(keys.from)) {
			if _, ok := keys.to[key]; !ok {
				r.cfg.Publisher.Delete(key)
			}
		}
	}
}

// each calls put for every key whose value is new, in order.
func each(from, to map[string][]byte, put func(key string, value []byte)) {
	for _, key := range slices.Sorted(maps.Keys(to)) {
		if old, ok := from[key]; !ok || !bytes.Equal(old, to[key]) {
			put(key, to[key])
		}
	}
}
