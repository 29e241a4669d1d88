// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/weftmesh/weft/ipcache"
	"github.com/weftmesh/weft/kvstore"
	"github.com/weftmesh/weft/node"
)

// announced is where the addresses of a cluster's workloads are.
const announced = ipcache.StatePrefix + "/" + ipcache.DefaultSpace + "/"

// announcerPrefix is what the metadata begins with by which the agent of a node recognises its own; the node's name and ":"
// follow.
const announcerPrefix = "cilium-global:default:"

// owners are those who announce the addresses of a cluster, and those whose addresses they are. The zero value knows nobody,
// and so finds nothing orphaned.
type owners struct {
	hosts map[netip.Addr]bool // addresses of the cluster's nodes
	nodes map[string]bool     // their names
	// pods are those of Kubernetes, by namespace/name; nil where there is no Kubernetes.
	pods map[string]bool
}

func newOwners() *owners {
	return &owners{hosts: make(map[netip.Addr]bool), nodes: make(map[string]bool)}
}

// publish notes a node that publishes itself.
func (o *owners) publish(n node.Node) {
	o.nodes[n.Name] = true
	for _, a := range n.Addresses {
		o.hosts[a.IP.Unmap()] = true
	}
}

// orphan is an announced address whose owner is gone.
type orphan struct {
	kv  kvstore.KV // without the value
	why string
}

// judge reports whether an announcement's owner is gone, and why. One that names no owner has none that could be gone: it was
// written by somebody else than an agent, who knows when it ends. ok is false where it is to stay.
func (o *owners) judge(kv kvstore.KV) (found orphan, ok bool, err error) {
	a, err := ipcache.ParseAnnouncement([]byte(strings.TrimPrefix(kv.Key, announced)), kv.Value)
	if err != nil {
		return orphan{}, false, fmt.Errorf("%s: %w", kv.Key, err)
	}
	why := o.missing(a)
	if why == "" {
		return orphan{}, false, nil
	}
	kv.Value = nil
	return orphan{kv, why}, true, nil
}

// missing says who is gone of those that an announcement names; "" if nobody, or if that cannot be known.
func (o *owners) missing(a ipcache.Announcement) string {
	announcer, byAgent := announcerOf(a.Metadata)
	switch {
	case len(o.hosts) == 0:
		return "" // no node is known, which does not mean that there is none
	case byAgent && o.nodes[announcer], a.Host.IsValid() && o.hosts[a.Host.Unmap()]:
	case byAgent:
		return "node " + announcer + " is gone"
	case a.Host.IsValid():
		return "the node with address " + a.Host.String() + " is gone"
	default:
		return ""
	}
	if o.pods != nil && a.Pod != "" && !o.pods[a.Namespace+"/"+a.Pod] {
		return "pod " + a.Namespace + "/" + a.Pod + " is gone"
	}
	return ""
}

// announcerOf is the name of the node whose agent wrote metadata.
func announcerOf(metadata string) (name string, ok bool) {
	rest, ok := strings.CutPrefix(metadata, announcerPrefix)
	if !ok {
		return "", false
	}
	at := strings.LastIndexByte(rest, ':')
	if at <= 0 {
		return "", false
	}
	return rest[:at], true
}

// alive reports whether somebody renews a lease: whoever keeps one renews it each third of its time, so that more than half
// of it is always left.
func alive(l kvstore.LeaseInfo) bool { return l.TTL > l.Granted/2 }

// orphanMarks remembers from one round to the next which keys were orphaned, and since which revision.
type orphanMarks map[string]int64

// ripe returns those that were orphaned in the round before, too, and have not been written since, and the marks for the next
// round.
func (m orphanMarks) ripe(found []orphan) (ripe []orphan, next orphanMarks) {
	next = make(orphanMarks, len(found))
	for _, f := range found {
		next[f.kv.Key] = f.kv.Revision
		if marked, ok := m[f.kv.Key]; ok && marked == f.kv.Revision {
			ripe = append(ripe, f)
		}
	}
	return ripe, next
}
