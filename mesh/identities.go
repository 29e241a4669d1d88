// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
)

// identities decodes what a cluster's identities stand for.
type identities struct {
	table   *identity.Table
	layout  identity.Layout
	cluster identity.ClusterID
	name    string
}

var _ decoder = (*identities)(nil)

func (d *identities) upsert(key, value []byte, _ int64) error {
	if _, err := d.parseKey(key); err != nil {
		return err
	}
	id, labels, err := identity.ParseEntry(d.layout, d.cluster, d.name, string(key), value)
	if errors.Is(err, identity.ErrEmpty) {
		return errIgnored
	}
	if err != nil {
		return refuse(reasonMismatch, err)
	}
	d.table.Upsert(id, labels)
	return nil
}

// remove forgets an identity. The table is shared by all clusters, so a cluster's deletions, too, count in its own range
// only.
func (d *identities) remove(key []byte) {
	if id, err := d.parseKey(key); err == nil {
		d.table.Delete(id)
	}
}

// parseKey reads a key: the decimal number, in its one canonical form, of an identity in the cluster's range.
func (d *identities) parseKey(key []byte) (identity.ID, error) {
	id, err := identity.ParseKey(string(key))
	if err != nil {
		return 0, refuse(reasonMalformed, err)
	}
	if string(strconv.AppendUint(nil, uint64(id), 10)) != string(key) {
		return 0, refuse(reasonMalformed, fmt.Errorf("identity key %q is not the canonical form of %d", key, uint32(id)))
	}
	if !d.layout.Contains(d.cluster, id) {
		lo, hi := d.layout.Range(d.cluster)
		return 0, refuse(reasonForeign, fmt.Errorf("identity %d is outside the cluster's range %d to %d",
			uint32(id), uint32(lo), uint32(hi)))
	}
	return id, nil
}

func (d *identities) flush(time.Time) {}

func (d *identities) withdraw(key []byte) { d.remove(key) }

// rejudge has nothing to look at: which identities are a cluster's own is no matter of limits.
func (d *identities) rejudge([]ipcache.Claim, func([]byte, error)) {}
