// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/weftmesh/weft/internal/kube"
)

// Objects reads and repairs objects of a Kubernetes API that others have left behind. Of what it reads it keeps what is
// compared, page by page: the objects of a large cluster do not fit beside each other.
type Objects struct {
	client *rest.RESTClient
	access *rest.Config
}

const (
	// objectPage is how many objects one request asks for.
	objectPage = 500
	// objectQPS bounds the requests a second, those that delete and patch included: what is cleared away has time.
	objectQPS, objectBurst = 20, 40

	onlyMetadata = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
)

// NewObjects assembles a reader. The API server need not be there; the error says that it is not known where it is.
func NewObjects(kubeconfig string) (*Objects, error) {
	access, err := kube.Access(kubeconfig, "weft-operator")
	if err != nil {
		return nil, err
	}
	access.QPS, access.Burst = objectQPS, objectBurst
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	plain := rest.CopyConfig(access)
	plain.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	client, err := rest.UnversionedRESTClientFor(plain)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	return &Objects{client: client, access: access}, nil
}

// object is what is used of an object's metadata.
type object struct {
	Metadata struct {
		Namespace, Name, UID string
		OwnerReferences      []struct{ Kind, Name, UID string }
	}
}

func (o object) key() string { return o.Metadata.Namespace + "/" + o.Metadata.Name }

// each visits all objects of a collection, such as /api/v1/pods, as they were at one time. path may have a query.
func each[T any](ctx context.Context, k *Objects, path string, accept string, visit func(T)) error {
	for more := ""; ; {
		request := k.client.Get().RequestURI(path).Param("limit", strconv.Itoa(objectPage)).SetHeader("Accept", accept)
		if more != "" {
			request = request.Param("continue", more)
		}
		raw, err := request.Do(ctx).Raw()
		if err != nil {
			return fmt.Errorf("kubernetes: list %s: %w", path, err)
		}
		var page struct {
			Metadata struct{ Continue string }
			Items    []T
		}
		if err := json.Unmarshal(raw, &page); err != nil {
			return fmt.Errorf("kubernetes: list %s: %w", path, err)
		}
		for _, item := range page.Items {
			visit(item)
		}
		if more = page.Metadata.Continue; more == "" {
			return nil
		}
	}
}

// pods returns the UIDs of all pods by namespace/name.
func (k *Objects) pods(ctx context.Context) (map[string]string, error) {
	uids := make(map[string]string)
	err := each(ctx, k, "/api/v1/pods", onlyMetadata, func(o object) { uids[o.key()] = o.Metadata.UID })
	return uids, err
}

// nodes returns the names of all nodes.
func (k *Objects) nodes(ctx context.Context) (map[string]bool, error) {
	names := make(map[string]bool)
	err := each(ctx, k, "/api/v1/nodes", onlyMetadata, func(o object) { names[o.Metadata.Name] = true })
	return names, err
}

// hosts notes the nodes of Kubernetes, with their addresses.
func (k *Objects) hosts(ctx context.Context, of *owners) error {
	type addressed struct {
		Metadata struct{ Name string }
		Status   struct {
			Addresses []struct{ Type, Address string }
		}
	}
	return each(ctx, k, "/api/v1/nodes", runtime.ContentTypeJSON, func(n addressed) {
		of.nodes[n.Metadata.Name] = true
		for _, a := range n.Status.Addresses {
			if ip, err := netip.ParseAddr(a.Address); err == nil { // others are names
				of.hosts[ip.Unmap()] = true
			}
		}
	})
}

// kinds returns which resources the API has of a group and version, by their names, such as ciliumendpoints and
// ciliumnetworkpolicies/status: none where it does not know the group.
func (k *Objects) kinds(ctx context.Context, groupVersion string) (map[string]bool, error) {
	raw, err := k.client.Get().AbsPath("/apis/" + groupVersion).Do(ctx).Raw()
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("kubernetes: ask for the resources of %s: %w", groupVersion, err)
	}
	var list struct{ Resources []struct{ Name string } }
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("kubernetes: the resources of %s: %w", groupVersion, err)
	}
	names := make(map[string]bool, len(list.Resources))
	for _, r := range list.Resources {
		names[r.Name] = true
	}
	return names, nil
}

// delete deletes the object at path if it is still the one with that UID, and reports whether it did.
func (k *Objects) delete(ctx context.Context, path, uid string) (deleted bool, err error) {
	options, err := json.Marshal(map[string]any{
		"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": map[string]string{"uid": uid},
	})
	if err != nil {
		return false, err
	}
	err = k.client.Delete().AbsPath(path).SetHeader("Content-Type", runtime.ContentTypeJSON).Body(options).Do(ctx).Error()
	switch {
	case err == nil:
		return true, nil
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return false, nil
	}
	return false, fmt.Errorf("kubernetes: delete %s: %w", path, err)
}

// merge merges JSON into the object at path; one that is gone is fine.
func (k *Objects) merge(ctx context.Context, path string, patch any) (patched bool, err error) {
	body, err := json.Marshal(patch)
	if err != nil {
		return false, err
	}
	err = k.client.Patch(types.MergePatchType).AbsPath(path).Body(body).Do(ctx).Error()
	switch {
	case err == nil:
		return true, nil
	case apierrors.IsNotFound(err):
		return false, nil
	}
	return false, fmt.Errorf("kubernetes: patch %s: %w", path, err)
}

// objectPath is where an object is, of a resource that may be in namespaces.
func objectPath(groupVersion, resource, namespace, name string, sub ...string) string {
	path := []string{"/apis", groupVersion}
	if namespace != "" {
		path = append(path, "namespaces", namespace)
	}
	return strings.Join(append(append(path, resource, name), sub...), "/")
}
