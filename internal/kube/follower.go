// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// Bounds of the pause between attempts to reach an API server: who waits for it must learn soon of what happens after an
// outage, and a thousand of them must not keep it from coming back.
const retryLeast, retryMost = 500 * time.Millisecond, 15 * time.Second

// Kind is a kind of objects to follow.
type Kind struct {
	Client *rest.RESTClient
	Name   string          // the plural, as in the server's paths
	Which  fields.Selector // nil: all
	Object runtime.Object  // an empty one
	Store  Store
}

// Store takes the objects of a kind; a [Replica] is one.
type Store interface {
	cache.ReflectorStore
	// Listed is closed once all objects have come for the first time.
	Listed() <-chan struct{}
}

// Config is what a [Follower] works with.
type Config struct {
	// Needs says what rights following needs, to whoever reads that the server refuses it.
	Needs string
	// Longest bounds the pause between attempts to reach the server; 0: 15 s.
	Longest time.Duration
	// Changed is called, never while a lock is held, when Problems has another answer. May be nil.
	Changed func()
	Log     *slog.Logger
}

// Follower keeps stores equal to the objects that an API server has, and knows which kinds cannot be followed at present:
// what was known of those stays. All methods may be called concurrently.
type Follower struct {
	cfg     Config
	running sync.WaitGroup

	mu       sync.Mutex
	listed   []<-chan struct{} // of the kinds that are followed; guarded by mu
	failures map[string]string // why a kind cannot be followed, by its name; guarded by mu
}

// NewFollower assembles a follower of nothing.
func NewFollower(cfg Config) *Follower {
	if cfg.Longest == 0 {
		cfg.Longest = retryMost
	}
	return &Follower{cfg: cfg, failures: make(map[string]string)}
}

// Retry is how long to wait before a first and, at most, before any further attempt to reach the server.
func (f *Follower) Retry() (least, most time.Duration) {
	return min(retryLeast, f.cfg.Longest), f.cfg.Longest
}

// Follow begins to keep the stores of kinds equal to what the server has, until ctx ends: each is listed and then watched, a
// watch that ends is resumed, and what the server has forgotten the history of is listed again. Wait must be called after it.
func (f *Follower) Follow(ctx context.Context, kinds ...Kind) {
	ctx = klog.NewContext(ctx, logr.FromSlogHandler(quiet{f.cfg.Log.Handler()}))
	for _, k := range kinds {
		f.mu.Lock()
		f.listed = append(f.listed, k.Store.Listed())
		f.mu.Unlock()
		f.running.Go(func() {
			f.reflector(k).RunWithContext(ctx)
			utilnet.CloseIdleConnectionsFor(k.Client.Client.Transport)
		})
	}
}

// Listed waits until all objects of the kinds that are followed have come, and reports whether ctx still lives.
func (f *Follower) Listed(ctx context.Context) bool {
	f.mu.Lock()
	all := slices.Clone(f.listed)
	f.mu.Unlock()
	for _, listed := range all {
		select {
		case <-listed:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// Wait returns when nothing is followed any more.
func (f *Follower) Wait() { f.running.Wait() }

// Problems returns which kinds cannot be followed, and why, by their names.
func (f *Follower) Problems() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []string
	for _, kind := range slices.Sorted(maps.Keys(f.failures)) {
		all = append(all, f.failures[kind])
	}
	return all
}

// Note remembers why a kind cannot be followed, or, with nil, that it can be again.
func (f *Follower) Note(kind string, err error) {
	message := ""
	if err != nil {
		message = fmt.Sprintf("kubernetes: %s cannot be followed, what was known of them stays in force: %s", kind, refusal(err, f.cfg.Needs))
	}
	f.mu.Lock()
	news := f.failures[kind] != message
	if delete(f.failures, kind); message != "" {
		f.failures[kind] = message
	}
	f.mu.Unlock()
	if news && f.cfg.Changed != nil {
		f.cfg.Changed()
	}
}

func (f *Follower) reflector(k Kind) *cache.Reflector {
	request := func(options *metav1.ListOptions) *rest.Request {
		if k.Which != nil {
			options.FieldSelector = k.Which.String()
		}
		return k.Client.Get().Resource(k.Name).VersionedParams(options, metav1.ParameterCodec)
	}
	note := func(ctx context.Context, err error) {
		if ctx.Err() == nil {
			f.Note(k.Name, err)
		}
	}
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			list, err := request(&options).Do(ctx).Get()
			note(ctx, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.Watch = true
			w, err := request(&options).Watch(ctx)
			note(ctx, err)
			return w, err
		},
	}
	least, most := f.Retry()
	backoff := wait.Backoff{Duration: least, Factor: 2, Jitter: 1, Steps: 6, Cap: most}
	return cache.NewReflectorWithOptions(source, k.Object, k.Store, cache.ReflectorOptions{Name: k.Name, Backoff: &backoff})
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
