// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weftmesh/weft/identity"
	"github.com/weftmesh/weft/service"
	"github.com/weftmesh/weft/source"
)

// ServicesConfig says what a [Services] publishes.
type ServicesConfig struct {
	ClusterName string
	ClusterID   uint32
	Source      source.Source
	Form        ServiceForm
	// Withdrawn: nothing is published in this form. What was is left as it is for WithdrawAfter from when the term begins, the
	// time in which readers learn that services come in another form and have read them, and is then removed.
	Withdrawn     bool
	WithdrawAfter time.Duration
}

// Services publishes the cluster's global, shared services in one form: their keys, and no other key below the cluster's
// prefix. Before its source has been read for the first time it neither writes nor deletes: what the last leader published
// stays.
type Services struct {
	Record
	cfg ServicesConfig

	mu     sync.Mutex
	keeper *keeper // of the present term; guarded by mu
}

var _ Duty = (*Services)(nil)

// NewServices returns the duty.
func NewServices(cfg ServicesConfig) (*Services, error) {
	if cfg.ClusterName == "" || cfg.ClusterID == 0 || cfg.Source == nil {
		return nil, errors.New("operator: services are published by a cluster with a name and a number")
	}
	if cfg.Form == nil {
		return nil, errors.New("operator: services are published in a form")
	}
	return &Services{cfg: cfg}, nil
}

func (s *Services) String() string { return s.cfg.Form.String() }

// prefix is where the services of the cluster are, with "/" at its end.
func (c *ServicesConfig) prefix() string { return c.Form.prefix() + "/" + c.ClusterName + "/" }

// canary is where it stands that all of them are there.
func (c *ServicesConfig) canary() string { return canaryKey(c.ClusterName, c.Form.prefix()) }

// publishable is what other clusters are told of a service, nil for one that is gone: nothing unless it is global and shared.
func (c *ServicesConfig) publishable(s *source.Service) ([]keyValue, error) {
	if s == nil || !s.Global || c.Withdrawn || !exported(s.Annotations) {
		return nil, nil
	}
	return c.Form.values(s, c.ClusterName, c.ClusterID)
}

// Status tells what is published.
func (s *Services) Status() DutyStatus {
	status := s.Record.Status()
	status.Name = s.String()
	s.mu.Lock()
	k := s.keeper
	s.mu.Unlock()
	if k != nil {
		k.note(&status)
	}
	if status.Running && !closed(s.cfg.Source.Ready()) {
		status.Detail = "waits for " + s.cfg.Source.String() + "; what was published before stays"
	}
	return status
}

func (s *Services) setKeeper(k *keeper) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keeper = k
}

// Run publishes until the term ends.
func (s *Services) Run(ctx context.Context, t *Term) error {
	defer s.Running()()
	k := newKeeper(t, s.String(), s.cfg.prefix())
	s.setKeeper(k)
	defer s.setKeeper(nil)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return k.store.Run(ctx) })
	group.Go(func() error { return s.follow(ctx, k) })
	return group.Wait()
}

// follow says what should be published, and sweeps.
func (s *Services) follow(ctx context.Context, k *keeper) error {
	for _, ready := range []<-chan struct{}{s.cfg.Source.Ready(), k.store.Ready()} {
		select {
		case <-ctx.Done():
			return nil
		case <-ready:
		}
	}
	if s.cfg.Withdrawn {
		s.edit(func(status *DutyStatus) {
			status.Ready, status.Detail = true, fmt.Sprintf("off; what is left of it goes after %s", s.cfg.WithdrawAfter)
		})
		if !sleep(ctx, s.cfg.WithdrawAfter) {
			return nil
		}
	}
	var (
		at    source.Revision
		sweep <-chan time.Time
		told  bool // the canary
		again = retryLeast
	)
	for {
		changed := s.cfg.Source.Changed()
		begun := time.Now()
		changes, next, full := s.cfg.Source.Changes(at)
		if full || len(changes) > 0 {
			s.Round(begun, s.publish(k, changes, full), nil)
		}
		at = next
		if !told {
			if err := s.first(ctx, k); over(err) || ctx.Err() != nil {
				return err
			} else if err != nil {
				return fmt.Errorf("sweep what is left of an earlier life: %w", err)
			}
			told = true
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-k.strays:
			if sweep == nil {
				sweep = time.After(sweepDelay)
			}
		case begun := <-sweep:
			sweep = nil
			deleted, err := k.sweep(ctx)
			switch {
			case ctx.Err() != nil:
				return nil
			case over(err):
				return err
			case err != nil:
				again = min(2*again, retryMost)
				sweep = time.After(jitter(again))
			default:
				again = retryLeast
			}
			if deleted > 0 || err != nil {
				s.Round(begun, Outcome{Deleted: deleted, Detail: fmt.Sprintf("%d foreign keys removed", deleted)}, err)
			}
		}
	}
}

// first removes what an earlier life left, and then declares the services complete. Services that are withdrawn are declared
// nothing, and that before they go: whoever publishes them again must be waited for.
func (s *Services) first(ctx context.Context, k *keeper) error {
	if s.cfg.Withdrawn {
		kv, there, err := k.t.client.Get(ctx, s.cfg.canary())
		if err == nil && there {
			_, err = k.t.Delete(ctx, kv)
		}
		if err != nil {
			return err
		}
	}
	deleted, err := k.sweep(ctx)
	if deleted > 0 {
		s.edit(func(status *DutyStatus) { status.Deleted += uint64(deleted) })
	}
	if err == nil && !s.cfg.Withdrawn {
		k.store.Canary(s.cfg.canary(), canaryValue)
	}
	return err
}

// publish says what should be true of the services that have changed.
func (s *Services) publish(k *keeper, changes []source.Change, full bool) Outcome {
	deleted, problems := 0, 0
	there := make(map[service.Name]bool, len(changes))
	for _, c := range changes {
		there[c.Name] = true
		values, err := s.cfg.publishable(c.Service)
		if err != nil {
			problems++
			k.log.Warn("service cannot be published", "service", c.Name, "err", err)
		}
		deleted += k.assign(c.Name, values)
	}
	if full {
		deleted += k.retain(func(name service.Name) bool { return there[name] })
	}
	did := Outcome{Deleted: deleted, Detail: fmt.Sprintf("%d services looked at", len(changes))}
	if s.cfg.Withdrawn {
		did.Detail = "off"
	}
	if problems > 0 {
		did.Detail += fmt.Sprintf(", %d cannot be published", problems)
	}
	return did
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// canaryKey is where it stands that all of a prefix is there.
func canaryKey(cluster, prefix string) string {
	return identity.SyncedPrefix + "/" + cluster + "/" + prefix
}

func canaryValue() []byte { return []byte(time.Now().UTC().Format(time.RFC3339)) }
