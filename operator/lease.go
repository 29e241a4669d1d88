// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/weftmesh/weft/internal/kube"
	"github.com/weftmesh/weft/kvstore"
)

// LeaseName is the Lease by which replicas elect in Kubernetes.
const LeaseName = "weft-operator"

// leaseElector elects by a Lease of the Kubernetes API, as client-go's leaderelection does and together with it: whoever
// holds the Lease renews it, and another one may take it that has seen it unchanged for its whole duration, by its own
// clock. Client-go's own package would link a client of every kind there is, which is half the size of this binary.
type leaseElector struct {
	cfg    Election
	name   string
	client *rest.RESTClient
	log    *slog.Logger

	// What was last seen of the Lease, and since when by our clock.
	seen  coordinationv1.LeaseSpec
	since time.Time
}

func newLeaseElector(cfg Config) (*leaseElector, error) {
	access, err := kube.Access(cfg.Election.Kubeconfig, "weft-operator")
	if err != nil {
		return nil, err
	}
	if cfg.Election.Namespace == "" {
		return nil, errors.New("operator: an election in Kubernetes needs the namespace of its Lease")
	}
	// A request that hangs must not take the time in which another one could renew the Lease.
	access.Timeout = max(cfg.Election.RenewDeadline/2, time.Second)
	client, err := kube.Client(access, coordinationv1.SchemeGroupVersion, coordinationv1.AddToScheme)
	if err != nil {
		return nil, err
	}
	return &leaseElector{cfg: cfg.Election, name: cfg.Name, client: client, log: cfg.Log}, nil
}

// campaign waits until the Lease is held. It fails only with ctx: the API server may be away for long.
func (l *leaseElector) campaign(ctx context.Context, _ *kvstore.Client) (office, error) {
	var last string
	for {
		held, err := l.try(ctx)
		if held {
			return l.hold(ctx), nil
		}
		if text := errorText(err); text != last && ctx.Err() == nil {
			if last = text; err != nil {
				l.log.Warn("election: the Lease cannot be read or taken", "namespace", l.cfg.Namespace, "lease", LeaseName, "err", err)
			}
		}
		if !sleep(ctx, jitter(l.cfg.RetryPeriod)) {
			return office{}, ctx.Err()
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// try takes or renews the Lease, and reports whether it is held then.
func (l *leaseElector) try(ctx context.Context) (held bool, err error) {
	lease, err := l.get(ctx)
	now := metav1.NowMicro()
	switch {
	case apierrors.IsNotFound(err):
		return l.create(ctx, now)
	case err != nil:
		return false, err
	}
	if !sameHold(lease.Spec, l.seen) || l.since.IsZero() {
		l.seen, l.since = lease.Spec, time.Now()
	}
	holder := deref(lease.Spec.HolderIdentity)
	if holder != "" && holder != l.name && time.Since(l.since) < max(l.cfg.LeaseDuration, time.Duration(deref(lease.Spec.LeaseDurationSeconds))*time.Second) {
		return false, nil
	}
	if holder != l.name {
		lease.Spec.AcquireTime, lease.Spec.LeaseTransitions = &now, new(deref(lease.Spec.LeaseTransitions)+1)
	}
	l.claim(&lease.Spec, now)
	return l.update(ctx, lease) // refused with a conflict if anybody else was quicker
}

// claim writes this replica into a Lease.
func (l *leaseElector) claim(spec *coordinationv1.LeaseSpec, now metav1.MicroTime) {
	spec.HolderIdentity = &l.name
	spec.LeaseDurationSeconds = new(int32((l.cfg.LeaseDuration + time.Second - 1) / time.Second))
	spec.RenewTime = &now
}

func (l *leaseElector) create(ctx context.Context, now metav1.MicroTime) (held bool, err error) {
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: LeaseName, Namespace: l.cfg.Namespace}}
	lease.Spec.AcquireTime, lease.Spec.LeaseTransitions = &now, new(int32(0))
	l.claim(&lease.Spec, now)
	err = l.client.Post().Namespace(l.cfg.Namespace).Resource("leases").Body(lease).Do(ctx).Error()
	return err == nil, err
}

func (l *leaseElector) get(ctx context.Context) (*coordinationv1.Lease, error) {
	lease := new(coordinationv1.Lease)
	return lease, l.client.Get().Namespace(l.cfg.Namespace).Resource("leases").Name(LeaseName).Do(ctx).Into(lease)
}

func (l *leaseElector) update(ctx context.Context, lease *coordinationv1.Lease) (held bool, err error) {
	err = l.client.Put().Namespace(l.cfg.Namespace).Resource("leases").Name(LeaseName).Body(lease).Do(ctx).Error()
	return err == nil, err
}

// hold renews the Lease until it is lost or resigned.
func (l *leaseElector) hold(ctx context.Context) office {
	// Given up with resign, not with ctx: until the term has ended, nobody else should begin one.
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	lost := make(chan struct{})
	var renewing sync.WaitGroup
	renewing.Go(func() {
		defer close(lost)
		l.renew(ctx)
	})
	return office{
		lost:    lost,
		confirm: l.confirm,
		resign: func(ctx context.Context) error {
			stop()
			renewing.Wait()
			return l.release(ctx)
		},
	}
}

// renew returns when the Lease could not be renewed in time, is another's, or ctx ends.
func (l *leaseElector) renew(ctx context.Context) {
	renewed := time.Now()
	for sleep(ctx, jitter(l.cfg.RetryPeriod)) {
		begun := time.Now()
		if begun.Sub(renewed) >= l.cfg.RenewDeadline { // as after a suspension
			return
		}
		bounded, cancel := context.WithDeadline(ctx, renewed.Add(l.cfg.RenewDeadline))
		held, err := l.try(bounded)
		cancel()
		switch {
		case held:
			renewed = begun
		case err == nil: // another one holds it
			return
		default:
			l.log.Warn("election: the Lease could not be renewed", "err", err, "for", time.Since(renewed).Round(time.Millisecond), "deadline", l.cfg.RenewDeadline)
		}
	}
}

// confirm asks the API server whether this replica holds the Lease.
func (l *leaseElector) confirm(ctx context.Context) error {
	lease, err := l.get(ctx)
	if err == nil && deref(lease.Spec.HolderIdentity) != l.name {
		err = errLost
	}
	return err
}

// release lets another replica take the Lease at once, if this one still holds it.
func (l *leaseElector) release(ctx context.Context) error {
	lease, err := l.get(ctx)
	if err != nil || deref(lease.Spec.HolderIdentity) != l.name {
		return err
	}
	now := metav1.NowMicro()
	lease.Spec.HolderIdentity, lease.Spec.LeaseDurationSeconds = new(""), new(int32(1))
	lease.Spec.RenewTime, lease.Spec.AcquireTime = &now, &now
	_, err = l.update(ctx, lease)
	return err
}

// sameHold reports whether nobody has taken or renewed the Lease between two looks at it.
func sameHold(a, b coordinationv1.LeaseSpec) bool {
	return deref(a.HolderIdentity) == deref(b.HolderIdentity) && deref(a.LeaseTransitions) == deref(b.LeaseTransitions) &&
		a.RenewTime.Equal(b.RenewTime)
}

// deref returns what p points to, or the zero value.
func deref[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}
