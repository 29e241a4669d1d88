// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// ipOwnerObject is the object that claims every announced address: the address itself names the announcement.
const ipOwnerObject = "ip"

// ips decodes announcements of workload addresses.
type ips struct {
	table  *ipcache.Table
	layout identity.Layout
	owner  ipcache.Owner
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
	id, err := d.admit(a.Identity)
	if err != nil {
		return err
	}
	d.batch.add(ipcache.Op{Claim: ipcache.Claim{
		Prefix: a.Prefix, CIDR: a.CIDR, Owner: d.owner, Revision: revision,
		Entry: ipcache.Entry{
			Identity: id, Host: a.Host, EncryptKey: a.EncryptKey,
			Namespace: a.Namespace, Pod: a.Pod, ServiceAccount: a.ServiceAccount, NamedPorts: a.NamedPorts,
		},
	}})
	return nil
}

// admit returns the identity that a workload announced with id gets here. Clusters may use their own identities and the
// reserved ones; their host is a remote node to us. Identity 0 stands for none, and an address needs one.
func (d *ips) admit(id identity.ID) (identity.ID, error) {
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

func (d *ips) remove(key []byte) {
	prefix, cidr, ok := parsePrefixKey(string(key))
	if !ok {
		return // no announcement under such a key has ever been accepted
	}
	d.batch.add(ipcache.Op{Delete: true, Claim: ipcache.Claim{Prefix: prefix, CIDR: cidr, Owner: d.owner}})
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

func (d *ips) flush(arrived time.Time) {
	d.batch.apply(d.table, arrival(d.owner.Cluster, arrived))
}
