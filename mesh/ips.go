// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// ipOwnerObject is the object that claims every announced address: the address itself names the announcement.
const ipOwnerObject = "ip"

// errWaiting indicates an announcement that is held back until the node that it is behind is known.
var errWaiting = errors.New("waits for its node")

// ips decodes announcements of workload addresses.
type ips struct {
	table  *ipcache.Table
	layout identity.Layout
	owner  ipcache.Owner
	judge  *judge // nil for our own cluster, which may claim anything
	held   held
	room   int   // entries that the quota leaves, at least
	batch  batch // its strings alias the values of the events
}

var _ decoder = (*ips)(nil)

func (d *ips) upsert(key, value []byte, revision int64) error {
	a, err := ipcache.ParseAnnouncement(key, value)
	if errors.Is(err, ipcache.ErrNoAddress) {
		return errIgnored
	}
	if err != nil {
		return refuse(reasonMalformed, err)
	}
	d.unhold(claimKey{a.Prefix, a.CIDR})
	claim := ipcache.Claim{
		Prefix: a.Prefix, CIDR: a.CIDR, Owner: d.owner, Revision: revision,
		Entry: ipcache.Entry{
			Identity: a.Identity, Host: a.Host, EncryptKey: a.EncryptKey,
			Namespace: a.Namespace, Pod: a.Pod, ServiceAccount: a.ServiceAccount, NamedPorts: a.NamedPorts,
		},
	}
	if d.judge == nil {
		if claim.Entry.Identity, err = d.admitOwn(a.Identity); err == nil {
			d.batch.add(ipcache.Op{Claim: claim})
		}
		return err
	}
	if claim.Entry.Identity, err = d.judge.identity(a.Identity); err != nil {
		return err
	}
	if !plainName(a.Namespace) || !plainName(a.Pod) {
		return refuse(reasonMalformed, fmt.Errorf("namespace %q or pod name %q is none: want up to %d plain characters", a.Namespace, a.Pod, longestName))
	}
	wait, err := d.judge.announcement(claim.Prefix, claim.Entry.Identity, claim.Entry.Host)
	if err != nil {
		return err
	}
	if err := d.spend(&claim); err != nil {
		return err
	}
	if wait {
		claim.Entry = cloned(claim.Entry)
		d.hold(claim)
		return errWaiting
	}
	d.batch.add(ipcache.Op{Claim: claim})
	return nil
}

// admitOwn is what [gate.identity] is for other clusters: all reserved identities are ours to use.
func (d *ips) admitOwn(id identity.ID) (identity.ID, error) {
	switch {
	case id == identity.Host:
		return identity.RemoteNode, nil
	case id == identity.Invalid, !id.Reserved() && !d.layout.Contains(d.owner.Cluster, id):
		lo, hi := d.layout.Range(d.owner.Cluster)
		return 0, refuse(reasonForeign, fmt.Errorf("identity %d is neither reserved nor in the cluster's range %d to %d",
			uint32(id), uint32(lo), uint32(hi)))
	}
	return id, nil
}

// spend takes one entry of the cluster's quota, or finds that the claim has one already. While there is plenty, an update
// counts like a new claim: the count is put right with the next batch.
func (d *ips) spend(c *ipcache.Claim) error {
	most := d.judge.rules().limits.MaxEntries
	if most == 0 {
		return nil
	}
	if d.room == 0 {
		d.flush(time.Time{})
		d.room = max(0, d.judge.entriesLeft())
	}
	if d.room > 0 {
		d.room--
		return nil
	}
	if d.table.Holds(c.Prefix, c.CIDR, c.Owner) {
		return nil
	}
	return limited(reasonQuota, fmt.Errorf("the cluster has its %d entries; raise its max-entries in the limits if it should have more", most))
}

func (d *ips) hold(c ipcache.Claim) {
	d.held.put(c)
	d.judge.held.Store(int64(d.held.len()))
}

func (d *ips) unhold(k claimKey) {
	if len(d.held.host) == 0 {
		return
	}
	d.held.drop(k)
	d.judge.held.Store(int64(d.held.len()))
}

