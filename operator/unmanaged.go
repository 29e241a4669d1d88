// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/weftmesh/weft/kvstore"
)

// dnsPods are the pods that every other one asks first.
const dnsPods = "/api/v1/namespaces/kube-system/pods?labelSelector=k8s-app%3Dkube-dns"

// dnsWatch tells of pods of the cluster's DNS that no agent announces: they were started before there was one on their node,
// or there is none. Nobody knows their identity, and a policy that lets pods ask them does not hold.
type dnsWatch struct{ objects *Objects }

// NewDNSWatch returns the duty. It names such pods, and touches nothing. Where no agent announces anything, it is silent.
func NewDNSWatch(objects *Objects, interval time.Duration) *Loop {
	w := &dnsWatch{objects: objects}
	return NewLoop("kube-dns", interval, w.round)
}

// dnsPod is what is used of a pod.
type dnsPod struct {
	Metadata struct{ Namespace, Name string }
	Spec     struct {
		HostNetwork bool
		NodeName    string
	}
	Status struct {
		Phase  string
		PodIPs []struct{ IP string }
	}
}

func (w *dnsWatch) round(ctx context.Context, t *Term) (Outcome, error) {
	var pods []dnsPod
	err := each(ctx, w.objects, dnsPods, runtime.ContentTypeJSON, func(p dnsPod) {
		if !p.Spec.HostNetwork && p.Status.Phase == "Running" {
			pods = append(pods, p)
		}
	})
	if err != nil {
		return Outcome{}, err
	}
	var unmanaged []string
	for _, p := range pods {
		missing, err := p.unannounced(ctx, t.Client())
		if err != nil {
			return Outcome{}, err
		}
		if missing != "" {
			unmanaged = append(unmanaged, fmt.Sprintf("%s/%s (%s) on node %s", p.Metadata.Namespace, p.Metadata.Name, missing, p.Spec.NodeName))
		}
	}
	if _, any, err := t.Client().First(ctx, announced); err != nil || !any {
		return Outcome{Detail: "off: no agent announces anything"}, err
	}
	slices.Sort(unmanaged)
	did := Outcome{Detail: fmt.Sprintf("%d pods of kube-dns, %d that no agent announces", len(pods), len(unmanaged))}
	for _, u := range unmanaged {
		did.Problems = append(did.Problems, "pod "+u+" is not announced by any agent, so that nobody knows its identity: see to the agent of its node, or restart the pod")
	}
	return did, nil
}

// unannounced returns the addresses of a pod that are not in etcd.
func (p dnsPod) unannounced(ctx context.Context, client *kvstore.Client) (string, error) {
	var missing []string
	for _, text := range p.Status.PodIPs {
		ip, err := netip.ParseAddr(text.IP)
		if err != nil {
			continue // it has none yet
		}
		_, ok, err := client.Get(ctx, announced+ip.Unmap().String())
		if err != nil {
			return "", err
		}
		if !ok {
			missing = append(missing, ip.String())
		}
	}
	return strings.Join(missing, " "), nil
}
