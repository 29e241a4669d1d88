// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// FillServices makes global services "service-0" and so on, each with an EndpointSlice of its own name and so many backends,
// all of different addresses. They are put where the server itself puts what it is sent, which takes seconds for thousands
// of them and not minutes.
func (k *KubeAPIServer) FillServices(t testing.TB, namespace string, services, backends int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var ops []clientv3.Op
	for i := range services {
		name := fmt.Sprintf("service-%d", i)
		meta := fmt.Sprintf(`"name":%q,"namespace":%q,"uid":"00000000-0000-4000-8000-%012d","creationTimestamp":"2026-11-20T22:37:21Z"`, name, namespace, i)
		ops = append(ops, clientv3.OpPut("/registry/services/specs/"+namespace+"/"+name, fmt.Sprintf(
			`{"kind":"Service","apiVersion":"v1","metadata":{%s,"annotations":{"service.cilium.io/global":"true"}},"spec":{"type":"ClusterIP",`+
				`"clusterIP":%[2]q,"clusterIPs":[%[2]q],"ipFamilies":["IPv4"],"ipFamilyPolicy":"SingleStack","internalTrafficPolicy":"Cluster",`+
				`"sessionAffinity":"None","selector":{"app":"web"},"ports":[{"name":"http","protocol":"TCP","port":80,"targetPort":8080}]},"status":{"loadBalancer":{}}}`,
			meta, netip.AddrFrom4([4]byte{10, 96, byte(64 + i>>8), byte(i)}))),
			clientv3.OpPut("/registry/endpointslices/"+namespace+"/"+name, fmt.Sprintf(
				`{"kind":"EndpointSlice","apiVersion":"discovery.k8s.io/v1","metadata":{%s,"labels":{"kubernetes.io/service-name":%q}},`+
					`"addressType":"IPv4","endpoints":[%s],"ports":[{"name":"http","protocol":"TCP","port":8080}]}`, meta, name, kubeEndpoints(i*backends, backends))))
		if len(ops) < 100 && i < services-1 {
			continue
		}
		if _, err := k.etcd.Client().Txn(ctx).Then(ops...).Commit(); err != nil {
			t.Fatal(err)
		}
		ops = ops[:0]
	}
}

// kubeEndpoints are n endpoints of a slice, from the first address on.
func kubeEndpoints(first, n int) string {
	all := make([]string, n)
	for i := range all {
		at := first + i
		all[i] = fmt.Sprintf(`{"addresses":["10.%d.%d.%d"],"conditions":{"ready":true,"serving":true,"terminating":false}}`, 128+at>>16, byte(at>>8), byte(at))
	}
	return strings.Join(all, ",")
}
