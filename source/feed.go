// SPDX-License-Identifier: Apache-2.0

package source

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/weftmesh/weft/service"
)

// Feed keeps the local services of a [service.Table] equal to what a source has.
type Feed struct {
	source Source
	as     service.Source
	table  *service.Table
	ready  chan struct{}

	// has are the services in the table. Only Run touches it.
	has map[service.Name]bool

	mu      sync.Mutex
	strange map[service.Name]string // what annotations say that cannot be; guarded by mu
}

// NewFeed assembles a feed. It does not run the source.
func NewFeed(source Source, as service.Source, table *service.Table) *Feed {
	return &Feed{
		source: source, as: as, table: table, ready: make(chan struct{}), has: make(map[service.Name]bool), strange: make(map[service.Name]string),
	}
}

func (f *Feed) String() string { return "local services of " + f.source.String() }

// Ready is closed once all services that the source had at first are in the table.
func (f *Feed) Ready() <-chan struct{} { return f.ready }

// Problems returns what keeps services from being read, or from being what they are meant to be.
func (f *Feed) Problems() []string {
	all := f.source.Problems()
	f.mu.Lock()
	defer f.mu.Unlock()
	first := len(all)
	for name, text := range f.strange {
		all = append(all, fmt.Sprintf("service %s: %s", name, text))
	}
	slices.Sort(all[first:])
	return all
}

// Run follows the source until ctx ends. What is in the table then stays.
func (f *Feed) Run(ctx context.Context) error {
	// A service whose backends have not been listed yet would be one without any.
	select {
	case <-f.source.Ready():
	case <-ctx.Done():
		return nil
	}
	var at Revision
	for {
		changed := f.source.Changed()
		at = f.take(at)
		select {
		case <-f.ready:
		default:
			close(f.ready)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// take brings the table up to date.
func (f *Feed) take(since Revision) Revision {
	changes, next, full := f.source.Changes(since)
	if full {
		there := make(map[service.Name]bool, len(changes))
		for _, c := range changes {
			there[c.Name] = true
		}
		for name := range f.has {
			if !there[name] {
				f.remove(name)
			}
		}
	}
	for _, c := range changes {
		if c.Service == nil {
			f.remove(c.Name)
			continue
		}
		l, err := makeLocal(c.Service, f.as)
		f.note(c.Name, err)
		f.table.PutLocal(l)
		f.has[c.Name] = true
	}
	return next
}

func (f *Feed) remove(name service.Name) {
	f.note(name, nil)
	f.table.DeleteLocal(f.as, name)
	delete(f.has, name)
}

func (f *Feed) note(name service.Name, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.strange, name)
	if err != nil {
		f.strange[name] = err.Error()
	}
}

// makeLocal turns a service into what the table needs of it. The error says which annotations have no effect.
func makeLocal(s *Service, as service.Source) (service.Local, error) {
	settings, err := service.ParseSettings(s.Annotations)
	settings.Global = settings.Global && s.Global
	settings.Shared = settings.Shared && settings.Global
	l := service.Local{
		Service: s.Name, Source: as, Settings: settings, Addrs: s.Addresses, Ports: makePorts(s.Ports), ClientAffinity: uint32(s.Affinity / time.Second),
	}
	for i := range s.Backends {
		b := &s.Backends[i]
		state := service.Ready
		switch {
		case !b.Usable():
			continue
		case !b.Ready:
			state = service.Draining
		}
		if n := len(l.Backends); n == 0 || l.Backends[n-1].State != state || !samePorts(l.Backends[n-1].Ports, b.Ports) {
			l.Backends = append(l.Backends, service.Subset{Ports: makePorts(b.Ports), State: state})
		}
		last := &l.Backends[len(l.Backends)-1]
		last.Addrs = append(last.Addrs, b.Addr)
	}
	l.Backends = merged(l.Backends)
	return l, err
}

// merged makes one of subsets that are reached at the same ports: one that is alone would cut its neighbours in two.
func merged(subsets []service.Subset) []service.Subset {
	var all []service.Subset
	for _, s := range subsets {
		i := slices.IndexFunc(all, func(other service.Subset) bool { return other.State == s.State && slices.Equal(other.Ports, s.Ports) })
		if i < 0 {
			all = append(all, s)
			continue
		}
		all[i].Addrs = append(all[i].Addrs, s.Addrs...)
	}
	return all
}

func makePorts(ports []Port) []service.NamedPort {
	made := make([]service.NamedPort, len(ports))
	for i, p := range ports {
		made[i] = service.NamedPort(p)
	}
	return made
}

func samePorts(made []service.NamedPort, ports []Port) bool {
	return slices.EqualFunc(made, ports, func(a service.NamedPort, b Port) bool { return a == service.NamedPort(b) })
}
