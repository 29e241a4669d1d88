// SPDX-License-Identifier: Apache-2.0

package source

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	utilnet "k8s.io/apimachinery/pkg/util/net"
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
	cfg    KubernetesConfig
	core   *rest.RESTClient
	slices *rest.RESTClient
	ready  chan struct{}

	// owners are the services of the slices that are known. Only the reflector of slices touches it.
	owners map[string]service.Name

	mu       sync.Mutex
	failures map[string]string // why a kind cannot be followed at present, by its name; guarded by mu
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
		Table: NewTable(cfg.DefaultGlobal), cfg: cfg, ready: make(chan struct{}), owners: make(map[string]service.Name),
		failures: make(map[string]string), rejected: make(map[string]string),
	}
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
	var all []string
	for _, texts := range []map[string]string{k.failures, k.rejected} {
		for _, text := range texts {
			all = append(all, text)
		}
	}
	slices.Sort(all)
	return all
}

// Run follows the API server until ctx ends.
func (k *Kubernetes) Run(ctx context.Context) error {
	defer utilnet.CloseIdleConnectionsFor(k.core.Client.Transport)
	defer utilnet.CloseIdleConnectionsFor(k.slices.Client.Transport)
	var running sync.WaitGroup
	defer running.Wait()
	follow := func(kind kube.Kind) {
		kind.Longest = k.cfg.Longest
		kind.Noted = func(err error) { k.note(kind.Name, err) }
		running.Go(func() { kube.Follow(ctx, k.cfg.Log, kind) })
	}
	namespaces := kube.NewReplica(k.putNamespace, k.removeNamespace, k.replaceNamespaces)
	follow(kube.Kind{Client: k.core, Name: "namespaces", Object: new(corev1.Namespace), Store: namespaces})
	services := kube.NewReplica(k.putService, k.removeService, k.replaceServices)
	follow(kube.Kind{Client: k.core, Name: "services", Object: new(corev1.Service), Store: services})
	sliced, ok := k.hasSlices(ctx)
	if !ok {
		return nil
	}
	backends, listed := k.endpoints()
	if sliced {
		s := kube.NewReplica(k.putSlice, k.removeSlice, k.replaceSlices)
		backends, listed = kube.Kind{Client: k.slices, Name: "endpointslices", Object: new(discoveryv1.EndpointSlice), Store: s}, s.Listed()
	}
	follow(backends)
	for _, listed := range []<-chan struct{}{namespaces.Listed(), services.Listed(), listed} {
		select {
		case <-listed:
		case <-ctx.Done():
			return nil
		}
	}
	close(k.ready)
	<-ctx.Done()
	return nil
}

// hasSlices asks the server, for as long as it takes, whether it knows EndpointSlices. ok is false when ctx has ended.
func (k *Kubernetes) hasSlices(ctx context.Context) (sliced, ok bool) {
	pause := 500 * time.Millisecond
	for {
		err := k.slices.Get().Do(ctx).Error() // the group itself: what resources it has
		switch {
		case ctx.Err() != nil:
			return false, false
		case err == nil || apierrors.IsForbidden(err): // who may not look at groups may follow slices all the same
			k.note("endpointslices", nil)
			return true, true
		case apierrors.IsNotFound(err):
			k.note("endpointslices", nil)
			return false, true
		}
		k.note("endpointslices", err)
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return false, false
		case <-timer.C:
		}
		if pause *= 2; pause > 15*time.Second || k.cfg.Longest > 0 && pause > k.cfg.Longest {
			pause /= 2
		}
	}
}

// note remembers why a kind cannot be followed, or that it can be again.
func (k *Kubernetes) note(kind string, err error) {
	message := ""
	if err != nil {
		message = fmt.Sprintf("kubernetes: %s cannot be followed, what was known of them stays in force: %s", kind,
			kube.Refusal(err, "the account needs the verbs list and watch on namespaces, services and endpointslices"))
	}
	k.remember(k.failures, kind, message)
}

// reject remembers what of an object cannot be used, or, with nil, that all of it can.
func (k *Kubernetes) reject(kind, name string, err error) {
	message := ""
	if err != nil {
		message = fmt.Sprintf("kubernetes: %s %s: %s", kind, name, kube.Shorten(err.Error()))
	}
	k.remember(k.rejected, kind+" "+name, message)
}

func (k *Kubernetes) remember(in map[string]string, key, message string) {
	k.mu.Lock()
	news := in[key] != message
	if message == "" {
		delete(in, key)
	} else {
		in[key] = message
	}
	k.mu.Unlock()
	if news {
		k.Wake()
	}
}
