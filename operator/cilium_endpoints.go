// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"fmt"
	"time"
)

// ciliumGroup is the API group of Cilium's objects, and ciliumEndpoints the resource of those that stand for pods.
const (
	ciliumGroup     = "cilium.io/v2"
	ciliumEndpoints = "ciliumendpoints"
)

// ciliumEndpointGC deletes CiliumEndpoint objects whose pod is gone.
type ciliumEndpointGC struct {
	objects *Objects
	term    *Term
	marks   map[string]string // UIDs by namespace/name, of those without a pod in the last round
}

// NewCiliumEndpointGC returns the duty. Where the API has no CiliumEndpoints it does nothing.
func NewCiliumEndpointGC(objects *Objects, interval time.Duration) *Loop {
	g := &ciliumEndpointGC{objects: objects}
	return NewLoop("cilium-endpoint-gc", interval, g.round)
}

func (g *ciliumEndpointGC) round(ctx context.Context, t *Term) (Outcome, error) {
	if g.term != t {
		g.term, g.marks = t, nil
	}
	census, err := takeCiliumEndpointCensus(ctx, g.objects)
	if err != nil || !census.exist {
		g.marks = nil
		return Outcome{Detail: census.String()}, err
	}
	next := make(map[string]string, len(census.orphans))
	deleted := 0
	var problems []error
	for _, o := range census.orphans {
		if g.marks[o.key()] != o.Metadata.UID {
			next[o.key()] = o.Metadata.UID
			continue
		}
		// What is written to Kubernetes etcd's fence does not guard. It is asked for before each write, and what is left
		// of a write too late is that it deletes an object of that UID whose pod is gone, which is right whoever leads.
		if err := t.Confirm(ctx); err != nil {
			return Outcome{Deleted: deleted}, err
		}
		gone, err := g.objects.delete(ctx, objectPath(ciliumGroup, ciliumEndpoints, o.Metadata.Namespace, o.Metadata.Name), o.Metadata.UID)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		if gone {
			deleted++
			t.Log("cilium-endpoint-gc").Debug("CiliumEndpoint without a pod deleted", "namespace", o.Metadata.Namespace, "name", o.Metadata.Name)
		}
	}
	if len(problems) == 0 { // else the next round comes soon, and must not be the second one for what was marked just now
		g.marks = next
	}
	return Outcome{Deleted: deleted, Detail: fmt.Sprintf("%s, %d deleted", census, deleted)}, summary(problems)
}

// ciliumEndpointCensus is what was found of the CiliumEndpoints of a cluster.
type ciliumEndpointCensus struct {
	exist   bool // the API has them
	all     int
	orphans []object
}

func (c ciliumEndpointCensus) String() string {
	if !c.exist {
		return "off: the API has no CiliumEndpoints"
	}
	return fmt.Sprintf("%d CiliumEndpoints: %d without a pod", c.all, len(c.orphans))
}

// takeCiliumEndpointCensus reads the CiliumEndpoints, and then the pods: whoever makes a CiliumEndpoint has seen its pod.
func takeCiliumEndpointCensus(ctx context.Context, k *Objects) (census ciliumEndpointCensus, err error) {
	kinds, err := k.kinds(ctx, ciliumGroup)
	if err != nil || !kinds[ciliumEndpoints] {
		return census, err
	}
	census.exist = true
	var endpoints []object
	err = each(ctx, k, "/apis/"+ciliumGroup+"/"+ciliumEndpoints, onlyMetadata, func(o object) { endpoints = append(endpoints, o) })
	if err != nil {
		return census, err
	}
	pods, err := k.pods(ctx)
	if err != nil {
		return census, err
	}
	census.all = len(endpoints)
	for _, o := range endpoints {
		if o.podless(pods) {
			census.orphans = append(census.orphans, o)
		}
	}
	return census, nil
}

// podless reports whether an object belongs to a pod that is not there, another one of its name notwithstanding. Objects that
// belong to something else than a pod are not judged.
func (o object) podless(pods map[string]string) bool {
	for _, owner := range o.Metadata.OwnerReferences {
		if owner.Kind == "Pod" {
			return pods[o.Metadata.Namespace+"/"+owner.Name] != owner.UID
		}
	}
	if len(o.Metadata.OwnerReferences) > 0 {
		return false
	}
	_, ok := pods[o.key()]
	return !ok
}
