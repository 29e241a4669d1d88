// SPDX-License-Identifier: Apache-2.0

package endpoint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// How long the source waits between attempts to reach an API server: a node's agent must learn soon of pods that start
// after an outage, and a thousand of them must not keep the server from coming back.
const kubernetesRetry, kubernetesLongest = 500 * time.Millisecond, 15 * time.Second

// KubernetesConfig is what a [Kubernetes] works with.
type KubernetesConfig struct {
	// Kubeconfig is a file that says where the API server is. Empty: the service account of the pod that this runs in.
	Kubeconfig string
	// NodeName is the name of this node in Kubernetes.
	NodeName string
	Log      *slog.Logger
}

// Kubernetes is the source of workloads that are pods of this node. While the API server is away, what was known of it
// stays.
type Kubernetes struct {
	cfg    KubernetesConfig
	client *rest.RESTClient
	pods   *pods
	ready  chan struct{}
	// longest bounds the time between attempts; tests that cause many have less of it.
	longest time.Duration

	mu       sync.Mutex
	failures map[string]string // why a kind cannot be followed at present, by its name; guarded by mu
}

var _ Source = (*Kubernetes)(nil)

// NewKubernetes assembles a source. The API server need not be there; the error says that it is not known where it is.
func NewKubernetes(cfg KubernetesConfig) (*Kubernetes, error) {
	if cfg.NodeName == "" || cfg.Log == nil {
		return nil, errors.New("endpoint: a Kubernetes source needs NodeName and Log")
	}
	access, err := kubernetesAccess(cfg.Kubeconfig)
	if err != nil {
		return nil, err
	}
	client, err := kubernetesClient(access)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	return &Kubernetes{
		cfg: cfg, client: client, pods: newPods(), ready: make(chan struct{}), longest: kubernetesLongest,
		failures: make(map[string]string),
	}, nil
}

func kubernetesAccess(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		access, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("kubernetes: %w: outside of a pod, name a kubeconfig file", err)
		}
		return access, nil
	}
	access, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	return access, nil
}

// kubernetesClient knows the core group alone: a client of all groups would double the size of the binary.
func kubernetesClient(access *rest.Config) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	access = rest.CopyConfig(access)
	access.GroupVersion = &schema.GroupVersion{Version: "v1"}
	access.APIPath = "/api"
	access.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	access.ContentType, access.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	access.UserAgent = "weft"
	access.WarningHandler = rest.NoWarnings{}
	return rest.RESTClientFor(access)
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
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, kind := range []string{"namespaces", "pods"} {
		if message := k.failures[kind]; message != "" {
			problems = append(problems, SourceError{Message: message})
		}
	}
	return problems
}

// Run follows the API server until ctx ends.
func (k *Kubernetes) Run(ctx context.Context) error {
	ctx = klog.NewContext(ctx, logr.FromSlogHandler(quiet{k.cfg.Log.Handler()}))
	namespaces := newReplica(k.pods.putNamespace, k.pods.removeNamespace, k.pods.replaceNamespaces)
	own := newReplica(k.pods.put, k.pods.remove, k.pods.replace)
	defer utilnet.CloseIdleConnectionsFor(k.client.Client.Transport)
	var running sync.WaitGroup
	defer running.Wait()
	for _, r := range []*cache.Reflector{
		k.reflector("namespaces", fields.Everything(), new(corev1.Namespace), namespaces),
		k.reflector("pods", fields.OneTermEqualSelector("spec.nodeName", k.cfg.NodeName), new(corev1.Pod), own),
	} {
		running.Go(func() { r.RunWithContext(ctx) })
	}
	for _, listed := range []<-chan struct{}{namespaces.listed, own.listed} {
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

// reflector keeps a store equal to the objects of a kind: it lists and then watches, resumes a watch that ends, and lists
// again when the server has forgotten where that was.
func (k *Kubernetes) reflector(kind string, which fields.Selector, object runtime.Object, store cache.ReflectorStore) *cache.Reflector {
	request := func(options *metav1.ListOptions) *rest.Request {
		options.FieldSelector = which.String()
		return k.client.Get().Resource(kind).VersionedParams(options, metav1.ParameterCodec)
	}
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			list, err := request(&options).Do(ctx).Get()
			k.note(ctx, kind, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.Watch = true
			w, err := request(&options).Watch(ctx)
			k.note(ctx, kind, err)
			return w, err
		},
	}
	backoff := wait.Backoff{Duration: min(kubernetesRetry, k.longest), Factor: 2, Jitter: 1, Steps: 6, Cap: k.longest}
	return cache.NewReflectorWithOptions(source, object, store, cache.ReflectorOptions{Name: kind, Backoff: &backoff})
}

// note remembers why a kind cannot be followed, or that it can be again.
func (k *Kubernetes) note(ctx context.Context, kind string, err error) {
	if ctx.Err() != nil {
		return
	}
	message := ""
	if err != nil {
		message = fmt.Sprintf("kubernetes: %s cannot be followed, what was known of them stays in force: %s", kind, shorten(err.Error()))
		if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			message += ": the agent's account needs the verbs list and watch on pods and namespaces"
		}
	}
	k.mu.Lock()
	news := k.failures[kind] != message
	k.failures[kind] = message
	k.mu.Unlock()
	if news {
		k.pods.wake()
	}
}

// shorten bounds a text that a server sent.
func shorten(text string) string {
	const longest = 400
	if len(text) <= longest {
		return text
	}
	return strings.ToValidUTF8(text[:longest], "") + "..."
}

// replica is the store of a reflector: it hands on what comes and keeps nothing.
type replica[T runtime.Object] struct {
	put, remove func(T)
	replace     func([]T)
	listed      chan struct{} // closed once all objects have come for the first time
	once        sync.Once
}

var _ cache.ReflectorStore = (*replica[*corev1.Pod])(nil)

func newReplica[T runtime.Object](put, remove func(T), replace func([]T)) *replica[T] {
	return &replica[T]{put: put, remove: remove, replace: replace, listed: make(chan struct{})}
}

func (r *replica[T]) Add(object any) error    { return with(object, r.put) }
func (r *replica[T]) Update(object any) error { return with(object, r.put) }
func (r *replica[T]) Delete(object any) error { return with(object, r.remove) }
func (r *replica[T]) Resync() error           { return nil }

// Replace takes the whole set: what is not in it is gone, whatever events about it were missed.
func (r *replica[T]) Replace(objects []any, _ string) error {
	all := make([]T, 0, len(objects))
	for _, object := range objects {
		if err := with(object, func(o T) { all = append(all, o) }); err != nil {
			return err
		}
	}
	r.replace(all)
	r.once.Do(func() { close(r.listed) })
	return nil
}

func with[T runtime.Object](object any, do func(T)) error {
	typed, ok := object.(T)
	if !ok {
		return fmt.Errorf("kubernetes: the API server sent a %T where a %T was asked for", object, *new(T))
	}
	do(typed)
	return nil
}

// quiet hands on what the client library logs as details: what matters of it stands in Problems. What it takes for finer
// than details is whole messages of the server, which are nobody's business in a log.
type quiet struct{ slog.Handler }

func (q quiet) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelDebug && q.Handler.Enabled(ctx, slog.LevelDebug)
}

func (q quiet) Handle(ctx context.Context, r slog.Record) error {
	r.Level = slog.LevelDebug
	return q.Handler.Handle(ctx, r)
}

func (q quiet) WithAttrs(attrs []slog.Attr) slog.Handler { return quiet{q.Handler.WithAttrs(attrs)} }
func (q quiet) WithGroup(name string) slog.Handler       { return quiet{q.Handler.WithGroup(name)} }