// cloned is an entry whose text is its own.
func cloned(e ipcache.Entry) ipcache.Entry {
	e.Namespace, e.Pod, e.ServiceAccount = strings.Clone(e.Namespace), strings.Clone(e.Pod), strings.Clone(e.ServiceAccount)
	e.NamedPorts = ipcache.NamedPorts(strings.Clone(string(e.NamedPorts)))
	return e
}

func (d *ips) remove(key []byte) { d.take(key, true) }

func (d *ips) withdraw(key []byte) { d.take(key, false) }

func (d *ips) take(key []byte, unhold bool) {
	prefix, cidr, ok := parsePrefixKey(string(key))
	if !ok {
		return // no announcement under such a key has ever been accepted
	}
	if unhold {
		d.unhold(claimKey{prefix, cidr})
	}
	d.batch.add(ipcache.Op{Delete: true, Claim: ipcache.Claim{Prefix: prefix, CIDR: cidr, Owner: d.owner}})
}

// has reports whether the announcement under key is in use.
func (d *ips) has(key []byte) bool {
	prefix, cidr, ok := parsePrefixKey(string(key))
	if !ok {
		return false
	}
	d.flush(time.Time{})
	return d.table.Holds(prefix, cidr, d.owner)
}

func (d *ips) len() int { return d.table.ClaimsBy(d.owner) }

// rejudge looks again at what is held, and at the suspects among what is in use, as it is now.
func (d *ips) rejudge(suspects []ipcache.Claim, report func(key []byte, err error)) {
	for i := range suspects {
		for _, c := range d.table.Claims(suspects[i].Prefix) {
			if c.Owner != d.owner || c.CIDR != suspects[i].CIDR {
				continue
			}
			wait, err := d.reconsider(&c)
			if !wait && err == nil {
				continue
			}
			d.batch.add(ipcache.Op{Delete: true, Claim: c})
			if wait {
				d.hold(c)
			} else {
				report(appendPrefixKey(nil, c.Prefix, c.CIDR), err)
			}
		}
	}
	for host := range d.held.claims {
		d.settle(host, report)
	}
}

// arrived uses what has waited for nodes that are known by now.
func (d *ips) arrived(report func(key []byte, err error)) {
	for host := range d.held.claims {
		if d.judge.gate.hosts.has(host) {
			d.settle(host, report)
		}
	}
}

// settle uses or refuses what is held for one host, unless it must go on waiting.
func (d *ips) settle(host netip.Addr, report func(key []byte, err error)) {
	for k, c := range d.held.claims[host] {
		wait, err := d.reconsider(&c)
		if wait && err == nil {
			continue
		}
		d.held.drop(k)
		if err == nil {
			d.batch.add(ipcache.Op{Claim: c})
		}
		report(appendPrefixKey(nil, c.Prefix, c.CIDR), err)
	}
	d.judge.held.Store(int64(d.held.len()))
}

// reconsider judges a claim that has been accepted before.
func (d *ips) reconsider(c *ipcache.Claim) (wait bool, err error) {
	if _, err := d.judge.identity(c.Entry.Identity); err != nil {
		return false, err
	}
	return d.judge.announcement(c.Prefix, c.Entry.Identity, c.Entry.Host)
}

// parsePrefixKey reads "10.2.1.10" or "192.0.2.16/28". It is not ok if the text is not the canonical one: of all texts for
// one prefix, only that is accepted as a key.
func parsePrefixKey(key string) (prefix netip.Prefix, cidr, ok bool) {
	if addr, err := netip.ParseAddr(key); err == nil {
		return netip.PrefixFrom(addr, addr.BitLen()), false, addr.Zone() == "" && !addr.Is4In6() && addr.String() == key
	}
	prefix, err := netip.ParsePrefix(key)
	if err != nil {
		return netip.Prefix{}, false, false
	}
	return prefix, true, prefix == prefix.Masked() && !prefix.Addr().Is4In6() && prefix.String() == key
}

// appendPrefixKey writes what parsePrefixKey reads.
func appendPrefixKey(b []byte, prefix netip.Prefix, cidr bool) []byte {
	if cidr {
		return prefix.AppendTo(b)
	}
	return prefix.Addr().AppendTo(b)
}

func (d *ips) flush(arrived time.Time) {
	d.batch.apply(d.table, arrival(d.owner.Cluster, arrived))
	d.room = 0
}
