// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"fmt"
	"iter"
	"slices"
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

// withdrawOnce withdraws what an earlier agent left behind, when every source has been heard. etcd may be away for long:
// that is not to keep anything else from being done.
func (r *Registry) withdrawOnce(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-r.ready:
	}
	ask := func(question func()) {
		done := make(chan struct{})
		select {
		case <-ctx.Done():
		case r.questions <- func() { defer close(done); question() }:
			<-done
		}
	}
	for ctx.Err() == nil {
		err := r.withdraw(ctx, ask)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil {
			r.cfg.Log.Warn("what an earlier agent published cannot be looked at yet", "err", err)
		}
		pause(ctx, withdrawRetry)
	}
	return nil
}

// withdraw deletes what an earlier agent of this node published of endpoints that are there no more. Only keys that name
// this node are its, not those that workloads which wait for their identity will have again, and only as they were read: an
// address that another node has announced meanwhile is not touched, nor one that this node has announced again. ask has a
// question answered by what is in force.
func (r *Registry) withdraw(ctx context.Context, ask func(question func())) error {
	found, err := r.published(ctx)
	if err != nil {
		return err
	}
	var stale []kvstore.KV
	ask(func() { stale = r.stale(found) })
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

// published lists the keys of this node, without their values.
func (r *Registry) published(ctx context.Context) (found []kvstore.KV, err error) {
	add := func(kv kvstore.KV) { found = append(found, kvstore.KV{Key: kv.Key, Revision: kv.Revision}) }
	for kv, err := range r.cfg.Leftovers.All(ctx, announced) {
		if err != nil {
			return nil, fmt.Errorf("read what this node announces: %w", err)
		}
		if r.own(kv) {
			add(kv)
		}
	}
	own := "/" + r.cfg.HostIP.String()
	for kv, err := range r.cfg.Leftovers.All(ctx, identity.StatePrefix+"/value/") {
		if err != nil {
			return nil, fmt.Errorf("read which identities this node uses: %w", err)
		}
		if strings.HasSuffix(kv.Key, own) {
			add(kv)
		}
	}
	return found, nil
}

// stale returns those of the keys of this node that nothing in force, or about to be, needs.
func (r *Registry) stale(found []kvstore.KV) []kvstore.KV {
	waiting := make(map[string]bool, len(r.wanted))
	for _, labels := range r.wanted { // those that wait for their identity among them, which a key may well name
		waiting[identity.SlaveKey(labels, r.cfg.HostIP)] = true
	}
	return slices.DeleteFunc(found, func(kv kvstore.KV) bool {
		_, address := r.inForce.ips[kv.Key]
		_, use := r.inForce.slaves[kv.Key]
		return address || use || r.inForce.waiting[kv.Key] || waiting[kv.Key]
	})
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
