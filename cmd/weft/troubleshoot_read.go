// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/node"
	"github.com/weftmesh/weft/service"
)

// heartbeatStale is the age from which a heartbeat is missing: readers of Cilium give up a connection then.
const heartbeatStale = 2 * time.Minute

// defaultClusters is what a cluster means that does not say how many there may be.
const defaultClusters = 255

// reading tries what a reader of a cluster reads, over a connection that works.
type reading struct {
	client  *kvstore.Client
	timeout time.Duration
	now     func() time.Time
	heard   *testimony
	report  func(kvstore.Step)
}

func (r *reading) say(name string, o kvstore.Outcome, advice, format string, args ...any) {
	r.report(kvstore.Step{Name: name, Outcome: o, Message: fmt.Sprintf(format, args...), Advice: advice})
}

func (r *reading) read(ctx context.Context, d *diagnosis) {
	heartbeat, beats := r.heartbeat(ctx)
	cached, ok := false, true
	if !d.Own {
		cached, ok = r.clusterConfig(ctx, d.Name)
	}
	if ok {
		for _, prefix := range prefixesOf(d, cached) {
			r.prefix(ctx, "read", prefix)
		}
	}
	r.server()
	if beats {
		r.age(heartbeat)
	}
}

// refused reports an error of a read.
func (r *reading) refused(name, key string, err error) {
	advice := "see the log of that etcd"
	if kvstore.Denied(err) {
		advice = fmt.Sprintf("give the user's role the right to read %s: `etcdctl role grant-permission ROLE read %s --prefix`", key, key)
	}
	r.say(name, kvstore.StepFailed, advice, "%v", err)
}

func (r *reading) get(ctx context.Context, name, key string) (value []byte, exists, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	kv, exists, err := r.client.Get(ctx, key)
	if err != nil {
		r.refused(name, key, err)
		return nil, false, false
	}
	return kv.Value, exists, true
}

// prefix reads one key of a prefix, which tells whether all may be read.
func (r *reading) prefix(ctx context.Context, name, prefix string) (exists, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	kv, exists, err := r.client.First(ctx, prefix)
	switch {
	case err != nil:
		r.refused(name, prefix, err)
		return false, false
	case exists:
		r.say(name, kvstore.StepPassed, "", "%s may be read; the first key is %s", prefix, kv.Key)
	default:
		r.say(name, kvstore.StepPassed, "", "%s may be read; it is empty", prefix)
	}
	return exists, true
}

// prefixesOf are those that an agent follows.
func prefixesOf(d *diagnosis, cached bool) []string {
	if d.Own {
		return []string{node.StatePrefix + "/", identity.StatePrefix + "/id/", ipcache.StatePrefix + "/", service.StatePrefix + "/"}
	}
	in := func(state, dir, copied string) string {
		if cached {
			return identity.CachePrefix(state) + "/" + copied + "/"
		}
		return state + "/" + dir + "/"
	}
	return []string{
		in(node.StatePrefix, d.Name, d.Name), in(identity.StatePrefix, "id", d.Name+"/id"),
		in(ipcache.StatePrefix, ipcache.DefaultSpace, d.Name), in(service.StatePrefix, d.Name, d.Name),
	}
}

