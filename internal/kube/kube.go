// SPDX-License-Identifier: Apache-2.0

// Package kube owns how weft talks to an API server of Kubernetes: clients that know the groups they need and no others,
// and reflectors that hand on objects instead of keeping them. What the objects mean is its callers' business.
package kube

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// Bounds of the pause between attempts to reach an API server: who waits for it must learn soon of what happens after an
// outage, and a thousand of them must not keep it from coming back.
const retryLeast, retryMost = 500 * time.Millisecond, 15 * time.Second

// Access reads where an API server is and how one is known there: from a kubeconfig file or, where none is named, from the
// service account of the pod that this runs in. agent is what it is called in the server's log.
func Access(kubeconfig, agent string) (*rest.Config, error) {
	var (
		access *rest.Config
		err    error
	)
	if kubeconfig == "" {
		if access, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("kubernetes: %w: outside of a pod, name a kubeconfig file", err)
		}
	} else if access, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	access = rest.CopyConfig(access)
	access.UserAgent = agent
	access.WarningHandler = rest.NoWarnings{}
	return access, nil
}

// Client returns a client of one group, whose types add knows: one of all groups would double the size of the binary. The
// API server need not be there.
func Client(access *rest.Config, group schema.GroupVersion, add func(*runtime.Scheme) error) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	if err := add(scheme); err != nil {
		return nil, err
	}
	access = rest.CopyConfig(access)
	access.GroupVersion = &group
	access.APIPath = "/apis"
	if group.Group == "" {
		access.APIPath = "/api"
	}
	access.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	access.ContentType, access.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	client, err := rest.RESTClientFor(access)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	return client, nil
}

// Kind is a kind of objects to follow.
type Kind struct {
	Client *rest.RESTClient
	Name   string // the plural, as in the server's paths
	Which  fields.Selector
	Object runtime.Object // an empty one
	Store  cache.ReflectorStore
	// Noted is told the result of each list and each watch that was begun: nil, or why the kind cannot be followed.
	Noted func(err error)
	// Longest bounds the pause between attempts; 0: 15 s.
	Longest time.Duration
}

// Follow keeps the kind's store equal to what the server has until ctx ends: it lists and then watches, resumes a watch that
// ends, and lists again when the server has forgotten where that was.
func Follow(ctx context.Context, log *slog.Logger, k Kind) {
	request := func(options *metav1.ListOptions) *rest.Request {
		if k.Which != nil {
			options.FieldSelector = k.Which.String()
		}
		return k.Client.Get().Resource(k.Name).VersionedParams(options, metav1.ParameterCodec)
	}
	note := func(err error) {
		if ctx.Err() == nil {
			k.Noted(err)
		}
	}
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			list, err := request(&options).Do(ctx).Get()
			note(err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.Watch = true
			w, err := request(&options).Watch(ctx)
			note(err)
			return w, err
		},
	}
	longest := k.Longest
	if longest == 0 {
		longest = retryMost
	}
	backoff := wait.Backoff{Duration: min(retryLeast, longest), Factor: 2, Jitter: 1, Steps: 6, Cap: longest}
	ctx = klog.NewContext(ctx, logr.FromSlogHandler(quiet{log.Handler()}))
	cache.NewReflectorWithOptions(source, k.Object, k.Store, cache.ReflectorOptions{Name: k.Name, Backoff: &backoff}).RunWithContext(ctx)
}

// Refusal is what to say of an error of the server, with what to do where it is about rights.
func Refusal(err error, needs string) string {
	text := Shorten(err.Error())
	if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
		text += ": " + needs
	}
	return text
}

// Shorten bounds a text that a server sent.
func Shorten(text string) string {
	const longest = 400
	if len(text) <= longest {
		return text
	}
	return strings.ToValidUTF8(text[:longest], "") + "..."
}

// Replica is the store of a kind: it hands on what comes and keeps nothing.
type Replica[T runtime.Object] struct {
	put, remove func(T)
	replace     func([]T)
	listed      chan struct{} // closed once all objects have come for the first time
	once        sync.Once
}

// NewReplica returns a store that calls put and remove for single objects, and replace with all there are: what is not
// among them is gone, whatever events about it were missed. It never calls two of them at a time.
func NewReplica[T runtime.Object](put, remove func(T), replace func([]T)) *Replica[T] {
	return &Replica[T]{put: put, remove: remove, replace: replace, listed: make(chan struct{})}
}

// Listed is closed once all objects have come for the first time.
func (r *Replica[T]) Listed() <-chan struct{} { return r.listed }

// Add hands on an object that is new.
func (r *Replica[T]) Add(object any) error { return with(object, r.put) }

// Update hands on an object that has changed.
func (r *Replica[T]) Update(object any) error { return with(object, r.put) }

// Delete hands on an object that is gone.
func (r *Replica[T]) Delete(object any) error { return with(object, r.remove) }

// Resync has nothing to do.
func (r *Replica[T]) Resync() error { return nil }

// Replace hands on all objects.
func (r *Replica[T]) Replace(objects []any, _ string) error {
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

// quiet hands on what the client library logs as details: what matters of it is told in other ways. What it takes for finer
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
