// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// policy names a policy.
type policy struct{ namespace, name string }

// policies are those of one kind, as far as they are used: which nodes report in their status.
type policies struct {
	kind   string
	sub    bool          // the status is a resource of its own
	listed chan struct{} // closed once all are known
	cancel context.CancelFunc
	done   chan struct{}
	marks  map[policy][]string // nodes that were gone in the last round; of the duty's goroutine alone

	mu    sync.Mutex
	nodes map[policy][]string // guarded by mu, as is err
	err   error               // why they cannot be followed at present
}

var _ cache.ReflectorStore = (*policies)(nil)

// followPolicies follows the policies of a kind until ctx ends or stop is called.
func followPolicies(ctx context.Context, client dynamic.Interface, kind string, sub bool, log *slog.Logger) *policies {
	ctx, cancel := context.WithCancel(klog.NewContext(ctx, logr.FromSlogHandler(slog.DiscardHandler)))
	p := &policies{
		kind: kind, sub: sub, listed: make(chan struct{}), cancel: cancel, done: make(chan struct{}), marks: make(map[policy][]string),
		nodes: make(map[policy][]string),
	}
	all := client.Resource(schema.GroupVersionResource{Group: "cilium.io", Version: "v2", Resource: kind})
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			list, err := all.List(ctx, options)
			p.note(err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			w, err := all.Watch(ctx, options)
			p.note(err)
			return w, err
		},
	}
	r := cache.NewReflectorWithOptions(source, new(unstructured.Unstructured), p, cache.ReflectorOptions{Name: kind})
	log.Debug("policies are followed", "resource", kind)
	go func() {
		defer close(p.done)
		r.RunWithContext(ctx)
	}()
	return p
}

// stop ends following.
func (p *policies) stop() {
	p.cancel()
	<-p.done
}

func (p *policies) note(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
}

// problem is why they cannot be followed at present, nil if they are.
func (p *policies) problem() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		return fmt.Errorf("kubernetes: %s cannot be followed: %w", p.kind, p.err)
	}
	return nil
}

// policyListPatience is how long a round waits for policies that are listed for the first time.
const policyListPatience = 30 * time.Second

// await waits until all are known, and returns why they are not, or are not followed any more.
func (p *policies) await(ctx context.Context) error {
	patience := time.NewTimer(policyListPatience)
	defer patience.Stop()
	select {
	case <-p.listed:
		return p.problem()
	case <-ctx.Done():
		return ctx.Err()
	case <-patience.C:
		return cmp.Or(p.problem(), fmt.Errorf("kubernetes: %s are not listed after %s", p.kind, policyListPatience))
	}
}

// snapshot returns which nodes report in which policy.
func (p *policies) snapshot() map[policy][]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.nodes)
}

// gone returns the nodes that report in policies and are not there, nor were in the round before.
func (p *policies) gone(reports map[policy][]string, nodes map[string]bool) map[policy][]string {
	gone, next := make(map[policy][]string), make(map[policy][]string)
	for at, names := range reports {
		now := absent(names, nodes)
		if len(now) > 0 {
			next[at] = now
		}
		before := p.marks[at]
		if now = slices.DeleteFunc(slices.Clone(now), func(name string) bool { return !slices.Contains(before, name) }); len(now) > 0 {
			gone[at] = now
		}
	}
	p.marks = next
	return gone
}

// absent returns those of names that there are no nodes of, in order.
func absent(names []string, nodes map[string]bool) []string {
	gone := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return nodes[name] })
	slices.Sort(gone)
	return gone
}

// cleared notes that the reports of nodes were removed from a policy, which the watch will tell some time.
func (p *policies) cleared(at policy, gone []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	left := slices.DeleteFunc(slices.Clone(p.nodes[at]), func(name string) bool { return slices.Contains(gone, name) })
	if len(left) == 0 {
		delete(p.nodes, at)
		return
	}
	p.nodes[at] = left
}

// Add implements cache.ReflectorStore.
func (p *policies) Add(o any) error { return p.put(o) }

// Update implements cache.ReflectorStore.
func (p *policies) Update(o any) error { return p.put(o) }

// Resync implements cache.ReflectorStore.
func (p *policies) Resync() error { return nil }

// Delete implements cache.ReflectorStore.
func (p *policies) Delete(o any) error {
	at, _, err := policyOf(o)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.nodes, at)
	return nil
}

// Replace implements cache.ReflectorStore.
func (p *policies) Replace(all []any, _ string) error {
	nodes := make(map[policy][]string, len(all))
	for _, o := range all {
		at, reports, err := policyOf(o)
		if err != nil {
			return err
		}
		if len(reports) > 0 {
			nodes[at] = reports
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.nodes = nodes
	select {
	case <-p.listed:
	default:
		close(p.listed)
	}
	return nil
}

func (p *policies) put(o any) error {
	at, reports, err := policyOf(o)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(reports) == 0 {
		delete(p.nodes, at)
	} else {
		p.nodes[at] = reports
	}
	return nil
}

// policyOf takes what is used from an object: its name and the nodes that report in it.
func policyOf(o any) (at policy, reports []string, err error) {
	u, ok := o.(*unstructured.Unstructured)
	if !ok {
		return policy{}, nil, fmt.Errorf("kubernetes: the API server sent a %T where a policy was asked for", o)
	}
	at = policy{u.GetNamespace(), u.GetName()}
	// A status of another shape is none that a node reports in.
	nodes, _, _ := unstructured.NestedFieldNoCopy(u.Object, "status", "nodes")
	byName, _ := nodes.(map[string]any)
	return at, slices.Collect(maps.Keys(byName)), nil
}
