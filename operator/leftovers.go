// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/weftmesh/weft/kvstore"
)

// Leftover is something that nobody needs any more by one look at it. It is removed when the next look finds the same.
type Leftover struct {
	Kind string // identity, address, CiliumEndpoint, or report: what a node says in the status of a policy
	Name string // number, address or prefix, namespace/name, or resource/namespace/name/node
	Why  string
}

// LeftoverConfig says where to look.
type LeftoverConfig struct {
	Identities IdentityGCConfig
	Addresses  AddressGCConfig
}

// FindLeftovers looks for all that the duties which collect would begin to collect now, and touches nothing. Locks are not
// among it: whether one is held for too long no single look can tell.
func FindLeftovers(ctx context.Context, client *kvstore.Client, cfg LeftoverConfig) ([]Leftover, error) {
	identities, err := takeIdentityCensus(ctx, client, cfg.Identities)
	if err != nil {
		return nil, err
	}
	var found []Leftover
	for _, u := range identities.sorted() {
		found = append(found, Leftover{"identity", u.id.String(), "no node uses it: " + u.labels})
	}
	addresses, err := takeAddressCensus(ctx, client, cfg.Addresses)
	if err != nil {
		return nil, err
	}
	for _, o := range addresses.orphans {
		found = append(found, Leftover{"address", strings.TrimPrefix(o.kv.Key, announced), o.why})
	}
	if cfg.Addresses.Objects == nil {
		return found, nil
	}
	objects, err := findObjects(ctx, cfg.Addresses.Objects)
	return append(found, objects...), err
}

// findObjects looks for what is left in Kubernetes.
func findObjects(ctx context.Context, k *Objects) ([]Leftover, error) {
	endpoints, err := takeCiliumEndpointCensus(ctx, k)
	if err != nil {
		return nil, err
	}
	var found []Leftover
	for _, o := range endpoints.orphans {
		found = append(found, Leftover{"CiliumEndpoint", o.key(), "its pod is gone"})
	}
	kinds, err := k.kinds(ctx, ciliumGroup)
	if err != nil {
		return nil, err
	}
	nodes, err := k.nodes(ctx)
	if err != nil || len(nodes) == 0 {
		return found, err
	}
	for _, kind := range policyKinds {
		if !kinds[kind] {
			continue
		}
		type reported struct {
			object
			Status struct{ Nodes map[string]json.RawMessage }
		}
		err := each(ctx, k, "/apis/"+ciliumGroup+"/"+kind, runtime.ContentTypeJSON, func(p reported) {
			for _, name := range absent(slices.Collect(maps.Keys(p.Status.Nodes)), nodes) {
				at := strings.TrimPrefix(p.key(), "/")
				found = append(found, Leftover{"report", fmt.Sprintf("%s/%s/%s", kind, at, name), "the node is gone"})
			}
		})
		if err != nil {
			return found, err
		}
	}
	return found, nil
}

// sorted returns the unused identities in order.
func (c *identityCensus) sorted() []unusedIdentity {
	return slices.SortedFunc(slices.Values(c.unused), func(a, b unusedIdentity) int { return cmp.Compare(a.id, b.id) })
}
