// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"fmt"
	"iter"
	"strings"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
)

// Leftovers reads and deletes keys that this agent did not put, or not in this life.
type Leftovers interface {
	// All reads the keys that begin with prefix.
	All(ctx context.Context, prefix string) iter.Seq2[kvstore.KV, error]
	// DeleteIfUnchanged deletes a key unless somebody has written it since it was read.
	DeleteIfUnchanged(ctx context.Context, read kvstore.KV) (deleted bool, err error)
}

// announced is what the keys of announcements begin with.
const announced = ipcache.StatePrefix + "/" + ipcache.DefaultSpace + "/"

// withdraw deletes what an earlier agent of this node published of endpoints that are there no more. Only keys that name
// this node are its, not those that workloads which wait for their identity will have again, and only as they were read: an
// address that another node has announced meanwhile is not touched.
func (r *Registry) withdraw(ctx context.Context) error {
	stale, err := r.stale(ctx)
	if err != nil {
		return err
	}
	for _, kv := range stale {
		deleted, err := r.cfg.Leftovers.DeleteIfUnchanged(ctx, kv)
		if err != nil {
			return err
		}
		if deleted {
			r.cfg.Log.Info("withdrawn what an earlier agent of this node published", "key", kv.Key)
		}
	}
	return nil
}

// stale lists the keys to be withdrawn, without their values.
func (r *Registry) stale(ctx context.Context) (stale []kvstore.KV, err error) {
	add := func(kv kvstore.KV) { stale = append(stale, kvstore.KV{Key: kv.Key, Revision: kv.Revision}) }
	for kv, err := range r.cfg.Leftovers.All(ctx, announced) {
		if err != nil {
			return nil, fmt.Errorf("read what this node announces: %w", err)
		}
		if _, wanted := r.inForce.ips[kv.Key]; !wanted && !r.inForce.waiting[kv.Key] && r.own(kv) {
			add(kv)
		}
	}
	own, waiting := "/"+r.cfg.HostIP.String(), make(map[string]bool, len(r.wanted))
	for _, labels := range r.wanted { // those that wait for their identity among them, which a key may well name
		waiting[identity.SlaveKey(labels, r.cfg.HostIP)] = true
	}
	for kv, err := range r.cfg.Leftovers.All(ctx, identity.StatePrefix+"/value/") {
		if err != nil {
			return nil, fmt.Errorf("read which identities this node uses: %w", err)
		}
		if _, wanted := r.inForce.slaves[kv.Key]; !wanted && strings.HasSuffix(kv.Key, own) && !waiting[kv.Key] {
			add(kv)
		}
	}
	return stale, nil
}

// own reports whether an announcement is one that an agent of this node made.
func (r *Registry) own(kv kvstore.KV) bool {
	a, err := ipcache.ParseAnnouncement([]byte(strings.TrimPrefix(kv.Key, announced)), kv.Value)
	return err == nil && a.Host == r.cfg.HostIP && strings.HasPrefix(a.Metadata, metadataOf(r.cfg.NodeName))
}

// metadataOf begins what this node says of its announcements. The second element is the word "default" whatever the
// cluster's name.
func metadataOf(node string) string { return "cilium-global:default:" + node + ":" }

var _ Leftovers = (*kvstore.Client)(nil)
