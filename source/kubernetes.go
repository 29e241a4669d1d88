// SPDX-License-Identifier: Apache-2.0

package source

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"

	"github.com/weftmesh/weft/internal/kube"
	"github.com/weftmesh/weft/service"
)

// KubernetesConfig is what a [Kubernetes] works with.
type KubernetesConfig struct {
	// Kubeconfig is a file that says where the API server is. Empty: the service account of the pod that this runs in.
	Kubeconfig string
	// Agent is what the client is called in the server's log.
	Agent string
	// DefaultGlobal is what counts for services of namespaces without the annotation [NamespaceAnnotation].
	DefaultGlobal bool
	// Longest bounds the pause between attempts to reach the server; 0: 15 s.
	Longest time.Duration
	Log     *slog.Logger
}

// Kubernetes is the source of services that are Services of Kubernetes, with their EndpointSlices, or Endpoints where the
// server has no slices. While the server is away, what was known stays.
type Kubernetes struct {
	*Table
	core     *rest.RESTClient
	slices   *rest.RESTClient
	follower *kube.Follower
	ready    chan struct{}

	// owners are the services of the slices that are known. Only the reflector of slices touches it.
	owners map[string]service.Name

	mu       sync.Mutex
	rejected map[string]string // what of an object cannot be used, by kind and name; guarded by mu
}

var _ Source = (*Kubernetes)(nil)

// NewKubernetes assembles a source. The API server need not be there; the error says that it is not known where it is.
func NewKubernetes(cfg KubernetesConfig) (*Kubernetes, error) {
	if cfg.Log == nil || cfg.Agent == "" {
		return nil, errors.New("source: a Kubernetes source needs Agent and Log")
	}
	access, err := kube.Access(cfg.Kubeconfig, cfg.Agent)
	if err != nil {
		return nil, err
	}
	k := &Kubernetes{
		Table: NewTable(cfg.DefaultGlobal), ready: make(chan struct{}), owners: make(map[string]service.Name), rejected: make(map[string]string),
	}
	k.follower = kube.NewFollower(kube.Config{
		Needs: "the account needs the verbs list and watch on namespaces, services and endpointslices, or where the server has none, endpoints", Longest: cfg.Longest, Changed: k.Wake, Log: cfg.Log,
	})
	if k.core, err = kube.Client(access, corev1.SchemeGroupVersion, corev1.AddToScheme); err != nil {
		return nil, err
	}
	if k.slices, err = kube.Client(access, discoveryv1.SchemeGroupVersion, discoveryv1.AddToScheme); err != nil {
		return nil, err
	}
	return k, nil
}

func (k *Kubernetes) String() string { return "kubernetes services" }

// Ready is closed once services, their backends and the namespaces have been listed.
func (k *Kubernetes) Ready() <-chan struct{} { return k.ready }

// Problems returns what keeps the API server or some objects from being followed.
func (k *Kubernetes) Problems() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append(k.follower.Problems(), slices.Sorted(maps.Values(k.rejected))...)
}

// Run follows the API server until ctx ends.
func (k *Kubernetes) Run(ctx context.Context) error {
	namespaces := kube.NewReplica(k.putNamespace, k.removeNamespace, k.replaceNamespaces)
	services := kube.NewReplica(k.putService, k.removeService, k.replaceServices)
	k.follower.Follow(ctx,
		kube.Kind{Client: k.core, Name: "namespaces", Object: new(corev1.Namespace), Store: namespaces},
		kube.Kind{Client: k.core, Name: "services", Object: new(corev1.Service), Store: services},
	)
	defer k.follower.Wait()
	sliced, ok := k.hasSlices(ctx)
	if !ok {
		return nil
	}
	backends := k.endpoints()
	if sliced {
		store := kube.NewReplica(k.putSlice, k.removeSlice, k.replaceSlices)
		backends = kube.Kind{Client: k.slices, Name: "endpointslices", Object: new(discoveryv1.EndpointSlice), Store: store}
	}
	k.follower.Follow(ctx, backends)
	if k.follower.Listed(ctx) {
		close(k.ready)
	}
	<-ctx.Done()
	return nil
}

// hasSlices asks the server, for as long as it takes, whether it knows EndpointSlices. ok is false when ctx has ended.
func (k *Kubernetes) hasSlices(ctx context.Context) (sliced, ok bool) {
	pause, longest := k.follower.Retry()
	for {
		err := k.slices.Get().Do(ctx).Error() // the group itself: what resources it has
		switch {
		case ctx.Err() != nil:
			return false, false
		case err == nil || apierrors.IsForbidden(err): // who may not look at groups may follow slices all the same
			k.follower.Note("endpointslices", nil)
			return true, true
		case apierrors.IsNotFound(err):
			k.follower.Note("endpointslices", nil)
			return false, true
		}
		k.follower.Note("endpointslices", err)
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return false, false
		case <-timer.C:
		}
		pause = min(2*pause, longest)
	}
}

// reject remembers what of an object cannot be used, or, with nil, that all of it can.
func (k *Kubernetes) reject(kind, name string, err error) {
	message := ""
	if err != nil {
		message = fmt.Sprintf("kubernetes: %s %s: %s", kind, name, kube.Shorten(err.Error()))
	}
	k.mu.Lock()
	key := kind + " " + name
	news := k.rejected[key] != message
	if delete(k.rejected, key); message != "" {
		k.rejected[key] = message
	}
	k.mu.Unlock()
	if news {
		k.Wake()
	}
}
