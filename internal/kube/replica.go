// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
)

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
