// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
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
}

// Services publishes the cluster's global, shared services: a key for each, and no other key below the cluster's prefix.
// Before its source has been read for the first time it neither writes nor deletes: what the last leader published stays.
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
	return &Services{cfg: cfg}, nil
}

func (s *Services) String() string { return "services" }

// Prefix is where the services of a cluster are, with "/" at its end.
func (c ServicesConfig) prefix() string { return service.StatePrefix + "/" + c.ClusterName + "/" }

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
	group.Go(func() error { return k.run(ctx) })
	group.Go(func() error { return s.follow(ctx, k) })
	return group.Wait()
}

// follow says what should be published, and sweeps.
func (s *Services) follow(ctx context.Context, k *keeper) error {
	for _, ready := range []<-chan struct{}{s.cfg.Source.Ready(), k.listed} {
		select {
		case <-ctx.Done():
			return nil
		case <-ready:
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

// first removes what an earlier life left, and then declares the services complete.
func (s *Services) first(ctx context.Context, k *keeper) error {
	deleted, err := k.sweep(ctx)
	if deleted > 0 {
		s.edit(func(status *DutyStatus) { status.Deleted += uint64(deleted) })
	}
	if err == nil {
		k.writer.Canary(canaryKey(s.cfg.ClusterName, service.StatePrefix), canaryValue)
	}
	return err
}

// publish says what should be true of the services that have changed.
func (s *Services) publish(k *keeper, changes []source.Change, full bool) Outcome {
	deleted, problems := 0, 0
	published := make(map[string]bool, len(changes))
	for _, c := range changes {
		key := c.Namespace + "/" + c.Name.Name
		value, ok, err := publishable(c.Service, s.cfg.ClusterName, s.cfg.ClusterID)
		if err != nil {
			problems++
			k.log.Warn("service cannot be published", "service", c.Name, "err", err)
		}
		if ok {
			published[key] = true
			k.set(key, value)
		} else if k.delete(key) {
			deleted++
		}
	}
	if full {
		deleted += k.retain(func(key string) bool { return published[key] })
	}
	did := Outcome{Deleted: deleted, Detail: fmt.Sprintf("%d services looked at", len(changes))}
	if problems > 0 {
		did.Detail += fmt.Sprintf(", %d cannot be published", problems)
	}
	return did
}

// publishable is what other clusters are told of a service; ok is false where that is nothing.
func publishable(s *source.Service, cluster string, clusterID uint32) (value []byte, ok bool, err error) {
	if s == nil || !s.Global {
		return nil, false, nil
	}
	if !exported(s.Annotations) {
		return nil, false, nil
	}
	value, err = json.Marshal(makeService(s, cluster, clusterID))
	return value, err == nil, err
}

// exported reports whether the annotations of a service say that other clusters may use its backends. What else they say
// wrongly is a matter of who serves it here.
func exported(annotations map[string]string) bool {
	settings, _ := service.ParseSettings(annotations)
	return settings.Global && settings.Shared
}

// makeService is a service as other clusters see it (format.md, A.7): with those backends that are ready, or still serve.
func makeService(from *source.Service, cluster string, clusterID uint32) service.Service {
	s := service.Service{
		Cluster: cluster, ClusterID: clusterID, Namespace: from.Namespace, Name: from.Name.Name, IncludeExternal: true, Shared: true,
		Labels: present(from.Labels), Selector: present(from.Selector), Frontends: make(map[netip.Addr]service.Ports),
		Backends: make(map[netip.Addr]service.Ports), Hostnames: make(map[netip.Addr]string), Zones: make(map[netip.Addr]service.Zone),
	}
	for _, addr := range from.Addresses {
		s.Frontends[addr] = wirePorts(from.Ports)
	}
	for i := range from.Backends {
		b := &from.Backends[i]
		if !b.Usable() {
			continue
		}
		s.Backends[b.Addr] = wirePorts(b.Ports)
		if b.Hostname != "" {
			s.Hostnames[b.Addr] = b.Hostname
		}
		if b.Zone != "" || len(b.ForZones) > 0 {
			z := service.Zone{Zone: b.Zone}
			for _, name := range b.ForZones {
				z.ForZones = append(z.ForZones, service.ForZone{Name: name})
			}
			s.Zones[b.Addr] = z
		}
	}
	return s
}

// present is a map that is written as one, where there is none, too.
func present(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}

func wirePorts(ports []source.Port) service.Ports {
	made := make(service.Ports, len(ports))
	for _, p := range ports {
		made[p.Name] = service.Port{Protocol: p.Protocol.String(), Port: p.Port}
	}
	return made
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