// clusterConfig reads what the cluster says of itself. ok is whether it can be followed.
func (r *reading) clusterConfig(ctx context.Context, name string) (cached, ok bool) {
	const step = "cluster-config"
	key := identity.ClusterConfigPrefix + "/" + name
	value, exists, ok := r.get(ctx, step, key)
	if !ok {
		return false, false
	}
	if !exists {
		r.say(step, kvstore.StepFailed, r.otherName(ctx, name), "%s does not exist", key)
		return false, false
	}
	config, err := identity.ParseClusterConfig(value)
	if err != nil {
		r.say(step, kvstore.StepFailed, "the cluster's own components must write it anew", "%s: %v", key, err)
		return false, false
	}
	caps := config.Capabilities
	outcome, advice := kvstore.StepPassed, ""
	problem, invalid, holder := "", config.Validate(r.heard.layout()), r.heard.holder(config.ID, name)
	switch {
	case config.ID == 0:
		outcome, problem, advice = kvstore.StepFailed, ", which none is", "give the cluster an id from 1 on"
	case invalid != nil:
		outcome, problem = kvstore.StepFailed, ": "+invalid.Error()
		advice = "give it an id in that range, and all clusters of the mesh the same --max-connected-clusters"
	case holder != "":
		outcome, problem, advice = kvstore.StepFailed, ", which cluster "+holder+" has", "give one of the two clusters another id"
	}
	r.say(step, outcome, advice, "cluster id %d, of %d at most, cached=%t, canaries=%t%s", config.ID, max(caps.MaxConnectedClusters, defaultClusters),
		caps.Cached, caps.SyncedCanaries, problem)
	if caps.SyncedCanaries {
		exists, readable := r.prefix(ctx, "canaries", identity.SyncedPrefix+"/"+name+"/")
		if readable && !exists {
			r.say("canaries", kvstore.StepWarning, "until the cluster's components have written all, the agent deletes nothing", "none yet")
		}
	}
	return caps.Cached, outcome == kvstore.StepPassed
}

// otherName advises what to do about a missing cluster-config: the etcd may be that of another cluster.
func (r *reading) otherName(ctx context.Context, name string) string {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	prefix := identity.ClusterConfigPrefix + "/"
	if kv, exists, err := r.client.First(ctx, prefix); err == nil && exists {
		return fmt.Sprintf("this etcd holds %s: is the file %q named after the right cluster?", kv.Key, name)
	}
	return "see whether clustermesh-apiserver, or weft with a cluster id, runs in that cluster, and whether the file is named after it"
}

// server tells of the server what answers tell, and what is known of its version.
func (r *reading) server() {
	const step = "server"
	s := r.client.Status()
	message := fmt.Sprintf("etcd %s, cluster %s, revision %d, at %s", orDash(s.ServerVersion), orDash(hex(s.EtcdClusterID)), s.Revision, s.Endpoint)
	if s.Warning != "" {
		r.say(step, kvstore.StepWarning, s.Warning, "%s", message)
		return
	}
	r.say(step, kvstore.StepPassed, "", "%s", message)
}

// heartbeat reads the cluster's heartbeat. beats is whether it may be read.
func (r *reading) heartbeat(ctx context.Context) (value []byte, beats bool) {
	const step = "heartbeat"
	value, exists, ok := r.get(ctx, step, identity.HeartbeatKey)
	if ok && exists {
		r.say("read", kvstore.StepPassed, "", "%s may be read", identity.HeartbeatKey)
		return value, true
	}
	if ok {
		r.say(step, kvstore.StepWarning, "see whether clustermesh-apiserver, kvstoremesh or an operator runs in that cluster: one of them writes it",
			"%s may be read; it does not exist", identity.HeartbeatKey)
	}
	return nil, false
}

// age judges when the heartbeat was written, by the writer's clock.
func (r *reading) age(heartbeat []byte) {
	const step = "heartbeat"
	at, err := time.Parse(time.RFC3339, string(heartbeat))
	switch {
	case err != nil:
		r.say(step, kvstore.StepWarning, "something else than Cilium or weft wrote it", "%v", err)
	case at.Sub(r.now()) > heartbeatStale:
		r.say(step, kvstore.StepWarning, "set the clocks of both machines right: see `timedatectl` here and there",
			"written in %s, by a clock that is ahead of ours", age(at, r.now()))
	case r.now().Sub(at) > heartbeatStale:
		r.say(step, kvstore.StepWarning, "see whether its writer runs (clustermesh-apiserver, kvstoremesh, an operator), and whether the clocks agree",
			"written %s, the last time", ago(r.now(), at))
	default:
		r.say(step, kvstore.StepPassed, "", "written %s", ago(r.now(), at))
	}
}
