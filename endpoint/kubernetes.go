// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"errors"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"

	"github.com/weftmesh/weft/internal/kube"
)

// KubernetesConfig is what a [Kubernetes] works with.
type KubernetesConfig struct {
	// Kubeconfig is a file that says where the API server is. Empty: the service account of the pod that this runs in.
	Kubeconfig string
	// NodeName is the name of this node in Kubernetes.
	NodeName string
	// Longest bounds the pause between attempts to reach the server; 0: 15 s.
	Longest time.Duration
	Log     *slog.Logger
}

// Kubernetes is the source of workloads that are pods of this node. While the API server is away, what was known of it
// stays.
type Kubernetes struct {
	nodeName string
	client   *rest.RESTClient
	follower *kube.Follower
	pods     *pods
	ready    chan struct{}
}

var _ Source = (*Kubernetes)(nil)

// NewKubernetes assembles a source. The API server need not be there; the error says that it is not known where it is.
func NewKubernetes(cfg KubernetesConfig) (*Kubernetes, error) {
	if cfg.NodeName == "" || cfg.Log == nil {
		return nil, errors.New("endpoint: a Kubernetes source needs NodeName and Log")
	}
	access, err := kube.Access(cfg.Kubeconfig, "weft")
	if err != nil {
		return nil, err
	}
	client, err := kube.Client(access, corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return nil, err
	}
	pods := newPods()
	return &Kubernetes{
		nodeName: cfg.NodeName, client: client, pods: pods, ready: make(chan struct{}),
		follower: kube.NewFollower(kube.Config{
			Needs: "the agent's account needs the verbs list and watch on pods and namespaces", Longest: cfg.Longest, Changed: pods.wake, Log: cfg.Log,
		}),
	}, nil
}

func (k *Kubernetes) String() string { return kubernetesSource }

// Ready is closed once the pods of this node and the namespaces have been listed.
func (k *Kubernetes) Ready() <-chan struct{} { return k.ready }

// Changed returns a channel that closes at the next change of what Workloads or Problems return.
func (k *Kubernetes) Changed() <-chan struct{} {
	k.pods.mu.Lock()
	defer k.pods.mu.Unlock()
	return k.pods.changed
}

// Workloads returns the pods of this node that have an address of their own, by namespace and name.
func (k *Kubernetes) Workloads() []Workload {
	all, _ := k.pods.workloads()
	return all
}

// Problems returns what keeps the API server or some pods from being followed.
func (k *Kubernetes) Problems() []SourceError {
	_, problems := k.pods.workloads()
	for _, message := range k.follower.Problems() {
		problems = append(problems, SourceError{Message: message})
	}
	return problems
}

// Run follows the API server until ctx ends.
func (k *Kubernetes) Run(ctx context.Context) error {
	namespaces := kube.NewReplica(k.pods.putNamespace, k.pods.removeNamespace, k.pods.replaceNamespaces)
	own := kube.NewReplica(k.pods.put, k.pods.remove, k.pods.replace)
	which := fields.OneTermEqualSelector("spec.nodeName", k.nodeName)
	k.follower.Follow(ctx,
		kube.Kind{Client: k.client, Name: "namespaces", Object: new(corev1.Namespace), Store: namespaces},
		kube.Kind{Client: k.client, Name: "pods", Which: which, Object: new(corev1.Pod), Store: own},
	)
	defer k.follower.Wait()
	if k.follower.Listed(ctx) {
		close(k.ready)
	}
	<-ctx.Done()
	return nil
}
