// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/kvstore"
)

// Where the identities of a cluster are: the keys that bind them to labels, and those by which nodes say what they use.
const (
	identityMasters = identity.StatePrefix + "/id/"
	identitySlaves  = identity.StatePrefix + "/value/"
)

// identityCensus finds the identities of a cluster that nobody uses. It decides, and does nothing else. First it is told of
// all that is used, then of all that there is: what is allocated in between looks unused, and is found in use by the
// transaction that would delete it.
type identityCensus struct {
	cluster string
	id      identity.ClusterID
	layout  identity.Layout

	used   map[identity.ID]struct{}
	unused []unusedIdentity
	counts identityCounts
}

// unusedIdentity is one that no node uses, with what it was then.
type unusedIdentity struct {
	id       identity.ID
	labels   string
	revision int64 // in which it was last bound
}

// identityCounts is what a census found.
type identityCounts struct {
	Own     int // identities of the own range
	Used    int // of these, used by a node
	Foreign int // of other ranges or with the name of another cluster: left alone
	Leased  int // that vanish by themselves when their writer does: left alone
	Invalid int // keys that are no identity
}

func newIdentityCensus(cluster string, id identity.ClusterID, layout identity.Layout) *identityCensus {
	return &identityCensus{cluster: cluster, id: id, layout: layout, used: make(map[identity.ID]struct{})}
}

// slave notes a key by which a node uses an identity. What it names is used, whatever labels the key has: where these and
// those of the identity differ, somebody is about to find out, and must not find the identity to be another's by then.
func (c *identityCensus) slave(kv kvstore.KV) {
	if id, err := identity.ParseKey(string(kv.Value)); err == nil {
		c.used[id] = struct{}{}
	}
}

// master notes a key that binds an identity to labels.
func (c *identityCensus) master(kv kvstore.KV) {
	id, err := identity.ParseKey(strings.TrimPrefix(kv.Key, identityMasters))
	if err != nil || kv.Key != identity.MasterKey(id) || len(kv.Value) == 0 {
		c.counts.Invalid++
		return
	}
	if !c.layout.Contains(c.id, id) || c.named(string(kv.Value)) {
		c.counts.Foreign++
		return
	}
	c.counts.Own++
	_, used := c.used[id]
	switch {
	case used:
		c.counts.Used++
	case kv.Lease != 0:
		// What an apiserver copies out of Kubernetes has a lease, and no node ever says that it uses it.
		c.counts.Leased++
	default:
		c.unused = append(c.unused, unusedIdentity{id, string(kv.Value), kv.Revision})
	}
}

// named reports whether labels carry the name of another cluster, as where two that share an etcd were given one id.
func (c *identityCensus) named(labels string) bool {
	name, ok := identity.ParseLabels(labels).Get(identity.SourceK8s, identity.LabelCluster)
	return ok && name != c.cluster
}

// identityMarks remembers from one round to the next which identities were unused, and since which revision.
type identityMarks map[identity.ID]int64

// ripe returns those that were unused in the round before, too, and have not been bound anew since, in order; and the marks
// for the next round.
func (m identityMarks) ripe(unused []unusedIdentity) (ripe []unusedIdentity, next identityMarks) {
	next = make(identityMarks, len(unused))
	for _, u := range unused {
		next[u.id] = u.revision
		if marked, ok := m[u.id]; ok && marked == u.revision {
			ripe = append(ripe, u)
		}
	}
	slices.SortFunc(ripe, func(a, b unusedIdentity) int { return cmp.Compare(a.id, b.id) })
	return ripe, next
}

// deletion is the whole of what an identity's deletion depends on, as one transaction: it is bound as it was, nobody uses it,
// and neither those who allocate for its labels nor another collector holds a lock of it. So the locks need not be taken:
// nobody can hold them at the instant that counts.
func (u unusedIdentity) deletion() kvstore.Attempt {
	id := strconv.FormatUint(uint64(u.id), 10)
	return kvstore.Attempt{
		{Kind: kvstore.OpUnchanged, Key: identity.MasterKey(u.id), Revision: u.revision},
		{Kind: kvstore.OpAbsent, Key: identity.LockKey(u.labels) + "/"},
		{Kind: kvstore.OpAbsent, Key: identity.LockKey("id/"+id) + "/"},
		{Kind: kvstore.OpNone, Key: identity.SlavePrefix(u.labels), Value: []byte(id)},
		{Kind: kvstore.OpDelete, Key: identity.MasterKey(u.id)},
	}
}
